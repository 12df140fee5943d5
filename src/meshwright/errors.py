"""Exceptions that Meshwright raises deliberately, with the exit code of a command that ends with one. Any other
exception is a bug and keeps its traceback."""

from __future__ import annotations

import re
import warnings


class MeshwrightError(Exception):
    """Base class of the errors that Meshwright raises deliberately. The text is one line for the user; a command prints
    it and exits with the code `exit_code`."""

    exit_code = 1


class UserError(MeshwrightError):
    """Error in the user's input. The text is one line with the reason, the location and a correction. Words of 1,000 or
    more characters are cut to 200; from a text of more than 8,000 characters the middle is removed."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        """Create the error with one line of text; a long one is shortened as the class says."""
        text = re.sub(r"\S+", lambda word: word[0] if len(word[0]) < 1000 else f"{word[0][:200]}...", message)
        super().__init__(text if len(text) <= 8000 else f"{text[:6000]} ... {text[-1900:]}")


class ModelWarning(UserWarning):
    """Warning about contents of a model's config.json or directory that Meshwright ignores; printed as one line."""


def ignore_model_warnings() -> None:
    """Suppress `ModelWarning` in this process: the launcher, or rank 0, prints them for all ranks."""
    warnings.simplefilter("ignore", ModelWarning)


class CheckFailed(MeshwrightError):
    """Error: a check failed. The result of a layout or collective differs from the reference, or too many training
    steps had a loss or gradient that is nan or inf."""

    exit_code = 1


class RankLost(MeshwrightError):
    """Error: a rank of a run was lost. Its process died or stopped responding."""

    exit_code = 3


class RanksDisagree(RankLost):
    """Error: ranks made different collective calls at the same time, so that a rank received data of a call that it did
    not make."""


class Terminated(MeshwrightError):
    """Error: the process was stopped by SIGTERM, after its state had been saved. The exit code is 128 + 15, as in a
    shell."""

    exit_code = 143


def error_reason(error: OSError) -> str:
    """Return the reason of the OSError `error` as text in lower case, such as "no space left on device"."""
    return (error.strerror or str(error)).lower()


def make_out_of_memory_message(error: BaseException) -> str | None:
    """Return a one-line message if `error` is a failed memory allocation in Python, NumPy or torch; None for other
    errors."""
    text = " ".join(str(error).split())
    # torch raises a plain RuntimeError for a failed CPU allocation.
    failed = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not failed and not (isinstance(error, RuntimeError) and "can't allocate memory" in text):
        return None
    return f'out of memory ({text[:200] or type(error).__name__}); "meshwright plan" predicts the memory of a run'
