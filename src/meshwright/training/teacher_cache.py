"""Cache of a teacher's most probable next tokens: memory-mapped files that `meshwright data teacher` writes and runs
with `distill.top_k` read.

A cache lies beside the prepared data in a directory named by the SHA-256 of its identity: data, weights of the teacher,
temperature, number of tokens. Its shards of `ROWS` sequences are written one after another, each replaced atomically,
so that a killed command continues; `manifest.json` comes last.

Shapes: B sequences, S tokens of each, K most probable tokens.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.data import PreparedData
from meshwright.data.files import find_damage, hash_file, read_json, to_canonical_json, write_atomic
from meshwright.errors import UserError, error_reason
from meshwright.model.checkpoint_files import CheckpointFiles
from meshwright.model.documents import Documents
from meshwright.model.huggingface import load_huggingface
from meshwright.recipe import Recipe
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.config_json import config_from_path
from meshwright.training.teacher_targets import top_log_probabilities

ROWS = 256
"""Sequences in one file."""
FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
COMMAND = "`meshwright data teacher RECIPE` writes it"


class TeacherCache:
    """Cache on disk of the teacher's most probable next tokens, for every token of the prepared `data`.

    recipe: settings, which name the teacher. teacher_sha256: result of `hash_teacher`; None: compute it. Attributes:
    `identity`: JSON object of everything that the content depends on (data, teacher, temperature ...); `directory`:
    directory of the files."""

    def __init__(self, recipe: Recipe, data: PreparedData, teacher_sha256: str | None = None) -> None:
        """Compute the identity, which includes the hash of the teacher's files. Raises `UserError` if these are
        damaged."""
        self._recipe, self._data = recipe, data
        assert recipe.distill.teacher is not None
        teacher = config_from_path(recipe.distill.teacher).vocabulary
        student = config_from_recipe(recipe.model, recipe.data.sequence, data.vocabulary, recipe.adapter).vocabulary
        self._vocabulary = min(teacher, student)
        self.identity: dict[str, Any] = {
            "format": FORMAT,
            "data": data.sha256,
            "sequence": data.sequence,
            "document_mask": data.document_mask,
            "teacher": teacher_sha256 or hash_teacher(recipe.distill.teacher),
            "temperature": recipe.distill.temperature,
            "top_k": recipe.distill.top_k,
        }
        if self._vocabulary < teacher:  # the rest of the teacher's token IDs is padding
            self.identity["vocabulary"] = self._vocabulary
        parent = data.directory.parent / "teachers"
        self.directory = parent / hashlib.sha256(to_canonical_json(self.identity)).hexdigest()[:32]
        self._maps: dict[Path, NDArray[Any]] = {}
        self._checked: set[Path] = set()
        self._manifest: Mapping[str, Any] = {}

    def write(self, log: Callable[[str], None]) -> dict[str, Any]:
        """Complete the cache: run the teacher on the sequences whose files are missing or damaged (found by checksums).
        Return the JSON document of `meshwright data teacher`: "directory", "sequences", "bytes", "computed" (number of
        sequences computed now), "mean_rest" (mean probability of the tokens other than the K stored ones).

        log: called with progress lines. Raises `UserError` if a file cannot be written."""
        known = self._read_manifest().get("files", {})
        model: Any = None
        files, computed, done, rest, tokens = dict[str, Any](), 0, 0, 0.0, 0
        total = sum(self._data.split(name).sequences for name in SPLITS)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for split, first, count, paths in self._shards():
                damaged = any(find_damage(path, known[path.name], True) for path in paths if path.name in known)
                if damaged or not self._shard_fits(paths, count):
                    model = self._load_teacher() if model is None else model
                    for path, values in zip(paths, self._compute(model, split, first, count), strict=True):
                        write_atomic(path, _serialize(values))
                    computed += count
                    log(f"teacher: {done + count:,} of {total:,} sequences")
                done += count
                for path in paths:
                    files[path.name] = {"sha256": hash_file(path), "bytes": path.stat().st_size}
                outside = np.exp(self._map(paths[1])[..., -1])
                rest, tokens = rest + float(outside.sum(dtype=np.float64)), tokens + outside.size
            write_atomic(self.directory / MANIFEST, to_canonical_json({"identity": self.identity, "files": files}))
        except OSError as error:
            raise UserError(f"data.cache: {self.directory} cannot be written: {error_reason(error)}") from None
        size = sum(about["bytes"] for about in files.values())
        return {
            "directory": str(self.directory), "sequences": total, "computed": computed, "bytes": size,
            "mean_rest": rest / max(1, tokens),
        }  # fmt: skip

    def open(self) -> None:
        """Open a complete cache: map its files into memory and check their names, sizes and shapes, but not their
        content. Raises `UserError` if there is no cache for this teacher, data and settings (the message names what
        differs from an existing cache), or if a file is missing or has a wrong size."""
        self._manifest = self._read_manifest()
        if not self._manifest:
            raise UserError(f"distill.top_k: the teacher's logits are not cached{self._explain_stale()}; {COMMAND}")
        for _, _, count, paths in self._shards():
            known = self._manifest["files"]
            cut = any(path.name not in known or find_damage(path, known[path.name], False) for path in paths)
            if cut or not self._shard_fits(paths, count):
                raise UserError(f"distill.top_k: {self.directory} is damaged ({paths[0].name}); {COMMAND} again")

    def read(self, split: str, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the teacher's K most probable next tokens for the sequences with the indices `rows` [B] of a split:
        token IDs [B, S, K], and log-probabilities [B, S, K + 1], of these tokens and, last, of all other tokens
        together. An index beyond the last sequence (padding) reads the last sequence. The first read of a file compares
        its checksum with the manifest's; raises `UserError` if they differ."""
        last = self._data.split(split).sequences - 1
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
        """Memory-map the array in the .npy file `path` and return it; the first time, compare its checksum with the
        manifest's. Raises `UserError` if they differ.
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
        """Return a clause that ends an error message: which settings of the most similar other cache differ from this
        one's, such as " (a cache in DIRECTORY is stale: another temperature)"; "" if there is no other cache."""
        best: list[str] | None = None
        for path in sorted(self.directory.parent.glob(f"*/{MANIFEST}")):
            found = read_json(path)
            other = found.get("identity") if isinstance(found, dict) else None
            if isinstance(other, dict):
                differing = [key for key in self.identity if other.get(key) != self.identity[key]]
                if best is None or len(differing) < len(best):
                    best = differing
        return f" (a cache in {self.directory.parent} is stale: another {', '.join(best)})" if best else ""

    def _shards(self) -> Iterator[tuple[str, int, int, list[Path]]]:
        """Yield (split, index of the first sequence, number of sequences, [file of token IDs, file of
        log-probabilities]) for each shard of the cache, which has at most `ROWS` sequences."""
        for split in SPLITS:
            rows = self._data.split(split).sequences
            for first in range(0, rows, ROWS):
                names = _file_names(split, first // ROWS)
                yield split, first, min(ROWS, rows - first), [self.directory / name for name in names]

    def _shard_fits(self, paths: list[Path], count: int) -> bool:
        """Return True if the two files `paths` of a shard (token IDs, log-probabilities) exist with the shapes and
        dtypes of `count` sequences."""
        k, sequence = self._recipe.distill.top_k, self._data.sequence
        try:
            ids, values = map(self._map, paths)
        except (OSError, ValueError, EOFError):
            return False
        if ids.dtype != self._data.tokenizer.dtype or values.dtype != np.float32:
            return False
        return [ids.shape, values.shape] == [(count, sequence, k), (count, sequence, k + 1)]

    def _load_teacher(self) -> Any:
        """Load the teacher, unsharded and in float32, on a GPU if the run uses one, else on the CPU, and return the
        model."""
        assert self._recipe.distill.teacher is not None
        device = "cuda" if self._recipe.run.device != "cpu" and torch.cuda.is_available() else "cpu"
        model, _ = load_huggingface(self._recipe.distill.teacher, torch.float32, device)
        return model.requires_grad_(False)

    @torch.no_grad()
    def _compute(self, model: Any, split: str, first: int, count: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Run the teacher `model` on `count` sequences of a split, from index `first` on. Return its K most probable
        next tokens: IDs [count, S, K], and log-probabilities [count, S, K + 1], of these tokens and, last, of all other
        tokens together."""
        given, device = self._recipe.distill, model.head_weight.device
        ids, values = [], []
        for row in range(first, first + count):
            batch = self._data.split(split).read_batch([row], padded=True)
            documents = Documents.from_ids(batch.document_ids).to(device)
            states_SH = model.hidden(torch.from_numpy(batch.tokens).to(device), documents)[0]
            cap = model.config.logit_softcap or 0.0
            weight_VH = model.head_weight[: self._vocabulary]
            found = top_log_probabilities(states_SH, weight_VH, cap, given.temperature, given.top_k)
            ids.append(found[0].cpu().numpy().astype(self._data.tokenizer.dtype))
            values.append(found[1].cpu().numpy().astype(np.float32))
        self._maps.clear()
        return np.stack(ids), np.stack(values)


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


def _serialize(values: NDArray[Any]) -> bytes:
    """Return the array `values` as the bytes of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()
