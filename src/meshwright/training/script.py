"""A user's script as one of several ranks, started by `meshwright run` (`python -m meshwright.training.script`),
torchrun, SLURM, or alone. Free of torch until the script imports it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, Terminated
from meshwright.launcher.launcher import LaunchSpec, launch
from meshwright.launcher.rank_process import run_rank
from meshwright.launcher.rendezvous import RendezvousInfo, is_started_by_others, read_rendezvous_info
from meshwright.terminal import print_message


@dataclass(slots=True)
class LaunchedProcess:
    """State of one rank's process of a script that `meshwright run` started.

    info: rank, world size and rendezvous of the process. directory: run directory, locked by the launcher. result:
    result document of the last call of `fit`. calls: number of calls of `next_rendezvous` so far."""

    info: RendezvousInfo
    directory: Path
    result: dict[str, Any] = field(default_factory=dict)
    calls: int = 0


_launched: ContextVar[LaunchedProcess | None] = ContextVar("launched", default=None)


def next_rendezvous(rendezvous: str | None = None) -> RendezvousInfo:
    """Return rank, world size and rendezvous of this process for its next training run. Without a launcher this is rank
    0 of a world of 1.

    Under `meshwright run` with a file rendezvous (ranks find each other through a file), each call returns a new file,
    because every training run of a script needs a separate file. rendezvous: URL such as "tcp://host:port" or
    "file:///path"; None: the launcher's.
    """
    launched = _launched.get()
    if launched is not None:
        launched.calls += 1
        method = rendezvous or launched.info.method
        return replace(launched.info, method=f"{method}-{launched.calls}" if method.startswith("file:") else method)
    if is_started_by_others():
        return read_rendezvous_info(rendezvous)
    return RendezvousInfo(0, 1, 0, "env://", "itself")


def get_locked_run_directory() -> Path | None:
    """Return the run directory that `meshwright run` has locked for this process; None under any other launcher."""
    launched = _launched.get()
    return None if launched is None else launched.directory


def record_result(result: dict[str, Any]) -> None:
    """Store `result`, the result document (JSON dict of figures) of a training run. At the end of the script this rank
    reports the last stored document to `meshwright run`. Under another launcher do nothing."""
    launched = _launched.get()
    if launched is not None:
        launched.result = result


@contextmanager
def exit_codes() -> Iterator[None]:
    """Context manager that turns an exception into an exit of the process: it prints the exception as one line and
    exits with 2 after a user error, 143 after SIGTERM, 130 after an interrupt, else with the code of the exception's
    class.

    Under `meshwright run` it does nothing, because that command receives the exception and prints it."""
    try:
        yield
    except (MeshwrightError, KeyboardInterrupt) as error:
        if _launched.get() is not None:
            raise
        stopped = isinstance(error, (Terminated, KeyboardInterrupt))
        first = not is_started_by_others() or read_rendezvous_info().rank == 0
        if first or not stopped:  # that all ranks were stopped is printed by rank 0 alone
            text = " ".join(str(error).split()) or "interrupted"
            print_message(f"meshwright: {'' if stopped else 'error: '}{text}")
        sys.exit(error.exit_code if isinstance(error, MeshwrightError) else 130)


def run_script(
    path: Path, arguments: list[str], ranks: int, directory: Path, *, restarts: int = 0, redirect_stdout: bool = False
) -> dict[str, Any]:
    """Run the Python script `path` on `ranks` processes of this machine. Return the result document (JSON dict of
    figures) of the script's last call of `fit` on rank 0; an empty dict if the script does not call `fit`.

    arguments: command-line arguments of the script. directory: run directory, locked while the script runs. restarts:
    maximum number of restarts after a rank was lost. redirect_stdout: True to redirect the script's standard output to
    standard error, so that standard output has only the result. Raises the ranks' exceptions (`UserError`,
    `ScriptFailed` ...), `RankLost` when a rank died, `Terminated` after SIGTERM."""
    description = {"script": str(path.resolve()), "arguments": arguments}
    command = (sys.executable, "-P", "-m", "meshwright.training.script")
    spec = LaunchSpec(description, ranks, directory, restarts, command=command, output=2 if redirect_stdout else 1)
    return launch(spec)


def _run_script_rank(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    """Run the script on this rank and return the result document (JSON dict of figures) of the script's last call of
    `fit`.

    description: JSON dict from the launcher with path of the script ("script"), arguments and run directory; start:
    rank and rendezvous of this process. Raises `ScriptFailed`."""
    launched = LaunchedProcess(start, Path(description["directory"]))
    _launched.set(launched)
    script = description["script"]
    sys.argv = [script, *description["arguments"]]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ScriptFailed(end.code) from None
    return launched.result


class ScriptFailed(MeshwrightError):
    """Error: a script ended with a non-zero exit code. code: the exit code, kept in the attribute `exit_code`."""

    def __init__(self, code: object) -> None:
        """Keep the exit code that the script passed to `sys.exit`; 1 if it is not an integer."""
        super().__init__(f"the script exited with {f'exit code {code}' if isinstance(code, int) else code}")
        self.exit_code = code if isinstance(code, int) else 1


def main() -> None:
    """Run one rank of a script in this process: read the launcher's description, run the script, report its result."""
    # Imported, because __main__ is another module object than the one whose state `fit` reads.
    from meshwright.training import script

    run_rank(script._run_script_rank)


if __name__ == "__main__":
    main()
