"""Wrappers around the `tokenizers` library for files that may be damaged or hostile: its errors and panics become
`UserError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from meshwright.errors import UserError
from meshwright.limits import LIMITS


@contextmanager
def convert_panics() -> Iterator[None]:
    """Context manager that converts a panic of a Rust library (such as tokenizers) to RuntimeError. A panic is a
    BaseException, which `except Exception` would not catch."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)).with_traceback(error.__traceback__) from None


@contextmanager
def convert_library_errors(what: str) -> Iterator[None]:
    """Context manager that converts all exceptions and panics from calls of the tokenizers library to `UserError`.
    what: beginning of the error message."""
    try:
        with convert_panics():
            yield
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")[:200]
        raise UserError(f"data.tokenizer: {what} (the tokenizers library: {line})") from None


def parse_tokenizer(data: bytes, file: Path) -> Tokenizer:
    """Parse `data`, the content of a tokenizer.json. Raises `UserError` that names `file` if the library cannot read it
    or a token id is larger than the largest vocabulary allowed.
    """
    with convert_library_errors(f"{file} cannot be read as a tokenizer"):
        tokenizer = Tokenizer.from_buffer(data)
    # Writing a tokenizer takes 4 bytes for every unused id below the largest one: 16 GiB for one id of 2**32 - 1.
    largest, most = max(tokenizer.get_vocab().values(), default=0), LIMITS["vocabulary"].most
    if largest >= most:
        raise UserError(f"data.tokenizer: {file} has a token with the id {largest:,}; ids must be below {most:,}")
    return tokenizer
