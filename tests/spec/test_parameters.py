"""The parameter table: each rank's shards, their offsets, and initial values."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy
import pytest

from meshwright.layout import Layout
from meshwright.spec.config import ModelConfig
from meshwright.spec.families import FAMILIES
from meshwright.spec.parameters import ParameterEntry, ParameterTable, parameter_table
from meshwright.spec.presets import PRESETS, preset

# Awkward on purpose: an odd vocabulary, 5 layers, 2 key-value heads for up to 8 ranks, untied.
ODD = {
    "llama": dataclasses.replace(preset("llama-tiny"), vocabulary=499, layers=5, kv_heads=2, tied=False),
    "llama with biases": dataclasses.replace(
        preset("llama-tiny"), vocabulary=499, kv_heads=2, qkv_bias=True, output_bias=True, mlp_bias=True
    ),
    "qwen2": dataclasses.replace(preset("qwen2-tiny"), vocabulary=3, kv_heads=1),
    "qwen3": dataclasses.replace(preset("qwen3-tiny"), vocabulary=499, kv_heads=2),
    "gpt2": dataclasses.replace(preset("gpt2-tiny"), vocabulary=499),
    "bloom": dataclasses.replace(
        preset("bloom-176b"), vocabulary=499, hidden=64, layers=2, heads=8, kv_heads=8, head_dim=8, intermediate=256
    ),
    "gemma2": dataclasses.replace(
        preset("gemma-2-2b"), vocabulary=499, hidden=64, layers=2, kv_heads=2, head_dim=8, intermediate=64,
        windowed_layers=None,
    ),
    "nemotron": ModelConfig(
        **FAMILIES["nemotron"].fixed, family="nemotron", vocabulary=499, hidden=64, layers=2, heads=8, kv_heads=2,
        head_dim=8, intermediate=256, max_positions=64, norm_epsilon=1e-5,
    ),
    "deepseek_v2": dataclasses.replace(
        preset("deepseek-v2-tiny"), vocabulary=499, heads=8, kv_heads=8, experts=2, experts_per_token=1
    ),
    "deepseek_v3": dataclasses.replace(
        preset("deepseek-v3-tiny"), vocabulary=499, heads=8, kv_heads=8, layers=2
    ),
}  # fmt: skip
TENSOR_SIZES = (1, 2, 4, 8)
configs = pytest.mark.parametrize("config", ODD.values(), ids=ODD)


def numbered(entry: ParameterEntry, table: ParameterTable) -> numpy.ndarray:
    """Values of an entry: one number per element, different in every entry of its model parameter."""
    before = table.tensor(entry.tensor).entries[: table.tensor(entry.tensor).entries.index(entry)]
    start = sum(other.numel for other in before)
    return (numpy.arange(entry.numel) + start).reshape(entry.model_shape)


def held(table: ParameterTable, tensor: str, layout: Layout, tp: int) -> numpy.ndarray:
    """Shard of a model parameter on a tp rank; -1 in padding."""
    local = numpy.full(table.tensor(tensor).local_shape(layout), -1)
    for entry in table.tensor(tensor).entries:
        for box in table.local_slices(entry, layout, {"tp": tp}):
            assert (local[box.local_slices] == -1).all(), "two boxes overlap"
            local[box.local_slices] = numbered(entry, table)[box.slices]
    return local


@configs
def test_slices_of_ranks_tile_every_parameter_with_stated_replicas(config: ModelConfig):
    table = parameter_table(config)
    for tp, entry in itertools.product(TENSOR_SIZES, table.entries):
        layout = Layout(tp=tp)
        counted = numpy.zeros(entry.model_shape, dtype=int)
        for rank in range(tp):
            for box in table.local_slices(entry, layout, layout.coordinates(rank)):
                counted[box.slices] += 1
        assert (counted == entry.replicas(layout)).all(), (entry.name, tp)


@pytest.mark.parametrize(
    "layout", ["dp2 ep2", "tp4 ep2", "tp2 dp2 ep2:etp2", "dp4 ep1:etp2", "dp8 ep4:etp2", "tp8 ep8"]
)
@pytest.mark.parametrize("name", ["mixtral-tiny", "dots1-tiny"])
def test_each_expert_group_holds_every_expert_once(name: str, layout: str):
    config, parsed = dataclasses.replace(preset(name), experts=8), Layout.parse(layout)
    table = parameter_table(config)
    block = parsed.ep * parsed.etp
    for entry in (entry for entry in table.entries if entry.expert is not None):
        for first in range(0, parsed.world_size, block):
            counted = numpy.zeros(entry.model_shape, dtype=int)
            for rank in range(first, first + block):
                for box in table.local_slices(entry, parsed, parsed.coordinates(rank)):
                    counted[box.slices] += 1
                    local = table.tensor(entry.tensor).local_shape(parsed)
                    assert all(end.stop <= size for end, size in zip(box.local_slices, local, strict=True))
            assert (counted == 1).all(), entry.name
        assert entry.gradient_axes(parsed) == ("expert_data",) and entry.replicas(parsed) == 1


def test_rank_holds_consecutive_experts():
    """By definition: experts [p E / ep, (p + 1) E / ep), each with its columns of gate, then of up."""
    config, layout = dataclasses.replace(preset("mixtral-tiny"), experts=6), Layout.parse("dp4 ep2:etp2")
    table, width = parameter_table(config), config.expert_intermediate
    whole = numpy.arange(config.experts * 2 * width * config.hidden).reshape(config.experts, 2, 2, -1, config.hidden)
    for rank in range(4):
        mine = whole[(rank // 2) * config.experts // 2 :][: config.experts // 2, :, rank % 2]
        local = numpy.full(table.tensor("layers.0.mlp.experts.up.weight").local_shape(layout), -1)
        for entry in table.tensor("layers.0.mlp.experts.up.weight").entries:
            for box in table.local_slices(entry, layout, layout.coordinates(rank)):
                local[box.local_slices] = numbered(entry, table)[box.slices]
        assert (local == mine.reshape(local.shape)).all()


@configs
def test_neighbouring_ranks_share_replicated_parameters(config: ModelConfig):
    table = parameter_table(config)
    for tp, entry in itertools.product(TENSOR_SIZES, table.entries):
        layout = Layout(tp=tp)
        replicas = entry.replicas(layout)
        boxes = [table.local_slices(entry, layout, {"tp": rank}) for rank in range(tp)]
        for rank in range(tp):
            assert boxes[rank] == boxes[rank // replicas * replicas]


@configs
def test_only_the_vocabulary_is_padded(config: ModelConfig):
    table = parameter_table(config)
    for tp, tensor in itertools.product(TENSOR_SIZES, table.tensors):
        empty = sum((held(table, tensor.name, Layout(tp=tp), rank) == -1).sum() for rank in range(tp))
        if tensor.name in ("embedding.weight", "head.weight"):
            assert empty == (-config.vocabulary % tp) * config.hidden
        else:
            assert empty == 0, (tensor.name, tp)


@configs
def test_one_rank_holds_parameters_consecutively(config: ModelConfig):
    table = parameter_table(config)
    for tensor in table.tensors:
        whole = held(table, tensor.name, Layout(), 0)
        assert whole.shape == tensor.shape
        assert (whole.ravel() == numpy.arange(tensor.numel)).all()
        assert [entry.offset for entry in tensor.entries] == [
            tensor.local_offset(entry, Layout()) for entry in tensor.entries
        ]


@pytest.mark.parametrize("tp", TENSOR_SIZES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_rank_holds_kv_heads_of_its_query_heads(family: str, tp: int):
    """By definition: query head j reads key-value head j // (heads / kv_heads)."""
    config = ODD[family]
    table = parameter_table(config)
    dim, heads, kv_heads = config.head_dim, config.heads, config.kv_heads
    query, key, value = numpy.split(
        numpy.arange((heads + 2 * kv_heads) * dim * config.hidden).reshape(-1, config.hidden),
        [heads * dim, (heads + kv_heads) * dim],
    )
    for rank in range(tp):
        mine = list(range(rank * heads // tp, (rank + 1) * heads // tp))
        theirs = sorted({head // (heads // kv_heads) for head in mine})
        parts = [query[head * dim : (head + 1) * dim] for head in mine]
        for source in (key, value):
            parts += [source[head * dim : (head + 1) * dim] for head in theirs]
        local = held(table, "layers.0.attention.qkv.weight", Layout(tp=tp), rank)
        assert (local == numpy.concatenate(parts)).all()


@pytest.mark.parametrize("tp", TENSOR_SIZES)
def test_gate_and_up_projections_are_sharded_separately(tp: int):
    config = ODD["llama"]
    table = parameter_table(config)
    gate, up = numpy.split(numpy.arange(2 * config.intermediate * config.hidden).reshape(-1, config.hidden), 2)
    share = config.intermediate // tp
    for rank in range(tp):
        local = held(table, "layers.4.mlp.up.weight", Layout(tp=tp), rank)
        mine = slice(rank * share, (rank + 1) * share)
        assert (local == numpy.concatenate([gate[mine], up[mine]])).all()


def test_row_parallel_matrices_are_cut_along_their_inputs():
    config = ODD["llama"]
    table = parameter_table(config)
    whole = numpy.arange(config.hidden * config.intermediate).reshape(config.hidden, config.intermediate)
    for rank in range(4):
        local = held(table, "layers.0.mlp.down.weight", Layout(tp=4), rank)
        assert (local == numpy.split(whole, 4, axis=1)[rank]).all()


def test_gpt2_is_stored_transposed():
    table = parameter_table(ODD["gpt2"])
    entry = table.entry("transformer.h.0.attn.c_attn.weight")
    assert (entry.shape, entry.model_shape, entry.transposed) == ((64, 192), (192, 64), True)
    assert not table.entry("transformer.wte.weight").transposed
    assert not table.entry("transformer.h.0.attn.c_attn.bias").transposed


@configs
def test_names_are_unique_and_every_part_has_entries(config: ModelConfig):
    table = parameter_table(config)
    assert len({entry.name for entry in table.entries}) == len(table.entries)
    assert len({tensor.name for tensor in table.tensors}) == len(table.tensors)
    assert [entry for tensor in table.tensors for entry in tensor.entries] == list(table.entries)
    extra = ("positions",) * (config.positions == "learned") + ("embedding_norm",) * config.embedding_norm
    assert table.units == ("embedding", *extra, *(f"layers.{layer}" for layer in range(config.layers)), "head")
    assert sum(tensor.numel for tensor in table.tensors) == table.numel
    for entry in table.entries:
        assert table.entry(entry.name) is entry
        assert entry in table.tensor(entry.tensor).entries
        assert entry.unit == table.tensor(entry.tensor).unit


@configs
def test_flat_buffers_order_decayed_parameters_first_without_gaps(config: ModelConfig):
    table = parameter_table(config)
    for layout, unit in itertools.product((Layout(), Layout(tp=4)), table.units):
        at = 0
        for tensor in table.unit_tensors(unit):
            assert table.tensor_range(tensor, layout)[0] == at
            for entry in tensor.entries:
                start, stop = table.entry_range(entry, layout)
                assert (start, stop - start) == (at, math.prod(entry.local_shape(layout)))
                at = stop
            assert table.tensor_range(tensor, layout)[1] == at
        assert at == table.unit_numel(unit, layout)
        decays = [tensor.decay for tensor in table.unit_tensors(unit)]
        assert decays == sorted(decays, reverse=True)


@configs
def test_matrices_decay_and_vectors_do_not(config: ModelConfig):
    for entry in parameter_table(config).entries:
        assert entry.decay == (len(entry.shape) == 2)
        assert entry.decay == entry.name.endswith("weight") or "norm" in entry.name or ".ln_" in entry.name


def test_initial_values_follow_gpt2():
    table = parameter_table(ODD["gpt2"])
    residual = 0.02 / math.sqrt(2 * 3)
    for name, kind, std in (
        ("transformer.wte.weight", "normal", 0.02),
        ("transformer.wpe.weight", "normal", 0.02),
        ("transformer.h.1.attn.c_attn.weight", "normal", 0.02),
        ("transformer.h.1.attn.c_proj.weight", "normal", residual),
        ("transformer.h.1.mlp.c_proj.weight", "normal", residual),
        ("transformer.h.1.mlp.c_proj.bias", "zeros", 0.0),
        ("transformer.h.1.ln_1.weight", "ones", 0.0),
        ("transformer.h.1.ln_1.bias", "zeros", 0.0),
    ):
        assert (table.entry(name).initial.kind, table.entry(name).initial.std) == (kind, pytest.approx(std))


def axes_of(config: ModelConfig, name: str, layout: str) -> tuple[str, ...]:
    return parameter_table(config).entry(name).gradient_axes(Layout.parse(layout))


@pytest.mark.parametrize(
    ("family", "name", "layout", "axes"),
    [
        ("llama", "model.layers.0.mlp.up_proj.weight", "dp2", ("data",)),
        ("llama", "model.layers.0.mlp.up_proj.weight", "dp2 tp8 cp2 pp2", ("data",)),
        ("llama", "model.layers.0.input_layernorm.weight", "tp2", ("data", "tp")),
        ("llama", "model.layers.0.input_layernorm.weight", "tp2:nosp", ("data",)),
        ("llama", "model.norm.weight", "tp2", ("data", "tp")),
        ("llama", "model.layers.0.self_attn.k_proj.weight", "tp2", ("data",)),
        ("llama", "model.layers.0.self_attn.k_proj.weight", "tp4", ("data", "tp")),
        ("llama", "model.layers.0.self_attn.k_proj.weight", "tp4:nosp", ("data", "tp")),
        ("llama", "model.layers.0.self_attn.q_proj.weight", "tp4", ("data",)),
        ("llama with biases", "model.layers.0.self_attn.v_proj.bias", "tp8", ("data", "tp")),
        ("llama with biases", "model.layers.0.self_attn.o_proj.bias", "tp2", ("data", "tp")),
        ("llama with biases", "model.layers.0.self_attn.o_proj.bias", "tp2:nosp", ("data",)),
        ("llama with biases", "model.layers.0.mlp.gate_proj.bias", "tp2", ("data",)),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight", "tp2", ("data", "tp")),
        ("qwen3", "model.layers.0.self_attn.k_norm.weight", "tp2:nosp", ("data", "tp")),
        ("gpt2", "transformer.wpe.weight", "tp2", ("data", "tp")),
        ("gpt2", "transformer.wpe.weight", "tp2:nosp", ("data",)),
        ("llama", "model.embed_tokens.weight", "tp2 pp2", ("data",)),
        ("gpt2", "transformer.wte.weight", "tp2 pp2", ("data",)),
        ("gpt2", "transformer.wte.weight", "dp2", ("data",)),
    ],
)
def test_gradients_are_summed_over_ranks_with_partial_gradients(family, name, layout, axes):
    assert axes_of(ODD[family], name, layout) == axes


def test_largest_preset_table_is_built_quickly():
    largest = max(PRESETS.values(), key=lambda entry: entry.config.layers)
    table = parameter_table(largest.config)
    assert len(table.entries) == 3 + 9 * 126
