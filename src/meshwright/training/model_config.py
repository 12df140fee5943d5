"""Configuration of the model that a recipe trains, with the token IDs of its tokenizer."""

from __future__ import annotations

import dataclasses

from meshwright.data import PreparedData
from meshwright.recipe import Recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.distillation import add_projections


def resolve_model_config(recipe: Recipe, data: PreparedData) -> ModelConfig:
    """Return the recipe's model configuration with complete token IDs: missing bos and eos tokens are taken from the
    tokenizer, and the end-of-turn token from the chat template of the data."""
    config = config_from_recipe(recipe.model, recipe.data.sequence, data.vocabulary, recipe.adapter)
    if config.eos_token is None:
        config = dataclasses.replace(config, bos_token=data.tokenizer.start, eos_token=data.tokenizer.end)
    if data.turn_end is not None and data.turn_end not in config.eos_tokens:
        config = dataclasses.replace(config, more_eos_tokens=(*config.more_eos_tokens, data.turn_end))
    return add_projections(config, recipe)
