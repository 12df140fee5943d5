"""Files behind URLs: object stores through obstore, other stores through fsspec, with retries.

Credentials come from the environment alone, as the stores' own tools read them; URLs with credentials are refused."""

from __future__ import annotations

import errno
import io
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from meshwright.errors import UserError

BLOCK = 8 << 20  # bytes requested from a store at a time
TRIES = 6
FIRST_WAIT = 0.5  # seconds before the second try; doubles for each further one
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss", "http", "https"}
# Protocols of fsspec that are safe in a recipe from a stranger: they do not log in with the user's keys, do not follow
# references in a file to other locations, and do not execute what they read.
_READERS = {"file", "local", "memory", "data", "zip", "tar", "simplecache", "hf", "github", "gist", "oss", "oci"}
ALLOWED = "MESHWRIGHT_STORES"  # environment variable: comma-separated list of further protocols
_SECRET_QUERY = re.compile(r"(?i)[?&](x-amz-|x-goog-|sig=|signature=|token=|access_token=|key=|api_?key=)")
_SECRET_VARIABLE = re.compile(r"(?i)key|token|secret|password|credential|signature|connection_string")
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, ValueError)
_REFUSED_BY_OBSTORE = {"PermissionDeniedError", "UnauthenticatedError"}
_FINAL_OF_OBSTORE = {"NotFoundError", "NotSupportedError", *_REFUSED_BY_OBSTORE}
_TEMPORARY_STATUS = (408, 425, 429)
_NO_CREDENTIALS = "169.254.169.254"  # metadata service of cloud machines, queried if the environment has no credentials

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in a remote store, such as S3 or a web server. url: URL of the file. place: path in `filesystem`. size:
    bytes; None if unknown. version: entity tag, checksum or time that changes with the content; None if the store
    reports none. filesystem: fsspec file system that reads it.
    """

    url: str
    place: str
    size: int | None
    version: str | None
    filesystem: Any = field(compare=False, repr=False)

    def __str__(self) -> str:
        """Return the URL."""
        return self.url

    @property
    def name(self) -> str:
        """File name without directories."""
        return _strip_url(self.url).rpartition("/")[2]

    def open(self) -> io.BufferedReader:
        """Open the file for seekable reading in blocks; it is downloaded to an unnamed temporary file if the store does
        not support range reads.
        """
        if self.size is None or type(self.filesystem).__name__ == "HTTPFileSystem":  # which may ignore ranges
            return self._download()
        try:
            return io.BufferedReader(_BlockReader(self), 1 << 16)
        except _NotSupported:
            return self._download()

    def query_state(self) -> StoredFile:
        """Query the store for the file's current size and version; return a `StoredFile` with these. Raises `UserError`
        if the file is gone."""
        self.filesystem.invalidate_cache()
        entry = retry(self.url, lambda: self.filesystem.info(self.place))
        return _make_stored_file(self.url, self.place, entry, self.filesystem)

    def _download(self) -> io.BufferedReader:
        """Download the file to an unnamed temporary file and open that."""
        with tempfile.TemporaryDirectory(prefix="meshwright-") as directory:
            target = os.path.join(directory, "file")
            retry(self.url, lambda: self.filesystem.get_file(self.place, target))
            return io.BufferedReader(io.FileIO(target), 1 << 16)  # stays readable without a name until it is closed


_LOCAL = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)
"""Error numbers of the local disk, not of the store."""


class StoreUnreached(UserError):
    """Error: the store cannot be reached or refuses access, so that its files are unknown."""


class _NotSupported(UserError):
    """Error: the store does not support the request, such as a range read."""


class _BlockReader(io.RawIOBase):
    """Seekable raw stream over a file in a remote store. It fetches blocks of 8 MiB by range reads, and keeps only the
    last one in memory."""

    def __init__(self, file: StoredFile) -> None:
        """Start at position 0; no block is fetched yet."""
        assert file.size is not None
        self._file, self._size = file, file.size
        self._place, self._number, self._block = 0, -1, memoryview(b"")
        if self._size:
            self._fetch_block(0)

    def readable(self) -> bool:
        """Return True: the stream supports reading."""
        return True

    def seekable(self) -> bool:
        """Return True: the stream supports seeking."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position to `offset` bytes from the start (`whence` = 0), the current position (1) or the end (2) of
        the file; returns the new position in bytes from the start.
        """
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer`, at most to the end of the current block; returns the number of bytes read, 0 at the end
        of the file.
        """
        if self._place >= self._size:
            return 0
        number, begin = divmod(self._place, BLOCK)
        if number != self._number:
            self._fetch_block(number)
        part = self._block[begin : begin + len(buffer)]
        buffer[: len(part)] = part
        self._place += len(part)
        return len(part)

    def _fetch_block(self, number: int) -> None:
        """Fetch the block with index `number` from the store; it replaces the previous one."""
        begin, end = number * BLOCK, min((number + 1) * BLOCK, self._size)

        def load() -> memoryview:
            """Fetch the bytes of the block. Raises `OSError` if fewer arrive."""
            data = memoryview(self._file.filesystem.cat_file(self._file.place, start=begin, end=end))
            if len(data) != end - begin:
                raise OSError(f"{len(data):,} bytes received instead of {end - begin:,}")
            return data

        self._block = retry(self._file.url, load, f" at byte {begin:,} of {self._size:,}")
        self._number = number


def retry(url: str, ask: Callable[[], Result], where: str = "") -> Result:
    """Call `ask`, a request to the store of `url`, and return its result. If it fails, it is called again after a
    growing pause, up to 6 times in all; then a one-line `UserError` is raised.

    Errors that waiting does not change, such as a missing file, are raised immediately. where: text appended to the
    error message, such as " at byte 8,388,608 of 9,000,000".
    """
    for number in range(TRIES):
        try:
            return ask()
        except StoreUnreached:
            raise
        except Exception as error:  # every store raises its own types
            kind = type(error).__name__
            if isinstance(error, OSError) and error.errno in _LOCAL:
                raise UserError(
                    f"{url}: no space for it in {tempfile.gettempdir()} ({error.strerror}); free some, or set "
                    "TMPDIR to another directory"
                ) from None
            if kind == "NotSupportedError":
                raise _NotSupported(f"{url} cannot be read{where}: {_format_reason(error)}") from None
            status = _find_status(error)
            if (
                isinstance(error, _FINAL)
                or kind in _FINAL_OF_OBSTORE
                or (status is not None and 400 <= status < 500 and status not in _TEMPORARY_STATUS)
                or _NO_CREDENTIALS in str(error)
            ):
                raise (StoreUnreached if _is_refused(error) else UserError)(
                    f"{url} cannot be read{where}: {_format_reason(error)}{_suggest_fix(url, error)}"
                ) from None
            if number == TRIES - 1:
                raise StoreUnreached(
                    f"{url} cannot be read{where}: {TRIES} tries failed, the last with: {_format_reason(error)}; "
                    "run the command again when the store answers"
                ) from None
        time.sleep(FIRST_WAIT * 2**number * random.uniform(0.75, 1.25))
    raise AssertionError("the last try returns or raises")


def is_url(source: str) -> bool:
    """Return True if `source` is a URL (or a chain of URLs, as fsspec writes it), not a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)", source) is not None


def parse_file_url(url: str) -> Path | None:
    """Convert `url`, a `file://` URL, to its local path; returns None for any other URL."""
    if not url.lower().startswith("file://"):
        return None
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.netloc in ("", "localhost") else None


def query_stored_files(url: str, key: str) -> Iterator[tuple[str, StoredFile, bool]]:
    """Query a remote store for the files behind `url` (a file, glob or directory). Yields (name relative to the URL,
    file, True if the URL names this single file). key: recipe key for errors. Raises `UserError` for URLs with
    credentials or refused protocols, missing files and unreachable stores."""
    _refuse_secrets(url, key)
    filesystem, place = _open_filesystem(url, key)
    filesystem.invalidate_cache()
    over_http = url.startswith(("http://", "https://"))  # where ? begins a query, and directories are not listed
    if "*" in place or (not over_http and re.search(r"[?\[]", place)):
        if over_http:
            raise UserError(f'{key}: "{url}": HTTP servers cannot list files; name each one')
        found = retry(url, lambda: filesystem.glob(place, detail=True))
        root = re.split(r"[^/]*[*?\[]", place)[0]
        if not any(_is_file(entry) for entry in found.values()):
            raise UserError(f'{key}: "{url}" matches no file')
    else:
        try:
            entry = retry(url, lambda: filesystem.info(place))
        except _NotSupported:
            raise UserError(f'{key}: "{url}": the server gives no information about it') from None
        if entry["type"] != "directory":
            yield _strip_url(url).rpartition("/")[2], _make_stored_file(url, place, entry, filesystem), True
            return
        found = retry(url, lambda: filesystem.find(place, detail=True))
        root = place
    first, _, others = url.partition("::")
    protocol, others = first.partition("://")[0], f"::{others}" if others else ""
    for path, entry in found.items():
        name = _strip_url(path).removeprefix(_strip_url(root)).strip("/")
        if _is_file(entry) and name and not any(part.startswith(".") for part in name.split("/")):
            yield (
                name,
                _make_stored_file(f"{protocol}://{path.partition('://')[2] or path}{others}", path, entry, filesystem),
                False,
            )


def _strip_url(url: str) -> str:
    """Return the path in `url`, or in the first URL of a chain ("a::b"), without protocol, query, and "/" at both
    ends."""
    return re.sub(r"^[A-Za-z][A-Za-z0-9+.-]*://", "", url.partition("::")[0].partition("?")[0]).strip("/")


def find_first_changed(files: Sequence[StoredFile]) -> int | None:
    """Return the index of the first of `files` whose size or version in its store has changed, or None if none has."""
    with ThreadPoolExecutor(16) as pool:
        for number, (file, now) in enumerate(zip(files, pool.map(StoredFile.query_state, files), strict=True)):
            if now != file:
                return number
    return None


def _make_stored_file(url: str, place: str, entry: dict[str, Any], filesystem: Any) -> StoredFile:
    """Build a `StoredFile` for `url`. place: path in `filesystem`. entry: the file's metadata from the fsspec
    `filesystem` ("size", "ETag" ...)."""
    return StoredFile(url, place, entry.get("size"), _find_version(entry), filesystem)


def _is_file(entry: dict[str, Any]) -> bool:
    """Return True if an entry of an fsspec listing, {"type", "name" ...}, is a file, not a directory or its marker."""
    return entry["type"] == "file" and not entry["name"].endswith("/")


def _find_version(entry: dict[str, Any]) -> str | None:
    """Return a version of a file, a text that changes with its content: its entity tag, else a checksum, else the
    modification time; None if the store reports none of them. entry: metadata of the file from the fsspec file system.
    """
    for key in ("e_tag", "ETag", "etag", "md5", "Content-MD5", "Digest", "Last-Modified", "last_modified", "mtime"):
        if entry.get(key):
            return f"{key.lower().replace('_', '')} {entry[key]}"
    for key in ("LastModified", "modified", "created"):
        if entry.get(key):
            return f"{key} {entry[key]}"
    return None


def _open_filesystem(url: str, key: str) -> tuple[Any, str]:
    """Return (fsspec file system that reads `url`, path of `url` in it). key: recipe key with which errors begin.
    Raises `UserError` if a package is missing or the protocol is not allowed.
    """
    try:
        import fsspec
    except ImportError:
        raise missing_package_error("fsspec", url) from None
    _refuse_protocols(url, key, set(fsspec.available_protocols()))
    protocol = url.partition("://")[0].lower()
    try:
        if protocol in _OBJECT_STORES and "::" not in url and not (protocol.startswith("http") and "?" in url):
            endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
            plain = protocol == "http" or (protocol.startswith("s3") and endpoint.startswith("http://"))
            store = import_module("obstore.fsspec").FsspecStore(
                protocol,
                client_options={"timeout": "120s", "connect_timeout": "10s", "allow_http": plain},
                retry_config={"max_retries": 0},  # `retry` does the retries
            )
            return store, url if protocol.startswith("http") else url.partition("://")[2]
        filesystem, place = fsspec.core.url_to_fs(url)
        return filesystem, place
    except ImportError as error:
        if str(error.name).startswith("obstore"):
            raise missing_package_error("obstore", url) from None
        raise UserError(f'{key}: "{url}" needs one more package: {_format_reason(error)}') from None
    except ValueError as error:
        raise UserError(f'{key}: "{url}": {_format_reason(error)}') from None


def missing_package_error(package: str, what: object) -> UserError:
    """Build the error for a missing package that `pip install 'meshwright[data]'` installs. what: URL or path of the
    file that needs it.
    """
    return UserError(f"{what} needs the package {package}: pip install 'meshwright[data]'")


def _refuse_secrets(url: str, key: str) -> None:
    """Raise `UserError` if `url`, given in a recipe, contains credentials or a signature. key: recipe key with which
    the error begins.
    """
    if re.search(r"://[^/?#]*@", url) or _SECRET_QUERY.search(url):
        shown = re.sub(r"://[^/?#]*@", "://", url).partition("?")[0]
        raise UserError(
            f'{key}: the URL of "{shown}" has credentials, which do not belong in a recipe; put them into the '
            "environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, "
            "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY)"
        )


def _refuse_protocols(url: str, key: str, protocols: set[str]) -> None:
    """Raise `UserError` if `url` (or a URL of a chain "a::b") has a protocol that may log in with the user's keys, and
    that the environment variable MESHWRIGHT_STORES does not list. key: recipe key with which the error begins.
    protocols: names of all protocols of fsspec."""
    allowed = {name.strip().lower() for name in os.environ.get(ALLOWED, "").split(",")}
    for part in url.split("::"):
        protocol = part.partition("://")[0].lower()
        if protocol in protocols - _OBJECT_STORES - _READERS - allowed:
            known = ", ".join(sorted(_OBJECT_STORES | _READERS))
            raise UserError(
                f'{key}: "{url}": {protocol} may log in with your keys at a host that the recipe names, or read other '
                f"locations; if you trust it, set {ALLOWED}={protocol} in the environment (allowed without: {known})"
            )


def _format_reason(error: Exception) -> str:
    """Format the exception `error` as one line of at most 300 characters; values of environment variables that hold
    secrets are replaced by "***".
    """
    text = str(error)
    code, message = (re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("Code", "Message"))
    if code:
        text = f"{code[1]} ({message[1]})" if message else code[1]
    text = " ".join(text.partition("\n\nDebug source")[0].split()) or type(error).__name__
    for name, value in os.environ.items():
        if len(value) >= 6 and _SECRET_VARIABLE.search(name):
            text = text.replace(value, "***")
    return text if len(text) <= 300 else f"{text[:300]}..."


def _is_refused(error: Exception) -> bool:
    """Return True if an error means that the store denies this process access."""
    named = isinstance(error, PermissionError) or type(error).__name__ in _REFUSED_BY_OBSTORE
    return named or _NO_CREDENTIALS in str(error) or _find_status(error) in (401, 403)


def _find_status(error: Exception) -> int | None:
    """Return the HTTP status code of an error, from its attribute `status` or its message; None if it has none."""
    if isinstance(status := getattr(error, "status", None), int):
        return status
    entry = re.search(r"status code: (\d+)", str(error))
    return int(entry[1]) if entry else None


def _suggest_fix(url: str, error: Exception) -> str:
    """Return a hint for the user after a failed read, to append to its error message; "" if nothing is known. Missing
    files and refused S3 credentials are recognised. url: the URL that was read. error: exception of the store's
    library."""
    kind, status = type(error).__name__, _find_status(error)
    if isinstance(error, FileNotFoundError) or kind == "NotFoundError" or status == 404:
        return "; there is no such file or directory"
    if url.startswith("s3") and (_is_refused(error) or status == 400):
        return (
            "; credentials come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION "
            "(AWS_SKIP_SIGNATURE=true for a public bucket)"
        )
    return ""
