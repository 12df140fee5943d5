"""The kernels of this machine, and batches for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from meshwright.kernels.choice import load_kernels
from meshwright.kernels.library import Kernels
from meshwright.kernels.operations import Linear
from meshwright.kernels.structures import PackedMatrix


@pytest.fixture(scope="session")
def built_kernels() -> Kernels:
    """The library for this processor; tests are skipped without a compiler or AVX2."""
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("no compiler, or no AVX2")
    return kernels


@pytest.fixture
def kernels(built_kernels: Kernels) -> Kernels:
    """The library, with 2 threads."""
    built_kernels.set_threads(2)
    return built_kernels


@dataclass
class Batch:
    """A step's arrays (`operations.StepArrays`)."""

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    block_tables: np.ndarray
    output_rows: np.ndarray


def one_sequence(tokens: int, output_rows: tuple[int, ...] = (0,)) -> Batch:
    """The first step of one sequence whose token IDs are its positions."""
    numbers = np.arange(tokens, dtype=np.int32)
    table = np.arange(-(-tokens // 16), dtype=np.int32)[None]
    ends = np.array([0, tokens], np.int32)
    return Batch(numbers, numbers, numbers, ends, table, np.array(output_rows, np.int32))


def compute_linear(kernels: Kernels, x: np.ndarray, weight: PackedMatrix, bias: np.ndarray | None = None) -> np.ndarray:
    """Return x Wᵀ + bias, float32 [rows, n]."""
    out, ops = np.empty((len(x), weight.n), np.float32), kernels.create_op_list()
    ops.append(Linear(out, x, weight, bias))
    ops.run(one_sequence(len(x)))
    return out


def unpack(packed: PackedMatrix) -> np.ndarray:
    """The packed elements [count, n, k] with their padding, bfloat16 as bits."""
    words = packed.words.transpose(0, 1, 3, 4, 2)
    rows = np.ascontiguousarray(words).reshape(packed.count, -(-packed.n // 32) * 32, -1)
    return rows.view(np.uint16 if packed.bfloat16 else np.float32)
