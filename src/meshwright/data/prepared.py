"""Prepared data as training and evaluation read it: a tokenizer, and packed tokens and counts of each split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.cleaning.corpus import SPLITS
from meshwright.data.order import MixtureOrder, SampleOrder
from meshwright.data.packing.packed import PackedDataset, PackedTokens, StoredTokens
from meshwright.data.packing.packed_examples import PackedExamples
from meshwright.data.packing.packing_plan import PackingSettings
from meshwright.data.packing.shards import Shard
from meshwright.data.records.examples import ExampleEncoder
from meshwright.data.tokenizers.tokenizer import TextTokenizer, load_tokenizer
from meshwright.errors import UserError
from meshwright.recipe import DataRecipe


class PreparedData:
    """Prepared data of one recipe in the cache: a tokenizer, and a packed dataset for each split.

    directory: the data's cache directory. manifest: the parsed manifest.json of that directory. recipe: the `[data]`
    table. seed: random seed of the training split's sample order.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any], recipe: DataRecipe, seed: int) -> None:
        """Wrap the cached files; nothing is loaded yet. Arguments: see the class."""
        self.directory, self.manifest, self.seed = directory, manifest, seed
        self.sequence, self.document_mask = recipe.sequence, recipe.document_mask
        self.sources, self.weights = recipe.all_sources, recipe.weights
        self.recipe = recipe
        self._examples: dict[str, PackedExamples] = {}

    @property
    def tokenizer_directory(self) -> Path:
        """Directory of tokenizer.json and tokenizer_config.json, which `transformers` can load."""
        return self.directory / "tokenizer"

    @property
    def vocabulary(self) -> int:
        """Vocabulary size: the largest token id + 1."""
        return int(self.manifest["vocabulary"])

    @property
    def sha256(self) -> str:
        """Hex SHA-256 over tokenizer and tokens. Prepared data with the same value have identical samples."""
        return str(self.manifest["sha256"])

    @property
    def cleaning(self) -> dict[str, Any]:
        """Cleaning report as JSON: documents and bytes dropped by rule, distributions before and after, sample
        documents.
        """
        cleaning = dict(self.manifest["cleaning"])
        for counts in ("dropped", "dropped_bytes", "examples", "samples"):  # in the order in which the rules run
            cleaning[counts] = {rule: cleaning[counts][rule] for rule in cleaning["rules"] if rule in cleaning[counts]}
        return cleaning

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """Tokenizer loaded from `tokenizer_directory`."""
        return load_tokenizer(self.tokenizer_directory)

    @cached_property
    def turn_end(self) -> int | None:
        """Token id that ends an assistant turn; None for plain text and for chat templates without such a token."""
        return (
            None
            if self.recipe.records == "text"
            else ExampleEncoder.from_directory(self.tokenizer_directory).find_turn_end()
        )

    def split(self, name: str) -> PackedDataset:
        """Return the packed dataset of the split `name`: "train", or "validation" (empty if data.validation_fraction is
        0). If the recipe gives its data sources weights, no packed row of the training split contains tokens of two
        sources."""
        assert name in SPLITS, name
        shards = [Shard(**record) for record in self.manifest["splits"][name]]
        dtype = np.dtype(self.manifest["dtype"])
        padding = self.manifest["end_token"]
        apart = [source["shards"][name] for source in self.manifest["sources"]] if self.weights else None
        stored = StoredTokens(self.directory / name, shards, dtype, apart if name == "train" else None)
        if self.recipe.records == "text":
            return PackedTokens(stored, self.sequence, self.document_mask, padding)
        if name not in self._examples:  # planning the packed rows takes time: done once
            packing = PackingSettings(
                documents_per_example=2 if self.recipe.records == "preference" else 1,
                labelled=self.recipe.records == "unpaired",
                train_on=self.recipe.train_on,
                pack=self.recipe.pack,
                too_long=self.recipe.too_long_examples,
                decode=lambda tokens: self.tokenizer.decode(tokens),
            )
            self._examples[name] = PackedExamples(stored, self.sequence, self.document_mask, padding, packing)
        return self._examples[name]

    def group_shards(self, split: str) -> list[list[Shard]]:
        """Return the metadata of the shards (files of packed tokens) of `split` ("train" or "validation"), one list per
        data source.
        """
        shards = iter(self.split(split).shards)
        return [list(islice(shards, source["shards"][split])) for source in self.manifest["sources"]]

    def format_packing_lines(self, splits: Sequence[str] = SPLITS) -> Iterator[str]:
        """Yield one line of text for each of `splits`: number of examples, packed rows, truncated and dropped examples.
        Plain text and empty splits have no line.
        """
        for name in splits:
            split = self.split(name)
            if isinstance(split, PackedExamples) and split.documents:
                yield f"{name}: {format_packing_report(split.report, split.sequences, split.sequence)}"

    def iterate_documents(self, split: str = "validation") -> Iterator[str]:
        """Yield the cleaned text of each document of `split` ("train" or "validation"), with personal data masked. For
        "train" the data must have been prepared with `keep_text`.
        """
        return self.split(split).iterate_texts()

    def make_sample_order(self) -> SampleOrder | MixtureOrder:
        """Return the order in which training reads the training split; its `sample` method maps position n to the index
        of a packed row.
        """
        split = self.split("train")
        if self.weights is None:
            return SampleOrder(self.seed, split.sequences)
        return MixtureOrder(self.seed, split.sequences_by_source, self.weights)

    def summary(self, samples: int = 0) -> dict[str, Any]:
        """Return the JSON document of `meshwright data prepare`: `tokens` (start and end tokens included), `documents`,
        `bytes`, `dropped` documents by rule, `sha256`, counts of each split (`splits`) and of each data source
        (`sources`).

        samples: number of samples that the planned training run reads, from which the number of epochs of each source
        is computed.
        """
        splits = {name: self.split(name) for name in SPLITS}
        cleaning = self.cleaning
        return {
            "tokens": sum(split.tokens for split in splits.values()),
            "documents": sum(split.documents for split in splits.values()),
            "bytes": sum(split.bytes for split in splits.values()),
            "dropped": dict(cleaning["dropped"]),
            "dropped_examples": dict(cleaning["examples"]),
            "masked": dict(cleaning["masked"]),
            "language_thresholds": cleaning["language_thresholds"],
            "removed_sentences": cleaning["removed_sentences"],
            "unused_keys": dict(cleaning.get("unused_keys", {})),
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
            "sources": self._summarize_sources(samples),
            "planned_samples": samples,
            "directory": str(self.directory),
        }

    def _summarize_sources(self, samples: int) -> list[dict[str, Any]]:
        """Return one JSON object per data source: name, weight, share of the training samples, number of files and
        documents, counts by split, and `epochs`, the number of times that a run of `samples` samples reads the source.
        """
        split, order = self.split("train"), self.make_sample_order()
        shares = [1.0] * len(self.sources)
        if isinstance(order, MixtureOrder):
            shares = [part / sum(order.parts) for part in order.parts]
            epochs = [
                count / own
                for count, own in zip(order.count_by_source(samples), split.sequences_by_source, strict=True)
            ]
        else:
            epochs = [samples / split.sequences] * len(self.sources)
        shards = {name: self.group_shards(name) for name in SPLITS}
        rows = []
        for number, (source, counted) in enumerate(zip(self.sources, self.manifest["sources"], strict=True)):
            one: dict[str, Any] = {
                "name": source.name or source.path,
                "weight": source.weight,
                "files": counted["files"],
                "documents": counted["documents"],
                "epochs": epochs[number],
            }
            for name in SPLITS:
                one[name] = {
                    key: sum(getattr(shard, key) for shard in shards[name][number])
                    for key in ("documents", "tokens", "bytes")
                }
            if self.weights is None:
                one["share"] = one["train"]["tokens"] / split.tokens
            else:
                one["share"], one["sequences"] = shares[number], split.sequences_by_source[number]
            rows.append(one)
        return rows

    def check_lengths(self, validation_fraction: float) -> None:
        """Raise `UserError` if a split, or a source with a weight, has too few tokens for one sample.
        validation_fraction: fraction of validation documents, in [0, 1]; with 0 the validation split may be empty."""
        for name in SPLITS if validation_fraction else SPLITS[:1]:
            split = self.split(name)
            if not split.sequences:
                if isinstance(split, PackedExamples):
                    raise UserError(
                        f"data: no example of the {name} split is left to train on: "
                        f"{format_packing_report(split.report, 0, self.sequence)}; raise data.sequence, or look "
                        "at the records (is data.record_keys right?)"
                    )
                raise UserError(
                    f"data.sequence = {self.sequence}: the {name} split has only {split.tokens:,} tokens, and one "
                    f"sample needs {self.sequence + 1:,}; add text"
                    + (", raise data.validation_fraction" if name == "validation" else "")
                    + " or reduce data.sequence"
                )
            if isinstance(split, PackedExamples) and split.packing.labelled:
                split.check_partners()
        if self.weights is not None:
            split = self.split("train")
            for number, sequences in enumerate(split.sequences_by_source):
                if not sequences:
                    name = self.sources[number].name or self.sources[number].path
                    raise UserError(
                        f'data.sources: "{name}" has a weight, but too little of it remains after cleaning to fill one '
                        f"training sample of data.sequence = {self.sequence} tokens; add text to it or remove it"
                    )


def format_packing_report(report: dict[str, int], rows: int, sequence: int) -> str:
    """Format a packing report as one line of text: numbers of examples, packed rows, truncated and dropped examples,
    and target tokens that truncation and dropping cost.

    report: counts by name, such as "examples" and "truncated", from `PackedExamples.report`. rows: number of packed
    rows. sequence: S, positions in a row; a row stores S + 1 tokens, as the last one is only a target.
    """

    def format_examples(count: int) -> str:
        """Return `count` with its noun, such as "1 example" or "2,000 examples"."""
        return f"{count:,} example{'' if count == 1 else 's'}"

    parts = [
        f"{format_examples(report['trained'])} in {rows:,} row{'' if rows == 1 else 's'} of {sequence + 1:,} tokens"
    ]
    if rows:
        parts[0] += f", {1 - report['padding'] / (rows * (sequence + 1)):.0%} full"
    if report["truncated"]:
        parts.append(f"{format_examples(report['truncated'])} truncated to the length of a row")
    if report["too_long"]:
        parts.append(f"{format_examples(report['too_long'])} longer than a row dropped")
    if report["lost_targets"]:
        whole = report["targets"] + report["lost_targets"]
        parts.append(f"{report['lost_targets']:,} of {whole:,} target tokens lost")
    if report.get("identical"):
        parts.append(f"{format_examples(report['identical'])} dropped whose responses are identical")
    if pairs := report.get("pairs"):
        means = (f"{report[key] / pairs:.1f}" for key in ("chosen_tokens", "rejected_tokens"))
        longer = f"the chosen one is longer in {report['chosen_longer'] / pairs:.0%}"
        parts.append(
            f"response tokens: chosen {next(means)}, rejected {next(means)} in the mean; {longer} of the pairs"
        )
    if "desirable" in report:
        parts.append(f"{report['desirable']:,} desirable and {report['undesirable']:,} undesirable responses")
    if report["without_response"]:
        parts.append(f"{format_examples(report['without_response'])} dropped that have no response (within a row)")
    return "; ".join(parts)
