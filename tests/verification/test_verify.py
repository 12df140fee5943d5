"""The verifier: correct layouts pass; planted faults and wrong results fail with the right description."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model.initialise import initial_value
from meshwright.names import ASYNCHRONOUS_SCHEDULES, BIDIRECTIONAL_SCHEDULES, FAMILIES, SCHEDULE_CHUNKS
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.planner.cost.data_calls import Work
from meshwright.planner.cost.traffic import predicted_traffic
from meshwright.recipe import load_recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_to_huggingface
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import PRESETS, preset
from meshwright.spec.refuse import refuse
from meshwright.verification import mutations
from meshwright.verification.cases import Case, CaseBuilder
from meshwright.verification.compare import Comparison, compare, compute_relative_errors
from meshwright.verification.grid import GRID, MIXTURES
from meshwright.verification.local_faults import LOCAL_FAULTS
from meshwright.verification.mutations import NEUTRAL
from meshwright.verification.patterns import list_in_backward_order
from meshwright.verification.problem import Problem, choose_sequence_length, scale_down_config, scale_down_layout
from meshwright.verification.ranks import RankResult, StepResult
from meshwright.verification.reference import Reference
from meshwright.verification.run import _choose_default_models, _Verifier, run_verification
from tests.batches import make_batch, share_of
from tests.conftest import covering, exhaustive, list_config_features
from tests.model.transformers_names import entry_in_transformers
from tests.verification.local_fault_names import BY_LAYOUT, NEEDS_RANKS

LLAMA = scale_down_config(preset("llama-3-8b"))
SUMS = ("data.gradients", "tensor.gradients")  # call sites of gradient reductions


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(Problem(LLAMA, batch=8))


def ideal_results(reference: Reference, ranks: int, shards: int = 1) -> list[RankResult]:
    """Return the results of correct ranks. shards: number of ranks between which each parameter is sharded."""
    results = []
    for rank in range(ranks):

        def cut(kind: str, entries: dict[str, torch.Tensor], part: int = rank % shards) -> list[TensorSlice]:
            pieces = []
            for name, values in entries.items():
                low, high = values.numel() * part // shards, values.numel() * (part + 1) // shards
                pieces.append(TensorSlice(kind, name, low, high, values[low:high].clone()))
            return pieces

        steps = {
            step: StepResult(
                reference.losses[step],
                reference.norms[step],
                reference.scales[step],
                cut("gradient", reference.gradients[step]),
                cut("master", reference.weights[step + 1]),
            )
            for step in range(reference.problem.steps)
        }
        optimizer = [piece for kind, entries in reference.optimizer.items() for piece in cut(kind, entries)]
        parameters = cut("parameter", reference.round_to_parameters(reference.weights[-1]))
        counters = {step: reference.compute_expected_counters(step) for step in range(reference.problem.steps + 1)}
        results.append(RankResult(steps, optimizer, parameters, counters, [], reference.final_loss))
    return results


def gradient(result: RankResult, step: int, name: str) -> torch.Tensor:
    return next(piece.tensor for piece in result.steps[step].gradients if piece.name == name)


# --- the reference against transformers


NAMES = (
    *("llama-3-8b", "llama-3.2-1b", "qwen2.5-7b", "qwen3-0.6b", "mistral-7b-v0.1", "gpt2"),
    *("mixtral-8x7b-v0.1", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "dots-llm1"),
)


@pytest.mark.parametrize("name", covering(NAMES, lambda name: list_config_features(scale_down_config(preset(name)))))
def test_single_device_gradients_match_transformers(name: str, wide: Callable[[], Any]):
    """Without the load-balancing loss, which transformers computes over all sequences and layers together
    (tests/model/test_experts.py compares it where both agree)."""
    import transformers

    config = dataclasses.replace(scale_down_config(preset(name)), router_loss=0.0)
    problem = Problem(config, batch=4, steps=1)
    ours = Reference(problem)
    batch = ours.make_batch(0)
    total = torch.zeros((), dtype=torch.float64)
    with wide():
        huggingface = transformers.AutoConfig.for_model(**dict(config_to_huggingface(config)))
        model = transformers.AutoModelForCausalLM.from_config(
            huggingface, attn_implementation="eager", experts_implementation="eager"
        ).double()
    buffers = {name: values for name, values in model.named_buffers() if "inv_freq" not in name}  # balancing biases
    values = {name: values.detach().fill_(math.nan) for name, values in [*model.named_parameters(), *buffers.items()]}
    for entry in ours.table.entries:
        entry_in_transformers(values, entry.name).copy_(initial_value(entry, problem.seed))
    with wide():
        for index in range(problem.batch):  # one document at a time: transformers has no document mask
            ids = batch.document_ids[index]
            for start, stop in itertools.pairwise([0, *(1 + (ids[1:] != ids[:-1]).nonzero()[0]), problem.sequence]):
                logits = model(torch.from_numpy(batch.tokens[index : index + 1, start:stop])).logits[0]
                targets = torch.from_numpy(batch.targets[index, start:stop])
                total = total + torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        loss = total / int((batch.targets != -100).sum())
        loss.backward()
    assert loss.item() == pytest.approx(ours.losses[0], rel=1e-12)
    gradients = {name: values.grad for name, values in model.named_parameters()}
    theirs = {}
    for entry in (entry for entry in ours.table.entries if not entry.balances):
        gradient = entry_in_transformers(gradients, entry.name)
        theirs[entry.name] = (gradient.T if entry.transposed else gradient).reshape(-1)
    assert max(compute_relative_errors(ours.gradients[0], theirs).values()) < 1e-10


# --- whole runs


@pytest.mark.parametrize(
    "layout",
    [
        "dp2 zero3 tp2 mb2",
        *exhaustive("tp2 cp2", "dp4 zero3 hs2 mb2 ac:full", "dp2 zero1 mb2", "tp4:nosp", "tp3"),
    ],
)
def test_correct_layout_passes_in_float64(layout, three_layers):
    document = run_verification(layout, model="qwen3-0.6b")
    assert document["passed"] and document["worst"]["relative_error"] < 1e-10 and document["loss_error"] < 1e-12


@pytest.mark.parametrize(
    "layout",
    [
        "dp2 zero3 mb2",
        *exhaustive("dp2 zero3 tp2 mb2", "dp4 zero3 hs2 mb2 ac:full", "tp2 cp2"),
    ],
)
def test_correct_layout_passes_in_float32(layout, three_layers):
    assert run_verification(layout, model="gpt2", dtype="float32")["passed"]


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ("dp2 mb2", "all"),
        ("dp4 zero3 hs2", "fewer"),
        *(
            pytest.param(text, "all", marks=pytest.mark.exhaustive)
            for text in ("dp4 zero3 hs2", "tp2", "tp4:nosp", "cp2", "cp2:ulysses")
        ),
    ],
)
def test_every_planted_fault_is_caught_or_neutral(layout, kinds, two_layers, request):
    request.getfixturevalue("fewer_kinds" if kinds == "fewer" else "fewer_local_faults")
    document = run_verification(layout, model="llama-3-8b", mutate=True)
    mutations = document["mutations"]
    assert document["passed"] and mutations["missed"] == []
    assert mutations["planted"] == mutations["caught"] + mutations["neutral"] >= 16
    sites = {fault["fault"].split(" (")[0] for fault in mutations["faults"]} - {*LOCAL_FAULTS}
    expected = {"step.verdict", "validation.loss"}
    if "tp" in layout:
        backward = {f"{site}.backward" for site in ("attention.input", "mlp.input", "head.input")}
        forward = {"embedding", "attention.output", "mlp.output"}
        expected |= {"loss.target_logit", "loss.maximum", "loss.sum", *forward, *backward}
        if "nosp" not in layout:
            expected |= {"tensor.gradients"} | {site.removesuffix(".backward") for site in backward}
            expected |= {f"{site}.backward" for site in forward}
        if "tp4" in layout:
            expected.add("tensor.gradients.shared_heads")
    else:
        expected |= {"data.targets", "data.gradients"}
    if "ulysses" in layout:
        expected |= {f"attention.{what}{way}" for what in ("heads", "tokens") for way in ("", ".backward")}
    elif "cp" in layout:
        expected |= {"attention.ring", "attention.ring.backward", "attention.ring.gradients"}
    if "zero" in layout:
        expected.add("data.parameters")
    if "hs" in layout:
        expected.add("data.gradients.replicas")
    assert sites == expected
    reasons = {fault["fault"]: fault["said"] for fault in mutations["faults"] if fault["fault"].startswith(SUMS)}
    assert "2 x the reference" in next(reasons[fault] for fault in reasons if ": double" in fault)
    assert all("gradient of" in reason for reason in reasons.values())
    neutral = {fault["fault"] for fault in mutations["faults"] if fault["outcome"] == "neutral"}
    shifts = ("double", "drop", "stale") if kinds == "all" else ("double",)
    validation = {f"validation.loss (all_reduce): {kind}" for kind in ("skip", "double", "drop")}
    quotient = ({"skip", "drop"} if kinds == "all" else {"skip"}) if layout.startswith("tp") else set()
    doubled = {"validation.loss (all_reduce): double"}
    assert (neutral & validation) - doubled == {f"validation.loss (all_reduce): {kind}" for kind in quotient}
    assert neutral - validation == {f"loss.maximum (all_reduce): {kind}" for kind in shifts if "tp" in layout}


@pytest.mark.parametrize("layout", BY_LAYOUT)
def test_every_local_fault_needing_ranks_is_planted_and_caught(
    layout: str, monkeypatch: pytest.MonkeyPatch, fewer_local_faults: None, two_layers: None
):
    monkeypatch.setattr(mutations, "KINDS", ())
    found = run_verification(layout, model="llama-3-8b", mutate=True)["mutations"]
    assert {fault["fault"] for fault in found["faults"] if fault["outcome"] == "caught"} == BY_LAYOUT[layout]
    assert found["missed"] == []


def test_each_local_fault_that_needs_ranks_has_a_layout():
    assert set().union(*BY_LAYOUT.values()) == NEEDS_RANKS


def test_wrong_group_yields_different_values(monkeypatch: pytest.MonkeyPatch, two_layers: None):
    """The wrong group must not hold the same gradient shards as the right one."""
    every = mutations.list_possible_faults
    monkeypatch.setattr(mutations, "KINDS", ("wrong group",))
    monkeypatch.setattr(mutations, "LOCAL_FAULTS", {})
    monkeypatch.setattr(
        mutations, "list_possible_faults", lambda *of: [each for each in every(*of) if "gradients" in each.site]
    )
    document = run_verification("dp2 tp2", model="llama-3-8b", mutate=True)
    assert document["mutations"]["missed"] == []
    assert "tensor.gradients (all_reduce): wrong group" in {each["fault"] for each in document["mutations"]["faults"]}


def test_neutral_faults_are_listed():
    """Softmax is invariant under a shift of all logits by a value on which all ranks agree."""
    kinds, sites = ("double", "drop", "stale"), ("loss.maximum", "distill.maximum")
    shifts = {(site, "all_reduce", kind) for kind in kinds for site in sites}
    assert set(NEUTRAL) == shifts | {(site, "all_reduce", "double") for site in ("validation.loss", "start.program")}
    assert all(len(reason) > 20 for reason in NEUTRAL.values())


def features(layout: Layout) -> set[str]:
    """Return the features of a layout by axis; pipeline schedules are grouped into ordinary backward ("whole"), split
    backward and two copies of each stage ("both")."""
    both = layout.schedule in BIDIRECTIONAL_SCHEDULES
    split = layout.schedule.startswith(("zb-", "v-"))
    present = {
        "dp": layout.dp > 1,
        f"zero:{layout.zero}": layout.zero > 0,
        "hs": layout.hybrid is not None,
        "tp" + ("" if layout.tensor_sequence_parallel else ":nosp"): layout.tp > 1,
        f"cp:{layout.cp_method}": layout.cp > 1,
        "pp:" + ("both" if both else "split" if split else "whole"): layout.pp > 1,
        "mb": layout.micro_batches > 1,
        "ep": layout.ep > 1,
        "etp": layout.etp > 1,
        f"ac:{layout.recompute}": layout.recompute != "none",
    }
    return {name for name, there in present.items() if there}


def test_grid_covers_every_axis_and_every_pair(repository: Path):
    assert f"{len(GRID)} layouts of up to 8 ranks" in (repository / "docs" / "verify.md").read_text()
    assert len({str(layout) for layout in GRID}) == len(GRID)
    sizes = [layout.world_size for layout in GRID]
    assert sizes == sorted(sizes) and sizes[-1] == 8
    assert len(GRID) < 120 and sizes.count(8) < 25  # minutes, not more
    assert {layout.tp for layout in GRID} == {layout.cp for layout in GRID} == {1, 2, 3, 4, 8}
    assert {layout.zero for layout in GRID} == {0, 1, 2, 3}
    assert {layout.schedule for layout in GRID} >= {*SCHEDULE_CHUNKS} - {*ASYNCHRONOUS_SCHEDULES}
    met = {pair for layout in GRID for pair in itertools.combinations(sorted(features(layout)), 2)}
    everything = sorted(set().union(*map(features, GRID)))
    axes = {"dp", "zero", "hs", "tp", "cp", "pp", "mb", "ep", "etp", "ac"}
    assert {name.partition(":")[0] for name in everything} == axes and len(everything) == 17
    for pair in itertools.combinations(everything, 2):
        first, second = (name.partition(":")[0] for name in pair)
        assert first == second or pair in met, f"no layout has {pair[0]} with {pair[1]}"


def test_grid_includes_mixtures_without_expert_parallelism():
    for axis in ("dp", "tp", "cp", "pp"):
        layout = next(layout for layout in MIXTURES if getattr(layout, axis) > 1)
        assert layout in GRID and not layout.expert_parallel
        assert all(config.experts for _, config in _choose_default_models(layout, mixture=True))
        assert not any(config.experts for _, config in _choose_default_models(layout, mixture=False))
    assert any(layout.zero == 3 for layout in MIXTURES)


@pytest.mark.parametrize(
    "notation", ["dp4 zero1 hs2 tp4 mb2", "cp2 pp2 mb2", "tp2 pp2 mb2", "dp2 tp2 ep4", "dp2 tp2:nosp cp2 ep2:etp2"]
)
def test_single_layout_model_makes_every_call_of_its_kind(notation: str):
    """Without --thorough and without a model, only one of three models is verified."""
    layout = Layout.parse(notation)

    def sites(config: ModelConfig) -> set[str]:
        small = scale_down_config(config, layout.tp, ep=layout.ep, etp=layout.etp)
        work = Work(batch=8, sequence=choose_sequence_length(layout))
        return {site for rank in range(layout.world_size) for site in predicted_traffic(small, layout, work, rank)}

    (only,) = _choose_default_models(layout, mixture=False, one=True)
    every = _choose_default_models(layout, mixture=False)
    assert only in every and len(every) == 3
    assert sites(only[1]) == set().union(*(sites(config) for _, config in every))


def test_layout_is_verified_with_one_model_or_thoroughly_three(monkeypatch: pytest.MonkeyPatch, two_layers: None):
    monkeypatch.setattr(CaseBuilder, "make_default_cases", lambda maker: [Case("plain", maker.make_sgd_problem())])
    monkeypatch.setattr(CaseBuilder, "make_all_cases", CaseBuilder.make_default_cases)
    for thorough, models in ((False, {"qwen3-0.6b"}), (True, {"llama-3-8b", "qwen3-0.6b", "gpt2"})):
        assert {entry["model"] for entry in run_verification("dp2", thorough=thorough)["layouts"]} == models


def test_mixture_without_balancing_loss_passes_under_pipeline_parallelism(first_case_alone: None):
    config = dataclasses.replace(preset("mixtral-8x7b-v0.1"), router_loss=0.0)
    assert run_verification("pp2 mb2", model=config)["passed"]


def test_documentation_lists_every_call_site(repository: Path):
    """Compared with the sites that `planner/cost/traffic.py` predicts for layouts that have each axis once."""
    made = set()
    for name, notation in (
        ("llama-3-8b", "dp4 zero1 hs2 tp4 mb2"),
        ("gpt2", "cp2 pp2 mb2"),
        ("gpt2", "cp2:ulysses"),
        ("mixtral-8x7b-v0.1", "dp2 tp2:nosp cp2 ep2:etp2"),
        ("dots-llm1", "dp2 ep2"),
    ):
        layout = Layout.parse(notation)
        ulysses = layout.cp if layout.cp_method == "ulysses" else 1
        config = scale_down_config(preset(name), layout.tp, ulysses, ep=layout.ep, etp=layout.etp)
        for rank in range(layout.world_size):
            made |= set(predicted_traffic(config, layout, Work(batch=8, sequence=choose_sequence_length(layout)), rank))
    text = (repository / "docs" / "verify.md").read_text().partition("```text")[2].partition("```")[0]
    listed = set()
    for site, star in re.findall(r"([a-z_]+(?:\.[a-z_]+)+|embedding)(\*?)", text):
        listed |= {site, f"{site}.backward"} if star else {site}
    assert listed == made


# --- failure messages


def test_doubled_gradient_is_named(reference):
    results = ideal_results(reference, 2)
    assert compare(reference, results, Layout(dp=2)).passed
    name = "model.layers.2.mlp.down_proj.weight"
    for result in results:
        gradient(result, 0, name).mul_(2)
    found = compare(reference, results, Layout(dp=2))
    assert found.failure == f"step 1: the gradient of {name} is off by 1.0e+00 (2 x the reference)"
    assert found.worst_name == name and found.worst_error == pytest.approx(1.0)


def test_first_wrong_gradient_in_backward_order_is_named(reference):
    results = ideal_results(reference, 1)
    for entry in (
        "model.embed_tokens.weight",
        "model.layers.3.self_attn.q_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    ):
        gradient(results[0], 1, entry).add_(1)
    failure = compare(reference, results, Layout()).failure
    assert failure is not None and "step 2: the gradient of model.layers.3.self_attn.q_proj.weight" in failure


def test_backward_order_starts_at_output_of_layer(reference):
    order = [name.removeprefix("model.").removesuffix(".weight") for name in list_in_backward_order(reference)]
    assert order[:2] == ["lm_head", "norm"] and order[-1] == "embed_tokens"
    layer = [name.removeprefix("layers.4.") for name in order if name.startswith("layers.4.")]
    expected = ["mlp.down_proj", {"mlp.up_proj", "mlp.gate_proj"}, "post_attention_layernorm", "self_attn.o_proj"]
    assert layer[0] == expected[0] and set(layer[1:3]) == expected[1] and layer[3:5] == expected[2:]
    assert set(layer[5:8]) == {f"self_attn.{part}_proj" for part in "qkv"} and layer[8:] == ["input_layernorm"]


def test_backward_order_has_every_parameter_of_every_family_once():
    models = [preset(name) for name in PRESETS if name.endswith("-tiny")]
    runnable = [model for model in models if not model.encoder]
    assert {model.family for model in runnable} == set(FAMILIES)
    for model in runnable:
        table = parameter_table(model)
        order = list_in_backward_order(SimpleNamespace(table=table))
        assert sorted(order) == sorted(entry.name for entry in table.entries)


def test_wrong_loss_is_named_with_factor_and_gradient(reference):
    results = ideal_results(reference, 2)
    for result in results:
        result.steps[1].loss *= 2
        gradient(result, 1, "lm_head.weight").mul_(2)
    found = compare(reference, results, Layout(dp=2))
    assert found.failure is not None and found.step == 1
    assert found.failure.endswith("(2 x the reference); the loss is off by 1.0e+00 (ratio to reference 2)")
    results = ideal_results(reference, 2)
    results[1].steps[0].loss *= 0.5
    assert str(compare(reference, results, Layout(dp=2)).failure).endswith("(ratio to reference 0.5)")


def test_gradient_of_wrong_layer_and_differing_shard_are_recognised(reference):
    results = ideal_results(reference, 2)
    name, other = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (1, 2))
    for result in results:
        gradient(result, 0, name).copy_(reference.gradients[0][other])
    assert f"(the gradient of {other})" in str(compare(reference, results, Layout(dp=2)).failure)
    results = ideal_results(reference, 2)
    gradient(results[1], 0, name).add_(torch.randn(888) * 0.1)
    assert str(compare(reference, results, Layout(dp=2)).failure).endswith("(differs on rank 1 alone)")


def test_missing_contribution_names_its_rank(reference):
    results = ideal_results(reference, 4)
    part = reference.split_gradient(0, 4)[3]
    for result in results:
        for piece in result.steps[0].gradients:
            piece.tensor.sub_(part[piece.name])
    failure = compare(reference, results, Layout(dp=4)).failure
    assert failure is not None and "(contribution of rank 3 missing)" in failure


def test_unsummed_gradient_names_contributing_ranks(reference):
    results = ideal_results(reference, 2)
    parts = reference.split_gradient(0, 2)
    for rank, result in enumerate(results):
        for piece in result.steps[0].gradients:
            piece.tensor.copy_(parts[rank][piece.name])
    failure = compare(reference, results, Layout(dp=2)).failure
    assert failure is not None
    assert "on rank 0 only the contribution of rank 0: not summed; on rank 1 only the contribution of rank 1" in failure


def test_wrong_shard_names_its_rank(reference):
    results = ideal_results(reference, 4, shards=4)
    layout = Layout(dp=4, zero=2)
    assert compare(reference, results, layout).passed
    name = "model.layers.0.mlp.up_proj.weight"
    gradient(results[2], 2, name).mul_(3)
    failure = compare(reference, results, layout).failure
    assert failure is not None and name in failure and "3 x the reference, on rank 2 alone" in failure


def test_stale_gradient_is_recognised(reference):
    results = ideal_results(reference, 1)
    results[0].steps[1].gradients = results[0].steps[0].gradients
    failure = compare(reference, results, Layout()).failure
    assert failure is not None and "step 2" in failure and "the gradient of the step before" in failure


def test_unsummed_tp_gradients_are_recognised_and_copies_count(reference):
    layout = Layout(tp=2)
    name = "model.norm.weight"
    for factors, expected in (
        ((0.25, 0.75), "(partial gradients were not summed over tp)"),
        ((1, 3), "(3 x the reference, on rank 1 alone)"),
        ((3, 1), "(3 x the reference, on rank 0 alone)"),
    ):
        results = ideal_results(reference, 2)
        for result, factor in zip(results, factors, strict=True):
            gradient(result, 0, name).mul_(factor)
        failure = compare(reference, results, layout).failure
        assert failure is not None and failure.endswith(expected), failure


def test_missing_and_infinite_values_fail(reference):
    results = ideal_results(reference, 1)
    del results[0].steps[0].gradients[5]
    assert compare(reference, results, Layout()).worst_error == math.inf
    results = ideal_results(reference, 1)
    results[0].final_loss = math.nan
    assert compare(reference, results, Layout()).failure == "the validation loss after the last update is off by inf"
    results = ideal_results(reference, 1)
    results[0].steps[1].norm *= 1 + 1e-9
    assert "gradient norm is off by 1.0e-09" in str(compare(reference, results, Layout()).failure)
    results = ideal_results(reference, 1)
    results[0].steps[0].weights[0].tensor.add_(1e-6)
    assert "update of model.embed_tokens.weight" in str(compare(reference, results, Layout()).failure)


def test_error_measure_has_floor_for_zero_gradients():
    truth = {"zero": torch.zeros(4, dtype=torch.float64), "other": torch.full((12,), 2.0, dtype=torch.float64)}
    values = {"zero": torch.full((4,), 1e-9, dtype=torch.float64), "other": truth["other"] * (1 + 1e-6)}
    errors = compute_relative_errors(values, truth)
    assert errors["other"] == pytest.approx(1e-6)
    root_mean_square = math.sqrt(12 * 4.0 / 16)
    assert errors["zero"] == pytest.approx(2e-9 / (1e-3 * math.sqrt(4) * root_mean_square))


# --- the verification problems


def test_batches_are_ragged_and_counts_differ_everywhere():
    problem = Problem(LLAMA, batch=8)
    counts = []
    for step in range(3):
        batch = make_batch(problem, step)
        shares = [share_of(batch, rank, 4, 2) for rank in range(4)]
        per_micro_batch = [int((part.targets != -100).sum()) for share in shares for part in share]
        assert len(set(per_micro_batch)) > 4 and 0 in per_micro_batch
        counts.append(sum(per_micro_batch))
        documents = {len(set(row)) for row in batch.document_ids.tolist()}
        assert 1 in documents and max(documents) > 3
    assert len(set(counts)) == 3, "the number of targets must differ between steps, else a stale count would pass"


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mistral-7b-v0.1", "qwen2.5-7b", "qwen3-32b", "gpt2-xl"])
def test_scaled_down_model_keeps_its_features(name):
    large = preset(name)
    small = scale_down_config(large)
    kept = ("family", "norm", "activation", "gated", "positions", "qkv_bias", "query_key_norm", "tied", "rope_theta")
    assert all(getattr(small, field) == getattr(large, field) for field in kept)
    assert (small.kv_heads < small.heads) == (large.kv_heads < large.heads)
    assert (small.sliding_window is None) == (large.sliding_window is None)
    assert (small.rope_scaling is None) == (large.rope_scaling is None)
    assert small.layers == 5 and small.vocabulary == 499


@pytest.mark.parametrize("tp", [2, 3, 4, 6, 8])
def test_scaled_down_model_is_divisible_by_tp(tp):
    for name in ("llama-3-8b", "qwen3-0.6b", "gpt2"):
        layout = Layout(tp=tp)
        small = scale_down_config(preset(name), tp)
        refuse(layout, small, 8, choose_sequence_length(layout), tp)
        assert small.vocabulary % tp, "the last rank's slice of the vocabulary must be padded"
        assert tp % 2 or tp < 4 or name == "gpt2" or small.kv_heads < tp, "fewer key-value heads than ranks"


def test_large_layouts_keep_features_when_scaled_down():
    assert str(scale_down_layout(Layout.parse("dp64 zero3 hs8 mb32 bf16"))) == "dp8 zero3 hs4 mb4"
    assert str(scale_down_layout(Layout.parse("dp64 zero1"))) == "dp8 zero1"
    assert str(scale_down_layout(Layout.parse("dp4 zero2 hs2 mb2"))) == "dp4 zero2 hs2 mb2"
    assert str(scale_down_layout(Layout.parse("dp16 zero1 tp8"))) == "dp2 zero1 tp4"
    assert str(scale_down_layout(Layout.parse("dp16 zero3 hs4 tp8:nosp"))) == "dp4 zero3 hs2 tp2:nosp"
    assert str(scale_down_layout(Layout.parse("tp16"))) == "tp8"
    assert str(scale_down_layout(Layout.parse("dp2 tp6"))) == "dp2 tp4"


def test_invalid_arguments_are_one_line_errors():
    with pytest.raises(UserError, match='unknown dtype "float46"; did you mean "float64"'):
        run_verification("dp2", dtype="float46")
    with pytest.raises(UserError, match="offload:cpu"):
        run_verification("dp2 offload:cpu")
    with pytest.raises(UserError, match="preset"):
        run_verification("dp2", model="lama-3-8b")
    with pytest.raises(UserError, match="planned but not run"):
        run_verification("dp2", model="bloom-176b")


# --- the command


def test_command_prints_documented_keys(command_line, first_case_alone):
    outcome = command_line("verify", "--layout", "dp2 zero1", "--model", "llama-tiny", "--json")
    assert outcome.code == 0
    document = json.loads(outcome.output)
    assert document["schema"] == 1 and document["passed"] is True
    assert {"worst", "loss_error", "gradient_norm_error", "layouts", "mutations"} <= set(document)
    assert set(document["worst"]) >= {"name", "relative_error"}
    assert document["layouts"][0]["layout"] == "dp2 zero1"


def test_recipe_gives_layout_and_model(tiny_recipe, first_case_alone):
    tiny_recipe.write_text(tiny_recipe.read_text().replace('layout = "dp1"', 'layout = "dp2 zero3 mb2"'))
    document = run_verification(tiny_recipe)
    assert [entry["layout"] for entry in document["layouts"]] == ["dp2 zero3 mb2"] and document["passed"]


def test_output_says_which_cases_ran_compiled(tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_Verifier, "compare", lambda *arguments: Comparison("lm_head.weight", 0.0, 0.0, 0.0, None))
    for override, thorough, said in (
        ("train.compile=false", False, "  ok"),
        ("train.compile=true", False, "  ok  (compiled: 1 of 4 cases, by aot_eager)"),
        ("train.compile=true", True, "  ok  (compiled: 2 of 9 cases, by aot_eager, inductor)"),
    ):
        lines: list[str] = []
        found = run_verification(load_recipe(tiny_recipe, [override]), thorough=thorough, log=lines.append)
        assert lines[0].endswith(said)
        compiled = [case["name"] for case in found["layouts"][0]["cases"] if case["compile_backend"]]
        assert compiled == ["compiled by aot_eager", "compiled by inductor"][: said.count("by ") + thorough]


def test_output_says_that_train_refuses_the_layout_of_a_recipe(tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_Verifier, "compare", lambda *arguments: Comparison("lm_head.weight", 0.0, 0.0, 0.0, None))
    for layout, reasons in (
        ("tp2", []),
        ("tp3", ['layout "tp3": tp3 does not divide the model\'s 4 heads; 2 or 4 would']),
    ):
        lines: list[str] = []
        run_verification(load_recipe(tiny_recipe, [f"layout={layout}"]), log=lines.append)
        begin = "note: train refuses this recipe: "
        notes = [line.removeprefix(begin).partition("; it is")[0] for line in lines if line.startswith(begin)]
        assert notes == reasons


def test_failed_verification_exits_with_1(command_line, monkeypatch, first_case_alone):
    import meshwright.verification.run as run

    right = Reference

    def wrong(problem: Problem) -> Reference:
        reference = right(problem)
        reference.gradients[0]["model.norm.weight"] *= 0.5  # equivalent to doubled gradients on the ranks
        return reference

    monkeypatch.setattr(run, "Reference", wrong)
    outcome = command_line("verify", "--layout", "dp2", "--model", "llama-tiny")
    assert outcome.code == 1
    assert "meshwright: error: dp2: step 1: the gradient of model.norm.weight is off by 1.0e+00 (2 x" in outcome.errors


def test_layout_in_place_of_recipe_is_explained(command_line):
    outcome = command_line("verify", "dp2")
    assert outcome.code == 2 and '--layout "dp2"' in outcome.errors and len(outcome.errors.strip().splitlines()) == 1


def test_mixed_sliding_windows_survive_scaling_down():
    mixed = dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True, layers=8, sliding_window=4096)
    mixed = dataclasses.replace(mixed, windowed_layers=(False,) * 4 + (True,) * 4)
    small: ModelConfig = scale_down_config(mixed)
    assert small.windowed_layers is not None and any(small.windowed_layers) and not all(small.windowed_layers)
