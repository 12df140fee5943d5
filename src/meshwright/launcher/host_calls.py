"""Flight recorder of the ranks on one host when torchrun, Kubernetes or SLURM started them, so that no launcher process
of Meshwright watches them: each rank records its collective calls in a file in memory that the others can read, and the
first rank whose wait times out reports them all. Free of torch."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import RankLost
from meshwright.flight_recorder.call_ring import attach_process_writer, create_named_file
from meshwright.flight_recorder.rank_report import Snapshot, write_hang_report
from meshwright.flight_recorder.verdict import Verdict
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.terminal import print_message

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from meshwright.launcher.rendezvous import RendezvousInfo

_KEY = "meshwright/calls"


class HostCalls:
    """Flight recorders of this host's ranks: a directory with one file for each rank, in which the rank records its
    collective calls and which the other ranks can read. The directory is in memory (/dev/shm), or in the temporary
    directory if /dev/shm is missing.

    directory: the run directory. info: this rank's number, the number of ranks, and their rendezvous. token: random
    text, equal on all ranks of a run, that ends the name of the directory of recorder files.
    """

    def __init__(self, directory: RunDirectory, info: RendezvousInfo, token: str) -> None:
        """Derive the paths of the recorder files; nothing is created yet. Arguments: see the class."""
        shared = Path("/dev/shm")
        parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        run = hashlib.sha256(str(directory.path.resolve()).encode()).hexdigest()[:16]
        stem = f"meshwright-calls-{os.getuid()}-{run}-"
        self.report_path = directory.lost.with_stem(f"{directory.lost.stem}-{socket.gethostname()}")
        self._path = parent / f"{stem}{token}"
        # This run holds the run directory's lock, so other directories of its name are those of killed ranks: NCCL's
        # watchdog kills them when one hangs.
        for other in parent.glob(f"{stem}*"):
            if other != self._path:
                self._claim_and_report(other, "in the start before this one: ")
        self._own_file = self._path / f"rank-{info.rank:05d}"
        with suppress(OSError):  # without space for it the run continues, and a report lacks this rank
            self._path.mkdir(mode=0o700, exist_ok=True)
            attach_process_writer(create_named_file(self._own_file, info.rank, info.ranks))

    @classmethod
    def create(cls, directory: RunDirectory, info: RendezvousInfo, store: Store) -> HostCalls:
        """Create this rank's recorder file in the host's directory of recorder files, and return the `HostCalls` of
        this directory. Collective: every rank calls it after rank 0 has locked the run directory.

        directory: the run directory. info: this rank's number, the number of ranks, and their rendezvous. store:
        key-value store of all ranks, through which rank 0 sends them the random text (token) in the directory's name.
        """
        if info.rank == 0:
            store.set(_KEY, secrets.token_hex(8))
        return cls(directory, info, store.get(_KEY).decode())

    def report(self, error: RankLost) -> RankLost:
        """Write the hang report for `error`, which says that another rank stopped answering; return the error to raise
        in its place.

        The first rank of this host that calls this reads all recorder files. If these show which rank is at fault, the
        first rank writes the report to the run directory and returns an error that names the rank at fault. Every other
        call returns `error`.
        """
        verdict = self._claim_and_report(self._path)
        return error if verdict is None else RankLost(verdict.line)

    def _claim_and_report(self, path: Path, when: str = "") -> Verdict | None:
        """Read and remove the recorder files in the directory `path`. If they show which rank is at fault, write the
        hang report to the run directory, print its path, and return the verdict (rank and reason); else return None. If
        several ranks call this method at once, the first rank gets all files, and the other ranks return None.

        when: text to print before the verdict, such as "in the start before this one: "; empty: the verdict is not
        printed.
        """
        claimed = path.with_name(f"left-{path.name}")
        try:
            path.rename(claimed)  # atomic: one rank succeeds and reads all files before any is removed
        except OSError:
            return None
        files = {int(file.name.removeprefix("rank-")): file for file in claimed.glob("rank-*")}
        rings = {rank: os.open(file, os.O_RDONLY | os.O_CLOEXEC) for rank, file in files.items()}
        snapshot = Snapshot.take(rings)
        for descriptor in rings.values():
            os.close(descriptor)
        shutil.rmtree(claimed, ignore_errors=True)
        verdict = snapshot.verdict
        if verdict is not None:
            text = snapshot.format_report(when + verdict.line)
            kept = write_hang_report(self.report_path, text)
            cause = f"{when}{verdict.line}\n" if when else ""  # else the error of this rank has it
            print_message(f"{cause}full report: {self.report_path}" if kept else text)
        return verdict

    def close(self) -> None:
        """End the recording of collective calls after a run without errors: remove this rank's recorder file and, if it
        was the last one, the directory of the host's recorder files."""
        with suppress(OSError):
            self._own_file.unlink()
            self._path.rmdir()  # succeeds for the last rank
