"""The ledger of a server on GPUs against closed forms (against allocation: tests/serving/test_device_runner.py)."""

from __future__ import annotations

from dataclasses import replace

from meshwright.collectives.nccl_buffers import estimate_buffer_bytes
from meshwright.layout import Layout
from meshwright.planner.serving.device_ledger import CONTEXT_BYTES, SCRATCH_BYTES, device_ledger
from meshwright.planner.serving.ledger import ServingSizes, serving_ledger
from meshwright.spec.presets import preset

SIZES = ServingSizes(token_budget=512, max_sequences=32, max_length=2048, dtype="bfloat16")
MIB = 2**20


def test_llama_3_8b_in_bfloat16_has_the_published_sizes_on_a_gpu():
    ledger = device_ledger(preset("llama-3-8b"), Layout(), SIZES)
    (rank,) = ledger.stages
    assert (rank.weights, rank.packed, ledger.front) == (2 * 8_030_261_248, 0, 0)
    assert rank.kv_block == 16 * 2 * 32 * 8 * 128 * 2 == 2 * MIB
    assert rank.logits == 4 * (256 + 2 * 32) * 128256  # for a step, and for CUDA graphs of 1, 2, 4 ... 32 sequences
    assert 0 < rank.workspace - SCRATCH_BYTES - rank.kv_block < 2 * MIB
    assert CONTEXT_BYTES < rank.slack < CONTEXT_BYTES + 128 * MIB


def test_tensor_parallel_ranks_split_weights_and_blocks_and_capture_no_graphs():
    config = preset("llama-3-8b")
    (whole,), (half,) = (device_ledger(config, Layout(tp=tp), SIZES).stages for tp in (1, 2))
    norms = 2 * 65 * 4096
    assert 2 * (half.weights - norms) == whole.weights - norms
    assert 2 * half.kv_block == whole.kv_block
    assert half.communication == 2 * 512 * 4096 * 2 and half.logits == 4 * 256 * 3 * 128256


def test_buffers_of_nccl_are_part_of_the_slack():
    """Only tensor-parallel ranks have them: stages exchange host tensors, and experts' outputs are summed over tp."""
    config = replace(preset("mixtral-tiny"), experts=4)
    texts = ("tp1", "tp2", "pp2", "tp2 pp2", "tp2 ep2", "tp2 dp2")
    found = {text: device_ledger(config, Layout.parse(text), SIZES).stages[0].slack for text in texts}
    buffers = estimate_buffer_bytes(Layout(tp=2), 2)
    assert found["tp1"] == found["pp2"] < CONTEXT_BYTES + 128 * MIB
    assert buffers == 2 * 24 * 14 * MIB  # two connections of 24 channels
    for text in ("tp2", "tp2 pp2", "tp2 ep2", "tp2 dp2"):
        assert buffers + CONTEXT_BYTES < found[text] < buffers + CONTEXT_BYTES + 128 * MIB


def test_experts_of_expert_parallel_ranks_have_their_full_width():
    config = replace(preset("mixtral-tiny"), experts=4, intermediate=4096, expert_intermediate=4096)
    split, whole = (device_ledger(config, Layout.parse(text), SIZES).stages[0] for text in ("tp2", "tp2 ep2"))
    assert split.weights == whole.weights
    assert whole.slack - split.slack == SIZES.token_budget * config.experts_per_token * 2 * 3 * 4096 // 2


def test_heads_are_not_padded_on_a_gpu():
    config = replace(preset("llama-tiny"), head_dim=24)
    (cpu,), (gpu,) = (find(config, Layout(), SIZES).stages for find in (serving_ledger, device_ledger))
    assert gpu.kv_block == 16 * 2 * config.layers * config.kv_heads * 24 * 2
    assert cpu.kv_block == gpu.kv_block * (24 + 32) // (24 + 24)
