"""The catalogue of a run's checkpoints: which of them are intact, newest, best, and which are deleted."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.files import sync_directory
from meshwright.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    check_contents,
    check_sizes,
    read_manifest,
)
from meshwright.errors import UserError
from meshwright.names import list_other_steps
from meshwright.spec.adapter_json import ADAPTER_CONFIG
from meshwright.untrusted import read_json

STATE = "training/state.json"
_WANTED = "a run directory, a checkpoint in it, or a Hugging Face model directory is needed"
LAST_SAVE = ".last-saves.json"  # outcomes of the last saves, written by rank 0 for the other ranks


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """Checkpoint directory (`path`) whose manifest and file sizes were verified when it was opened. step: optimizer
    steps done. validation_loss: in nats per token, None if not measured."""

    path: Path
    step: int
    validation_loss: float | None = None

    @property
    def name(self) -> str:
        """Name of the checkpoint's directory, such as "step-000020"."""
        return self.path.name

    def __fspath__(self) -> str:
        return str(self.path)

    def state(self) -> dict[str, Any]:
        """Load the training loop's state of this checkpoint from `training/state.json`; return the JSON object (step,
        layout, recipe and more, by name). Raises `UserError` if it cannot be read."""
        return read_state(self.path)


def format_step_name(step: int) -> str:
    """Return the directory name of the checkpoint after `step` optimizer steps, such as "step-000020"."""
    return f"step-{step:06d}"


def format_partial_name(step: int) -> str:
    """Return the hidden directory name, such as ".step-000020.partial", of an unfinished checkpoint of step `step`."""
    return f".{format_step_name(step)}.partial"


def parse_step(name: str) -> int | None:
    """Return the step in a directory name such as "step-000020"; None if it is not a checkpoint's name."""
    match = re.fullmatch(r"step-(\d{6,})", name)
    return int(match[1]) if match else None


def read_state(path: Path) -> dict[str, Any]:
    """Load `training/state.json`, the state of the training loop (step, layout, recipe and more, by name), from the
    checkpoint directory `path`; return it as a dict. Raises `UserError` if it cannot be read."""
    try:
        state = read_json(path / STATE, "checkpoint_bytes")
    except (OSError, ValueError) as error:
        raise UserError(f"{path / STATE} cannot be read: {error}") from None
    if not isinstance(state, dict):
        raise UserError(f"{path / STATE} cannot be read: it holds no JSON object")
    return state


def open_checkpoint(path: Path) -> tuple[CheckpointPath, Manifest]:
    """Open the checkpoint directory `path`; return (checkpoint, manifest). Verify the size of every file, and the
    hashes of all files except the tensor files (.safetensors). Raises `DamagedCheckpoint`."""
    manifest = read_manifest(path)
    if manifest.step != parse_step(path.name) and parse_step(path.name) is not None:
        raise DamagedCheckpoint(f"its manifest is that of step {manifest.step}")
    check_sizes(path, manifest)
    return CheckpointPath(path, manifest.step, manifest.validation_loss), manifest


def open_model(path: Path) -> CheckpointPath:
    """Open the checkpoint directory `path` to load only the model: verify the hash of every file except the files in
    its subdirectory training/ (master weights, optimizer state). Raises `DamagedCheckpoint`."""
    checkpoint, manifest = open_checkpoint(path)
    check_contents(path, manifest, (name for name in manifest.files if not name.startswith("training/")))
    return checkpoint


def _open_unverified(path: Path) -> CheckpointPath:
    """Open the checkpoint directory `path` without verifying the hashes of tensor files (.safetensors); the size of
    every file and all other hashes are verified. Raises `DamagedCheckpoint`."""
    return open_checkpoint(path)[0]


def list_candidates(directory: Path) -> list[Path]:
    """List the subdirectories of `directory` with names of checkpoints ("step-000020"), highest step first. They are
    not checked for damage."""
    if not directory.is_dir():
        return []
    found = [
        (step, path) for path in directory.iterdir() if (step := parse_step(path.name)) is not None and path.is_dir()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def list_intact(directory: Path) -> list[CheckpointPath]:
    """List the checkpoints in `directory` with a valid manifest and correct file sizes, highest step first."""
    return list(_iterate_intact(directory, lambda line: None, _open_unverified))


def _iterate_intact(
    directory: Path, log: Callable[[str], None], open_it: Callable[[Path], CheckpointPath]
) -> Iterator[CheckpointPath]:
    """Open the checkpoints in `directory` one by one, highest step first, and yield the intact ones.

    log: called with one line for each damaged checkpoint. open_it: function that opens and checks a checkpoint
    directory; it raises `DamagedCheckpoint` if the checkpoint is not intact."""
    for path in list_candidates(directory):
        try:
            yield open_it(path)
        except DamagedCheckpoint as damage:
            log(f"checkpoint {path} is damaged and skipped: {damage}")


def find_newest(
    directory: Path | str,
    log: Callable[[str], None] = lambda line: None,
    open_it: Callable[[Path], CheckpointPath] = _open_unverified,
) -> CheckpointPath | None:
    """Return the intact checkpoint of the highest step in `directory` (the checkpoints/ of a run); None if no
    checkpoint is intact.

    log: called with one line for each damaged checkpoint of a higher step. open_it: function that opens and checks a
    checkpoint directory; it raises `DamagedCheckpoint` if the checkpoint is not intact."""
    return next(_iterate_intact(Path(directory), log, open_it), None)


def find_checkpoint(
    path: os.PathLike[str] | str, log: Callable[[str], None] = lambda line: None, *, check_hashes: bool = True
) -> Path:
    """Find the Hugging Face or PEFT directory that `path` refers to: `path` itself if it is a checkpoint or has a
    config.json or adapter_config.json; the newest intact checkpoint if it is a run directory or its checkpoints/.

    check_hashes: verify every byte of a checkpoint's model and tokenizer, not only file sizes. log: called with one
    line for each damaged checkpoint that is newer than the one found. Raises `UserError` if there is no checkpoint, or
    if `path` itself is a damaged checkpoint.
    """
    path, open_it = Path(path), open_model if check_hashes else _open_unverified
    if not path.is_dir():
        problem = "is a file" if path.exists() else "no such directory"
        raise UserError(f"{path}: {problem}{list_other_steps(path) or f'; {_WANTED}'}")
    if (path / MANIFEST).exists() or parse_step(path.name) is not None:
        try:
            return open_it(path).path
        except DamagedCheckpoint as damage:
            raise UserError(f"checkpoint {path} is damaged: {damage}") from None
    if (path / "config.json").is_file() or (path / ADAPTER_CONFIG).is_file():
        return path
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = find_newest(directory, log, open_it)
    if found is None:
        damaged = len(list_candidates(directory))
        problem = f"no intact checkpoint in it ({damaged} damaged)" if damaged else "no checkpoint in it"
        raise UserError(f"{path}: {problem}; {_WANTED}")
    return found.path


def find_adapter(path: os.PathLike[str] | str) -> Path:
    """Find the PEFT directory that `path` refers to: `path` itself or, if it is a run directory, its newest intact
    checkpoint. Raises `UserError` if the run has no intact checkpoint."""
    path = Path(path)
    return path if (path / ADAPTER_CONFIG).is_file() or not path.is_dir() else find_checkpoint(path)


def find_best(directory: Path | str) -> CheckpointPath | None:
    """Return the intact checkpoint in `directory` with the lowest validation loss (in a tie, the one of the highest
    step); None if no checkpoint has a validation loss."""
    return _select_best(list_intact(Path(directory)))


def _select_best(checkpoints: list[CheckpointPath]) -> CheckpointPath | None:
    """Return the checkpoint in `checkpoints` with the lowest finite validation loss (in a tie, the one of the highest
    step); None if no checkpoint has a finite loss."""

    def loss(checkpoint: CheckpointPath) -> float:
        """Return the checkpoint's validation loss, infinite if it has none or if it is NaN."""
        value = checkpoint.validation_loss
        return math.inf if value is None or math.isnan(value) else value

    validated = [checkpoint for checkpoint in checkpoints if loss(checkpoint) < math.inf]
    return min(validated, key=lambda checkpoint: (loss(checkpoint), -checkpoint.step), default=None)


def delete_old(directory: Path, keep: int, keep_best: bool, saved: int | None = None) -> None:
    """Delete intact checkpoints of `directory`, except the newest `keep` and, with `keep_best`, the one with the lowest
    validation loss. Damaged checkpoints stay.

    saved: step of the checkpoint just saved. Checkpoints of later steps are not considered: the run has resumed from an
    earlier step and will overwrite them. None: consider all.
    """
    checkpoints = [checkpoint for checkpoint in list_intact(directory) if saved is None or checkpoint.step <= saved]
    kept = {checkpoint.step for checkpoint in checkpoints[:keep]}
    best = _select_best(checkpoints)
    if keep_best and best is not None:
        kept.add(best.step)
    for checkpoint in checkpoints:
        if checkpoint.step not in kept:
            hidden = directory / f".{checkpoint.name}.deleted"
            checkpoint.path.rename(hidden)  # first, so that a half-deleted checkpoint does not look like a damaged one
            shutil.rmtree(hidden, ignore_errors=True)


def move_into_place(partial: Path, final: Path) -> None:
    """Rename the complete checkpoint directory `partial` to `final`, replacing an older (damaged) checkpoint."""
    old = final.with_name(f".{final.name}.replaced")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Clean up `directory` after interrupted saves and deletions: remove hidden directories (incomplete checkpoints,
    and old checkpoints that were being replaced or deleted) and the file of save outcomes; restore an old checkpoint
    whose replacement was not completed. Call it only while no rank saves.
    """
    for path in directory.glob(".step-*.replaced"):
        final = directory / path.name[1 : -len(".replaced")]
        if not final.exists():
            path.rename(final)
    for pattern in (".step-*.replaced", ".step-*.deleted", ".step-*.partial"):
        for path in directory.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for path in (directory / LAST_SAVE, *directory.glob(f"{LAST_SAVE}.new-*")):
        path.unlink(missing_ok=True)
