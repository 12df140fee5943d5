"""JSON report on a model's files: shards, tensors with first values and statistics, and placement on ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.inspection.files import TensorEntry, TensorFiles
from meshwright.inspection.placement import describe_placement
from meshwright.inspection.statistics import compute_statistics, read_first_values
from meshwright.names import nearest
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_path
from meshwright.spec.parameters import parameter_table


def inspect_model(
    path: Path | str,
    *,
    names: Sequence[str] = (),
    layout: str | None = None,
    sequence: int = 2048,
    values: int | None = 4,
    progress: Callable[[int, int], None] = lambda done, total: None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return a JSON report on the files, tensors and values of the model at `path`: a run directory (its newest
    complete checkpoint), a checkpoint, a Hugging Face directory, an index of shards, a `.safetensors` or a `.bin` file.

    names: globs that select the tensors to describe (totals are over all tensors). layout: such as "dp8 zero3"; adds
    the key "placement", the layers and bytes that each rank of this layout would hold (see `describe_placement`).
    sequence: tokens of a sequence, for the placement. values: number of first values to report of each tensor, besides
    statistics of all its values; None: report neither, and read only headers. progress: called with (bytes read, bytes
    to read). log: receives lines about skipped checkpoints. Raises `UserError` for no model, a truncated or missing
    file, an unknown dtype, or globs that match no tensor.
    """
    path = _resolve_model_directory(Path(path), log)
    files = TensorFiles(path)
    chosen = [entry for entry in files.entries if _matches_globs(entry.name, names)]
    if names and not chosen:
        close = nearest(names[0], [entry.name for entry in files.entries])
        first = files.entries[0].name if files.entries else "none"
        hint = f'; did you mean "{close}"?' if close else f"; the first is {first}"
        raise UserError(f"--name {' '.join(names)}: no tensor of {path} has this name{hint}")
    total, done = sum(entry.bytes for entry in chosen), 0
    tensors = []
    for entry in chosen:
        tensors.append(_describe_tensor(files, entry, values))
        done += entry.bytes
        progress(done, total)
    held = Counter(entry.file for entry in files.entries)
    types: Counter[str] = Counter()
    for entry in files.entries:
        types[entry.dtype] += entry.bytes
    config, why_not = _read_config(files.directory)
    document: dict[str, Any] = {
        "path": str(path),
        "files": [{"file": file.name, "tensors": held[file], "bytes": file.stat().st_size} for file in files.files],
        "elements": sum(entry.numel for entry in files.entries),
        "bytes": sum(entry.bytes for entry in files.entries),
        "bytes_by_type": dict(types.most_common()),
        "tensors_in_all": len(files.entries),
        "tensors": tensors,
        "not_in_index": files.unindexed,
        "not_finite": {tensor["name"]: count for tensor in tensors if (count := _count_not_finite(tensor))},
        "family": config.family if config else None,
        "config_problem": why_not if config is None and (files.directory / "config.json").is_file() else None,
        "parameters_of_config": parameter_table(config).numel if config else None,
    }
    if layout is not None:
        if config is None:
            raise UserError(f"--layout {layout}: placement needs the architecture, but {why_not}")
        most = types.most_common(1)[0][0] if types else "F32"
        document["placement"] = describe_placement(config, layout, most, min(sequence, config.max_positions))
    return document


def _resolve_model_directory(path: Path, log: Callable[[str], None]) -> Path:
    """Return the newest complete checkpoint if `path` is a run directory; otherwise return `path` unchanged. A
    checkpoint is itself a model directory. Raises `UserError` for a damaged checkpoint, or a run directory without a
    complete one. log: called with a line about each skipped checkpoint."""
    if path.is_dir() and ((path / "checkpoints").is_dir() or (path / "manifest.json").is_file()):
        from meshwright.checkpoint.catalogue import find_checkpoint

        return find_checkpoint(path, log, check_hashes=False)
    return path


def _matches_globs(name: str, globs: Sequence[str]) -> bool:
    """Return True if a tensor name matches any of the patterns `globs`, or if there are no patterns."""
    return not globs or any(fnmatchcase(name, glob) for glob in globs)


def _describe_tensor(files: TensorFiles, entry: TensorEntry, values: int | None) -> dict[str, Any]:
    """Return the report on one tensor as a JSON dict: {"name", "file", "type", "shape", "elements", "bytes"} and,
    unless `values` is None, "first" (its first `values` values) and "statistics".

    files: tensors of the model. entry: the tensor.
    """
    found: dict[str, Any] = {
        "name": entry.name,
        "file": entry.file.name,
        "type": entry.dtype,
        "shape": list(entry.shape),
        "elements": entry.numel,
        "bytes": entry.bytes,
    }
    if values is not None:
        try:
            raw = files.map_bytes(entry)
            found["first"] = read_first_values(raw, entry.dtype, values)
            found["statistics"] = compute_statistics(raw, entry.dtype)
        except (OSError, ValueError) as error:  # a file that shrinks while it is read
            raise UserError(f"{entry.file}: tensor {entry.name} cannot be read: {error}") from None
    return found


def _count_not_finite(tensor: Mapping[str, Any]) -> int:
    """Return the number of NaN and infinite values of a tensor; 0 if its values were not read. tensor: the tensor's
    report, from `_describe_tensor`.
    """
    found = tensor.get("statistics") or {"nan": 0, "infinite": 0}
    return int(found["nan"] + found["infinite"])


def _read_config(directory: Path) -> tuple[ModelConfig | None, str]:
    """Read config.json in a model directory; return (model configuration, ""), or (None, reason) if it is missing or
    not usable."""
    if not (directory / "config.json").is_file():
        return None, f"{directory} has no config.json"
    try:
        return config_from_path(directory), ""
    except UserError as error:
        return None, str(error)
