"""What a recipe asks that cannot be done, as far as no data are needed to know it: asked before data are prepared and
before a process is started. Free of torch."""

from __future__ import annotations

from meshwright.data.tokenizer import least_vocabulary
from meshwright.errors import UserError
from meshwright.model.config import ModelConfig, config_from_recipe
from meshwright.model.refuse import refuse
from meshwright.recipe import Recipe
from meshwright.train.trackers import check_trackers


def check_recipe(recipe: Recipe, tokenizer_vocabulary: int | None = None) -> None:
    """`UserError` with the first reason why the recipe's model cannot be trained on its layout, with its batch,
    sequence and tokenizer. `tokenizer_vocabulary`: tokens of the prepared data's tokenizer; unless given, the fewest
    that it can have, since one that is trained may find less in the text than it was allowed."""
    layout = recipe.parsed_layout
    layout.refuse_unbuilt()
    if recipe.model.load_weights:  # whose tokenizer may be the data's: what is wrong with the directory is said first
        ModelConfig.from_path(recipe.model.from_path or "")
    vocabulary = tokenizer_vocabulary or least_vocabulary(recipe.data.tokenizer)
    config = config_from_recipe(recipe.model, recipe.data.sequence, vocabulary)
    refuse(layout, config, recipe.train.batch, recipe.data.sequence, layout.world_size)
    check_watching(recipe)


def check_watching(recipe: Recipe) -> None:
    """`UserError` for ranks to profile that the layout does not have, and for trackers that cannot be made; of any
    recipe, whatever it trains."""
    layout = recipe.parsed_layout
    if beyond := [rank for rank in recipe.train.profile_ranks if rank >= layout.world_size]:
        where = f"{recipe.where('train.profile_ranks')}: train.profile_ranks"
        raise UserError(f"{where}: there is no rank {beyond[0]}: the layout has ranks 0 to {layout.world_size - 1}")
    check_trackers(recipe)
