"""A user's script on emulated ranks, as `meshwright run --emulate` runs it."""

from __future__ import annotations

import io
import os
import pdb  # noqa: T100 - a feature for users
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, Any
from unittest import mock

import torch

from meshwright.emulation.call_matcher import Event
from meshwright.emulation.debugger import make_breakpoint_hook, make_call_breakpoint, parse_breakpoint
from meshwright.emulation.exercise import ExerciseResult, compare_ranks, get_function, make_missing_function_error
from meshwright.emulation.holdings import HeldValue, ModuleLog, format_holdings, list_holdings
from meshwright.emulation.ranks import EmulatedRanks
from meshwright.emulation.scheduler import Failure
from meshwright.errors import MeshwrightError, UserError
from meshwright.flight_recorder.call_log import format_ranks
from meshwright.terminal import print_message


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """Options for a script on emulated ranks.

    breakpoint: "RANK": open the debugger before the first communication call of this rank; "RANK:CALL": open it before
    the rank's communication call with this number, from 1; None: do not open it. show: True to print each communication
    call, and at the end which rank holds which tensors. check: True to compare the results of the script's
    `distributed()` on all ranks with the result of its `one_device()`.
    """

    breakpoint: str | None = None
    show: bool = False
    check: bool = False


@dataclass(slots=True)
class ScriptReport:
    """Result of running a script on emulated ranks.

    Attributes:
        ranks: Number of ranks.
        failure: Text of the first error, empty if there is none.
        failed_rank: Rank that raised the first error; None: no single rank.
        exit_code: Exit code of the command.
        events: Communication calls in order.
        holdings: Tensors that the ranks hold at the end, listed with `ScriptOptions.show`.
        exercise: Comparison with one device, made with `ScriptOptions.check`; else None.
    """

    ranks: int
    failure: str = ""
    failed_rank: int | None = None
    exit_code: int = 0
    events: list[Event] = field(default_factory=list)
    holdings: list[HeldValue] = field(default_factory=list)
    exercise: ExerciseResult | None = None

    def summary(self) -> str:
        """Return the result of `run --check` (ranks compared with one device) as one line of text; empty without
        --check."""
        if self.exercise is None:
            return ""
        wrong, compared = self.exercise.wrong, self.exercise.compared
        if not wrong:
            return f"passed: {compared} tensors equal one device's (worst relative error {self.exercise.worst:.1e})"
        after = f"; {len(wrong) - 1} of the {compared - 1} others are wrong as well" if wrong[1:] else ""
        return f"FAILED: the first wrong tensor is {wrong[0]}{after}"

    def to_json_dict(self, show: bool) -> dict[str, Any]:
        """Return the JSON document of `meshwright run --emulate --json`. show: True to include all communication calls
        and held tensors."""
        document: dict[str, Any] = {
            "ranks": self.ranks, "passed": self.exit_code == 0, "calls": len(self.events),
            "failure": self.failure or None, "failed_rank": self.failed_rank,
        }  # fmt: skip
        if self.exercise is not None:
            wrong = [asdict(each) for each in self.exercise.wrong]
            document |= {"compared": self.exercise.compared, "worst_error": self.exercise.worst, "wrong": wrong}
        if show:
            document |= {"events": list(map(asdict, self.events)), "holdings": list(map(asdict, self.holdings))}
        return document


class RankOutput(io.TextIOBase):
    """Replacement of `sys.stdout` that all ranks share. Each line is written to `output` with a prefix that names the
    rank that printed the line, such as "[rank 2] ". current: function that returns the running rank, None between runs.
    """

    def __init__(self, output: IO[str], current: Callable[[], int | None]) -> None:
        """Store where to write. output: stream that receives the prefixed lines. current: returns the rank that runs,
        None between runs.
        """
        self.output, self._current = output, current
        self._lines: dict[int | None, str] = {}

    def write(self, text: str) -> int:
        """Write the complete lines in `text`, each with the running rank as prefix; keep an incomplete last line until
        a later call ends it. Returns the length of `text`."""
        rank = self._current()
        *lines, self._lines[rank] = (self._lines.get(rank, "") + text).split("\n")
        for line in lines:
            self._write_line(rank, line)
        return len(text)

    def _write_line(self, rank: int | None, line: str) -> None:
        """Write one complete line, `line`, with the prefix "[rank N] ". rank: the rank that printed the line; None: no
        prefix.
        """
        self.output.write(f"[rank {rank}] {line}\n" if rank is not None else f"{line}\n")

    def flush(self) -> None:
        """Flush the output stream; incomplete lines are kept until they end."""
        self.output.flush()

    def fileno(self) -> int:
        """Return the file descriptor of the output stream."""
        return self.output.fileno()

    def __getattr__(self, name: str) -> Any:
        """Return the attribute `name` of the output stream, such as `buffer` or `reconfigure`, which only file streams
        have."""
        return getattr(self.output, name)

    def finish(self) -> None:
        """Write the incomplete last lines of all ranks."""
        for rank, line in list(self._lines.items()):  # threads of the script may still print
            if line:
                self._write_line(rank, line)
        self._lines.clear()
        self.output.flush()


def run_emulated_script(path: Path, arguments: list[str], ranks: int, options: ScriptOptions) -> ScriptReport:
    """Run a script on `ranks` emulated ranks (threads of this process), as torchrun would start it on processes; return
    the report.

    path: the script. arguments: its command-line arguments. options: debugger, printed calls and check of the results.
    Raises UserError for an invalid breakpoint, a syntax error in the script, or with `options.check` for a script
    without functions `distributed()` and `one_device()`.
    """
    before = None if options.breakpoint is None else parse_breakpoint(options.breakpoint, ranks)
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f"{path}:{error.lineno}" if error.lineno else str(path)  # none for an unknown encoding or a null byte
        raise UserError(f"{place}: {error.msg}") from None
    report, log = ScriptReport(ranks), ModuleLog()
    with ExitStack() as stack:
        emulated = stack.enter_context(EmulatedRanks(ranks, initialized=options.check))

        def current() -> int | None:
            """Return the emulated rank that is running; None outside a run."""
            running = emulated.scheduler.running
            return None if running is None else running.index

        printed = sys.stdout
        output = RankOutput(printed, current)
        stack.enter_context(mock.patch.object(sys, "stdout", output))
        stack.callback(output.finish)
        hook = make_breakpoint_hook(lambda: current() or 0, printed)
        for where, name in ((sys, "breakpointhook"), (pdb, "set_trace")):
            stack.enter_context(mock.patch.object(where, name, hook))
        stack.enter_context(mock.patch.object(sys, "path", [str(path.resolve().parent), *sys.path]))
        emulated.matcher.events.clear()
        emulated.matcher.on_call = None if before is None else make_call_breakpoint(before, printed)
        if options.show:
            emulated.matcher.on_event = lambda event: print(format_event(event), file=printed)
            stack.enter_context(log.record_modules(lambda: current() or 0))
        modules = [make_main_module(path) for _ in range(ranks)]
        for state, module in zip(emulated.states, modules, strict=True):
            state.main, state.arguments = module, [str(path), *arguments]
            state.directory = str(path.resolve().parent) + os.sep
        report.events = emulated.events
        try:
            if options.check:
                report.exercise = _check_exercise(emulated, code, modules, path)
                report.exit_code = 0 if report.exercise.passed else 1
            else:
                emulated.run_each([partial(_execute, code, module, "__main__") for module in modules])
        except UserError:
            raise
        except Exception as error:
            report.failure, report.failed_rank, report.exit_code = describe_failure(emulated.failure, error)
        output.finish()
        calls = emulated.scheduler.ranks[before[0]].calls if before else 0
        if before and calls < before[1] and "stopped in the debugger" not in report.failure:
            print_message(f"--break {options.breakpoint}: not reached: rank {before[0]} made {calls} calls")
        if options.show:
            report.holdings = list_holdings(log, [vars(module) for module in modules])
            print(format_holdings(report.holdings), file=printed)
    return report


def _check_exercise(emulated: EmulatedRanks, code: CodeType, modules: list[ModuleType], path: Path) -> ExerciseResult:
    """Run the function `distributed()` of a script on all ranks, then its function `one_device()` on rank 0, both with
    default dtype float64; return the comparison of their results.

    emulated: the ranks. code: compiled script. modules: [rank], the module in which the rank executes it. path: path of
    the script, for error messages.
    """

    for name in ("one_device", "distributed"):  # before it runs: another kind of script would fail, or train for hours
        if name not in code.co_names and ("*",) not in code.co_consts:
            raise make_missing_function_error(name, str(path))

    def run(module: ModuleType) -> Any:
        """Execute the script in the rank's `module` with default dtype float64; return what `distributed()` returns."""
        torch.set_default_dtype(torch.float64)
        _execute(code, module, "exercise")
        get_function(vars(module), "one_device", str(path))
        distributed = get_function(vars(module), "distributed", str(path))
        with _catch_exit():
            return distributed()

    results = emulated.run_each([partial(run, module) for module in modules])

    def compute_truth(module: ModuleType) -> Any:
        """Return the result of `one_device()` of the script that was executed in `module`."""
        return get_function(vars(module), "one_device", str(path))()

    tasks: list[Callable[[], Any]] = [lambda: None for _ in modules]
    tasks[0] = partial(compute_truth, modules[0])
    return compare_ranks(emulated.run_each(tasks)[0], results)


def make_main_module(path: Path) -> ModuleType:
    """Return an empty `__main__` module in which the script at `path` can be executed."""
    module = ModuleType("__main__")
    module.__file__ = str(path)
    module.__dict__["__builtins__"] = __builtins__
    return module


def _execute(code: CodeType, module: ModuleType, name: str) -> None:
    """Execute a script's code in `module`, with `__name__` set to `name`. Raises ScriptEnded if the script calls
    `sys.exit` with a non-zero exit code."""
    module.__dict__["__name__"] = name
    with _catch_exit():
        exec(code, module.__dict__)


@contextmanager
def _catch_exit() -> Iterator[None]:
    """Context manager in which `sys.exit(0)` ends the block normally, and any other exit raises ScriptEnded."""
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ScriptEnded(end.code) from None


class ScriptEnded(MeshwrightError):
    """Raised when the script calls `sys.exit` with a non-zero exit code, or with a text."""

    def __init__(self, code: object) -> None:
        """Keep the exit code that the script passed to `sys.exit`; 1 if it is not an integer."""
        super().__init__(f"the script ended with exit code {code}" if isinstance(code, int) else str(code))
        self.exit_code = code if isinstance(code, int) else 1


def describe_failure(failure: Failure | None, error: BaseException) -> tuple[str, int | None, int]:
    """Describe why a run failed, for its report; return (text, rank, exit code).

    text: message of `error` if Meshwright or the script's `sys.exit` raised it, or if no rank failed; else the
    traceback of the rank. rank: rank that failed first; None if there is no single rank. exit code: exit code for the
    command.

    failure: first error of any rank; None if none was recorded. error: exception that ended the run."""
    if failure is None:
        return str(error), None, 1
    where = "" if failure.rank is None else f"[rank {failure.rank}] "
    if type(error).__name__ == "BdbQuit":
        return f"{where}stopped in the debugger", failure.rank, 1
    if isinstance(error, MeshwrightError):
        return f"{where}{error}", failure.rank, error.exit_code
    return f"{where}{failure.text.rstrip()}", failure.rank, 1


def format_event(event: Event) -> str:
    """Return one line of text on the communication call `event`: order, rank, operation, group, shape, bytes, code
    location.
    """
    call = f"{event.operation:<14} ranks {format_ranks(event.group):<8} {event.shape:<18} {event.bytes:>9,} B"
    return f"#{event.order:<4} rank {event.rank}  {call}  {event.place}"
