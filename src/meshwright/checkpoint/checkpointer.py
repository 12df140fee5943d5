"""Checkpointer of the training loop: background saves, and loading of the newest intact checkpoint."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.checkpoint import catalogue
from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.catalogue import CheckpointPath, read_state
from meshwright.checkpoint.contents import CheckpointContents, make_model_contents
from meshwright.checkpoint.directory_lock import DirectoryLock
from meshwright.checkpoint.files import to_json_bytes
from meshwright.checkpoint.loading import load_slices
from meshwright.checkpoint.manifest import DamagedCheckpoint
from meshwright.checkpoint.model_files import INDEX, plan_model_files
from meshwright.checkpoint.saving import Save, SaveCancelled, SaveFailed
from meshwright.checkpoint.settings import SaveOptions, SaveTarget
from meshwright.checkpoint.snapshot import SnapshotBuffers
from meshwright.comm.device_thread import start_thread
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError, error_reason
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.spec.config import ModelConfig

_SHARED_SECONDS = 60.0  # a network filesystem may show a new file late on another machine
_MAXIMUM_CANDIDATES = 256
_DEFAULT_OPTIONS = SaveOptions()
_locks: weakref.WeakValueDictionary[Path, DirectoryLock] = weakref.WeakValueDictionary()


class Checkpointer:
    """Saves and loads the checkpoints of one run. Collective: every rank creates a `Checkpointer` and calls the same
    methods in the same order.

    directory: checkpoints/ of the run, on a filesystem shared by all ranks (else `UserError` is raised). mesh: device
    mesh of this rank. contents: the model's configuration, or `CheckpointContents` for a user's own module. options:
    settings of the saves. log: called with lines for the user."""

    def __init__(
        self,
        directory: Path,
        mesh: Mesh,
        contents: ModelConfig | CheckpointContents,
        options: SaveOptions = _DEFAULT_OPTIONS,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.directory, self.log = Path(directory), log
        self.stall_seconds = 0.0
        """Seconds for which the last save has held training up: the time of `save`, without the wait for an earlier
        save, and on a GPU the wait of its next update for the copies, once the GPU has passed it."""
        self.on_stall: Callable[[int, float], None] = lambda step, seconds: None
        """Called once for each save, with its step and `stall_seconds`, when these are complete."""
        self._stall_is_open = False
        self._mesh, self._background = mesh, options.background
        self._agreement = Agreement(mesh)
        self._buffers = SnapshotBuffers()
        self._thread: threading.Thread | None = None
        self._save: Save | None = None
        self._failure: str | None = None
        self._fault: BaseException | None = None
        self._saves = 0
        self._lock: DirectoryLock | None = None  # on rank 0
        self._logged: set[str] = set()  # checkpoints already reported as damaged
        if isinstance(contents, ModelConfig):
            contents = make_model_contents(contents, options)
        self._contents = contents
        files = plan_model_files(contents.table, options.dtype, options.shard_bytes, contents.stem)
        small_files = dict(contents.small_files)
        if files.index is not None:
            small_files[INDEX] = files.index
        self._target = SaveTarget(
            self.directory, mesh.rank, mesh.world_size, contents.table, files, small_files, options, log
        )
        self._token = self._prepare_directory()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *error: object) -> None:
        """Release the directory for other processes, unless a background save still writes there."""
        if not self.busy:
            self._lock = None

    # --- saving

    def reserve(self, slices: Sequence[TensorSlice]) -> None:
        """Allocate host memory for the copies of the training state from which checkpoints are written, so that the
        first `save` does not delay training. slices: the master weights and optimizer state that this rank saves."""
        self._buffers.reserve(slices)

    def save(
        self, step: int, slices: Sequence[TensorSlice], state: dict[str, Any], *, validation_loss: float | None = None
    ) -> None:
        """Copy `slices` to host memory and write the checkpoint of step `step`, in a background thread if
        `options.background`. Waits for an earlier save first. A failure is reported by `failed`.

        slices: master weights and optimizer state that this rank owns; the slices of all ranks together are the whole
        state. state: content of training/state.json (rank 0's is written). validation_loss: nats per token, None if not
        measured.
        """
        self.wait()
        self.failed()
        self._failure = None
        begun = time.perf_counter()
        snapshot = self._buffers.take(slices)
        text = to_json_bytes({**state, "step": step})
        self._saves += 1
        save = Save(self._target, f"{self._token:x}-{self._saves}", step, snapshot, text, validation_loss)
        self._save = save
        if self._background:
            cuda = self._mesh.device.type == "cuda"
            self._thread = start_thread(partial(self._run, save), f"checkpoint {step}", cuda)
        else:
            self._run(save)
        self.stall_seconds = time.perf_counter() - begun
        self._stall_is_open = True
        self._close_stall()

    def _close_stall(self, ended: bool = False) -> None:
        """Complete `stall_seconds` if the GPU has passed its wait for the copies of the last save. ended: True if the
        save has ended; the host then waits for the GPU to pass it."""
        save = self._save if self._stall_is_open else None
        if save is not None and (seconds := save.snapshot.read_wait(ended)) is not None:
            self._stall_is_open = False
            self.stall_seconds += seconds
            self.on_stall(save.step, self.stall_seconds)

    def _run(self, save: Save) -> None:
        """Run `save`, in the background thread or in the caller's; if it fails, store its error message, which `failed`
        returns."""
        try:
            save.run()
        except SaveFailed as failure:
            self._failure = str(failure)
        except SaveCancelled as reason:
            if not save.cancelled.is_set():
                self._failure = str(reason)
        except BaseException as fault:  # an internal error: raised in the main thread
            self._fault = fault

    def failed(self) -> str | None:
        """Return the error message of this rank's last save; None while the save runs, or if it succeeded. An
        unexpected exception of the background thread is raised here. `abandon` and the next save reset the message."""
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        return self._failure

    @property
    def busy(self) -> bool:
        """True while the background save of this rank runs, which includes waiting for other ranks' writes."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the background save of this rank, if any, has ended in success or failure."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._close_stall(ended=True)

    def wait_on_stream(self) -> None:
        """Make the GPU wait until the copies of the last save are complete; called before the training state changes.
        Calls `on_stall` if the GPU has passed such a wait of an earlier update."""
        self._close_stall()
        if self._save is not None:
            self._save.snapshot.wait_on_stream()

    def abandon(self) -> None:
        """Cancel the save in progress after a failure on some rank, and remove its files; older checkpoints stay. Every
        rank calls this."""
        if self._save is not None:
            self._save.cancelled.set()
            self.wait()
            self._failure = None

    # --- loading

    def find_newest(self) -> CheckpointPath | None:
        """Return the intact checkpoint of the highest step in the run's directory; None if no checkpoint is intact.
        Damaged checkpoints of higher steps are logged, each once."""
        return catalogue.find_newest(self.directory, self._log_once)

    def find_best(self) -> CheckpointPath | None:
        """Return the path of the run's intact checkpoint with the lowest validation loss; None if no intact checkpoint
        has a validation loss."""
        return catalogue.find_best(self.directory)

    def load_newest(self, slices: Sequence[TensorSlice]) -> tuple[CheckpointPath, dict[str, Any]] | None:
        """Find the newest checkpoint that is intact on all ranks, and load it into the tensors of `slices`. Return
        (checkpoint, content of its training/state.json), or None if there is no checkpoint. Collective.

        Each damaged checkpoint is logged. Raises `UserError` if there are checkpoints but none is intact, so that no
        damaged checkpoint is overwritten.
        """
        found = [catalogue.parse_step(path.name) or 0 for path in catalogue.list_candidates(self.directory)]
        steps = self._agreement.broadcast_numbers(found, count=_MAXIMUM_CANDIDATES)
        for step in steps:
            path = self.directory / catalogue.format_step_name(step)
            problem, state = None, {}
            try:
                state = self._load(path, slices)
                checkpoint = catalogue.open_checkpoint(path)[0]
            except DamagedCheckpoint as damage:
                problem = str(damage)
            if self._agreement.all_true(problem is None):
                return checkpoint, state
            first = self._agreement.broadcast_first_text(problem)
            rank, reason = first if first is not None else (0, "a rank could not read it")
            on_rank = f" (found by rank {rank})" if rank else ""
            self._log_once(f"checkpoint {path} is damaged and skipped: {reason}{on_rank}")
        if steps:
            raise UserError(
                f"no checkpoint in {self.directory} is intact ({', '.join(map(catalogue.format_step_name, steps))} "
                f"{'are' if len(steps) > 1 else 'is'} damaged); move the directory away to start over"
            )
        return None

    def _load(self, path: Path, slices: Sequence[TensorSlice]) -> dict[str, Any]:
        """Load the checkpoint directory `path` into the tensors of `slices` on this rank; return the content of its
        training/state.json: step, layout, recipe and more, by name. Raises `DamagedCheckpoint`, or `UserError` for a
        checkpoint of another model."""
        catalogue.open_checkpoint(path)
        self._contents.check(path)
        load_slices(path, slices, self._mesh.rank, self._mesh.world_size)
        return read_state(path)

    def _log_once(self, line: str) -> None:
        """Log `line`, a message about a damaged checkpoint, unless a line about the same checkpoint was logged
        before."""
        key = line.partition(" is damaged")[0]
        if key not in self._logged:
            self._logged.add(key)
            self.log(line)

    # --- the start

    def _prepare_directory(self) -> int:
        """Lock the checkpoint directory and remove files of interrupted saves (on rank 0), and check that it is on a
        filesystem shared by all ranks. Return a random number, equal on all ranks, that begins the ids of this run's
        saves. Collective; raises `UserError` on all ranks if a rank fails."""
        rank, agreement = self._mesh.rank, self._agreement
        token, problem = secrets.randbits(48), None
        if rank == 0:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock = _lock_directory(self.directory)
                catalogue.remove_leftovers(self.directory)
            except UserError as error:
                problem = str(error)
            except OSError as error:
                problem = f"{self.directory}: {error_reason(error)}"
        token = agreement.broadcast_numbers([token], count=1)[0]
        marker = self.directory / f".shared-{token:x}"
        if rank == 0 and problem is None:
            try:
                marker.touch()
            except OSError as error:
                problem = f"{self.directory} cannot be written: {error_reason(error)}"
        failure = agreement.broadcast_first_text(problem)
        if failure is None:
            if not self._wait_for_file(marker):
                problem = (
                    f"rank {rank} on {socket.gethostname()} does not see the checkpoint directory that rank 0 sees: "
                    f"{self.directory.absolute()} must be on a filesystem shared by all machines"
                )
            failure = agreement.broadcast_first_text(problem)
        if rank == 0:
            marker.unlink(missing_ok=True)
        if failure is not None:
            raise UserError(failure[1])
        return token

    def _wait_for_file(self, marker: Path) -> bool:
        """Wait until this rank sees the file `marker`, which rank 0 writes to test that the ranks share a filesystem.
        Return True if it appears, False after `_SHARED_SECONDS` without it."""
        deadline = time.monotonic() + _SHARED_SECONDS
        while not marker.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
            if marker.parent.is_dir():
                os.listdir(marker.parent)  # makes a network filesystem refresh its directory cache
        return True


def _lock_directory(directory: Path) -> DirectoryLock:
    """Lock a checkpoint directory against other processes, which could remove the files of a running save as leftovers;
    return the lock. All `Checkpointer`s of this process share the lock, and the last of them releases it. Raises
    `UserError` if another process holds the lock."""
    place = directory.resolve()
    lock = _locks.get(place)
    if lock is None:
        lock = _locks[place] = DirectoryLock(directory, "checkpoint directory", "or end it")
        weakref.finalize(lock, os.close, lock.descriptor)
    return lock
