"""The real `Trainer` on generated tokens, so that a benchmark measures the step and not the reading of files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from meshwright.comm.mesh import Mesh
from meshwright.data import TokenBatch
from meshwright.layout import Layout
from meshwright.recipe import Recipe
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.trainer import Trainer
from peers import random_batches


class SyntheticTokens:
    """Stands where `PackedTokens` stands: every batch is the next one of the generator. `shape["documents"]`: how many
    documents a row packs, of random lengths; one without that key."""

    def __init__(self, shape: dict[str, int]) -> None:
        self.sequences, self.tokens = 10**9, 10**9 * shape["sequence"]
        self._batches: Iterator[Any] = random_batches(shape)
        self._documents, self._random = shape.get("documents", 1), np.random.default_rng(7)

    def read_batch(self, samples: np.ndarray, padded: bool = False) -> TokenBatch:
        tokens, targets = next(self._batches)
        rows, sequence = len(samples), tokens.shape[1]
        ids = np.zeros((rows, sequence), dtype=np.int32)
        for row in ids:
            row[self._random.choice(np.arange(1, sequence), self._documents - 1, replace=False)] = 1
        return TokenBatch(
            tokens=tokens[:rows].numpy(),
            targets=targets[:rows].numpy(),
            document_ids=ids.cumsum(axis=1, dtype=np.int32),
        )


class InTurn:
    """Stands where `MixtureOrder` stands: sample after sample."""

    def sample(self, numbers: np.ndarray) -> np.ndarray:
        return numbers


class SyntheticData:
    """Stands where `PreparedData` stands."""

    def __init__(self, shape: dict[str, int]) -> None:
        self._shape, self.vocabulary, self.sha256 = shape, shape["vocabulary"], "synthetic"

    def split(self, name: str) -> SyntheticTokens:
        return SyntheticTokens(self._shape)

    def make_sample_order(self) -> InTurn:
        return InTurn()


def synthetic_recipe(shape: dict[str, int], layout: str, compile_blocks: bool, **model: Any) -> Recipe:
    """The recipe of a race: a llama of `shape`, AdamW, clipping at 1."""
    return Recipe.from_tables(
        {
            "layout": layout,
            "model": {
                "family": "llama",
                "tied": True,
                **{key: shape[key] for key in ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocabulary")},
                **model,
            },
            "data": {"source": "stdlib", "tokenizer": "bytes", "sequence": shape["sequence"]},
            "train": {"steps": 10**6, "batch": shape["batch"], "learning_rate": 1e-3, "compile": compile_blocks},
        }
    )


def synthetic_trainer(
    shape: dict[str, int], layout: str, *, compile_blocks: bool, mesh: Mesh | None = None, **model: Any
) -> Trainer:
    """A trainer ready to step; without a mesh, on one device."""
    recipe = synthetic_recipe(shape, layout, compile_blocks, **model)
    parsed = Layout.parse(layout)
    config = config_from_recipe(recipe.model, shape["sequence"], shape["vocabulary"])
    return Trainer(LanguageModelTask(recipe, parsed, config, SyntheticData(shape), mesh or Mesh.single(parsed)))  # type: ignore[arg-type]
