"""Layer kernels of the probe: the engine's operations, with names and bytes of the planner's operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.layout import Layout
from meshwright.planner.cost.blocks import list_operations
from meshwright.planner.cost.measured_rates import BACKWARD, SCORE_BYTES
from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.probe.layer_kernels import VOCABULARY, list_layer_points
from meshwright.probe.points import MeasurementPlan, MeasurementPoint, start_backward, time_point
from meshwright.spec.presets import preset
from meshwright.spec.stages import Stage

PLAN = MeasurementPlan((), (), (), ("fp32",), kernel_sizes=(2**14, 2**16))


@pytest.fixture(scope="module")
def points() -> list[MeasurementPoint]:
    return list_layer_points(PLAN)


def test_every_layer_kernel_is_timed_forward_and_backward(points: list[MeasurementPoint]):
    assert {each.name.removesuffix(BACKWARD) for each in points} == {
        "norm", "rotary", "activation", "loss", "attention-32", "attention-128", "ring-32-32", "ring-32-128",
        "ring-128-32", "ring-128-128",
    }  # fmt: skip
    for each in points:
        assert time_point(each, torch.device("cpu"), 0.0) > 0


def test_backward_pass_starts_with_the_given_gradient():
    x = torch.randn(3, 4, requires_grad=True)
    out, gradient = x.sin(), torch.randn(3, 4)
    (found,) = torch.autograd.grad(start_backward(out, gradient), [x], retain_graph=True)
    assert torch.equal(found, torch.autograd.grad(out, [x], gradient)[0])


def test_layer_kernel_sizes_increase(points: list[MeasurementPoint]):
    for name in {each.name for each in points}:
        sizes = [each.bytes for each in points if each.name == name]
        assert sizes == sorted(set(sizes))


def test_attention_scores_match_tiles(points: list[MeasurementPoint]):
    """Two heads; of a sequence's two tiles of 128 queries, the first attends to 128 keys, the second to 256."""
    one = next(each for each in points if each.name == "attention-32")
    rows = one.sizes[0] // (256 * 2 * 32)
    assert one.bytes == pytest.approx(SCORE_BYTES * rows * 2 * 128 * (128 + 256), rel=0.01)
    ring = next(each for each in points if each.name == "ring-32-32")
    rows = ring.sizes[0] // (64 * 2 * 32)
    assert ring.bytes == pytest.approx(SCORE_BYTES * rows * 2 * 3 * 32 * 32, rel=0.02)


def test_planner_operations_have_names_of_timed_kernels(points: list[MeasurementPoint]):
    config = preset("llama-3-8b")
    found = list_operations(MicroBatch.of(config, Layout(), 1, 256), Stage(0, range(1), first=False, last=False))
    ends = {one.name.rpartition(".")[2] for one in found}
    assert {"norm", "rotary", "activation"} <= ends


def test_loss_is_priced_by_bytes_of_planners_operation(points: list[MeasurementPoint]):
    """For equally many logits, without the matrix product that computes them."""
    config = replace(preset("llama-3-8b"), vocabulary=VOCABULARY)
    head = list_operations(MicroBatch.of(config, Layout(), 1, 32), Stage(0, range(0), first=False, last=True))
    for phase, way in (("forward", ""), ("input", BACKWARD)):
        one = next(each for each in points if each.name == "loss" + way and each.sizes == (32 * VOCABULARY,))
        assert [each.bytes for each in head if (each.name, each.phase) == ("loss", phase)] == [one.bytes]


def test_ring_attention_is_measured_only_with_context_parallelism():
    names = {each.name for each in list_layer_points(replace(PLAN, axes=("tp",)))}
    assert "attention-32" in names and not any(name.startswith("ring") for name in names)
