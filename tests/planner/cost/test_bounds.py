"""Bounds of predicted steps: by their difficulty, wider for requests that no published run is like, never absurd."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import numpy as np
import pytest

from bench import plan_bounds
from bench.plan_accuracy import predicted
from bench.published_runs import PUBLISHED, UNSEEN, Run, runs
from meshwright.layout import Layout
from meshwright.planner.api import plan
from meshwright.planner.cost.bounds import LIMITS, WIDEST, StepProperties, bound_seconds, read_bounds_table
from meshwright.planner.cost.rates import constants
from meshwright.planner.cost.step_time import step_time
from meshwright.planner.hardware.calibration import Calibration
from meshwright.planner.hardware.cluster import cluster
from meshwright.spec.presets import preset
from tests.planner.calibration_cases import cluster_file

DENSE = StepProperties(False, "Hopper", False, "megatron-core", False, 64, 8192, 1, 4.0, 8192)


@pytest.mark.parametrize("seed", range(3))
def test_fit_recovers_how_errors_grow(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Against the quantiles of which errors were drawn: of an exponential distribution of mean m, 95 % are below
    m log 20. A penalty makes what properties add smaller."""
    monkeypatch.setattr(plan_bounds, "RIDGE", 0.0)
    chosen = np.random.default_rng(seed)
    properties = np.column_stack([np.ones(20000), chosen.uniform(0, 3, 20000), chosen.integers(0, 2, 20000)])
    errors = chosen.exponential(properties @ [0.2, 0.1, 0.3])
    equal = np.full((1, 20000), 1 / 20000)
    [found] = plan_bounds.fit_quantile(properties, errors, equal)
    assert found == pytest.approx(np.array([0.2, 0.1, 0.3]) * math.log(20), rel=0.25)
    assert (errors <= properties @ found).mean() == pytest.approx(0.95, abs=0.01)
    [easier] = plan_bounds.fit_quantile(properties * [1, -1, 1], errors, equal)
    assert easier[1] == 0 and easier[0] > found[0]  # no difficulty makes a bound narrower
    monkeypatch.setattr(plan_bounds, "RIDGE", 0.05)
    [penalised] = plan_bounds.fit_quantile(properties, errors, equal)
    assert (penalised[1:] < found[1:]).all() and penalised[0] > found[0]


def test_fits_of_several_sets_of_runs_are_those_of_each_alone():
    """Of which some need more iterations, and some leave out a coefficient that would be negative."""
    chosen = np.random.default_rng(0)
    properties = np.column_stack([np.ones(200), chosen.uniform(0, 3, (200, 3)) * [1, 0.1, 5]])
    errors = chosen.standard_t(2, 200)
    weights = chosen.integers(0, 2, (12, 200)).astype(float)
    weights /= weights.sum(axis=1, keepdims=True)
    together = plan_bounds.fit_quantile(properties, errors, weights)
    for found, each in zip(together, weights, strict=True):
        rows = each > 0
        assert found == pytest.approx(plan_bounds.fit_quantile(properties[rows], errors[rows], each[None, rows])[0])
    assert (together == 0).any() and (together[:, 1:] > 0).any()


@pytest.mark.parametrize("seed", range(3))
def test_conformal_factor_holds_new_projects(seed: int):
    """Against its promise: of projects that are alike, the factor from 30 holds nine tenths of the runs of others."""
    chosen = random.Random(seed)

    def score(project: int) -> list[tuple[str, float]]:
        own = abs(chosen.gauss(0, 1.0))
        return [(f"project {project}", abs(own + chosen.gauss(0, 0.3))) for _ in range(chosen.choice((1, 5, 60)))]

    held = []
    for _ in range(60):
        factor = plan_bounds.conformal_factor([each for project in range(30) for each in score(project)])
        held += [sum(each <= factor for _, each in runs) / len(runs) for runs in map(score, range(5))]
    assert 0.88 <= sum(held) / len(held) <= 0.97


def test_conformal_factor_counts_projects_and_not_their_runs():
    many = [("one", 3.0)] * 100 + [(f"project {number}", 1.0 + number / 100) for number in range(98)]
    assert plan_bounds.conformal_factor(many) == 1.0 + 89 / 100  # the 90th of 99 projects: 90 % of 100
    assert plan_bounds.conformal_factor(many[:105]) == 3.0  # of six, the farthest: no quantile above it is known
    assert plan_bounds.conformal_factor(many[100:110]) == 1.09  # the 10th of 10: the 9th would hold 82 %
    assert plan_bounds.conformal_factor([]) == 1.0


DIFFICULT = {
    "experts": {"experts": True},
    "unknown_device": {"architecture": "Volta"},
    "user_program": {"user_program": True},
    "few_tokens": {"tokens": 4095},
}


@pytest.mark.parametrize("name", DIFFICULT)
def test_bounds_grow_with_difficulty(name: str):
    """Their logarithms by what bounds.toml says of a yes."""
    table = read_bounds_table()
    easy, hard = table.bounds(DENSE), table.bounds(DENSE._replace(**DIFFICULT[name]))
    assert math.log(hard.high) == pytest.approx(math.log(easy.high) + table.above[name])
    assert math.log(hard.low) == pytest.approx(math.log(easy.low) - table.below[name])
    assert easy.low < 1 < easy.high < hard.high


def test_easy_steps_have_equal_bounds():
    """More tokens or seconds than enough make no step easier."""
    table = read_bounds_table()
    one, other = table.bounds(DENSE), table.bounds(DENSE._replace(tokens=65536, seconds=60.0, eight_bit=True))
    assert (one.low, one.high) == (other.low, other.high)


HARDER = {
    "devices": (1, 64, 4096, 16384, 65536, 2**20),
    "sequence": (128, 8192, 131072, 2**17 + 1, 2**20, 2**24),
    "context": (1, 2, 16, 64, 1024),
    "seconds": (60.0, 1.0, 0.9, 0.5, 0.3, 0.226, 0.1, 0.001, 1e-6),
    "tokens": (65536, 8192, 1024, 512, 256, 64, 1),
    "experts": (False, True),
    "user_program": (False, True),
}
"""Values of properties, from easy to difficult."""


@pytest.mark.parametrize("name", HARDER)
def test_no_difficulty_narrows_the_bounds(name: str):
    """Whatever the other properties: 300 random steps of all kinds."""
    table, chosen = read_bounds_table(), random.Random(0)
    for _ in range(300):
        asked = DENSE._replace(
            architecture=chosen.choice(("Ampere", "Hopper", "Blackwell", "Volta")),
            eight_bit=chosen.random() < 0.5,
            **{each: chosen.choice(values) for each, values in HARDER.items()},
        )
        found = [table.bounds(asked._replace(**{name: value})) for value in HARDER[name]]
        assert [each.high for each in found] == sorted(each.high for each in found), asked
        assert [-each.low for each in found] == sorted(-each.low for each in found), asked
        assert all(1 / WIDEST <= each.low < 1 < each.high <= WIDEST for each in found)


@pytest.mark.parametrize(
    ("model", "cluster_name", "sequence", "batch", "layout"),
    [
        ("gpt2", "1xh100-sxm", 1024, 8, "dp1"),
        ("llama-3.1-8b", "8xh100-sxm", 128, 1, "tp8"),
        ("llama-3.1-8b", "8xh100-sxm", 7, 1, None),
        ("llama-3.1-8b", "8xh100-sxm", 7, 1, "tp8:nosp"),
        ("llama-tiny", "8xh100-sxm", 32, 8, "dp8"),
        ("llama-tiny", "1048576xh100-sxm", 32, 1048576, "dp1048576"),
    ],
)
def test_extreme_requests_have_bounds_of_an_order_of_magnitude(
    model: str, cluster_name: str, sequence: int, batch: int, layout: str | None
):
    """Also fewer tokens than tensor-parallel ranks: less than one of each rank."""
    time = plan(model, cluster_name, layout, sequence=sequence, batch=batch).best.time
    assert 1 / 4.0001 <= time.low / time.seconds < 1 < time.high / time.seconds <= 4.0001
    assert time.high / time.seconds > 2 and time.bounds.outside


@pytest.fixture
def errors() -> plan_bounds.Errors:
    """Errors of the runs of five projects."""
    fresh = (one for one in runs(UNSEEN, half="fresh") if isinstance(one, Run) and len(one.layouts) == 1)
    return plan_bounds.Errors([(one, predicted(one)) for one in fresh])


def test_bounds_of_a_project_do_not_depend_on_its_runs(errors: plan_bounds.Errors):
    """Scores are of bounds that the other projects give: wrong measurements of a project change only its own."""
    whose = errors.projects[0]
    chosen = errors.projects != whose
    before, score = errors.fit(chosen[None])[:2], dict(errors.score())
    errors.logarithms[~chosen] += 0.5 * np.sign(errors.logarithms[~chosen])
    after = errors.fit(chosen[None])[:2]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    assert dict(errors.score())[whose] > score[whose] + 0.5


def test_each_fit_weighs_its_projects_alike_and_knows_their_devices_alone(
    errors: plan_bounds.Errors, monkeypatch: pytest.MonkeyPatch
):
    """Against sums over the chosen runs: dense models and mixtures of each project have the same weight, 1 in all, and
    devices are known that enough of the chosen projects have."""
    given: list[np.ndarray] = []
    fit = plan_bounds.fit_quantile
    monkeypatch.setattr(plan_bounds, "fit_quantile", lambda *sides: (given.append(sides[2]), fit(*sides))[1])
    unknown = list(DENSE.measure_difficulty(())).index("unknown_device")
    known = []
    for whose in sorted(set(errors.projects)):
        chosen = errors.projects != whose
        _, _, [properties] = errors.fit(chosen[None])
        for weights in given[-2:]:
            shares = [weights[0, errors.weighed == each].sum() for each in set(errors.weighed[chosen])]
            assert shares == pytest.approx([1 / len(shares)] * len(shares)) and not weights[0, ~chosen].any()
        for name in set(errors.architectures):
            having = set(errors.projects[chosen & (errors.architectures == name)])
            known.append(len(having) >= plan_bounds.LEAST_PROJECTS)
            assert (properties[errors.architectures == name, unknown] == 1 - known[-1]).all(), (whose, name)
    assert 0 < sum(known) < len(set(errors.projects))  # Hopper, of three projects, is unknown without one of them


@pytest.mark.parametrize("name", LIMITS)
def test_bounds_widen_with_distance_from_published_runs(name: str):
    """Their logarithms by a fraction of an easy step's for each doubling of the largest published value (halving
    of the smallest), up to `WIDEST`."""
    table = read_bounds_table()
    assert table.above["beyond"] == pytest.approx(plan_bounds.WIDEN * table.above["every"], abs=0.001)
    inside = table.bounds(DENSE)
    assert inside.kind is not None
    limit = inside.kind.limits[name]
    inside = table.bounds(DENSE._replace(**{name: limit}))
    for doublings in (0, 0.5, 1, 4, 40):
        value = limit * 2 ** (LIMITS[name] * doublings)
        found = table.bounds(DENSE._replace(**{name: value}))
        assert found.high == pytest.approx(min(WIDEST, inside.high * math.exp(doublings * table.above["beyond"])))
        assert found.low == pytest.approx(max(1 / WIDEST, inside.low * math.exp(-doublings * table.below["beyond"])))
        assert len(found.outside) == (doublings > 0) and found.distance == pytest.approx(doublings)


def test_architecture_without_published_runs_is_named():
    found = read_bounds_table().bounds(DENSE._replace(architecture="Volta"))
    assert found.outside == ("too few published runs on Volta",)
    assert found.distance == 1 and found.kind is not None and found.kind.architecture is None


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
    users = plan("llama-3-8b", "8xh100-sxm", "dp8 zero3", **case, engine="torchtitan").best.document()
    wide, narrow, own = (each["step_seconds_high"] / each["step_seconds_low"] for each in (far, near, users))
    assert wide > narrow < own  # torchtitan's published runs are of users' programs


def test_plan_warns_of_a_short_step():
    far = plan("gpt2", "8xa100-40", "dp8", sequence=1024, batch=64).best
    assert f"has a step as short as {far.time.seconds:.3g} s" in far.warnings[0]


def test_tokens_of_a_plan_are_those_of_its_ranks():
    """Ranks of tp and cp share the tokens of a micro-batch: 128 are fewer than in any published run."""
    for layout, sequence, tokens in (("tp8", 1024, 128), ("cp2 tp4", 1024, 128), ("dp2 tp4", 512, 128)):
        found = plan("llama-3-8b", "8xh100-sxm", layout, sequence=sequence, batch=2 if "dp" in layout else 1).best
        assert f"has as few as {tokens} tokens of a micro-batch on a rank (fewest: 256)" in " ".join(found.warnings)


def test_bounds_grow_steadily_with_distance():
    """No jump where a request first goes beyond what was published, none wider between two doublings."""
    table, asked = read_bounds_table(), DENSE
    kind = table.bounds(asked).kind
    assert kind is not None
    longest = int(kind.limits["sequence"])
    lengths = (longest, longest + 1, longest + longest // 4, 2 * longest - 1, 2 * longest)
    widths = [table.bounds(asked._replace(sequence=each)).high for each in lengths]
    assert widths == sorted(widths) and len(set(widths)) == len(lengths)
    assert widths[1] == pytest.approx(widths[0], rel=1e-5) and widths[3] == pytest.approx(widths[4], rel=1e-5)


def test_mixtures_of_few_projects_stay_together():
    """One kind of all, as five projects have published any, and a kind takes six."""
    for name, eight_bit in (("Blackwell", True), ("Hopper", False)):
        kind = read_bounds_table().bounds(DENSE._replace(experts=True, eight_bit=eight_bit, architecture=name)).kind
        assert kind is not None and kind.name == "experts" and kind.projects < plan_bounds.LEAST_OF_A_KIND


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
    assert all(set(kind.limits) == set(LIMITS) for kind in kinds)
    assert all(kind.projects >= plan_bounds.LEAST_PROJECTS for kind in kinds if kind.architecture or not kind.experts)
