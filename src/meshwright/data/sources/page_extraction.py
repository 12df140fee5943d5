"""Extracts the main text of HTML pages by a library; runs as a subprocess, since pages come from strangers.

This file imports nothing of Meshwright: the subprocess holds nothing but the library.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def make_handler() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that extracts main texts in the subprocess of `PageExtractor`; it maps a request to an
    answer, both JSON objects.

    The first request is {"extractor": name of a library}, each further request {"html": a page}. An answer is {"text":
    the main text, "" if there is none}, or {"error": why the library fails on the page}. The function raises
    `MemoryError` for a page that needs too much memory.
    """
    extractors: list[Callable[[str], str | None]] = []

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        """Load the library of a request, or extract the text of its page."""
        if "extractor" in request:
            extractors[:] = [_LOADERS[request["extractor"]]()]
            return {}
        try:
            return {"text": extractors[0](request["html"]) or ""}
        except MemoryError:
            raise
        except Exception as error:  # a page that breaks the library
            return {"error": f"makes the extractor fail ({type(error).__name__})"}

    return handle


def _load_trafilatura() -> Callable[[str], str | None]:
    """Return a function that extracts the main text of a page, without comments, by trafilatura (Barbaresi, ACL
    2021)."""
    from trafilatura import extract

    return lambda html: extract(html, include_comments=False)


def _load_resiliparse() -> Callable[[str], str | None]:
    """Return a function that extracts the main text of a page by Resiliparse, with the settings of DCLM
    (arXiv:2406.11794, section 4.2): no alternative texts of images."""
    extract = import_module("resiliparse.extract.html2text").extract_plain_text
    return lambda html: extract(html, main_content=True, alt_texts=False)


_LOADERS = {"trafilatura": _load_trafilatura, "resiliparse": _load_resiliparse}
