"""Generation without an HTTP server: by an engine in this process, or on local ranks that each call starts."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.launcher.device import read_device_memory
from meshwright.layout import Layout
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving.engine import Engine, build_engine
from meshwright.serving.memory import plan_memory
from meshwright.serving.rank_starter import LocalStarter, RankPlan
from meshwright.serving.replicas import Replicas
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import InvalidLogits
from meshwright.spec.block_tables import MAX_TABLES
from meshwright.spec.config_json import read_decoder_config
from meshwright.threads import choose_threads

_STEP_SECONDS = 24 * 3600.0  # long, as no client waits


def plan_offline(directory: Path, layout: Layout, dtype: str, device: str = "cpu") -> ServingSizes:
    """Choose the sizes of KV pool and buffers that each rank allocates to generate without a server, and its threads.

    directory: model directory. layout: layout of the ranks. dtype: name of the dtype of parameters and KV cache.
    device: "cpu" or "cuda". Raises UserError if one sequence does not fit in memory, or the model is an encoder.
    """
    hosts = [read_device_memory()] if device == "cuda" else None
    sizes = ServingSizes(dtype=dtype, threads=choose_threads(layout.world_size), resident=False)
    return plan_memory(read_decoder_config(directory), layout, sizes, hosts=hosts).sizes


def build_offline_engine(
    directory: Path, mesh: Mesh, dtype: str, *, scoring: bool = False, instruction_set: str | None = None
) -> Engine:
    """Build this rank's engine for generation without a server.

    directory: model directory. mesh: gives the device and the rank's coordinates. dtype: name of the dtype of
    parameters and KV cache. scoring: True: allow prompts of one token more than the model has positions, for requests
    with `prompt_logprobs`, which need no logits at the last token. instruction_set: instruction set of the CPU kernels;
    None: the fastest. Raises UserError if one sequence does not fit in memory, the model cannot be loaded, or its
    kernels cannot be built or run here.
    """
    sizes = plan_offline(directory, mesh.layout, dtype, mesh.device.type)
    if scoring:
        # One more block in each of the model's block tables.
        sizes = replace(sizes, blocks=sizes.blocks + MAX_TABLES, max_length=sizes.max_length + 1)
    return build_engine(RankPlan(str(directory), str(mesh.layout), sizes, instruction_set=instruction_set), mesh)


def run_requests(
    engine: Engine, requests: Sequence[Request], has_ended: Callable[[str], bool] = lambda request_id: False
) -> Iterator[Output]:
    """Run `requests` on an engine, and yield their outputs, interleaved, until every request has finished. Closing the
    iterator cancels the unfinished requests. Raises InvalidLogits if the model computes NaN or infinite logits, and
    UserError if the engine has unfinished requests of another call.

    has_ended: called with the ID of a request after each of its outputs; True: the request needs no more tokens (a stop
    string was found) and is cancelled.
    """
    if not engine.idle:
        raise UserError("this model has an unfinished stream: read it to its end or delete it first")
    for request in requests:
        engine.add(request)
    try:
        while not engine.idle:
            for output in engine.step():
                yield _check_output(output)
                if has_ended(output.request_id):
                    engine.cancel(output.request_id)
    finally:
        for request in requests:
            engine.cancel(request.id)
        if engine.ahead is not None:  # launched before its sequences were cancelled
            engine.step()


def _check_output(output: Output) -> Output:
    """Return `output` unchanged; raise InvalidLogits if its finish reason is "error"."""
    if output.finish_reason == "error":
        raise InvalidLogits("the model computes NaN or infinite logits: its weights are damaged")
    return output


def run_on_ranks(
    directory: Path, layout: Layout, dtype: str, instruction_set: str | None, requests: Sequence[Request],
    has_ended: Callable[[str], bool],
) -> Iterator[Output]:  # fmt: skip
    """Run `requests` on several rank processes of this machine, which this call starts, and yield their outputs,
    interleaved, until every request has finished. Closing the iterator ends the processes.

    directory: model directory. layout: result of `spec.refuse.serving_layout`; with dp > 1, requests are distributed
    over the replicas. dtype: name of the dtype of parameters and KV cache. instruction_set: instruction set of the CPU
    kernels, from `kernels.choice.prepare_kernels`, or None. has_ended: function (request ID) -> True if the request
    needs no more tokens; the request is then cancelled.
    """
    if not requests:
        return
    sizes = plan_offline(directory, layout, dtype)
    for request in requests:
        request.check_length(sizes.max_length)
    checkpoint = str(directory.resolve())
    plan = RankPlan(checkpoint, str(layout), sizes, step_seconds=_STEP_SECONDS, instruction_set=instruction_set)
    outputs = queue.SimpleQueue[Output | Exception]()
    replicas = Replicas(plan, LocalStarter())

    async def run() -> None:
        """Start the rank processes and submit all requests; end the processes when the task is cancelled."""
        try:
            await replicas.start()
            for request in requests:
                replicas.submit(request, outputs.put)
            await asyncio.Event().wait()
        except Exception as error:
            outputs.put(error)
        finally:
            await replicas.close()

    loop = asyncio.new_event_loop()  # of a thread, as the caller may have a running one
    work = loop.create_task(run())
    unfinished = {request.id for request in requests}
    with closing(loop), ThreadPoolExecutor(1, "ranks") as thread:
        thread.submit(loop.run_until_complete, work)
        try:
            while unfinished:
                if isinstance(output := outputs.get(), Exception):
                    raise output
                yield _check_output(output)
                if output.finish_reason is not None or has_ended(output.request_id):
                    unfinished.discard(output.request_id)
                    loop.call_soon_threadsafe(replicas.cancel, output.request_id)
        finally:
            loop.call_soon_threadsafe(work.cancel)
