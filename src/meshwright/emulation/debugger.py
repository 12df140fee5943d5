"""Python's debugger in an emulated rank: the other ranks are parked while its prompt waits. Free of torch."""

from __future__ import annotations

import pdb  # noqa: T100 - a feature for users
import sys
from collections.abc import Callable
from types import FrameType
from typing import IO, Any

from meshwright.errors import UserError


class RankDebugger(pdb.Pdb):
    """pdb debugger of one emulated rank, whose prompt shows the rank. output: stream that the debugger prints to,
    instead of `sys.stdout`, which prefixes each line with the rank."""

    def __init__(self, rank: int, output: IO[str]) -> None:
        """Create the debugger without opening its prompt; arguments: see the class."""
        # Readline needs a terminal; signal handlers need the main thread, and ranks run in others.
        terminal = sys.stdin.isatty()
        super().__init__(stdin=None if terminal else sys.stdin, stdout=output, nosigint=True)
        self.use_rawinput = terminal
        self.prompt = f"(rank {rank}) "

    def open_at(self, frame: FrameType) -> None:
        """Open the debugger's prompt in `frame`, at its current line, such as a communication call."""
        self.reset()
        frames = [frame]
        while frames[-1].f_back is not None:
            frames.append(frames[-1].f_back)
        self.botframe = frames[-1]
        self.set_continue()  # unless a command such as "next" changes it
        self.interaction(frame, None)
        if self.quitting or self.breaks or self.stoplineno != -1:
            for each in frames:
                each.f_trace = self.trace_dispatch
            sys.settrace(self.trace_dispatch)


def parse_breakpoint(text: str, ranks: int) -> tuple[int, int]:
    """Parse `text`, "RANK" or "RANK:CALL"; return (rank, number of the rank's communication call, from 1). "RANK" means
    the rank's first call.

    ranks: number of ranks. Raises UserError for another form or a rank out of range.
    """
    rank, _, call = text.partition(":")
    if not rank.isdecimal() or (_ and not call.isdecimal()) or call == "0":
        raise UserError(f'--break {text}: give RANK or RANK:CALL, such as "2" or "2:5" (calls count from 1)')
    if int(rank) >= ranks:
        raise UserError(f"--break {text}: ranks are 0 to {ranks - 1}")
    return int(rank), int(call or 1)


def make_call_breakpoint(breakpoint: tuple[int, int], output: IO[str]) -> Callable[[int, int, FrameType | None], None]:
    """Return a function for `CallMatcher.on_call` that opens the debugger before one communication call.

    breakpoint: (rank, number of the call on that rank, from 1). output: stream for the debugger's prompt.
    """

    def on_call(rank: int, call: int, frame: FrameType | None) -> None:
        """Open the debugger in `frame` if call number `call` of rank `rank` is the one before which to break; called
        before each communication call."""
        if (rank, call) == breakpoint and frame is not None:
            RankDebugger(rank, output).open_at(frame)

    return on_call


def make_breakpoint_hook(current: Callable[[], int], output: IO[str]) -> Callable[..., Any]:
    """Return a function for `sys.breakpointhook`, so that `breakpoint()` opens the debugger of the calling rank.
    current: function that returns the running rank. output: stream for the debugger's prompt."""

    def hook(*_: Any, **__: Any) -> None:
        """Open the debugger of the running rank at the line that follows the caller's `breakpoint()`; the arguments are
        ignored."""
        RankDebugger(current(), output).set_trace(sys._getframe(1))

    return hook
