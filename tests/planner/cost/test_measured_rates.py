"""Times of operations and collectives on a probed machine follow the measured curves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.planner.cost.measured_rates import (
    HEAD_SIZES,
    SCORE_BYTES,
    CostByLayout,
    attention_name,
    attention_scores,
)
from meshwright.planner.cost.operators import FLASH_BACKWARD, Operation
from meshwright.planner.cost.rates import Collectives, Group, Rates
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.hardware.devices import Device, Link, find_device
from meshwright.planner.hardware.measured import CollectiveCurve, Curve, KernelCurve, Measured, Products

SIZES = (1e3, 1e5, 1e7)
SHAPE = (2048, 1024, 192)  # tokens, out, in
COLLECTIVES = ("all-reduce", "all-gather", "send-receive")


def curve(start: float, byte: float) -> Curve:
    return Curve(SIZES, tuple(start + byte * size for size in SIZES))


def measured(**fields: object) -> Measured:
    products = tuple(
        Products("fp32", form, 2, 1, (SHAPE, (256, 256, 256)), (seconds, seconds / 10))
        for form, seconds in (("forward", 3e-3), ("input-gradient", 5e-3), ("weight-gradient", 7e-3))
    )
    passes = [
        ("add", curve(1e-5, 1e-9)), ("copy", curve(1e-6, 5e-10)), ("norm", curve(2e-5, 2e-9)),
        ("norm-backward", curve(4e-5, 4e-9)),
    ]  # fmt: skip
    for size in HEAD_SIZES:
        passes += [
            (attention_name(size), curve(0, 1e-9 * size)),
            (f"{attention_name(size)}-backward", curve(0, 2e-9 * size)),
        ]
    found = Measured(
        backend="gloo",
        ranks=2,
        threads=1,
        products=products,
        passes=tuple(KernelCurve(name, "fp32", 2, 1, each) for name, each in passes),
        collectives=tuple(CollectiveCurve(name, 2, "inside", curve(1e-4, 1e-9)) for name in COLLECTIVES),
        starts=(("operation", 2e-6), ("differentiated_operation", 10e-6)),
    )
    return replace(found, **fields)  # type: ignore[arg-type]


def here(what: Measured | None = None, devices: int = 2) -> Cluster:
    base = find_device("a100-80")
    assert base is not None
    device: Device = replace(base, peaks={"fp32": 0.05}, memory_bandwidth=5e9)
    return Cluster("here", device, devices, devices, Link(1e9, 1e-5), Link(1e9, 1e-5), what or measured())


def test_product_time_is_that_of_measured_shape_and_form():
    rates, (tokens, out, inner) = Rates.of(here(), "fp32"), SHAPE
    shapes = {
        "forward": (tokens, out, inner), "recompute": (tokens, out, inner), "input": (tokens, inner, out),
        "weight": (out, inner, tokens),
    }  # fmt: skip
    start = (10e-6 - 2 * 2e-6) / 2
    for phase, seconds in (("forward", 3e-3), ("recompute", 3e-3), ("input", 5e-3), ("weight", 7e-3)):
        one = Operation("mlp.up", "product", phase, 1.0, 1.0, shapes[phase], 3.0)  # type: ignore[arg-type]
        assert rates.seconds(one) == pytest.approx(3 * (seconds + start))


def test_elementwise_time_is_that_of_same_kernel_else_of_addition():
    rates = Rates.of(here(), "fp32")
    norm = Operation("norm", "elementwise", "forward", 0.0, 1e5, None, 7.0)
    assert rates.seconds(norm) == pytest.approx(7 * (2e-5 + 2e-9 * 1e5))
    assert rates.seconds(norm._replace(phase="input")) == pytest.approx(7 * (4e-5 + 4e-9 * 1e5))
    other = norm._replace(name="mlp.copies")
    assert rates.seconds(other) == pytest.approx(7 * (1e-5 + 1e-9 * 1e5 + 3e-6))
    # the measured kernels are eager
    assert Rates.of(here(), "fp32", "compiled").seconds(norm) == rates.seconds(other)


def test_fused_activation_time_is_that_of_silu_pass():
    found = measured()
    silu = KernelCurve("silu", "fp32", 2, 1, curve(3e-5, 6e-9))
    rates = Rates.of(here(replace(found, passes=(*found.passes, silu))), "fp32", "compiled")
    one = Operation("mlp.activation", "elementwise", "input", 0.0, 1e5, None, 2.0)
    assert rates.seconds(one) == pytest.approx(2 * (3e-5 + 6e-9 * 1e5 + 3e-6))
    assert rates.seconds(one._replace(name="norm")) == pytest.approx(2 * (1e-5 + 1e-9 * 1e5 + 3e-6))


def test_attention_time_is_that_of_its_scores():
    rates, tokens, heads, row = Rates.of(here(), "fp32"), 2048, 6, 256
    scores = SCORE_BYTES * attention_scores(tokens * heads, 128.5, row)
    assert scores == 4 * tokens * heads * (128.5 + 64)
    for size in (32, 64, 128):
        flops = 4.0 * 128.5 * heads * size * tokens
        one = Operation("attention.core", "attention", "forward", flops, 0.0, (row, 128.5, size), 2.0)
        assert rates.seconds(one) == pytest.approx(2 * 1e-9 * size * scores)
        back = one._replace(phase="input", flops=FLASH_BACKWARD * flops)
        assert rates.seconds(back) == pytest.approx(2 * 2e-9 * size * scores)


def test_ring_attention_with_smaller_blocks_costs_more_per_score():
    passes = list(measured().passes)
    for piece, byte in ((32, 8e-9), (128, 2e-9)):
        passes += [KernelCurve(attention_name(size, piece), "fp32", 2, 1, curve(0, byte)) for size in HEAD_SIZES]
    rates = Rates.of(here(measured(passes=tuple(passes))), "fp32")
    per_score = []
    for piece in (32, 64, 128):
        one = Operation("attention.core.ring", "attention", "forward", 4.0 * 128 * 64 * 5000, 0.0, (piece, 128.0, 64))
        per_score.append(rates.seconds(one) / (SCORE_BYTES * attention_scores(5000, 128, piece)))
    assert per_score == pytest.approx([8e-9, 4e-9, 2e-9])


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("product", "mlp.up", ([8.0, 40.0, 3000.0], 256.0, [64.0, 64.0, 700.0])),
        ("attention", "attention.core", (128.0, [12.0, 64.5, 64.5], 48.0)),
        ("attention", "attention.core.ring", ([32.0, 64.0, 128.0], [12.0, 64.5, 64.5], 48.0)),
        ("elementwise", "mlp.activation", None),
        ("loss", "loss", None),
    ],
)
def test_many_layouts_take_as_long_as_each_alone(kind: Any, name: str, shape: tuple[Any, ...] | None):
    """Shapes that were measured, lie between measured ones or beyond them; no product fits constant rates."""
    more = {"shapes": (SHAPE, (256, 256, 256), (64, 64, 64), (512, 128, 64)), "seconds": (3e-3, 3e-4, 1e-4, 9e-4)}
    rough = tuple(replace(each, **more) for each in measured().products)
    rates, moved, flops = Rates.of(here(measured(products=rough)), "fp32"), [1e3, 1e6, 1e9], [1e5, 1e8, 1e10]
    sizes = None if shape is None else tuple(map(np.asarray, shape))
    many = Operation(name, kind, "input", np.array(flops), np.array(moved), sizes, 3.0)
    for at, seconds in enumerate(np.broadcast_to(rates.seconds(many), 3).tolist()):
        own = None if shape is None else tuple(size[at] if isinstance(size, list) else size for size in shape)
        alone = Operation(name, kind, "input", flops[at], moved[at], own, 3.0)
        assert seconds == pytest.approx(rates.seconds(alone), rel=1e-12)


def test_unmeasured_attention_uses_published_rates():
    bare = measured(passes=tuple(each for each in measured().passes if not each.name.startswith("attention")))
    one = Operation("attention.core", "attention", "forward", 1e9, 0.0, (256, 128.5, 64))
    assert Rates.of(here(bare), "fp32").seconds(one) > 1e9 / 50e9


def test_collective_time_is_that_of_its_vector():
    collectives = Collectives(here())
    for size in (1e3, 5e4, 1e6):
        assert collectives.cost("all-reduce", Group(2, 2)).seconds_at(size) == pytest.approx(1e-4 + 1e-9 * size)
        assert collectives.cost("send", Group(2, 2)).seconds_at(size) == pytest.approx(1e-4 + 1e-9 * size)
    assert collectives.cost("all-reduce", Group(2, 2)).seconds_at(10.0) == pytest.approx(
        1e-4 + 1e-6
    )  # like the smallest one
    assert collectives.cost("all-reduce", Group(2, 2)).seconds_at(2e7) == pytest.approx(2 * (1e-4 + 1e-2))
    assert collectives.cost("all-reduce", Group(2, 2)).seconds_at(0.0) == 0.0
    assert collectives.cost("all-reduce", Group(1, 1)).seconds_at(1e6) == 0.0
    many = np.array([[1e3, 0.0], [1e5, 2e7]])
    assert collectives.cost("all-gather", Group(2, 2)).seconds_at(many) == pytest.approx(
        np.array([[collectives.cost("all-gather", Group(2, 2)).seconds_at(size) for size in row] for row in many])
    )


def test_collectives_of_unmeasured_groups_are_scaled_or_priced_by_links():
    collectives = Collectives(here(devices=4))
    two = collectives.cost("all-reduce", Group(2, 2)).seconds_at(1e6)
    assert collectives.cost("all-reduce", Group(4, 4)).seconds_at(1e6) == pytest.approx(two * (3 / 4) / (1 / 2))
    bare = Collectives(here(measured(collectives=())))
    assert (
        collectives.cost("all-to-all", Group(2, 2)).seconds_at(1e6)
        == bare.cost("all-to-all", Group(2, 2)).seconds_at(1e6)
        > 0
    )


def test_cpus_do_not_overlap_communication():
    assert Collectives(here()).overlap_slowdown(Group(2, 2)) == 1.0
    assert Collectives(here()).overlap_slowdown(Group(1, 1)) == 0.0
    assert Collectives(here(measured(backend="nccl"))).overlap_slowdown(Group(2, 2)) < 0.5


def test_vectorized_collective_costs_match_single_ones():
    collectives, which = Collectives(here(devices=4)), np.array([0, 1, 0])
    groups = [Group(2, 2), Group(4, 4)]
    chosen = CostByLayout([collectives.cost("all-reduce", group) for group in groups], which)
    sizes = np.array([[1e4, 1e4, 1e6], [0.0, 1e6, 2e7]])
    costs = [collectives.cost("all-reduce", groups[at]) for at in which]
    expected = [[cost.seconds_at(size) for cost, size in zip(costs, row, strict=True)] for row in sizes]
    assert chosen.seconds_at(sizes) == pytest.approx(np.array(expected))
    assert chosen.seconds_at(1e5).shape == (3,)


def test_unmeasured_precision_is_refused():
    with pytest.raises(UserError, match="no known peak for bf16"):
        Rates.of(here(), "bf16")
