"""Operations of a stage: FLOPs match torch's counter on the engine's model and the closed forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench.shared.flop_counting import ROWS, SEQUENCE, count, count_on_rank, small
from meshwright.comm.local import LocalRanks
from meshwright.layout import Layout
from meshwright.model import tiled_attention
from meshwright.model.documents import Documents
from meshwright.model.tiled_attention import Span, cut_span
from meshwright.model.transformer import Transformer
from meshwright.names import FAMILIES
from meshwright.planner.cost.blocks import layer_operations, layer_operators, list_operations
from meshwright.planner.cost.dimensions import keys_per_tile
from meshwright.planner.cost.engines import ENGINES, Engine, engine
from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.cost.operators import FLASH_BACKWARD, Operation
from meshwright.planner.cost.step_time import step_time
from meshwright.planner.hardware.cluster import cluster
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.config import ModelConfig
from meshwright.spec.flops import forward_flops_per_token, training_flops_per_token
from meshwright.spec.presets import PRESETS, preset
from meshwright.spec.stages import Stage, cut_into_stages, whole_model
from tests.planner.cost.operation_sums import total_flops

OURS = ENGINES["meshwright"]
TINY = [name for name in PRESETS if name.endswith("-tiny") and not preset(name).encoder]


def work(config: ModelConfig, layout: Layout, **options: object) -> list[Operation]:
    at_once = bool(options.pop("at_once", True))
    batch = MicroBatch.of(config, layout, ROWS, SEQUENCE, engine=OURS, **options)  # type: ignore[arg-type]
    return list_operations(batch, whole_model(config), at_once=at_once)


def halves(config: ModelConfig, layout: Layout, **options: object) -> tuple[float, float]:
    """Return the FLOPs of the engine's forward (including gradients of the head) and backward."""
    found = work(config, layout, **options)
    early = [one for one in found if one.name == "head" and one.phase in ("input", "weight")]
    forward = total_flops(found, "forward") + total_flops(early)
    return forward, total_flops(found) - forward


def test_every_family_has_a_tiny_preset():
    assert {preset(name).family for name in TINY} == set(FAMILIES)


MODES = [(name, "full") for name in TINY] + [
    (name, mode) for name in ("llama-tiny", "qwen2-moe-tiny") for mode in ("none", "selective")
]


@pytest.mark.parametrize(("name", "recompute"), MODES)
def test_flops_match_torch_counter(name: str, recompute: str):
    config = small(name)
    assert halves(config, Layout(recompute=recompute)) == count(config, recompute)


ADAPTED = [
    ("llama-tiny", "none", {}), ("llama-tiny", "selective", {"targets": ("v_proj", "*layers.1.mlp.down_proj")}),
    ("gpt2-tiny", "full", {"kind": "dora"}), ("qwen2-moe-tiny", "none", {"targets": ("*layers.1.*",)}),
    ("llama-tiny", "full", {}), ("dots1-tiny", "full", {"targets": ("all-linear",)}),
    ("qwen2-moe-tiny", "selective", {}), ("mixtral-tiny", "selective", {"targets": ("w1", "w2", "w3")}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "recompute", "adapter"), ADAPTED)
def test_flops_with_adapter_match_torch_counter(name: str, recompute: str, adapter: dict[str, Any]):
    """Frozen weights have no gradients, and nothing before the first adapter has a backward."""
    config = small(name, adapter=AdapterConfig(rank=4, **adapter))
    found, counted = halves(config, Layout(recompute=recompute)), count(config, recompute)
    assert found == pytest.approx(counted, rel=1e-9)
    if recompute == "none" and not adapter:
        expected = training_flops_per_token(config, SEQUENCE) * ROWS * SEQUENCE
        first = 2.0 * ROWS * SEQUENCE * config.hidden * (config.heads + 2 * config.kv_heads) * config.head_dim
        lora = 2.0 * ROWS * SEQUENCE * 3 * 4 * config.hidden
        assert sum(counted) == pytest.approx(expected - first - lora, rel=0.01)


@pytest.mark.parametrize("window", [1, 5, 24])
def test_flops_with_sliding_window_match_torch_counter(window: int):
    config = small("qwen2-tiny", sliding_window=window, windowed_layers=(True, False, True))
    assert halves(config, Layout()) == count(config)


def test_flops_with_documents_match_torch_counter():
    ids = torch.arange(SEQUENCE) // (SEQUENCE // 3)
    documents = Documents.from_ids(ids.expand(ROWS, -1))
    config = small("llama-tiny")
    assert halves(config, Layout(), documents=3) == count(config, documents=documents)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "qwen2-moe-tiny"])
def test_unfused_attention_flops_match_math_kernel(name: str, monkeypatch: pytest.MonkeyPatch):
    """Every query with every key, although half of them are masked."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    config = small(name, sliding_window=None, windowed_layers=None)
    monkeypatch.setattr("meshwright.model.axis_operations.attend", attend)
    assert halves(config, Layout(), kernel="scores") == count(config)


@pytest.mark.parametrize("window", [None, 8, 13])
@pytest.mark.parametrize("sequence", [16, 40])
def test_tiles_of_attention_read_the_keys_that_the_engine_reads(sequence: int, window: int | None):
    first_BS = Documents().first_visible_BS(sequence, window, torch.device("cpu"))
    tiles = cut_span(Span(slice(0, sequence), slice(0, sequence)), torch.zeros(16, 16), first_BS)
    keys = sum((q.stop - q.start) * (k.stop - k.start) for q, k, _ in tiles) / sequence
    assert keys_per_tile(sequence, 16, window) == keys


def test_softcapped_attention_on_gpus_is_that_of_tiles():
    """Two products forward and five backward, one of each in float32 (`FlopCounterMode`); no sums are saved."""
    config = preset("gemma2-tiny")
    shape = config.heads, 24, config.head_dim
    q, k, v = (torch.randn(2, many, *shape[1:]) for many in (config.heads, config.kv_heads, config.kv_heads))
    with FlopCounterMode(display=False) as forward:
        out = tiled_attention._compute_attention(q, k, v, None, 1.0, 50.0, None)
    with FlopCounterMode(display=False) as backward:
        tiled_attention._compute_gradients(torch.ones_like(out), [q, k, v], None, 1.0, 50.0, None)
    batch = MicroBatch.of(config, Layout(), 2, 24, kernel="tiled", device="cuda")
    found = [operator for operator in layer_operators(batch, 1) if operator.name.startswith("attention")]
    core = [one for operator in found for one in operator.operations if one.name in CORE]
    assert total_flops(core, "forward") == forward.get_total_flops()
    assert total_flops(core, "input") == backward.get_total_flops()
    assert total_flops([one for one in core if one.kind == "float32 product"]) == forward.get_total_flops()
    assert not any("log_sum" in each.name for operator in found for each in operator.saved)
    assert step_of("meshwright") > 1.3 * step_of("torchtitan")


CORE = ("attention.scores", "attention.values", "attention.gradients")


def step_of(engine: str) -> float:
    layout = Layout.parse("dp8 zero3 bf16 ac:full")
    return step_time(preset("gemma-2-9b"), layout, cluster("8xh100-sxm"), 8192, 8, engine=ENGINES[engine]).seconds


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(4) as local:
        yield local


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama-tiny", "tp4"),
        ("gpt2-tiny", "tp2 cp2:ulysses ac:selective"),
        ("qwen2-moe-tiny", "tp2 dp2 ac:full"),
        ("qwen2-moe-tiny", "tp2:nosp dp2 ep2"),
        ("mixtral-tiny", "dp4 ep2 ac:selective"),
        ("dots1-tiny", "tp2 dp2 ep2:etp2 ac:full"),
    ],
)
def test_flops_of_each_rank_match_torch_counter(ranks: LocalRanks, name: str, layout: str):
    """Routing differs between ranks; the sum over ranks equals that of balanced routing."""
    config, parsed = small(name), Layout.parse(layout)
    expected = halves(config, parsed)
    found = ranks.run(count_on_rank, layout, config)
    if not parsed.expert_parallel:
        assert set(found) == {expected}
    assert tuple(map(sum, zip(*found, strict=True))) == (4 * expected[0], 4 * expected[1])


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_forward_flops_of_latent_attention_match_torch_counter(name: str):
    """Of the model, without the padding of values to the size of queries."""
    config = dataclasses.replace(preset(name), layers=4, vocabulary=100)
    model = Transformer(config, device="meta")
    with FlopCounterMode(display=False) as counter:
        attention = model.layers[0].attention
        parts = attention.qkv(torch.ones(1, 7, config.hidden, device="meta"))
        if attention.query_up is not None:
            attention.query_up(parts[..., : config.latent.query_rank])
        k, v = attention._decompress(parts[..., : config.latent.rank])
        q, k = (torch.ones(1, config.heads, 7, config.head_dim, device="meta") for _ in range(2))
        torch.matmul(torch.matmul(q, k.mT), v)
        attention.output(v.transpose(1, 2).flatten(2))
    flops = forward_flops_per_token(config, 7, causal=False)
    assert counter.get_total_flops() * 4 == 7 * sum(n for part, n in flops.items() if part.startswith("attention."))


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt3-175b", "gemma-2-9b", "qwen3-30b-a3b", "mixtral-8x7b-v0.1"])
def test_operations_add_up_to_closed_forms(name: str):
    config = preset(name)
    found = list_operations(MicroBatch.of(config, Layout(), 2, 4096), whole_model(config))
    forward = forward_flops_per_token(config, 4096)
    tokens = 2 * 4096
    gates = config.layers * 2 * config.hidden if config.shared_gate else 0
    assert total_flops(found, "forward") == pytest.approx(tokens * (sum(forward.values()) + gates))
    core = forward["attention.scores"] + forward["attention.values"]
    # FlashAttention recomputes the scores, which model FLOPs do not count.
    executed = training_flops_per_token(config, 4096) + (FLASH_BACKWARD - 2) * core
    assert total_flops(found) == pytest.approx(tokens * executed)


def test_operations_of_stages_add_up_to_the_model():
    config = preset("gemma-2-2b")
    batch = MicroBatch.of(config, Layout(), 1, 8192)
    whole = list_operations(batch, whole_model(config))
    parts: list[Stage] = list(cut_into_stages(config, 5, 8192))
    found = [one for stage in parts for one in list_operations(batch, stage)]
    assert total_flops(found) == pytest.approx(total_flops(whole))
    assert sum(one.bytes * one.count for one in found) == pytest.approx(sum(one.bytes * one.count for one in whole))


def test_head_with_later_backward_computes_logits_twice():
    config = preset("llama-3-8b")
    once, twice = (work(config, Layout(pp=2, micro_batches=2), at_once=kept) for kept in (True, False))
    head = ROWS * SEQUENCE * 2.0 * config.hidden * config.vocabulary
    assert total_flops(twice) - total_flops(once) == pytest.approx(head)


def moved(found: list[Operation], name: str, *phases: str) -> float:
    return sum(one.bytes * one.count for one in found if one.name == name and one.phase in phases)


def of(config: ModelConfig, whose: Engine, layout: str = "dp1") -> list[Operation]:
    batch = MicroBatch.of(config, Layout.parse(layout), 1, 1024, engine=whose, kernel=whose.attention)
    return list_operations(batch, whole_model(config))


def test_elementwise_bytes_by_hand():
    """GPT-2: hidden 768, 1,024 tokens, bf16; a norm and an activation (width 3,072) read and write once."""
    config, megatron = preset("gpt2"), ENGINES["megatron"]
    found = of(config, megatron)
    assert moved(found, "norm", "forward") == (2 * 12 + 1) * 2 * 2 * 1024 * 768
    assert moved(found, "mlp.activation", "forward") == 12 * 2 * 2 * 1024 * 3072
    assert moved(found, "mlp.activation", "input") == 12 * 3 * 2 * 1024 * 3072
    assert moved(found, "attention.softmax", "forward") == 12 * 2 * 2 * 12 * 1024 * 1024
    assert moved(found, "loss", "forward", "input") == 60 * 1024 * 50257


def test_fusion_and_sequence_parallelism_reduce_elementwise_bytes():
    config = preset("llama-3-8b")
    eager, compiled = (
        sum(o.bytes * o.count for o in of(config, engine("torchtitan", compile=c))) for c in (False, True)
    )
    assert compiled < 0.8 * eager
    alone, split = of(config, OURS, "tp4:nosp"), of(config, OURS, "tp4")
    assert moved(split, "norm", "forward") == pytest.approx(moved(alone, "norm", "forward") / 4)
    assert moved(split, "mlp.activation", "forward") == moved(alone, "mlp.activation", "forward")


def test_fused_gradient_accumulation_needs_no_extra_bytes():
    config = dataclasses.replace(preset("gpt2"), layers=1)
    fused, added = of(config, ENGINES["megatron"]), of(config, ENGINES["nanotron"])
    weights = 768 * 3072
    assert not any(one.name.endswith(".sum") for one in fused)
    assert moved(added, "mlp.up.sum", "weight") == (2 + 2 * 4) * weights
    plain = moved(added, "mlp.up", "weight")
    assert moved(fused, "mlp.up", "weight") - plain == (2 * 4 - 2) * weights


def test_unknown_engine_suggests_the_nearest():
    with pytest.raises(Exception, match='did you mean "megatron"'):
        engine("megatrn")


def test_torchtitan_selective_recomputes_every_second_product():
    """torchtitan's selective recomputation: keys, the output of attention and half of the way up, and what lies
    between products; attention itself is kept."""
    config, layout = preset("llama-3-8b"), Layout.parse("ac:selective")
    found = list_operations(
        MicroBatch.of(config, layout, 1, 1024, engine=ENGINES["torchtitan"]),
        Stage(1, range(1, 2), first=False, last=False),
    )
    again = [one for one in found if one.phase == "recompute"]
    products = sum(one.flops * one.count for one in again if one.kind == "product")
    assert products == 2 * 1024 * (4096 * 1024 + 4096 * 4096 + 4096 * 14336)
    assert not any(one.kind == "attention" for one in again) and any(one.name == "norm" for one in again)


def test_torchtitan_selective_recomputes_the_up_projection_of_experts():
    """Its list of saved operations has no grouped product; backward does not read the result of down."""
    batch = MicroBatch.of(preset("qwen3-30b-a3b"), Layout.parse("ac:selective"), 1, 1024, engine=ENGINES["torchtitan"])
    again = [one for one in layer_operations(batch, 0) if one.phase == "recompute" and ".experts." in one.name]
    products = {one.name: one.flops * one.count for one in again if one.kind == "product"}
    assert products == {"mlp.experts.up": 2 * 1024 * 8 * 2048 * 2 * 768}


def test_fp8_casts_operands_of_block_products():
    config, stage = preset("llama-3-8b"), Stage(1, range(1, 2), first=False, last=True)
    plain, narrow = (
        list_operations(MicroBatch.of(config, Layout(), 1, 1024, engine=ENGINES["torchtitan"], eight_bit=flag), stage)
        for flag in (False, True)
    )
    casts = [one for one in narrow if one.name.endswith(".cast")]
    assert [one for one in narrow if one not in casts] == plain
    assert {one.name for one in casts} == {f"{part}.cast" for part in (
        "attention.qkv", "attention.output", "mlp.up", "mlp.down"
    )}  # fmt: skip
    read = 1024 * (6144 + 4096 + 28672 + 4096)  # output gradients; in forward, operands
    back = sum(one.bytes * one.count for one in casts if one.phase == "input")
    assert back == 8 * read  # scanned, and read and written once per orientation
