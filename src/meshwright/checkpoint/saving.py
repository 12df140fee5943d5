"""One save on one rank. It runs beside training, so ranks meet through marker files in the hidden directory, never
through collective calls:

    rank 0 makes the directory -> `.begin` -> all write -> `.written-R` -> all hash -> `.hashed-R` -> rank 0 writes the
    manifest, renames the directory, deletes old checkpoints and says in `.last-save.json` how it ended.

Whoever cannot go on leaves `.failed-R`; rank 0 then removes the directory.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import catalogue, slices
from meshwright.checkpoint.files import in_units, opened, sync_directory, write_at, write_file
from meshwright.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    block_count,
    hash_file,
    hash_part,
    hash_tasks,
)
from meshwright.checkpoint.meeting import Meeting
from meshwright.checkpoint.model_files import DTYPE_CODES, ModelFiles, safetensors_header, write_slice
from meshwright.checkpoint.slices import Slice, slice_file, tensor_name
from meshwright.checkpoint.snapshot import Snapshot
from meshwright.parallel.flat_buffers import Columns
from meshwright.spec.parameters import ParameterTable

_CAST_ELEMENTS = 4 * 2**20


class SaveFailed(Exception):
    """This rank's part of a save failed; the text is the line to show."""


class GivenUp(Exception):
    """The save ended because somebody else, or the training loop, gave it up; the text says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """What all saves of a run share."""

    directory: Path
    rank: int
    ranks: int
    table: ParameterTable
    files: ModelFiles
    small_files: Mapping[str, bytes]  # configuration and tokenizer, the same in every checkpoint
    dtype: str
    keep: int
    keep_best: bool
    timeout_seconds: float
    log: Callable[[str], None]
    outcomes: dict[str, str] = field(default_factory=dict)  # rank 0: how each save so far ended


class Save:
    """A save under way. `run` returns when the checkpoint is complete, on every rank."""

    def __init__(
        self, target: Target, attempt: str, step: int, snapshot: Snapshot, state: bytes, validation_loss: float | None
    ) -> None:
        self.target, self.step = target, step
        self.snapshot, self.state, self.validation_loss = snapshot, state, validation_loss
        self.cancelled = threading.Event()
        self.partial = target.directory / catalogue.partial_name(step)
        self.final = target.directory / catalogue.step_name(step)
        self.meeting = Meeting(self.partial, attempt, target.rank, target.ranks, target.outcomes)
        self._writing = ""  # the file at work, for the error line

    def run(self) -> None:
        """Raises `SaveFailed` or `GivenUp`; in both cases nothing is left behind once every rank has stopped."""
        try:
            self._begin()
            self._write()
            self._hash()
            self._finish()
        except OSError as error:
            # Rank 0 clears away from the inside out: the first directory to go may not be the outermost.
            gone = error.errno in (errno.ENOENT, errno.ESTALE) and not (self.partial / "training").exists()
            if gone and self.target.rank:
                raise GivenUp(self._reason_of_rank_0()) from None
            line = self._line(error)
            self._clean_up(line)
            raise SaveFailed(line) from None
        except (SaveFailed, GivenUp) as stop:
            self._clean_up(str(stop))
            raise

    # --- the four parts

    def _begin(self) -> None:
        target = self.target
        if target.rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)
            self._check_space()
            (self.partial / "training").mkdir(parents=True)
            self.meeting.begin()
            return
        self._wait_for(self.meeting.begun, {0}, "begun to write")

    def _write(self) -> None:
        self.snapshot.wait()
        own = self._write_slices()
        self._write_model()
        if self.target.rank == 0:
            self._write_small_files()
            sync_directory(self.partial / "training")
        sync_directory(self.partial)
        self._mark("written", [dataclasses.astuple(part) for part in own])
        self._wait_for(lambda: self.meeting.marked("written"), set(range(self.target.ranks)), "written its part")

    def _write_slices(self) -> list[Slice]:
        file = slice_file(self.target.rank, self.target.ranks)
        slices = self.snapshot.slices
        codes = [DTYPE_CODES[str(item.tensor.dtype).removeprefix("torch.")] for item in slices]
        names = [tensor_name(item.kind, item.name, item.start, item.stop, item.columns) for item in slices]
        header, offsets, _ = safetensors_header(
            (name, code, (item.stop - item.start,)) for name, code, item in zip(names, codes, slices, strict=True)
        )
        self._writing = file
        with opened(self.partial / file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            position = 0
            for data in (memoryview(header), *map(_bytes, self.snapshot.buffers)):
                write_at(descriptor, data, position, self._keep_going)
                position += len(data)
            os.fsync(descriptor)
        return [
            Slice(item.kind, item.name, item.start, item.stop, code, file, offsets[name], item.columns)
            for item, code, name in zip(slices, codes, names, strict=True)
        ]

    def _write_model(self) -> None:
        descriptors: dict[str, int] = {}

        def write(file: str, data: memoryview, offset: int) -> None:
            self._writing = file
            if file not in descriptors:
                descriptors[file] = os.open(self.partial / file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            write_at(descriptors[file], data, offset, self._keep_going)

        try:
            if self.target.rank == 0:
                for model_file in self.target.files.files:
                    write(model_file.name, memoryview(model_file.header), 0)
                    os.ftruncate(descriptors[model_file.name], model_file.size)
            for item in self.snapshot.slices:
                if item.kind == "master":
                    place = self.target.files.places[item.name]
                    dtype = getattr(torch, place.row.kept or self.target.dtype)
                    for start, part in _cut(item.tensor, place.row.transposed):
                        values = part.to(dtype)
                        raw = values.view(torch.int16) if dtype == torch.bfloat16 else values
                        write_slice(place, item.start + start, raw.numpy(), write, item.columns)
            for file, descriptor in descriptors.items():
                self._writing = file
                os.fsync(descriptor)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)

    def _write_small_files(self) -> None:
        for name, data in (*self.target.small_files.items(), (catalogue.STATE, self.state)):
            self._writing = name
            write_file(self.partial / name, data)

    def _hash(self) -> None:
        target = self.target
        records: dict[str, Any] = {}
        own = hash_file(self.partial / slice_file(target.rank, target.ranks), self._keep_going)
        records[slice_file(target.rank, target.ranks)] = [own.size, own.sha256, dict(enumerate(own.blocks))]
        for name, (whole, blocks) in hash_tasks(target.files.sizes, target.ranks)[target.rank].items():
            sha256, found = hash_part(self.partial / name, whole, blocks, self._keep_going)
            records[name] = [target.files.sizes[name], sha256, found]
        self._mark("hashed", records)
        if target.rank == 0:
            self._wait_for(lambda: self.meeting.marked("hashed"), set(range(target.ranks)), "hashed its part")

    def _finish(self) -> None:
        target = self.target
        if target.rank:
            self._wait_for_the_end()
            return
        everything = [
            Slice(kind, name, start, stop, code, file, offset, Columns(*columns) if columns else None)
            for rank in range(target.ranks)
            for kind, name, start, stop, code, file, offset, columns in self.meeting.read("written", rank)
        ]
        slices.check_coverage(target.table, everything)
        self._writing = slices.INDEX
        write_file(self.partial / slices.INDEX, slices.write_index(everything))
        manifest = Manifest(self.step, self.validation_loss, self._records())
        for marker in [path for path in self.partial.iterdir() if path.name.startswith(".")]:
            marker.unlink()
        self._writing = MANIFEST
        sync_directory(self.partial / "training")
        write_file(self.partial / MANIFEST, manifest.to_json())
        sync_directory(self.partial)
        self._keep_going()
        catalogue.put_in_place(self.partial, self.final)
        # The new checkpoint stands: what fails from here on must not be reported as a failed save.
        try:
            catalogue.retain(target.directory, target.keep, target.keep_best, self.step)
        except OSError as error:
            target.log(f"an old checkpoint in {target.directory} could not be deleted: {error.strerror}")
        with suppress(OSError):
            self.meeting.tell("done")

    def _records(self) -> dict[str, FileRecord]:
        sizes: dict[str, int] = {}
        whole: dict[str, str] = {}
        blocks: dict[str, dict[int, str]] = {}
        for rank in range(self.target.ranks):
            for name, (size, sha256, found) in self.meeting.read("hashed", rank).items():
                sizes[name] = size
                if sha256 is not None:
                    whole[name] = sha256
                blocks.setdefault(name, {}).update({int(index): digest for index, digest in found.items()})
        records = {
            name: FileRecord(size, whole[name], tuple(blocks[name][index] for index in range(block_count(size))))
            for name, size in sizes.items()
        }
        for name in (*self.target.small_files, catalogue.STATE, slices.INDEX):
            records[name] = hash_file(self.partial / name)
        return records

    # --- meeting the other ranks

    def _mark(self, what: str, content: Any) -> None:
        self._writing = self.meeting.name(what)
        self.meeting.mark(what, content)

    def _wait_for(self, there: Callable[[], set[int]], all_of_them: Iterable[int], what: str) -> None:
        deadline = time.monotonic() + self.target.timeout_seconds
        pause = 0.002
        while missing := set(all_of_them) - there():
            self._keep_going()
            self._check_failures()
            if time.monotonic() > deadline:
                others = f" (nor have {len(missing) - 1} others)" if len(missing) > 1 else ""
                raise SaveFailed(
                    f"checkpoint of step {self.step} given up: rank {min(missing)} has not {what} after "
                    f"{self.target.timeout_seconds:.0f} s{others}; {self._newest()}"
                )
            self.cancelled.wait(pause)
            pause = min(2 * pause, 0.1)
        self._keep_going()

    def _wait_for_the_end(self) -> None:
        """Ranks other than 0: until rank 0 has said how it ended."""
        self._wait_for(lambda: {0} if self.meeting.outcome() is not None else set(), {0}, "completed it")
        if (outcome := self.meeting.outcome()) != "done":
            raise GivenUp(outcome or "")

    def _keep_going(self) -> None:
        if self.cancelled.is_set():
            raise GivenUp(f"checkpoint of step {self.step} given up by the training loop")

    def _check_failures(self) -> None:
        reason = self._others_reason()
        if reason is not None:
            raise GivenUp(reason)

    def _others_reason(self) -> str | None:
        """What another rank says about why it cannot go on."""
        if failure := self.meeting.failure():
            rank, why = failure
            return why or self._unexplained(rank)
        outcome = self.meeting.outcome()
        return None if outcome in (None, "done") else outcome

    def _reason_of_rank_0(self) -> str:
        """Why rank 0 has removed the directory; it says so just after."""
        for _ in range(100):
            if (outcome := self.meeting.outcome()) is not None:
                return outcome
            self.cancelled.wait(0.02)
        return self._unexplained(0)

    # --- when it cannot be done

    def _clean_up(self, line: str) -> None:
        """Leave no trace of this rank's part; rank 0 removes everything, also what others are still making."""
        if self.target.rank:
            with suppress(OSError):  # rank 0 was faster, or the disk takes nothing: the training loop tells the others
                (self.partial / slice_file(self.target.rank, self.target.ranks)).unlink(missing_ok=True)
            self.meeting.fail(line)
            return
        for _ in range(100):
            shutil.rmtree(self.partial, ignore_errors=True)
            if not self.partial.exists():
                break
            time.sleep(0.02)  # another rank was just making a file in it
        for _ in range(100):
            with suppress(OSError):
                self.meeting.tell(line)
                return
            self.cancelled.wait(0.05)  # a full disk has room again when the others have closed their files

    def _check_space(self) -> None:
        """Refuse before the first byte what the disk cannot take: `SaveFailed`."""
        self.target.directory.mkdir(parents=True, exist_ok=True)
        need, free = self._needed_bytes(), self._free_bytes()
        if free is not None and free < need:
            raise SaveFailed(
                f"checkpoint of step {self.step} not written: no space left in {self.target.directory}: it needs "
                f"{in_units(need)}, {in_units(free)} are free; {self._newest()}"
            )

    def _needed_bytes(self) -> int:
        """The tensors of all ranks: every kind of state holds every element of the table once."""
        widths = {item.kind: item.tensor.element_size() for item in self.snapshot.slices}
        return sum(self.target.files.sizes.values()) + self.target.table.numel * sum(widths.values())

    def _free_bytes(self) -> int | None:
        try:
            disk = os.statvfs(self.target.directory)
        except OSError:
            return None
        return disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) if disk.f_blocks else None

    def _line(self, error: OSError) -> str:
        where = f"rank {self.target.rank} could not write {self.partial / self._writing}"
        space = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = self._free_bytes()
            space = f" (it needs {in_units(self._needed_bytes())}" + (
                f", {in_units(free)} are free)" if free is not None else ")"
            )
        reason = (error.strerror or str(error)).lower()
        return f"checkpoint of step {self.step} not written: {where}: {reason}{space}; {self._newest()}"

    def _newest(self) -> str:
        newest = catalogue.newest(self.target.directory)
        return f"the newest whole checkpoint is {newest.name}" if newest else "there is no whole checkpoint yet"

    def _unexplained(self, rank: int) -> str:
        return f"checkpoint of step {self.step} not written: rank {rank} could not go on; {self._newest()}"


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def _cut(tensor: torch.Tensor, whole: bool) -> Iterable[tuple[int, torch.Tensor]]:
    """A slice in parts whose converted copies are small; a transposed one whole: its parts would be many short runs."""
    step = tensor.numel() if whole else _CAST_ELEMENTS
    return ((start, tensor[start : start + step]) for start in range(0, tensor.numel(), max(1, step)))
