"""A measured step says how much longer parts take in their places than one by one, and plans are longer by as much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.layout import Layout
from meshwright.planner.calibration import Calibration
from meshwright.planner.engines import ENGINES, engine
from meshwright.planner.estimate import evaluate
from meshwright.planner.explain import explain
from meshwright.planner.measured import Measured, ReferenceStep, read
from meshwright.planner.micro_batch import MICRO_BATCH_PARTS
from meshwright.planner.reference_step import batch_of, in_place, reference_layouts, reference_model
from meshwright.planner.step_time import step_time
from meshwright.spec.presets import preset
from tests.planner.test_measured_rates import here, measured

OURS = ENGINES["meshwright"]
MODEL = reference_model("cpu")


def told(layout: str) -> dict[str, float]:
    """The parts of a reference step as the pieces add up to it."""
    parsed = Layout.parse(layout)
    time = step_time(MODEL.config, parsed, here(), MODEL.sequence, batch_of(parsed, MODEL))
    return dict(time.breakdown)


def with_steps(**seconds: float) -> Measured:
    return replace(
        measured(), steps=tuple(ReferenceStep(name.replace("_", " "), took) for name, took in seconds.items())
    )


def factors(found: Measured, precision: str = "fp32") -> dict[str, float]:
    return dict(zip(MICRO_BATCH_PARTS, in_place(here(found), precision, OURS).tolist(), strict=True))


def test_the_ratio_of_a_data_parallel_step_is_that_of_computation():
    alone = told("dp2 fp32")
    found = factors(with_steps(dp2_fp32=1.3 * alone["compute"] + alone["data"]))
    assert found["compute"] == pytest.approx(1.3)
    assert [found[part] for part in ("tensor", "context", "expert", "data")] == [1.0] * 4


def test_compiled_blocks_exceed_their_pieces_as_eager_ones_do():
    alone = told("dp2 fp32")
    found = here(with_steps(dp2_fp32=1.3 * alone["compute"] + alone["data"]))
    assert in_place(found, "fp32", OURS.compiled())[0] == pytest.approx(1.3)
    assert in_place(found, "fp32", ENGINES["torchtitan"]).tolist() == [1.0] * 5


def test_what_is_left_of_a_tensor_parallel_step_is_what_ranks_waited_for_each_other():
    alone, cut = told("dp2 fp32"), told("tp2 fp32")
    base = 1.3 * alone["compute"] + alone["data"]
    found = factors(with_steps(dp2_fp32=base, tp2_fp32=1.3 * cut["compute"] + 2.5 * cut["tensor"]))
    assert found["tensor"] == pytest.approx(2.5)
    assert found["expert"] == found["context"] == found["tensor"]  # nobody measured those
    ring = told("cp2 fp32")
    more = with_steps(dp2_fp32=base, cp2_fp32=1.3 * ring["compute"] + 1.7 * ring["context"] + ring["data"])
    assert factors(more)["context"] == pytest.approx(1.7)


def test_where_noise_is_larger_than_what_was_to_be_told_nothing_is_multiplied():
    found = factors(with_steps(dp2_fp32=told("dp2 fp32")["compute"], tp2_fp32=1e-6))
    assert found["tensor"] == 1.0


def test_a_calibration_multiplies_what_steps_have_made_longer():
    """And is no part of what the steps are compared with, nor are the devices that a plan takes of the machine."""
    one = told("dp2 fp32")
    found = with_steps(dp2_fp32=1.5 * one["compute"] + one["data"])
    plain = here(found)
    calibrated = replace(plain, calibration=Calibration(2.0, 2.0, 2.0, 1, None, 0))
    options = {"sequence": 1024, "batch": 8}
    before, after = (evaluate("gpt2", each, "dp2 fp32", **options).time.breakdown for each in (plain, calibrated))
    assert {part: 2 * seconds for part, seconds in before.items()} == pytest.approx(after)
    alone = replace(plain, devices=1, devices_per_node=1)
    assert in_place(alone, "fp32", OURS).tolist() == in_place(plain, "fp32", OURS).tolist()


def test_steps_without_a_data_parallel_one_say_nothing():
    assert set(factors(with_steps(tp2_fp32=1.0)).values()) == {1.0}


def test_the_operations_add_up_to_the_computation():
    one = told("dp2 fp32")
    estimate = evaluate(
        "gpt2", here(with_steps(dp2_fp32=1.5 * one["compute"] + one["data"])), "dp2 fp32", sequence=1024, batch=8
    )
    rows = explain(estimate.problem, estimate.layout)
    assert sum(row.seconds for row in rows) == pytest.approx(estimate.time.breakdown["compute"])


def test_another_precision_has_the_ratio_of_its_own_step_or_of_the_first():
    one = told("dp2 fp32")
    base = 1.2 * one["compute"] + one["data"]
    assert factors(with_steps(dp2_fp32=base), "tf32")["compute"] == pytest.approx(1.2)


def test_plans_take_as_much_longer():
    one = told("dp2 fp32")
    found = with_steps(dp2_fp32=1.5 * one["compute"] + one["data"])
    options = {"sequence": 1024, "batch": 8}
    with_factor, without = (
        evaluate("gpt2", here(what), "dp2 fp32", **options).time.breakdown for what in (found, measured())
    )
    assert with_factor["compute"] == pytest.approx(1.5 * without["compute"])
    assert with_factor["optimizer"] == without["optimizer"]


def test_neither_machines_without_steps_nor_other_engines_are_changed():
    slow = with_steps(dp2_fp32=100.0)
    assert set(in_place(here(), "fp32", OURS)) == {1.0}
    assert set(in_place(here(slow), "fp32", ENGINES["megatron"])) == {1.0}
    assert set(in_place(here(slow), "fp32", engine("meshwright", compile=True))) == {1.0}


def test_it_is_measured_on_every_axis_that_ranks_can_share():
    assert [str(each) for each in reference_layouts("cpu", 2, 1, ("fp32", "bf16"))] == [
        "dp2 fp32", "dp2 bf16", "tp2 fp32", "cp2 fp32",
    ]  # fmt: skip
    assert [str(each) for each in reference_layouts("cpu", 4, 2, ("fp32",))] == [
        "dp8 fp32",
        "dp2 tp4 fp32",
        "dp2 cp4 fp32",
    ]
    assert [str(each) for each in reference_layouts("cpu", 3, 1, ("fp32",))] == ["dp3 fp32"]  # nothing divides by 3
    assert [str(each) for each in reference_layouts("cpu", 1, 1, ("fp32",))] == ["fp32"]


def test_the_file_keeps_the_steps():
    found = replace(with_steps(dp2_fp32=0.5), yardstick=2e-3)
    assert read(found.tables(), "test") == found


def test_the_model_is_none_that_users_plan():
    assert MODEL.config != preset("gpt2") and MODEL.config.vocabulary % 2 == 0
