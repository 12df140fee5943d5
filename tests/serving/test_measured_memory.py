"""The serving ledger against what runners allocate, item by item."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.kernels.choice import PLAIN_TORCH
from meshwright.planner.serving.kernel_scratch import scratch_bytes
from meshwright.planner.serving.ledger import RankLedger, ServingSizes
from meshwright.planner.serving.runners import serving_ledger
from meshwright.serving.engine import build_runner
from meshwright.serving.rank_starter import RankPlan
from meshwright.spec.config import ModelConfig
from meshwright.spec.refuse import serving_layout
from tests.conftest import REPOSITORY
from tests.serving import small_models
from tests.serving.small_models import NEEDS_COMPILER, write_model

BLOCKS, TOKENS, SEQUENCES, LENGTH = 5, 40, 8, 64
SIZES = ServingSizes(TOKENS, SEQUENCES, LENGTH, blocks=BLOCKS, scored_rows=40)


def small_config(name: str) -> ModelConfig:
    """A small model; of an even number of experts, and gpt-oss's biases fill no panels."""
    sizes = {
        "mixtral-tiny": {"experts": 4},
        "gpt-oss-tiny": {"experts": 4, "intermediate": 40, "expert_intermediate": 40},
    }
    return small_models.small_config(name, **sizes.get(name, {}))


def measure(directory: str, layout: str, dtype: str, kernels: str | None = None) -> tuple[int, dict[str, int]]:
    """Pipeline rank and bytes by item of this rank's runner."""
    config = small_config(Path(directory).name)
    parsed = serving_layout(layout, config)
    mesh = Mesh.single(parsed) if parsed.world_size == 1 else Mesh.create(parsed)
    plan = RankPlan(directory, layout, replace(SIZES, dtype=dtype), instruction_set=kernels)
    memory = build_runner(plan, mesh).memory()
    mesh.close()
    return mesh.pp.rank, memory


def predict(name: str, layout: str, dtype: str, runner: str = "kernels") -> tuple[RankLedger, ...]:
    config, sizes = small_config(name), ServingSizes(TOKENS, SEQUENCES, LENGTH, dtype)
    return serving_ledger(config, serving_layout(layout, config), sizes, runner).stages


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
    (rank,) = predict(name, "", dtype, "torch")
    check_plain_torch(rank, measure(str(directory), "", dtype, PLAIN_TORCH)[1])


@pytest.mark.parametrize(("name", "layout"), [("qwen3-tiny", "tp2"), ("qwen2-tiny", "pp2"), ("qwen2-moe-tiny", "tp2")])
def test_predicted_memory_matches_allocation_in_plain_torch_on_two_ranks(
    name: str, layout: str, two: LocalRanks, tmp_path: Path
):
    directory = write_model(tmp_path / name, small_config(name))
    stages = predict(name, layout, "float16", "torch")
    for stage, measured in two.run(measure, str(directory), layout, "float16", PLAIN_TORCH):
        check_plain_torch(stages[stage], measured)


_GROW = """
import json
import sys
import numpy as np
from meshwright.kernels.choice import open_kernels
from meshwright.kernels.operations import (
    Attention, Experts, ExpertsWorkspace, LatentAttention, LayerCache, Linear
)
from meshwright.monitoring.memory import read_peak_resident_bytes, read_resident_bytes, reset_peak_rss
from tests.kernels.conftest import Batch, one_sequence

tokens, attention, products = json.loads(sys.argv[1])
kernels, operations = open_kernels(), []


def fill(*shape, value=0.0):
    return np.full(shape, value, np.float32)


def pack(*shape):
    return kernels.pack(fill(*shape), "bfloat16")


heads, size, length = attention
keys, values = (kernels.allocate(shape, np.uint16) for shape in LayerCache.compute_shapes(1, 1, size))
cache, qkv = LayerCache(keys, values, size), fill(tokens, (heads + 2) * size)
operations.append(Attention(fill(tokens, heads * size), qkv, cache, heads, 0.1))
for kind, count, width in products:
    x, out = fill(tokens, width), fill(tokens, width if kind == "experts" else 16 * count)
    if kind == "experts":
        space = ExpertsWorkspace(tokens, count, count, width, 16)
        for array in vars(space).values():
            if isinstance(array, np.ndarray):
                array.fill(0)
        router = kernels.pack(fill(count, width), "float32")
        operations.append(Experts(out, x, router, pack(count, 32, width), pack(count, width, 16), space, count))
    elif kind == "latent":  # heads with 16 features without and 16 with position, and vectors of `width` elements
        cached, query = width + 16, 32 * count
        keys, values = (fill(*shape) for shape in LayerCache.compute_shapes(1, 1, cached, latent=True))
        wide, attended = fill(tokens, (count + 1) * cached + query), fill(tokens, count * cached)
        up, tables = (pack(count, width, 16), pack(count, 16, width)), (fill(length, 8), fill(length, 8))
        x, down, cache = fill(tokens, 16), pack(cached + query, 16), LayerCache(keys, values, cached)
        norms = (fill(width, value=1), None, None)
        operations.append(LatentAttention(out, x, down, *norms, *up, wide, None, attended, cache, *tables, 0.1))
    else:
        operations.append(Linear(out, x, pack(16, width)))
kernels.end_packing()


def run(op, length):
    positions = np.arange(length - tokens, length, dtype=np.int32)
    table, batch = np.zeros((1, length // 16), np.int32), kernels.create_op_list()
    batch.append(op)
    batch.run(Batch(positions, positions, positions % 16, np.array([0, tokens], np.int32), table, positions[:0]))


run(operations[0], tokens)
reset_peak_rss()
before = read_resident_bytes()
run(operations[0], min(length, 7168))  # the longest whose spans are shared work items
for op in operations:
    run(op, length)
print(read_peak_resident_bytes() - before, kernels.instruction_set)
"""


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("name", "attention", "products"),
    [
        ("qwen2-tiny", (16, 64, 131072), [("dense", 1, 98304), ("dense", 1, 131072), ("dense", 1, 4096)]),
        ("qwen2-tiny", (16, 64, 7168), [("dense", 1, 4096)]),  # just below the limit of `_SHARED_PARTIALS`
        ("qwen2-moe-tiny", (1, 16, 64), [("dense", 1, 32768), ("experts", 4, 20480)]),
        ("deepseek-v2-tiny", (1, 16, 64), [("dense", 1, 1024), ("latent", 16, 4096)]),
    ],
)
def test_predicted_scratch_is_what_long_contexts_and_wide_products_take(
    name: str, attention: tuple[int, int, int], products: list[tuple[str, int, int]]
):
    """One thread; all positions of the context are in one KV block, so that the cache takes nothing. At its peak, the
    process has no more than the memory of the widest product."""
    config, tokens, (heads, size, length) = small_config(name), 48, attention
    most = {kind: max(width for each, _, width in products if each == kind) for kind, _, _ in products}
    if config.latent is not None:
        latent = replace(config.latent, rank=most["latent"], rotary_dim=16)
        config, heads, size = replace(config, latent=latent), 16, 32
    config = replace(config, head_dim=size, **({"experts_per_token": 4} if "experts" in most else {}))
    arguments = json.dumps((tokens, attention, products))
    done = subprocess.run([sys.executable, "-c", _GROW, arguments], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    grown, instruction_set = done.stdout.split()
    rounded = (most["dense"], most.get("experts", 0)) if instruction_set in ("amx", "avx512_bf16") else (0, 0)
    predicted = scratch_bytes(config, (heads, 1), ServingSizes(tokens, max_length=length), rounded)
    assert 0.8 * predicted - 2**20 < int(grown) < predicted + 2**20
