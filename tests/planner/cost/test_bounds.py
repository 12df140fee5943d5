"""Bounds of predicted steps: quantiles of published runs by kind, wider for requests that no published run is like."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest

from bench import plan_bounds
from bench.published_runs import PUBLISHED, Run, runs
from meshwright.layout import Layout
from meshwright.planner.api import plan
from meshwright.planner.cost.bounds import LIMITS, RunKind, StepProperties, bound_seconds, read_bounds_table
from meshwright.planner.cost.rates import constants
from meshwright.planner.cost.step_time import step_time
from meshwright.planner.hardware.calibration import Calibration
from meshwright.planner.hardware.cluster import cluster
from meshwright.spec.presets import preset
from tests.planner.calibration_cases import cluster_file

DENSE = StepProperties(False, "Hopper", False, "megatron-core", 64, 8192, 1, 4.0)


@pytest.mark.parametrize("seed", range(3))
def test_quantiles_hold_the_stated_weight(seed: int):
    """Against the definition, on ratios with weights."""
    chosen = random.Random(seed)
    ratios = [math.exp(chosen.gauss(0, 0.2)) for _ in range(200)]
    weights = [chosen.choice((0.1, 1.0)) for _ in ratios]
    low, high = plan_bounds.quantiles(ratios, weights)
    held = sum(weight for ratio, weight in zip(ratios, weights, strict=True) if low <= ratio <= high)
    assert held / sum(weights) >= 1 - plan_bounds.OUTSIDE
    for bound, sign in ((low, 1), (high, -1)):
        beyond, up_to = (
            sum(weight for ratio, weight in zip(ratios, weights, strict=True) if sign * ratio < sign * limit)
            for limit in (bound, bound + sign * 1e-12)
        )
        assert beyond / sum(weights) <= plan_bounds.OUTSIDE / 2 < up_to / sum(weights)


def test_prediction_itself_lies_between_its_bounds():
    low, high = plan_bounds.quantiles([1.2, 1.3, 1.4], [1, 1, 1])
    assert (low, high) == (1.0, 1.4)


@pytest.mark.parametrize("seed", range(3))
def test_conformal_shift_holds_new_projects(seed: int):
    """Against its promise: of projects that are alike, the factor from 30 holds nine tenths of the runs of others."""
    chosen = random.Random(seed)

    def score(project: int) -> list[tuple[str, float]]:
        own = abs(chosen.gauss(0, 0.1))
        return [(f"project {project}", math.exp(own + chosen.gauss(0, 0.03))) for _ in range(chosen.choice((1, 5, 60)))]

    held = []
    for _ in range(60):
        shift = plan_bounds.conformal_shift([each for project in range(30) for each in score(project)])
        held += [sum(each <= shift for _, each in runs) / len(runs) for runs in map(score, range(5))]
    assert 0.88 <= sum(held) / len(held) <= 0.97


def test_conformal_shift_counts_projects_and_not_their_runs():
    many = [("one", 3.0)] * 100 + [(f"project {number}", 1.0 + number / 100) for number in range(98)]
    assert plan_bounds.conformal_shift(many) == 1.0 + 89 / 100  # the 90th of 99 projects: 90 % of 100
    assert plan_bounds.conformal_shift(many[:105]) == 3.0  # of six, the farthest: no quantile above it is known
    assert plan_bounds.conformal_shift(many[:105], "one") == 1.04
    assert plan_bounds.conformal_shift(many[100:110]) == 1.09  # the 10th of 10: the 9th would hold 82 %
    assert plan_bounds.conformal_shift([]) == plan_bounds.conformal_shift([("one", 0.9)]) == 1.0


def test_one_factor_widens_both_bounds():
    table, waiting = read_bounds_table(), DENSE._replace(waiting=0.0)
    for case in (DENSE, waiting, DENSE._replace(architecture="Ampere")):
        plain, found = dataclasses.replace(table, shift=1.0).bounds(case), table.bounds(case)
        assert found.high / plain.high == plain.low / found.low == pytest.approx(table.shift) and table.shift > 1


def test_bounds_depend_on_the_kind_of_run():
    table = read_bounds_table()
    wide = {
        name: table.bounds(one)
        for name, one in (
            ("Hopper", DENSE), ("Ampere", DENSE._replace(architecture="Ampere")),
            ("fp8", DENSE._replace(eight_bit=True)), ("experts", DENSE._replace(experts=True)),
        )
    }  # fmt: skip
    ratios = {name: each.high / each.low for name, each in wide.items()}
    assert ratios["Ampere"] < ratios["Hopper"] < ratios["experts"]
    assert all(each.low < 1 < each.high for each in wide.values())
    assert len({(each.low, each.high) for each in wide.values()}) == 4
    assert wide["Hopper"].outside == () and wide["Hopper"].kind is not None
    assert wide["Hopper"].kind.name == "dense, Hopper, 16 or 32 bits"


@pytest.mark.parametrize("name", LIMITS)
def test_bounds_widen_with_distance_from_published_runs(name: str):
    """By `widen` of their logarithm for each doubling of the largest published value (halving of the smallest)."""
    table = read_bounds_table()
    inside = table.bounds(DENSE)
    assert inside.kind is not None
    limit = inside.kind.limits[name]
    for doublings, wider in ((0, 1), (0.5, 1 + 0.5 * table.widen), (1, 1 + table.widen), (4, 1 + 4 * table.widen)):
        value = limit * 2 ** (LIMITS[name] * doublings)
        found = table.bounds(DENSE._replace(**{name: value}))
        assert found.high == pytest.approx(inside.high**wider) and found.low == pytest.approx(inside.low**wider)
        assert len(found.outside) == (doublings > 0) and found.distance == pytest.approx(doublings)


def test_kind_without_published_runs_is_named():
    found = read_bounds_table().bounds(DENSE._replace(architecture="Volta"))
    (line,) = found.outside
    assert line == "too few published runs of dense models on Volta in 16 or 32 bits"
    together = next(kind for kind in read_bounds_table().kinds if kind.has(DENSE._replace(architecture="Volta")))
    assert (
        found.distance == 1
        and found.kind == together
        and found.high == pytest.approx((together.high * read_bounds_table().shift) ** (1 + read_bounds_table().widen))
    )


def test_plan_says_what_its_bounds_are_from():
    case = {"sequence": 8192, "batch": 8}
    entry = plan("llama-3-8b", "8xh100-sxm", "dp8 zero3", **case).best.document()
    assert entry["bounds"]["kind"] == "dense, Hopper, 16 or 32 bits" and entry["bounds"]["outside"] == []
    assert entry["bounds"]["runs"] > 200 and not entry["bounds"]["engine_published"]
    far = plan(
        "llama-3-8b", "65536xh100-sxm", "dp65536 zero1", sequence=8192, batch=65536, engine="megatron-core"
    ).best.document()
    (outside,) = far["bounds"]["outside"]
    assert outside == "no published run (dense, Hopper, 16 or 32 bits) has as many devices as 65,536 (most: 16,384)"
    assert far["bounds"]["engine_published"] and far["bounds"]["distance"] == 2 and entry["bounds"]["distance"] == 0
    assert f"{outside}, so the range of the step time is wider" in far["warnings"]
    near = plan("llama-3-8b", "8xh100-sxm", "dp8 zero3", **case, engine="megatron-core").best.document()
    assert far["step_seconds_high"] / far["step_seconds_low"] > near["step_seconds_high"] / near["step_seconds_low"]


def test_short_step_has_wider_bounds_only_beyond_the_engines_own_runs():
    """Where the measured steps of an engine span more than the published ones, a step slightly shorter than all of
    these has the same factors as a longer one, and a plan does not warn of it."""
    table = dataclasses.replace(read_bounds_table(), own={"meshwright": RunKind(0.8, 1.3, 7)})
    asked = DENSE._replace(engine="meshwright")
    shortest = next(kind for kind in table.kinds if kind.has(asked)).limits["seconds"]
    longer, shorter, far = (table.bounds(asked._replace(seconds=each * shortest)) for each in (1.01, 0.99, 0.1))
    assert shorter.outside and not longer.outside
    assert (shorter.low, shorter.high) == (longer.low, longer.high) == (0.8, 1.3) and not shorter.widened
    assert far.low < 0.8 and far.high > 1.3 and far.widened


def test_plan_warns_of_a_short_step():
    far = plan("gpt2", "8xa100-40", "dp8", sequence=1024, batch=64).best
    assert far.time.low / far.time.seconds < read_bounds_table().own["meshwright"].low and far.time.bounds.widened
    assert f"has a step as short as {far.time.seconds:.3g} s" in far.warnings[0]


@pytest.mark.parametrize("case", [DENSE, DENSE._replace(experts=True), DENSE._replace(sequence=2**24)])
def test_bounds_are_narrower_for_steps_that_hardly_wait(case: StepProperties):
    """Their logarithm, without the factor of all bounds, grows with the share of waiting, from `narrow` of the kind's
    to all of it."""
    table = dataclasses.replace(read_bounds_table(), shift=1.0)
    widest = table.bounds(case)
    for share, part in ((0.0, 0.0), (0.25, 0.25), (0.5, 0.5), (1.0, 1.0), (7.0, 1.0)):
        found = table.bounds(case._replace(waiting=share * table.waiting))
        spread = table.narrow + part * (1 - table.narrow)
        assert (found.low, found.high) == (pytest.approx(widest.low**spread), pytest.approx(widest.high**spread))
    assert table.bounds(case._replace(waiting=-1e-9)).high == pytest.approx(widest.high**table.narrow)


def test_bounds_of_a_plan_are_by_its_share_of_waiting():
    """Pipelines wait more than data parallelism that overlaps; sequences that devices share have the whole bounds."""
    case = {"sequence": 8192, "engine": "megatron-core"}
    table = read_bounds_table()
    for layout, batch in (("dp8 zero1 mb64", 512), ("pp8 mb8 ac:full", 8), ("cp8", 1)):
        found = plan("llama-3-8b", "8xh100-sxm", layout, batch=batch, **case).best.time
        waiting = 1 - found.breakdown["compute"] / found.seconds
        spread = 1.0 if layout == "cp8" else min(1.0, table.narrow + (1 - table.narrow) * waiting / table.waiting)
        assert found.bounds.kind is not None and not found.bounds.outside
        assert found.high / found.seconds == pytest.approx(found.bounds.kind.high**spread * table.shift)
        assert (spread < 1) == (layout == "dp8 zero1 mb64"), (layout, waiting)


def test_bounds_grow_steadily_with_distance():
    """No jump where a request first goes beyond what was published, none wider between two doublings."""
    table, asked = read_bounds_table(), DENSE._replace(sequence=131072)
    lengths = (131072, 131073, 160000, 262143, 262144)
    widths = [table.bounds(asked._replace(sequence=each)).high for each in lengths]
    assert widths == sorted(widths) and len(set(widths)) == len(lengths)
    assert widths[1] == pytest.approx(widths[0], rel=1e-5) and widths[3] == pytest.approx(widths[4], rel=1e-5)


def test_bounds_of_the_default_engine_span_its_own_measurements():
    """No published run has it; this repository's steps took up to 1.21 times what the planner predicts, and 0.81 times:
    the table is written again (`bench/plan_accuracy.py --bounds`) where predictions change."""
    own = read_bounds_table().bounds(DENSE._replace(engine="meshwright", waiting=0.0))
    ratios = plan_bounds.own_ratios().values()
    assert own.low == pytest.approx(min(ratios), abs=0.001) and own.low <= min(ratios)
    assert own.high >= max(ratios) > 1.1 and plan_bounds.own() == {
        name: {"low": each.low, "high": each.high, "runs": each.runs} for name, each in read_bounds_table().own.items()
    }
    assert not own.engine_published and own.engine_runs == len(ratios)
    assert read_bounds_table().bounds(DENSE).engine_runs == 0


def test_bounds_of_mixtures_are_not_narrower_than_those_of_all_mixtures():
    """Few have published any: they stay together, with whatever precision and architecture."""
    asked = DENSE._replace(experts=True)
    for name in ("Hopper", "Blackwell"):
        for eight_bit in (True, False):
            kind = read_bounds_table().bounds(asked._replace(eight_bit=eight_bit, architecture=name)).kind
            assert kind is not None and kind.name == "experts" and kind.high > 1.4


def test_runs_of_one_organisation_and_engine_are_one_project():
    named = {plan_bounds.project(one) for one in runs(PUBLISHED) if isinstance(one, Run)}
    assert sum(name == "NVIDIA, megatron-core" for name in named) == 1
    assert not any("NeMo" in name or "docs" in name or "/" in name for name in named)


def test_bounds_of_a_calibrated_cluster_include_its_runs():
    found = dataclasses.replace(cluster("8xh100-sxm"), calibration=Calibration(1.1, 0.5, 3.0, 4))
    seconds, low, high, _ = bound_seconds(found, DENSE)
    assert (seconds, low, high) == (pytest.approx(4.4), pytest.approx(2.0), pytest.approx(12.0))


def test_step_on_a_probed_machine_has_constant_bounds(tmp_path: Path):
    """What published runs on GPUs say is not of a machine that was measured, here a CPU."""
    found = step_time(preset("llama-tiny"), Layout.parse("dp2"), cluster(str(cluster_file(tmp_path))), 64, 8)
    assert found.bounds.kind is None and found.bounds.document() == {}
    assert (found.bounds.low, found.bounds.high) == (constants()["band"]["low"], constants()["band"]["high"])


def test_table_of_runs_holds_each_kind_by_its_own_runs():
    """The file is what bench/plan_accuracy.py --bounds writes: the kinds narrow first, every limit known."""
    kinds = read_bounds_table().kinds
    named = [sum(value is not None for value in (kind.experts, kind.architecture, kind.eight_bit)) for kind in kinds]
    assert named == sorted(named, reverse=True) and named[-1] == 0
    assert all(kind.low < 1 < kind.high and set(kind.limits) == set(LIMITS) for kind in kinds)
    assert all(kind.projects >= plan_bounds.LEAST_PROJECTS for kind in kinds if kind.architecture or not kind.experts)
