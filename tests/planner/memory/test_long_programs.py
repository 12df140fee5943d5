"""Long programs: a full pipeline repeats, so a few rounds contain every memory snapshot, to the byte and tensor."""

from __future__ import annotations

from itertools import product

import pytest

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.cost.engines import ENGINES
from meshwright.planner.memory import ledger as ledger_module
from meshwright.planner.memory.ledger import REPEATING, Ledger, ledger, shorten_repeating_schedule
from meshwright.spec.presets import preset
from tests.conftest import exhaustive

CHUNKS = {"interleaved": (2, 4, 8), "interleaved-zb": (2, 4)}
MODELS = {name: preset(name) for name in ("llama-3-8b", "mixtral-8x7b-v0.1")}


def step(model: str, layout: Layout, pp_rank: int) -> Ledger:
    rank = pp_rank * layout.tp * layout.cp * layout.dp
    batch = layout.dp * layout.micro_batches
    return ledger(MODELS[model], layout, batch=batch, sequence=512, precision="bf16", rank=rank, device="cuda")


CASES = [("1f1b", 1), *((schedule, 2) for schedule in REPEATING), ("zb-h2", 10)]


@pytest.mark.parametrize(("schedule", "ranks"), [*CASES, *exhaustive(*product(REPEATING, (4, 8, 12)))])
def test_few_rounds_contain_every_memory_snapshot(schedule: str, ranks: int, monkeypatch: pytest.MonkeyPatch):
    for chunks in CHUNKS.get(schedule, (None,)):
        if ranks * (chunks or 2) > 32:
            continue
        name = schedule if chunks is None else f"{schedule}:{chunks}"
        for model, more, rounds in (
            ("llama-3-8b", "", 5), ("llama-3-8b", "zero2 ac:full", 11),
            ("mixtral-8x7b-v0.1", "zero3 ac:selective", 6), ("mixtral-8x7b-v0.1", "zero1", 9),
        ):  # fmt: skip
            layout = Layout.parse(f"dp2 {more} pp{ranks}:{name} mb{rounds * ranks}")
            assert shorten_repeating_schedule(layout).micro_batches == (3 if ranks > 8 else 4) * ranks
            for place in {0, ranks // 2, ranks - 1}:
                short = step(model, layout, place)
                with monkeypatch.context() as patch:
                    patch.setattr(ledger_module, "shorten_repeating_schedule", lambda same: same)
                    assert short == step(model, layout, place), f"{layout} {place}"


@pytest.mark.parametrize("schedule", REPEATING)
def test_shortened_schedule_of_any_number_of_ranks_is_possible(schedule: str):
    for ranks in (2, 3, 8, 9, 10, 11, 31):
        try:
            layout = Layout.parse(f"pp{ranks}:{schedule} mb{8 * ranks}")
        except UserError:
            continue  # the schedule is for an even number of ranks
        assert shorten_repeating_schedule(layout).micro_batches in (3 * ranks, 4 * ranks)


def test_irregular_program_is_walked_completely():
    for text in ("pp4:gpipe mb64", "pp4:interleaved:2 mb65", "pp2:looped-bfs:2 mb32", "pp4:zb-v mb16"):
        layout = Layout.parse(text)
        assert shorten_repeating_schedule(layout) == layout
    assert set(ENGINES["meshwright"].schedules) - set(REPEATING) == {"gpipe"}


def test_items_add_up_where_a_split_backward_ends():
    """The peak is at the end of the input gradients, when the units' saved activations are freed already."""
    layout = Layout.parse("dp12 zero3 pp2:zb-h2 mb8")
    found = ledger(
        MODELS["llama-3-8b"], layout, batch=96, sequence=4096, precision="bf16", rank=12, documents=True, device="cuda",
        compile=True,
    )  # fmt: skip
    assert found.peak_snapshot == "input gradients"
    assert sum(item.bytes for item in found.items if item.category != "framework") == found.peak_bytes
