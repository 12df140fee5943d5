"""Errors, with the exit code that a command then returns. Any other exception is a bug and keeps its traceback."""

from __future__ import annotations

import re
import warnings


class MeshwrightError(Exception):
    """Base of every error that Meshwright raises deliberately; its text is one line for users."""

    exit_code = 1


class UserError(MeshwrightError):
    """Mistake in user input; one line with the reason, the location and a correction. Quoted words of 1,000 characters
    and more are shortened to 200, the whole to 8,000."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(re.sub(r"(\S{200})\S{800,}", r"\1...", message)[:8000])


class ModelWarning(UserWarning):
    """Warning about config or repository content that is ignored; printed as one line."""


def ignore_model_warnings() -> None:
    """Suppress `ModelWarning` in this rank: its launcher, or rank 0, prints them."""
    warnings.simplefilter("ignore", ModelWarning)


class CheckFailed(MeshwrightError):
    """Failure of a requested check."""

    exit_code = 1


class RankLost(MeshwrightError):
    """Loss of a rank: its process died or stopped answering."""

    exit_code = 3


class RanksDisagree(RankLost):
    """Ranks make different collective calls: the data that one sends is not what another expects."""


class Terminated(MeshwrightError):
    """Shutdown by SIGTERM, after the state was saved; the exit code is 128 + 15, as in a shell."""

    exit_code = 143


def out_of_memory_message(error: BaseException) -> str | None:
    """Return a one-line text for a failed allocation in Python, NumPy or torch; None for other exceptions."""
    text = " ".join(str(error).split())
    # torch raises a plain RuntimeError for a failed CPU allocation.
    failed = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not failed and not (isinstance(error, RuntimeError) and "can't allocate memory" in text):
        return None
    return f'out of memory ({text[:200] or type(error).__name__}); "meshwright plan" predicts the memory of a run'
