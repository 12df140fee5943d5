"""Whether a recipe may go on with the run that its directory holds: asked before anything is started. Free of torch."""

from __future__ import annotations

from typing import Any

from meshwright.errors import UserError
from meshwright.recipe import Recipe, load_recipe_text, resume_differences
from meshwright.train.checkpoint import newest
from meshwright.train.run_directory import RunDirectory


def check_resume(recipe: Recipe, data_sha256: str | None = None) -> dict[str, Any] | None:
    """The state of the newest checkpoint of the recipe's run directory, None where there is none: such a run begins
    again, with any recipe.

    `UserError` naming the first key, and where it was said, in which `recipe` differs from that checkpoint's though it
    may not; also when the prepared data, if `data_sha256` says which, are not those that it was trained on.
    """
    checkpoint = newest(RunDirectory(recipe.run_directory).checkpoints)
    if checkpoint is None:
        return None
    state = checkpoint.state()
    resume_differences(load_recipe_text(state["recipe"], f"the recipe of {checkpoint.path}"), recipe)
    before = state["data_sha256"]
    if data_sha256 is not None and data_sha256 != before:
        raise UserError(
            f"{recipe.where('data.source')}: data.source holds other text than when {checkpoint.path} was trained on "
            f"it (sha256 of the tokens: {data_sha256[:12]}, then {before[:12]}), so the samples would not go on where "
            "the run stopped; put it back, or begin another run with another run.name"
        )
    return state
