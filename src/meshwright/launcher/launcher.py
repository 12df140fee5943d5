"""Starts the ranks of a run on this machine and supervises them until they end: forwards signals, reports which rank
was lost, restarts. Free of torch."""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from meshwright import errors, limits
from meshwright.checkpoint import find_newest
from meshwright.errors import MeshwrightError, RankLost, Terminated, UserError
from meshwright.flight_recorder.rank_report import Snapshot, read_process_state, write_hang_report
from meshwright.flight_recorder.verdict import RankState, describe_position
from meshwright.launcher.rendezvous import STOPS_ONCE, check_port_free
from meshwright.launcher.rendezvous_directory import create_rendezvous_directory
from meshwright.launcher.signals import StopSignals
from meshwright.launcher.started_rank import StartedRank, start_rank
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.terminal import print_message
from meshwright.threads import check_local_threads, choose_threads, count_available_cores

SETTLE_SECONDS = 0.5  # after the first failure: other ranks may report its cause
LOOK_SECONDS = 5.0  # between checks for suspended ranks
STOPPED_SECONDS = 5.0  # beyond the timeout, so that other ranks report first
TERMINATE_SECONDS = 2.0  # between SIGTERM and SIGKILL for remaining ranks


class RankFault(Exception):
    """Error: a rank ended with an internal error. The text contains the rank's traceback."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Arguments of `launch`, which starts the ranks of a run on this machine.

    Attributes:
        description: JSON dict sent to every rank, which states its work (such as the recipe). `launch` adds the keys
            rank, ranks, method (rendezvous URL), threads and directory.
        ranks: Number of processes.
        directory: Run directory, locked while the run lasts.
        restarts: Maximum number of times that all ranks are started again after a rank was lost.
        threads: Threads of each rank; None: OMP_NUM_THREADS, else this machine's cores divided by the ranks.
        rendezvous_url: URL at which the ranks meet, such as tcp://HOST:PORT; None: a new temporary file (file://),
            which cannot collide with a busy port.
        collective_timeout: Time limit of a collective call, in seconds.
        command: Command line that starts one rank.
        output: File descriptor that ranks get as standard output.
        trains: True if the run takes steps and saves checkpoints; False: `directory` is temporary.
        before_ranks: Function called after the directory is locked and before the ranks start.
        log: Function called with each line for the user.
        limit_seconds: Time limit of one start of the ranks, after which they are ended; None: no limit.
        resume_note: For runs that do not train, end of the error message about a lost rank. It says what has been
            written and what the same command does if it is run again.
    """

    description: Mapping[str, Any]
    ranks: int
    directory: Path
    restarts: int = 0
    threads: int | None = None
    rendezvous_url: str | None = None
    collective_timeout: float = 600.0
    command: Sequence[str] = field(kw_only=True)
    output: int = 2  # standard output is reserved for the result
    trains: bool = True
    before_ranks: Callable[[], None] = lambda: None
    log: Callable[[str], None] = print_message
    limit_seconds: float | None = None
    resume_note: str = "nothing was written: the same command starts from the beginning"


def launch(spec: LaunchSpec) -> dict[str, Any]:
    """Start the ranks of a run on this machine, wait for them, and return rank 0's result (JSON dict).

    spec: what to start, and limits. Raises an exception that a rank reported (`UserError`, `CheckFailed` ...);
    `RankLost` if a rank died or `spec.limit_seconds` have passed; `RankFault` with the traceback of an internal error
    in a rank. After SIGTERM raises `Terminated`, after SIGINT `KeyboardInterrupt`, once the ranks have ended (ranks
    that train save a checkpoint first, unless a second signal comes).
    """
    most = max(limits.get_limit("local_ranks"), 4 * count_available_cores())
    if spec.ranks > most:
        raise UserError(
            f"{spec.ranks:,} ranks are more than the {most} processes allowed on this machine; choose a "
            "smaller layout, or `meshwright launch` for several hosts"
        )
    check_local_threads(spec.ranks, spec.threads or choose_threads(spec.ranks))
    with RunDirectory(spec.directory) as directory:
        check_port_free(spec.rendezvous_url or "")
        spec.before_ranks()  # before signals are caught: its processes handle their own
        return _run_attempts(spec, directory)


def _run_attempts(spec: LaunchSpec, directory: RunDirectory) -> dict[str, Any]:
    """Start all ranks of a run, and again after a rank was lost, up to `spec.restarts` times; return rank 0's result
    (JSON dict). spec: arguments of `launch`. directory: the run directory, locked."""
    with StopSignals() as signals:
        for attempt in range(spec.restarts + 1):
            try:
                return _Attempt(spec, directory, signals).run()
            except (RankLost, RankFault) as failure:
                if attempt == spec.restarts or signals.stop:
                    raise
                spec.log(f"{failure}; restarting ({attempt + 1} of {spec.restarts})")
    raise AssertionError("the last attempt returns or raises")


class _Attempt:
    """One start of all ranks of a run, supervised until all ranks have ended. If a rank is lost, another attempt may
    follow.

    spec: arguments of `launch`. directory: the locked run directory. signals: receiver of SIGTERM and SIGINT.
    """

    def __init__(self, spec: LaunchSpec, directory: RunDirectory, signals: StopSignals) -> None:
        """Start without ranks; arguments: see the class."""
        self.spec, self.directory, self.signals = spec, directory, signals
        self.ranks: list[StartedRank] = []
        self.signals_sent = 0  # stop signals forwarded so far
        self.snapshot: Snapshot | None = None  # taken at the first failure
        self.stopped_since: dict[int, float] = {}  # suspended ranks (SIGSTOP), and since when

    def run(self) -> dict[str, Any]:
        """Start the ranks, wait until all ranks have ended, and return rank 0's result (JSON dict). Raises the error of
        the rank that failed."""
        with create_rendezvous_directory() as meeting:
            try:
                for number in range(self.spec.ranks):
                    self.ranks.append(self._start(number, self.spec.rendezvous_url or f"file://{meeting}/ranks"))
                self.directory.write_ranks([rank.process.pid for rank in self.ranks])
                self._watch()
                return self._collect_result()
            finally:
                self._end_all()

    def _start(self, number: int, method: str) -> StartedRank:
        """Start the process of the rank with global number `number`, and return the `StartedRank` by which it is
        supervised. method: rendezvous URL of `torch.distributed`."""
        spec = self.spec
        description = {**spec.description, "method": method, "directory": str(spec.directory)}
        threads = spec.threads or choose_threads(spec.ranks)
        keep = [self.directory.lock_descriptor]
        return start_rank(number, spec.ranks, description, spec.command, threads, keep, spec.output)

    # --- while they run

    def _watch(self) -> None:
        """Supervise the ranks until all ranks have ended. Return earlier if a rank failed: `SETTLE_SECONDS` after a
        rank ended abnormally, or when a rank has been suspended (SIGSTOP) too long. Meanwhile forward SIGTERM and
        SIGINT to the ranks. Raises `RankLost` at the end of `spec.limit_seconds`."""
        deadline: float | None = None
        limit = self.spec.limit_seconds
        last = time.monotonic() + (math.inf if limit is None else limit)
        with selectors.DefaultSelector() as selector, ExitStack() as descriptors:
            selector.register(self.signals.wakeup, selectors.EVENT_READ, self.signals.drain)
            for rank in self.ranks:
                selector.register(rank.pipe, selectors.EVENT_READ, partial(self._read_report, rank, selector))
                if hasattr(os, "pidfd_open"):  # a process that the rank forked may keep the pipe open
                    watched = os.pidfd_open(rank.process.pid)
                    descriptors.callback(os.close, watched)
                    selector.register(
                        watched, selectors.EVENT_READ, partial(self._handle_exit, rank, selector, watched)
                    )
            while any(rank.ended is None for rank in self.ranks):
                wake = min(last, time.monotonic() + LOOK_SECONDS if deadline is None else deadline)
                ready = selector.select(max(0.0, wake - time.monotonic()))
                for key, _ in ready:
                    key.data()
                self._forward_signals()
                if time.monotonic() >= last:
                    raise RankLost(f"not finished after {limit:g} s")
                if not ready and deadline is None and self._is_suspended_too_long():
                    self._take_snapshot()
                    break
                if deadline is None and any(map(self._has_ended_abnormally, self.ranks)):
                    deadline = time.monotonic() + SETTLE_SECONDS
                    if any(rank.blames_another_rank for rank in self.ranks):
                        self._take_snapshot()  # before the ranks that it waited for continue
                if deadline is not None and time.monotonic() >= deadline:
                    break
        if self.snapshot is None and any(map(self._has_ended_abnormally, self.ranks)):
            self._take_snapshot()

    def _take_snapshot(self) -> None:
        """Store the state of all ranks for the hang report, before any rank is ended: the collective calls that each
        rank has recorded, and the Python stacks of blamed ranks that are not in a collective call."""
        ended = {
            rank.number: rank.exit_description for rank in self.ranks if rank.ended is not None and not rank.report
        }
        self.snapshot = Snapshot.take({rank.number: rank.calls for rank in self.ranks}, ended)
        for seen in self.snapshot.busy_ranks:
            self.snapshot.stacks[seen.rank] = self.ranks[seen.rank].read_stack()

    def _is_suspended_too_long(self) -> bool:
        """Return True if a rank's process has been suspended (SIGSTOP) for `STOPPED_SECONDS` longer than the timeout of
        collective calls. This finds suspended ranks for which no other rank waits in a collective call, as during a
        save."""
        now, limit = time.monotonic(), self.spec.collective_timeout + STOPPED_SECONDS
        stopped = [
            rank.number
            for rank in self.ranks
            if rank.ended is None and read_process_state(rank.process.pid) in ("T", "t")
        ]
        self.stopped_since = {number: self.stopped_since.get(number, now) for number in stopped}
        return any(now - since > limit for since in self.stopped_since.values())

    def _read_report(self, rank: StartedRank, selector: selectors.BaseSelector) -> None:
        """Read what a rank has written to its report pipe (result or error). At end of file, close the pipe and remove
        it from `selector`, which watches the pipes."""
        if rank.pipe < 0:
            return
        data = os.read(rank.pipe, 65536)
        rank.report_bytes += data
        if not data:
            selector.unregister(rank.pipe)
            os.close(rank.pipe)
            rank.pipe = -1
            if not hasattr(os, "pidfd_open"):
                self._record_end(rank)

    def _handle_exit(self, rank: StartedRank, selector: selectors.BaseSelector, watched: int) -> None:
        """Handle the end of a rank's process: read the rest of its report. watched: pidfd (file descriptor) of the
        process, which is removed from `selector`."""
        selector.unregister(watched)
        if rank.pipe >= 0:
            os.set_blocking(rank.pipe, False)
            with suppress(BlockingIOError):
                while rank.pipe >= 0:
                    self._read_report(rank, selector)
        if rank.pipe >= 0:
            selector.unregister(rank.pipe)
        self._record_end(rank)

    def _record_end(self, rank: StartedRank) -> None:
        """Record that a rank's process has ended: the time, and the rank's report (result or error, JSON), which is
        parsed."""
        rank.process.wait()
        rank.ended = time.monotonic()
        with suppress(ValueError):  # no report, or killed while writing it
            rank.report = json.loads(rank.report_bytes)
            rank.ended = (rank.report or {}).get("at", rank.ended)

    def _has_ended_abnormally(self, rank: StartedRank) -> bool:
        """Return True if a rank has ended without a result, so that the other ranks cannot continue. A rank that
        reported `Terminated` (it stopped after SIGTERM) does not count."""
        return rank.ended is not None and not rank.finished and rank.error != "Terminated"

    def _forward_signals(self) -> None:
        """Forward to the ranks the SIGTERM and SIGINT that the launcher received: the first signal as SIGTERM, a second
        signal as SIGKILL."""
        while self.signals_sent < len(self.signals.received):
            self.signals_sent += 1
            if self.signals_sent > 1 and STOPS_ONCE in os.environ:
                continue
            for rank in self.ranks:
                if rank.ended is None:
                    # A second signal means: do not wait for a checkpoint.
                    self._send_signal(rank, signal.SIGTERM if self.signals_sent == 1 else signal.SIGKILL)

    def _send_signal(self, rank: StartedRank, number: signal.Signals) -> None:
        """Send signal `number` to a rank's process, and record that the rank was asked to stop; no signal is sent if
        the process has ended."""
        rank.stop_requested = True
        with suppress(ProcessLookupError):
            rank.process.send_signal(number)

    def _end_all(self) -> None:
        """Send SIGTERM to all running ranks, kill the ranks that do not end in time, and close the file descriptors of
        all ranks."""
        for number, seconds in ((signal.SIGTERM, TERMINATE_SECONDS), (signal.SIGKILL, 30.0)):
            left = [rank for rank in self.ranks if rank.process.poll() is None]
            for rank in left:
                self._send_signal(rank, number)
            deadline = time.monotonic() + seconds
            for rank in left:
                with suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(0.0, deadline - time.monotonic()))
        for rank in self.ranks:
            rank.close()

    # --- how it ended

    def _collect_result(self) -> dict[str, Any]:
        """Return rank 0's result (JSON dict) if all ranks finished. Otherwise raise the error of the rank that failed
        first or made the others fail."""
        if all(rank.finished for rank in self.ranks):
            report = self.ranks[0].report
            assert report is not None
            result: dict[str, Any] = report["result"]
            return result
        ended = sorted((rank for rank in self.ranks if rank.ended is not None), key=lambda rank: rank.ended or 0.0)
        died = [rank for rank in ended if rank.report is None]
        reported = [rank for rank in ended if rank.report is not None and not rank.finished]
        if self.signals.stop and all(rank.stop_requested for rank in died):
            self._raise_stopped(died, reported)
        # A killed process is a cause; an aborted one may be the backend's reaction to another rank.
        killed = [rank for rank in died if rank.signal not in (None, signal.SIGABRT)]
        own_errors = [rank for rank in reported if not rank.blames_another_rank]
        if own_errors and not killed:
            self._raise_reported(own_errors[0])
        line = self._describe_lost_rank(killed or died, reported)
        self._print_hang_report(line)
        raise RankLost(f"{line}; {self._describe_resume()}")

    def _describe_lost_rank(self, died: list[StartedRank], reported: list[StartedRank]) -> str:
        """Describe in one sentence which rank was lost and why. died: ranks that ended without a report. reported:
        ranks that reported an error.

        The sentence describes the first rank of `died`. If `died` is empty, or if NCCL aborted this rank because of
        another rank, it describes the rank at fault according to the recorded collective calls. If these show no rank
        at fault, the first reported error is returned.
        """
        verdict = self.snapshot.verdict if self.snapshot is not None else None
        # NCCL's watchdog aborts the ranks that wait for a suspended one.
        known = verdict is not None and (verdict.is_call_mismatch or verdict.kind == "stopped")
        if died and not (known and died[0].signal in (None, signal.SIGABRT)):
            return self._describe_death(died[0])
        if verdict is not None:
            return f"{verdict.line}; {self._describe_progress()}"
        if not reported or reported[0].report is None:
            return f"the ranks stopped answering {self._describe_progress()}"
        return str(reported[0].report["message"])

    def _print_hang_report(self, line: str) -> None:
        """Write the hang report (the recorded calls of every rank) to the run directory and print its path; print the
        report itself if the file cannot be written. line: first line of the report."""
        if self.spec.trains and self.snapshot is not None and self.snapshot.has_calls:
            text = self.snapshot.format_report(line)
            kept = write_hang_report(self.directory.lost, text)
            self.spec.log(f"full report: {self.directory.lost}" if kept else text)

    def _raise_stopped(self, died: list[StartedRank], reported: list[StartedRank]) -> None:
        """If the launcher received SIGTERM or SIGINT, raise `Terminated` or `KeyboardInterrupt`, unless a rank reported
        another error. died: ranks that ended without a report; reported: ranks that reported an error."""
        for rank in reported:
            if not died and rank.error != "Terminated" and not rank.blames_another_rank:
                self._raise_reported(rank)
        saved = [rank.report["message"] for rank in reported if rank.report and rank.error == "Terminated"]
        early = " before a checkpoint was due" if self.spec.trains else ""
        line = saved[0] if saved else f"stopped by SIGTERM{early}; {self._describe_resume()}"
        if signal.SIGINT in self.signals.received:
            raise KeyboardInterrupt(line.replace("SIGTERM", "an interrupt"))
        raise Terminated(line)

    def _raise_reported(self, rank: StartedRank) -> None:
        """Raise the error that a rank reported, as the exception class that the rank names; for an internal error raise
        `RankFault` with the rank's traceback."""
        report = rank.report
        assert report is not None
        if "fault" in report:
            text = report["traceback"].rstrip()
            raise RankFault(
                f"rank {rank.number} (process {rank.process.pid}) failed {self._describe_progress()}:\n{text}"
            )
        error = getattr(errors, report["error"], MeshwrightError)(report["message"])
        error.exit_code = report["exit_code"]
        raise error

    def _describe_death(self, rank: StartedRank) -> str:
        """Return text on how a rank's process died, its last collective call, and the last completed training step."""
        line = f"rank {rank.number} (process {rank.process.pid}) {rank.exit_description} {self._describe_progress()}"
        seen: list[RankState] = [] if self.snapshot is None else self.snapshot.seen
        where = next((describe_position(each) for each in seen if each.rank == rank.number), "")
        return f"{line}, {where}" if where else line

    def _describe_progress(self) -> str:
        """Return text on the last completed training step, such as "after step 12"."""
        if not self.spec.trains:
            return "before it finished"
        step = self.directory.read_last_step()
        return "before the first step" if step is None else f"after step {step}"

    def _describe_resume(self) -> str:
        """Return text that names the checkpoint from which the same command, run again, resumes."""
        if not self.spec.trains:
            return self.spec.resume_note
        checkpoint = find_newest(self.directory.checkpoints)
        if checkpoint is None:
            return "there is no checkpoint yet: the same command starts from the beginning"
        return f"the same command resumes from {checkpoint.name}"
