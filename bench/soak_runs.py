"""One command of `soak.py`: start, fault at a given time, end, and the files it leaves."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_cases import DISKS, RESTARTED, SIGNALS, STEPS, Fault
from soak_forks import Forked, fork_command

PATIENCE_SECONDS = 900.0  # time limit of a command, long enough for a busy machine
LEFTOVER_SECONDS = 15.0  # time for the processes of an ended command to disappear
HANG_SECONDS = 20.0  # run.collective_timeout if a rank is stopped, long enough for a busy machine
_LOOK_SECONDS = 0.003


class SoakFailure(Exception):
    """A promise that does not hold, in one line."""


@dataclass(slots=True)
class CommandOutcome:
    """How a command ended. struck: the fault's signal was sent, or the disk filled, while it ran. saving: a checkpoint
    was being written then. newest: the newest complete checkpoint then."""

    code: int
    errors: str
    struck: bool = False
    saving: bool = False
    newest: str = ""


@dataclass(slots=True)
class Reference:
    """The undisturbed run of a configuration: the end that counts, and how long its parts took."""

    files: dict[str, str]  # last checkpoint: relative path -> SHA-256
    trace: list[list[Any]]  # per step: number, loss, gradient norm, learning rate, validation loss
    start_seconds: float
    step_seconds: float
    save_seconds: float
    bytes: int


@dataclass
class Command:
    """`meshwright train` of one recipe in one run directory, any number of times. work: a directory of its own. forks:
    run it in forked processes, else in new ones."""

    recipe: Path
    directory: Path
    work: Path
    forks: bool
    reference: Reference | None = None
    _process: subprocess.Popen[bytes] | Forked | None = field(default=None, init=False)
    _seen: tuple[int, int] = field(default=(0, 0), init=False)  # size of metrics.jsonl, and its last step

    def run(self, fault: Fault | None = None, observe: Callable[[], None] = lambda: None) -> CommandOutcome:
        """Run the command once; `observe` is called every few milliseconds while it runs and no fault is waited for.
        Raises `SoakFailure` where it hangs, shows a traceback or leaves something behind."""
        overrides = [f"run.directory={self.directory}"]
        if fault is not None and fault.kind.startswith("stop rank"):
            overrides.append(f"run.collective_timeout={HANG_SECONDS if fault.kind == 'stop rank' else 60.0}")
        if fault is not None and fault.kind == RESTARTED:
            overrides.append("--restarts=2")
        temporary = self.work / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        caches = self.recipe.parent / "caches"
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(caches),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        }  # fmt: skip
        output = self.work / "errors.txt"
        with output.open("w") as file:
            arguments = ["train", str(self.recipe), *overrides]
            if self.forks:
                process: subprocess.Popen[bytes] | Forked = fork_command(arguments, environment, file)
            else:
                process = subprocess.Popen(
                    [sys.executable, "-m", "meshwright", *arguments],
                    env=environment, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True,
                )  # fmt: skip
        self._process = process
        ended = CommandOutcome(0, "")
        try:
            self._watch(process, fault, ended, observe)
            ended.code = process.wait()
            left = _wait_for_none(process.pid)
        finally:
            self.end()
        ended.errors = output.read_text()
        if left:
            raise SoakFailure(f"{len(left)} processes left after exit code {ended.code}: {left[0]}")
        if "Traceback" in ended.errors:
            raise SoakFailure(f"a traceback, exit code {ended.code}: {ended.errors.splitlines()[-1]}")
        # The next launcher removes files that a killed one left.
        if (names := sorted(os.listdir(temporary))) and ended.code != -signal.SIGKILL:
            raise SoakFailure(f"temporary files left after exit code {ended.code}: {', '.join(names)}")
        return ended

    def end(self) -> None:
        """Kill what is left of the command."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    # --- time of the fault

    def _watch(
        self,
        process: subprocess.Popen[bytes] | Forked,
        fault: Fault | None,
        ended: CommandOutcome,
        observe: Callable[[], None],
    ) -> None:
        """Strike at the fault's moment and return when the command has ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS

        def running() -> bool:
            if time.monotonic() > deadline:
                raise SoakFailure(f"still running after {PATIENCE_SECONDS:.0f} s")
            return process.poll() is None

        if fault is not None and self._wait_for_moment(fault, running):
            ended.newest = max((name for name in self.names() if re.fullmatch(r"step-\d+", name)), default="")
            ended.saving = any(name.endswith(".partial") for name in self.names())
            ended.struck = self._strike(process, fault, running)
        while running():
            observe()
            time.sleep(_LOOK_SECONDS)

    def _wait_for_moment(self, fault: Fault, running: Callable[[], bool]) -> bool:
        """Return at the moment; whether the command is still running."""
        reference = self.reference
        assert reference is not None
        if fault.moment == "start":
            until = time.monotonic() + fault.progress * reference.start_seconds
            return _wait(lambda: time.monotonic() >= until, running)
        step = self.last_step()
        step += int(fault.progress * max(0, STEPS - 1 - step))
        if not _wait(lambda: self.last_step() >= step and len(self._ranks()) > 0, running):
            return False
        delay = fault.delay * reference.step_seconds
        if fault.moment == "save":
            if not _wait(lambda: any(name.endswith(".partial") for name in self.names()), running):
                return False
            delay = fault.delay * reference.save_seconds
        until = time.perf_counter() + delay
        while time.perf_counter() < until:
            time.sleep(min(0.001, delay / 4))
        return running()

    def _strike(self, process: subprocess.Popen[bytes] | Forked, fault: Fault, running: Callable[[], bool]) -> bool:
        """Do what the fault says; whether there was something to do it to."""
        if fault.kind in DISKS:
            self._fill_disk(fault, running)
            return True
        if fault.kind in ("kill launcher", *SIGNALS):
            number = {"kill launcher": signal.SIGKILL, "terminate launcher": signal.SIGTERM}.get(fault.kind)
            os.kill(process.pid, number or signal.SIGINT)
            return True
        if fault.kind == "kill everything":
            os.killpg(process.pid, signal.SIGKILL)
            return True
        if not _wait(lambda: len(self._ranks()) > fault.rank, running):
            return False
        rank = self._ranks()[fault.rank]
        try:
            os.kill(rank, signal.SIGSTOP if fault.kind.startswith("stop rank") else signal.SIGKILL)
            if fault.kind == "stop rank for a while":
                time.sleep(fault.lasts)
                os.kill(rank, signal.SIGCONT)
        except ProcessLookupError:
            return False
        return True

    def _fill_disk(self, fault: Fault, running: Callable[[], bool]) -> None:
        """Keep the disk of the run directory full, for good or for a while."""
        ballast = self.directory.parent / "ballast"
        until = time.monotonic() + (fault.lasts if fault.kind == "fill disk for a while" else PATIENCE_SECONDS)
        with ballast.open("wb", buffering=0) as file:
            while time.monotonic() < until and running():
                for size in (2**16, 2**12):
                    with suppress(OSError):
                        while file.write(bytes(size)) == size:
                            pass
                time.sleep(0.003)
        ballast.unlink()

    # --- state of the directory

    def last_step(self) -> int:
        """The last step in metrics.jsonl, which is read again when its size has changed; 0 before the first."""
        try:
            size = (self.directory / "metrics.jsonl").stat().st_size
        except FileNotFoundError:
            return 0
        if size != self._seen[0]:
            self._seen = (size, max((line["step"] for line in self.metrics()), default=0))
        return self._seen[1]

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the steps; one that was cut by a kill is left out if it is the last."""
        lines = []
        with suppress(FileNotFoundError):
            text = (self.directory / "metrics.jsonl").read_text()
            lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if "loss" in line]

    def trace(self) -> list[list[Any]]:
        """What must be equal bit for bit in two runs, by step."""
        keys = ("step", "loss", "gradient_norm", "learning_rate", "validation_loss")
        return [[line.get(key) for key in keys] for line in self.metrics()]

    def files(self) -> dict[str, str]:
        """SHA-256 of the files of the last checkpoint; of state.json without what names the run directory."""
        last = self.directory / "checkpoints" / f"step-{STEPS:06d}"
        found = {}
        for path in sorted(path for path in last.rglob("*") if path.is_file() and path.name != "manifest.json"):
            content = path.read_bytes()
            if path.name == "state.json":
                state = json.loads(content)
                content = json.dumps({key: state[key] for key in sorted(state) if key != "recipe"}).encode()
            found[str(path.relative_to(last))] = hashlib.sha256(content).hexdigest()
        return found

    def names(self) -> list[str]:
        """What lies in the directory of the checkpoints."""
        try:
            return os.listdir(self.directory / "checkpoints")
        except FileNotFoundError:
            return []

    def _ranks(self) -> list[int]:
        """Process ids of the ranks of the command that is running, in order; empty before all are started."""
        assert self._process is not None
        try:
            ranks = json.loads((self.directory / "ranks.json").read_text())
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        except (OSError, ValueError):
            return []
        found = [process for _, process in sorted((int(rank), process) for rank, process in ranks.items())]
        return found if {str(process) for process in found} <= set(children) else []


def make_reference(command: Command) -> Reference:
    """Run a configuration undisturbed; raises `SoakFailure` where it does not reach its end."""
    first_step, save_begun, saves, begun = 0.0, 0.0, list[float](), time.monotonic()

    def observe() -> None:
        nonlocal first_step, save_begun
        now = time.monotonic()
        saving = any(name.endswith(".partial") for name in command.names())
        if saving != (save_begun > 0):
            saves.extend([] if saving else [now - save_begun])
            save_begun = now if saving else 0.0
        if not first_step and command.last_step():
            first_step = now - begun

    ended = command.run(observe=observe)
    if ended.code != 0:
        raise SoakFailure(f"the undisturbed run ends with {ended.code}: {ended.errors.splitlines()[-1:]}")
    steps = [line["seconds"] for line in command.metrics()]
    size = sum(path.stat().st_size for path in command.directory.rglob("*") if path.is_file())
    save = statistics.median(saves or [0.02])
    return Reference(command.files(), command.trace(), first_step, statistics.median(steps), save, size)


def _wait(condition: Callable[[], bool], running: Callable[[], bool]) -> bool:
    """Wait until the condition holds; False if the command has ended before."""
    while running():
        if condition():
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _wait_for_none(session: int) -> list[str]:
    """Wait for all processes of a session to be gone; the names of those that are not."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while (left := _processes(session)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _processes(session: int) -> list[str]:
    """Process ids and names of the processes of a session."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name, fields = (place / "stat").read_text().rsplit(")", 1)
            state, _, _, belongs = fields.split()[:4]
            if int(belongs) == session and state != "Z":
                found.append(name + ")")
    return found
