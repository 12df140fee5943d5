"""The recipe: one TOML file with the model, data, layout and training settings of a run."""

from meshwright.recipe.adapter import AdapterRecipe
from meshwright.recipe.data import CleanRecipe, DataRecipe, SourceRecipe
from meshwright.recipe.distill import DistillRecipe
from meshwright.recipe.recipe import SCHEMA, Recipe, format_overrides, load_recipe, load_recipe_text, resolve_recipe
from meshwright.recipe.tables import (
    CheckpointRecipe,
    CollectivesRecipe,
    ModelRecipe,
    RunRecipe,
    TrackRecipe,
    TrainRecipe,
)
from meshwright.recipe.tune import Dimension, TuneRecipe

__all__ = [
    "SCHEMA",
    "AdapterRecipe",
    "CheckpointRecipe",
    "CleanRecipe",
    "CollectivesRecipe",
    "DataRecipe",
    "Dimension",
    "DistillRecipe",
    "ModelRecipe",
    "Recipe",
    "RunRecipe",
    "SourceRecipe",
    "TrackRecipe",
    "TrainRecipe",
    "TuneRecipe",
    "load_recipe",
    "load_recipe_text",
    "format_overrides",
    "resolve_recipe",
]
