"""Checks whether a recipe may resume the run in its directory, before anything is started. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.checkpoint import find_newest
from meshwright.errors import UserError
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.recipe import SCHEMA, Recipe, TrainRecipe, load_recipe_text
from meshwright.tables import is_table
from meshwright.toml import format_toml_value, parse_toml

# Keys that may change on resume: where and how long the run runs, what it reports and keeps, never what it computes.
RESUMABLE = (
    "layout",
    "run.name",
    "run.directory",
    "run.rendezvous",
    "run.device",
    "run.threads",
    "run.collective_timeout",
    "data.cache",
    "train.steps",
    "train.decay",  # the decay phase of a WSD schedule is often chosen late
    "train.compile",
    "train.tensor_overlap",
    "train.deterministic",
    "train.cuda_graphs",
    "train.validate_every",
    "train.validation_sequences",
    "train.maximum_skipped",
    "train.loss_scale",
    "train.loss_scale_every",
    "train.log_every",
    "train.slow_rank_factor",
    "train.profile",
    "train.profile_ranks",
    "distill.layout",  # how the teacher is sharded, as `layout` for the model
    "collectives",
    "checkpoint",
    "track",
    "tune",
)
_FIXED_BECAUSE = {
    "run": "the initial values and the sample order depend on it",
    "model": "the saved tensors are those of the old model",
    "adapter": "the saved tensors are those of the old adapter",
    "distill": "the result would match neither the old settings nor the new ones",
    "data": "the sample order would change",
    "train": "the result would match neither the old settings nor the new ones",
}


def check_resume(recipe: Recipe, data_sha256: str | None = None) -> dict[str, Any] | None:
    """Check that the recipe can resume its run, and return the content of `state.json` in the newest checkpoint of its
    run directory; None without a checkpoint.

    data_sha256: checksum of the prepared data's tokens; None: not checked. Raises `UserError` if the data differ, or if
    a key that may not change differs from the checkpoint's recipe; the error names the key and where it is set.
    """
    checkpoint = find_newest(RunDirectory(recipe.run_directory).checkpoints)
    if checkpoint is None:
        return None
    state = checkpoint.state()
    check_resume_differences(load_recipe_text(state["recipe"], f"the recipe of {checkpoint.path}"), recipe)
    before, key = state["data_sha256"], recipe.data.source_key
    if data_sha256 is not None and data_sha256 != before:
        raise UserError(
            f"{recipe.where(key)}: the text of {key} has changed since {checkpoint.path} was written (sha256 of the "
            f"tokens: {data_sha256[:12]} now, {before[:12]} then), so the sample order would change; restore it, or "
            "start a new run with another run.name"
        )
    return state


def check_base(recipe: Recipe, state: Mapping[str, Any] | None, found: Mapping[str, str]) -> None:
    """Check that the base model of an adapter, which a run reads from `model.from` at each start, is the one on which
    the adapter was trained.

    state: content of the checkpoint's `state.json`; None: the run begins. found: {"base_sha256": digest by
    `training.reference.hash_sample`}, {} without a base. Raises `UserError` if the digests differ; the earliest
    checkpoints have none."""
    if state is not None and any(state.get(key, digest) != digest for key, digest in found.items()):
        raise UserError(
            f"{recipe.where('model.from')}: model.from: the weights in {recipe.base_directory} have changed since this "
            "run began, and its adapter was trained on the earlier ones; restore them, or start a new run with another "
            "run.name"
        )


def check_resume_differences(old: Recipe, new: Recipe) -> None:
    """Check that only keys of `RESUMABLE` differ between `old`, the recipe of the checkpoint, and `new`. Raises
    `UserError` that names the first other key."""
    before, after = list_values_by_key(old), list_values_by_key(new)
    for key in SCHEMA.keys:
        if before.get(key) == after.get(key) or any(key == free or key.startswith(f"{free}.") for free in RESUMABLE):
            continue
        was, now = (format_toml_value(values[key]) if key in values else "unset" for values in (before, after))
        reason = _FIXED_BECAUSE[key.partition(".")[0]]
        raise UserError(
            f"{new.where(key)}: {key} was {was} when this run began and is {now} now, but it may not change: {reason}; "
            "restore it, or start a new run with another run.name"
        )


def list_values_by_key(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's values as dotted key -> value, such as "train.steps" -> 100; unset keys are left out."""
    flat: dict[str, Any] = {}
    tables = recipe.to_tables()
    for key, field in SCHEMA.keys.items():
        value: Any = tables
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and not is_table(field.annotation):
            flat[key] = value
    return flat


def format_schedule_change(state: Mapping[str, Any], train: TrainRecipe) -> str | None:
    """Return a line for the log if `train.steps` has changed since the checkpoint was written and this changes the
    learning rate of the next steps (schedules "cosine" and "linear"); else None.

    state: content of the checkpoint's `state.json`. train: the recipe's [train] table."""
    step = state["step"]
    before = parse_toml(state["recipe"], "the checkpoint's recipe")["train"]["steps"]
    if before == train.steps or train.schedule not in ("cosine", "linear") or step >= train.steps:
        return None
    return (
        f"train.steps was {before} and is {train.steps}: from step {step + 1} on the learning rate follows the "
        f"{train.schedule} schedule of {train.steps} steps"
    )
