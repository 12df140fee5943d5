"""The serving ledger and its number of KV blocks against closed forms."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.cost.dimensions import Dimensions, find_properties
from meshwright.planner.cost.micro_batch import ITEM_BYTES, LayerKind, MicroBatch
from meshwright.planner.serving import runners
from meshwright.planner.serving.ledger import ServingSizes, bill_text, fill_memory, parse_dtype
from meshwright.planner.serving.runners import TILE_TOKENS, serving_ledger
from meshwright.spec.presets import preset
from meshwright.spec.refuse import serving_layout
from meshwright.toml import read_packaged_toml
from tests.planner.memory.test_tables import DIMENSIONS

SIZES = ServingSizes(token_budget=512, max_sequences=32, max_length=2048, dtype="bfloat16")
MIB = 2**20
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": MIB, "GiB": 2**30}


def test_llama_3_8b_in_bfloat16_has_the_published_sizes():
    """16 bytes of KV cache for each of 8 heads of 128 features... = 128 KiB a token; 8.03 billion parameters."""
    config = preset("llama-3-8b")
    (rank,) = serving_ledger(config, Layout(), SIZES).stages
    assert rank.kv_block == 16 * 2 * 32 * 8 * 128 * 2 == 2 * MIB
    norms = 65 * 4096
    embedding = 128256 * 4096
    assert rank.weights == 2 * embedding + 4 * norms + 2048 * 128 * 4
    assert rank.packed == 2 * (8_030_261_248 - norms - embedding)
    assert rank.logits == 256 * 128256 * 4
    widths = 2 * 4096 + (32 + 16) * 128 + 4096 + 14336
    assert rank.workspace == 4 * (512 * widths + 256 * 4096)
    assert rank.communication == 0


def test_tied_embedding_is_held_once_on_one_stage_and_twice_on_two():
    config = preset("llama-3.2-1b")
    whole = serving_ledger(config, Layout(), SIZES).stages
    first, last = serving_ledger(config, Layout(pp=2), SIZES).stages
    matrix = 2 * config.vocabulary * config.hidden
    tables = 2048 * config.head_dim * 4
    assert first.weights + last.weights - tables == whole[0].weights + matrix
    assert first.packed + last.packed == whole[0].packed
    assert first.kv_block + last.kv_block == whole[0].kv_block
    assert first.logits == 0 < last.logits


def test_tensor_parallel_ranks_split_matrices_and_key_value_heads():
    config = preset("llama-3-8b")
    (whole,), (half,) = (serving_ledger(config, Layout(tp=tp), SIZES).stages for tp in (1, 2))
    assert 2 * half.packed == whole.packed
    assert 2 * half.kv_block == whole.kv_block
    assert half.communication == 4 * 2 * max(512 * 4096, 256 * 128256 // 2)
    (sixteenth,) = serving_ledger(config, Layout(tp=16, tensor_sequence_parallel=False), SIZES).stages
    assert 8 * sixteenth.kv_block == whole.kv_block  # two ranks share a head


def test_experts_are_split_over_expert_parallel_ranks():
    config = preset("mixtral-8x7b-v0.1")
    split = serving_layout("tp2 ep2", config)
    (sliced,), (spread,) = (serving_ledger(config, layout, SIZES).stages for layout in (split.with_(ep=1), split))
    assert sliced.packed == spread.packed  # half of every expert, or every other expert


def test_padding_counts():
    """Sizes like llama-tiny that are not multiples of 16 rows and 32 columns."""
    config = preset("llama-tiny")
    (rank,) = serving_ledger(config, Layout(), SIZES).stages
    (wide,) = serving_ledger(config, Layout(), ServingSizes(512, 32, 2048, "float32")).stages
    assert rank.packed >= wide.packed / 2


def test_kv_blocks_fill_the_memory_of_all_ranks():
    config = preset("llama-3.2-1b")
    ledger = fill_memory(serving_ledger(config, Layout(dp=2, tp=2), SIZES), 20 * 2**30)
    assert ledger.total <= 20 * 2**30 < ledger.total + ledger.kv_block
    assert ledger.kv_block == 4 * ledger.stages[0].kv_block
    document = ledger.to_json_dict()
    assert document["concurrency"]["sequences"] == 2 * ledger.sizes.blocks * 16 / 2048
    assert document["kv_bytes_per_token"] * 16 == 2 * ledger.stages[0].kv_block
    assert sum(ledger.items().values()) == ledger.total
    assert len(bill_text(ledger)) == len(ledger.items()) + 1


def test_sizes_of_a_small_model_are_printed_in_a_unit_that_shows_them():
    ledger = fill_memory(serving_ledger(preset("llama-tiny"), Layout(), SIZES), 2**30)
    lines = bill_text(ledger, [ledger.items()])
    for line, (name, size) in zip(lines, ledger.items().items(), strict=False):
        found, value, unit, *rest = line.split()
        assert found == name and float(value.replace(",", "")) * UNITS[unit] == pytest.approx(size, rel=5.1e-3)
        assert rest == (["measured", value, unit, "(+0.0%)"] if size else [])


def test_sliding_window_in_half_of_the_layers_allows_more_sequences():
    full = dataclasses.replace(preset("qwen2.5-1.5b"), max_positions=32768)
    mixed = dataclasses.replace(full, sliding_window=4096, windowed_layers=(True, False) * 14)
    sizes = dataclasses.replace(SIZES, max_length=32768)
    before, after = (fill_memory(serving_ledger(each, Layout(), sizes), 12 * 2**30) for each in (full, mixed))
    assert (before.blocks_of_longest, after.blocks_of_longest) == (2048, 2048 + (4096 + 512 - 3) // 16 + 2)
    assert before.kv_block == 2 * after.kv_block and before.fixed == after.fixed
    assert before.to_json_dict()["kv_bytes_per_token"] == after.to_json_dict()["kv_bytes_per_token"]
    assert after.concurrency / before.concurrency == pytest.approx(2 * 2048 / 2337, rel=1e-3)
    assert after.longest_within(2337) == 32768 and after.longest_within(2336) == 32752


def test_memory_below_one_request_is_refused_with_sufficient_size():
    config = preset("llama-3-8b")
    ledger = serving_ledger(config, Layout(), SIZES)
    with pytest.raises(UserError, match=r"memory 16 GiB: one request of 2048 tokens.*fit.*--memory 16\.\d\dGiB"):
        fill_memory(ledger, 16 * 2**30)
    needed = ledger.fixed + 128 * ledger.kv_block
    with pytest.raises(UserError, match="or --max-length 2032$"):
        fill_memory(ledger, needed - 1)
    assert fill_memory(ledger, needed).sizes.blocks == 128
    assert fill_memory(ledger, 2 * needed, most_blocks=130).sizes.blocks == 130


def test_dtype_names():
    assert [parse_dtype(name) for name in (None, "bf16", "float16")] == ["float32", "bfloat16", "float16"]
    with pytest.raises(UserError, match="bf16"):
        parse_dtype("bf61")


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("cp2", "serving runs on"),
        ("dp2 zero1", "serving runs on"),
        ("ep2 dp2", "ep2 does not divide tp1"),
        ("tp3", "tp3 does not divide"),
        ("pp99", "99 stages"),
        ("xx2", "xx2"),
    ],
)
def test_layouts_that_cannot_serve_are_refused(layout: str, reason: str):
    with pytest.raises(UserError, match=reason):
        serving_layout(layout, preset("mixtral-8x7b-v0.1"))


def test_empty_layout_is_one_rank():
    assert serving_layout("", preset("llama-3-8b")) == Layout()
    assert str(serving_layout("tp2 pp2 dp2", preset("llama-3-8b"))) == "dp2 tp2:nosp pp2"


def test_lists_of_items_name_properties_and_dimensions_that_exist(monkeypatch: pytest.MonkeyPatch):
    """A wrong name in a condition would only leave a buffer out."""
    sizes, properties = {*DIMENSIONS, "widest"}, set[str]()

    def record(batch: MicroBatch, kind: LayerKind, more: dict[str, int], flags: dict[str, bool]) -> Dimensions:
        sizes.update(more)
        properties.update(flags, find_properties(batch, kind))
        return Dimensions(batch, kind, more, flags)

    monkeypatch.setattr(runners, "Dimensions", record)
    for runner in runners.RUNNERS:
        serving_ledger(preset("llama-tiny"), Layout(), SIZES, runner)
    texts = [
        text for section in read_packaged_toml(runners.TABLE).values() for items in section.values()
        for each in ([items] if isinstance(items, list) else items.values()) for text in each
    ]  # fmt: skip
    assert len(texts) > 40
    for text in texts:
        size, _, condition = text.partition("?")
        assert set(re.findall(r"[a-z_]\w*", size)) <= sizes, text
        assert set(re.findall(r"[a-z_]\w*", condition)) <= properties, text


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("name", "tp"), [("gemma2-tiny", 2), ("deepseek-v3-tiny", 1), ("llama4-tiny", 1)])
def test_workspace_of_plain_torch_is_the_sum_of_its_tensors(name: str, tp: int, dtype: str):
    """Shapes by the variables of `serving/torch_runner.py` and of the model; a tile has 16 tokens."""
    config, item = preset(name), ITEM_BYTES[dtype]
    sizes = dataclasses.replace(SIZES, dtype=dtype)
    (rank,) = serving_ledger(config, serving_layout(f"tp{tp}", config), sizes, "torch").stages
    wide, heads, kv_heads, hidden, tile = max(4, item), config.heads // tp, config.kv_heads // tp, config.hidden, 16
    tables, rotations = {"gemma2-tiny": (3, 1), "deepseek-v3-tiny": (1, 1), "llama4-tiny": (3, 2)}[name]
    cached, latent, rotary = 2 * kv_heads * config.head_dim, config.latent, config.head_dim
    projected = [(tile, heads, config.head_dim)]
    if latent is not None:
        cached, rotary = latent.rank + latent.rotary_dim, latent.rotary_dim
        projected += [(tile, latent.query_rank or 0), *2 * [(tile, heads, cached)], (tile, heads, latent.value_dim)]
    width = -(-max(config.intermediate, config.shared_intermediate, config.expert_intermediate) // tp)
    narrow = [*2 * [(512, hidden)], (2048, cached), (tile, config.vocabulary)]
    in_wide = [
        (2048, cached), *3 * [(heads, 2048)], *2 * [(2048, rotations, rotary)], *4 * [(tile, hidden)],
        *3 * [(tile, width)], *projected, (tile, cached),
    ]  # fmt: skip
    integers, floats = [(tile, tables, 2048), (tile, tables, 16), (2048,)], [(512, hidden), (tile, config.vocabulary)]
    listed = (narrow, item), (in_wide, wide), (integers, 8), (floats, 4)
    assert tile == TILE_TOKENS
    assert rank.workspace == sum(size * math.prod(shape) for shapes, size in listed for shape in shapes)


def test_communication_and_slack_of_plain_torch_are_counted():
    config = preset("gemma2-tiny")
    (rank,) = serving_ledger(config, serving_layout("tp2", config), SIZES, "torch").stages
    assert rank.communication == 2 * TILE_TOKENS * 2 * config.vocabulary // 2  # slices of logits are gathered
    assert rank.slack == runners.RANK_BYTES + 2 * config.vocabulary // 2 * config.hidden
    hidden_states = 4 * SIZES.token_budget * config.hidden
    for runner in ("kernels", "torch"):
        stages = serving_ledger(config, serving_layout("pp3", config), SIZES, runner).stages
        assert [stage.communication for stage in stages] == [hidden_states, 2 * hidden_states, hidden_states]
