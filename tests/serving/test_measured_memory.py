"""The serving ledger against what runners allocate, item by item."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.kernels.choice import PLAIN_TORCH
from meshwright.planner.serving.kernel_scratch import StepScratch, scratch_bytes
from meshwright.planner.serving.ledger import RankLedger, ServingLedger, ServingSizes, serving_ledger
from meshwright.planner.serving.torch_ledger import torch_ledger
from meshwright.serving.rank_starter import RankPlan
from meshwright.serving.runner import build_runner
from meshwright.spec.config import ModelConfig
from meshwright.spec.refuse import serving_layout
from tests.conftest import REPOSITORY
from tests.serving import small_models
from tests.serving.small_models import NEEDS_COMPILER, write_model

BLOCKS, TOKENS, SEQUENCES, LENGTH = 5, 40, 8, 64
SIZES = ServingSizes(TOKENS, SEQUENCES, LENGTH, blocks=BLOCKS, scored_rows=40)


def small_config(name: str) -> ModelConfig:
    """A small model; of an even number of experts."""
    return small_models.small_config(name, **({"experts": 4} if name in ("mixtral-tiny", "gpt-oss-tiny") else {}))


def measure(directory: str, layout: str, dtype: str, kernels: str | None = None) -> tuple[int, dict[str, int]]:
    """Pipeline rank and bytes by item of this rank's runner."""
    config = small_config(Path(directory).name)
    parsed = serving_layout(layout, config)
    mesh = Mesh.single(parsed) if parsed.world_size == 1 else Mesh.create(parsed)
    plan = RankPlan(directory, layout, replace(SIZES, dtype=dtype), instruction_set=kernels)
    memory = build_runner(plan, mesh).memory()
    mesh.close()
    return mesh.pp.rank, memory


def predict(
    name: str, layout: str, dtype: str, ledger: Callable[..., ServingLedger] = serving_ledger
) -> tuple[RankLedger, ...]:
    config = small_config(name)
    return ledger(config, serving_layout(layout, config), ServingSizes(TOKENS, SEQUENCES, LENGTH, dtype)).stages


def check(rank: RankLedger, measured: dict[str, int]) -> None:
    """Every item, to the byte."""
    assert measured["kv"] == BLOCKS * rank.kv_block
    for item in ("weights", "packed", "workspace", "logits"):
        assert measured[item] == getattr(rank, item), item


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [
        *("qwen2-tiny", "gpt2-tiny", "qwen2-moe-tiny", "dots1-tiny", "glm4-tiny"),
        *("deepseek-v2-tiny", "deepseek-v3-tiny", "gpt-oss-tiny", "llama4-tiny"),
    ],
)
def test_predicted_memory_matches_allocation_of_one_rank(name: str, dtype: str, tmp_path: Path):
    directory = write_model(tmp_path / name, small_config(name))
    (rank,) = predict(name, "", dtype)
    check(rank, measure(str(directory), "", dtype)[1])


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("qwen3-tiny", "tp2"), ("qwen2-tiny", "pp2"), ("mixtral-tiny", "tp2 ep2"), ("qwen2-moe-tiny", "tp2")),
        *(("deepseek-v3-tiny", "tp2"), ("gpt-oss-tiny", "tp2"), ("gpt-oss-tiny", "tp2 ep2")),
    ],
)
def test_predicted_memory_matches_allocation_of_each_of_two_ranks(
    name: str, layout: str, two: LocalRanks, tmp_path: Path
):
    directory = write_model(tmp_path / name, small_config(name))
    stages = predict(name, layout, "bfloat16")
    for stage, measured in two.run(measure, str(directory), layout, "bfloat16"):
        check(stages[stage], measured)
        if "tp2" in layout:
            assert measured["communication"] == stages[stage].communication


def check_plain_torch(rank: RankLedger, measured: dict[str, int]) -> None:
    """Every item that stays, to the byte; the workspace is freed after each step."""
    assert measured == {"weights": rank.weights, "kv": BLOCKS * rank.kv_block, "logits": rank.logits}
    assert rank.packed == 0 < rank.workspace


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("name", ["qwen2-tiny", "gpt2-tiny", "qwen2-moe-tiny", "dots1-tiny"])
def test_predicted_memory_matches_allocation_in_plain_torch(name: str, dtype: str, tmp_path: Path):
    directory = write_model(tmp_path / name, small_config(name))
    (rank,) = predict(name, "", dtype, torch_ledger)
    check_plain_torch(rank, measure(str(directory), "", dtype, PLAIN_TORCH)[1])


@pytest.mark.parametrize(("name", "layout"), [("qwen3-tiny", "tp2"), ("qwen2-tiny", "pp2"), ("qwen2-moe-tiny", "tp2")])
def test_predicted_memory_matches_allocation_in_plain_torch_on_two_ranks(
    name: str, layout: str, two: LocalRanks, tmp_path: Path
):
    directory = write_model(tmp_path / name, small_config(name))
    stages = predict(name, layout, "float16", torch_ledger)
    for stage, measured in two.run(measure, str(directory), layout, "float16", PLAIN_TORCH):
        check_plain_torch(stages[stage], measured)


_GROW = """
import sys
from pathlib import Path
import numpy as np
from meshwright.kernels.choice import open_kernels
from meshwright.kernels.operations import Attention, LayerCache, Linear
from tests.kernels.conftest import Batch, one_sequence

heads, size, length, tokens, width = map(int, sys.argv[1:])
kernels = open_kernels()
keys, values = (kernels.allocate(shape, np.uint16) for shape in LayerCache.compute_shapes(1, 1, size))
attention, product = kernels.create_op_list(), kernels.create_op_list()
qkv = np.zeros((tokens, (heads + 2) * size), np.float32)
attended, x = np.zeros((tokens, heads * size), np.float32), np.ones((tokens, width), np.float32)
attention.append(Attention(attended, qkv, LayerCache(keys, values, size), heads, 0.1))
weight = kernels.pack(np.zeros((16, width), np.float32), "bfloat16")
kernels.end_packing()
product.append(Linear(np.zeros((tokens, 16), np.float32), x, weight))


def read_resident():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def run(length):
    positions = np.arange(length - tokens, length, dtype=np.int32)
    table = np.zeros((1, length // 16), np.int32)
    attention.run(Batch(positions, positions, positions % 16, np.array([0, tokens], np.int32), table, positions[:0]))


run(tokens)
before = read_resident()
run(length)
product.run(one_sequence(tokens, ()))
print(read_resident() - before, kernels.instruction_set)
"""


@NEEDS_COMPILER
def test_predicted_scratch_is_what_a_long_context_and_a_wide_product_take():
    """One thread; all positions of the context are in one KV block, so that the cache takes nothing."""
    heads, size, length, tokens, width = 16, 64, 131072, 48, 131072
    config = replace(small_config("qwen2-tiny"), head_dim=size)
    predicted = scratch_bytes(config, heads, 1, StepScratch(tokens, length, 1, width))
    arguments = [str(each) for each in (heads, size, length, tokens, width)]
    done = subprocess.run([sys.executable, "-c", _GROW, *arguments], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    grown, instruction_set = done.stdout.split()
    if instruction_set not in ("amx", "avx512_bf16"):  # the others round no rows
        predicted = scratch_bytes(config, heads, 1, StepScratch(tokens, length, 1, 0))
    assert 0.8 * predicted - 2**20 < int(grown) < predicted + 2**20
