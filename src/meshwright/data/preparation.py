"""From a recipe's `[data]` to packed tokens in a content-addressed cache: made once, resumed after a kill, shared."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.cleaning.blocked_words import digest
from meshwright.data.cleaning.decontamination import digests
from meshwright.data.cleaning.rules import Rewriter
from meshwright.data.cleaning.survey import (
    FEW_DOCUMENTS,
    SHORT_DOCUMENT,
    SPLITS,
    Survey,
    document_reader,
    last_of,
    survey,
)
from meshwright.data.files import (
    PARTIAL,
    WholeFile,
    canonical_json,
    damage,
    only_process,
    read_json,
    sha256_of_file,
    sync_directory,
    write_array,
    write_whole,
)
from meshwright.data.packing.shards import Packer, Shard, TextEncoder, every_few_seconds
from meshwright.data.prepared import PreparedData
from meshwright.data.records.chat_template import check_tokens, find_template
from meshwright.data.records.examples import ExampleEncoder
from meshwright.data.sources.contents import Contents
from meshwright.data.sources.reading import LONGEST_DOCUMENT, Reader, check_encoding
from meshwright.data.sources.resolution import KEYED_FORMATS, SourceChanged, find_files
from meshwright.data.tokenizers.kinds import KINDS
from meshwright.data.tokenizers.tokenizer import FILES, TextTokenizer, find_tokenizer, load_tokenizer, write_tokenizer
from meshwright.errors import UserError
from meshwright.recipe import DataRecipe

FORMAT = 3
TRAINING_TEXT = 256 << 20  # UTF-8 bytes that a tokenizer is trained on, at most: more changes nothing that matters

Log = Callable[[str], None]


def prepare(
    recipe: DataRecipe,
    seed: int = 0,
    log: Log = lambda line: None,
    *,
    check: bool = False,
    keep_text: bool = False,
) -> PreparedData:
    """The prepared data of a recipe's `[data]`, from the cache or made now.

    The cache directory is named by the SHA-256 of all that decides the result: contents of the sources, cleaning,
    tokenizer, packing. One process prepares while others wait; what a killed one finished stays. Sizes of files are
    always checked, their contents with `check`; what is damaged is made again. `log` hears lines of progress. `seed` is
    that of the training split's sample order. The text of the validation split is kept, with `keep_text` that of both.
    `UserError`: sources that cannot be read, nothing left after cleaning, a split that cannot fill one sample of
    `sequence` tokens, a cache that cannot be written.
    """
    job = _Job(recipe, log, keep_text)
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
        manifest = job.finished(contents=check, log=None)
        if manifest is None:
            with only_process(job.directory / "lock", log, f"preparing the same data in {job.directory}"):
                manifest = job.finished(contents=check, log=log) or job.make()
    except OSError as error:
        raise UserError(
            f"data.cache: {error.filename or job.directory} cannot be written: {error.strerror or error}; "
            "make room there or name another directory in data.cache"
        ) from None
    data = PreparedData(job.directory, manifest, recipe, seed)
    data.check_lengths(recipe.validation_fraction)
    return data


class _Job:
    """One recipe's preparation: what goes in, its place in the cache, and the steps that make it."""

    def __init__(self, recipe: DataRecipe, log: Log, keep_text: bool) -> None:
        self.recipe, self.log, self.keep_text = recipe, log, keep_text
        check_encoding(recipe.clean.encoding)
        self.cache = cache = _cache_directory(recipe)
        self.files = find_files(
            recipe.all_sources, recipe.format, cache, recipe.source_key, log, records=recipe.records != "text"
        )
        if recipe.clean.required_keys:
            other = next((file for file in self.files if file.format == "wet"), None)
            if other is not None:
                raise UserError(
                    f"data.clean.required_keys: {other.path} holds pages, which have no keys; only records of JSON "
                    "Lines and rows of Parquet are held to a schema: leave the keys out, or this source"
                )
        self.tokenizer_files = find_tokenizer(recipe.tokenizer)
        self.template: tuple[str, str] | None = None  # its source, and what errors call it
        if recipe.template_name is not None:
            own = self.tokenizer_files.chat_template if self.tokenizer_files else None
            self.template = find_template(recipe.template_name, own, recipe.tokenizer)
            special = self.tokenizer_files.load().special if self.tokenizer_files else frozenset[str]()
            check_tokens(recipe.template_name, special, recipe.tokenizer)
        self.contents = Contents(self.files, cache, log)
        self.key = hashlib.sha256(canonical_json(self._all_that_counts())).hexdigest()
        self.directory = cache / self.key[:32]

    def _all_that_counts(self) -> dict[str, Any]:
        recipe, tokenizer = self.recipe, self.tokenizer_files
        return {
            "format": FORMAT,
            "files": [
                [file.name, file.format, digest] for file, digest in zip(self.files, self.contents.sha256, strict=True)
            ],
            "sources": self._by_source([1] * len(self.files)),
            "text_key": recipe.text_key if any(file.format in KEYED_FORMATS for file in self.files) else None,
            "text_keys": [source.text_key for source in recipe.all_sources],
            "clean": {
                **recipe.clean.model_dump(),
                "evaluation_sets": digests(recipe.clean.evaluation_sets, self.cache, self.log),
                "blocked_words": digest(recipe.clean.blocked_words) if recipe.clean.blocked_words else None,
            },
            "tokenizer": recipe.tokenizer if tokenizer is None else tokenizer.sha256(),
            "vocabulary": recipe.vocabulary if _is_trained(recipe) else None,
            "training_text": TRAINING_TEXT,
            "validation_fraction": recipe.validation_fraction,
            "cut": [LONGEST_DOCUMENT, FEW_DOCUMENTS, SHORT_DOCUMENT],
            "shard_tokens": recipe.shard_tokens,
            "keep_text": self.keep_text,
            **({"records": [recipe.records, recipe.record_keys, self.template[0]]} if self.template else {}),
        }

    def finished(self, contents: bool, log: Log | None) -> dict[str, Any] | None:
        """The manifest, if all that it lists is there and whole; else None, and `log` hears what is not."""
        manifest = read_json(self.directory / "manifest.json")
        if not isinstance(manifest, dict) or manifest.get("key") != self.key:
            return None
        if manifest.pop("manifest_sha256", None) != _sha256(manifest):
            if log:
                log(f"{self.directory / 'manifest.json'}: hash mismatch or older format; preparing the data again")
            return None
        problems: list[str] = []
        for name, said in manifest["tokenizer"].items():
            if found := damage(self.directory / "tokenizer" / name, said, contents=True):
                problems.append(f"{self.directory / 'tokenizer' / name} {found}")
        for split in SPLITS:
            for record in manifest["splits"][split]:
                if found := Shard(**record).problem(self.directory / split, contents):
                    problems.append(found)
        for problem in problems:
            if log:
                log(f"{problem}: it is made again")
        return None if problems else manifest

    def make(self) -> dict[str, Any]:
        """Make what is missing, in the order survey, tokenizer, shards, manifest. Call it with the lock held."""
        for partial in self.directory.rglob(f"{PARTIAL}*"):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        (self.directory / "manifest.json").unlink(missing_ok=True)
        try:
            return self._make()
        except SourceChanged:
            self._forget()  # this directory is named by what the files held before
            raise

    def _make(self) -> dict[str, Any]:
        result = self._survey()
        tokenizer, tokenizer_record = self._tokenizer(result)
        splits = {name: self._pack(name, result, tokenizer, tokenizer_record) for name in SPLITS}
        self._check_unchanged()
        shards = {
            name: [dataclasses.asdict(shard) for shards in by_source for shard in shards]
            for name, by_source in splits.items()
        }
        manifest = {
            "format": FORMAT,
            "key": self.key,
            "files": len(self.files),
            "sources": [
                {
                    "files": files,
                    "documents": documents,
                    "shards": {name: len(by_source[number]) for name, by_source in splits.items()},
                }
                for number, (files, documents) in enumerate(
                    zip(self._by_source([1] * len(self.files)), self._by_source(result.pieces), strict=True)
                )
            ],
            "vocabulary": tokenizer.vocabulary,
            "dtype": tokenizer.dtype.str,
            "end_token": tokenizer.end,
            "cleaning": result.report,
            "tokenizer": tokenizer_record,
            "splits": shards,
            "sha256": _sha256([tokenizer_record, shards]),
        }
        closed = {**manifest, "manifest_sha256": _sha256(manifest)}
        write_whole(self.directory / "manifest.json", canonical_json(closed))
        sync_directory(self.directory)
        return manifest

    def _check_unchanged(self) -> None:
        if file := self.contents.changed():
            raise SourceChanged(file)

    def _forget(self) -> None:
        """Remove all that was made, but not the lock that others wait for."""
        for path in self.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def _survey(self) -> Survey:
        codes_path, path, work = (self.directory / name for name in ("survey.npy", "survey.json", "cleaning"))
        record = read_json(path)
        if record is None or damage(codes_path, record["codes"], contents=True) is not None:
            path.unlink(missing_ok=True)
            self.log(f"reading {_count(len(self.files), 'file')} ({self.contents.bytes / 1e6:,.1f} MB)")
            result = survey(self.files, self.recipe, self.log, work)
            dropped = ", ".join(f"{rule} {count}" for rule, count in result.dropped.items() if count)
            kept = sum(result.documents.values())
            because = f"; dropped: {dropped}" if dropped else ""
            self.log(f"kept {kept:,} of {_count(len(result.codes), 'document')}{because}")
            self._check_unchanged()
            with WholeFile(codes_path) as file:
                write_array(file, result.codes)
                written = file.finish()
            record = {**result.description(), "codes": written}
            write_whole(path, canonical_json(record))
            sync_directory(self.directory)
        shutil.rmtree(work, ignore_errors=True)  # what a killed pass goes on from
        codes = np.load(codes_path, mmap_mode="r", allow_pickle=False)
        return Survey.from_description(codes, record, Rewriter(self.recipe.clean))

    def _tokenizer(self, result: Survey) -> tuple[TextTokenizer, dict[str, Any]]:
        directory, record_path = self.directory / "tokenizer", self.directory / "tokenizer.record.json"
        record = read_json(record_path)
        if record is None or any(damage(directory / name, said, contents=True) for name, said in record.items()):
            recipe, size = self.recipe, result.bytes["train"]
            if _is_trained(recipe):
                size, title = min(size, TRAINING_TEXT), KINDS[recipe.tokenizer].title
                self.log(f"training {title} of {recipe.vocabulary:,} tokens on {size / 1e6:,.1f} MB")
            record_path.unlink(missing_ok=True)
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            write_tokenizer(
                directory,
                recipe.tokenizer,
                recipe.vocabulary,
                self.tokenizer_files,
                self._training_texts(result),
                self.template[0] if self.template else None,
            )
            sync_directory(directory)
            record = {
                name: {"bytes": (directory / name).stat().st_size, "sha256": sha256_of_file(directory / name)}
                for name in FILES
            }
            write_whole(record_path, canonical_json(record))
            sync_directory(self.directory)
        return load_tokenizer(directory), record

    def _training_texts(self, result: Survey) -> Iterator[str]:
        """Texts of the training split only; of a large one a share of about `TRAINING_TEXT`, spread over all of it."""
        share = TRAINING_TEXT / max(1, result.bytes["train"])
        for number, text in result.texts(self.files, self._reader(result), "train"):
            # Multiples of the golden ratio modulo 1 are spread evenly.
            if share >= 1 or (number * 0x9E3779B97F4A7C15) % 2**64 < share * 2.0**64:
                yield text

    def _pack(
        self, split: str, result: Survey, tokenizer: TextTokenizer, tokenizer_record: dict[str, Any]
    ) -> list[list[Shard]]:
        reader, total = self._reader(result), result.bytes[split]
        packer = Packer(
            self.directory / split,
            lambda first: result.kept(self.files, reader, split, first),
            self._ends(result, split),
            TextEncoder(tokenizer)
            if self.template is None
            else ExampleEncoder.of_directory(self.directory / "tokenizer", self.template[1]),
            tokenizer_record[FILES[0]]["sha256"],
            self.recipe.shard_tokens,
            keep_text=self.keep_text or split == "validation",
        )
        shards = packer.pack(
            every_few_seconds(
                lambda done: self.log(f"packing {split}: {done / total:.0%} of {total / 1e6:,.1f} MB of text")
            )
        )
        number_of_shards = sum(map(len, shards))
        tokens = sum(shard.tokens for by_source in shards for shard in by_source)
        if number_of_shards:
            documents, count = _count(result.documents[split], "document"), _count(number_of_shards, "shard")
            self.log(f"packed {split}: {tokens:,} tokens of {documents} in {count}")
        return shards

    def _by_source(self, counts: Sequence[int]) -> list[int]:
        """Counts of every file, added up for each source."""
        totals = [0] * len(self.recipe.all_sources)
        for file, count in zip(self.files, counts, strict=True):
            totals[file.source] += count
        return totals

    def _ends(self, result: Survey, split: str) -> list[int]:
        """For each source, one past the last document of the split that it or one before it has."""
        code, ends, begin, last = SPLITS.index(split), list[int](), 0, 0
        for count in self._by_source(result.pieces):
            last = last_of(result.codes, code, begin, begin + count) + 1 or last
            ends.append(last)
            begin += count
        return ends

    def _reader(self, result: Survey) -> Reader:
        return document_reader(self.recipe, result.longest)


def _sha256(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _is_trained(recipe: DataRecipe) -> bool:
    """Whether its tokenizer is made from its data."""
    return recipe.tokenizer in KINDS and KINDS[recipe.tokenizer].trained


def _cache_directory(recipe: DataRecipe) -> Path:
    if recipe.cache:
        return Path(recipe.cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")  # where the desktop standard lets a person move caches
    return (Path(base) if base else Path.home() / ".cache") / "meshwright"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
