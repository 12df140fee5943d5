"""Adapters of any module in `fit`: gradients are PEFT's, only the adapter is trained and saved, on several layouts."""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from meshwright.adapters.modules import adapt_module
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.training.module import load
from meshwright.training.module.recipe import make_module_recipe
from meshwright.training.module.run import ModuleRun
from meshwright.training.module.spec import ModuleSpec
from tests.training.module_cases import run_until_killed

SAMPLES = [(torch.randn(12, generator=torch.Generator().manual_seed(seed)), seed % 3) for seed in range(24)]


class Net(nn.Module):
    """Blocks in a list, a batch norm, and an attention whose matrices take no adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12)) for _ in range(3))
        self.norm = nn.BatchNorm1d(12)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.head = nn.Linear(12, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x)
        return self.head(x + self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0])


def loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def train(directory: str, layout: str, adapter: dict[str, Any], crash_after: int = 0) -> dict[str, Any]:
    """Train an adapter of `Net` on this rank; stop after the step `crash_after`, if any, as if killed."""
    torch.set_num_threads(1)
    tables = {
        "layout": layout,
        "run": {"seed": 3, "directory": directory},
        "train": {"steps": 4, "batch": 8, "learning_rate": 0.1, "optimizer": "sgd"},
        "checkpoint": {"every": 2, "background": False},
        "adapter": {"kind": "lora", "rank": 2, "targets": ["blocks.*.0", "head"]} | adapter,
    }
    recipe = make_module_recipe(tables)
    mesh = Mesh.create(recipe.parsed_layout, "cpu", 60.0)
    with closing(mesh):
        running = ModuleRun(recipe, mesh, RunDirectory(directory), ModuleSpec(Net, loss_of, SAMPLES), False)
        module = running.trainer.task.module
        run_until_killed(running, crash_after)
        frozen = {name: each.clone() for name, each in module.named_parameters() if not each.requires_grad}
        return {"frozen": frozen, "mean": module.norm.running_mean.clone()}


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_gradients_are_those_of_peft(kind: str):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    module = Net().double()
    targets = ["blocks.0.0", "blocks.2.2", "head"]
    theirs = peft.get_peft_model(
        copy.deepcopy(module),
        peft.LoraConfig(
            r=2, lora_alpha=3, target_modules=targets, use_rslora=kind == "rslora", use_dora=kind == "dora"
        ),
        autocast_adapter_dtype=False,
    )
    names = adapt_module(module, AdapterConfig(kind, 2, 3.0, tuple(targets)))  # type: ignore[arg-type]
    assert names == targets
    other = {key.replace(".default", ""): value for key, value in theirs.named_parameters() if value.requires_grad}
    mine = {f"base_model.model.{key}": value for key, value in module.named_parameters() if value.requires_grad}
    other = {key.removesuffix(".weight") if "magnitude" in key else key: value for key, value in other.items()}
    assert mine.keys() == other.keys()
    with torch.no_grad():
        for name, value in mine.items():
            if "magnitude" not in name:
                nn.init.normal_(value, std=0.3)
            other[name].copy_(value)
    batch = torch.stack([each[0] for each in SAMPLES]).double(), torch.tensor([each[1] for each in SAMPLES])
    losses = [loss_of(each, batch) for each in (module, theirs)]
    for each in losses:
        each.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    for name, value in mine.items():
        assert (value.grad - other[name].grad).norm() <= 1e-10 * other[name].grad.norm() > 0, name


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_run_saves_a_peft_directory_and_resumes_on_another_layout(kind: str, two: Any, tmp_path: Path):
    places = [tmp_path / name for name in ("one", "killed")]
    settings = {"kind": kind}
    whole = train(str(places[0]), "mb2", settings)  # the batch norm sees the samples of a micro-batch
    two.run(train, str(places[1]), "dp2 zero3", settings, 3)  # after the checkpoint of step 2
    outcomes = two.run(train, str(places[1]), "dp2 zero1", settings)
    checkpoints = [place / "checkpoints/step-000004" for place in places]
    values = [load_file(each / "adapter_model.safetensors") for each in checkpoints]
    parts = 3 if kind == "dora" else 2
    assert len(values[0]) == 4 * parts and values[0].keys() == values[1].keys()
    for name, value in values[0].items():
        assert value.abs().max() > 0
        torch.testing.assert_close(values[1][name], value, rtol=1e-4, atol=1e-6)
    assert not (checkpoints[0] / "model.safetensors").exists()
    for name, value in outcomes[0]["frozen"].items():
        assert torch.equal(value, whole["frozen"][name]), name
    assert whole["mean"].abs().max() > 0  # running statistics change, and are saved next to the adapter
    settings = json.loads((checkpoints[0] / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["blocks.0.0", "blocks.1.0", "blocks.2.0", "head"]
    peft = pytest.importorskip("peft")
    theirs, mine = peft.PeftModel.from_pretrained(build(), str(checkpoints[0])).eval(), load(build(), places[0]).eval()
    assert torch.equal(mine.norm.running_mean, whole["mean"])
    theirs.base_model.model.norm.load_state_dict(mine.norm.state_dict())  # PEFT has no buffers
    x = torch.stack([each[0] for each in SAMPLES])
    torch.testing.assert_close(mine(x), theirs(x))


def build() -> nn.Module:
    torch.manual_seed(5)
    return Net()


def test_adapter_of_a_transformer_encoder_counts_in_evaluation():
    """Torch evaluates its encoder layers by one function that reads the weights, of which the adapter is no part."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = nn.TransformerEncoder(layer, 2)
    adapt_module(module, AdapterConfig("lora", 2, 4.0, ("linear1", "linear2")))
    for name, value in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value)
    x, padding = torch.randn(3, 5, 8), torch.arange(5).expand(3, 5) >= torch.tensor([[5], [3], [2]])
    expected = module(x, src_key_padding_mask=padding)
    with torch.no_grad():
        found = module.eval()(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], expected[~padding].detach())


def test_module_without_linear_layers_is_refused():
    with pytest.raises(UserError, match="has no nn.Linear module that takes an adapter"):
        adapt_module(nn.Sequential(nn.Conv1d(2, 2, 1)), AdapterConfig())


def test_killed_run_with_dropout_resumes_bit_for_bit(tmp_path: Path):
    settings = {"dropout": 0.2}
    whole = train(str(tmp_path / "one"), "dp1", settings)
    train(str(tmp_path / "killed"), "dp1", settings, 3)
    again = train(str(tmp_path / "killed"), "dp1", settings)
    values = [
        load_file(tmp_path / name / "checkpoints/step-000004/adapter_model.safetensors") for name in ("one", "killed")
    ]
    assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())
    assert torch.equal(whole["mean"], again["mean"])
    train(str(tmp_path / "none"), "dp1", {})
    other = load_file(tmp_path / "none/checkpoints/step-000004/adapter_model.safetensors")
    assert any(not torch.equal(value, other[name]) for name, value in values[0].items())
    found = []
    for name in ("one", "one/checkpoints/step-000004"):  # a run directory stands for its newest checkpoint
        place = tmp_path / name.replace("/", "-from-") / "from"
        train(str(place), "dp1", {"from": str(tmp_path / name)})
        found.append(load_file(place / "checkpoints/step-000004/adapter_model.safetensors"))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        ({"targets": ["haed"]}, "head"),
        ({"targets": ["attention.out_proj"]}, "nn.MultiheadAttention, whose matrices take no adapter"),
        ({"rank": 4}, "rank 4 is above the width of head"),
        ({"base": "nf4"}, "packs built-in models"),
        ({"from": "missing"}, "missing: does not exist; a PEFT directory is needed"),
    ],
)
def test_adapter_that_does_not_fit_is_refused(adapter: dict[str, Any], expected: str, tmp_path: Path):
    with pytest.raises(UserError, match=expected) as error:
        train(str(tmp_path / "run"), "dp1", adapter)
    assert "\n" not in str(error.value)


def test_checkpoint_of_another_module_or_with_a_damaged_index_is_refused(tmp_path: Path):
    train(str(tmp_path / "run"), "dp1", {})
    with pytest.raises(UserError, match="blocks.0.0"):
        load(nn.Sequential(nn.Linear(12, 12)), tmp_path / "run")
    copied = tmp_path / "copied"
    shutil.copytree(tmp_path / "run/checkpoints/step-000004", copied)
    (copied / "training/index.json").write_text("{}")
    with pytest.raises(UserError, match="index.json"):
        load(build(), copied)
