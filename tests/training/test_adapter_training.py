"""Runs with an adapter: the base stays frozen, checkpoints are PEFT directories that resume on another layout."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.comm.local import LocalRanks
from meshwright.errors import UserError
from meshwright.launcher.recipe_checks import check_adapter_from
from meshwright.launcher.rendezvous import RendezvousInfo
from meshwright.planner.models import config_of
from meshwright.recipe import Recipe
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.parameters import parameter_table
from meshwright.training.worker import train_as_rank
from tests.adapters.adapter_cases import small, write_base
from tests.planner.cost.test_traffic import ROUTED
from tests.training import training_cases as cases


def changes(base: Path, **more: Any) -> dict[str, Any]:
    """Return the changes of a recipe that trains an adapter on the model in `base`."""
    adapter = {"kind": "lora", "rank": 2, "targets": ["q_proj", "v_proj", "o_proj"]}
    return {"model": {"from": str(base)}, "adapter": adapter, "data_tokenizer": "bytes", "data_sequence": 40} | more


@pytest.fixture(scope="module")
def ranks() -> Any:
    with LocalRanks(2) as started:
        yield started


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    write_base(directory, dataclasses.replace(small(), intermediate=36), torch.float32)
    return directory


def test_run_resumes_on_another_layout_and_saves_peft_directory(ranks: LocalRanks, base: Path, tmp_path: Path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    (whole,) = cases.run_without_error(None, straight, "dp1 fp32", **changes(base, checkpoint_every=3))
    cases.run(ranks, resumed, "dp2 zero3 fp32", 3, **changes(base, checkpoint_every=3))
    outcomes = cases.run_without_error(ranks, resumed, "tp2 fp32", **changes(base, checkpoint_every=3))
    cases.assert_same_steps(resumed, straight)
    checkpoint = resumed / "run/checkpoints/step-000006"
    assert not (checkpoint / "config.json").exists() and not (checkpoint / "model.safetensors").exists()
    settings = json.loads((checkpoint / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["o_proj", "q_proj", "v_proj"] and settings["r"] == 2
    values = load_file(checkpoint / "adapter_model.safetensors")
    other = load_file(straight / "run/checkpoints/step-000006/adapter_model.safetensors")
    assert len(values) == 2 * 3 * 2 and values.keys() == other.keys()
    for name, value in values.items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-5)
    # Frozen parameters have neither gradients nor optimizer state nor traffic, as predicted.
    trained = sum(value.numel() for value in values.values())
    result = whole["result"]
    assert result["measured"]["state_bytes"]["optimizer"] == 2 * 4 * trained
    assert result["measured"]["state_bytes"] == result["predicted"]["state_bytes"]
    found = outcomes[0]["result"]
    assert found["measured"]["sent_bytes_per_step"] == found["predicted"]["sent_bytes_per_step"]


def test_adapter_from_a_run_starts_at_its_newest_checkpoint(base: Path, tmp_path: Path):
    settings = {"train_steps": 2, "checkpoint_every": 1}
    cases.run_without_error(None, tmp_path / "first", "dp1 fp32", **changes(base, **settings))
    run, adapter = tmp_path / "first/run", changes(base)["adapter"]
    losses = []
    for number, place in enumerate((run, run / "checkpoints", *(run / f"checkpoints/step-00000{n}" for n in (2, 1)))):
        given = changes(base, adapter=adapter | {"from": str(place)}, **settings)
        recipe = cases.recipe(tmp_path / str(number), "dp1 fp32", **given)
        check_adapter_from(recipe)
        cases.run_without_error(None, tmp_path / str(number), "dp1 fp32", **given)
        losses.append([line["loss"] for line in cases.metrics(tmp_path / str(number)) if "loss" in line])
    assert losses[0] == losses[1] == losses[2] != losses[3]
    for other, expected in (
        (adapter | {"rank": 3, "from": str(run)}, "holds an adapter with rank 2, not 3"),
        (adapter | {"targets": ["q_proj"], "from": str(run)}, "an adapter of model.layers.0.self_attn.o_proj"),
        (adapter | {"from": str(base)}, "adapter_model.safetensors cannot be read"),
    ):
        recipe = cases.recipe(tmp_path / "refused", "dp1", **changes(base, adapter=other))
        with pytest.raises(UserError, match=expected) as error:
            check_adapter_from(recipe)
        with pytest.raises(UserError, match=expected):
            config_of(recipe)  # what is planned
        assert "\n" not in str(error.value)


def test_resume_is_refused_after_base_weights_changed(base: Path, tmp_path: Path):
    """The checkpoint has the adapter alone, so that only a digest shows that it was trained on other weights."""
    shutil.copytree(base, tmp_path / "base")
    given = changes(tmp_path / "base", checkpoint_every=3)
    cases.run(None, tmp_path, "dp1", 3, **given)
    weights = load_file(tmp_path / "base/model.safetensors")
    save_file({name: 1.5 * value for name, value in weights.items()}, tmp_path / "base/model.safetensors")
    (outcome,) = cases.run(None, tmp_path, "dp1", **given)
    assert "model.from: the weights in" in outcome["error"] and "have changed since this run began" in outcome["error"]
    save_file(weights, tmp_path / "base/model.safetensors")
    cases.run_without_error(None, tmp_path, "dp1", **given)


@pytest.mark.parametrize(("base", "precision"), [("nf4", "fp32"), ("bf16", "bf16")])
def test_first_loss_of_dora_is_that_of_the_base(tmp_path: Path, base: str, precision: str):
    """The base as the run holds it, quantized or rounded: LoRA, whose B is zero, computes the same."""
    write_base(
        tmp_path / "base", dataclasses.replace(small(), hidden=64, heads=4, head_dim=16, intermediate=64), torch.float32
    )
    for kind in ("lora", "dora"):
        adapter = {"kind": kind, "rank": 2, "base": base}
        settings = {"train_steps": 1, "train_warmup": 0, "adapter": adapter}
        cases.run_without_error(None, tmp_path / kind, f"dp1 {precision}", **changes(tmp_path / "base", **settings))
    losses = [cases.metrics(tmp_path / kind)[0]["loss"] for kind in ("lora", "dora")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_missing_adapter_from_is_refused_unless_the_run_resumes(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A plan and a rank of torchrun."""
    settings = {"train_steps": 1, "train_warmup": 0, "checkpoint_every": 1}
    cases.run_without_error(None, tmp_path / "first", "dp1 fp32", **changes(base, **settings))
    adapter = changes(base)["adapter"] | {"from": str(tmp_path / "moved")}
    (tmp_path / "first/run").rename(tmp_path / "moved")
    cases.run_without_error(None, tmp_path / "second", "dp1 fp32", **changes(base, adapter=adapter, **settings))
    (tmp_path / "moved").rename(tmp_path / "elsewhere")
    start = RendezvousInfo(0, 1, 0, "env://", "torchrun", 1)
    monkeypatch.setattr("meshwright.launcher.rendezvous.read_rendezvous_info", lambda method: start)
    monkeypatch.setattr("meshwright.training.worker._run_as_rank", lambda *_, **__: {"done": True})
    resumed = cases.recipe(tmp_path / "second", "dp1", **changes(base, adapter=adapter, **settings))
    assert config_of(resumed)[0].adapter is not None and train_as_rank(resumed, probe=False) == {"done": True}
    new = cases.recipe(tmp_path / "third", "dp1", **changes(base, adapter=adapter, **settings))
    for refuse in (config_of, partial(train_as_rank, probe=False)):
        with pytest.raises(UserError, match="adapter.from: .*moved/adapter_model.safetensors cannot be read"):
            refuse(new)


def test_double_quantized_base_is_the_same_on_every_layout(ranks: LocalRanks, tmp_path: Path):
    """Memory and bytes sent are those predicted, scales of whole matrices included."""
    config = dataclasses.replace(small(), hidden=192, heads=6, kv_heads=2, head_dim=64, intermediate=128)
    write_base(tmp_path / "base", config, torch.float32)
    adapter = {"kind": "lora", "rank": 2, "base": "nf4", "double_quantization": True}
    settings = changes(tmp_path / "base", adapter=adapter, train_steps=2, checkpoint_every=0)
    cases.run_without_error(None, tmp_path / "one", "dp1 fp32", **settings)
    for layout in ("dp2 zero3 fp32", "tp2 fp32"):
        found = cases.run_without_error(ranks, tmp_path / layout[:3], layout, **settings)[0]["result"]
        cases.assert_same_steps(tmp_path / layout[:3], tmp_path / "one")
        assert found["measured"]["state_bytes"] == found["predicted"]["state_bytes"]
        assert found["measured"]["sent_bytes_per_step"] == found["predicted"]["sent_bytes_per_step"]


def test_dropout_drops_the_same_elements_on_every_layout(ranks: LocalRanks, base: Path, tmp_path: Path):
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    dropped = {"kind": "lora", "rank": 2, "targets": targets, "dropout": 0.3}
    one, none = tmp_path / "one", tmp_path / "none"
    settings = {"train_steps": 3, "checkpoint_every": 0}
    cases.run_without_error(None, one, "mb2 ac:full fp32", **changes(base, adapter=dropped, **settings))
    for number, layout in enumerate(("dp2 zero3 fp32", "tp2 fp32", "cp2 ac:selective fp32", "pp2 mb2 fp32")):
        other = tmp_path / str(number)
        cases.run_without_error(ranks, other, layout, **changes(base, adapter=dropped, **settings))
        cases.assert_same_steps(other, one)
    cases.run_without_error(None, none, "fp32", **changes(base, adapter=dropped | {"dropout": 0.0}, **settings))
    with pytest.raises(AssertionError):
        cases.assert_same_steps(none, one)


@pytest.mark.parametrize(
    ("adapter", "layouts"),
    [
        (
            {"kind": "lora", "dropout": 0.3},
            ("tp2 fp32", "tp2 ep1:etp2 fp32", "dp2 ep2 zero3 ac:full fp32", "tp2:nosp ep2 ac:selective fp32"),
        ),
        ({"kind": "dora"}, ("tp2 ep1:etp2 fp32", "dp2 ep1:etp2 zero3 fp32")),
    ],
)
def test_adapted_experts_train_alike_on_every_layout(
    ranks: LocalRanks, tmp_path: Path, adapter: dict[str, Any], layouts: tuple[str, ...]
):
    config = dataclasses.replace(small("mixtral-8x7b-v0.1"), experts=4, intermediate=36, expert_intermediate=36)
    write_base(tmp_path / "base", config, torch.float32)
    adapter = {"rank": 2, "targets": ["v_proj", "w1", "w2", "w3"]} | adapter
    settings = changes(tmp_path / "base", adapter=adapter, train_steps=3, checkpoint_every=0)
    cases.run_without_error(None, tmp_path / "one", "mb2 fp32", **settings)
    for number, layout in enumerate(layouts):
        result = cases.run_without_error(ranks, tmp_path / str(number), layout, **settings)[0]["result"]
        cases.assert_same_steps(tmp_path / str(number), tmp_path / "one")
        sent = [
            {site: size for site, size in result[key]["sent_bytes_per_step"].items() if site not in ROUTED}
            for key in ("measured", "predicted")
        ]
        assert sent[0] == sent[1]


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        ({"kind": "lora", "targets": ["q_porj"]}, "q_proj"),
        ({"kind": "lora", "targets": ["lm_head"]}, "output head"),
        ({"kind": "lora", "rank": 13}, "rank 13 is above the width"),
        ({"kind": "loar"}, "lora"),
        ({"kind": "lora", "base": "int8", "double_quantization": True}, 'scales of base = "nf4"'),
        ({"kind": "dora", "dropout": 0.1}, "DoRA trains without dropout"),
        ({"rank": 4}, "kind"),
    ],
)
def test_adapter_that_does_not_fit_is_refused(adapter: dict[str, Any], expected: str, base: Path, tmp_path: Path):
    with pytest.raises(UserError, match=expected):
        recipe = cases.recipe(tmp_path, "dp1", **changes(base, adapter=adapter))
        config_from_recipe(recipe.model, 40, 257, recipe.adapter)


def test_adapter_without_base_model_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="adapter needs model.from"):
        cases.recipe(tmp_path, "dp1", adapter={"kind": "lora"})


@pytest.mark.parametrize(("kind", "layout"), [("dora", "tp2"), ("lora", "tp2 ac:full")])
def test_traffic_of_adapters_under_tensor_parallelism_is_predicted(
    kind: str, layout: str, ranks: LocalRanks, base: Path, tmp_path: Path
):
    """Full recomputation repeats no sum of a block's last product, also in chunks. Products of a layer with DoRA do not
    overlap."""
    adapter = {"kind": kind, "rank": 2, "targets": ["o_proj", "down_proj"]}
    settings = changes(base, adapter=adapter, train_steps=2, train_tensor_overlap="chunks")
    found = cases.run_without_error(ranks, tmp_path, f"{layout} fp32", **settings)[0]["result"]
    assert found["measured"]["sent_bytes_per_step"] == found["predicted"]["sent_bytes_per_step"]
    assert ("adapter.norms" in found["measured"]["sent_bytes_per_step"]) == (kind == "dora")


def test_recipe_with_adapter_freezes_the_base(base: Path, tmp_path: Path):
    recipe = cases.recipe(tmp_path, "dp1", **changes(base))
    assert Recipe.from_tables(recipe.to_tables()) == recipe
    table = parameter_table(config_from_recipe(recipe.model, 40, 257, recipe.adapter))
    assert all(entry.trainable == (".lora_" in entry.name) for entry in table.entries)
    assert 0 < table.trained.numel < table.numel / 10
