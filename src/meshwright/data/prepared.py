"""Prepared data as training and evaluation see them: a tokenizer, packed tokens for each split, counts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.compression import token_byte_counts
from meshwright.data.order import SampleOrder
from meshwright.data.packed import PackedTokens
from meshwright.data.packing import Shard
from meshwright.data.survey import SPLITS
from meshwright.data.tokenizer import TextTokenizer, load_tokenizer
from meshwright.errors import UserError


class PreparedData:
    """The prepared data of one recipe: a tokenizer, and for each split packed tokens."""

    def __init__(
        self, directory: Path, manifest: dict[str, Any], sequence: int, document_mask: bool, seed: int
    ) -> None:
        self.directory, self.manifest = directory, manifest
        self.sequence, self.document_mask, self.seed = sequence, document_mask, seed

    @property
    def tokenizer_directory(self) -> Path:
        """Holds tokenizer.json and tokenizer_config.json, as `transformers` loads them."""
        return self.directory / "tokenizer"

    @property
    def vocabulary(self) -> int:
        """One more than the largest token."""
        return int(self.manifest["vocabulary"])

    @property
    def sha256(self) -> str:
        """Of tokenizer and tokens: equal where samples are."""
        return str(self.manifest["sha256"])

    @property
    def cleaning(self) -> dict[str, Any]:
        """What cleaning did: counts by rule, distributions before and after, samples, as JSON."""
        cleaning = dict(self.manifest["cleaning"])
        for counts in ("dropped", "dropped_bytes", "examples", "samples"):  # in the order in which rules are asked
            cleaning[counts] = {rule: cleaning[counts][rule] for rule in cleaning["rules"] if rule in cleaning[counts]}
        return cleaning

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return load_tokenizer(self.tokenizer_directory)

    def split(self, name: str) -> PackedTokens:
        """The packed tokens of "train" or "validation" (which is empty when data.validation_fraction is 0)."""
        assert name in SPLITS, name
        shards = [Shard(**record) for record in self.manifest["splits"][name]]
        dtype = np.dtype(self.manifest["dtype"])
        padding = self.manifest["end_token"]
        return PackedTokens(self.directory / name, shards, dtype, self.sequence, self.document_mask, padding)

    def documents(self, split: str = "validation") -> Iterator[str]:
        """The text of each document of a split, as it was tokenized; that of "train" only if it was to be kept."""
        return self.split(split).texts()

    def order(self) -> SampleOrder:
        """The order in which training reads the samples of the training split."""
        return SampleOrder(self.seed, self.split("train").sequences)

    def token_bytes(self) -> NDArray[np.int64] | None:
        """UTF-8 bytes per token id, [vocabulary]; None unless the tokenizer is byte-level."""
        return token_byte_counts(self.tokenizer.tokenizer)

    def summary(self) -> dict[str, Any]:
        """Counts, as JSON: `tokens` (framing included), `documents`, `bytes`, `dropped` by rule, `sha256` of it all."""
        splits = {name: self.split(name) for name in SPLITS}
        cleaning = self.cleaning
        return {
            "tokens": sum(split.tokens for split in splits.values()),
            "documents": sum(split.documents for split in splits.values()),
            "bytes": sum(split.bytes for split in splits.values()),
            "dropped": dict(cleaning["dropped"]),
            "dropped_examples": dict(cleaning["examples"]),
            "masked": dict(cleaning["masked"]),
            "sha256": self.sha256,
            "files": self.manifest["files"],
            "vocabulary": self.vocabulary,
            "sequence": self.sequence,
            "document_mask": self.document_mask,
            "splits": {
                name: {
                    "documents": split.documents,
                    "tokens": split.tokens,
                    "bytes": split.bytes,
                    "bytes_per_token": split.bytes / split.tokens if split.tokens else None,
                    "sequences": split.sequences,
                    "shards": len(split.shards),
                }
                for name, split in splits.items()
            },
            "directory": str(self.directory),
        }

    def check_lengths(self, validation_fraction: float) -> None:
        """`UserError` when a split that should be there cannot fill one sample."""
        for name in SPLITS if validation_fraction else SPLITS[:1]:
            split = self.split(name)
            if not split.sequences:
                raise UserError(
                    f"data.sequence = {self.sequence}: the {name} split holds only {split.tokens:,} tokens, and one "
                    f"sample needs {self.sequence + 1:,}; add text"
                    + (", raise data.validation_fraction" if name == "validation" else "")
                    + " or shorten data.sequence"
                )
