"""Main texts of HTML pages, extracted in a subprocess under limits on CPU time and memory."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import TypeAlias

from meshwright.data.limited_process import HandlerFailed, LimitedProcess
from meshwright.data.sources import page_extraction
from meshwright.errors import UserError
from meshwright.names import EXTRACTORS

EXTRACT_SECONDS = 10  # of CPU time for one page; usually 0.01
_PATIENCE = 3  # times as many seconds for a page that was extracted before: its document must not be lost
MEMORY_BYTES = 2 << 30  # address space of the process
_PAGES = 10_000  # that one process handles: the libraries' caches grow with the pages

Extraction: TypeAlias = tuple[str | None, str | None]
"""(Main text of a page, "" if there is none; None), or (None, why there is none, as a clause)."""

FAILED: Extraction = (None, "failed when it was read before")


class PageExtractor:
    """Extractor of the main texts of HTML pages. Its library runs in a subprocess with limits on CPU time and memory,
    so that a hostile page neither hangs nor exhausts memory."""

    def __init__(self, library: str, seconds: int) -> None:
        """Start the subprocess. library: one of `names.EXTRACTORS`. seconds: limit on CPU time for a page. Raises
        `UserError` if the library is not installed or cannot be loaded.
        """
        if find_spec(library) is None:
            raise _missing_extractor_error(library)
        self._library, self._seconds, self._pages = library, seconds, 0
        self._process = self._make_process()

    def extract_text(self, html: str) -> Extraction:
        """Extract the main text of the page `html`. The result has the text or, if that fails, the reason, such as
        "takes more than 10 s of CPU time"."""
        if self._pages == _PAGES:
            self._process, self._pages = self._make_process(), 0
        answer = self._process.ask({"html": html})
        self._pages += 1
        if problem := answer.get("limit") or answer.get("error"):
            return None, str(problem)
        return str(answer["text"]), None

    def _make_process(self) -> LimitedProcess:
        """Start a subprocess, load the library in it, and return the subprocess. Raises `UserError` if the library
        cannot be loaded."""
        first = {"extractor": self._library}
        process = LimitedProcess(page_extraction.__file__, first, self._seconds, MEMORY_BYTES)
        try:
            problem = process.start().get("limit")
        except HandlerFailed as error:
            problem = f"fails with {error}"
        if problem:
            raise UserError(f'data.extractor: loading "{self._library}" {problem}; reinstall the package')
        return process


@cache
def get_page_extractor(library: str, again: bool = False) -> PageExtractor:
    """Return the page extractor of this process for `library`, one of `names.EXTRACTORS`; it is created once. again:
    True for a second extraction of the same pages, with a higher time limit. Raises `UserError` if the library is not
    installed."""
    return PageExtractor(library, EXTRACT_SECONDS * (_PATIENCE if again else 1))


def describe_extractor(library: str) -> str:
    """Return name and version of an installed extraction library, such as "trafilatura 2.3.1"; the extracted texts
    depend on both. library: one of `names.EXTRACTORS`. Raises `UserError` if it is not installed."""
    try:
        return f"{library} {metadata.version(library)}"
    except metadata.PackageNotFoundError:
        raise _missing_extractor_error(library) from None


def _missing_extractor_error(library: str) -> UserError:
    """Build the error for the extraction library `library` that is not installed."""
    return UserError(f"WARC files need the package {library}: pip install 'meshwright[{EXTRACTORS[library]}]'")
