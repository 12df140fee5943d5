"""Loading of checkpoints into any layout: each rank reads the blocks that its slices intersect and verifies their
hashes.

The blocks of the exported model files, which no rank needs, are distributed, so that a load verifies every byte.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from meshwright.checkpoint.catalogue import open_checkpoint
from meshwright.checkpoint.files import open_descriptor
from meshwright.checkpoint.manifest import BLOCK_BYTES, DamagedCheckpoint, FileRecord, count_blocks
from meshwright.checkpoint.model_files import DTYPE_CODES
from meshwright.checkpoint.slices import (
    MatrixRange,
    PlannedRead,
    check_bounds,
    intersect_ranges,
    list_kinds,
    plan_reads,
    read_index,
    split_reads,
)
from meshwright.errors import UserError, error_reason
from meshwright.parallel.flat_buffers import TensorSlice

_DTYPES = {code: getattr(torch, name) for name, code in DTYPE_CODES.items()}
_THREADS = 4


@dataclass(frozen=True, slots=True)
class _BlockTask:
    """Task to read one block of a checkpoint file, verify its hash, and copy elements from it into the tensors to load.

    file: file name. block: number of the block (`BLOCK_BYTES` each), from 0. copies: one tuple for each run of
    consecutive elements to copy: (planned read, index in this read of the run's first element, number of elements, byte
    of the block at which the run begins). Empty if the block is only verified.
    """

    file: str
    block: int
    copies: Sequence[tuple[PlannedRead, int, int, int]]


def load_slices(path: Path, slices: Sequence[TensorSlice], rank: int, ranks: int) -> None:
    """Load the training state in the checkpoint directory `path` into the tensors of `slices`; verify the hash of every
    block that is read. The blocks of the exported model files, which are not loaded, are verified too, each by one of
    the ranks.

    rank, ranks: number of this rank, and number of ranks. Raises `DamagedCheckpoint` (the tensors may then be partly
    overwritten), and `UserError` if the checkpoint lacks an optimizer state that a slice wants, such as "momentum".
    """
    _, manifest = open_checkpoint(path)
    index = read_index(path)
    check_bounds(index, {name: record.size for name, record in manifest.files.items()})
    missing = {item.kind for item in slices} - list_kinds(index)
    if missing:
        held = ", ".join(sorted(list_kinds(index)))
        raise UserError(
            f"checkpoint {path} has no {' and no '.join(sorted(missing))} (only {held}): "
            "it was trained with another train.optimizer"
        )
    wanted = [(item.kind, item.name, item.start, item.stop, item.columns) for item in slices]
    reads = plan_reads(index, wanted)
    tasks = [
        _BlockTask(file, block, copies)
        for file, parts in reads.items()
        for block, copies in sorted(split_reads(parts, BLOCK_BYTES).items())
    ]
    unread = [
        (name, block)
        for name, record in sorted(manifest.files.items())
        if name.endswith(".safetensors") and not name.startswith("training/")
        for block in range(count_blocks(record.size))
    ]
    tasks += [_BlockTask(name, block, ()) for name, block in unread[rank::ranks]]
    buffers = threading.local()

    def run(task: _BlockTask) -> None:
        """Read one block of a file, verify its hash, and copy the task's elements into the slices."""
        if not hasattr(buffers, "memory"):
            buffers.memory = np.empty(BLOCK_BYTES, dtype=np.uint8)
        data = _read_block(path, task, manifest.files[task.file], buffers.memory)
        for read, first, count, inside in task.copies:
            dtype = _DTYPES[read.code]
            source = torch.from_numpy(data[inside : inside + count * dtype.itemsize]).view(dtype)
            copy_intersection(source, read.subrange(first, count), slices[read.destination].tensor, read.wanted)

    gpu = next((item.tensor.device for item in slices if item.tensor.is_cuda), None)
    threads = min(_THREADS, torch.get_num_threads())
    select = None if gpu is None else partial(torch.cuda.set_device, gpu)  # a new thread uses the first GPU
    with torch.no_grad(), ThreadPoolExecutor(threads, initializer=select) as pool:
        for _ in pool.map(run, tasks):
            pass


def copy_intersection(source: torch.Tensor, has: MatrixRange, destination: torch.Tensor, wants: MatrixRange) -> None:
    """Copy the elements that two ranges of one matrix have in common.

    `source`: 1-D, the elements of the range `has`; `destination`: 1-D, the elements of the range `wants`, overwritten
    where the ranges intersect.
    """
    for top, bottom, left, right in intersect_ranges(has, wants):
        size = (bottom - top, right - left)
        there = source.as_strided(size, (has.width, 1), source.storage_offset() + has.index_of(top, left))
        here = destination.storage_offset() + wants.index_of(top, left)
        destination.as_strided(size, (wants.width, 1), here).copy_(there)


def _read_block(path: Path, task: _BlockTask, record: FileRecord, memory: np.ndarray) -> np.ndarray:
    """Read one block of a file into `memory` (uint8 [BLOCK_BYTES]) and verify its hash; return the bytes read, a view
    of `memory`.

    path: checkpoint directory. task: names the file and the block. record: expected hashes of the file. Raises
    `DamagedCheckpoint`."""
    start = task.block * BLOCK_BYTES
    size = min(BLOCK_BYTES, record.size - start)
    view = memory.data[:size]
    try:
        with open_descriptor(path / task.file, os.O_RDONLY) as descriptor:
            done = 0
            while done < size:
                count = os.preadv(descriptor, [view[done:]], start + done)
                if count == 0:
                    raise DamagedCheckpoint(f"{task.file} ends at byte {start + done}")
                done += count
    except OSError as error:
        raise DamagedCheckpoint(f"{task.file} cannot be read: {error_reason(error)}") from None
    if hashlib.sha256(view).hexdigest() != record.blocks[task.block]:
        raise DamagedCheckpoint(f"{task.file} was altered between bytes {start} and {start + size}")
    return memory[:size]
