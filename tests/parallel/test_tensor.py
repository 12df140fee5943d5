"""Tensor parallelism: shards, initial values, collective calls, and partial gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from bench.shared.backward_pass import run_backward
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model import loss
from meshwright.model.axis_operations import TensorOperations
from meshwright.model.initialise import initial_value
from meshwright.model.transformer import Transformer
from meshwright.parallel.flat_buffers import cut_slices, make_flat_layout
from meshwright.parallel.parallelize import build_axes
from meshwright.parallel.step import count_targets
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.spec import chunks
from meshwright.spec.parameter_entries import compute_padded_numel
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.verification.problem import Problem, scale_down_config
from tests.batches import make_batch, share_of
from tests.conftest import exhaustive
from tests.parallel.stage_cases import tensors_of

LLAMA = scale_down_config(preset("llama-3-8b"), tp=4)  # 4 heads, 2 key-value heads, vocabulary 499
CONFIGS = {
    "llama": LLAMA,
    "one key-value head": dataclasses.replace(LLAMA, kv_heads=1),
    "qwen3": scale_down_config(preset("qwen3-0.6b"), tp=4),
    "gpt2": scale_down_config(preset("gpt2"), tp=4),
}
SEQUENCE = 24


# --- shards


@pytest.mark.parametrize("layout_text", ["tp2", "tp4", "tp4:nosp", "dp2 zero1 tp2", "dp3 zero3 tp4"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_element_is_saved_once_with_holder_count(config, layout_text):
    layout, table = Layout.parse(layout_text), parameter_table(config)
    shards = layout.dp if layout.zero else 1
    written = {entry.name: torch.zeros(entry.numel) for entry in table.entries}
    held = {entry.name: torch.zeros(entry.numel) for entry in table.entries}
    for rank in range(layout.world_size):
        coordinates = layout.coordinates(rank)
        for name in table.units:
            unit = make_flat_layout(table, name, shards, layout, coordinates)
            assert unit.numel == table.unit_numel(name, layout)
            length = unit.padded // shards
            start = coordinates["dp"] * length
            stop = min(start + length, unit.numel)
            flat = torch.ones(length)
            for counts, position in ((written, coordinates), (held, None)):
                for piece in cut_slices(unit, "master", flat, start, start, stop, position):
                    place = piece.select(torch.arange(counts[piece.name].numel()))
                    assert len(place) == piece.tensor.numel() == piece.stop - piece.start > 0
                    counts[piece.name][place] += 1
    for entry in table.entries:
        assert bool((written[entry.name] == 1).all()), entry.name
        assert bool((held[entry.name] == entry.replicas(layout)).all()), entry.name


def test_slice_reports_its_columns_of_parameter():
    table, layout = parameter_table(LLAMA), Layout(tp=2)
    unit = make_flat_layout(table, "layers.0", 1, layout, {"tp": 1})
    entry = table.entry("model.layers.0.mlp.down_proj.weight")
    (piece,) = [
        p for p in cut_slices(unit, "master", torch.zeros(unit.numel), 0, 0, unit.numel) if p.name == entry.name
    ]
    values = torch.arange(entry.numel)
    assert torch.equal(piece.select(values), values.view(entry.model_shape)[:, 20:].reshape(-1))
    piece.tensor.fill_(7)
    written = torch.zeros(entry.numel)
    piece.write_into(written)
    assert torch.equal(written.view(entry.model_shape)[:, 20:], torch.full((24, 20), 7.0)) and written.sum() == 7 * 480


def beginning(layout_text: str, config: Any) -> tuple[list[tuple[str, bool]], bool]:
    """For each slice: True if it has its initial values; True if padding is zero and stays zero."""
    layout = Layout.parse(layout_text)
    mesh, table = Mesh.create(layout), parameter_table(config)
    model = Transformer(config, axes=build_axes(mesh), device="meta", dtype=torch.float64)
    parallel = ZeroEngine(model, table, mesh, seed=3, parameter_dtype=torch.float64, master_dtype=torch.float64)
    right = []
    for piece in parallel.master_slices(owned=False):
        entry = table.entry(piece.name)
        value = initial_value(entry, 3).double()
        right.append(
            (piece.name, torch.equal(piece.tensor, piece.select((value.T if entry.transposed else value).reshape(-1))))
        )
    one_step(parallel, model, mesh, config)
    for shard in parallel.shards:
        shard.master.sub_(shard.gradient)
    parallel.all_gather_parameters()
    rows = -(-config.vocabulary // layout.tp)
    filling = model.embedding.weight[max(0, config.vocabulary - mesh.tp.rank * rows) :]
    untouched = not bool(filling.any())
    mesh.close()
    return right, untouched


def one_step(parallel: ZeroEngine, model: Transformer, mesh: Mesh, config: Any, micro_batches: int = 1) -> None:
    batches = share_of(
        make_batch(Problem(config, batch=4, sequence=SEQUENCE), 0), mesh.data.rank, mesh.data.size, micro_batches
    )
    targets = count_targets([torch.from_numpy(batch.targets) for batch in batches], mesh)()
    parallel.begin_step(len(batches))
    for batch in batches:
        run_backward(parallel, model(*tensors_of(batch, mesh), parallel.prefetchers[0]) / targets)
    parallel.finish()


@pytest.mark.parametrize("layout", ["tp4", "dp2 tp2:nosp"])
@pytest.mark.parametrize("config", [CONFIGS["llama"], CONFIGS["gpt2"]], ids=["llama", "gpt2"])
def test_initial_values_equal_one_device_and_padding_stays_zero(four, layout, config):
    for right, untouched in four.run(beginning, layout, config):
        assert right and all(equal for _, equal in right), right
        assert untouched


# --- collective calls


def calls_of_a_step(
    layout_text: str, config: Any, backend: str | None = None
) -> dict[tuple[str, str], tuple[int, int]]:
    layout = Layout.parse(layout_text)
    mesh = Mesh.create(layout)
    model = Transformer(config, axes=build_axes(mesh), dtype=torch.float32)
    parallel = ZeroEngine(model, parameter_table(config), mesh, seed=3, parameter_dtype=torch.float32)
    if backend is not None:
        model.compile_blocks(backend=backend)
    mesh.record.clear()
    one_step(parallel, model, mesh, config, layout.micro_batches)
    mesh.close()
    assert parallel.memory() == parallel.predicted_bytes()
    return {(e["site"], e["operation"]): (e["calls"], e["sent_bytes"]) for e in mesh.record.table()}


LAYER_SITES = ("attention.input", "attention.output", "mlp.input", "mlp.output")


@pytest.mark.parametrize(("layout", "micro_batches"), [("tp4", 1), ("dp2 tp2 mb2", 2), ("dp2 zero3 tp2", 1)])
def test_layer_makes_four_all_reduces_or_halves_per_step(four, layout, micro_batches):
    """Two all-gathers and two reduce-scatters forward, two and two backward, of all hidden values of a micro-batch
    (Korthikanti et al. 2022, section 4.2.2)."""
    tp = Layout.parse(layout).tp
    tokens = 4 * SEQUENCE * tp // 4 // micro_batches  # of a micro-batch
    half = tokens * LLAMA.hidden * 4 * (tp - 1) // tp
    count = LLAMA.layers * micro_batches
    (calls, *_) = four.run(calls_of_a_step, layout, LLAMA)
    for site in LAYER_SITES:
        forward, backward = ("all_gather", "reduce_scatter") if "input" in site else ("reduce_scatter", "all_gather")
        assert calls.pop((site, forward)) == calls.pop((site + ".backward", backward)) == (count, count * half)
    assert not any(site.startswith(("attention", "mlp")) for site, _ in calls)


def test_tensor_parallelism_without_sequence_parallelism_makes_four_all_reduces(four):
    (calls, *_) = four.run(calls_of_a_step, "tp4:nosp", LLAMA)
    sent = 2 * 4 * SEQUENCE * LLAMA.hidden * 4 * 3 // 4
    expected = (LLAMA.layers, LLAMA.layers * sent)
    for site in ("attention.output", "mlp.output", "attention.input.backward", "mlp.input.backward"):
        assert calls.pop((site, "all_reduce")) == expected
    assert not any(site.startswith(("attention", "mlp")) for site, _ in calls)


@pytest.mark.slow
def test_compiled_blocks_make_the_same_calls(two):
    """Recomputation in a compiled backward repeats no communication."""
    config = dataclasses.replace(LLAMA, layers=2)
    (eager, _) = two.run(calls_of_a_step, "tp2", config)
    (compiled, _) = two.run(calls_of_a_step, "tp2", config, "aot_eager")
    assert compiled == eager


@pytest.mark.parametrize(("layout", "more"), [("tp4 ac:selective", 2), ("tp4 ac:full", 3)])
def test_recomputation_repeats_gathers_and_full_also_a_reduction(four, layout, more):
    """Selective saves reductions and repeats gathers; full repeats all calls but the block's last."""
    (calls, *_) = four.run(calls_of_a_step, layout, LLAMA)
    made = sum(count for (site, _), (count, _) in calls.items() if site.startswith(("attention", "mlp")))
    assert made == LLAMA.layers * (8 + more)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *(("tp4", name) for name in ("llama", "one key-value head", "qwen3", "gpt2")),
        ("tp4:nosp", "one key-value head"),
        *exhaustive(*(("tp4:nosp", name) for name in ("llama", "qwen3", "gpt2"))),
    ],
)
def test_partial_gradients_are_reduced_once_a_step(four, name, layout):
    config = CONFIGS[name]
    table, parsed = parameter_table(config), Layout.parse(layout)
    expected: dict[int, int] = {}
    for entry in table.entries:
        if "tp" in entry.gradient_axes(parsed):
            copies = entry.replicas(parsed)
            part = entry.numel * copies // 4
            expected[copies] = expected.get(copies, 0) + part
    (calls, *_) = four.run(calls_of_a_step, f"{layout} mb2", config)
    found = {site: value for (site, _), value in calls.items() if site.startswith("tensor.")}
    names = {4: "tensor.gradients", 2: "tensor.gradients.shared_heads"}
    assert found == {names[n]: (1, 2 * numel * 4 * (n - 1) // n) for n, numel in expected.items()}


def test_ranks_with_different_token_counts_chunk_loss_equally(monkeypatch):
    monkeypatch.setattr(chunks, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(chunks, "CHUNK_LOGITS", {"cpu": 747})  # 2 tokens of 250 rows, 3 of 249
    hidden, targets = torch.randn(24, 8), torch.zeros(24, dtype=torch.int64)
    cuts = [
        [
            chunk.tokens
            for chunk in loss._iterate_logit_chunks(
                hidden, targets, loss.OutputHead(weight, TensorOperations(), widest=250)
            )
        ]
        for weight in (torch.randn(250, 8), torch.randn(249, 8))
    ]
    assert cuts[0] == cuts[1] and len(cuts[0]) == 12


def test_flat_buffer_lengths_match_parameter_table():
    table, layout = parameter_table(LLAMA), Layout(tp=4)
    for name in table.units:
        units = [make_flat_layout(table, name, 2, layout, {"tp": rank}) for rank in range(4)]
        assert len({(unit.numel, unit.padded, unit.decay_numel) for unit in units}) == 1, "equal on all ranks"
        assert units[0].padded == compute_padded_numel(units[0].numel, 2)
