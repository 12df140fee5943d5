"""`meshwright.serve`: checks, starts the ranks of a checkpoint, and serves them over HTTP until a signal. Free of
torch."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from meshwright.checkpoint import find_checkpoint
from meshwright.comm.local import start_server
from meshwright.errors import RankLost, Terminated, UserError
from meshwright.launcher import rendezvous
from meshwright.launcher.host_memory import HostMemory
from meshwright.layout import Layout
from meshwright.names import check_options
from meshwright.planner.memory import GIB
from meshwright.planner.serving_ledger import ServingLedger, bill_text, parse_dtype
from meshwright.serving.memory import MAX_SEQUENCES, TOKEN_BUDGET, plan_memory
from meshwright.serving.messages import make_secret
from meshwright.serving.rank_starter import PRELOADED, JoinedStarter, LocalStarter, RankPlan
from meshwright.serving.replicas import QueueLimits, Replicas
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_path
from meshwright.spec.refuse import serving_layout
from meshwright.terminal import print_message
from meshwright.threads import choose_threads, prepare_process

if TYPE_CHECKING:
    from meshwright.serving.prompts import Prompts

EXTRA = ("fastapi", "uvicorn", "httptools", "uvloop", "prometheus_client")
"""What pip install "meshwright[serve]" brings."""


class ServeOptions(TypedDict, total=False):
    """Options of `serve`.

    Attributes:
        dtype: Of parameters and KV cache, such as `"bf16"`; `"float32"` unless given.
        memory: Fraction of this machine's or its control group's memory, such as `"0.9"`, or a size, such as `"12GiB"`;
            unless given 0.9 with a bounded pool of KV blocks.
        max_length: Most tokens of a prompt and its answer; the model's positions, or what fits, unless given.
        max_sequences: Most sequences of a step.
        token_budget: Most tokens of a step.
        host: Address to listen on; `"127.0.0.1"` unless given.
        port: Port to listen on, 0 for any; 8000 unless given.
        served_model_name: Name of the model in the API; that of the directory unless given.
        api_key_file: File with an API key a line, of which requests must name one.
        cors_origins: Origins whose pages may call the API, `"*"` for all; none unless given.
        queue_requests: Most requests that wait.
        queue_seconds: Longest predicted wait of a request in seconds.
        threads: Of each rank; the machine's cores over the ranks unless given.
        step_seconds: Longest step in seconds; a longer one counts as a lost rank.
        drain_seconds: Longest time that requests in flight get at the end.
    """

    dtype: str | None
    memory: str | None
    max_length: int | None
    max_sequences: int | None
    token_budget: int | None
    host: str
    port: int
    served_model_name: str | None
    api_key_file: str | Path | None
    cors_origins: Sequence[str]
    queue_requests: int | None
    queue_seconds: float | None
    threads: int | None
    step_seconds: float
    drain_seconds: float


def serve(
    path: str | Path,
    layout: Layout | str = "",
    *,
    on_ready: Callable[[dict[str, Any]], None] = lambda document: None,
    log: Callable[[str], None] = print_message,
    **options: Unpack[ServeOptions],
) -> None:
    """Serve a checkpoint over HTTP until SIGTERM or an interrupt; requests in flight are then finished.

    Started by torchrun or SLURM as one process for each rank, rank 0 also serves HTTP.

    Args:
        path: Run directory (its newest complete checkpoint), checkpoint, or Hugging Face directory.
        layout: Ranks, such as `"tp2 pp2 dp2"`; one rank unless given.
        on_ready: Called once when requests are taken, with `url`, `model`, `layout`, `dtype`, `kv_blocks`, `memory`,
            `seconds_to_ready`, `ranks`.
        log: Called with a line for each phase of the start, with its time, and for each lost rank.
        **options: Fields of `ServeOptions`.

    Raises:
        UserError: The checkpoint, the layout, the memory or an option does not do, or the port is in use.
        RankLost: Ranks were lost again and again.
        Terminated: After SIGTERM.
        KeyboardInterrupt: After an interrupt.

    Examples:
        >>> import meshwright as mw
        >>> mw.serve("runs/tiny", "pp9")
        Traceback (most recent call last):
        meshwright.errors.UserError: layout "pp9": pp9 makes 9 stages, but the model has 2 layers: some would be empty
    """
    check_options(serve, options, ServeOptions)
    prepare_process()  # before torch is loaded, here or in a rank
    began = time.perf_counter()
    place = rendezvous.place() if rendezvous.join_if_started_by_others() else None
    if place is not None and place.rank > 0:
        from meshwright.serving.ranks import serve_joined

        serve_joined(None)
        return
    start = _Start(Path(path), str(layout), options, place, log, began)
    with start:
        _run_until_signal(start.serve_until_signal(on_ready))


@dataclass
class _Phases:
    """Prints a line for each phase of the start with its time."""

    log: Callable[[str], None]
    last: float

    def end(self, what: str) -> None:
        """Print what has been done since the last call."""
        now = time.perf_counter()
        self.log(f"{what}: {now - self.last:.2f} s")
        self.last = now


class _Start:
    """Everything between the command line and a running server; as a context it owns the private directory."""

    def __init__(
        self, path: Path, layout: str, options: ServeOptions, place: rendezvous.Place | None,
        log: Callable[[str], None], began: float,
    ) -> None:  # fmt: skip
        """Check what can be checked without loading the model, cheapest first. Raises UserError."""
        missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
        if missing:
            raise UserError(f'serving needs {", ".join(missing)}: run pip install "meshwright[serve]"')
        self.options, self.began, self.log, self.phases = options, began, log, _Phases(log, began)
        self.checkpoint = find_checkpoint(path, log, check_hashes=False)
        self.name = options.get("served_model_name") or path.resolve().name
        self.config: ModelConfig = config_from_path(self.checkpoint)
        self.layout = serving_layout(layout, self.config)
        self.dtype = parse_dtype(options.get("dtype"))
        self.place = place
        if place is not None:
            rendezvous.check_world_size(place, self.layout)
        self.ledger = self._plan_memory()
        if place is None:
            start_server(PRELOADED)  # it loads torch meanwhile
        from meshwright.serving.http_server import open_socket

        self.keys = self._read_keys()
        self.socket: socket.socket = open_socket(options.get("host", "127.0.0.1"), options.get("port", 8000))
        self.directory = tempfile.mkdtemp(prefix="meshwright-serve-")

    def __enter__(self) -> _Start:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _read_keys(self) -> list[str]:
        """Return the API keys; none without a file."""
        from meshwright.serving.gate import read_api_keys

        path = self.options.get("api_key_file")
        return [] if path is None else list(read_api_keys(Path(path)))

    def _plan_memory(self) -> ServingLedger:
        """Return the bill of this machine's ranks, with the KV blocks."""
        budget = self.options.get("token_budget") or TOKEN_BUDGET
        sequences = self.options.get("max_sequences")
        steps = budget, min(MAX_SEQUENCES, budget) if sequences is None else sequences
        count = self.place.ranks // (self.place.host_ranks or self.place.ranks) if self.place is not None else 1
        hosts = [HostMemory.read()] * count  # machines of one job have the same memory
        memory, longest = self.options.get("memory"), self.options.get("max_length")
        return plan_memory(self.config, self.layout, self.dtype, memory, longest, steps=steps, hosts=hosts)

    async def serve_until_signal(self, on_ready: Callable[[dict[str, Any]], None]) -> int:
        """Start the ranks and serve; return the number of the signal that ended it."""
        loading = asyncio.create_task(asyncio.to_thread(self._load_front))
        replicas = self._make_replicas()
        starting = asyncio.create_task(replicas.start())
        try:
            await asyncio.wait((loading, starting), return_when=asyncio.FIRST_EXCEPTION)
            if loading.done() and loading.exception() is not None:
                await loading
            await starting
            self.phases.end(f"ranks started ({_describe_ranks(replicas)})")
            prompts = await loading
            self._print_bill(replicas)
            return await self._serve_http(replicas, prompts, on_ready)
        finally:
            starting.cancel()
            await replicas.close()

    def _load_front(self) -> Prompts:
        """Check the checkpoint's hashes and load the tokenizer."""
        from meshwright.serving.prompts import Prompts

        prompts = Prompts.of_directory(self.checkpoint, self.config, self.ledger.sizes.max_length)
        find_checkpoint(self.checkpoint, self.log)
        self.phases.end("checkpoint checked, tokenizer loaded")
        return prompts

    def _make_replicas(self) -> Replicas:
        """Return the replicas, not started."""
        ranks, sizes = self.layout.tp * self.layout.pp, self.ledger.sizes
        front = f"unix:{self.directory}/front"
        if self.place is not None:
            front = f"tcp:{_own_address(self.place)}"
        plan = RankPlan(
            checkpoint=str(self.checkpoint.resolve()), layout=str(self.layout), dtype=self.dtype,
            blocks=self.ledger.blocks, token_budget=sizes.token_budget, max_sequences=sizes.max_sequences,
            max_length=sizes.max_length, logit_rows=sizes.logit_rows,
            threads=self.options.get("threads") or self._choose_threads(), front=front, secret=make_secret(),
            directory=self.directory if self.place is None else None,
            step_seconds=self.options.get("step_seconds", 60.0),
        )  # fmt: skip
        limits = QueueLimits()
        if (requests := self.options.get("queue_requests")) is not None:
            limits = replace(limits, requests=requests)
        if (seconds := self.options.get("queue_seconds")) is not None:
            limits = replace(limits, seconds=seconds)
        starter = LocalStarter(ranks) if self.place is None else JoinedStarter()
        return Replicas(plan, starter, replicas=self.layout.dp, ranks=ranks, limits=limits, log=self.log)

    def _choose_threads(self) -> int:
        """Return the threads of each rank: an equal share of this machine's cores."""
        here = self.layout.world_size if self.place is None else self.place.host_ranks or self.place.ranks
        return choose_threads(here)

    def _print_bill(self, replicas: Replicas) -> None:
        """Print the predicted memory beside the measured one."""
        sizes = self.ledger.sizes
        self.log(
            f"memory: {self.ledger.blocks} KV blocks of 16 tokens on each rank, for {self.ledger.concurrency:.1f} "
            f"sequences of {sizes.max_length} tokens{' a replica' if self.layout.dp > 1 else ''}"
        )
        for line in bill_text(self.ledger, [hello["memory"] for hello in replicas.hellos.values()]):
            self.log(line)

    async def _serve_http(
        self, replicas: Replicas, prompts: Prompts, on_ready: Callable[[dict[str, Any]], None]
    ) -> int:
        """Serve HTTP until a signal, whose number is returned, or until the ranks are lost for good (RankLost)."""
        from meshwright.serving.gate import HttpSettings
        from meshwright.serving.http import create_app
        from meshwright.serving.http_server import serve_http

        app = create_app(replicas, prompts, HttpSettings(self.name, self.keys, self.options.get("cors_origins", ())))
        host, port = self.socket.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        seconds = time.perf_counter() - self.began
        self.phases.end("HTTP started")
        self.log(f"ready at {url} after {seconds:.2f} s")
        on_ready(
            {
                "url": url, "model": self.name, "layout": replicas.properties["layout"], "dtype": self.dtype,
                "kv_blocks": self.ledger.blocks, "memory": self._describe_memory(replicas),
                "seconds_to_ready": seconds, "ranks": replicas.rank_processes,
            }
        )  # fmt: skip
        drain = self.options.get("drain_seconds", 60.0)
        serving = asyncio.create_task(serve_http(app, self.socket, replicas, drain_seconds=drain))
        failing = asyncio.create_task(replicas.wait_for_failure())
        try:
            await asyncio.wait((serving, failing), return_when=asyncio.FIRST_COMPLETED)
            if replicas.failure is not None and not serving.done():
                await asyncio.sleep(0.2)  # the clients get their errors
                raise RankLost(f"the server gives up: {replicas.failure}")
            return await serving
        finally:
            serving.cancel()
            failing.cancel()

    def _describe_memory(self, replicas: Replicas) -> dict[str, Any]:
        """Return predicted and measured bytes by item over all ranks."""
        measured: dict[str, int] = {}
        for hello in replicas.hellos.values():
            for name, size in hello["memory"].items():
                measured[name] = measured.get(name, 0) + size
        predicted = {**self.ledger.items(), "total": self.ledger.total}
        return {"predicted": predicted, "measured": measured, "total_gib": self.ledger.total / GIB}


def _run_until_signal(main: Any) -> None:
    """Run the server on uvloop; raise Terminated or KeyboardInterrupt for the signal that ended it."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop, received = runner.get_loop(), list[int]()

        async def run() -> int:
            """Serve; a signal during the start cancels it. HTTP has handlers of its own."""
            task = asyncio.current_task()
            assert task is not None

            def stop(number: int) -> None:
                """Cancel the start."""
                received.append(number)
                task.cancel()

            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop, number)
            return int(await main)

        try:
            number = runner.run(run())
        except asyncio.CancelledError:
            number = received[0] if received else signal.SIGTERM
    if number == signal.SIGINT:
        raise KeyboardInterrupt("interrupted: the server has ended")
    raise Terminated("terminated: requests in flight were finished, the server has ended")


def _own_address(place: rendezvous.Place) -> str:
    """Return HOST:PORT, with a free port, at which the ranks of other nodes reach this one: the host of the
    rendezvous."""
    host = os.environ["MASTER_ADDR"] if place.method == "env://" else place.method.split("//")[-1].rpartition(":")[0]
    try:
        with socket.create_server((host, 0)) as listener:
            return f"{host}:{listener.getsockname()[1]}"
    except OSError as error:
        raise UserError(f"rank 0 cannot listen on {host}, where the ranks are to meet: {error}") from None


def _describe_ranks(replicas: Replicas) -> str:
    """Return how many ranks there are and what they compute with."""
    hellos = list(replicas.hellos.values())
    slowest = max(hello["seconds"] for hello in hellos)
    count = f"{len(hellos)} rank{'s' if len(hellos) > 1 else ''}"
    first = hellos[0]
    return f"{count}, {first['instruction_set']}, kernels {first['kernels']}, weights and pool in {slowest:.2f} s"
