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
from meshwright.training.teacher_targets import top_log_probabilities

ROWS = 256
"""Sequences in one file."""
FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
COMMAND = "`meshwright data teacher RECIPE` writes it"


class TeacherCache:
    """Cache on disk of the teacher's most probable next tokens, for all sequences of the prepared `data`. recipe: names
    the teacher and the settings. Attributes: `identity`: everything that determines the content, as JSON; `directory`:
    directory of the files."""

    def __init__(self, recipe: Recipe, data: PreparedData) -> None:
        """Compute the identity, which includes the hashes of the teacher's files. Raises `UserError` if these are
        damaged."""
        self._recipe, self._data = recipe, data
        assert recipe.distill.teacher is not None
        files = CheckpointFiles(recipe.distill.teacher)
        paths = sorted({files.file(name) for name in files.names} | {files.directory / "config.json"})
        digest = hashlib.sha256(to_canonical_json([[path.name, hash_file(path)] for path in paths]))
        self.identity: dict[str, Any] = {
            "format": FORMAT,
            "data": data.sha256,
            "sequence": data.sequence,
            "document_mask": data.document_mask,
            "teacher": digest.hexdigest(),
            "temperature": recipe.distill.temperature,
            "top_k": recipe.distill.top_k,
        }
        parent = data.directory.parent / "teachers"
        self.directory = parent / hashlib.sha256(to_canonical_json(self.identity)).hexdigest()[:32]
        self._maps: dict[Path, NDArray[Any]] = {}
        self._manifest: Mapping[str, Any] = {}

    def write(self, log: Callable[[str], None]) -> dict[str, Any]:
        """Compute what is missing and return the JSON document of `meshwright data teacher`: "directory", "sequences",
        "bytes", "computed" (sequences computed now), "mean_rest" (mean probability outside the K tokens). Existing
        files are checked byte by byte. log: receives progress lines. Raises `UserError` if nothing can be written."""
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
        """Map the files of a complete cache. Raises `UserError`, one line, if there is none for this teacher, data and
        settings (it names what differs from an existing one) or a file is missing or cut."""
        self._manifest = self._read_manifest()
        if not self._manifest:
            raise UserError(f"distill.top_k: the teacher's logits are not cached{self._explain_stale()}; {COMMAND}")
        for _, _, count, paths in self._shards():
            known = self._manifest["files"]
            cut = any(path.name not in known or find_damage(path, known[path.name], False) for path in paths)
            if cut or not self._shard_fits(paths, count):
                raise UserError(f"distill.top_k: {self.directory} is damaged ({paths[0].name}); {COMMAND} again")

    def read(self, split: str, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return token IDs [B, S, K] and log-probabilities [B, S, K + 1], the last of all other tokens, of the
        sequences with the indices `rows` [B] of a split. Indices beyond the last give those of the last."""
        last = self._data.split(split).sequences - 1
        found = []
        for row in np.minimum(rows, last).tolist():
            names = _file_names(split, row // ROWS)
            found.append([self._map(self.directory / name)[row % ROWS] for name in names])
        ids, values = (np.stack(part) for part in zip(*found, strict=True))
        return ids.astype(np.int64), values

    @property
    def sha256(self) -> str:
        """Checksum of all files, for `state.json`."""
        return hashlib.sha256(to_canonical_json(self._manifest)).hexdigest()

    def _map(self, path: Path) -> NDArray[Any]:
        """Map the .npy file `path` into memory; return it as an array."""
        if path not in self._maps:
            self._maps[path] = np.lib.format.open_memmap(path, mode="r")  # refuses pickles and archives
        return self._maps[path]

    def _read_manifest(self) -> dict[str, Any]:
        """Return the manifest of this cache (JSON with identity, shapes and checksums); {} if there is none."""
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
        """Return the end of an error message, which says how the most similar cache of the same data differs from this
        one; empty if there is no other cache."""
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
        """Yield (split, index of its first sequence, number of sequences, its two files) of each shard."""
        for split in SPLITS:
            rows = self._data.split(split).sequences
            for first in range(0, rows, ROWS):
                names = _file_names(split, first // ROWS)
                yield split, first, min(ROWS, rows - first), [self.directory / name for name in names]

    def _shard_fits(self, paths: list[Path], count: int) -> bool:
        """Return True if the two files of a shard of `count` sequences exist with the right shapes and dtypes."""
        k, sequence = self._recipe.distill.top_k, self._data.sequence
        try:
            ids, values = map(self._map, paths)
        except (OSError, ValueError, EOFError):
            return False
        if ids.dtype != self._data.tokenizer.dtype or values.dtype != np.float32:
            return False
        return [ids.shape, values.shape] == [(count, sequence, k), (count, sequence, k + 1)]

    def _load_teacher(self) -> Any:
        """Load the teacher on one device, in float32."""
        assert self._recipe.distill.teacher is not None
        device = "cuda" if self._recipe.run.device != "cpu" and torch.cuda.is_available() else "cpu"
        model, _ = load_huggingface(self._recipe.distill.teacher, torch.float32, device)
        return model.requires_grad_(False)

    @torch.no_grad()
    def _compute(self, model: Any, split: str, first: int, count: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Run the teacher `model` on `count` sequences of a split, from index `first` on; return token IDs [count, S,
        K] and log-probabilities [count, S, K + 1], as `read` does."""
        given, device = self._recipe.distill, model.head_weight.device
        ids, values = [], []
        for row in range(first, first + count):
            batch = self._data.split(split).read_batch([row], padded=True)
            documents = Documents.from_ids(batch.document_ids).to(device)
            states_SH = model.hidden(torch.from_numpy(batch.tokens).to(device), documents)[0]
            cap = model.config.logit_softcap or 0.0
            found = top_log_probabilities(states_SH, model.head_weight, cap, given.temperature, given.top_k)
            ids.append(found[0].cpu().numpy().astype(self._data.tokenizer.dtype))
            values.append(found[1].cpu().numpy().astype(np.float32))
        self._maps.clear()
        return np.stack(ids), np.stack(values)


def _file_names(split: str, shard: int) -> tuple[str, str]:
    """Return the names of the files of a shard: token IDs and log-probabilities."""
    return f"{split}-{shard:05d}-ids.npy", f"{split}-{shard:05d}-log-probabilities.npy"


def _serialize(values: NDArray[Any]) -> bytes:
    """Return an array as the bytes of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()
