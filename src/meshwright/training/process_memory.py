"""Predict the peak resident set size (RSS) of a rank's process on a CPU, itemized, before the first step: the number
that `top`, cgroup limits and the OOM killer use.

The current resident size is read. The step's tensors are the ledger's. Library memory of the first steps and the
allocator's overhead are measured in a separate process, once per machine (`planner/hardware/machine_profile.py`).
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any, cast

import torch

from meshwright.errors import UserError
from meshwright.monitoring.comparison import ProcessMemory
from meshwright.monitoring.memory import (
    LARGEST_MMAP_THRESHOLD,
    read_kernel_cache_capacity,
    read_peak_resident_bytes,
    read_resident_bytes,
)
from meshwright.planner.hardware.machine_profile import ProcessConstants
from meshwright.planner.memory.ledger import Ledger
from meshwright.planner.memory.snapshot import Allocation

if TYPE_CHECKING:
    from meshwright.training.language_model import LanguageModelTask
    from meshwright.training.trainer import Trainer

PAGES_READ = 1 << 16
"""Bytes that the kernel maps around each page of a file that is read (fault-around)."""
HASHED_AT_ONCE = 1 << 23
"""Bytes that a save reads back at a time to hash them, including read-ahead."""
MATMULS_PER_EXPERT = 6
"""In a step: gate and up together, and down; each in forward, for the input gradient and for the weight gradient."""


def predict_process_memory(
    trainer: Trainer, ledger: Ledger, resident_before: int | None, constants: ProcessConstants, share: float = 0.0
) -> ProcessMemory:
    """Predict the peak RSS (resident memory) of this process, which runs the trainer, in bytes by item ("libraries",
    "model states", "step tensors" ...). Call it after `release_freed_memory`, since it reads the current RSS.

    ledger: predicted tensors of this rank, with their bytes and lifetimes. resident_before: RSS in bytes before the
    trainer was created. constants: measured process memory in addition to tensors. share: fraction by which finished
    runs exceeded their prediction; the item "unexplained" is this fraction of all other items. `UserError` if the
    kernel does not report the RSS (`resident_before` is then None)."""
    _import_step_modules(trainer)
    now = read_resident_bytes()
    if now is None or resident_before is None:
        raise UserError("the kernel does not report the resident memory of this process")
    states = sum(trainer.memory().values())
    snapshot = sum((item.stop - item.start) * item.tensor.element_size() for item in trainer.slices(owned=True))
    reserved = snapshot if trainer.recipe.checkpoint.background else 0
    compiled = trainer.recipe.train.compile
    retained = round(constants.heap_overhead_fraction * _count_heap_bytes(ledger.items))
    step = ledger.peak_bytes - states
    items = {
        "framework": resident_before,
        "libraries": max(0, now - resident_before - states - reserved),
        "model states": states,
        "step tensors": step,
        "checkpoint snapshot": snapshot,
        "library workspaces": constants.first_use_bytes,
        "compiled code": constants.compiler_resident_bytes if compiled else 0,
        "compiler workspace": max(0, constants.compiler_transient_bytes - step - retained) if compiled else 0,
        "oneDNN kernel cache": _count_cached_kernels(trainer) * constants.kernel_bytes,
        "heap overhead": retained,
        "mapped data": _predict_mapped_bytes(trainer),
        "checkpoint hashing buffer": min(snapshot, HASHED_AT_ONCE),
    }
    # Memory of the start-up, as far as its peak is above that of the steps.
    items["startup peak"] = max(0, (read_peak_resident_bytes() or 0) - sum(items.values()))
    items["unexplained"] = round(share * sum(items.values()))
    return ProcessMemory(items)


def _import_step_modules(trainer: Trainer) -> None:
    """Import the torch modules that the first training step of `trainer` would import. The RSS (resident memory) that
    is read next then includes them.
    """
    if trainer.layout.pp > 1:  # imported by torch.autograd.backward with explicit gradients
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
    if trainer.layout.recompute != "none":  # imported by torch.utils.checkpoint
        importlib.import_module("torch._dynamo")


def _count_heap_bytes(items: tuple[Allocation, ...]) -> int:
    """Return the total bytes of the tensors in `items` that malloc places on its heap, because they are too small to be
    mapped one by one. items: entries of a memory ledger.
    """
    total = 0
    for item in items:
        if item.first == "start" or item.category in ("framework", "unexplained"):
            continue
        of_one = math.prod(item.shape) * getattr(torch, item.dtype).itemsize if item.shape and item.dtype else 0
        total += item.bytes if (of_one or item.bytes) < LARGEST_MMAP_THRESHOLD else 0
    return total


def get_language_model(trainer: Trainer) -> LanguageModelTask:
    """Return the trainer's task as a `LanguageModelTask`, the only kind of task that the planner can predict."""
    return cast("LanguageModelTask", trainer.task)


def _count_cached_kernels(trainer: Trainer) -> int:
    """Return the predicted number of compiled oneDNN kernels in the cache at the end of the trainer's run, at most the
    cache's capacity. Only the 16-bit matmuls of experts are counted, since their shapes change in each step; 0 in
    fp32."""
    config, layout = get_language_model(trainer).config, trainer.layout
    if layout.precision in (None, "fp32"):
        return 0
    layers = sum(config.has_experts(layer) for layer in range(config.layers)) // layout.pp
    experts = config.experts // layout.ep if layers else 0
    steps = trainer.recipe.train.steps - trainer.steps_done
    return min(read_kernel_cache_capacity(), MATMULS_PER_EXPERT * layers * experts * steps)


def _predict_mapped_bytes(trainer: Trainer) -> int:
    """Return the predicted bytes of memory-mapped data files that the trainer's remaining steps will read into memory
    on this rank."""
    tokens, layout, train = get_language_model(trainer).tokens, trainer.layout, trainer.recipe.train
    rows = (train.steps - trainer.steps_done) * max(1, train.batch // layout.dp)
    dtype: Any = getattr(tokens, "dtype", None)
    size = tokens.tokens * (dtype.itemsize if dtype is not None else 4)
    return int(min(size, rows * PAGES_READ))
