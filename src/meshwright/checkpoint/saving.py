"""One checkpoint save on one rank, concurrent with training. Ranks synchronize through marker files, not
collectives:

    rank 0 makes the directory -> `.begin` -> all write -> `.written-R` -> all hash -> `.hashed-R` -> rank 0 writes the
    manifest, renames the directory, deletes old checkpoints and records the outcome in `.last-saves.json`.

A rank that fails leaves `.failed-R`; rank 0 then removes the directory.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch

from meshwright.checkpoint import catalogue, slices
from meshwright.checkpoint.files import open_descriptor, sync_directory, write_at, write_file
from meshwright.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    count_blocks,
    distribute_hashing,
    hash_blocks,
    hash_file,
)
from meshwright.checkpoint.model_files import DTYPE_CODES, make_safetensors_header, write_slice
from meshwright.checkpoint.save_markers import SaveMarkers
from meshwright.checkpoint.settings import SaveTarget
from meshwright.checkpoint.slices import StoredSlice, format_slice_file_name, format_slice_tensor_name
from meshwright.checkpoint.snapshot import Snapshot
from meshwright.collectives.quantities import format_bytes
from meshwright.errors import error_reason
from meshwright.parallel.flat_buffers import Columns

_CAST_ELEMENTS = 4 * 2**20


class SaveFailed(Exception):
    """Error: a checkpoint save failed on this rank. The message, for the user, gives the reason."""


class SaveCancelled(Exception):
    """Error: a checkpoint save was cancelled on this rank, because it failed on another rank or the training loop
    cancelled it. The message says which."""


class Save:
    """Save of one checkpoint on one rank; `run` executes it and returns when the checkpoint is complete on all ranks.

    target: directory, parameter table and settings of the run's saves. attempt: unique id of the save. step: optimizer
    steps done. snapshot: copy of this rank's training state in host memory. state: content of training/state.json.
    validation_loss: nats per token, None if not measured.
    """

    def __init__(
        self,
        target: SaveTarget,
        attempt: str,
        step: int,
        snapshot: Snapshot,
        state: bytes,
        validation_loss: float | None,
    ) -> None:
        self.target, self.step = target, step
        self.snapshot, self.state, self.validation_loss = snapshot, state, validation_loss
        self.cancelled = threading.Event()
        self.partial = target.directory / catalogue.format_partial_name(step)
        self.final = target.directory / catalogue.format_step_name(step)
        self.markers = SaveMarkers(self.partial, attempt, target.rank, target.ranks, target.outcomes)
        self._writing = ""  # file being written, named in errors

    def run(self) -> None:
        """Write the checkpoint together with the other ranks. If it fails, remove the unfinished files and raise
        `SaveFailed` or `SaveCancelled`."""
        self.snapshot.wait()  # first: a save that fails must not hold device memory
        try:
            self._begin()
            self._write()
            self._hash()
            self._finish()
        except OSError as error:
            # Rank 0 deletes a failed checkpoint from the innermost directory outwards.
            gone = error.errno in (errno.ENOENT, errno.ESTALE) and not (self.partial / "training").exists()
            if gone and self.target.rank:
                raise SaveCancelled(self._wait_for_reason()) from None
            line = self._format_error(error)
            self._clean_up(line)
            raise SaveFailed(line) from None
        except (SaveFailed, SaveCancelled) as stop:
            self._clean_up(str(stop))
            raise

    # --- the four phases

    def _begin(self) -> None:
        """Create the hidden directory into which the checkpoint is written (rank 0), or wait until it exists (other
        ranks)."""
        target = self.target
        if target.rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)
            self._check_space()
            (self.partial / "training").mkdir(parents=True)
            self.markers.begin()
            return
        self._wait_for(self.markers.begun_ranks, {0}, "created the directory")

    def _write(self) -> None:
        """Write this rank's slices of the training state and of the exported model files, then the marker file
        "written"; wait until all ranks have written theirs."""
        own = self._write_slices()
        self._write_model()
        if self.target.rank == 0:
            self._write_small_files()
            sync_directory(self.partial / "training")
        sync_directory(self.partial)
        self._mark("written", [dataclasses.astuple(part) for part in own])
        self._wait_for(lambda: self.markers.ranks_with("written"), set(range(self.target.ranks)), "written its part")

    def _write_slices(self) -> list[StoredSlice]:
        """Write the file with this rank's slices of the master weights and optimizer state; return the position of each
        slice in the file."""
        file = format_slice_file_name(self.target.rank, self.target.ranks)
        slices = self.snapshot.slices
        codes = [DTYPE_CODES[str(item.tensor.dtype).removeprefix("torch.")] for item in slices]
        names = [format_slice_tensor_name(item.kind, item.name, item.start, item.stop, item.columns) for item in slices]
        header, offsets, _ = make_safetensors_header(
            (name, code, (item.stop - item.start,)) for name, code, item in zip(names, codes, slices, strict=True)
        )
        self._writing = file
        with open_descriptor(self.partial / file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            position = 0
            for data in (memoryview(header), *map(_as_bytes, self.snapshot.buffers)):
                write_at(descriptor, data, position, self._check_cancelled)
                position += len(data)
            os.fsync(descriptor)
        return [
            StoredSlice(item.kind, item.name, item.start, item.stop, code, file, offsets[name], item.columns)
            for item, code, name in zip(slices, codes, names, strict=True)
        ]

    def _write_model(self) -> None:
        """Write this rank's slices of the master weights to the exported model files, converted to the export dtype, at
        their byte offsets."""
        descriptors: dict[str, int] = {}

        def write(file: str, data: memoryview, offset: int) -> None:
            """Write `data` at byte offset `offset` of the model file named `file`, which is opened at its first use and
            stays open."""
            self._writing = file
            if file not in descriptors:
                descriptors[file] = os.open(self.partial / file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            write_at(descriptors[file], data, offset, self._check_cancelled)

        try:
            if self.target.rank == 0:
                for model_file in self.target.files.files:
                    write(model_file.name, memoryview(model_file.header), 0)
                    os.ftruncate(descriptors[model_file.name], model_file.size)
            for item in self.snapshot.slices:
                place = self.target.files.places.get(item.name)
                if item.kind == "master" and place is not None:
                    dtype = getattr(torch, place.entry.kept or self.target.options.dtype)
                    for start, part in _split_chunks(item.tensor, place.entry.transposed):
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
        """Write the configuration, tokenizer and training-state JSON files (called on rank 0 only)."""
        for name, data in (*self.target.small_files.items(), (catalogue.STATE, self.state)):
            self._writing = name
            write_file(self.partial / name, data)

    def _hash(self) -> None:
        """Hash the file of slices that this rank has written, and the share of the model files assigned to this rank;
        write the hashes to a marker file. Rank 0 then waits until all ranks have done so."""
        target = self.target
        records: dict[str, Any] = {}
        own = hash_file(self.partial / format_slice_file_name(target.rank, target.ranks), self._check_cancelled)
        records[format_slice_file_name(target.rank, target.ranks)] = [own.size, own.sha256, dict(enumerate(own.blocks))]
        for name, (whole, blocks) in distribute_hashing(target.files.sizes, target.ranks)[target.rank].items():
            sha256, found = hash_blocks(self.partial / name, whole, blocks, self._check_cancelled)
            records[name] = [target.files.sizes[name], sha256, found]
        self._mark("hashed", records)
        if target.rank == 0:
            self._wait_for(lambda: self.markers.ranks_with("hashed"), set(range(target.ranks)), "hashed its part")

    def _finish(self) -> None:
        """Complete the checkpoint. Rank 0 writes the index of all slices and the manifest (hashes of all files),
        renames the hidden directory to its final name and deletes old checkpoints; the other ranks wait for it."""
        target = self.target
        if target.rank:
            self._wait_for_outcome()
            return
        everything = [
            StoredSlice(kind, name, start, stop, code, file, offset, Columns(*columns) if columns else None)
            for rank in range(target.ranks)
            for kind, name, start, stop, code, file, offset, columns in self.markers.read("written", rank)
        ]
        slices.check_coverage(target.table, everything)
        self._writing = slices.INDEX
        write_file(self.partial / slices.INDEX, slices.serialize_index(everything))
        manifest = Manifest(self.step, self.validation_loss, self._collect_records())
        for marker in [path for path in self.partial.iterdir() if path.name.startswith(".")]:
            marker.unlink()
        self._writing = MANIFEST
        sync_directory(self.partial / "training")
        write_file(self.partial / MANIFEST, manifest.to_json())
        sync_directory(self.partial)
        self._check_cancelled()
        catalogue.move_into_place(self.partial, self.final)
        # The new checkpoint is complete: a later failure must not be reported as a failed save.
        try:
            catalogue.delete_old(target.directory, target.options.keep, target.options.keep_best, self.step)
        except OSError as error:
            target.log(f"an old checkpoint in {target.directory} could not be deleted: {error.strerror}")
        with suppress(OSError):
            self.markers.record_outcome("done")

    def _collect_records(self) -> dict[str, FileRecord]:
        """Combine the hashes that all ranks computed; return file name -> size and hashes."""
        sizes: dict[str, int] = {}
        whole: dict[str, str] = {}
        blocks: dict[str, dict[int, str]] = {}
        for rank in range(self.target.ranks):
            for name, (size, sha256, found) in self.markers.read("hashed", rank).items():
                sizes[name] = size
                if sha256 is not None:
                    whole[name] = sha256
                blocks.setdefault(name, {}).update({int(index): digest for index, digest in found.items()})
        records = {
            name: FileRecord(size, whole[name], tuple(blocks[name][index] for index in range(count_blocks(size))))
            for name, size in sizes.items()
        }
        for name in (*self.target.small_files, catalogue.STATE, slices.INDEX):
            records[name] = hash_file(self.partial / name)
        return records

    # --- synchronization with other ranks

    def _mark(self, phase: str, content: Any) -> None:
        """Write the marker file by which other ranks see that this rank has completed a phase of the save. phase:
        "written" or "hashed". content: JSON value for rank 0 to read.
        """
        self._writing = self.markers.marker_name(phase)
        self.markers.mark(phase, content)

    def _wait_for(self, list_done: Callable[[], set[int]], ranks: Iterable[int], action: str) -> None:
        """Wait until all of `ranks` have done an action. list_done: function that returns the ranks that have done the
        action; it is called repeatedly. Raises `SaveFailed` after `timeout_seconds`, `SaveCancelled` if the save is
        cancelled or failed on another rank.

        action: participle for the message "rank 3 has not ...", such as "written its part".
        """
        deadline = time.monotonic() + self.target.options.timeout_seconds
        pause = 0.002
        while missing := set(ranks) - list_done():
            self._check_cancelled()
            if (failure := self._find_other_failure()) is not None:
                raise SaveCancelled(failure)
            if time.monotonic() > deadline:
                others = f" (nor have {len(missing) - 1} others)" if len(missing) > 1 else ""
                raise SaveFailed(
                    f"checkpoint of step {self.step} aborted: rank {min(missing)} has not {action} after "
                    f"{self.target.options.timeout_seconds:.0f} s{others}; {self._describe_newest()}"
                )
            self.cancelled.wait(pause)
            pause = min(2 * pause, 0.1)
        self._check_cancelled()

    def _wait_for_outcome(self) -> None:
        """Wait until rank 0 has recorded the outcome of this save. Raises `SaveCancelled` with the reason if the save
        failed."""
        self._wait_for(lambda: {0} if self.markers.read_outcome() is not None else set(), {0}, "completed it")
        if (outcome := self.markers.read_outcome()) != "done":
            raise SaveCancelled(outcome or "")

    def _check_cancelled(self) -> None:
        """Raise `SaveCancelled` if the training loop has cancelled the save."""
        if self.cancelled.is_set():
            raise SaveCancelled(f"checkpoint of step {self.step} aborted by the training loop")

    def _find_other_failure(self) -> str | None:
        """Return the reason why this save failed on another rank; None if it has not failed on another rank."""
        if failure := self.markers.find_failure():
            rank, why = failure
            return why or self._format_unexplained(rank)
        outcome = self.markers.read_outcome()
        return None if outcome in (None, "done") else outcome

    def _wait_for_reason(self) -> str:
        """Wait up to about 2 s until rank 0, which first removes the unfinished checkpoint, records why the save
        failed; return the reason."""
        for _ in range(100):
            if (outcome := self.markers.read_outcome()) is not None:
                return outcome
            self.cancelled.wait(0.02)
        return self._format_unexplained(0)

    # --- failure

    def _clean_up(self, line: str) -> None:
        """Remove the files of this failed save and publish the reason, `line`. Rank 0 removes the whole unfinished
        checkpoint and records `line` as the save's outcome; another rank removes its file of slices and writes `line`
        to a marker file."""
        if self.target.rank:
            with suppress(
                OSError
            ):  # the directory is already deleted, or the disk is full: the training loop reports it
                (self.partial / format_slice_file_name(self.target.rank, self.target.ranks)).unlink(missing_ok=True)
            self.markers.fail(line)
            return
        for _ in range(100):
            shutil.rmtree(self.partial, ignore_errors=True)
            if not self.partial.exists():
                break
            time.sleep(0.02)  # another rank was creating a file in it
        for _ in range(100):
            with suppress(OSError):
                self.markers.record_outcome(line)
                return
            self.cancelled.wait(0.05)  # a full disk has free space again once other ranks close their files

    def _check_space(self) -> None:
        """Raise `SaveFailed` if the disk's free space is less than the size of the whole checkpoint."""
        self.target.directory.mkdir(parents=True, exist_ok=True)
        need, free = self._needed_bytes(), self._free_bytes()
        if free is not None and free < need:
            raise SaveFailed(
                f"checkpoint of step {self.step} not written: no space left in {self.target.directory}: it needs "
                f"{format_bytes(need)}, {format_bytes(free)} are free; {self._describe_newest()}"
            )

    def _needed_bytes(self) -> int:
        """Return the size of the whole checkpoint in bytes: model files, master weights and optimizer state of all
        ranks."""
        widths = {item.kind: item.tensor.element_size() for item in self.snapshot.slices}
        return sum(self.target.files.sizes.values()) + self.target.table.numel * sum(widths.values())

    def _free_bytes(self) -> int | None:
        """Return the free space, in bytes, of the disk with the checkpoint directory; None if unknown."""
        try:
            disk = os.statvfs(self.target.directory)
        except OSError:
            return None
        return disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) if disk.f_blocks else None

    def _format_error(self, error: OSError) -> str:
        """Format `error` as one line for the user: rank, file, reason, needed and free space, newest intact
        checkpoint."""
        where = f"rank {self.target.rank} could not write {self.partial / self._writing}"
        space = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = self._free_bytes()
            space = f" (it needs {format_bytes(self._needed_bytes())}" + (
                f", {format_bytes(free)} are free)" if free is not None else ")"
            )
        reason = f"{where}: {error_reason(error)}{space}"
        return f"checkpoint of step {self.step} not written: {reason}; {self._describe_newest()}"

    def _describe_newest(self) -> str:
        """Return a clause for error messages that names the newest intact checkpoint or says that there is none."""
        newest = catalogue.find_newest(self.target.directory)
        return f"the newest intact checkpoint is {newest.name}" if newest else "there is no intact checkpoint yet"

    def _format_unexplained(self, rank: int) -> str:
        """Return the error message for a failure of rank `rank` that left no reason."""
        return f"checkpoint of step {self.step} not written: rank {rank} failed; {self._describe_newest()}"


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a view of a tensor's bytes, without a copy."""
    return tensor.view(torch.uint8).numpy().data


def _split_chunks(tensor: torch.Tensor, whole: bool) -> Iterable[tuple[int, torch.Tensor]]:
    """Split the 1-D `tensor`, a slice to be saved, into chunks, so that converting a chunk to another dtype takes
    little memory. Return an iterable of (index of the chunk's first element, elements). whole: True to return a single
    chunk, for tensors that are stored transposed: small chunks of these would be many short runs on disk."""
    step = tensor.numel() if whole else _CAST_ELEMENTS
    return ((start, tensor[start : start + step]) for start in range(0, tensor.numel(), max(1, step)))
