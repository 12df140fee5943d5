"""Preparation of a recipe's `[data]` into packed tokens in a content-addressed cache; resumes after a kill."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.data.cleaning.corpus import (
    FEW_DOCUMENTS,
    SHORT_DOCUMENT,
    SPLITS,
    CleanedCorpus,
    clean_and_split_corpus,
    find_last,
    make_reader,
)
from meshwright.data.cleaning.rules import Rewriter, collect_key_fields
from meshwright.data.files import (
    PARTIAL,
    find_damage,
    hash_file,
    hold_lock,
    read_json,
    sync_directory,
    to_canonical_json,
    write_atomic,
)
from meshwright.data.packing.shards import Shard, ShardWriter, TextEncoder, limit_rate
from meshwright.data.prepared import PreparedData
from meshwright.data.records.examples import ExampleEncoder, collect_record_fields
from meshwright.data.records.template_sources import check_template_tokens, find_template
from meshwright.data.sources.contents import SourceDigests
from meshwright.data.sources.reading import MAX_DOCUMENT_LENGTH, check_encoding
from meshwright.data.sources.resolution import KEYED_FORMATS, SourceChanged, find_files
from meshwright.data.sources.warc import collect_page_fields
from meshwright.data.tokenizers.kinds import KINDS
from meshwright.data.tokenizers.tokenizer import FILES, TextTokenizer, find_tokenizer, load_tokenizer, write_tokenizer
from meshwright.errors import UserError
from meshwright.recipe import DataRecipe

FORMAT = 4
TRAINING_TEXT = 256 << 20  # maximum UTF-8 bytes of tokenizer training text: more hardly changes the vocabulary

Log = Callable[[str], None]


def prepare(
    recipe: DataRecipe,
    seed: int = 0,
    log: Log = lambda line: None,
    *,
    check: bool = False,
    keep_text: bool = False,
) -> PreparedData:
    """Clean, tokenize and pack the data of a recipe's `[data]` table, or read the result from the cache.

    The cache directory is named by the SHA-256 of everything that determines the result: contents of the sources,
    cleaning, tokenizer and packing options. One process prepares while others wait for its lock; an interrupted
    preparation resumes.

    recipe: the `[data]` table. seed: random seed of the training split's sample order. log: receives progress lines.
    check: verify the SHA-256 of all cached files, not only their sizes; damaged files are prepared again. keep_text:
    store the text of the training split too (the text of the validation split is always stored).

    Raises `UserError` for sources that cannot be read, no document left after cleaning, a split too short for one
    sample, and a cache that cannot be written.
    """
    job = _Preparation(recipe, log, keep_text)
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
        manifest = job.find_manifest(contents=check, log=None)
        if manifest is None:
            with hold_lock(job.directory / "lock", log, f"preparing the same data in {job.directory}"):
                manifest = job.find_manifest(contents=check, log=log) or job.prepare_missing()
    except OSError as error:
        raise UserError(
            f"data.cache: {error.filename or job.directory} cannot be written: {error.strerror or error}; "
            "free space there, or set data.cache to another directory"
        ) from None
    data = PreparedData(job.directory, manifest, recipe, seed)
    data.check_lengths(recipe.validation_fraction)
    return data


def find_prepared(recipe: DataRecipe, seed: int = 0) -> PreparedData | None:
    """Return the prepared data of a recipe's `[data]` table from the cache; None if the cache does not contain them.
    recipe: the `[data]` table. seed: random seed of the training split's sample order. Raises `UserError` for sources
    that cannot be read."""
    job = _Preparation(recipe, lambda line: None, keep_text=False)
    manifest = job.find_manifest(contents=False, log=None)
    return None if manifest is None else PreparedData(job.directory, manifest, recipe, seed)


class _Preparation:
    """Preparation of one recipe's data. The constructor finds the source files, the cache key and the cache directory;
    the methods run the steps that fill that directory.

    recipe: the `[data]` table. log: receives progress lines. keep_text: store the text of the training split too.
    Raises `UserError` for sources, tokenizers and chat templates that cannot be used.
    """

    def __init__(self, recipe: DataRecipe, log: Log, keep_text: bool) -> None:
        """Find source files, cache key and cache directory; arguments: see the class."""
        self.recipe, self.log, self.keep_text = recipe, log, keep_text
        check_encoding(recipe.clean.encoding)
        self.cache = cache = _find_cache_directory(recipe)
        self.files = find_files(
            recipe.all_sources, recipe.format, cache, recipe.source_key, log, records=recipe.records != "text"
        )
        if recipe.clean.required_keys:
            other = next((file for file in self.files if file.format in ("wet", "warc")), None)
            if other is not None:
                raise UserError(
                    f"data.clean.required_keys: {other.path} has pages, which have no keys; only JSON records and "
                    "Parquet rows are checked against a schema: remove the keys, or this source"
                )
        self.tokenizer_files = find_tokenizer(recipe.tokenizer)
        self.template: tuple[str, str] | None = None  # Jinja source, and its name in errors
        if recipe.template_name is not None:
            own = self.tokenizer_files.chat_template if self.tokenizer_files else None
            self.template = find_template(recipe.template_name, own, recipe.tokenizer)
            special = self.tokenizer_files.load().special if self.tokenizer_files else frozenset[str]()
            check_template_tokens(recipe.template_name, special, recipe.tokenizer)
        self.contents = SourceDigests(self.files, cache, log)
        self.key = hashlib.sha256(to_canonical_json(self._collect_key_fields())).hexdigest()
        self.directory = cache / self.key[:32]

    def _collect_key_fields(self) -> dict[str, Any]:
        """Return a JSON object of everything that determines the prepared data; its SHA-256 is the cache key."""
        recipe, tokenizer = self.recipe, self.tokenizer_files
        return {
            "format": FORMAT,
            "files": [
                [file.name, file.format, sha256] for file, sha256 in zip(self.files, self.contents.sha256, strict=True)
            ],
            "sources": self._sum_by_source([1] * len(self.files)),
            "pages": collect_page_fields(recipe.extractor) if any(one.format == "warc" for one in self.files) else None,
            "text_key": recipe.text_key if any(file.format in KEYED_FORMATS for file in self.files) else None,
            "text_keys": [source.text_key for source in recipe.all_sources],
            "clean": collect_key_fields(recipe.clean, self.cache, self.log),
            "tokenizer": recipe.tokenizer if tokenizer is None else tokenizer.sha256(),
            "vocabulary": recipe.vocabulary if _trains_tokenizer(recipe) else None,
            "training_text": TRAINING_TEXT,
            "validation_fraction": recipe.validation_fraction,
            "cut": [MAX_DOCUMENT_LENGTH, FEW_DOCUMENTS, SHORT_DOCUMENT],
            "shard_tokens": recipe.shard_tokens,
            "keep_text": self.keep_text,
            **({"records": collect_record_fields(recipe, self.template[0])} if self.template else {}),
        }

    def find_manifest(self, contents: bool, log: Log | None) -> dict[str, Any] | None:
        """Return the cached manifest.json, parsed, if the prepared data are complete and undamaged, else None.

        contents: verify the SHA-256 of the shards, not only their sizes. log: receives a line for each problem (None:
        not logged).
        """
        manifest = read_json(self.directory / "manifest.json")
        if not isinstance(manifest, dict) or manifest.get("key") != self.key:
            return None
        if manifest.pop("manifest_sha256", None) != _hash_json(manifest):
            if log:
                log(f"{self.directory / 'manifest.json'}: hash mismatch or older format; preparing the data again")
            return None
        problems: list[str] = []
        for name, recorded in manifest["tokenizer"].items():
            if found := find_damage(self.directory / "tokenizer" / name, recorded, contents=True):
                problems.append(f"{self.directory / 'tokenizer' / name} {found}")
        for split in SPLITS:
            for record in manifest["splits"][split]:
                if found := Shard(**record).find_problem(self.directory / split, contents):
                    problems.append(found)
        for problem in problems:
            if log:
                log(f"{problem}: preparing it again")
        return None if problems else manifest

    def prepare_missing(self) -> dict[str, Any]:
        """Run the missing steps (cleaning, tokenizer, shards, manifest) and return the manifest as JSON. The caller
        must hold the lock of the cache directory. Raises `SourceChanged`, with all results deleted, if a source file
        changed meanwhile."""
        for partial in self.directory.rglob(f"{PARTIAL}*"):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        (self.directory / "manifest.json").unlink(missing_ok=True)
        try:
            return self._run_steps()
        except SourceChanged:
            self._delete_results()  # the directory's name is the hash of the old contents
            raise

    def _run_steps(self) -> dict[str, Any]:
        """Run the preparation steps in order, write the manifest, which marks the data as complete, and return it as
        JSON. Raises `SourceChanged` if a source file changed meanwhile.
        """
        corpus = self._clean_and_split_corpus()
        tokenizer, tokenizer_record = self._prepare_tokenizer(corpus)
        splits = {name: self._pack_split(name, corpus, tokenizer, tokenizer_record) for name in SPLITS}
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
                    zip(
                        self._sum_by_source([1] * len(self.files)),
                        self._sum_by_source(corpus.documents_by_file),
                        strict=True,
                    )
                )
            ],
            "vocabulary": tokenizer.vocabulary,
            "dtype": tokenizer.dtype.str,
            "end_token": tokenizer.end,
            "cleaning": corpus.report,
            "tokenizer": tokenizer_record,
            "splits": shards,
            "sha256": _hash_json([tokenizer_record, shards]),
        }
        closed = {**manifest, "manifest_sha256": _hash_json(manifest)}
        write_atomic(self.directory / "manifest.json", to_canonical_json(closed))
        sync_directory(self.directory)
        return manifest

    def _check_unchanged(self) -> None:
        """Raise `SourceChanged` if a source file has changed since the preparation began."""
        if file := self.contents.find_changed():
            raise SourceChanged(file)

    def _delete_results(self) -> None:
        """Delete everything in the cache directory except the lock file, on which other processes wait."""
        for path in self.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def _clean_and_split_corpus(self) -> CleanedCorpus:
        """Return the result of cleaning and splitting the corpus: the split of each document, or the rule that dropped
        it. A complete result is read from the cache; otherwise all documents are read and cleaned."""
        work, rewriter = self.directory / "cleaning", Rewriter(self.recipe.clean)
        if CleanedCorpus.read(self.directory, rewriter) is None:
            self.log(f"reading {_format_count(len(self.files), 'file')} ({self.contents.bytes / 1e6:,.1f} MB)")
            corpus = clean_and_split_corpus(self.files, self.recipe, self.log, work)
            dropped = ", ".join(f"{rule} {count}" for rule, count in corpus.dropped.items() if count)
            kept = sum(corpus.documents.values())
            because = f"; dropped: {dropped}" if dropped else ""
            self.log(f"kept {kept:,} of {_format_count(len(corpus.codes), 'document')}{because}")
            self._check_unchanged()
            corpus.write(self.directory)
        shutil.rmtree(work, ignore_errors=True)  # only a killed cleaning pass needs it, to resume
        found = CleanedCorpus.read(self.directory, rewriter)
        assert found is not None
        return found

    def _prepare_tokenizer(self, corpus: CleanedCorpus) -> tuple[TextTokenizer, dict[str, Any]]:
        """Return (tokenizer, {file name: {"bytes", "sha256"}} of its files). If the files in the cache directory are
        missing or damaged, first train the tokenizer, or copy the existing one that the recipe names. corpus: assigns
        documents to splits.
        """
        directory, record_path = self.directory / "tokenizer", self.directory / "tokenizer.record.json"
        record = read_json(record_path)
        if record is None or any(
            find_damage(directory / name, recorded, contents=True) for name, recorded in record.items()
        ):
            recipe, size = self.recipe, corpus.bytes["train"]
            if _trains_tokenizer(recipe):
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
                self._iterate_training_texts(corpus),
                self.template[0] if self.template else None,
            )
            sync_directory(directory)
            record = {
                name: {"bytes": (directory / name).stat().st_size, "sha256": hash_file(directory / name)}
                for name in FILES
            }
            write_atomic(record_path, to_canonical_json(record))
            sync_directory(self.directory)
        return load_tokenizer(directory), record

    def _iterate_training_texts(self, corpus: CleanedCorpus) -> Iterator[str]:
        """Yield the texts on which the tokenizer is trained: all texts of the training split or, if the split has more
        than 256 MiB, about 256 MiB of texts spread evenly over the split. corpus: assigns documents to splits.
        """
        share = TRAINING_TEXT / max(1, corpus.bytes["train"])
        for number, text in corpus.iterate_texts(self.files, make_reader(self.recipe, corpus.longest), "train"):
            # Multiples of the golden ratio modulo 1 are spread evenly.
            if share >= 1 or (number * 0x9E3779B97F4A7C15) % 2**64 < share * 2.0**64:
                yield text

    def _pack_split(
        self, split: str, corpus: CleanedCorpus, tokenizer: TextTokenizer, tokenizer_record: dict[str, Any]
    ) -> list[list[Shard]]:
        """Tokenize one split ("train" or "validation") and write its shards; returns their metadata, one list per data
        source.

        corpus: assigns documents to splits. tokenizer_record: {file name: {"bytes", "sha256"}} of the tokenizer's
        files.
        """
        reader, total = make_reader(self.recipe, corpus.longest), corpus.bytes[split]
        encoder = (
            TextEncoder(tokenizer)
            if self.template is None
            else ExampleEncoder.from_directory(self.directory / "tokenizer", self.template[1])
        )
        packer = ShardWriter(
            self.directory / split,
            lambda first: corpus.iterate_documents(self.files, reader, split, first),
            self._find_split_ends(corpus, split),
            encoder,
            tokenizer_record[FILES[0]]["sha256"],
            self.recipe.shard_tokens,
            keep_text=self.keep_text or split == "validation",
        )
        shards = packer.write_missing(
            limit_rate(lambda done: self.log(f"packing {split}: {done / total:.0%} of {total / 1e6:,.1f} MB of text"))
        )
        for warning in encoder.list_warnings() if isinstance(encoder, ExampleEncoder) and split == "train" else ():
            self.log(f"warning: {warning}")
        if number_of_shards := sum(map(len, shards)):
            tokens = sum(shard.tokens for by_source in shards for shard in by_source)
            documents = _format_count(corpus.documents[split], "document")
            self.log(f"packed {split}: {tokens:,} tokens of {documents} in {_format_count(number_of_shards, 'shard')}")
        return shards

    def _sum_by_source(self, counts: Sequence[int]) -> list[int]:
        """Sum `counts`, one number per source file, over the files of each data source; returns [sources]."""
        totals = [0] * len(self.recipe.all_sources)
        for file, count in zip(self.files, counts, strict=True):
            totals[file.source] += count
        return totals

    def _find_split_ends(self, corpus: CleanedCorpus, split: str) -> list[int]:
        """Return for each data source 1 + the number of its last document in `split` ("train" or "validation"),
        [sources]. Documents are numbered consecutively over all sources, so that a source without documents in the
        split gets the value of the source before it. corpus: assigns documents to splits."""
        code, ends, begin, last = SPLITS.index(split), list[int](), 0, 0
        for count in self._sum_by_source(corpus.documents_by_file):
            last = find_last(corpus.codes, code, begin, begin + count) + 1 or last
            ends.append(last)
            begin += count
        return ends


def _hash_json(value: Any) -> str:
    """Hash a JSON value in canonical form; returns hex SHA-256."""
    return hashlib.sha256(to_canonical_json(value)).hexdigest()


def _trains_tokenizer(recipe: DataRecipe) -> bool:
    """Return True if the recipe's tokenizer is of a kind that is trained on the data, such as "bpe"; False for byte and
    existing tokenizers.
    """
    return recipe.tokenizer in KINDS and KINDS[recipe.tokenizer].trained


def _find_cache_directory(recipe: DataRecipe) -> Path:
    """Return the root of the data cache: `recipe.cache` (data.cache) if set, else XDG_CACHE_HOME/meshwright, else
    ~/.cache/meshwright.
    """
    if recipe.cache:
        return Path(recipe.cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")  # XDG base directory specification
    return (Path(base) if base else Path.home() / ".cache") / "meshwright"


def _format_count(number: int, noun: str) -> str:
    """Format `number` with a noun, as "1 file" or "2,000 files". noun: the noun in the singular, "file"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
