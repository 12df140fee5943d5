"""Block tables: assignment of layers, and the number of blocks of a sequence in each."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.spec.block_tables import (
    block_tables,
    first_block_in_window,
    max_blocks_held,
    max_sequence_tokens,
    serving_stages,
)
from meshwright.spec.config import ModelConfig
from meshwright.spec.presets import preset


def mixed(layers: int, period: int, window: int = 1024) -> ModelConfig:
    """A model with a window on every layer of a period except the last."""
    return dataclasses.replace(
        preset("qwen2.5-1.5b"), layers=layers, max_positions=32768, sliding_window=window,
        windowed_layers=tuple((layer + 1) % period != 0 for layer in range(layers)),
    )  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("period", [1, 2, 3, 6, 30])
def test_every_layer_has_a_unique_slot_and_a_window_at_least_as_large(period: int, stages: int):
    for layers in (24, 26, 34):
        config = mixed(layers, period)
        tables = block_tables(config, stages)
        for stage, depth in zip(serving_stages(config, stages), tables.depths, strict=True):
            taken = [tables.layers[layer] for layer in stage.layers]
            assert len(set(taken)) == len(taken)
            assert sorted({place for _, place in taken}) == list(range(depth))
        for layer, (table, _) in enumerate(tables.layers):
            held, own = tables.windows[table], config.layer_window(layer)
            assert held is None or (own is not None and held >= own)


def test_number_of_tables_follows_layers_per_window():
    assert block_tables(preset("llama-3-8b"), 1).windows == (None,)
    one = block_tables(preset("mistral-7b-v0.1"), 2)
    assert (one.windows, one.depths) == ((4096,), (16, 16))
    half = block_tables(mixed(24, 2), 1)
    assert (half.windows, half.depths) == ((1024, None), (12,))
    assert half.layers[:4] == ((0, 0), (1, 0), (0, 1), (1, 1))
    most = block_tables(mixed(48, 6), 1)  # 40 with a window, 8 without
    assert (most.windows, most.depths) == ((1024,) * 5 + (None,), (8,))


def test_layers_share_one_table_if_windows_save_less_than_unused_slots():
    """The first stage has only layers without a window, the second hardly any: half of all slots would be unused."""
    first_half = dataclasses.replace(mixed(28, 2, 4096), windowed_layers=tuple(layer >= 14 for layer in range(28)))
    assert block_tables(first_half, 1).windows == (None, 4096)
    assert block_tables(first_half, 2).windows == (None,)
    wide = dataclasses.replace(mixed(24, 2), max_positions=1024)  # never left
    assert block_tables(wide, 1).windows == (None,)


@pytest.mark.parametrize("window", [None, 1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("chunk", [1, 2, 16, 21])
def test_most_held_blocks_are_reached_and_never_exceeded(window: int | None, chunk: int):
    """Checked for every chunk of a sequence of 200 tokens."""
    held = max(
        (begin + chunk - 1) // 16 + 1 - first_block_in_window(begin, window)
        for begin in range(200 - chunk + 1)
        if begin + chunk <= 200
    )
    assert max_blocks_held(200, [window], chunk) == (held,)
    assert max_blocks_held(7, [window], chunk) == (1,)


def test_most_tokens_is_the_longest_sequence_within_the_blocks():
    for windows in ((None,), (20,), (None, 20), (None, 20, 40)):
        for blocks in range(30):
            found = max_sequence_tokens(blocks, windows, 8, 200)
            fits = [tokens for tokens in range(1, 201) if sum(max_blocks_held(tokens, windows, 8)) <= blocks]
            assert found == max(fits, default=0)
