"""Compression of source files, gzip and Zstandard: decompressed byte streams of any number of members or frames."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from meshwright.data.sources.resolution import COMPRESSIONS, SourceFile
from meshwright.data.sources.stores import StoredFile, missing_package_error
from meshwright.errors import UserError

_HEAD = 1 << 16  # bytes of a buffer, available to `peek`
_MAX_WINDOW_BITS = 31  # bits: the maximum, written by `zstd --long=31`

Stream: TypeAlias = "io.BufferedReader[Any] | gzip.GzipFile"  # or a ZstdFile, which has the same methods
_zstd_errors: list[type[Exception]] = []


def open_stream(file: SourceFile) -> Stream:
    """Open a source file as a stream of decompressed bytes. Reading raises `EOFError` if a compressed file is
    truncated.
    """
    raw: io.BufferedReader[Any]
    raw = io.BufferedReader(io.FileIO(file.path), _HEAD) if isinstance(file.path, Path) else file.path.open()
    match detect_compression(file.path.name):
        case "gzip":
            return _Gzip(fileobj=raw)
        case "Zstandard":
            unpacked: Stream = _open_zstd(raw, file)
            return unpacked
    return raw


def detect_compression(name: str) -> str | None:
    """Return the compression of a file by the suffix of its `name`: "gzip", "Zstandard", or None."""
    return next((found for suffix, found in COMPRESSIONS.items() if name.lower().endswith(suffix)), None)


def compress_by_suffix(path: Path, data: bytes) -> bytes:
    """Return `data` in the compression that the suffix of `path` names, unchanged without one. Raises `UserError` if
    the Zstandard package is needed and not installed."""
    match detect_compression(path.name):
        case "gzip":
            return gzip.compress(data, mtime=0)
        case "Zstandard":
            compressed: bytes = _import_zstd(path).compress(data)
            return compressed
    return data


def list_decoding_errors() -> tuple[type[Exception], ...]:
    """Return the exception types that reading a damaged compressed file raises."""
    return gzip.BadGzipFile, zlib.error, *_zstd_errors


class _Gzip(gzip.GzipFile):
    """Gzip stream that decompresses the open file `fileobj` and, when closed, also closes this file."""

    def __init__(self, fileobj: io.BufferedReader[Any]) -> None:
        """Wrap the open file `fileobj`."""
        super().__init__(fileobj=fileobj, mode="rb")
        self.myfileobj: Any = fileobj  # GzipFile closes this file


def _open_zstd(raw: io.BufferedReader[Any], file: SourceFile) -> Any:
    """Open a stream that decompresses `raw` with Zstandard. file: names the file in errors. Raises `UserError` if the
    Zstandard package is not installed.
    """
    try:
        zstd = _import_zstd(file.path)
    except UserError:
        raw.close()
        raise
    if zstd.ZstdError not in _zstd_errors:
        _zstd_errors.append(zstd.ZstdError)

    class Zstd(zstd.ZstdFile):  # type: ignore[misc,name-defined]
        """Zstandard stream that, when closed, also closes the file it reads from."""

        def close(self) -> None:
            """Close the stream and the underlying file."""
            super().close()
            raw.close()

    return Zstd(raw, options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_BITS})


def _import_zstd(path: Path | StoredFile) -> Any:
    """Return Python's Zstandard module or its backport, the same code. path: the file that needs it. Raises `UserError`
    if it is not installed."""
    try:
        return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError:
        raise missing_package_error("backports.zstd", path) from None
