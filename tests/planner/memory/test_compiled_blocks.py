"""Compiled blocks: saved activations match torch's partitioner, and the peak of a step matches the allocator."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from bench.shared.ledger_cases import Step, measure
from bench.shared.saved_cases import Case, Watched, watch
from meshwright.comm.local import LocalRanks
from meshwright.layout import Layout
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.model.weight_gradients import WeightGradients, defer_weight_gradients
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.planner.api import plan
from meshwright.planner.cost.micro_batch import MicroBatch, layer_kind
from meshwright.planner.memory.compiled_blocks import compiled_block
from meshwright.planner.memory.saved import saved_activations
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.spec.stages import whole_model
from tests.conftest import exhaustive
from tests.planner.memory.test_saved import DOCUMENTS, NOT_HOOKED, model

DENSE = ("llama-tiny", "gpt2-tiny", "qwen2-tiny", "qwen3-tiny", "mistral-tiny")
PARTITIONED = "aot_eager"
"""The backend that partitions as inductor does and compiles nothing."""


def short(name: str) -> ModelConfig:
    """Return a model of two layers, or all of smollm3, whose layers differ."""
    return model(name) if name == "smollm3-tiny" else dataclasses.replace(model(name), layers=2)


class Sums:
    """Where nothing comes before it is asked for."""

    def accumulate(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        raise AssertionError

    def accumulate_product(self, parameter: torch.nn.Parameter, dy_NY: torch.Tensor, x_NX: torch.Tensor) -> None:
        raise AssertionError


def check(case: Case, found: Watched) -> None:
    of_functions = [name for name in NOT_HOOKED if name != "attention.first_visible"]  # an argument of the graph
    if "full" in case.layout:  # tensors shared by all layers are not passed to autograd
        of_functions.append("rotation.")
    predicted = [each for each in found.predicted if not each.name.startswith(tuple(of_functions))]
    assert Counter(each.bytes for each in predicted) == Counter(size for size, _ in found.packed), (
        case,
        predicted,
        found.packed,
    )


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        *((DENSE[0], again) for again in ("", " ac:selective", " ac:full")),
        (DENSE[1], ""),
        *exhaustive(("smollm3-tiny", "")),
        *exhaustive(*((DENSE[1], again) for again in (" ac:selective", " ac:full"))),
        *exhaustive(*((name, again) for name in DENSE[2:] for again in ("", " ac:selective", " ac:full"))),
    ],
)
def test_saved_activations_of_compiled_forward_match_prediction(name: str, recompute: str) -> None:
    case = Case(short(name), f"dp1{recompute}", dtype="bfloat16", starts=DOCUMENTS, backend=PARTITIONED)
    check(case, watch(case))


@pytest.mark.parametrize("name", [DENSE[0], *exhaustive("smollm3-tiny", *DENSE[1:])])
def test_saved_activations_of_compiled_forward_in_float32_match_prediction(name: str) -> None:
    case = Case(short(name), "dp1", dtype="float32", backend=PARTITIONED)
    check(case, watch(case))


@pytest.mark.parametrize("recompute", ["", *exhaustive(" ac:selective", " ac:full")])
def test_saved_and_queued_tensors_of_split_backward_match_prediction(recompute: str) -> None:
    """Between the two passes, memory is that of the queue, each storage once."""
    config = dataclasses.replace(model("llama-tiny"), layers=2)
    case = Case(config, f"dp1{recompute}", dtype="bfloat16", backend=PARTITIONED, queued=True)
    check(case, watch(case))
    rows, sequence, dtype = case.rows, case.sequence, torch.bfloat16
    layout, queue = Layout.parse(case.layout), WeightGradients(Sums())
    parts = Transformer(config, dtype=dtype, axes=AxisOperations(recompute=ActivationCheckpointing(layout.recompute)))
    initialise(parts, parameter_table(config), seed=1)
    defer_weight_gradients(parts, queue)
    parts.compile_blocks(backend=PARTITIONED)
    tokens = torch.randint(0, config.vocabulary, (rows, sequence + 1))
    loss = parts(tokens[:, :-1], tokens[:, 1:])
    with queue.collecting(0):
        loss.backward()
    operands = [each.untyped_storage() for product in queue._queues[0] for each in product.operands]
    held = {each.data_ptr(): each.nbytes() for each in operands}
    batch = MicroBatch.of(config, layout, rows, sequence, dtype=case.dtype)
    assert sum(held.values()) == sum(
        compiled_block(batch, layer_kind(config, layer)).queued_bytes for layer in range(config.layers)
    )


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_saved_activations_of_compiled_blocks_match_on_ranks() -> None:
    names = ("llama-tiny", "qwen3-tiny")
    layouts = (
        "tp2",
        "tp2:nosp",
        "cp2",
        "cp2:ulysses",
        "tp2 ac:selective",
        "cp2 ac:selective",
        "cp2:ulysses ac:selective",
    )
    with LocalRanks(2) as ranks:
        for number, layout in enumerate(layouts):
            config = dataclasses.replace(model(names[number % 2]), layers=2)
            case = Case(config, layout, backend=PARTITIONED)
            for found in ranks.run(watch, case):
                check(case, found)


SMALL_HEAD = dataclasses.replace(
    preset("llama-tiny"), tied=False, vocabulary=256, hidden=128, layers=2
)  # so that the peak is in a layer, not in the loss


SMALL_MIXTURE = dataclasses.replace(
    preset("mixtral-tiny"), tied=False, vocabulary=256, layers=2, intermediate=384, expert_intermediate=384
)  # so that the peak is at the gradients of experts


@pytest.mark.exhaustive
def test_peak_of_compiled_mixture_matches_allocator() -> None:
    found = measure(Step(SMALL_MIXTURE, "dp1", 4, 128, dtype="bfloat16", compiled=True))
    passing, predicted = found.peak - found.before, found.predicted.peak_bytes - found.predicted.between_steps
    assert predicted == pytest.approx(passing, rel=0.01), (found.where, found.predicted.peak_snapshot)
    assert found.predicted.compiled


@pytest.mark.slow
def test_peak_of_compiled_step_matches_allocator() -> None:
    """`bench/compiled_memory.py` checks all configurations."""
    step = Step(SMALL_HEAD, "dp1", 4, 128, dtype="bfloat16", compiled=True)
    found = measure(step)
    passing, predicted = found.peak - found.before, found.predicted.peak_bytes - found.predicted.between_steps
    assert predicted == pytest.approx(passing, rel=0.01), (found.where, found.predicted.peak_snapshot)
    assert found.predicted.compiled


def memory_and_warnings(model: str, layout: str, compile: bool = True) -> tuple[float, tuple[str, ...]]:
    one = plan(model, "8xh100-sxm", layout, sequence=4096, batch=16, compile=compile).best
    return one.memory.peak_bytes, tuple(said for said in one.warnings if "range of the step time" not in said)


def test_warning_if_compiled_blocks_are_priced_as_uncompiled() -> None:
    warning = ("memory is that of uncompiled blocks",)
    eager, compiled = (memory_and_warnings("llama-3-8b", "dp8 zero3 bf16", compile)[0] for compile in (False, True))
    assert compiled < 0.75 * eager
    assert memory_and_warnings("llama-3-8b", "dp8 zero3 bf16")[1] == ()
    for schedule in ("1f1b", "zb-h1", "dualpipe-v"):
        assert memory_and_warnings("llama-3-8b", f"dp4 zero1 pp2:{schedule} mb4 bf16")[1] == ()
    for layout in ("dp8 zero3 bf16", "dp8 zero3 ep8 bf16"):
        eager, compiled = (memory_and_warnings("mixtral-8x7b-v0.1", layout, compile) for compile in (False, True))
        assert compiled[1] == () and compiled[0] < eager[0]
    name, layout = "mixtral-8x7b-v0.1", "dp4 zero1 pp2:zb-h1 mb4 bf16"
    assert memory_and_warnings(name, layout) == (memory_and_warnings(name, layout, False)[0], warning)


def test_compiled_llama_layer_saves_results_of_products() -> None:
    """The layer saves the results of three of its four products (the last one's gradient is the layer's own) and of
    attention, and its input, two bytes per element. Eager, it saves 3.5 times as much (`test_saved`)."""
    config = preset("llama-3-8b")
    saved = saved_activations(MicroBatch.of(config, Layout(), 1, 8192), whole_model(config), compiled=True)
    layer = sum(each.bytes for each in saved if each.name.startswith("layers.7."))
    t, h, f, q, kv = 8192, 4096, 14336, 4096, 1024
    assert layer == 2 * t * (h + (q + 2 * kv) + q + h + 2 * f)
