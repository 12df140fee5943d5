"""Every recipe key either may change on resume or is refused by name, with both values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.monitoring.resuming import check_resume_differences
from meshwright.recipe import SCHEMA, Recipe, load_recipe


def different(recipe: Path, key: str) -> Recipe:
    """Return the recipe with another valid value of `key`."""
    old = load_recipe(recipe)
    numbers = ["true", "false", "3", "2", "0.5", "256", "300", "1e-3", "[0.5, 0.5]", "[0, 1]"]
    words = [
        "tcp://host:1",
        "dp2",
        "qwen3",
        "sgd",
        "linear",
        "jsonl",
        "cpu",
        "bfloat16",
        "latin-1",
        '{type="linear"}',
        '{url="text"}',
        '["de"]',
        '["c4"]',
        '["email"]',
        '{mlflow={uri="http://tracking"}}',
        "ring",
        "chat",
        "next-token",
        "datatrove",
        "resiliparse",
        "random",
        "halving",
        "chunks",
    ]
    for value in numbers + words:
        try:
            new = load_recipe(recipe, [f"{key}={value}"])
        except UserError:
            continue
        if new != old:
            return new
    raise AssertionError(f"no other valid value found for {key}")


MAY_CHANGE = {
    "layout",
    *(f"run.{key}" for key in ("name", "directory", "rendezvous", "device", "threads", "collective_timeout")),
    "data.cache",
    *(f"train.{key}" for key in ("steps", "decay", "compile", "deterministic", "cuda_graphs", "tensor_overlap")),
    *(f"train.{key}" for key in ("validate_every", "validation_sequences")),
    *(f"train.{key}" for key in ("maximum_skipped", "loss_scale", "loss_scale_every", "log_every", "slow_rank_factor")),
    *("train.profile", "train.profile_ranks", "track.to", "track.options"),
    *(
        f"tune.{key}"
        for key in ("trials", "steps", "tokens", "seconds", "seed", "sampler", "pruner", "startup", "keep")
    ),
    "tune.space",
    "distill.layout",
    *(f"collectives.{key}" for key in ("all_reduce", "reduce_scatter", "all_gather")),
    *(f"checkpoint.{key}" for key in ("every", "keep", "keep_best", "dtype", "background")),
}


def test_every_key_may_change_on_resume_or_is_refused(tiny_recipe: Path):
    old = load_recipe(tiny_recipe)
    assert MAY_CHANGE.issubset(SCHEMA.keys)
    # These contradict the tiny recipe unless something else changes too.
    needs_more = {"model.preset", "model.from", "model.load_weights", "train.momentum", "train.decay", "data.sources"}
    of_records = ("record_keys", "message_keys", "record_roles", "thinking", "template", "train_on", "pack", "too_long")
    of_objectives = (
        "preference_beta",
        "preference_margin",
        "preference_smoothing",
        "desirable_weight",
        "undesirable_weight",
    )
    needs_more |= {*(f"train.{key}" for key in of_objectives), *(f"data.{key}" for key in of_records)}
    needs_more |= {key for key in SCHEMA.keys if key.startswith(("adapter.", "distill."))} | {"tune.space"}
    tables = {key.rpartition(".")[0] for key in SCHEMA.keys} - {""}
    for key in SCHEMA.keys.keys() - tables - needs_more:
        new = different(tiny_recipe, key)
        if key in MAY_CHANGE:
            check_resume_differences(old, new)
            continue
        with pytest.raises(UserError) as caught:
            check_resume_differences(old, new)
        assert f"{key} was " in str(caught.value)
        assert "may not change" in str(caught.value)


@pytest.mark.parametrize(
    "key, value",
    [
        ("data.record_keys", '{output="answer"}'),
        ("data.message_keys", '{content="words"}'),
        ("data.record_roles", '{narrator="system"}'),
        ("data.thinking", "none"),
        ("data.template", "chatml"),
        ("data.train_on", "all"),
        ("data.pack", "false"),
        ("data.too_long", "drop"),
    ],
)
def test_record_processing_may_not_change_on_resume(tiny_recipe: Path, key: str, value: str):
    records = ["data.records=instruction"]
    with pytest.raises(UserError, match=f"{key} was .* may not change"):
        check_resume_differences(
            load_recipe(tiny_recipe, records), load_recipe(tiny_recipe, [*records, f"{key}={value}"])
        )


@pytest.mark.parametrize("key", [key for key in SCHEMA.keys if key.startswith("distill.")])
def test_distillation_may_not_change_on_resume_but_its_layout(tiny_recipe: Path, key: str):
    old = ["distill.teacher=teacher"]
    fields = {"hidden_weight": ["distill.hidden=true"], "layer_map": ["distill.hidden=true"]}
    fields |= {"beta": ["distill.loss=jsd"]}
    name = key.rpartition(".")[2]
    old += ["distill.on_policy=0.5"] if name.startswith("on_policy_") else fields.get(name, [])
    values = {"distill.loss": "jsd", "distill.hidden": "true", "distill.layer_map": "[[0, 1]]"}
    values |= {"distill.layout": "zero3 tp1", "distill.dtype": "bfloat16", "distill.top_k": "4"}
    values |= {"distill.on_policy_prompt": "3", "distill.on_policy": "0.25", "distill.teacher": "other"}
    new = [*old, f"{key}={values.get(key, '0.125')}"]
    if key == "distill.layout":
        check_resume_differences(load_recipe(tiny_recipe, old), load_recipe(tiny_recipe, new))
        return
    with pytest.raises(UserError, match=f"{key} was .* may not change"):
        check_resume_differences(load_recipe(tiny_recipe, old), load_recipe(tiny_recipe, new))


def test_several_sources_instead_of_one_are_refused_by_name(tiny_recipe: Path):
    new = load_recipe(tiny_recipe, ['data.sources=[{path="stdlib", weight=1.0}]'])
    with pytest.raises(UserError, match='data.source was "stdlib" when this run began'):
        check_resume_differences(load_recipe(tiny_recipe), new)


def test_decay_may_change_on_resume_and_momentum_may_not(tiny_recipe: Path):
    tail = ["train.schedule=wsd", "train.decay=1"]
    check_resume_differences(
        load_recipe(tiny_recipe, tail), load_recipe(tiny_recipe, [*tail, "train.decay=2", "train.steps=8"])
    )
    sgd = ["train.optimizer=sgd"]
    with pytest.raises(UserError, match="train.momentum was 0.0 .* and is 0.5 now"):
        check_resume_differences(load_recipe(tiny_recipe, sgd), load_recipe(tiny_recipe, [*sgd, "train.momentum=0.5"]))


def test_refusal_to_resume_names_both_values(tiny_recipe: Path):
    new = load_recipe(tiny_recipe, ["model.hidden=32", "model.sliding_window=8"])
    with pytest.raises(UserError, match=r"model.hidden was 16 when this run began and is 32 now"):
        check_resume_differences(load_recipe(tiny_recipe), new)
    with pytest.raises(UserError, match=r"model.sliding_window was unset when this run began and is 8 now"):
        check_resume_differences(load_recipe(tiny_recipe, ["model.hidden=32"]), new)


def test_refusal_to_resume_names_file_or_override(tiny_recipe: Path):
    old = load_recipe(tiny_recipe, ["model.hidden=32"])
    with pytest.raises(UserError, match=f"^{re.escape(str(tiny_recipe))}: model.hidden was 32"):
        check_resume_differences(old, load_recipe(tiny_recipe, ["train.steps=9"]))
    with pytest.raises(UserError, match='^override "model.hidden=64": model.hidden was 32'):
        check_resume_differences(old, load_recipe(tiny_recipe, ["model.hidden=8", "model.hidden=64"]))


def test_adapter_of_a_run_may_not_change(tiny_recipe: Path, tmp_path: Path):
    tables = load_recipe(tiny_recipe).to_tables()
    tables["model"] = {"from": str(tmp_path)}

    def load(**adapter: object) -> Recipe:
        return Recipe.from_tables({**tables, "adapter": {"kind": "lora", "rank": 8, **adapter}})

    for key, value in (("kind", "dora"), ("rank", 4), ("alpha", 3), ("targets", ["q_proj"]), ("base", "nf4")):
        with pytest.raises(UserError, match=f"adapter.{key} was .* may not change: the saved tensors are those of the"):
            check_resume_differences(load(), load(**{key: value}))
