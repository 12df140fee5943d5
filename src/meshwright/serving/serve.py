"""`meshwright.serve`: check a checkpoint and the options, start its ranks, and serve over HTTP until a signal. Free of
torch."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypedDict, Unpack

from meshwright.checkpoint import find_checkpoint
from meshwright.collectives.quantities import GIB
from meshwright.comm.local import PRELOADED_TO_SERVE, start_server
from meshwright.errors import Terminated, UserError
from meshwright.kernels.choice import prepare_kernels
from meshwright.launcher import rendezvous
from meshwright.launcher.daemon_thread import run_in_daemon_thread
from meshwright.launcher.device import choose_rank_devices
from meshwright.launcher.host_memory import HostMemory
from meshwright.launcher.signals import StopSignals
from meshwright.layout import Layout
from meshwright.names import check_options
from meshwright.planner.serving.ledger import ServingLedger, ServingSizes, bill_text, parse_dtype
from meshwright.serving.memory import DEFAULT_FRACTION, plan_memory
from meshwright.serving.rank_starter import JoinedStarter, LocalStarter, RankPlan
from meshwright.serving.replicas import Replicas, cancel_tasks
from meshwright.serving.waiting_line import QueueLimits
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_path
from meshwright.spec.refuse import serving_layout
from meshwright.terminal import print_message
from meshwright.threads import choose_threads, prepare_process

if TYPE_CHECKING:
    from meshwright.serving.prompts import Prompts

EXTRA = ("starlette", "uvicorn", "httptools", "uvloop", "prometheus_client")
"""Modules that pip install "meshwright[serve]" installs."""


class ServeOptions(TypedDict, total=False):
    """Options of `serve`; all may be left out.

    Attributes:
        device: `"cpu"`, `"cuda"` (a GPU for each rank), or `"auto"`, the default: GPUs if there are any.
        batch_invariant: On GPUs, make the bits of an answer independent of other requests; on a CPU they always are.
        dtype: Dtype of parameters and KV cache, such as `"bf16"`; default `"float32"`.
        memory: Fraction of the memory of this machine or its cgroup (`"0.9"`), or a size (`"12GiB"`); default 0.9, with
            a bounded KV pool.
        max_length: Maximum number of tokens of a prompt and its answer; default: the model's positions, or fewer if
            they do not fit.
        max_sequences: Maximum number of sequences of a step; default 64, or `token_budget` if that is less.
        token_budget: Maximum number of tokens of a step; default 576.
        host: Address to listen on; default `"127.0.0.1"`.
        port: Port to listen on, 0 for any free port; default 8000.
        served_model_name: Name of the model in the API; default: the directory's name.
        api_key_file: File of API keys, one per line; each request must have one of these keys; default: no key is
            needed.
        cors_origins: Origins whose web pages may call the API, `"*"` for all; default: none.
        queue_requests: Maximum number of requests that wait; default 512.
        queue_seconds: Maximum predicted seconds that a request waits; default 120.
        threads: Kernel threads of each rank; default: the machine's cores divided by its ranks.
        step_seconds: Maximum seconds of a step that computes, above which the replica counts as lost; default 60, more
            for steps with a long predicted time. A stopped rank, and a step in which all ranks sleep, is found within 2
            s.
        drain_seconds: Maximum seconds that unfinished requests get after a signal; default 60.
    """

    device: str
    batch_invariant: bool
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
        on_ready: Called once requests are accepted, with a dictionary of `url`, `model`, `layout`, `dtype`,
            `kv_blocks`, `memory`, `seconds_to_ready` and `ranks`.
        log: Called with a line for each phase of the start, with its time, and for each lost rank.
        **options: Fields of `ServeOptions`.

    Raises:
        UserError: The checkpoint, the layout, the memory or an option is invalid, or the port is in use.
        RankLost: A replica was lost several times in a row.
        Terminated: After SIGTERM.
        KeyboardInterrupt: After an interrupt.

    Examples:
        >>> import meshwright as mw
        >>> mw.serve("runs/tiny", "pp9")
        Traceback (most recent call last):
        meshwright.errors.UserError: layout "pp9": pp9 makes 9 stages, but the model has 2 layers: some would be empty
    """
    check_options(serve, options, ServeOptions)
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    prepare_process()  # before torch is loaded, here or in a rank
    phases = _StartupTimer(log)
    info = rendezvous.read_rendezvous_info() if rendezvous.is_started_by_others() else None
    if info is not None and info.rank > 0:
        from meshwright.serving.ranks import serve_joined

        serve_joined(None, given.get("device", "auto"))
        return
    if info is None:
        start_server(PRELOADED_TO_SERVE)  # it loads torch meanwhile
    model = _check_model(Path(path), str(layout), info, given, log)
    import uvloop

    from meshwright.serving.gate import HttpSettings, check_origins, read_api_keys
    from meshwright.serving.http import HttpApp
    from meshwright.serving.http_server import open_socket, serve_http, wait_for_signals

    keys = read_api_keys(Path(given["api_key_file"])) if "api_key_file" in given else ()
    origins = check_origins(given.get("cors_origins", ()))
    listener = open_socket(given.get("host", "127.0.0.1"), given.get("port", 8000))
    model = _prepare_kernels(model, phases)  # it may compile, which signals end as long as none is deferred
    name = given.get("served_model_name") or Path(path).resolve().name
    with StopSignals() as signals, closing(listener):
        replicas = _make_replicas(model, given, log)

        async def run() -> int:
            """Start and serve until a signal; return the number of unfinished requests."""
            starting = asyncio.create_task(_start_ranks(model, replicas, phases))
            signalled = asyncio.create_task(wait_for_signals(signals))
            try:
                await asyncio.wait((starting, signalled), return_when=asyncio.FIRST_COMPLETED)
                if signals.received:  # ranks may have ended by it, too: that is no lost rank
                    return 0
                prompts = starting.result()
                connections = raise_open_file_limit(max(1024, 2 * replicas.max_requests), log)
                app = HttpApp(replicas, prompts, HttpSettings(name, keys, origins, connections=connections))
                host, port = listener.getsockname()[:2]
                url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                seconds = time.perf_counter() - phases.began
                gc.freeze()  # a full collection would look through all modules, for 0.1 s without an answer
                phases.end("HTTP started")
                log(f"ready at {url} after {seconds:.2f} s")
                about = {key: replicas.properties[key] for key in ("layout", "dtype", "kv_blocks", "ranks")}
                memory = _describe_memory(model.ledger, replicas)
                on_ready({"url": url, "model": name, **about, "memory": memory, "seconds_to_ready": seconds})
                return await serve_http(app, listener, replicas, signals, given.get("drain_seconds", 60.0))
            finally:
                await cancel_tasks(starting)
                await replicas.close()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            unfinished = runner.run(run())
    _raise_end(signals.received[0], unfinished)


class _StartupTimer:
    """Timer that logs the duration of each phase of the server's start. log: called with one line per phase."""

    def __init__(self, log: Callable[[str], None]) -> None:
        """Start the clock of the first phase."""
        self.log, self.began = log, time.perf_counter()
        self._last = self.began

    def end(self, what: str) -> None:
        """Log that the phase `what` ("HTTP started") has ended, with the seconds since the previous phase ended."""
        now = time.perf_counter()
        self.log(f"{what}: {now - self._last:.2f} s")
        self._last = now


class _Settings(NamedTuple):
    """Checked settings of a server.

    checkpoint: model directory. config: configuration of the model. ledger: predicted memory, with layout, sizes and
    the number of KV blocks that fit. info: rank and rendezvous of this process if torchrun or SLURM started one process
    per rank, else None. device: "cpu" or "cuda". plan: `plan_memory` with all arguments bound except `compiled`.
    kernels: (instruction set, reason for plain torch) of CPU ranks, from `prepare_kernels`."""

    checkpoint: Path
    config: ModelConfig
    ledger: ServingLedger
    info: rendezvous.RendezvousInfo | None
    device: str
    plan: partial[ServingLedger]
    kernels: tuple[str | None, str] = (None, "")


def _check_model(
    path: Path, layout: str, info: rendezvous.RendezvousInfo | None, options: dict[str, Any], log: Callable[[str], None]
) -> _Settings:
    """Check everything that can be checked without loading the weights, and return the checked settings. path, layout,
    options, log: arguments of `serve`. info: rank of this process if torchrun or SLURM started one process per rank,
    else None. Raises UserError if an argument is invalid or the model does not fit in memory."""
    if missing := [name for name in EXTRA if importlib.util.find_spec(name) is None]:
        raise UserError(f'serving needs {", ".join(missing)}: run pip install "meshwright[serve]"')
    checkpoint = find_checkpoint(path, log, check_hashes=False)
    if any("\ud800" <= letter <= "\udfff" for letter in str(checkpoint.resolve())):  # as Python decodes other bytes
        raise UserError(f"{str(checkpoint.resolve())!a} is not UTF-8: rename the directory")
    config = config_from_path(checkpoint)
    reading, hosts = serving_layout(layout, config), 1
    if info is not None:
        rendezvous.check_world_size(info, reading)
        hosts = info.ranks // (info.host_ranks or info.ranks)
    budget = options.get("token_budget", ServingSizes().token_budget)
    sequences = options.get("max_sequences", min(ServingSizes().max_sequences, budget))
    threads = options.get("threads") or choose_threads(reading.world_size // hosts)
    sizes = ServingSizes(budget, sequences, dtype=parse_dtype(options.get("dtype")), threads=threads)
    gpus = choose_rank_devices(options.get("device", "auto"), reading.world_size // hosts)
    memory = options.get("memory", str(DEFAULT_FRACTION) if gpus else None)
    machines = (gpus or [HostMemory.read()]) * hosts  # those of one job have the same memory
    plan = partial(plan_memory, config, reading, sizes, memory, options.get("max_length"), hosts=machines)
    ledger = plan()
    if info is not None:
        log("one lost rank ends this server, as torchrun or SLURM started the ranks; running streams end with it")
    if gpus and options.get("device", "auto") == "auto":
        several = "; serving has run on one GPU, not on several yet" if reading.world_size > 1 else ""
        log(f"--device auto has found a GPU for each rank{several} (--device cpu serves without)")
    return _Settings(checkpoint, config, ledger, info, "cuda" if gpus else "cpu", plan)


def _prepare_kernels(model: _Settings, phases: _StartupTimer) -> _Settings:
    """Compile the kernels of CPU ranks if necessary, and return updated settings. If kernels can be used, the returned
    settings contain the kernels' instruction set; otherwise they contain the memory predicted for plain torch. Raises
    UserError if the layout needs kernels and none can be used.

    model: checked settings of the server. phases: logger of durations."""
    if model.device != "cpu":
        return model
    instruction_set, reason = prepare_kernels(model.ledger.sizes.dtype, model.ledger.layout, phases.log)
    phases.end("settings checked" if reason else f"settings checked, {instruction_set} kernels ready")
    ledger = model.plan(compiled=False) if reason else model.ledger
    return model._replace(ledger=ledger, kernels=(instruction_set, reason))


def _make_replicas(model: _Settings, options: dict[str, Any], log: Callable[[str], None]) -> Replicas:
    """Create the server's replicas, without starting their ranks. model: checked settings. options, log: arguments of
    `serve`."""
    info, ledger = model.info, model.ledger
    plan = RankPlan(
        str(model.checkpoint.resolve()), str(ledger.layout), ledger.sizes, options.get("step_seconds", 60.0),
        model.device if info is None else options.get("device", "auto"),
        options.get("batch_invariant", False), *model.kernels,
    )  # fmt: skip
    limits = QueueLimits(**{name: options[key] for name in QueueLimits._fields if (key := f"queue_{name}") in options})
    if info is None:
        return Replicas(plan, LocalStarter(), limits=limits, log=log)
    host = rendezvous.parse_host_and_port(info.method)[0]
    return Replicas(plan, JoinedStarter(), limits=limits, host=host, log=log)


async def _start_ranks(model: _Settings, replicas: Replicas, phases: _StartupTimer) -> Prompts:
    """Start the ranks of all `replicas`; meanwhile check the checkpoint's hashes and load the tokenizer. Return the
    tokenizer. model: checked settings. phases: logger of durations."""

    def load() -> Prompts:
        """Load the tokenizer, check the checkpoint's hashes, and return the tokenizer. That may take minutes, so it
        runs in a daemon thread, which a process that exits does not wait for."""
        from meshwright.serving.prompts import Prompts

        prompts = Prompts.from_directory(model.checkpoint, model.config, model.ledger.sizes.max_length)
        find_checkpoint(model.checkpoint, phases.log)
        phases.end("checkpoint checked, tokenizer loaded")
        return prompts

    async def start() -> None:
        """Start the ranks, and log how long it took."""
        await replicas.start()
        hellos = list(replicas.hellos.values())
        phases.end(
            f"ranks started ({len(hellos)} rank{'s' if len(hellos) > 1 else ''}, {hellos[0]['instruction_set']}, "
            f"kernels {hellos[0]['kernels']}, weights and pool in {max(each['seconds'] for each in hellos):.2f} s)"
        )

    prompts, _ = await asyncio.gather(asyncio.wrap_future(run_in_daemon_thread(load, "load")), start())
    ledger, each = model.ledger, " a replica" if model.ledger.layout.dp > 1 else ""
    phases.log(
        f"memory: {ledger.sizes.blocks} KV blocks of 16 tokens on each rank, for {ledger.concurrency:.1f} sequences of "
        f"{ledger.sizes.max_length} tokens{each}"
    )
    for line in bill_text(ledger, [hello["memory"] for hello in replicas.hellos.values()]):
        phases.log(line)
    return prompts


def _describe_memory(ledger: ServingLedger, replicas: Replicas) -> dict[str, Any]:
    """Return the memory of all ranks together: {"predicted": {item: bytes}, "measured": {kind: bytes}, "total_gib":
    predicted total in GiB}. ledger: predicted memory. replicas: replicas whose ranks have reported their measured
    memory."""
    measured = sum((Counter[str](hello["memory"]) for hello in replicas.hellos.values()), Counter[str]())
    predicted = {**ledger.items(), "total": ledger.total}
    return {"predicted": predicted, "measured": dict(measured), "total_gib": ledger.total / GIB}


def _raise_end(number: int, unfinished: int) -> NoReturn:
    """Raise KeyboardInterrupt if the signal with this `number` is SIGINT, else Terminated. unfinished: number of
    requests that were not finished."""
    flight = f"{unfinished} requests in flight were ended" if unfinished else "requests in flight were finished"
    error, word = (KeyboardInterrupt, "interrupted") if number == signal.SIGINT else (Terminated, "terminated")
    raise error(f"{word}: {flight}, the server has ended")


def raise_open_file_limit(count: int, log: Callable[[str], None]) -> int:
    """Raise the process's limit on open files so that it allows `count` served connections and as many refused ones.
    Return the number of connections that the limit allows. log: called with one line if it is less than `count`."""
    others = 256  # files that are no client connections
    wanted = 2 * count + others
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < wanted:
        files = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
        if files < wanted:
            log(f"the limit on open files (ulimit -n) of {files} allows fewer than {count} connections")
        wanted = files
    return max(1, (wanted - others) // 2)
