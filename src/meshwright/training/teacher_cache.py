"""Cache of a teacher's most probable next tokens: memory-mapped files that `meshwright data teacher` writes and runs
with `distill.top_k` read.

A cache is next to the prepared data in a directory named by the SHA-256 of its identity: data, their packing into
sequences, weights of the teacher, temperature, number of tokens. Its shards of `ROWS` sequences are written one after
another, each replaced atomically, so that a killed command continues; `manifest.json` comes last.
`teacher_cache_writer` computes them.

Shapes: B sequences, S tokens of each, K most probable tokens.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data import PreparedData
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
from meshwright.errors import UserError, error_reason
from meshwright.model.checkpoint_files import CheckpointFiles
from meshwright.recipe import Recipe
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.config_json import config_from_path

ROWS = 256
"""Sequences in one file."""
FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
COMMAND = "`meshwright data teacher RECIPE` writes it"


class Shard(NamedTuple):
    """Shard of a teacher cache, which has separate files: `sequences` sequences of the split `split`, from index
    `first` on."""

    split: str
    first: int
    sequences: int


class TeacherCache:
    """Cache on disk of the teacher's most probable next tokens, for every token of the prepared `data`.

    recipe: settings, which name the teacher. teacher_sha256: result of `hash_teacher`; None: compute it. Attributes:
    `identity`: JSON object of everything that the content depends on (data, teacher, temperature ...); `directory`:
    directory of the files; `vocabulary`: number of token IDs that teacher and student have in common."""

    def __init__(self, recipe: Recipe, data: PreparedData, teacher_sha256: str | None = None) -> None:
        """Compute the identity, which includes the hash of the teacher's files. Raises `UserError` if these are
        damaged."""
        self.recipe, self.data = recipe, data
        assert recipe.distill.teacher is not None
        teacher = config_from_path(recipe.distill.teacher).vocabulary
        student = config_from_recipe(recipe.model, recipe.data.sequence, data.vocabulary, recipe.adapter).vocabulary
        self.vocabulary = min(teacher, student)
        self.identity: dict[str, Any] = {
            "format": FORMAT,
            "data": data.sha256,
            "sequence": data.sequence,
            "packing": [data.split(name).rows_sha256 for name in SPLITS],
            "document_mask": data.document_mask,
            "teacher": teacher_sha256 or hash_teacher(recipe.distill.teacher),
            "temperature": recipe.distill.temperature,
            "top_k": recipe.distill.top_k,
        }
        if self.vocabulary < teacher:  # the rest of the teacher's token IDs is padding
            self.identity["vocabulary"] = self.vocabulary
        parent = data.directory.parent / "teachers"
        self.directory = parent / hashlib.sha256(to_canonical_json(self.identity)).hexdigest()[:32]
        self._maps: dict[Path, NDArray[Any]] = {}
        self._checked: set[Path] = set()
        self._manifest: Mapping[str, Any] = {}

    @contextmanager
    def lock(self, log: Callable[[str], None]) -> Iterator[None]:
        """Context manager in which this process alone writes the cache. An `OSError` inside it, such as a full disk,
        becomes `UserError`. log: called with a line if another process has to end first."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with hold_lock(self.directory / "lock", log, "writing the same teacher's cache"):
                yield
        except OSError as error:
            raise UserError(self.describe_write_error(error)) from None

    def describe_write_error(self, error: OSError) -> str:
        """Return the message for the user about an error on writing a file of the cache."""
        return f"data.cache: {self.directory} cannot be written: {error_reason(error)}"

    def find_missing_shards(self) -> list[Shard]:
        """Return the shards whose files are missing, have a wrong shape or dtype, or differ from their checksums in the
        manifest."""
        known, missing = self._read_manifest().get("files", {}), []
        for shard in self._shards():
            paths = self._paths(shard)
            damaged = any(find_damage(path, known[path.name], True) for path in paths if path.name in known)
            if damaged or not self._shard_fits(paths, shard.sequences):
                missing.append(shard)
        self._maps.clear()
        return missing

    def create_files(self, shard: Shard) -> None:
        """Create the two unfinished files of a shard, with disk space for their full size. Raises `OSError` on a full
        disk. (Writing to the memory map of a file without disk space would kill the process.)"""
        for path, width, dtype in zip(self._paths(shard), self._widths, self._dtypes, strict=True):
            shape = shard.sequences, self.data.sequence, width
            np.lib.format.open_memmap(_unfinished(path), mode="w+", dtype=dtype, shape=shape).flush()
            with _unfinished(path).open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, _unfinished(path).stat().st_size)

    def map_unfinished(self, shard: Shard) -> tuple[Any, Any]:
        """Return the unfinished files of a shard as memory maps to write to: token IDs [sequences, S, K], and
        log-probabilities [sequences, S, K + 1]. The last log-probability is the one of all other tokens together."""
        first, second = (np.lib.format.open_memmap(_unfinished(path), mode="r+") for path in self._paths(shard))
        return first, second

    def finish_files(self, shard: Shard) -> None:
        """Fsync the files of a shard, into which all ranks have written, and rename them to their final names."""
        for path in self._paths(shard):
            with _unfinished(path).open("r+b") as file:
                os.fsync(file.fileno())
            os.replace(_unfinished(path), path)
        sync_directory(self.directory)

    def write_manifest(self) -> dict[str, Any]:
        """Write the manifest of a cache with all of its files. Return four entries of the JSON document of `meshwright
        data teacher`: "directory", "sequences", "bytes", "mean_rest" (mean probability of the tokens that are not
        stored)."""
        files, rest, tokens, sequences = dict[str, Any](), 0.0, 0, 0
        for shard in self._shards():
            paths = self._paths(shard)
            for path in paths:
                files[path.name] = {"sha256": hash_file(path), "bytes": path.stat().st_size}
            outside = np.exp(self._map(paths[1])[..., -1])
            rest, tokens = rest + float(outside.sum(dtype=np.float64)), tokens + outside.size
            sequences += shard.sequences
        write_atomic(self.directory / MANIFEST, to_canonical_json({"identity": self.identity, "files": files}))
        size = sum(about["bytes"] for about in files.values())
        return {
            "directory": str(self.directory), "sequences": sequences, "bytes": size, "mean_rest": rest / max(1, tokens),
        }  # fmt: skip

    def open(self) -> None:
        """Open a complete cache: map its files into memory and check their names, sizes and shapes, but not their
        content. Raises `UserError` if there is no cache for this teacher, data and settings (the message names what
        differs from an existing cache), or if a file is missing or has a wrong size."""
        self._manifest = self._read_manifest()
        if not self._manifest:
            raise UserError(f"distill.top_k: the teacher's logits are not cached{self._explain_stale()}; {COMMAND}")
        for shard in self._shards():
            paths = self._paths(shard)
            known = self._manifest["files"]
            cut = any(path.name not in known or find_damage(path, known[path.name], False) for path in paths)
            if cut or not self._shard_fits(paths, shard.sequences):
                raise UserError(f"distill.top_k: {self.directory} is damaged ({paths[0].name}); {COMMAND} again")

    def read(self, split: str, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the teacher's K most probable next tokens for the sequences with the indices `rows` [B] of a split:
        token IDs [B, S, K], and log-probabilities [B, S, K + 1]. The last log-probability is the one of all other
        tokens together. An index beyond the last sequence (padding) reads the last sequence. The first read of a file
        compares its checksum with the manifest's; raises `UserError` if they differ."""
        last = self.data.split(split).sequences - 1
        found = []
        for row in np.minimum(rows, last).tolist():
            paths = [self.directory / name for name in _file_names(split, row // ROWS)]
            found.append([self._map_checked(path)[row % ROWS] for path in paths])
        ids, values = (np.stack(part) for part in zip(*found, strict=True))
        return ids.astype(np.int64), values

    @property
    def sha256(self) -> str:
        """SHA-256 checksum of the cache's manifest, which has the checksums of all files; stored in `state.json`."""
        return hashlib.sha256(to_canonical_json(self._manifest)).hexdigest()

    def _map_checked(self, path: Path) -> NDArray[Any]:
        """Memory-map the array in the .npy file `path` and return it. The first call for a file compares its checksum
        with the manifest's. Raises `UserError` if they differ.
        """
        if path not in self._checked:
            if (damage := find_damage(path, self._manifest["files"][path.name], True)) is not None:
                raise UserError(f"distill.top_k: {path} {damage}; {COMMAND} again")
            self._checked.add(path)
        return self._map(path)

    def _map(self, path: Path) -> NDArray[Any]:
        """Return the array in the .npy file `path`, memory-mapped; a file that is already mapped is reused."""
        if path not in self._maps:
            self._maps[path] = np.lib.format.open_memmap(path, mode="r")  # refuses pickles and archives
        return self._maps[path]

    def _read_manifest(self) -> dict[str, Any]:
        """Return the manifest of this cache, a JSON dict {"identity": ..., "files": {name: {"sha256", "bytes"}}}; {} if
        there is none or it is invalid."""
        found = read_json(self.directory / MANIFEST)
        if not isinstance(found, dict) or found.get("identity") != self.identity:
            return {}
        files = found.get("files")
        valid = isinstance(files, dict) and all(
            isinstance(about, dict) and isinstance(about.get("bytes"), int) and isinstance(about.get("sha256"), str)
            for about in files.values()
        )
        return found if valid else {}

    def _explain_stale(self) -> str:
        """Return a clause that ends an error message: which settings of the most similar other cache differ from the
        settings of this cache, such as " (a cache in DIRECTORY is stale: another temperature)"; "" if there is no other
        cache."""
        best: list[str] | None = None
        for path in sorted(self.directory.parent.glob(f"*/{MANIFEST}")):
            found = read_json(path)
            other = found.get("identity") if isinstance(found, dict) else None
            if isinstance(other, dict):
                differing = [key for key in self.identity if other.get(key) != self.identity[key]]
                if best is None or len(differing) < len(best):
                    best = differing
        return f" (a cache in {self.directory.parent} is stale: another {', '.join(best)})" if best else ""

    def _shards(self) -> Iterator[Shard]:
        """Yield the shards of the cache, which have at most `ROWS` sequences."""
        for split in SPLITS:
            rows = self.data.split(split).sequences
            for first in range(0, rows, ROWS):
                yield Shard(split, first, min(ROWS, rows - first))

    def _paths(self, shard: Shard) -> list[Path]:
        """Return [file of token IDs, file of log-probabilities] of a shard."""
        return [self.directory / name for name in _file_names(shard.split, shard.first // ROWS)]

    @property
    def _widths(self) -> tuple[int, int]:
        """Number of values that each of the two files of a shard stores for a token: (K token IDs, K + 1
        log-probabilities)."""
        return self.recipe.distill.top_k, self.recipe.distill.top_k + 1

    @property
    def _dtypes(self) -> tuple[Any, Any]:
        """Dtypes of the two files of a shard."""
        return self.data.tokenizer.dtype, np.float32

    def _shard_fits(self, paths: list[Path], count: int) -> bool:
        """Return True if the two files `paths` of a shard (token IDs, log-probabilities) exist with the shapes and
        dtypes of `count` sequences."""
        try:
            found = [self._map(path) for path in paths]
        except (OSError, ValueError, EOFError):
            return False
        if any(each.dtype != dtype for each, dtype in zip(found, self._dtypes, strict=True)):
            return False
        return [each.shape for each in found] == [(count, self.data.sequence, width) for width in self._widths]


def hash_teacher(directory: str) -> str:
    """Return the SHA-256 of the names and contents of a teacher's files, its weights and config.json, in the Hugging
    Face directory `directory`. Raises `UserError` if they cannot be read."""
    files = CheckpointFiles(directory)
    paths = sorted({files.file(name) for name in files.names} | {files.directory / "config.json"})
    try:
        digests = [[path.name, hash_file(path)] for path in paths]
    except OSError as error:
        raise UserError(f"distill.teacher: {directory} cannot be read: {error_reason(error)}") from None
    return hashlib.sha256(to_canonical_json(digests)).hexdigest()


def _file_names(split: str, shard: int) -> tuple[str, str]:
    """Return the names of the two files (token IDs, log-probabilities) of shard number `shard`, from 0, of a split."""
    return f"{split}-{shard:05d}-ids.npy", f"{split}-{shard:05d}-log-probabilities.npy"


def _unfinished(path: Path) -> Path:
    """Return the temporary path under which the cache file `path` is written until it is complete."""
    return path.with_name(PARTIAL + path.name)
