"""Measure process memory beyond tensors, in a process that the launcher starts like a rank.

Two small models run a few steps. RSS afterwards, with freed memory released, minus RSS before is the first-use memory;
peak RSS minus RSS afterwards and minus the ledger's peak is the allocator's overhead. Reports `ProcessConstants`.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from meshwright.comm.mesh import Mesh
from meshwright.launcher.rank_process import run_rank
from meshwright.launcher.rendezvous import RendezvousInfo
from meshwright.layout import Layout
from meshwright.model.documents import Documents
from meshwright.monitoring.memory import (
    keep_freed_memory,
    read_peak_resident_bytes,
    read_resident_bytes,
    release_freed_memory,
    reset_peak_rss,
)
from meshwright.parallel.context import shard_sequences
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.step import ForwardBackward, count_targets
from meshwright.planner.hardware.machine_profile import ProcessConstants
from meshwright.planner.memory.ledger import ledger
from meshwright.spec.config import ModelConfig
from meshwright.training.optimizer import Optimizer
from meshwright.training.precision import PARAMETER_DTYPES

STEPS = 2  # the first allocates the optimizer's state, the second has it from its beginning
KERNELS = 24
"""Number of matmuls with distinct shapes, whose kernels' memory is measured."""


def _make_config(hidden: int, layers: int) -> ModelConfig:
    """Return a small Llama configuration with this hidden size and number of layers."""
    return ModelConfig(
        family="llama", vocabulary=2048, hidden=hidden, layers=layers, heads=4, kv_heads=2, head_dim=hidden // 4,
        intermediate=3 * hidden, max_positions=512, norm="rmsnorm", norm_epsilon=1e-5, activation="silu", gated=True,
        positions="rope",
    )  # fmt: skip


SMALL = _make_config(64, 1), 4, 64  # config, sequences, tokens
LARGE = _make_config(192, 4), 8, 256


class _ProbeRun:
    """Small model with an optimizer that runs training steps on one fixed micro-batch, to measure process memory.

    size: (model, number of sequences, tokens per sequence). precision: "fp32", "bf16" ...; compiled: True to compile
    the blocks."""

    def __init__(self, size: tuple[ModelConfig, int, int], precision: str, compiled: bool) -> None:
        """Build the model, its optimizer and the micro-batch, and predict the bytes of a step's tensors."""
        config, rows, sequence = size
        layout = Layout.parse(f"dp1 {precision}")
        mesh = Mesh.create(layout, "cpu")
        dtype = PARAMETER_DTYPES[precision]
        backend = "inductor" if compiled else None
        built = parallelize(config, mesh, sequence, seed=0, parameter_dtype=dtype, compile_backend=backend)
        self.engine = built.engine
        train: Any = SimpleNamespace(
            optimizer="adamw", betas=[0.9, 0.95], epsilon=1e-8, weight_decay=0.1, momentum=0.0, router_bias_rate=0.0
        )
        self.optimizer = Optimizer(self.engine.shards, train)
        self.passes = ForwardBackward(*built)
        tokens = torch.randint(config.vocabulary, (rows, sequence + 1), generator=torch.Generator().manual_seed(0))
        self.batch = [shard_sequences(tokens[:, :-1], tokens[:, 1:], Documents(), mesh)]
        self.targets = count_targets((goals for _, goals, _ in self.batch), mesh)
        found = ledger(config, layout, batch=rows, sequence=sequence, compile=compiled)
        state = [tensor for kind in self.optimizer.state_tensors().values() for tensor in kind]
        states = sum(self.engine.memory().values()) + sum(tensor.nbytes for tensor in state)
        self.step_bytes = found.peak_bytes - states

    def run_steps(self) -> tuple[int, int]:
        """Run `STEPS` training steps and return two sizes in bytes: growth of the RSS over the steps; peak RSS minus
        RSS after the steps. Freed memory is returned to the kernel before each RSS reading."""
        before = _measure_rss()
        reset_peak_rss()
        for _ in range(STEPS):
            self.passes.train(self.batch, self.targets)
            self.optimizer.step(1e-3)
            self.engine.all_gather_parameters()
            self.engine.begin_step(0)
        highest = read_peak_resident_bytes() or 0
        after = _measure_rss()
        return after - before, highest - after


def measure(precision: str, compiled: bool) -> ProcessConstants:
    """Measure the process memory that is not tensors, by training small models in this process. precision: "fp32",
    "bf16" ...; compiled: True to measure torch.compile's memory as well."""
    # Load the libraries that every rank has loaded.
    torch.nn.functional.linear(torch.randn(512, 512), torch.randn(512, 512))
    base = _measure_rss()
    kept, _ = _ProbeRun(SMALL, precision, False).run_steps()
    large = _ProbeRun(LARGE, precision, False)
    more, above = large.run_steps()
    retention = max(0.0, above / large.step_bytes - 1)
    kernel = 0 if precision == "fp32" else _measure_kernel_bytes(PARAMETER_DTYPES[precision])
    compiler = compiling = 0
    if compiled:
        with tempfile.TemporaryDirectory(prefix="meshwright-compiled-") as place:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = place  # an empty cache, as in the first run of a model
            run = _ProbeRun(SMALL, precision, True)
            compiler, compiling = run.run_steps()
    return ProcessConstants(max(0, kept) + max(0, more), retention, kernel, max(0, compiler), max(0, compiling), base)


def _measure_kernel_bytes(dtype: torch.dtype) -> int:
    """Measure how many bytes of RSS a compiled oneDNN kernel takes in the cache; each matmul in `dtype` with a new
    shape adds a kernel.
    """
    weight = torch.randn(384, 192).to(dtype)
    before = _measure_rss()
    for rows in range(101, 101 + KERNELS):
        torch.nn.functional.linear(torch.randn(rows, 192).to(dtype), weight)
    return max(0, (_measure_rss() - before) // KERNELS)


def _measure_rss() -> int:
    """Return the RSS of this process in bytes, after freed memory is returned to the kernel."""
    release_freed_memory()
    return read_resident_bytes() or 0


def _measure_as_described(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    """Measure the memory that this rank's process takes besides tensors, under this rank's conditions, and write the
    result as JSON to the file RANK.json. start: rank of this process.

    description: JSON dict from the launcher: "keys": list of the conditions (precision, threads, compiled), one for
    each rank, in rank order; "results": directory of the files."""
    key = description["keys"][start.rank]
    torch.set_num_threads(key["threads"])
    keep_freed_memory()
    found = asdict(measure(key["precision"], key["compiled"]))
    Path(description["results"], f"{start.rank}.json").write_text(json.dumps(found))
    return {}


if __name__ == "__main__":
    run_rank(_measure_as_described)
