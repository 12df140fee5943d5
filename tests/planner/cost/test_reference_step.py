"""Reference steps: ratios of measured to predicted time, by which plans are multiplied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.layout import Layout
from meshwright.planner.api import plan
from meshwright.planner.cost.engines import ENGINES, engine
from meshwright.planner.cost.layer_times import MICRO_BATCH_PARTS
from meshwright.planner.cost.reference_step import batch_of, measured_step_factors, reference_model
from meshwright.planner.cost.step_time import step_time
from meshwright.planner.hardware.calibration import Calibration
from meshwright.planner.hardware.measured import Measured, ReferenceStep, read_measured
from meshwright.planner.show.explain import explain
from meshwright.spec.presets import preset
from tests.planner.cost.test_measured_rates import here, measured

OURS = ENGINES["meshwright"]
MODEL = reference_model("cpu")


def parts_of(layout: str) -> dict[str, float]:
    """Return the components of a reference step as predicted from single kernels."""
    parsed = Layout.parse(layout)
    time = step_time(MODEL.config, parsed, here(), MODEL.sequence, batch_of(parsed, MODEL))
    return dict(time.breakdown)


def with_steps(**seconds: float) -> Measured:
    return replace(
        measured(), steps=tuple(ReferenceStep(name.replace("_", " "), took) for name, took in seconds.items())
    )


def factors(found: Measured, precision: str = "fp32") -> dict[str, float]:
    return dict(zip(MICRO_BATCH_PARTS, measured_step_factors(here(found), precision, OURS).tolist(), strict=True))


def test_data_parallel_step_gives_computation_ratio():
    alone = parts_of("dp2 fp32")
    found = factors(with_steps(dp2_fp32=1.3 * alone["compute"] + alone["data"]))
    assert found["compute"] == pytest.approx(1.3)
    assert [found[part] for part in ("tensor", "context", "expert", "data")] == [1.0] * 4


def test_compiled_blocks_have_the_ratio_of_eager_ones():
    alone = parts_of("dp2 fp32")
    found = here(with_steps(dp2_fp32=1.3 * alone["compute"] + alone["data"]))
    assert measured_step_factors(found, "fp32", OURS.compiled())[0] == pytest.approx(1.3)
    assert measured_step_factors(found, "fp32", ENGINES["torchtitan"]).tolist() == [1.0] * 5


def test_tensor_parallel_step_gives_communication_ratio():
    alone, cut = parts_of("dp2 fp32"), parts_of("tp2 fp32")
    base = 1.3 * alone["compute"] + alone["data"]
    found = factors(with_steps(dp2_fp32=base, tp2_fp32=1.3 * cut["compute"] + 2.5 * cut["tensor"]))
    assert found["tensor"] == pytest.approx(2.5)
    assert found["expert"] == found["context"] == found["tensor"]  # not measured
    ring = parts_of("cp2 fp32")
    more = with_steps(dp2_fp32=base, cp2_fp32=1.3 * ring["compute"] + 1.7 * ring["context"] + ring["data"])
    assert factors(more)["context"] == pytest.approx(1.7)


def test_ratios_within_noise_are_ignored():
    found = factors(with_steps(dp2_fp32=parts_of("dp2 fp32")["compute"], tp2_fp32=1e-6))
    assert found["tensor"] == 1.0


def test_calibration_multiplies_times_corrected_by_steps():
    """The reference steps are compared without calibration, whatever number of devices a plan uses."""
    one = parts_of("dp2 fp32")
    found = with_steps(dp2_fp32=1.5 * one["compute"] + one["data"])
    plain = here(found)
    calibrated = replace(plain, calibration=Calibration(2.0, 2.0, 2.0, 1, None, 0))
    options = {"sequence": 1024, "batch": 8}
    before, after = (plan("gpt2", each, "dp2 fp32", **options).best.time.breakdown for each in (plain, calibrated))
    assert {part: 2 * seconds for part, seconds in before.items()} == pytest.approx(after)
    alone = replace(plain, devices=1, devices_per_node=1)
    assert measured_step_factors(alone, "fp32", OURS).tolist() == measured_step_factors(plain, "fp32", OURS).tolist()


def test_steps_without_data_parallel_one_are_ignored():
    assert set(factors(with_steps(tp2_fp32=1.0)).values()) == {1.0}


def test_operations_add_up_to_computation():
    one = parts_of("dp2 fp32")
    estimate = plan(
        "gpt2", here(with_steps(dp2_fp32=1.5 * one["compute"] + one["data"])), "dp2 fp32", sequence=1024, batch=8
    ).best
    rows = explain(estimate.problem, estimate.layout)
    assert sum(row.seconds for row in rows) == pytest.approx(estimate.time.breakdown["compute"])


def test_precision_has_ratio_of_its_own_step_or_of_the_first():
    one = parts_of("dp2 fp32")
    base = 1.2 * one["compute"] + one["data"]
    assert factors(with_steps(dp2_fp32=base), "tf32")["compute"] == pytest.approx(1.2)


def test_plan_times_are_multiplied_by_ratios():
    one = parts_of("dp2 fp32")
    found = with_steps(dp2_fp32=1.5 * one["compute"] + one["data"])
    options = {"sequence": 1024, "batch": 8}
    with_factor, without = (
        plan("gpt2", here(what), "dp2 fp32", **options).best.time.breakdown for what in (found, measured())
    )
    assert with_factor["compute"] == pytest.approx(1.5 * without["compute"])
    assert with_factor["optimizer"] == without["optimizer"]


def test_ratios_apply_only_to_own_engine_on_measured_machine():
    slow = with_steps(dp2_fp32=100.0)
    assert set(measured_step_factors(here(), "fp32", OURS)) == {1.0}
    assert set(measured_step_factors(here(slow), "fp32", ENGINES["megatron"])) == {1.0}
    assert set(measured_step_factors(here(slow), "fp32", engine("meshwright", compile=True))) == {1.0}


def test_reference_steps_round_trip():
    found = replace(with_steps(dp2_fp32=0.5), yardstick=2e-3)
    assert read_measured(found.tables(), "test") == found


def test_reference_model_is_not_a_preset():
    assert MODEL.config != preset("gpt2") and MODEL.config.vocabulary % 2 == 0
