"""Decompressed byte streams of source files: gzip and Zstandard, any number of members or frames."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from meshwright.data.sources.resolution import COMPRESSIONS, SourceFile
from meshwright.data.sources.stores import missing_package_error

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
    match detect_compression(file):
        case "gzip":
            return _Gzip(fileobj=raw)
        case "Zstandard":
            unpacked: Stream = _open_zstd(raw, file)
            return unpacked
    return raw


def detect_compression(file: SourceFile) -> str | None:
    """Return the compression of a file by the suffix of its name: "gzip", "Zstandard", or None."""
    return next((name for suffix, name in COMPRESSIONS.items() if file.path.name.lower().endswith(suffix)), None)


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
    module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"  # the same code
    try:
        zstd = import_module(module)
    except ImportError:
        raw.close()
        raise missing_package_error("backports.zstd", file.path) from None
    if zstd.ZstdError not in _zstd_errors:
        _zstd_errors.append(zstd.ZstdError)

    class Zstd(zstd.ZstdFile):  # type: ignore[misc,name-defined]
        """Zstandard stream that, when closed, also closes the file it reads from."""

        def close(self) -> None:
            """Close the stream and the underlying file."""
            super().close()
            raw.close()

    return Zstd(raw, options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_BITS})
