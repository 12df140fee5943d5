"""`Trainer.step` in float64 against `transformers`, autograd and `torch.optim`, on one device and on every axis."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.comm.local import LocalRanks
from meshwright.model import loss
from meshwright.recipe import Recipe
from meshwright.spec import chunks
from tests.conftest import exhaustive
from tests.training import transformers_steps as reference
from tests.training.training_cases import Values, whole_state
from tests.training.transformers_steps import SGD, SIZES, Case, Steps, TransformersModel, train_on_rank

LLAMA = {**SIZES, "model_type": "llama"}
QWEN2 = {**SIZES, "model_type": "qwen2"}
QWEN3 = {**SIZES, "model_type": "qwen3", "head_dim": 10}
GPT2 = {
    "model_type": "gpt2", "vocab_size": 263, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 700, "n_inner": 38,
    "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
EXPERTS = {**SIZES, "num_experts_per_tok": 3, "router_aux_loss_coef": 0.5}
FINE = {**EXPERTS, "num_experts": 6, "moe_intermediate_size": 11}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0,
    "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.5,
}  # fmt: skip
INSTRUCTIONS = {"source": "instructions.jsonl", "records": "instruction"}
LONG = {"sequence": 600}  # each of the four chunks of two cp ranks is longer than an attention tile

CASES = {
    "llama": Case({**LLAMA, "rope_parameters": LLAMA3}),
    "llama, tied, every bias, yarn": Case(
        {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}, SGD
    ),
    "llama, instructions": Case(LLAMA, data=INSTRUCTIONS),
    "llama, documents see each other, no clip": Case(LLAMA, {"clip": 0.0}, {"document_mask": False}, "dp1"),
    "llama, long sequences": Case(LLAMA, data=LONG),
    "mistral, window": Case({**SIZES, "model_type": "mistral", "sliding_window": 150}),
    "mistral, window, long sequences": Case({**SIZES, "model_type": "mistral", "sliding_window": 150}, data=LONG),
    "qwen2, tied, some windows": Case(
        {
            **QWEN2, "tie_word_embeddings": True, "sliding_window": 60, "use_sliding_window": True,
            "max_window_layers": 2, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
        }
    ),
    "qwen3, one key-value head": Case({**QWEN3, "num_key_value_heads": 1}),
    "gpt2": Case(GPT2),
    "gpt2, untied, exact gelu, clip that is not reached": Case(
        {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu"}, {**SGD, "clip": 100.0}
    ),
    "mixtral": Case({**EXPERTS, "model_type": "mixtral", "num_local_experts": 6, "sliding_window": 150}),
    "qwen2_moe": Case(
        {**FINE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 14, "mlp_only_layers": [1]},
        data=INSTRUCTIONS,
    ),
    "qwen3_moe": Case(
        {**FINE, "model_type": "qwen3_moe", "norm_topk_prob": True, "mlp_only_layers": [2], "head_dim": 10}, SGD
    ),
    "dots1": Case(
        {
            **FINE, "model_type": "dots1", "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5, "norm_topk_prob": True, "sliding_window": None,
        }
    ),
}  # fmt: skip


LAYOUTS = {
    2: [
        ("llama, tied, every bias, yarn", "tp2 mb2"),
        ("qwen3, one key-value head", "tp2:nosp ac:full"),
        ("gpt2", "cp2 mb2"),
        ("llama, long sequences", "cp2 mb2"),
        ("mistral, window, long sequences", "cp2 zero2 mb2"),
        ("qwen2, tied, some windows", "cp2:ulysses"),
        ("qwen2, tied, some windows", "pp2:zb-h1 mb4"),
        ("llama, instructions", "dp2 zero3 mb2"),
        ("qwen2_moe", "tp2 ep2"),
        ("dots1", "dp2 ep2 zero1 mb2"),
    ],
    4: [("mixtral", "dp2 cp2 ep2 zero2"), ("qwen3_moe", "dp2 pp2:1f1b mb2")],
}


ON_ONE_DEVICE = ("mistral, window, long sequences", "qwen2_moe")
"""Cases that run on one device, too, of those that run on several ranks, which compute the same blocks."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of data, models and the cache of prepared data."""
    place = tmp_path_factory.mktemp("transformers")
    reference.write_data(place)
    return place


@pytest.fixture(scope="module")
def expected(place: Path) -> dict[str, tuple[Recipe, Steps]]:
    """By case: its recipe and the steps of the reference, computed on demand."""
    return {}


@pytest.fixture
def steps_of(
    place: Path, expected: dict[str, tuple[Recipe, Steps]], wide: Callable[[], AbstractContextManager[None]]
) -> Callable[[str], tuple[Recipe, Steps]]:
    """Return the recipe of a case and its steps by `transformers`."""

    def steps(name: str) -> tuple[Recipe, Steps]:
        if name not in expected:
            case = CASES[name]
            model = TransformersModel(case.settings, place / name, wide)
            recipe = reference.recipe(place, model.directory, case)
            expected[name] = recipe, model.train(recipe)
        return expected[name]

    return steps


def assert_same_steps(outcomes: list[dict[str, Any]], expected: Steps) -> None:
    """Losses, gradient norms, parameter updates and optimizer state are equal within rounding of float64."""
    found = Steps(
        outcomes[0]["losses"],
        outcomes[0]["norms"],
        whole_state([{"state": outcome["before"]} for outcome in outcomes]),
        whole_state(outcomes),
    )
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert found.norms == pytest.approx(expected.norms, rel=1e-10)
    mine, theirs = moved(found), moved(expected)
    assert mine.keys() == theirs.keys()
    worst = max(compute_relative_errors(mine, theirs).items(), key=lambda item: item[1])
    assert worst[1] < 1e-10, worst


def moved(steps: Steps) -> Values:
    """Return the sum of a run's updates, and the optimizer state."""
    changes = {key: values - steps.before[key] for key, values in steps.after.items() if key[0] == "master"}
    state = {
        key: values for key, values in steps.after.items() if key[0] != "master" and "correction_bias" not in key[1]
    }
    return {**changes, **state}


def compute_relative_errors(mine: Values, theirs: Values) -> dict[tuple[str, str], float]:
    """‖a - b‖ / max(‖b‖, 10⁻³ √n × root mean square of all tensors of the kind)."""
    errors = {}
    for kind in {kind for kind, _ in theirs}:
        everything = torch.cat([values for (other, _), values in theirs.items() if other == kind])
        typical = everything.square().mean().sqrt()
        for key, values in theirs.items():
            if key[0] == kind:
                least = max(float(values.norm()), 1e-3 * float(typical) * values.numel() ** 0.5)
                errors[key] = float((mine[key] - values).norm()) / least
    return errors


LAID_OUT = {name for layouts in LAYOUTS.values() for name, _ in layouts}


@pytest.mark.parametrize(
    "name", [name if name not in LAID_OUT or name in ON_ONE_DEVICE else exhaustive(name)[0] for name in CASES]
)
def test_single_device_step_matches_transformers_and_torch(
    name: str, steps_of: Callable[[str], tuple[Recipe, Steps]], monkeypatch: pytest.MonkeyPatch
):
    """Sequences of three attention tiles; the loss in chunks of 100 tokens, each computed in two slices."""
    monkeypatch.setattr(chunks, "MIN_CHUNK_TOKENS", 100)
    monkeypatch.setattr(chunks, "CHUNK_LOGITS", {"cpu": 1})
    monkeypatch.setattr(loss, "SLICE_LOGITS", 1 << 14)
    recipe, expected = steps_of(name)
    clipped = recipe.train.clip == reference.TRAIN["clip"]
    assert all((norm > recipe.train.clip) == clipped for norm in expected.norms) or not recipe.train.clip
    assert_same_steps([train_on_rank(recipe.to_toml(), CASES[name].layout)], expected)


@pytest.mark.parametrize(
    ("ranks", "name", "layout"),
    [(ranks, *case) for ranks, cases in LAYOUTS.items() for case in cases] + exhaustive((2, "gpt2", "tp2 mb2")),
)
def test_layout_step_matches_transformers_and_torch(
    ranks: int,
    name: str,
    layout: str,
    steps_of: Callable[[str], tuple[Recipe, Steps]],
    request: pytest.FixtureRequest,
):
    recipe, expected = steps_of(name)
    local: LocalRanks = request.getfixturevalue({2: "two", 4: "four"}[ranks])
    assert_same_steps(local.run(train_on_rank, recipe.to_toml(), layout), expected)
