"""Estimates of one layout: components add up, published memory is matched, invalid input is a one-line error."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.collectives.quantities import GIB
from meshwright.errors import UserError
from meshwright.launcher.recipe_checks import check_recipe
from meshwright.layout import Layout
from meshwright.planner.api import plan
from meshwright.planner.jobs import answer
from meshwright.planner.memory.ledger import ledger
from meshwright.planner.memory.rank_memory import MEMORY_PARTS, memory_of
from meshwright.planner.search.estimate import Estimate
from meshwright.planner.show.explain import explain
from meshwright.recipe import Recipe, load_recipe
from meshwright.spec.config_json import config_to_huggingface
from meshwright.spec.flops import training_flops_per_token
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset


def estimate(layout: str = "dp8 zero1 tp8", **options: Any) -> Estimate:
    wanted: dict[str, Any] = {"sequence": 4096, "batch": 128, **options}
    return plan(wanted.pop("model", "llama-3-8b"), wanted.pop("cluster", "64xh100-sxm"), layout, **wanted).best


def test_document_has_its_keys_and_adds_up():
    one = estimate("dp4 zero1 tp4 pp4 mb8 ac:selective")
    found = one.document()
    assert found["layout"] == "dp4 zero1 tp4 pp4 mb8 ac:selective bf16" and found["fits"] is True
    memory = found["memory_gib"]
    assert sum(memory[part] for part in MEMORY_PARTS) == pytest.approx(memory["peak"])
    assert sum(found["breakdown_seconds"].values()) == pytest.approx(found["step_seconds"])
    assert found["step_seconds_low"] < found["step_seconds"] < found["step_seconds_high"]
    assert found["tokens_per_second_per_device"] == pytest.approx(128 * 4096 / found["step_seconds"] / 64)
    flops = training_flops_per_token(preset("llama-3-8b"), 4096) * found["tokens_per_second_per_device"]
    assert found["model_tflops_per_device"] == pytest.approx(flops / 1e12)
    assert (
        found["mfu"] == pytest.approx(flops / 989.4e12, rel=1e-3) and "2 per multiply-add" in found["flops_convention"]
    )
    json.dumps(found)


def test_memory_is_ledger_of_fullest_rank():
    one = estimate("dp4 zero1 tp4 pp4 mb8")
    by_rank = [
        ledger(
            preset("llama-3-8b"),
            one.layout,
            batch=128,
            sequence=4096,
            rank=rank * 16,
            device="cuda",
            architecture="Hopper",
        ).peak_bytes
        for rank in range(4)
    ]
    assert one.memory.peak_bytes == max(by_rank)
    assert one.memory.device_bytes > one.memory.peak_bytes  # CUDA context, and fragmentation of the allocator


@pytest.mark.parametrize("engine", ["meshwright", "megatron", "torchtitan", "llm-foundry", "deepspeed"])
def test_every_engine_is_priced(engine: str):
    one = estimate("dp64 zero3 mb2" if engine not in ("megatron",) else "dp8 zero1 tp8", engine=engine)
    assert one.memory.peak_bytes > 0 and 0.1 < one.mfu < 0.75
    assert sum(item.bytes for item in one.memory.items) == one.memory.peak_bytes


def test_memory_of_other_engines_matches_publications():
    """Korthikanti et al. 2022 (arXiv:2205.05198, section 4): 22B, tp 8, micro-batch 4: 34 s b h / t bytes a layer with
    selective recomputation and sequence parallelism; 16 bytes a parameter, gradients in float32 two more."""
    config = dataclasses.replace(preset("gpt3-175b"), hidden=6144, heads=64, kv_heads=64, head_dim=96, layers=48)
    config = dataclasses.replace(config, intermediate=24576, vocabulary=51200)
    one = plan(config, "8xa100-80", "tp8 ac:selective", sequence=2048, batch=4, engine="megatron").best
    found = one.memory.by_category()
    kept = sum(item.bytes for item in one.memory.items if item.category == "activations" and " layers x " in item.name)
    assert kept == pytest.approx(48 * 34 * 2048 * 4 * 6144 / 8, rel=0.01)
    states = found["parameters"] + found["gradients"] + found["optimizer"]
    assert states == pytest.approx(18 * 22.1e9 / 8, rel=0.02)


def test_layout_that_does_not_fit_is_reported():
    one = estimate("dp8", cluster="8xa100-40", model="llama-3-8b", batch=8)
    assert not one.fits and one.memory.peak_bytes / GIB > 100


def test_stages_have_their_own_ledgers():
    one = estimate("dp4 zero1 tp4 pp4 mb8")
    first, last = (memory_of(one.problem, one.layout, rank) for rank in (0, 3))
    assert any(item.name.startswith("embedding") for item in first.items)
    assert any(item.name.startswith("head") for item in last.items)
    assert (
        first.by_category()["activations"] > 2 * last.by_category()["activations"]
    )  # 4 micro-batches in flight, and 1


def test_mfu_counts_attention_within_documents():
    whole, many = (estimate("dp64 zero3 mb2", sequence=32768, documents=count) for count in (1.0, 32.0))
    assert many.time.seconds < whole.time.seconds and many.mfu < 0.5  # counted as one sequence: 0.69


def test_unsupported_axis_of_engine_is_priced_with_a_warning():
    assert any("llm-foundry is not known to have tp" in line for line in estimate(engine="llm-foundry").warnings)


@pytest.mark.parametrize("precision", ["", " fp8"])
def test_operations_add_up_to_compute_time(precision: str):
    one = estimate(f"dp64 zero0 mb2{precision}")
    rows = explain(one.problem, one.layout)
    assert sum(row.seconds for row in rows) * 2 == pytest.approx(one.time.breakdown["compute"], rel=1e-6)
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    bound = {row.operation: row.bound for row in rows if row.phase == "forward"}
    assert bound["mlp.up"] == "compute" and bound["residual"] == "memory"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama-3-8bb"}, 'unknown model "llama-3-8bb"; did you mean "llama-3-8b"'),
        ({"cluster": "64xh100"}, 'unknown device "h100"; did you mean h100-'),
        ({"engine": "megatronn"}, 'unknown engine "megatronn"; did you mean "megatron"'),
        ({"batch": 100}, "batch 100 is not a multiple of dp x mb = 8; 96 or 104 would be"),
        ({"layout": "dp8 tp4"}, "it has 32 ranks (dp x tp x cp x pp), but there are 64"),
        ({"layout": "tp64", "model": "qwen3-0.6b"}, "tp64 does not divide the model's 16 heads"),
        ({"layout": "dp8 tp8 offload:cpu"}, "offloading is not priced yet"),
        ({"optimizer": "adamq"}, "adamq"),
        ({"sequence": 0}, "sequence: takes a whole number, at least 1"),
        ({"cluster": "64xv100", "layout": "dp8 tp8 bf16"}, "has no known peak for bf16"),
    ],
)
def test_invalid_arguments_are_one_line_errors(changes: dict[str, Any], message: str):
    with pytest.raises(UserError) as error:
        estimate(**{"layout": "dp8 zero1 tp8", **changes})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_unsupported_configuration_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 64}))
    with pytest.raises(UserError, match="mamba"):
        estimate(model=str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "names LlamaForSequenceClassification"),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}},
            "is never run; treated as",
        ),
        ({"architectures": ["LLaMAForCausalLM"]}, None),  # in the spelling of the first one
        ({}, None),
    ],
)
@pytest.mark.filterwarnings("ignore::meshwright.errors.ModelWarning")
def test_configuration_of_another_architecture_is_priced_with_a_warning(changes: dict[str, Any], message: str | None):
    data = {**config_to_huggingface(preset("llama-tiny")), **changes}
    one = plan(data, "1xa100-80", "dp1", sequence=64, batch=1).best
    said = [line for line in one.warnings if not line.startswith("no published run")]
    assert any(message in line for line in said) if message else said == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("falcon", "is not read: attention and MLP in parallel on one input are not computed"),
        ("deepseek_v32", "is not read: attention to tokens that an indexer chooses is not computed"),
        ("qwen3_next", "is not read: gated delta attention, with a recurrent state, is not computed"),
        ("falconet", "is not a known family"),
    ],
)
def test_unknown_architecture_is_named_first(name: str, reason: str):
    """Its quantization is not reported instead."""
    data = {"model_type": name, "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UserError, match=f"'{name}' {reason}; it can be neither planned nor run"):
        plan(data, "1xa100-80", "dp1", sequence=64, batch=1)


def test_more_documents_than_tokens_are_refused():
    with pytest.raises(UserError, match="documents 65: a sequence of 64 tokens"):
        plan("llama-tiny", "1xa100-80", "dp1", sequence=64, batch=1, documents=65)


def test_layout_that_cannot_run_is_priced_with_a_warning():
    assert any("cannot run" in line or "refuses" in line for line in estimate("dp8 tp8 fp8").warnings)


def test_jobs_are_answered_line_by_line():
    request = {"model": "llama-3-8b", "cluster": "8xh100-sxm", "sequence": 4096, "batch": 16, "layout": "dp8 zero3 mb2"}
    found = answer(json.dumps(request))
    assert found["layouts"][0]["layout"] == "dp8 zero3 mb2 bf16" and found["model"]["parameters"] == 8030261248
    as_object = {**request, "cluster": {"device": "h100-sxm", "devices": 8, "inside_gb_per_second": 450}}
    assert answer(json.dumps(as_object))["layouts"][0]["step_seconds"] > 0
    for line, message in (
        ("{", "not JSON"), ("[]", "a request is a JSON object"),
        (json.dumps({**request, "layouts": "dp8"}), 'unknown field "layouts"; did you mean "layout"'),
        (json.dumps({**request, "batch": "16"}), "batch: takes a whole number"),
        (json.dumps({key: value for key, value in request.items() if key != "cluster"}), "cluster is missing"),
        (json.dumps({**request, "layout": "dp9"}), "9 ranks"),
        (json.dumps({**request, "precision": 5}), "precision: takes text, not 5"),
        (json.dumps({**request, "precision": 0}), "precision: takes text, not 0"),
        (json.dumps({**request, "optimizer": ["adamw"]}), "optimizer: takes text, not ['adamw']"),
        (json.dumps({**request, "adapter": [1]}), "adapter: takes an object or a list of overrides, not [1]"),
        (json.dumps({**request, "optimizer": "lion"}), 'unknown optimizer "lion"'),
        (json.dumps({**request, "documents": 0}), "documents: takes a number"),
        (json.dumps({**request, "reserve": "90GiB"}), "reserve: takes a fraction below 1"),
        (json.dumps({**request, "reserve": True}), "reserve: takes a fraction below 1"),
        (json.dumps({**request, "batch": 10**30}), "at most 16,777,216"),
        ("[" * 100_000, "not JSON"), (json.dumps({**request, "model": "a\0b"}), "unknown model"),
        (json.dumps({**request, "top": 0, "layout": None}), "top: takes a whole number from 1 to 100"),
    ):  # fmt: skip
        assert set(found := answer(line)) == {"error"} and message in found["error"], line
    kept_free = [
        answer(json.dumps({**request, "reserve": reserve}))["layouts"][0]["fits"] for reserve in (0.1, "60GiB")
    ]
    assert kept_free == [True, False]
    searched = answer(json.dumps({key: value for key, value in request.items() if key != "layout"} | {"top": 2}))
    assert len(searched["layouts"]) == 2 and searched["searched"] > 100


def test_adapters_of_rank_16_on_7b_have_the_memory_of_the_texts():
    """Hu et al. 2021, section 4.2: frozen parameters need no gradients and optimizer states; Dettmers et al. 2023: NF4
    takes 4.5 bits a parameter without double quantization. 16 bytes a parameter are those of mixed-precision AdamW."""
    request = {"model": "llama-2-7b", "cluster": "1xh200", "sequence": 2048, "batch": 1, "layout": "ac:full bf16"}
    lora = {"kind": "lora", "rank": 16}
    rows = [{}, {"adapter": lora}, {"adapter": lora | {"base": "nf4"}}]
    full, half, quarter = (answer(json.dumps(request | more))["layouts"][0] for more in rows)
    memory = [each["memory_gib"] for each in (full, half, quarter)]
    base, trained = 6.738e9 / GIB, 40.0e6 / GIB  # parameters; A and B of seven matrices in 32 layers
    states = [each["parameters"] + each["gradients"] + each["optimizer"] for each in memory]
    blocks = (4 * 4096**2 + 3 * 4096 * 11008) * 32 / GIB
    assert states[0] == pytest.approx(18 * base, rel=0.01)  # gradients are summed in float32
    assert states[1] == pytest.approx(2 * base + 18 * trained, rel=0.01)
    assert states[2] == pytest.approx(2 * (base - blocks) + 4.5 / 8 * blocks + 18 * trained, rel=0.01)
    assert half["step_seconds"] < full["step_seconds"] and half["mfu"] < 1
    planned = plan("llama-2-7b", "1xh200", "ac:full bf16", sequence=2048, batch=1, adapter=lora)
    assert planned.layouts[0] == half
    for more, message in (
        ({"adapter": {"kind": "loar"}}, 'unknown adapter "loar"; did you mean "lora"'),
        ({"adapter": lora | {"targets": ["q_porj"]}}, 'did you mean "q_proj"'),
        ({"adapter": lora, "engine": "megatron"}, "adapters are priced for engine"),
        ({"adapter": "lora"}, "adapter: takes an object"),
    ):
        assert message in answer(json.dumps(request | more))["error"]


def test_each_job_has_its_own_warnings():
    """Two requests with the same fault both have the warning."""
    model = config_to_huggingface(preset("llama-tiny")) | {"unheard_of": 1}
    line = json.dumps({"model": model, "cluster": "1xa100-80", "sequence": 64, "batch": 1, "layout": "dp1"})
    for _ in range(2):
        found = answer(line)
        assert len(found["warnings"]) == 1 and '"unheard_of"' in found["warnings"][0] and found["layouts"]
    refused = answer(json.dumps(json.loads(line) | {"layout": "dp9"}))
    assert '"unheard_of"' in refused["warnings"][0] and "error" in refused


def test_layout_objects_are_accepted():
    one = plan("gpt2", "8xa100-40", Layout(dp=8), sequence=1024, batch=64).best
    assert one.layout.precision == "bf16"


def test_cublas_workspace_depends_on_architecture():
    """As in torch: 32 MiB on Hopper only, for the threads of forward and backward."""

    def peak(architecture: str) -> int:
        layout = Layout.parse("dp8 zero1 bf16")
        return ledger(
            preset("llama-3-8b"), layout, batch=8, sequence=512, device="cuda", architecture=architecture
        ).peak_bytes

    small = 8 * 2**20 + 128 * 2**10
    assert peak("Hopper") - peak("Ampere") == 2 * (32 * 2**20 - small)
    assert peak("Blackwell") == peak("Ampere") and peak("CDNA3") - peak("Ampere") == 2 * (128 * 2**20 - small)


@pytest.fixture
def graph_recipes(tiny_recipe: Path) -> tuple[str, str]:
    """Paths of a recipe without and with CUDA graphs."""
    graphs = tiny_recipe.with_name("graphs.toml")
    graphs.write_text(tiny_recipe.read_text().replace("[train]", "[train]\ncuda_graphs = true"))
    return str(tiny_recipe), str(graphs)


def test_cuda_graphs_of_a_recipe_expose_calls_of_data_parallelism_and_end_the_wait_for_the_host(
    graph_recipes: tuple[str, str],
):
    def plan_both(**options: str) -> Iterator[dict[str, float]]:
        return (plan(recipe, "2xh100-sxm", "dp2 zero1", **options).best.time.breakdown for recipe in graph_recipes)

    launched, graphed = plan_both()
    assert launched["data"] < graphed["data"]
    assert graphed["compute"] < launched["compute"] / 2  # the model is tiny
    launched, graphed = plan_both(engine="megatron-core")
    assert launched == graphed


def test_search_for_a_recipe_with_cuda_graphs_finds_what_train_accepts(graph_recipes: tuple[str, str]):
    launched, graphed = (plan(recipe, "2xh100-sxm").best.layout for recipe in graph_recipes)
    assert launched.pp == 2 and graphed.dp == 2 and graphed.zero < 2
    refused = "meshwright train refuses it: train.cuda_graphs supports only tp, dp, zero0 and zero1"
    for layout, lines in (("cp2", [[], [refused]]), ("dp2 zero2", [[], [refused]]), ("tp2", [[], []])):
        found = [plan(recipe, "2xh100-sxm", layout).best.warnings for recipe in graph_recipes]
        assert [[line for line in warnings if "refuses" in line] for warnings in found] == lines


def test_memory_of_a_recipe_with_cuda_graphs_has_workspaces_of_the_capture(graph_recipes: tuple[str, str]):
    without, graphs = (plan(recipe, "1xh100-sxm", "dp1").best.memory.peak_bytes for recipe in graph_recipes)
    tokens_and_targets = 2 * 8 * 4 * 32
    assert graphs - without == 2 * (32 << 20) + tokens_and_targets


def write_distilled_recipe(tiny_recipe: Path, **settings: Any) -> Recipe:
    """Return the recipe with a teacher of twice its width, next to its file, and the keys `settings` of [distill]."""
    teacher = dataclasses.replace(preset("llama-tiny"), vocabulary=257, max_positions=64, hidden=64, head_dim=16)
    teacher_file = tiny_recipe.with_name("config.json")
    teacher_file.write_text(json.dumps(dict(config_to_huggingface(teacher))))
    tables = load_recipe(str(tiny_recipe)).to_tables()
    tables["data"] = tables["data"] | {"tokenizer": "bytes"}
    return Recipe.from_tables(tables | {"distill": {"teacher": str(tiny_recipe.parent)} | settings})


def test_memory_of_a_recipe_has_the_momentum_of_its_optimizer(tiny_recipe: Path):
    tables = load_recipe(str(tiny_recipe)).to_tables()
    tables["train"] = tables["train"] | {"optimizer": "sgd"}
    without = Recipe.from_tables(tables)
    momentum = Recipe.from_tables(tables | {"train": tables["train"] | {"momentum": 0.9}})
    plain, held = (plan(recipe, "1xh100-sxm", "dp1 fp32") for recipe in (without, momentum))
    numel = parameter_table(plain.problem.config).numel
    assert held.best.memory.peak_bytes - plain.best.memory.peak_bytes == 4 * numel


def test_model_of_a_distilled_recipe_has_the_projections_that_train_creates(tiny_recipe: Path):
    recipe = write_distilled_recipe(tiny_recipe, hidden=True)
    found = plan(recipe, "1xh100-sxm", "dp1 fp32").problem.config
    assert [width for _, width in found.projections] == [64] * found.layers


def test_plan_refuses_the_layouts_that_distillation_cannot_train(tiny_recipe: Path):
    for settings, refused, accepted in (
        ({"hidden": True}, "pp2 mb2", "tp2"),
        ({"on_policy": 0.5}, "tp2", "tp2:nosp"),
        ({"on_policy": 0.5}, "cp2", "dp2 zero3"),
    ):
        recipe = write_distilled_recipe(tiny_recipe, **settings)
        trained = Recipe.from_tables(recipe.to_tables() | {"layout": f"{refused} fp32"})
        with pytest.raises(UserError) as of_train:
            check_recipe(trained)
        with pytest.raises(UserError) as of_plan:
            plan(recipe, "2xh100-sxm", f"{refused} fp32")
        assert str(of_plan.value) == str(of_train.value), (settings, refused)
        assert plan(recipe, "2xh100-sxm", accepted).best.fits
        found = str(plan(recipe, "2xh100-sxm").best.layout)
        check_recipe(Recipe.from_tables(recipe.to_tables() | {"layout": found}))
    with pytest.raises(UserError, match="layer_map names layer 9"):
        plan(write_distilled_recipe(tiny_recipe, hidden=True, layer_map=[[0, 9]]), "1xh100-sxm")
