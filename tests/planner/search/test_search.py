"""The search: closed forms against single layouts and simulator; results train; suggested changes fit."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import ASYNCHRONOUS_SCHEDULES, SCHEDULES
from meshwright.planner.api import Plan, plan
from meshwright.planner.cost.engines import engine
from meshwright.planner.cost.step_time import step_time
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.memory.rank_memory import fullest_rank, peak_device_bytes
from meshwright.planner.problem import Problem, parse_reserve
from meshwright.planner.search import search as search_module
from meshwright.planner.search import shortlist as shortlist_module
from meshwright.planner.search.estimate import Estimate, estimate_layout
from meshwright.planner.search.screen import ScreenedLayouts, screen
from meshwright.planner.search.search import FINAL, SearchResult, layout_kinds, search
from meshwright.planner.search.space import layout_of
from meshwright.planner.show.page import plan_page
from meshwright.planner.show.text import search_text
from meshwright.spec.presets import preset
from meshwright.spec.refuse import refuse
from tests.conftest import exhaustive

PROBLEMS = {
    "dense": Problem(preset("llama-3-8b"), cluster("64xh100-sxm"), 4096, 256),
    "compiled": Problem(
        preset("llama-3-8b"), cluster("64xh100-sxm"), 4096, 256, engine("meshwright", compile=True), True
    ),
    "mixture": Problem(preset("mixtral-8x7b-v0.1"), cluster("32xa100-80"), 4096, 128),
    "megatron": Problem(preset("gpt3-175b"), cluster("128xa100-80"), 2048, 512, engine("megatron")),
    "one node": Problem(preset("gpt2-xl"), cluster("8xa100-40"), 1024, 64, precision="fp16"),
}


screened_once = cache(screen)


@pytest.fixture(autouse=True)
def _screen_each_problem_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches only read closed forms: those of a problem are computed once for all tests."""
    monkeypatch.setattr(search_module, "screen", screened_once)


def screened(name: str) -> ScreenedLayouts:
    return screened_once(PROBLEMS[name])


@cache
def searched(name: str) -> SearchResult:
    return search(PROBLEMS[name], 8)


def layouts(name: str, count: int) -> list[tuple[int, Layout]]:
    """Return a sample of the priced layouts."""
    every = screened(name)
    chosen = np.random.default_rng(7).choice(len(every.candidate), count, replace=False)
    return [
        (
            int(at),
            every.layout(at),
        )
        for at in chosen
    ]  # fmt: skip


@pytest.mark.parametrize("count", [30, *exhaustive(300)])
@pytest.mark.parametrize("name", PROBLEMS)
def test_vectorized_prices_match_single_layouts(name: str, count: int):
    problem, every = PROBLEMS[name], screened(name)
    for at, layout in layouts(name, count):
        alone = step_time(
            problem.config, layout, problem.cluster, problem.sequence, problem.batch, engine=problem.engine,
            simulate=False,
        )  # fmt: skip
        assert every.seconds[at] == pytest.approx(alone.seconds, rel=1e-9), str(layout)


def test_preference_loss_is_priced_alike_in_search():
    """Their logits are computed twice."""
    problem = Problem(preset("gpt2-xl"), cluster("8xa100-40"), 1024, 64, precision="fp16", pairs=True)
    alone = step_time(
        problem.config, (one := search(problem, 1).best[0]).layout, problem.cluster, 1024, 64, pairs=True
    )  # fmt: skip
    assert one.time.seconds == pytest.approx(alone.seconds)
    tokens = 1024 * 64 / 8
    twice = 2 * tokens * problem.config.hidden * problem.config.vocabulary / problem.cluster.peak("fp16")
    next_token = estimate_layout(dataclasses.replace(problem, pairs=False), one.layout).time.seconds
    assert next_token + twice < one.time.seconds < next_token + 4 * twice


@pytest.mark.parametrize("count", [30, *exhaustive(150)])
@pytest.mark.parametrize("name", ["dense", "mixture", "one node"])
def test_closed_form_memory_is_near_ledger(name: str, count: int):
    """Larger errors (few micro-batches, queues of weight gradients) are corrected by the ledger of the first priced
    layout of a kind."""
    problem, every = PROBLEMS[name], screened(name)
    errors = [
        abs(float(every.bytes[at]) / fullest_rank(problem, layout).peak_bytes - 1)
        for at, layout in layouts(name, count)
        if every.bytes[at] < 2 * problem.cluster.device.memory_bytes
    ]
    assert len(errors) > 10
    assert np.median(errors) < 0.08 and np.quantile(errors, 0.8) < 0.2 and max(errors) < 0.5, sorted(errors)


@pytest.mark.parametrize("name", [*(name for name in PROBLEMS if name != "mixture"), *exhaustive("mixture")])
def test_results_fit_train_and_are_sorted(name: str):
    problem, found = PROBLEMS[name], searched(name)
    assert len(found.best) == 8 == len(found.reasons) and found.searched == len(screened(name).candidate)
    times = [one.time.seconds for one in found.best]
    assert times == sorted(times)
    assert len({str(one.layout) for one in found.best}) == 8
    for one in found.best:
        assert one.fits and one.layout.world_size == problem.cluster.devices
        refuse(
            one.layout, problem.config, problem.batch, problem.sequence, planning=problem.engine.name != "meshwright"
        )
    assert found.reasons[0] == "the fastest" and all(found.reasons)


def test_search_lists_the_fastest_of_each_kind():
    """No decided layout of a listed kind is faster, and no two listed layouts are of one kind."""
    problem = PROBLEMS["one node"]
    found = search(problem, 4)
    every = screened("one node")
    kinds = layout_kinds(every)
    entries = zip(
        *(column.tolist() for column in (every.candidate, every.pipe, every.zero, every.hybrid, kinds)), strict=True
    )
    of_layout = {
        str(
            layout_of(problem, every.candidates[way], every.pipelines[pipe], zero, hybrid).with_(precision="fp16")
        ): kind
        for way, pipe, zero, hybrid, kind in entries
    }
    shown = {of_layout[str(one.layout)]: one.time.seconds for one in found.best}
    assert len(shown) == 4
    for one in search(problem, 60).best:
        kind = of_layout[str(one.layout)]
        assert kind not in shown or one.time.seconds >= shown[kind] * (1 - 1e-9), str(one.layout)


def test_reserved_memory_counts_as_taken():
    free, kept = (
        plan("llama-3-8b", "8xh100-sxm", "dp8 zero3 ac:full", sequence=8192, batch=64, reserve=reserve).best
        for reserve in (0, 0.9)
    )
    assert free.fits and not kept.fits and free.memory == kept.memory
    assert kept.problem.usable_bytes == pytest.approx(0.1 * free.problem.usable_bytes)
    room = free.problem.usable_bytes
    just = dataclasses.replace(
        free, problem=dataclasses.replace(free.problem, reserve=room - 1.01 * free.memory.device_bytes)
    )
    assert just.tight and just.fits and not free.tight and just.document()["tight"]
    for wrong in ("1.0", "81GiB", "much", "-1", "5GB"):
        with pytest.raises(UserError, match="reserve: takes a fraction below 1"):
            plan("llama-3-8b", "8xh100-sxm", "dp8 zero3", sequence=8192, batch=64, reserve=wrong)
    assert parse_reserve("8GiB", 80 * 2**30) == 8 * 2**30 and parse_reserve(0.25, 80.0) == 20.0


@pytest.mark.parametrize("layout", ["dp8 zero1", "dp8 zero3 mb2", "dp2 zero2 tp2 pp2 mb4", "dp4 cp2"])
def test_total_communication_is_at_least_what_is_exposed(layout: str):
    one = plan("llama-3-8b", "8xh100-sxm", layout, sequence=8192, batch=64).best
    assert one.communication_seconds >= one.exposed_seconds > 0
    assert one.document()["communication_seconds"]["exposed"] < one.time.seconds
    slow = cluster({"device": "h100-sxm", "devices": 8, "inside_gb_per_second": 20})
    slower = plan("llama-3-8b", slow, layout, sequence=8192, batch=64).best
    assert slower.communication_seconds > 2 * one.communication_seconds


def test_total_communication_of_zero_stages_follows_their_bytes():
    """Stages 1 and 2 send the same calls in a step of one micro-batch: 6 bytes a parameter; stage 3 sends 8."""
    one, two, three = (
        plan("llama-3-8b", "8xh100-sxm", f"dp8 zero{stage} ac:full", sequence=4096, batch=8).best.communication_seconds
        for stage in (1, 2, 3)
    )
    assert one == pytest.approx(two) and 1.3 < three / one < 1.37


@pytest.mark.parametrize("name", PROBLEMS)
def test_simulator_and_closed_forms_agree_on_the_best(name: str):
    differences = searched(name).differences[:FINAL]
    assert len(differences) == FINAL
    assert max(map(abs, differences)) < 0.02


@pytest.mark.parametrize("name", ["dense", "megatron"])
def test_no_candidate_beats_the_best(name: str):
    """All layouts whose closed form is near the best one's are priced exactly."""
    problem, every, first = PROBLEMS[name], screened(name), searched(name).best[0]
    near = np.flatnonzero(
        (every.seconds < 1.03 * first.time.seconds) & (every.bytes < problem.cluster.device.memory_bytes)
    )
    chosen = near if len(near) <= 20 else np.random.default_rng(1).choice(near, 20, replace=False)
    for at in chosen:
        layout = every.layout(at)
        one = estimate_layout(problem, layout)
        assert not one.fits or one.time.seconds >= first.time.seconds * 0.999, str(layout)


def test_search_covers_schedules_of_training():
    """Except `looped-bfs`, which keeps all micro-batches of several chunks, and `auto`, which is itself a search."""
    looked_at = {pipe.schedule for pipe in screened("dense").pipelines}
    assert looked_at == {*SCHEDULES} - {*ASYNCHRONOUS_SCHEDULES, "looped-bfs", "auto"}


@pytest.mark.parametrize("micro", [4, 8, 32])
@pytest.mark.parametrize("ranks", ["dp4 zero1 tp4 pp4", "dp8 zero3 tp2 pp4", "dp4 tp2 pp8"])
def test_looped_bfs_is_never_best(ranks: str, micro: int):
    """Therefore the search leaves it out."""
    problem = PROBLEMS["dense"]

    def seconds(schedule: str) -> float:
        layout = Layout.parse(f"{ranks}:{schedule} mb{micro}")
        return step_time(problem.config, layout, problem.cluster, 4096, 256).seconds

    for chunks in (2, 4):
        others = min(seconds(each) for each in (f"interleaved:{chunks}", f"interleaved-zb:{chunks}", "zb-v", "1f1b"))
        assert seconds(f"looped-bfs:{chunks}") >= others * (1 - 1e-9)
    layout = Layout.parse(f"{ranks}:looped-bfs:4 mb{micro}")
    names = "looped-bfs", "interleaved"
    kept = [fullest_rank(problem, layout.with_(schedule=name)).device_bytes for name in names]
    assert kept[0] >= kept[1]


def test_search_matches_exhaustive_pricing_of_small_space():
    """Two devices: every possible layout is priced separately."""
    config = preset("gpt2-tiny")
    problem = Problem(config, cluster("2xa100-80"), 64, 4)
    best: list[Estimate] = []
    for text in ("dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp2:nosp", "pp2"):
        for micro in (1, 2, 4):
            for recompute in ("", " ac:selective", " ac:full"):
                layout = Layout.parse(f"{text} mb{micro}{recompute}")
                if 4 % (layout.dp * micro) == 0:
                    best.append(estimate_layout(problem, layout))
    fastest = min(one.time.seconds for one in best)
    assert search(problem, 1).best[0].time.seconds <= fastest * (1 + 1e-9)


def test_suggested_change_makes_faster_layout_fit():
    problem = dataclasses.replace(PROBLEMS["dense"], cluster=cluster("8xa100-40"), batch=64, sequence=8192)
    found = search(problem, 3)
    assert found.advice
    for one in found.advice:
        assert not estimate_layout(problem, one.layout).fits or one.bytes > 0.9 * problem.cluster.device.memory_bytes
        if one.instead is not None:
            assert estimate_layout(problem, one.instead).fits, str(one.instead)
            assert one.instead_seconds is not None and one.instead_seconds >= 0.99 * found.best[0].time.seconds
            assert one.change
            parts = f" {one.instead} sequence-parallel norms "
            assert all(change == "mb1" or f" {change}" in parts for change in one.change.split(" and ")), one
    assert any(one.change and " and " in one.change for one in found.advice)  # if one change is not enough


@pytest.mark.parametrize("erring", [1.0, 0.1])
def test_layouts_that_do_not_fit_are_faster_and_not_listed(erring: float, monkeypatch: pytest.MonkeyPatch):
    """Even if closed forms of their times are wrong."""
    problem = Problem(preset("gpt2-xl"), cluster("8xv100"), 1024, 256, precision="fp16")
    every = screen(problem)
    too_large = search_module.add_device_overhead(problem, every.bytes) > problem.cluster.device.memory_bytes
    every.seconds[too_large & np.array([pipe.ranks == 8 for pipe in every.pipelines])[every.pipe]] *= erring
    monkeypatch.setattr(search_module, "screen", lambda problem: every)
    found = search(problem, 20)
    assert found.advice or erring < 1
    assert list(found.advice) == sorted(found.advice, key=lambda one: one.seconds)
    for one in found.advice:
        exact = estimate_layout(problem, one.layout)
        assert not exact.fits and one.layout not in [each.layout for each in found.best]
        assert one.seconds == pytest.approx(exact.time.seconds) and one.seconds < found.best[0].time.seconds
        if one.instead is not None:
            assert one.instead_seconds == pytest.approx(estimate_layout(problem, one.instead).time.seconds)


def test_layout_that_fits_by_ledger_alone_is_found():
    """The memory limit is above the ledger of a layout and below its closed form."""
    problem, found = PROBLEMS["one node"], search(PROBLEMS["one node"], 20)
    every = screened("one node")
    needed = search_module.add_device_overhead(problem, every.bytes)
    closed = {layout_of(problem, every.candidates[w], every.pipelines[p], z, h): n for w, p, z, h, n in zip(
        *(column.tolist() for column in (every.candidate, every.pipe, every.zero, every.hybrid, needed)), strict=True
    )}  # fmt: skip
    for one in found.best:
        exact = one.memory.device_bytes
        if exact * 1.03 < closed[one.layout] < exact * shortlist_module.DOUBT_ABOVE:
            break
    else:
        pytest.fail("no closed form asks for more than the ledger")
    narrow = cluster({"device": {"like": "a100-40", "memory_bytes": exact}, "devices": 8})
    again = search(dataclasses.replace(problem, cluster=narrow), 20)
    assert one.layout in [each.layout for each in again.best]
    assert one.layout not in [each.layout for each in again.advice]


@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_errors_of_closed_form_memory_are_equal_where_cp_replaces_dp(name: str):
    problem = PROBLEMS[name]
    shortlist, ratios = shortlist_module.Shortlist(problem, screened(name), 1), dict[int, list[float]]()
    every, sizes = shortlist.every, shortlist.sizes
    needed = shortlist_module.add_device_overhead(problem, every.bytes)
    near = np.flatnonzero(needed < 1.2 * problem.usable_bytes)
    several = near[np.isin(sizes[near], sizes[near[every.column("cp")[near] > 1]])]
    for at in near[np.isin(sizes[near], np.random.default_rng(3).choice(sizes[several], 8))]:
        exact = peak_device_bytes(problem, every.layout(at))
        ratios.setdefault(int(sizes[at]), []).append(exact / float(needed[at]))
    spread = [max(each) / min(each) for each in ratios.values() if len(each) > 1]
    assert len(spread) > 3 and max(spread) < shortlist_module.DOUBT_OF_EQUAL_SIZES, spread


def test_no_suggestions_if_nothing_fits():
    found = search(dataclasses.replace(PROBLEMS["megatron"], cluster=cluster("8xa100-40"), batch=8), 3)
    assert found.best == () and found.searched > 0


def test_stopped_search_reports_undecided_layouts(monkeypatch: pytest.MonkeyPatch):
    problem, whole = PROBLEMS["megatron"], searched("megatron")
    assert whole.undecided == 0 and "stopped" not in search_text(whole)
    assert Plan(problem, whole.best, whole).to_json_dict()["undecided"] == 0
    longer = search(problem, 20)
    monkeypatch.setattr(shortlist_module, "MOST_PRICED", 6)  # some of them do not fit
    some = search(problem, 4)
    shown, slowest = {one.layout for one in some.best}, some.best[-1].time.seconds
    better = [one for one in longer.best if one.layout not in shown and one.time.seconds < slowest]
    assert len(some.best) == 4 and better  # the search did stop early
    assert len(better) <= some.undecided < 100
    assert f"{some.undecided:,} more layouts may be better than the last one listed" in search_text(some)
    assert f"{some.undecided:,} more layouts" in plan_page(Plan(problem, some.best, some), "gpt3-175b")
    assert Plan(problem, some.best, some).to_json_dict()["undecided"] == some.undecided
    monkeypatch.setattr(shortlist_module, "MOST_PRICED", 0)
    none = search(problem, 3)
    assert not none.best and none.undecided > 1000
    assert "more layouts may be small enough" in search_text(none)
    with pytest.raises(UserError, match="^none of the"):
        Plan(problem, none.best, none).check_fits()


def test_indivisible_batch_is_refused():
    with pytest.raises(UserError, match="each of dp replicas needs a sequence"):
        search(dataclasses.replace(PROBLEMS["dense"], cluster=cluster("8192xh100-sxm"), batch=1, sequence=509))


def test_layouts_of_engine_that_keeps_gathered_parameters_are_found():
    """torchtitan keeps ZeRO-3 parameters all-gathered from the first micro-batch to the last."""
    problem = Problem(preset("llama-2-70b"), cluster("64xa100-80"), 4096, 512, engine=engine("torchtitan"))
    every = screen(problem)
    long = np.array([pipe.ranks > 1 for pipe in every.pipelines])[every.pipe] & (every.zero == 3)
    for at in np.flatnonzero(long)[:: int(long.sum()) // 12]:
        way, pipe = every.candidates[every.candidate[at]], every.pipelines[every.pipe[at]]
        layout = layout_of(problem, way, pipe, 3, int(every.hybrid[at]))
        assert every.bytes[at] > 0.7 * fullest_rank(problem, layout).peak_bytes, str(layout)
    found = search(problem, 3)
    assert len(found.best) == 3 and all(one.fits for one in found.best)


def test_problem_accepts_layouts_that_training_accepts():
    problem = Problem(preset("llama-tiny"), cluster("8xh100-sxm"), 64, 8)
    assert [problem.accepts(Layout.parse(text)) for text in ("dp8", "dp3", "dp2 tp4")] == [True, False, True]


@pytest.mark.parametrize("changes", [{"precision": "fp8"}, {"sequence": 8192}], ids=str)
def test_search_finds_a_layout_where_a_named_one_is_priced(changes: dict[str, object]):
    """Training refuses fp8 and sequences beyond the model's positions, which plans of one layout price all the same."""
    problem = dataclasses.replace(Problem(preset("llama-2-7b"), cluster("8xh100-sxm"), 4096, 32), **changes)
    named = Layout.parse("dp8 zero3 mb4").with_(precision=problem.precision)
    assert estimate_layout(problem, named).fits
    (best,) = search(problem, 1).best
    assert best.fits and best.time.seconds <= estimate_layout(problem, named).time.seconds
    assert any("train refuses it" in line for line in best.warnings)
