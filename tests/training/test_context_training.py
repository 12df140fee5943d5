"""Training with context parallelism: the steps of one device, and checkpoints that any layout reads."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from meshwright.comm.local import LocalRanks
from meshwright.flight_recorder.circular_wait import find_circular_wait
from tests.conftest import exhaustive
from tests.training import training_cases as cases

CHANGES = {
    "model_vocabulary": 499, "train_steps": 4, "train_validate_every": 2, "train_clip": 0.5, "checkpoint_every": 2,
    "checkpoint_keep": 9, "train_schedule": "constant",
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("context")


@pytest.fixture(scope="module")
def alone(home) -> Path:
    """Eight steps on one device."""
    run(None, home / "alone", "dp1 fp32", train_steps=8)
    return home / "alone"


def run(ranks: LocalRanks | None, place: Path, layout: str, crash_after: int = 0, **changes):
    return cases.run_without_error(ranks, place, layout, crash_after, **CHANGES | changes)


CONTEXT = [
    *("cp4 mb2", "dp2 cp2 zero3 ac:selective"),
    *exhaustive("cp4:ulysses zero1", "tp2 cp2 zero2"),  # test_run_changes_layouts_and_reads_same_data has both kinds
]


@pytest.mark.parametrize("layout", CONTEXT)
def test_context_parallel_steps_match_one_device(four, home, alone, layout):
    place = home / layout.replace(" ", "-").replace(":", "-")
    run(four, place, f"{layout} fp32")
    cases.assert_same_steps(place, alone, steps=4)


def test_run_changes_layouts_and_reads_same_data(two, four, home, alone):
    """Two steps on each layout, through checkpoints; a change of the layout alone keeps the state bit for bit."""
    place = home / "travelling"
    travels = [(two, "cp2", 2), (four, "tp2 cp2:ulysses zero1", 4), (two, "dp2 zero3", 6), (four, "cp4 zero2", 8)]
    states = {}
    for ranks, layout, steps in travels:
        if steps > 2:
            outcomes = run(ranks, place, f"{layout} fp32", train_steps=steps - 2)
            assert cases.same(cases.whole_state(outcomes), states[steps - 2]), layout
        outcomes = run(ranks, place, f"{layout} fp32", train_steps=steps)
        states[steps] = cases.whole_state(outcomes)
    cases.assert_same_steps(place, alone)
    assert len(cases.trace(place)) == 8


def test_interrupted_run_with_tensor_parallelism_resumes_bit_for_bit(four, home):
    whole, broken = home / "whole", home / "broken"
    expected = cases.whole_state(run(four, whole, "tp2 cp2 zero3 bf16"))
    run(four, broken, "tp2 cp2 zero3 bf16", crash_after=3)
    outcomes = run(four, broken, "tp2 cp2 zero3 bf16")
    assert cases.trace(broken) == cases.trace(whole)
    assert cases.same(cases.whole_state(outcomes), expected)


@cases.traced_and_generated
@pytest.mark.parametrize("method", ["ring", *exhaustive("ulysses")])
def test_compiled_model_steps_match_eager_steps(two, home, method, fault):
    model = {"family": "llama", "layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 64}
    eager, compiled = home / f"{method} eager for {fault}", home / f"{method} compiled {fault}"
    run(two, eager, f"cp2:{method} fp32", model=model, train_compile=False, train_steps=2)
    run(two, compiled, f"cp2:{method} fp32", model=model, train_compile=True, train_steps=2, fault=fault)
    cases.assert_same_steps(compiled, eager)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["dp2 cp2 zero3 ac:selective", "tp2 cp2:ulysses ac:full", "dp2 tp2 zero1"])
def test_compiled_steps_on_several_axes_call_in_one_order(layout):
    """The compiler orders the calls of a block's backward pass in the same way on all ranks, over all axes together."""
    with TemporaryDirectory() as place, LocalRanks(4) as ranks:
        run(ranks, Path(place), f"{layout} fp32", train_compile=True, train_steps=2, fault="without_generated_code")
        calls = [each.calls for each in ranks.calls().seen if each.calls]
    assert find_circular_wait(calls) is None and all(len(each.calls) > 20 for each in calls)
