"""Expert-parallel ranks dispatch and combine tokens and compute what one device computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from meshwright.comm.local import LocalRanks
from meshwright.spec.presets import preset
from tests.conftest import exhaustive

SMALL: dict[str, Any] = {
    "vocabulary": 499, "layers": 2, "experts": 6, "experts_per_token": 3, "expert_intermediate": 12,
}  # fmt: skip
CONFIGS = {
    "mixtral": dataclasses.replace(preset("mixtral-tiny"), **SMALL, intermediate=12, router_loss=0.5),
    "qwen2_moe": dataclasses.replace(
        preset("qwen2-moe-tiny"), **SMALL, dense_layers=(), shared_intermediate=24, router_loss=0.5
    ),
    "dots1": dataclasses.replace(preset("dots1-tiny"), **SMALL, shared_intermediate=24, dense_layers=()),
    "deepseek_v3": dataclasses.replace(
        preset("deepseek-v3-tiny"),
        **SMALL,
        shared_intermediate=24,
        dense_layers=(),
        expert_groups=2,
        groups_per_token=1,
    ),
}
COMPARE = "tests.model.expert_parallel_cases:compare"


def pair(layouts: Sequence[str], more: Sequence[str] = ()) -> list[Any]:
    """Return each layout with one model, another one than the layout before it, and exhaustively with all. `more`:
    layouts that are exhaustive with every model."""
    names = [*CONFIGS]
    chosen = [(names[at % len(names)], layout) for at, layout in enumerate(layouts)]
    every = [(name, layout) for layout in (*layouts, *more) for name in names]
    return [*chosen, *exhaustive(*(each for each in every if each not in chosen))]


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(4) as local:
        yield local


LAYOUTS = [
    "dp4 ep4", "dp4 ep2:etp2", "dp4 ep1:etp4 ac:full", "dp2 tp2 ep2", "dp2 tp2:nosp ep4 ac:selective", "tp4 ep2:etp2",
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), pair(LAYOUTS[1::2], LAYOUTS[::2]))
def test_four_ranks_match_one_device(ranks: LocalRanks, name: str, layout: str):
    config = CONFIGS[name]
    if "ep4" in layout:
        config = dataclasses.replace(config, experts=8)
    for found in ranks.run(COMPARE, layout, config):
        assert found["worst"] < 1e-10
        assert found["rows with gradients"] > 0


@pytest.mark.parametrize(
    ("name", "layout"), pair(["dp4 ep2:etp2", "dp2 tp2 ep4", "tp4:nosp ep2 ac:full", "dp4 ep4 ac:selective"])
)
def test_ranks_whose_experts_get_no_tokens_have_zero_gradients(ranks: LocalRanks, name: str, layout: str):
    config = dataclasses.replace(CONFIGS[name], experts=8)
    found = ranks.run(COMPARE, layout, config, True)
    assert max(each["worst"] for each in found) < 1e-10
    assert any(each["rows with gradients"] == 0 for each in found), "no rank without tokens"


def test_ranks_make_equal_calls_and_recomputation_repeats_them(ranks: LocalRanks):
    config = dataclasses.replace(CONFIGS["qwen2_moe"], experts=8)
    calls = {}
    for recompute in ("none", "selective", "full"):
        found = [each["calls"] for each in ranks.run(COMPARE, f"tp4 ep2:etp2 ac:{recompute}", config, True)]
        assert all(each == found[0] for each in found)
        calls[recompute] = found[0]
    forward = ("experts.counts", "experts.dispatch", "experts.gather", "experts.sum", "experts.combine")
    backward = ("combine", "sum", "gather", "dispatch")
    once = dict.fromkeys((*forward, "router.load.tp", *(f"experts.{part}.backward" for part in backward)), 2)
    assert calls["none"] == once | {"experts.counts": 4}, "counts over ep and etp"
    again = {site for site, count in calls["selective"].items() if count == 2 * calls["none"][site]}
    assert again == {"experts.gather"}, "dispatched tokens are saved, and the host reads their numbers once"
    repeated = {site: 2 * count for site, count in calls["none"].items() if not site.endswith((".backward", ".counts"))}
    assert calls["full"] == calls["none"] | repeated


@pytest.mark.exhaustive
def test_compiled_blocks_match_eager_blocks(ranks: LocalRanks):
    config = dataclasses.replace(CONFIGS["qwen2_moe"], layers=1)
    for found in ranks.run(COMPARE, "dp2 tp2 ep2:etp2 ac:selective", config, False, "aot_eager"):
        assert found["worst"] < 1e-10
