"""Predicts the peak resident set size (RSS) of a rank's process on a CPU, itemized, before the first step: what `top`,
cgroup limits and the OOM killer see.

What is resident already is read, not predicted. The step's tensors are the ledger's. What libraries add in the first
steps, and what the C library's allocator holds beyond the tensors, is measured on small steps of the engine in a
process of its own, once per machine, and kept in a file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from meshwright import __version__
from meshwright.errors import UserError
from meshwright.plan.ledger import Item, Ledger
from meshwright.plan.machine_profile import may_measure, processor_name, profile_directory
from meshwright.train.checkpoint.files import json_bytes, replace_file
from meshwright.train.memory import KERNELS_KEPT, LARGEST_MMAP_THRESHOLD, peak_resident_bytes, resident_bytes

if TYPE_CHECKING:
    from meshwright.train.trainer import Trainer

FORMAT = 2
"""Of the file; one of another format is measured again."""
LIMIT_SECONDS = 300.0
"""For a measurement; compiling on a busy machine takes the most of it."""
PAGES_READ = 1 << 16
"""Bytes that the kernel maps around each place of a file that is read (fault-around)."""
HASHED_AT_ONCE = 1 << 23
"""Bytes that a save reads back at a time to hash them, with those that are on their way."""
MATMULS_PER_EXPERT = 9
"""In a step: three matrices, each in the forward pass, for the input's gradient and for its own."""


@dataclass(frozen=True, slots=True)
class ProcessConstants:
    """Measured process memory beyond tensors on this machine.

    first_use_bytes: library code and workspaces loaded by the first steps; heap_overhead_fraction: heap growth over
    live tensors below the mmap threshold; kernel_bytes: per cached oneDNN kernel; compiler_*: torch.compile.
    """

    first_use_bytes: int
    heap_overhead_fraction: float
    kernel_bytes: int
    compiler_resident_bytes: int
    compiler_transient_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of a rank's process by item at its peak RSS."""

    items: Mapping[str, int]

    @property
    def peak(self) -> int:
        """Their sum."""
        return sum(self.items.values())


def predict_process_memory(
    trainer: Trainer, found: Ledger, resident_before: int | None, constants: ProcessConstants, share: float = 0.0
) -> ProcessMemory:
    """Predict peak RSS by item, in bytes; call after `release_freed_memory`.

    found: the ledger of this rank. resident_before: the process before its trainer was made. share: of the whole, what
    calibration expects beyond. `UserError` where the kernel does not say what is resident.
    """
    _import_what_steps_import(trainer)
    now = resident_bytes()
    if now is None or resident_before is None:
        raise UserError("the kernel does not say how much memory this process has")
    states = sum(trainer.memory().values())
    snapshot = sum((piece.stop - piece.start) * piece.tensor.element_size() for piece in trainer.pieces(owned=True))
    reserved = snapshot if trainer.recipe.checkpoint.background else 0
    compiled = trainer.recipe.train.compile
    retained = round(constants.heap_overhead_fraction * _on_heap(found.items))
    step = found.peak_bytes - states
    items = {
        "framework": resident_before,
        "libraries": max(0, now - resident_before - states - reserved),
        "model states": states,
        "step tensors": step,
        "checkpoint snapshot": snapshot,
        "library workspaces": constants.first_use_bytes,
        "compiled code": constants.compiler_resident_bytes if compiled else 0,
        "compiler workspace": max(0, constants.compiler_transient_bytes - step - retained) if compiled else 0,
        "oneDNN kernel cache": _kernels(trainer) * constants.kernel_bytes,
        "heap overhead": retained,
        "mapped data": _data_read(trainer),
        "checkpoint hashing buffer": min(snapshot, HASHED_AT_ONCE),
    }
    items["startup peak"] = max(
        0, (peak_resident_bytes() or 0) - sum(items.values())
    )  # of a start that took more than steps
    items["unexplained"] = round(share * sum(items.values()))
    return ProcessMemory(items)


def _import_what_steps_import(trainer: Trainer) -> None:
    """Have torch import now what the first step would: it is resident then before the prediction."""
    if trainer.layout.pp > 1:  # torch.autograd.backward with gradients of its own
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
    if trainer.layout.recompute != "none":  # torch.utils.checkpoint
        importlib.import_module("torch._dynamo")


def _on_heap(items: tuple[Item, ...]) -> int:
    """Bytes of the step's tensors that the allocator puts on its heap."""
    total = 0
    for item in items:
        if item.first == "start" or item.category in ("framework", "unexplained"):
            continue
        of_one = math.prod(item.shape) * getattr(torch, item.dtype).itemsize if item.shape and item.dtype else 0
        total += item.bytes if (of_one or item.bytes) < LARGEST_MMAP_THRESHOLD else 0
    return total


def _kernels(trainer: Trainer) -> int:
    """Products of shapes that differ in every step, as far as their kernels are kept."""
    config, layout = trainer.config, trainer.layout
    if layout.precision in (None, "fp32"):
        return 0
    layers = sum(config.has_experts(layer) for layer in range(config.layers)) // layout.pp
    experts = config.experts // layout.ep if layers else 0
    return min(KERNELS_KEPT, MATMULS_PER_EXPERT * layers * experts * trainer.recipe.train.steps)


def _data_read(trainer: Trainer) -> int:
    """Bytes of the files of prepared data that the steps left will have mapped."""
    tokens, layout, train = trainer.tokens, trainer.layout, trainer.recipe.train
    rows = (train.steps - trainer.steps_done) * max(1, train.batch // layout.dp)
    dtype: Any = getattr(tokens, "dtype", None)
    size = tokens.tokens * (dtype.itemsize if dtype is not None else 4)
    return int(min(size, rows * PAGES_READ))


# --- the machine's constants


def constants_file() -> Path:
    """Where they are kept: beside the other measurements of this machine, in the user's cache."""
    return profile_directory() / "process-memory.json"


def process_constants(
    precision: str, compiled: bool, probe: bool, limit_seconds: float = LIMIT_SECONDS,
    say: Callable[[str], None] = lambda line: None,
) -> ProcessConstants:  # fmt: skip
    """Of this machine: those kept, else measured now (a few seconds; with a compiler some 20) and kept. probe: whether
    they may be measured; `say` gets a line then. `UserError` where they may not be, or cannot be in `limit_seconds`."""
    path, key = constants_file(), _key(precision, compiled)
    kept = _read(path)
    if key in kept:
        return kept[key]
    if not may_measure(probe):
        raise UserError("no process-memory profile for this precision and thread count; start once without --no-probe")
    say(f"measuring process memory overhead once, a few seconds (stored in {path})")
    constants = measure_process_memory(precision, compiled, limit_seconds)
    with contextlib.suppress(OSError):  # a home that cannot be written: it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = {name: asdict(each) for name, each in {**_read(path), key: constants}.items()}
        replace_file(path, json_bytes({"format": FORMAT, **_machine(), "constants": entries}))
    return constants


def measure_process_memory(precision: str, compiled: bool, limit_seconds: float = LIMIT_SECONDS) -> ProcessConstants:
    """Measure in a process of its own, with as many threads as this one has. `UserError` where that fails."""
    command = [
        sys.executable, "-P", "-m", "meshwright.train.process_memory_probe", precision, str(int(compiled)),
        str(torch.get_num_threads()),
    ]  # fmt: skip
    failed = "process memory overhead could not be measured"
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        raise UserError(f"{failed} in {limit_seconds:.0f} s") from None
    except OSError as error:
        raise UserError(f"{failed}: {error}") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"{failed}: {last}")
    return ProcessConstants(**json.loads(lines[-1]))


def _key(precision: str, compiled: bool) -> str:
    return f"{precision} {torch.get_num_threads()} threads{' compiled' if compiled else ''}"


def _machine() -> dict[str, str]:
    """What the constants depend on."""
    libc = " ".join(platform.libc_ver())
    return {"meshwright": __version__, "torch": torch.__version__, "processor": processor_name(), "libc": libc}


def _read(path: Path) -> dict[str, ProcessConstants]:
    """The constants kept for this machine and these versions; none where the file is damaged or another's."""
    try:
        found = json.loads(path.read_bytes())
        if any(found[name] != value for name, value in {"format": FORMAT, **_machine()}.items()):
            return {}
        return {key: _constants(value) for key, value in found["constants"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _constants(table: Mapping[str, Any]) -> ProcessConstants:
    values = {field.name: table[field.name] for field in fields(ProcessConstants)}
    if not all(isinstance(value, (int, float)) and 0 <= value < math.inf for value in values.values()):
        raise ValueError(table)
    return ProcessConstants(**values)
