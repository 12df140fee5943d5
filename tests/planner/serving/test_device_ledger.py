"""The ledger of a server on GPUs against closed forms (against allocation: tests/serving/test_device_runner.py)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from meshwright.collectives.nccl_buffers import estimate_buffer_bytes
from meshwright.layout import Layout
from meshwright.planner.cost.micro_batch import ITEM_BYTES
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.planner.serving.runners import CONTEXT_BYTES, SCRATCH_BYTES, SPLIT_COLUMNS, serving_ledger
from meshwright.spec.presets import preset

SIZES = ServingSizes(token_budget=512, max_sequences=32, max_length=2048, dtype="bfloat16")
MIB = 2**20


def test_llama_3_8b_in_bfloat16_has_the_published_sizes_on_a_gpu():
    ledger = serving_ledger(preset("llama-3-8b"), Layout(), SIZES, "cuda")
    (rank,) = ledger.stages
    assert (rank.weights, rank.packed, ledger.front) == (2 * 8_030_261_248, 0, 0)
    assert rank.kv_block == 16 * 2 * 32 * 8 * 128 * 2 == 2 * MIB
    assert rank.logits == 4 * (256 + 2 * 32) * 128256  # for a step, and for CUDA graphs of 1, 2, 4 ... 32 sequences
    assert 0 < rank.workspace - SCRATCH_BYTES - rank.kv_block < 2 * MIB
    assert CONTEXT_BYTES < rank.slack < CONTEXT_BYTES + 128 * MIB


def test_tensor_parallel_ranks_split_weights_and_blocks_and_capture_no_graphs():
    config = preset("llama-3-8b")
    (whole,), (half,) = (serving_ledger(config, Layout(tp=tp), SIZES, "cuda").stages for tp in (1, 2))
    norms = 2 * 65 * 4096
    assert 2 * (half.weights - norms) == whole.weights - norms
    assert 2 * half.kv_block == whole.kv_block
    assert half.communication == 2 * 512 * 4096 * 2 and half.logits == 4 * 256 * 3 * 128256


def test_buffers_of_nccl_are_part_of_the_slack():
    """Only tensor-parallel ranks have them: stages exchange host tensors, and experts' outputs are summed over tp."""
    config = replace(preset("mixtral-tiny"), experts=4)
    texts = ("tp1", "tp2", "pp2", "tp2 pp2", "tp2 ep2", "tp2 dp2")
    found = {text: serving_ledger(config, Layout.parse(text), SIZES, "cuda").stages[0].slack for text in texts}
    buffers = estimate_buffer_bytes(Layout(tp=2), 2)
    assert found["tp1"] == found["pp2"] < CONTEXT_BYTES + 128 * MIB
    assert buffers == 2 * 24 * 14 * MIB  # two connections of 24 channels
    for text in ("tp2", "tp2 pp2", "tp2 ep2", "tp2 dp2"):
        assert buffers + CONTEXT_BYTES < found[text] < buffers + CONTEXT_BYTES + 128 * MIB


def test_experts_of_expert_parallel_ranks_have_their_full_width():
    config = replace(preset("mixtral-tiny"), experts=4, intermediate=4096, expert_intermediate=4096)
    split, whole = (serving_ledger(config, Layout.parse(text), SIZES, "cuda").stages[0] for text in ("tp2", "tp2 ep2"))
    assert split.weights == whole.weights
    assert whole.slack - split.slack == SIZES.token_budget * config.experts_per_token * 2 * 3 * 4096 // 2


def test_heads_are_not_padded_on_a_gpu():
    config = replace(preset("llama-tiny"), head_dim=24)
    (cpu,), (gpu,) = (serving_ledger(config, Layout(), SIZES, runner).stages for runner in ("kernels", "cuda"))
    assert gpu.kv_block == 16 * 2 * config.layers * config.kv_heads * 24 * 2
    assert cpu.kv_block == gpu.kv_block * (24 + 32) // (24 + 24)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_largest_activations_of_a_mixture_are_counted(dtype: str):
    """By the variables of `DeviceLayers.mix_experts`: weighted sums are float32 for parameters of any type."""
    config, tokens, item = preset("qwen2-moe-tiny"), SIZES.token_budget, ITEM_BYTES[dtype]
    (rank,) = serving_ledger(config, Layout(), replace(SIZES, dtype=dtype), "cuda").stages
    copies, hidden, width = tokens * config.experts_per_token, config.hidden, config.expert_intermediate
    in_type = [
        *4 * [(tokens, hidden)], (copies, hidden), (copies, 2 * width), (copies, width), *2 * [(copies, hidden)],
        *3 * [(tokens, config.shared_intermediate)],
    ]  # fmt: skip
    in_float32 = [(copies, hidden), *3 * [(tokens, hidden)], (tokens, SPLIT_COLUMNS)]
    most = sum(size * math.prod(shape) for shapes, size in ((in_type, item), (in_float32, 4)) for shape in shapes)
    assert rank.slack == CONTEXT_BYTES + most


@pytest.mark.parametrize(
    ("name", "changes", "numbers"),
    [
        ("llama-tiny", {}, 3 * 192),  # gate, up and their product
        ("gpt2-tiny", {}, 2 * 256),
        ("llama-tiny", {"intermediate": 32}, 2 * 8 * 8 + 2 * 4 * 8),  # queries and result, keys and values
        # Compressed queries twice, latent vector; of each head query, in latent form, its result, and values.
        ("deepseek-v3-tiny", {"heads": 16, "kv_heads": 16}, 2 * 24 + 24 + 16 * (24 + 24 + 16 + 16)),
    ],
)
def test_largest_activations_of_attention_and_of_a_dense_mlp_are_counted(name: str, changes: Any, numbers: int):
    config = replace(preset(name), **changes)
    (rank,) = serving_ledger(config, Layout(), SIZES, "cuda").stages
    of_token = 2 * (4 * config.hidden + numbers) + 4 * SPLIT_COLUMNS
    assert rank.slack == CONTEXT_BYTES + SIZES.token_budget * of_token
