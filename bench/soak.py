"""Fault-injection soak test: runs killed (SIGKILL), stopped or out of disk at random moments, then resumed, must match
the uninterrupted run bitwise.

Each trial takes a random configuration (layout, precision, optimizer, manner of saving), starts `meshwright train`, has
one or two faults strike at random moments, most of them while a checkpoint is written, and runs the same command again
until it is complete. Compared with an undisturbed run: every file of the last checkpoint (weights, fp32 master weights,
optimizer state, state) and every step's loss and gradient norm. Checked as well: exit codes, that no complete
checkpoint is lost, that no process, temporary file or shared memory is left, and that nothing shows a traceback.

    python bench/soak.py [--seed 0] [--count 200] [--seconds 3000] [--piece 0/1] [--work DIRECTORY] [--result FILE]
                         [--fresh]

In five trials of six, commands and ranks are forked from a process that has loaded PyTorch, which takes a third of the
time; in the others they are started anew.

Each record names the commit that it ran; `--fresh` first drops those of another version of the package. Other trials
that the result (bench/results/soak.json) has already are left out, so that a soak can be run piece by piece,
also several pieces at a time: `--piece I/N` takes the trials whose number leaves I when divided by N. Small disks and
private shared memory need mount namespaces (root, or user namespaces); where they are not permitted, no disk is filled,
and the result says so.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from common import RESULTS, machine
from soak_cases import DISKS, STEPS, Fault, axes_of, draw_faults, draw_recipe
from soak_forks import load
from soak_runs import Command, CommandOutcome, Reference, SoakFailure, make_reference

TRIALS_PER_CONFIGURATION = 6
TRIALS_PER_START = 6  # one of this many trials starts new processes; the others fork them
INSIDE = "MESHWRIGHT_SOAK_NAMESPACE"
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Soak:
    """All trials of a seed. work: a directory for their files. result: the file with a record of each. mounts: whether
    small disks can be mounted."""

    seed: int
    count: int
    work: Path
    result: Path
    mounts: bool
    source: dict[str, str] = field(default_factory=dict)  # from `source_version`; added to each new record

    def trial(self, number: int) -> dict[str, Any]:
        """Run a trial; its record."""
        random = Random(f"{self.seed} trial {number}")
        name = f"configuration-{number % max(1, self.count // TRIALS_PER_CONFIGURATION)}"
        recipe = draw_recipe(
            Random(f"{self.seed} {name}"), f"{Path(json.__file__).parent}/*.py", str(self.work / "data")
        )
        file = self.work / f"{name}.toml"
        file.write_text(recipe.to_toml())
        forks = number % TRIALS_PER_START != 0
        record: dict[str, Any] = {
            "trial": number, "layout": recipe.layout, "forks": forks, "faults": [], "failure": None,
            **self.source,
        }  # fmt: skip
        place = self.work / f"trial-{number}"
        shutil.rmtree(place, ignore_errors=True)
        faults = draw_faults(random, recipe.parsed_layout.world_size, self.mounts)
        disk = any(fault.kind in DISKS for fault in faults)
        try:
            reference = self._reference(name, file)
            with self._disk(place / "disk", 3 * reference.bytes + 2**20 if disk else 0) as directory:
                command = Command(file, directory / "run", place / "process", forks, reference)
                self._disturb(command, faults, record)
            shutil.rmtree(place, ignore_errors=True)
        except SoakFailure as failure:
            record["failure"] = str(failure)
        return record

    def _reference(self, name: str, file: Path) -> Reference:
        """The undisturbed run of a configuration, made once."""
        kept = self.work / f"{name}.json"
        if kept.exists():
            return Reference(**json.loads(kept.read_text()))
        place = self.work / f"{name}-undisturbed-{os.getpid()}"
        reference = make_reference(Command(file, place / "run", place / "process", forks=True))
        fresh = kept.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(asdict(reference)))
        fresh.rename(kept)
        shutil.rmtree(place)
        return reference

    def _disturb(self, command: Command, faults: list[Fault], record: dict[str, Any]) -> None:
        """Run the command with one fault after the other, then undisturbed to its end, and compare.

        Raises `SoakFailure`."""
        newest = ""
        for fault in [*faults, None]:
            if fault is not None:
                record["faults"].append({"kind": fault.kind, "moment": fault.moment})
            ended = command.run(fault)
            if fault is not None:
                record["faults"][-1] |= {"struck": ended.struck, "saving": ended.saving, "code": ended.code}
            self._check_resumed(ended, newest)
            newest = max(newest, ended.newest)
            complete = command.last_step() == STEPS and len(command.files()) > 0
            codes = fault.codes if fault is not None and ended.struck else (0,)
            if ended.code not in codes and not (complete and ended.code == 0):
                raise SoakFailure(f"exit code {ended.code} after {fault}: {ended.errors.splitlines()[-3:]}")
            if self.mounts and (names := os.listdir(SHARED_MEMORY)):
                raise SoakFailure(f"shared memory left after {fault}: {', '.join(names)}")
            if ended.code == 0:
                break
        assert command.reference is not None
        if command.trace() != command.reference.trace:
            steps = [line[0] for line in command.trace()]
            raise SoakFailure(f"metrics.jsonl differs from the undisturbed run; its steps are {steps}")
        files, expected = command.files(), command.reference.files
        if different := sorted(name for name in files | expected if files.get(name) != expected.get(name)):
            raise SoakFailure(f"the last checkpoint differs from the undisturbed run: {', '.join(different)}")
        stay = (".lock", ".last-saves.json")
        if left := [name for name in command.names() if name.startswith(".") and name not in stay]:
            raise SoakFailure(f"files left in the checkpoint directory: {', '.join(left)}")

    def _check_resumed(self, ended: CommandOutcome, newest: str) -> None:
        """A run goes on from the newest checkpoint that was complete when the fault struck, or from a later one."""
        resumed = re.findall(r"^(?:resumed from|nothing to do:) (step-\d+)", ended.errors, re.MULTILINE)
        if newest and ended.code == 0 and (not resumed or resumed[0] < newest):
            raise SoakFailure(f"{newest} was complete, but the run resumed from {resumed[:1] or 'nothing'}")

    @contextmanager
    def _disk(self, place: Path, size: int) -> Iterator[Path]:
        """A directory, of a disk of so many bytes if `size` is not 0."""
        place.mkdir(parents=True)
        if not size:
            yield place
            return
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)

    def records(self, more: list[dict[str, Any]], drop_other_sources: bool = False) -> list[dict[str, Any]]:
        """The records of the result, to which others may be adding too, after adding some more.

        drop_other_sources: first remove those made with another version of the package; where a record does not name
        its version, it stays.
        """
        lock = os.open(self.result.parent, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = json.loads(self.result.read_text()) if self.result.exists() else {}
            same = (kept.get("seed"), kept.get("count")) == (self.seed, self.count)
            before = kept["records"] if same else []
            if drop_other_sources:
                own = self.source.get("source_tree")
                before = [record for record in before if record.get("source_tree", own) == own]
            by_number = {record["trial"]: record for record in before + more}
            records = [by_number[number] for number in sorted(by_number)]
            if more or drop_other_sources:
                fresh = self.result.with_suffix(".new")
                fresh.write_text(self._document(records))
                fresh.rename(self.result)
            return records
        finally:
            os.close(lock)

    def _document(self, records: list[dict[str, Any]]) -> str:
        """The result: counts by kind of fault, moment and part of the layout, and a line for each trial."""
        faults = [fault for record in records for fault in record["faults"] if fault.get("struck")]
        axes = Counter(axis for record in records for axis in axes_of(record["layout"]))
        summary = {
            "benchmark": "soak",
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "seed": self.seed,
            "count": self.count,
            "small_disks": self.mounts,
            "trials": len(records),
            "by_commit": dict(sorted(Counter(record.get("commit", "not recorded") for record in records).items())),
            "trials_of_processes_started_anew": sum(not record["forks"] for record in records),
            "failed": sum(record["failure"] is not None for record in records),
            "faults_struck": len(faults),
            "faults_struck_while_saving": sum(fault["saving"] for fault in faults),
            "faults_too_late": sum(fault.get("struck") is False for record in records for fault in record["faults"]),
            "by_kind": dict(sorted(Counter(fault["kind"] for fault in faults).items())),
            "by_moment": dict(sorted(Counter(fault["moment"] for fault in faults).items())),
            "by_exit_code": {str(code): n for code, n in sorted(Counter(fault["code"] for fault in faults).items())},
            "by_part_of_layout": dict(sorted(axes.items())),
        }
        lines = ",\n".join("  " + json.dumps(record) for record in records)
        return json.dumps(summary, indent=1)[:-2] + f',\n "records": [\n{lines}\n ]\n}}\n'


def source_version() -> dict[str, str]:
    """The commit, and the hash of the package's tree in it ("-modified": with uncommitted changes); {} without git."""
    package = Path(__file__).resolve().parent.parent / "src" / "meshwright"

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True, check=True).stdout

    try:
        modified = "-modified" if git("status", "--porcelain", ".").strip() else ""
        commit, tree = git("rev-parse", "HEAD", "HEAD:./").split()
    except (OSError, subprocess.CalledProcessError, ValueError):
        return {}
    return {"commit": commit[:12] + modified, "source_tree": tree[:12] + modified}


def enter_namespace() -> bool:
    """Run this program in a mount namespace of its own, where that is permitted; whether it is in one."""
    if os.environ.pop(INSIDE, ""):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(SHARED_MEMORY)], check=True)
        return True
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    try:
        permitted = subprocess.run([*unshare, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode
    except FileNotFoundError:
        return False
    if permitted == 0:
        os.environ[INSIDE] = "yes"
        os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3000.0)
    parser.add_argument("--piece", default="0/1")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--result", type=Path, default=RESULTS / "soak.json")
    parser.add_argument("--fresh", action="store_true", help="repeat trials of other versions of the package")
    options = parser.parse_args()
    piece, pieces = map(int, options.piece.split("/"))
    mounts = enter_namespace()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MESHWRIGHT_PROBE"] = "0"  # a first start would measure the machine and delay the faults
    load()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        soak = Soak(options.seed, options.count, work, options.result.resolve(), mounts, source_version())
        if options.fresh:
            soak.records([], drop_other_sources=True)
        for number in range(piece, options.count, pieces):
            if time.monotonic() - begun > options.seconds:
                break
            if number not in {record["trial"] for record in soak.records([])}:
                record = soak.trial(number)
                soak.records([record])
                print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
