"""An encoder's price is what the real one does: tensors that it keeps, FLOPs, states, the peak of a step."""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright.layout import Layout
from meshwright.model.parameters import parameter_table
from meshwright.model.presets import preset
from meshwright.model.stages import whole_model
from meshwright.plan.communication import held
from meshwright.plan.engines import ENGINES
from meshwright.plan.flops import forward_flops_per_token, training_flops_per_token
from meshwright.plan.operations import FLASH_BACKWARD, operations, total_flops
from tests.plan.encoder_cases import EncoderCase, count, small, watch
from tests.plan.saved_cases import difference

PACKED = ((0, 5), (0,), (0, 9), (0, 1, 2))
OURS = ENGINES["meshwright"]
NOT_HOOKED = ("head.hidden.gradient", "head.weight.gradient", "head.bias.gradient", "loss")


@pytest.mark.parametrize(
    "case",
    [
        *(EncoderCase(head, again) for head in ("masked", "classes", "none") for again in ("none", "selective", "full")),
        *(EncoderCase(dtype=dtype, starts=PACKED) for dtype in ("float32", "bfloat16", "float16", "float64")),
        EncoderCase("masked", "selective", starts=PACKED), EncoderCase("masked", "full", dtype="bfloat16"),
        EncoderCase(rows=3, sequence=120), EncoderCase(rows=1, sequence=7),
    ],
    ids=lambda case: f"{case.head} {case.recompute} {case.dtype} {case.rows}x{case.sequence} {case.starts is not None}",
)  # fmt: skip
def test_what_a_forward_keeps_is_what_was_said(case: EncoderCase) -> None:
    found = watch(case)
    unexpected, missing = difference(found)
    assert not unexpected and not missing, (unexpected, missing)
    if case.recompute == "none":
        said = Counter(each.bytes for each in found.predicted if not each.name.startswith(NOT_HOOKED))
        hooked = Counter(size for size, _ in found.packed)
        assert said <= hooked if case.head == "classes" else said == hooked  # beside them: what the loss is a part of


def halves(case: EncoderCase) -> tuple[float, float]:
    """FLOPs of what the engine does in its forward (the head's gradients among them) and in its backward."""
    config = small(case.head)
    layout = Layout(recompute=case.recompute)
    found = operations(config, layout, case.rows, case.sequence, whole_model(config), OURS)
    early = [one for one in found if one.name == "head" and one.phase in ("input", "weight")]
    forward = total_flops(found, "forward") + total_flops(early)
    return forward, total_flops(found) - forward


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("head", ["masked", "classes", "none"])
def test_flops_are_those_that_torch_counts(head: str, recompute: str) -> None:
    case = EncoderCase(head, recompute, rows=4, sequence=40)
    assert halves(case) == count(case)


@pytest.mark.parametrize("head", ["masked", "classes", "none"])
def test_they_add_up_to_the_closed_forms(head: str) -> None:
    config, rows, sequence = small(head), 4, 40
    forward = forward_flops_per_token(config, sequence)
    assert forward["attention.scores"] == config.layers * 2 * sequence * config.hidden  # every token sees all
    found = operations(config, Layout(), rows, sequence, whole_model(config), OURS)
    assert total_flops(found, "forward") == pytest.approx(rows * sequence * sum(forward.values()))
    core = forward["attention.scores"] + forward["attention.values"]
    executed = training_flops_per_token(config, sequence) + (FLASH_BACKWARD - 2) * core
    assert total_flops(found) == pytest.approx(rows * sequence * executed)


@pytest.mark.parametrize("name", ["bert-tiny", "bert-large-cased"])
def test_a_search_counts_the_parameters_of_the_table(name: str) -> None:
    config = preset(name)
    dense, spread = held(config, Layout()).of_stage(config, whole_model(config))
    assert (dense, spread) == (parameter_table(config).numel, 0.0)
