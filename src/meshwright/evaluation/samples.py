"""Samples of a run for its report: texts that its newest checkpoint generates from prompts in the run's data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.checkpoint import find_checkpoint
from meshwright.data import PackedDataset, PackedExamples, PreparedData, find_prepared
from meshwright.data.packing.packed import NO_TARGET
from meshwright.errors import UserError
from meshwright.monitoring.run_directory import RECIPE
from meshwright.recipe import Recipe, load_recipe
from meshwright.serving.api import load

COUNT = 3
PROMPT_TOKENS, NEW_TOKENS = 16, 80
TEMPERATURE, SEED = 0.7, 0
MAX_WEIGHT_BYTES = 2 << 30
"""Size of the weights above which samples are generated only on request, as they may take minutes."""

_ROWS, _BATCHES = 16, 64  # packed rows read at a time, and how often, in search of prompts


def generate_samples(
    run_directory: Path,
    count: int | None = None,
    prompts: Sequence[str] = (),
    log: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Generate sample texts with the newest checkpoint of a run. Return, for each prompt, the JSON document of
    `meshwright generate --json`; an empty list for a run whose recipe has no [model] table (it trains a user's torch
    module).

    run_directory: directory of the training run. prompts: texts to continue (user messages if the run trained on
    records); if empty, `count` prompts are read from the run's data by `read_prompts`. count: number of prompts to
    read; None: 3, and `UserError` if the weights are larger than 2 GiB. log: called with a line for each damaged
    checkpoint. Raises `UserError` if there is no checkpoint or no prompt, or if the model cannot generate.
    """
    recipe = load_recipe(run_directory / RECIPE)
    if recipe.model is None:  # type: ignore[redundant-expr]
        return []
    checkpoint = find_checkpoint(run_directory, log)
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    if count is None and not prompts and size > MAX_WEIGHT_BYTES:
        raise UserError(f"the weights have {size / 2**30:.1f} GiB; use --samples {COUNT} to generate samples anyway")
    chat = bool(prompts) and recipe.data.records != "text"
    chosen = list(prompts) or read_prompts(_find_data(recipe), count or COUNT)
    model = load(checkpoint)
    found = model.generate(chosen, max_tokens=NEW_TOKENS, temperature=TEMPERATURE, seed=SEED, chat=chat)
    return [generation.to_json_dict() for generation in found]


def _find_data(recipe: Recipe) -> PreparedData:
    """Return the prepared data of the run with the recipe `recipe` from the cache of prepared data. Raises `UserError`
    if the cache lacks them.
    """
    data = find_prepared(recipe.data, recipe.run.seed)
    if data is None:
        raise UserError("the prepared data of the run are no longer in the cache; give prompts with --prompt")
    return data


def read_prompts(data: PreparedData, count: int) -> list[list[int]]:
    """Return up to `count` different prompts as token IDs, from the validation split of `data`, or from the training
    split if the validation split is empty.

    A prompt is the first 16 tokens of a text document, or the tokens of an SFT or preference example before its first
    loss target. Raises `UserError` if both splits are empty, or if no document is longer than its prompt.
    """
    split = next((found for name in ("validation", "train") if (found := data.split(name)).sequences), None)
    if split is None:
        raise UserError("the prepared data are empty; give prompts with --prompt")
    prompts: dict[tuple[int, ...], None] = {}
    for prompt in _iterate_prompts(split, data.document_mask):
        prompts.setdefault(prompt)
        if len(prompts) == count:
            break
    if not prompts:
        raise UserError("no document is longer than a prompt; give prompts with --prompt")
    return list(map(list, prompts))


def _iterate_prompts(split: PackedDataset, document_mask: bool) -> Iterator[tuple[int, ...]]:
    """Yield the prompt (token IDs) of each document in the first 1024 packed rows of a split. Documents that are not
    longer than their prompt are left out.

    The prompt of a text document is its first 16 tokens; the prompt of an SFT or preference example consists of the
    tokens before the first target of the loss. document_mask: True if rows of text are divided into documents; False:
    each row counts as one document.
    """
    examples = isinstance(split, PackedExamples)
    for number, batch in enumerate(islice(split.iterate_batches(_ROWS), _BATCHES)):
        rows = zip(batch.tokens, batch.targets, batch.list_document_starts(), strict=True)
        for row, (tokens, targets, starts) in enumerate(rows, number * _ROWS):
            within = row > 0 and document_mask and not examples  # text rows after the first begin inside a document
            for start, stop in pairwise([*starts[within:].tolist(), len(tokens)]):
                length = PROMPT_TOKENS
                if examples:
                    trained = np.flatnonzero(targets[start:stop] != NO_TARGET)
                    length = int(trained[0]) + 1 if len(trained) else stop - start
                if length < stop - start:
                    yield tuple(tokens[start : start + length].tolist())
