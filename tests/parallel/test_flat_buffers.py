"""Flat buffers: every element of every parameter entry has one offset, and slices address it."""

from __future__ import annotations

import itertools

import pytest
import torch

from meshwright.parallel.flat_buffers import cut_slices, make_flat_layout, split_evenly
from meshwright.spec.parameter_entries import ALIGNMENT, compute_padded_numel
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny", "gpt2-tiny"])
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_slices_of_all_shards_cover_every_parameter_once(name, shards):
    table = parameter_table(preset(name))
    seen = {entry.name: torch.zeros(entry.numel, dtype=torch.int64) for entry in table.entries}
    for unit_name in table.units:
        unit = make_flat_layout(table, unit_name, shards)
        assert unit.padded % (shards * ALIGNMENT) == 0 and 0 <= unit.padded - unit.numel < shards * ALIGNMENT
        length = unit.padded // shards
        for shard in range(shards):
            start, stop = shard * length, (shard + 1) * length
            flat = torch.arange(start, stop)
            for piece in cut_slices(unit, "master", flat, start, start, min(stop, unit.numel)):
                assert piece.tensor.numel() == piece.stop - piece.start > 0
                seen[piece.name][piece.start : piece.stop] += 1
                offset = next(part.offset for part in unit.slices if part.entry.name == piece.name)
                assert piece.tensor[0] == offset + piece.start
    assert all(bool((count == 1).all()) for count in seen.values())


def test_decayed_tensors_come_first_in_a_unit():
    table = parameter_table(preset("gpt2-tiny"))
    unit = make_flat_layout(table, "layers.0")
    for placed in unit.tensors:
        assert (placed.offset < unit.decay_numel) == placed.tensor.decay
    assert unit.decay_numel == max(placed.offset + placed.numel for placed in unit.tensors if placed.tensor.decay)


def test_slice_is_writable_view_for_checkpoint():
    table = parameter_table(preset("llama-tiny"))
    unit = make_flat_layout(table, "head")
    flat = torch.zeros(unit.padded)
    for piece in cut_slices(unit, "master", flat, 0, 0, unit.numel):
        piece.tensor.fill_(1.0)
    assert flat[: unit.numel].sum() == unit.numel and not flat[unit.numel :].any()


def test_parts_of_range_are_adjacent_and_complete():
    edges = [split_evenly(7, 30, index, 4) for index in range(4)]
    assert edges[0][0] == 7 and edges[-1][1] == 30
    assert all(left[1] == right[0] for left, right in itertools.pairwise(edges))
    assert split_evenly(5, 5, 0, 3) == (5, 5)


def test_padding_is_minimal():
    assert compute_padded_numel(1, 1) == ALIGNMENT
    assert compute_padded_numel(3 * ALIGNMENT, 3) == 3 * ALIGNMENT
    assert compute_padded_numel(3 * ALIGNMENT + 1, 3) == 6 * ALIGNMENT
