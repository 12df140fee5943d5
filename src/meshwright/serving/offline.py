"""Engines without a server: in this process, or on local ranks that each call starts."""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.serving.engine import Engine, build_scheduler
from meshwright.serving.memory import plan_memory
from meshwright.serving.pipeline_engine import PipelineEngine
from meshwright.serving.request import Output, Request
from meshwright.serving.runner import build_runner
from meshwright.serving.sampling import InvalidLogits
from meshwright.serving.step_limits import StepLimits
from meshwright.serving.weights import decoder_config
from meshwright.threads import choose_threads

_SECONDS = 24 * 3600.0  # that a call may take
_LOOK_SECONDS = 0.05  # between looks whether ranks that write nothing have ended
_SCORED_ROWS = 256  # logits of a step that scores prompts


def build_offline_engine(directory: Path, mesh: Mesh, dtype: str, *, scoring: bool = False) -> Engine | PipelineEngine:
    """Build this rank's engine for a call's requests. Its KV pool becomes resident as it is used.

    `scoring`: for requests with `prompt_logprobs`, whose last token, a target alone, may lie behind the model's last
    position. Raises UserError where one sequence does not fit the memory.
    """
    config = decoder_config(directory)
    ledger = plan_memory(config, mesh.layout, dtype)
    sizes = ledger.sizes
    limits = StepLimits(
        ledger.blocks + scoring, sizes.token_budget, sizes.max_sequences, sizes.max_length + scoring,
        _SCORED_ROWS if scoring else 0, touched=False,
    )  # fmt: skip
    threads = choose_threads(mesh.layout.world_size)
    runner = build_runner(directory, mesh, dtype, limits, threads)
    scheduler = build_scheduler(config, limits, groups=mesh.pp.size)
    return Engine(runner, scheduler) if mesh.pp.size == 1 else PipelineEngine(runner, scheduler, mesh)


def run_requests(engine: Engine | PipelineEngine, requests: Sequence[Request]) -> Iterator[Output]:
    """Yield the outputs of requests until all have ended; those unfinished when the iterator is closed are cancelled.
    Raises InvalidLogits."""
    for request in requests:
        engine.add(request)
    try:
        while not engine.idle:
            for output in engine.step():
                if output.finish_reason == "error":
                    raise InvalidLogits("the model computes NaN or infinite logits: its weights are damaged")
                yield output
    finally:
        for request in requests:
            engine.cancel(request.id)


class LocalEngine:
    """An engine in this process, on a CPU or a GPU. `device`: "cpu" or "cuda"."""

    def __init__(self, directory: Path, dtype: str, device: str) -> None:
        self._engine = build_offline_engine(directory, Mesh.single(device=device), dtype)

    def run(self, requests: Sequence[Request]) -> Iterator[Output]:
        """Yield the outputs of requests until all have ended."""
        return run_requests(self._engine, requests)


class RanksEngine:
    """Engines on local ranks, connected by gloo. Each call starts the ranks and loads the model. `layout`: as
    `spec.refuse.serving_layout` returns it; replicas of dp share the requests."""

    def __init__(self, directory: Path, layout: Layout, dtype: str) -> None:
        self._directory, self._layout, self._dtype = directory, layout, dtype

    def run(self, requests: Sequence[Request]) -> Iterator[Output]:
        """Yield the outputs of requests until all have ended; closing the iterator ends the ranks."""
        if not requests:
            return
        size = self._layout.world_size
        documents = [request.to_json() for request in requests]
        with (
            tempfile.TemporaryDirectory(prefix="meshwright-outputs-") as directory,
            LocalRanks(size, threads=choose_threads(size)) as ranks,
        ):
            pipe = os.path.join(directory, "outputs")
            os.mkfifo(pipe)
            descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # for writing, too: it never ends, so none waits
            given = str(self._directory), str(self._layout), self._dtype, documents, pipe
            pool = ThreadPoolExecutor(1)
            try:
                answer = pool.submit(ranks.run, _run_on_rank, *given, timeout=_SECONDS)
                yield from _read_outputs(descriptor, answer)
                answer.result()
            finally:
                for process in ranks.pids:  # interrupted: `run` in the other thread then ends
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                pool.shutdown()
                os.close(descriptor)


def _read_outputs(descriptor: int, answer: Future[list[Any]]) -> Iterator[Output]:
    """Yield the outputs that the replicas' first ranks write to the pipe `descriptor`, one JSON object per line, until
    `answer` (of all ranks) is done."""
    unread = b""
    while True:
        ended = answer.done()  # before the last look: what was written before it is read
        if select.select([descriptor], [], [], 0.0 if ended else _LOOK_SECONDS)[0]:
            unread += os.read(descriptor, 65536)
            *lines, unread = unread.split(b"\n")
            yield from (Output.from_json(json.loads(line)) for line in lines)
        elif ended:
            return


def _run_on_rank(directory: str, layout: str, dtype: str, documents: list[dict[str, Any]], pipe: str) -> None:
    """Run this replica's share of the requests as one of its ranks; the first one writes the outputs to `pipe`."""
    mesh = Mesh.create(Layout.parse(layout))
    engine = build_offline_engine(Path(directory), mesh, dtype)
    requests = [Request.from_json(each) for each in documents[mesh.dp.rank :: mesh.dp.size]]
    leads = mesh.tp.rank == mesh.pp.rank == 0
    with open(pipe, "w") as lines:
        for output in run_requests(engine, requests):
            if leads:
                lines.write(json.dumps(output.to_json()) + "\n")  # shorter than a pipe's atomic write
                lines.flush()
    mesh.close()
