"""A user's script as one of several ranks: started by `meshwright run` (`python -m meshwright.training.script`), by
torchrun or SLURM, or by itself. Free of torch until the script asks for it."""

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
from meshwright.launcher.rendezvous import Place, join_if_started_by_others
from meshwright.launcher.rendezvous import place as place_by_others
from meshwright.terminal import print_message


@dataclass(slots=True)
class Launched:
    """This process as `meshwright run` started it: its place, the run directory that the launcher has locked, and what
    `fit` returned last. `meetings`: how often ranks have met."""

    place: Place
    directory: Path
    result: dict[str, Any] = field(default_factory=dict)
    meetings: int = 0


_launched: ContextVar[Launched | None] = ContextVar("launched", default=None)


def place(rendezvous: str | None = None) -> Place:
    """This process among the ranks of its script; alone where nobody started several. Each call is for a meeting of its
    own. `rendezvous`: where, unless at the place that who started them has chosen."""
    launched = _launched.get()
    if launched is not None:
        launched.meetings += 1
        method = rendezvous or launched.place.method
        return replace(launched.place, method=f"{method}-{launched.meetings}" if method.startswith("file:") else method)
    if join_if_started_by_others():
        return place_by_others(rendezvous)
    return Place(0, 1, 0, "env://", "itself")


def directory() -> Path | None:
    """The run directory that `meshwright run` has locked; None where others started this process."""
    launched = _launched.get()
    return None if launched is None else launched.directory


def note(result: dict[str, Any]) -> None:
    """A training run in this process has ended."""
    launched = _launched.get()
    if launched is not None:
        launched.result = result


@contextmanager
def exit_codes() -> Iterator[None]:
    """Around what a script does: a mistake is one line and exit code 2, SIGTERM after a save 143, as of a command. In a
    script that `meshwright run` started, that command says it."""
    try:
        yield
    except (MeshwrightError, KeyboardInterrupt) as error:
        if _launched.get() is not None:
            raise
        stopped = isinstance(error, (Terminated, KeyboardInterrupt))
        first = not join_if_started_by_others() or place_by_others().rank == 0
        if first or not stopped:  # that all were stopped, rank 0 says for all
            text = " ".join(str(error).split()) or "interrupted"
            print_message(f"meshwright: {'' if stopped else 'error: '}{text}")
        sys.exit(error.exit_code if isinstance(error, MeshwrightError) else 130)


def run_script(
    path: Path, arguments: list[str], ranks: int, directory: Path, *, restarts: int = 0, aside: bool = False
) -> dict[str, Any]:
    """Run a script on `ranks` processes of this machine and return the result of its last `fit` on rank 0, empty where
    it called none. `aside`: what it prints goes to standard error. Raises as `meshwright.launcher.launcher.launch`."""
    description = {"script": str(path.resolve()), "arguments": arguments}
    command = (sys.executable, "-P", "-m", "meshwright.training.script")
    spec = LaunchSpec(description, ranks, directory, restarts, command=command, output=2 if aside else 1)
    return launch(spec)


def _run(description: dict[str, Any], start: Place) -> dict[str, Any]:
    launched = Launched(start, Path(description["directory"]))
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
    """The script has ended itself with an exit code that says that it failed."""

    def __init__(self, code: object) -> None:
        super().__init__(f"the script ended with {f'exit code {code}' if isinstance(code, int) else code}")
        self.exit_code = code if isinstance(code, int) else 1


def main() -> None:
    """A rank, from the launcher's first word to its report."""
    # Not this module as __main__: `fit` asks the one that everybody imports.
    from meshwright.training import script

    run_rank(script._run)


if __name__ == "__main__":
    main()
