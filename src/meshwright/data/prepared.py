"""Prepared data as training and evaluation see them: a tokenizer, packed tokens for each split, counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.cleaning.survey import SPLITS
from meshwright.data.compression import token_byte_counts
from meshwright.data.order import MixtureOrder, SampleOrder
from meshwright.data.packing.packed import PackedTokens, TokenRows
from meshwright.data.packing.packed_examples import PackedExamples
from meshwright.data.packing.shards import Shard
from meshwright.data.records.examples import ExampleEncoder
from meshwright.data.tokenizers.tokenizer import TextTokenizer, load_tokenizer
from meshwright.errors import UserError
from meshwright.recipe import DataRecipe


class PreparedData:
    """The prepared data of one recipe: a tokenizer, and for each split packed tokens."""

    def __init__(self, directory: Path, manifest: dict[str, Any], recipe: DataRecipe, seed: int) -> None:
        self.directory, self.manifest, self.seed = directory, manifest, seed
        self.sequence, self.document_mask = recipe.sequence, recipe.document_mask
        self.sources, self.weights = recipe.all_sources, recipe.weights
        self.recipe = recipe
        self._examples: dict[str, PackedExamples] = {}

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

    @cached_property
    def turn_end(self) -> int | None:
        """The token that ends a response, of records whose template has one."""
        return (
            None if self.recipe.records == "text" else ExampleEncoder.of_directory(self.tokenizer_directory).turn_end()
        )

    def split(self, name: str) -> TokenRows:
        """The packed tokens of "train" or "validation" (which is empty when data.validation_fraction is 0).

        Where sources have weights, each is a stream of its own in "train".
        """
        assert name in SPLITS, name
        shards = [Shard(**record) for record in self.manifest["splits"][name]]
        dtype = np.dtype(self.manifest["dtype"])
        padding = self.manifest["end_token"]
        apart = [source["shards"][name] for source in self.manifest["sources"]] if self.weights else None
        shape = (
            self.directory / name,
            shards,
            dtype,
            self.sequence,
            self.document_mask,
            padding,
            apart if name == "train" else None,
        )
        if self.recipe.records == "text":
            return PackedTokens(*shape)
        if name not in self._examples:  # to plan its rows takes time
            self._examples[name] = PackedExamples(
                *shape,
                pieces=2 if self.recipe.records == "preference" else 1,
                train_on=self.recipe.train_on,
                pack=self.recipe.pack,
                too_long=self.recipe.too_long,
                decode=lambda tokens: self.tokenizer.decode(tokens),
            )
        return self._examples[name]

    def packing_lines(self, splits: Sequence[str] = SPLITS) -> Iterator[str]:
        """Of each split of records a line: examples, rows, and what was cut or left out."""
        for name in splits:
            split = self.split(name)
            if isinstance(split, PackedExamples) and split.documents:
                yield f"{name}: {packing_line(split.report, split.sequences, split.sequence)}"

    def documents(self, split: str = "validation") -> Iterator[str]:
        """The text of each document of a split, as it was tokenized; that of "train" only if it was to be kept."""
        return self.split(split).texts()

    def order(self) -> SampleOrder | MixtureOrder:
        """The order in which training reads the samples of the training split."""
        split = self.split("train")
        if self.weights is None:
            return SampleOrder(self.seed, split.sequences)
        return MixtureOrder(self.seed, split.sequences_by_source, self.weights)

    def token_bytes(self) -> NDArray[np.int64] | None:
        """UTF-8 bytes per token id, [vocabulary]; None unless the tokenizer is byte-level."""
        return token_byte_counts(self.tokenizer.tokenizer)

    def summary(self, samples: int = 0) -> dict[str, Any]:
        """Counts, as JSON: `tokens` (framing included), `documents`, `bytes`, `dropped` by rule, `sha256` of it all; of
        each source how often a run of `samples` samples reads it."""
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
            "records": self.recipe.records,
            "splits": {
                name: {
                    "documents": split.documents,
                    "tokens": split.tokens,
                    "bytes": split.bytes,
                    "bytes_per_token": split.bytes / split.tokens if split.tokens else None,
                    "sequences": split.sequences,
                    "shards": len(split.shards),
                    **({"packing": split.report} if isinstance(split, PackedExamples) else {}),
                }
                for name, split in splits.items()
            },
            "sources": self._sources(samples),
            "planned_samples": samples,
            "directory": str(self.directory),
        }

    def _sources(self, samples: int) -> list[dict[str, Any]]:
        """Of each source: name, weight, its share of the samples, files, documents read, documents, tokens and bytes of
        each split, its samples, and how often each of these comes in `samples` samples."""
        split, order = self.split("train"), self.order()
        shares = [1.0] * len(self.sources)
        if isinstance(order, MixtureOrder):
            shares = [part / sum(order.parts) for part in order.parts]
            epochs = [count / own for count, own in zip(order.counts(samples), split.sequences_by_source, strict=True)]
        else:
            epochs = [samples / split.sequences] * len(self.sources)
        said = []
        first = dict.fromkeys(SPLITS, 0)
        for number, (source, counted) in enumerate(zip(self.sources, self.manifest["sources"], strict=True)):
            one: dict[str, Any] = {
                "name": source.name or source.path,
                "weight": source.weight,
                "files": counted["files"],
                "documents": counted["documents"],
                "epochs": epochs[number],
            }
            for name in SPLITS:
                shards = self.split(name).shards[first[name] : first[name] + counted["shards"][name]]
                first[name] += len(shards)
                one[name] = {
                    key: sum(getattr(shard, key) for shard in shards) for key in ("documents", "tokens", "bytes")
                }
            if self.weights is None:
                one["share"] = one["train"]["tokens"] / split.tokens
            else:
                one["share"], one["sequences"] = shares[number], split.sequences_by_source[number]
            said.append(one)
        return said

    def check_lengths(self, validation_fraction: float) -> None:
        """`UserError` when a split that should be there cannot fill one sample."""
        for name in SPLITS if validation_fraction else SPLITS[:1]:
            split = self.split(name)
            if not split.sequences:
                if isinstance(split, PackedExamples):
                    raise UserError(
                        f"data: no example of the {name} split is left to train on: "
                        f"{packing_line(split.report, 0, self.sequence)}; raise data.sequence, or look at the records "
                        "(is data.record_keys right?)"
                    )
                raise UserError(
                    f"data.sequence = {self.sequence}: the {name} split holds only {split.tokens:,} tokens, and one "
                    f"sample needs {self.sequence + 1:,}; add text"
                    + (", raise data.validation_fraction" if name == "validation" else "")
                    + " or shorten data.sequence"
                )
        if self.weights is not None:
            split = self.split("train")
            for number, sequences in enumerate(split.sequences_by_source):
                if not sequences:
                    name = self.sources[number].name or self.sources[number].path
                    raise UserError(
                        f'data.sources: "{name}" has a weight, and what is left of it after cleaning cannot fill one '
                        f"training sample of data.sequence = {self.sequence} tokens; add text to it or leave it out"
                    )


def packing_line(report: dict[str, int], rows: int, sequence: int) -> str:
    """What became of examples, in words."""

    def examples(count: int) -> str:
        return f"{count:,} example{'' if count == 1 else 's'}"

    parts = [f"{examples(report['trained'])} in {rows:,} row{'' if rows == 1 else 's'} of {sequence + 1:,} tokens"]
    if rows:
        parts[0] += f", {1 - report['padding'] / (rows * (sequence + 1)):.0%} full"
    if report["truncated"]:
        parts.append(f"{examples(report['truncated'])} longer than a row cut at the end")
    if report["too_long"]:
        parts.append(f"{examples(report['too_long'])} longer than a row left out")
    if report["lost_targets"]:
        whole = report["targets"] + report["lost_targets"]
        parts.append(f"{report['lost_targets']:,} of {whole:,} target tokens lost")
    if report["without_response"]:
        parts.append(f"{examples(report['without_response'])} left out that have no response (in a row)")
    return "; ".join(parts)
