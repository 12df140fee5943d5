"""Encoder models: predicted saved activations, FLOPs, states and peak match the engine."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from bench.shared.encoder_cases import EncoderCase, EncoderStep, count, measure, small, watch
from bench.shared.ledger_cases import check_states
from bench.shared.saved_cases import difference
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.api import plan
from meshwright.planner.cost.blocks import list_operations
from meshwright.planner.cost.communication import count_parameters
from meshwright.planner.cost.engines import ENGINES
from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.cost.operators import FLASH_BACKWARD
from meshwright.planner.memory.rank_memory import fullest_rank
from meshwright.planner.search.estimate import problem_of
from meshwright.planner.search.screen import screen
from meshwright.planner.search.search import search
from meshwright.spec.config import ModelConfig
from meshwright.spec.flops import forward_flops_per_token, training_flops_per_token
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.spec.stages import whole_model
from meshwright.spec.work import count_predictions
from tests.conftest import exhaustive
from tests.planner.cost.operation_sums import total_flops

PACKED = ((0, 5), (0,), (0, 9), (0, 1, 2))
OURS = ENGINES["meshwright"]
HEADS, RECOMPUTE = ("masked", "classes", "none"), ("none", "selective", "full")
PARTITIONED = "aot_eager"
"""The backend that partitions as inductor does and compiles nothing."""
NOT_HOOKED = ("loss",)


@pytest.mark.parametrize(
    "case",
    [
        *(EncoderCase(head, again) for head in HEADS for again in RECOMPUTE),
        *(EncoderCase(dtype=dtype, starts=PACKED) for dtype in ("float32", "bfloat16", "float16", "float64")),
        EncoderCase("masked", "selective", starts=PACKED), EncoderCase("masked", "full", dtype="bfloat16"),
        EncoderCase(rows=3, sequence=120), EncoderCase(rows=1, sequence=7),
    ],
    ids=lambda case: f"{case.head} {case.recompute} {case.dtype} {case.rows}x{case.sequence} {case.starts is not None}",
)  # fmt: skip
def test_saved_activations_match_prediction(case: EncoderCase) -> None:
    found = watch(case)
    unexpected, missing = difference(found)
    assert not unexpected and not missing, (unexpected, missing)
    if case.recompute == "none":
        predicted = Counter(each.bytes for each in found.predicted if not each.name.startswith(NOT_HOOKED))
        hooked = Counter(size for size, _ in found.packed)
        assert (
            predicted <= hooked if case.head == "classes" else predicted == hooked
        )  # hooks also see tensors of the loss


@pytest.mark.parametrize(
    "case",
    [
        EncoderCase("masked", "none", backend=PARTITIONED),
        *(EncoderCase(recompute=again, dtype="bfloat16", starts=PACKED, backend=PARTITIONED)
          for again in ("selective", "full")),
    ],
    ids=lambda case: case.recompute,
)  # fmt: skip
def test_saved_activations_of_compiled_forward_match_prediction(case: EncoderCase) -> None:
    found = watch(case)
    predicted = Counter(each.bytes for each in found.predicted if not each.name.startswith(NOT_HOOKED))
    assert predicted == Counter(size for size, _ in found.packed), (found.predicted, found.packed)


def halves(case: EncoderCase) -> tuple[float, float]:
    """Return the FLOPs of the engine's forward (including gradients of the head) and backward."""
    config = small(case.head)
    layout = Layout(recompute=case.recompute)
    found = list_operations(MicroBatch.of(config, layout, case.rows, case.sequence), whole_model(config))
    early = [one for one in found if one.name == "head" and one.phase in ("input", "weight")]
    forward = total_flops(found, "forward") + total_flops(early)
    return forward, total_flops(found) - forward


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("head", HEADS)
def test_flops_match_torch_counter(head: str, recompute: str) -> None:
    case = EncoderCase(head, recompute, rows=4, sequence=40)
    assert halves(case) == count(case)


@pytest.mark.parametrize("head", HEADS)
def test_operations_add_up_to_closed_forms(head: str) -> None:
    config, rows, sequence = small(head), 4, 40
    forward = forward_flops_per_token(config, sequence)
    assert forward["attention.scores"] == config.layers * 2 * sequence * config.hidden  # bidirectional attention
    found = list_operations(MicroBatch.of(config, Layout(), rows, sequence), whole_model(config))
    assert total_flops(found, "forward") == pytest.approx(rows * sequence * sum(forward.values()))
    core = forward["attention.scores"] + forward["attention.values"]
    executed = training_flops_per_token(config, sequence) + (FLASH_BACKWARD - 2) * core
    assert total_flops(found) == pytest.approx(rows * sequence * executed)


@pytest.mark.parametrize("config", [*map(small, HEADS), preset("bert-large-cased")], ids=lambda config: config.head)
def test_closed_form_parameters_match_parameter_table(config: ModelConfig) -> None:
    dense, spread = count_parameters(MicroBatch.of(config, Layout(), 1, 64), whole_model(config))
    assert (dense, spread) == (parameter_table(config).numel, 0.0)


LARGE_HEAD = dataclasses.replace(small(), vocabulary=8192)


@pytest.mark.parametrize(
    ("step", "near"),
    [
        (EncoderStep(small(), batch=8, sequence=128), 0.003),
        (EncoderStep(small("classes"), "mb2"), 0.01), (EncoderStep(LARGE_HEAD, "mb2", dtype="bfloat16"), 0.01),
        *exhaustive(
            (EncoderStep(LARGE_HEAD, "ac:full"), 0.01), (EncoderStep(small(), "ac:selective"), 0.03),
            (EncoderStep(small(), "mb2", dtype="bfloat16"), 0.03),
        ),
    ],
    ids=lambda each: f"{each.config.head} {each.config.vocabulary} {each.layout} {each.dtype}"
    if isinstance(each, EncoderStep) else str(each),
)  # fmt: skip
def test_peak_of_step_matches_allocator(step: EncoderStep, near: float) -> None:
    found = measure(step)
    check_states(found)
    at = found.where, found.predicted.peak_snapshot
    assert found.predicted.peak_bytes == pytest.approx(found.peak, rel=near), at


def test_warnings_name_masked_share_and_unsupported_training() -> None:
    problem = problem_of("bert-large-uncased", "8xa100-40", sequence=512, batch=256)
    found = search(problem, 3)
    assert found.best
    for each in found.best:
        assert (each.layout.tp, each.layout.cp, each.layout.pp) == (1, 1, 1) and each.fits
        assert "assumed that 15% of the tokens are masked: the head computes only these" in each.warnings
        assert any("Train it as a user-defined module" in warning for warning in each.warnings)
    assert max(map(abs, found.differences)) < 0.02  # closed form against simulator
    with pytest.raises(UserError, match="sequence 1024 is longer than the model's 512 positions"):
        search(problem_of("bert-large-uncased", "8xa100-40", sequence=1024, batch=256), 3)
    with pytest.raises(UserError, match="runs on dp with any zero; leave tp2 out"):
        plan("bert-large-uncased", "8xa100-40", "dp4 tp2", sequence=512, batch=256)


def test_head_computes_masked_tokens_or_one_label_per_sequence() -> None:
    masked, classes = small(), small("classes")
    assert count_predictions(masked, 4, 512) == round(0.15 * 4 * 512) and count_predictions(classes, 4, 512) == 4
    hidden = masked.hidden
    assert forward_flops_per_token(masked, 512)["head"] == pytest.approx(0.15 * 2 * hidden * (hidden + 97))
    assert forward_flops_per_token(classes, 512)["head"] == pytest.approx(2 * hidden * (hidden + 3) / 512)


@pytest.mark.parametrize("head", HEADS)
def test_closed_form_memory_is_near_ledger(head: str) -> None:
    """Compare the memory used for screening with the ledger, for models larger than the CUDA context."""
    labels = ("no", "yes") if head == "classes" else ()
    config = dataclasses.replace(preset("bert-large-uncased"), head=head, labels=labels)
    problem = problem_of(config, "8xa100-40", sequence=512, batch=256)
    every = screen(problem)
    seen = 0
    for at in range(0, len(every.candidate), 3):
        layout = every.layout(at)
        peak = fullest_rank(problem, layout).peak_bytes
        if peak > 4 * 2**30:
            assert every.bytes[at] == pytest.approx(peak, rel=0.1), layout
            seen += 1
    assert seen > 5
