"""Mixtures of experts are trained, saved, resumed on other layouts and read by transformers like any other model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from meshwright.comm.local import LocalRanks
from meshwright.data import prepare
from meshwright.evaluation.evaluation import run_evaluation
from meshwright.recipe import TrainRecipe
from meshwright.serving.api import load
from meshwright.spec.config_json import config_from_path
from meshwright.training.optimizer import Optimizer
from tests.training import training_cases as cases

SIZES = {
    "layers": 3, "hidden": 40, "heads": 4, "kv_heads": 2, "intermediate": 72, "tied": True, "experts": 5,
    "experts_per_token": 3,
}  # fmt: skip
MODELS = {
    "mixtral": {**SIZES, "family": "mixtral"},
    "qwen2_moe": {**SIZES, "family": "qwen2_moe", "expert_intermediate": 24, "dense_layers": [1]},
    "qwen3_moe": {**SIZES, "family": "qwen3_moe", "expert_intermediate": 24},
    "dots1": {**SIZES, "family": "dots1", "expert_intermediate": 24, "shared_intermediate": 48, "dense_layers": [0]},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("experts")


def losses(place: Path) -> list[float]:
    return [line["loss"] for line in cases.metrics(place) if "loss" in line]


@pytest.mark.parametrize("family", MODELS)
def test_mixture_learns_with_loss_of_transformers(family: str, home: Path):
    transformers = pytest.importorskip("transformers")
    place = home / family
    changes = {"train_steps": 15, "train_learning_rate": 1e-2, "train_validate_every": 15}
    recipe = cases.recipe(place, "dp1 fp32", model=MODELS[family], **changes)
    outcome = cases.train(recipe.to_toml())
    assert outcome["error"] == ""
    assert losses(place)[-1] < losses(place)[0] - 1.5
    directory = outcome["result"]["checkpoint"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    rows = prepare(recipe.data, recipe.run.seed).split("validation").read_batch(np.arange(13))
    with torch.no_grad():
        logits = theirs(torch.from_numpy(rows.tokens)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(rows.targets).flatten())
    assert float(loss) == pytest.approx(outcome["result"]["validation_loss"], rel=1e-5)

    assert config_from_path(directory).family == family
    text = place / "text.txt"
    text.write_text("def expert(token):\n    return token\n")
    assert run_evaluation(directory, str(text), with_xz=False)["loss"] < losses(place)[0]
    prompt = list(b"def ")
    with torch.no_grad():
        for _ in range(12):
            prompt.append(int(theirs(torch.tensor([prompt])).logits[0, -1].argmax()))
    assert load(directory, device="cpu").generate([prompt[:4]], max_tokens=12, ignore_eos=True)[0].tokens == prompt[4:]


@pytest.mark.parametrize("family", ["mixtral", "dots1"])
def test_mixture_resumes_on_other_ranks_as_if_undisturbed(family: str, home: Path, two: LocalRanks):
    changes = {"model": MODELS[family], "train_steps": 6, "checkpoint_every": 2}
    alone, broken = home / f"alone {family}", home / f"broken {family}"
    state = cases.whole_state([cases.train(cases.recipe(alone, "dp1 fp32", **changes).to_toml())])
    two.run(cases.train, cases.recipe(broken, "dp2 zero1 mb2 fp32", **changes).to_toml(), 3)
    outcomes = two.run(cases.train, cases.recipe(broken, "dp2 zero3 fp32 ac:selective", **changes).to_toml())
    assert "resumed from step-000002: 2 of 6 steps are done" in outcomes[0]["said"]
    assert losses(broken) == pytest.approx(losses(alone), rel=1e-4)
    for (kind, name), values in cases.whole_state(outcomes).items():
        if name.endswith("e_score_correction_bias"):
            # Router biases change by 0.001 times the sign of the load: equal on every layout.
            torch.testing.assert_close(values, state[kind, name], rtol=0, atol=1e-7)
            if kind == "master":
                assert 0 < float(values.abs().max()) <= 0.006 + 1e-7


@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
def test_router_bias_of_overloaded_expert_decreases_outside_adam(loss_scale: float):
    train = TrainRecipe(steps=1, batch=1, learning_rate=0.5, router_bias_rate=0.01, weight_decay=0.5)
    rounding = torch.finfo(torch.float32).eps  # in the sum of an expert's load, which is the mean load
    master, gradient = torch.zeros(6), torch.tensor([1.0, 1.0, 7.0, -3.0, rounding, 1.0]) * loss_scale
    optimizer = Optimizer(
        [SimpleNamespace(master=master, gradient=gradient, decay_numel=1, rate_factor=1.0, balancing=((2, 5),))], train
    )
    optimizer.step(0.5, 0.1 / loss_scale, loss_scale)
    torch.testing.assert_close(master, torch.tensor([-0.5, -0.5, -0.01, 0.01, 0.0, -0.5]))
    assert all(bool((state[0][2:5] == 0).all()) for state in optimizer.state_tensors().values())
