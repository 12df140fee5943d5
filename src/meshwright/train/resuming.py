"""Whether a recipe may go on with the run that its directory holds: asked before anything is started. Free of torch."""

from __future__ import annotations

from meshwright.recipe import Recipe, load_recipe_text, resume_differences
from meshwright.train.checkpoint import newest
from meshwright.train.run_directory import RunDirectory


def check_resume(recipe: Recipe) -> None:
    """`UserError` naming the first key, and where it was said, in which `recipe` differs from the newest checkpoint of
    its run directory though it may not. A run without a checkpoint begins again, with any recipe."""
    checkpoint = newest(RunDirectory(recipe.run_directory).checkpoints)
    if checkpoint is not None:
        resume_differences(load_recipe_text(checkpoint.state()["recipe"], f"the recipe of {checkpoint.path}"), recipe)
