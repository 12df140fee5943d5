"""What can go wrong, and the exit code that a command then ends with.

Any other exception is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import warnings


class MeshwrightError(Exception):
    """Base of every error that Meshwright raises on purpose; its text is one line for a person to read."""

    exit_code = 1


class UserError(MeshwrightError):
    """A mistake in what a person wrote: one line that says what, where, and what would be right."""

    exit_code = 2


class ModelWarning(UserWarning):
    """Warning about config or repository content that is ignored; printed as one line."""


def ignore_model_warnings() -> None:
    """Suppress `ModelWarning` in this rank: its launcher, or rank 0, prints them."""
    warnings.simplefilter("ignore", ModelWarning)


class CheckFailed(MeshwrightError):
    """A check that was asked for does not hold."""

    exit_code = 1


class RankLost(MeshwrightError):
    """A rank of a running job died or stopped answering."""

    exit_code = 3


class RanksDisagree(RankLost):
    """Ranks that should be in the same call are not: what one sent is not what the other waits for."""


class Terminated(MeshwrightError):
    """SIGTERM arrived and the state has been saved: 128 + 15, as a shell counts."""

    exit_code = 143


def out_of_memory_message(error: BaseException) -> str | None:
    """One-line text for a failed allocation in Python, NumPy or torch; None for other exceptions."""
    text = " ".join(str(error).split())
    # torch on a CPU raises no type of its own.
    failed = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not failed and not (isinstance(error, RuntimeError) and "can't allocate memory" in text):
        return None
    return f'out of memory ({text[:200] or type(error).__name__}); "meshwright plan" predicts the memory of a run'
