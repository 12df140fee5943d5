"""Training states to save, and functions that ranks run in the tests of checkpoints."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import Checkpointer, SaveOptions, saving
from meshwright.checkpoint.directory_lock import LOCK
from meshwright.checkpoint.files import write_at
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.parallel.flat_buffers import TensorSlice, cut_slices, make_flat_layout, split_evenly
from meshwright.recipe import ModelRecipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.parameters import ParameterEntry, parameter_table

KINDS = ("master", "exp_avg", "exp_avg_sq")


def tiny(family: str, **changes: Any) -> ModelConfig:
    """Return a model configuration of odd sizes: 3 layers, vocabulary 499, fewer KV heads than heads if the family has
    that."""
    grouped = {} if family == "gpt2" else {"kv_heads": 2}
    sizes = {"layers": 3, "hidden": 40, "heads": 4, **grouped, "intermediate": 56} | changes
    return config_from_recipe(ModelRecipe(family=family, **sizes), 48, 499)


def entry_values(kind: str, entry: ParameterEntry, salt: int = 0) -> torch.Tensor:
    """Return the whole parameter entry of a kind of state, flat as the model stores it; it depends on the names
    alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind}/{entry.name}/{salt}".encode()))
    return torch.randn(math.prod(entry.shape), generator=generator)


def state_pieces(
    config: ModelConfig, rank: int, ranks: int, salt: int = 0, kinds: tuple[str, ...] = KINDS
) -> list[TensorSlice]:
    """Return a rank's share of the state: every unit's flat buffer cut into `ranks` nearly equal shards."""
    table = parameter_table(config)
    pieces = []
    for kind in kinds:
        for name in table.units:
            unit = make_flat_layout(table, name)
            whole = torch.zeros(unit.padded)
            for part in unit.slices:
                values = entry_values(kind, part.entry, salt)
                whole[part.offset : part.offset + part.numel] = values[part.begin : part.begin + part.numel]
            low, high = split_evenly(0, unit.numel, rank, ranks)
            shard = whole[low:high].clone()
            pieces += cut_slices(unit, kind, shard, low, low, high)
    return pieces


def empty_like(pieces: list[TensorSlice]) -> list[TensorSlice]:
    """Return the same slices with NaN values, to be loaded."""
    return [
        TensorSlice(piece.kind, piece.name, piece.start, piece.stop, torch.full_like(piece.tensor, math.nan))
        for piece in pieces
    ]


def equal(a: list[TensorSlice], b: list[TensorSlice]) -> bool:
    """Return True if the slices have the same bits."""
    return all(torch.equal(x.tensor, y.tensor) for x, y in zip(a, b, strict=True))


def entries(directory: Path | str) -> list[str]:
    """Return the names in a checkpoint directory, sorted, without its lock."""
    return sorted(set(os.listdir(directory)) - {LOCK})


def flip_bit(path: Path, position: float = 0.5) -> None:
    """Flip one bit at this fraction of a file."""
    offset = int(path.stat().st_size * position)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))


CHANGES = ("fsync", "ftruncate", "mkdir", "rename", "replace", "rmdir", "unlink")
"""Functions of `os` by which a save changes its directory; between two of them it only writes into files."""


def lose_power_at(change: int) -> None:
    """Kill this process just before its `change`-th call of `CHANGES`, counted from 1, like a power failure: files that
    were written and not flushed are empty afterwards. Counted calls, unlike seconds, are the same place on an idle and
    on a busy machine."""
    unflushed: dict[int, int] = {}  # inode -> descriptor
    calls = itertools.count(1)

    def watch(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            if name in CHANGES and next(calls) == change:
                for descriptor in unflushed.values():
                    os.truncate(descriptor, 0)
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "pwrite" and (inode := os.fstat(arguments[0]).st_ino) not in unflushed:
                unflushed[inode] = os.dup(arguments[0])
            if name == "fsync" and (kept := unflushed.pop(os.fstat(arguments[0]).st_ino, None)) is not None:
                os.close(kept)
            return original(*arguments, **options)

        return watched

    for name in ("pwrite", *CHANGES):
        setattr(os, name, watch(name))


# --- run on ranks by LocalRanks


def make(directory: str, config: ModelConfig, log: list[str] | None = None, **options: Any) -> Checkpointer:
    """Return a checkpointer on this rank of the process group."""
    ranks = torch.distributed.get_world_size()
    mesh = Mesh.create(Layout(dp=ranks), "cpu")
    lines = log if log is not None else []
    return Checkpointer(Path(directory), mesh, config, SaveOptions(**options), lines.append)


def save_on_ranks(directory: str, config: ModelConfig, steps: list[int], options: dict[str, Any]) -> list[str | None]:
    """Save a state at each of `steps`; return the outcomes."""
    checkpointer = make(directory, config, **options)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ends = []
    for step in steps:
        checkpointer.save(step, state_pieces(config, rank, ranks, salt=step), {"rank": rank, "note": f"step {step}"})
        checkpointer.wait()
        ends.append(checkpointer.failed())
    return ends


def load_on_ranks(directory: str, config: ModelConfig) -> tuple[str | None, bool, Any, list[str]]:
    """Load the newest intact checkpoint; return its name, True if every bit is as saved, its state, and the log."""
    log: list[str] = []
    checkpointer = make(directory, config, log)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    pieces = empty_like(state_pieces(config, rank, ranks))
    loaded = checkpointer.load_newest(pieces)
    if loaded is None:
        return None, False, None, log
    path, state = loaded
    return path.name, equal(pieces, state_pieces(config, rank, ranks, salt=path.step)), state, log


def save_without_looking(directory: str, config: ModelConfig) -> list[str | None]:
    """Save steps 1 and 2 without a check of the free space; return the outcomes."""
    check_space = saving.Save._check_space
    saving.Save._check_space = lambda self: self.target.directory.mkdir(exist_ok=True)  # type: ignore[method-assign]
    try:
        return save_on_ranks(directory, config, [1, 2], {})
    finally:
        saving.Save._check_space = check_space  # type: ignore[method-assign]


def save_with_a_fault(directory: str, config: ModelConfig, faulty: int, how: str) -> tuple[str | None, list[str]]:
    """Save step 1, and step 2 with a fault on one rank; return what `failed` reports for step 2, and the files that
    remain."""
    checkpointer = make(directory, config)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    checkpointer.save(1, state_pieces(config, rank, ranks, salt=1), {})
    checkpointer.wait()
    assert checkpointer.failed() is None
    if how == "silent":
        target = checkpointer._target
        checkpointer._target = dataclasses.replace(
            target, options=dataclasses.replace(target.options, timeout_seconds=1.5)
        )
    if rank == faulty and how == "io":

        def broken(*_: object) -> None:
            raise OSError(5, os.strerror(5))

        saving.write_at = broken  # type: ignore[assignment]
    if not (rank == faulty and how == "silent"):
        checkpointer.save(2, state_pieces(config, rank, ranks, salt=2), {})
        checkpointer.wait()
    line = checkpointer.failed()
    torch.distributed.barrier()
    checkpointer.abandon()
    torch.distributed.barrier()
    saving.write_at = write_at  # type: ignore[assignment]
    return line, entries(directory)


def meet(directories: list[str], config: ModelConfig) -> str:
    """Create a checkpointer on each rank, on rank R in directory R."""
    from meshwright.checkpoint import checkpointer

    checkpointer._SHARED_SECONDS = 0.3
    make(directories[torch.distributed.get_rank()], config)
    return "met"
