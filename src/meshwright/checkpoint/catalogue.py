"""The checkpoints of a run: which are whole, which is the newest, which is the best, which may go."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.files import sync_directory
from meshwright.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    Manifest,
    check_contents,
    check_sizes,
    read_manifest,
)
from meshwright.errors import UserError
from meshwright.untrusted import read_json

STATE = "training/state.json"
_WANTED = "a run directory, a checkpoint in it, or a Hugging Face model directory is needed"
LAST_SAVE = ".last-saves.json"  # how the last saves ended: what rank 0 tells the other ranks


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """A checkpoint directory that was whole when it was looked at."""

    path: Path
    step: int
    validation_loss: float | None = None

    @property
    def name(self) -> str:
        return self.path.name

    def __fspath__(self) -> str:
        return str(self.path)

    def state(self) -> dict[str, Any]:
        """What the training loop left beside the tensors (step, layout, recipe ...)."""
        return read_state(self.path)


def step_name(step: int) -> str:
    """The directory of the checkpoint after `step` steps."""
    return f"step-{step:06d}"


def partial_name(step: int) -> str:
    """Its name until it is complete."""
    return f".{step_name(step)}.partial"


def step_of(name: str) -> int | None:
    """The step that a directory's name says, None if it is no checkpoint's name."""
    match = re.fullmatch(r"step-(\d{6,})", name)
    return int(match[1]) if match else None


def read_state(path: Path) -> dict[str, Any]:
    """`training/state.json` of a checkpoint."""
    try:
        state = read_json(path / STATE, "checkpoint_bytes")
    except (OSError, ValueError) as error:
        raise UserError(f"{path / STATE} cannot be read: {error}") from None
    if not isinstance(state, dict):
        raise UserError(f"{path / STATE} cannot be read: it holds no JSON object")
    return state


def open_checkpoint(path: Path) -> tuple[CheckpointPath, Manifest]:
    """The checkpoint at `path`, its manifest read, its files present in full length. Raises `Damaged`."""
    manifest = read_manifest(path)
    if manifest.step != step_of(path.name) and step_of(path.name) is not None:
        raise Damaged(f"its manifest is that of step {manifest.step}")
    check_sizes(path, manifest)
    return CheckpointPath(path, manifest.step, manifest.validation_loss), manifest


def open_model(path: Path) -> CheckpointPath:
    """The checkpoint at `path` for who reads the model alone: every byte outside training/ is checked. Raises
    `Damaged`."""
    checkpoint, manifest = open_checkpoint(path)
    check_contents(path, manifest, (name for name in manifest.files if not name.startswith("training/")))
    return checkpoint


def _open_unread(path: Path) -> CheckpointPath:
    return open_checkpoint(path)[0]


def candidates(directory: Path) -> list[Path]:
    """Every directory named like a checkpoint, whole or not, the newest first."""
    if not directory.is_dir():
        return []
    found = [(step, path) for path in directory.iterdir() if (step := step_of(path.name)) is not None and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def whole(directory: Path, log: Callable[[str], None] = lambda line: None) -> list[CheckpointPath]:
    """The whole checkpoints in `directory`, the newest first; `log` gets a line for each that is passed over."""
    checkpoints = []
    for path in candidates(directory):
        try:
            checkpoints.append(open_checkpoint(path)[0])
        except Damaged as damage:
            log(f"checkpoint {path} is damaged and passed over: {damage}")
    return checkpoints


def newest(
    directory: Path | str,
    log: Callable[[str], None] = lambda line: None,
    open_it: Callable[[Path], CheckpointPath] = _open_unread,
) -> CheckpointPath | None:
    """The newest whole checkpoint in `directory`; `log` gets a line for each newer one that is passed over. `open_it`
    raises `Damaged` for one that is not whole."""
    for path in candidates(Path(directory)):
        try:
            return open_it(path)
        except Damaged as damage:
            log(f"checkpoint {path} is damaged and passed over: {damage}")
    return None


def find_checkpoint(
    path: os.PathLike[str] | str, log: Callable[[str], None] = lambda line: None, *, check_hashes: bool = True
) -> Path:
    """The Hugging Face directory that somebody means by `path`: a run directory or its checkpoints/ (the newest whole
    checkpoint, `log` gets a line for each newer one that is passed over), a checkpoint, or any directory with a
    config.json. Of a checkpoint every byte of model and tokenizer is checked against its hash; without `check_hashes`
    only that its files are there in full length. `UserError` when there is none, or a checkpoint named by itself is
    damaged."""
    path, open_it = Path(path), open_model if check_hashes else _open_unread
    if not path.is_dir():
        raise UserError(f"{path}: {'is a file' if path.exists() else 'no such directory'}; {_WANTED}")
    if (path / MANIFEST).exists() or step_of(path.name) is not None:
        try:
            return open_it(path).path
        except Damaged as damage:
            raise UserError(f"checkpoint {path} is damaged: {damage}") from None
    if (path / "config.json").is_file():
        return path
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = newest(directory, log, open_it)
    if found is None:
        damaged = f"none of the {len(candidates(directory))} there is whole" if candidates(directory) else ""
        raise UserError(f"{path}: no checkpoint in it{f', {damaged}' if damaged else ''}; {_WANTED}")
    return found.path


def best(directory: Path | str) -> CheckpointPath | None:
    """The whole checkpoint with the lowest validation loss (the newer one of equals); None where none was validated."""
    return _best(whole(Path(directory)))


def _best(checkpoints: list[CheckpointPath]) -> CheckpointPath | None:
    def loss(checkpoint: CheckpointPath) -> float:
        value = checkpoint.validation_loss
        return math.inf if value is None or math.isnan(value) else value

    validated = [checkpoint for checkpoint in checkpoints if loss(checkpoint) < math.inf]
    return min(validated, key=lambda checkpoint: (loss(checkpoint), -checkpoint.step), default=None)


def retain(directory: Path, keep: int, keep_best: bool, saved: int | None = None) -> None:
    """Delete all whole checkpoints but the newest `keep` and, with `keep_best`, the best. Others are left alone.

    `saved`: the step that was just saved. Later ones are left alone and do not count: the run passed them over (a bit
    is wrong in them, which only reading shows), and they must not cost it what it has just written.
    """
    checkpoints = [checkpoint for checkpoint in whole(directory) if saved is None or checkpoint.step <= saved]
    spared = {checkpoint.step for checkpoint in checkpoints[:keep]}
    favourite = _best(checkpoints)
    if keep_best and favourite is not None:
        spared.add(favourite.step)
    for checkpoint in checkpoints:
        if checkpoint.step not in spared:
            doomed = directory / f".{checkpoint.name}.deleted"
            checkpoint.path.rename(doomed)  # first: a half-deleted checkpoint must not look like a damaged one
            shutil.rmtree(doomed, ignore_errors=True)


def put_in_place(partial: Path, final: Path) -> None:
    """Give a complete checkpoint its name; one that had it before (a damaged one, trained past again) makes way."""
    old = final.with_name(f".{final.name}.replaced")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Remove what killed saves left in `directory`. Only while nobody saves."""
    for path in directory.glob(".step-*.replaced"):
        final = directory / path.name[1 : -len(".replaced")]
        if not final.exists():
            path.rename(final)
    for pattern in (".step-*.replaced", ".step-*.deleted", ".step-*.partial"):
        for path in directory.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for path in (directory / LAST_SAVE, *directory.glob(f"{LAST_SAVE}.new-*")):
        path.unlink(missing_ok=True)
