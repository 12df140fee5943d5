"""Files behind URLs: object stores through obstore, other stores through fsspec; each request is tried several times.

Credentials come from the environment alone, where the stores' own tools look for them; a URL that holds some is
refused.
"""

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

BLOCK = 8 << 20  # bytes asked of a store at a time
TRIES = 6
FIRST_WAIT = 0.5  # seconds before the second try; twice as long before each one after
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss", "http", "https"}
# Of fsspec, what reads from places that strangers may name: nothing of these logs in there with keys of the user's, is
# told by a file to read other places, or runs what it reads.
_READERS = {"file", "local", "memory", "data", "zip", "tar", "simplecache", "hf", "github", "gist", "oss", "oci"}
ALLOWED = "MESHWRIGHT_STORES"  # the environment's list of further protocols, with commas between them
_SECRET_QUERY = re.compile(r"(?i)[?&](x-amz-|x-goog-|sig=|signature=|token=|access_token=|key=|api_?key=)")
_SECRET_VARIABLE = re.compile(r"(?i)key|token|secret|password|credential|signature|connection_string")
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, ValueError)
_FINAL_OF_OBSTORE = {"NotFoundError", "PermissionDeniedError", "UnauthenticatedError", "NotSupportedError"}
_FINAL_STATUS = re.compile(r"status code: 4(?!08|25|29)\d\d")
_NO_CREDENTIALS = "169.254.169.254"  # where a cloud's machine is asked for its role, if the environment has none

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in a store. `place`: what its file system calls it. `version`: what changes with its content, as the store
    says it; None if it says nothing."""

    url: str
    place: str
    size: int | None
    version: str | None
    filesystem: Any = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return _bare(self.url).rpartition("/")[2]

    def open(self) -> io.BufferedReader:
        """Its bytes, seekable. A store that gives no parts of a file gives all of it, into an unnamed temporary one."""
        if self.size is None or type(self.filesystem).__name__ == "HTTPFileSystem":  # which may ignore ranges
            return self._fetched()
        try:
            return io.BufferedReader(_Blocks(self), 1 << 16)
        except _NotSupported:
            return self._fetched()

    def now(self) -> StoredFile:
        """The same file as the store has it now; `UserError` if it is gone."""
        self.filesystem.invalidate_cache()
        said = trying(self.url, lambda: self.filesystem.info(self.place))
        return _stored(self.url, self.place, said, self.filesystem)

    def _fetched(self) -> io.BufferedReader:
        with tempfile.TemporaryDirectory(prefix="meshwright-") as directory:
            target = os.path.join(directory, "file")
            trying(self.url, lambda: self.filesystem.get_file(self.place, target))
            return io.BufferedReader(io.FileIO(target), 1 << 16)  # lives on, without its name, until it is closed


_LOCAL = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)
"""Of the disk here, not of the store."""


class StoreUnreached(UserError):
    """A store that does not answer, or not to this process: that says nothing of what it holds."""


class _NotSupported(UserError):
    """The store does not do what was asked, such as giving a part of a file."""


class _Blocks(io.RawIOBase):
    """A stored file read block after block; the block that was read last is kept."""

    def __init__(self, file: StoredFile) -> None:
        assert file.size is not None
        self._file, self._size = file, file.size
        self._place, self._number, self._block = 0, -1, memoryview(b"")
        if self._size:
            self._load(0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        if self._place >= self._size:
            return 0
        number, begin = divmod(self._place, BLOCK)
        if number != self._number:
            self._load(number)
        part = self._block[begin : begin + len(buffer)]
        buffer[: len(part)] = part
        self._place += len(part)
        return len(part)

    def _load(self, number: int) -> None:
        begin, end = number * BLOCK, min((number + 1) * BLOCK, self._size)

        def load() -> memoryview:
            data = memoryview(self._file.filesystem.cat_file(self._file.place, start=begin, end=end))
            if len(data) != end - begin:
                raise OSError(f"{len(data):,} bytes came instead of {end - begin:,}")
            return data

        self._block = trying(self._file.url, load, f" at byte {begin:,} of {self._size:,}")
        self._number = number


def trying(url: str, ask: Callable[[], Result], where: str = "") -> Result:
    """What `ask` returns, tried `TRIES` times with longer and longer waits; then `UserError` in one line.

    What will not change by waiting is not tried again: a file that is not there, a door that is closed.
    """
    for number in range(TRIES):
        try:
            return ask()
        except StoreUnreached:
            raise
        except Exception as error:  # every store has its own
            kind = type(error).__name__
            if isinstance(error, OSError) and error.errno in _LOCAL:
                raise UserError(
                    f"{url}: no room for it in {tempfile.gettempdir()} ({error.strerror}); make some, or name another "
                    "directory in TMPDIR"
                ) from None
            if kind == "NotSupportedError":
                raise _NotSupported(f"{url} cannot be read{where}: {_reason(error)}") from None
            final = (
                isinstance(error, _FINAL)
                or kind in _FINAL_OF_OBSTORE
                or _FINAL_STATUS.search(str(error))
                or _NO_CREDENTIALS in str(error)
            )
            status = getattr(error, "status", None)  # of an HTTP client
            if final or (isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)):
                raise (StoreUnreached if _is_closed(error) else UserError)(
                    f"{url} cannot be read{where}: {_reason(error)}{_hint(url, error)}"
                ) from None
            if number == TRIES - 1:
                raise StoreUnreached(
                    f"{url} cannot be read{where}: {TRIES} tries failed, the last one so: {_reason(error)}; run the "
                    "command again when the store answers"
                ) from None
        time.sleep(FIRST_WAIT * 2**number * random.uniform(0.75, 1.25))
    raise AssertionError("the last try returns or raises")


def is_url(source: str) -> bool:
    """Whether `source` is a URL (or a chain of them, as fsspec writes it), not a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)", source) is not None


def local_path(url: str) -> Path | None:
    """The path that a `file://` URL means; None of any other."""
    if not url.lower().startswith("file://"):
        return None
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.netloc in ("", "localhost") else None


def find_stored(url: str, key: str) -> Iterator[tuple[str, StoredFile, bool]]:
    """(name, file, named) of each file that `url` means: a file, a glob, or a directory. `key` said it."""
    _refuse_secrets(url, key)
    filesystem, place = _filesystem(url, key)
    filesystem.invalidate_cache()
    over_http = url.startswith(("http://", "https://"))  # where ? begins a query, and directories are not listed
    if "*" in place or (not over_http and re.search(r"[?\[]", place)):
        if over_http:
            raise UserError(f'{key}: "{url}": HTTP servers list no files; name each one')
        found = trying(url, lambda: filesystem.glob(place, detail=True))
        root = re.split(r"[^/]*[*?\[]", place)[0]
        if not any(_is_file(said) for said in found.values()):
            raise UserError(f'{key}: "{url}" matches no file')
    else:
        try:
            said = trying(url, lambda: filesystem.info(place))
        except _NotSupported:
            raise UserError(f'{key}: "{url}": this server does not say what it has there') from None
        if said["type"] != "directory":
            yield _bare(url).rpartition("/")[2], _stored(url, place, said, filesystem), True
            return
        found = trying(url, lambda: filesystem.find(place, detail=True))
        root = place
    first, _, others = url.partition("::")
    protocol, others = first.partition("://")[0], f"::{others}" if others else ""
    for path, said in found.items():
        name = _bare(path).removeprefix(_bare(root)).strip("/")
        if _is_file(said) and name and not any(part.startswith(".") for part in name.split("/")):
            yield (
                name,
                _stored(f"{protocol}://{path.partition('://')[2] or path}{others}", path, said, filesystem),
                False,
            )


def _bare(url: str) -> str:
    """The path of a URL, of the first one of a chain, or what already is a path; without slashes at its ends."""
    return re.sub(r"^[A-Za-z][A-Za-z0-9+.-]*://", "", url.partition("::")[0].partition("?")[0]).strip("/")


def first_changed(files: Sequence[StoredFile]) -> int | None:
    """The number of the first file that its store has otherwise by now."""
    with ThreadPoolExecutor(16) as pool:
        for number, (file, now) in enumerate(zip(files, pool.map(StoredFile.now, files), strict=True)):
            if now != file:
                return number
    return None


def _stored(url: str, place: str, said: dict[str, Any], filesystem: Any) -> StoredFile:
    return StoredFile(url, place, said.get("size"), _version(said), filesystem)


def _is_file(said: dict[str, Any]) -> bool:
    return said["type"] == "file" and not said["name"].endswith("/")


def _version(said: dict[str, Any]) -> str | None:
    """The entity tag, else a checksum, else when it was written."""
    for key in ("e_tag", "ETag", "etag", "md5", "Content-MD5", "Digest", "Last-Modified", "last_modified", "mtime"):
        if said.get(key):
            return f"{key.lower().replace('_', '')} {said[key]}"
    for key in ("LastModified", "modified", "created"):
        if said.get(key):
            return f"{key} {said[key]}"
    return None


def _filesystem(url: str, key: str) -> tuple[Any, str]:
    """What reads `url`, and what that calls it."""
    try:
        import fsspec
    except ImportError:
        raise missing("fsspec", url) from None
    _refuse_readers(url, key, set(fsspec.available_protocols()))
    protocol = url.partition("://")[0].lower()
    try:
        if protocol in _OBJECT_STORES and "::" not in url and not (protocol.startswith("http") and "?" in url):
            endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
            plain = protocol == "http" or (protocol.startswith("s3") and endpoint.startswith("http://"))
            store = import_module("obstore.fsspec").FsspecStore(
                protocol,
                client_options={"timeout": "120s", "connect_timeout": "10s", "allow_http": plain},
                retry_config={"max_retries": 0},  # `trying` is what tries again
            )
            return store, url if protocol.startswith("http") else url.partition("://")[2]
        filesystem, place = fsspec.core.url_to_fs(url)
        return filesystem, place
    except ImportError as error:
        if str(error.name).startswith("obstore"):
            raise missing("obstore", url) from None
        raise UserError(f'{key}: "{url}" needs one more package: {_reason(error)}') from None
    except ValueError as error:
        raise UserError(f'{key}: "{url}": {_reason(error)}') from None


def missing(package: str, what: object) -> UserError:
    """The error where a package of the extra `data` is not installed."""
    return UserError(f"{what} needs the package {package}: pip install 'meshwright[data]'")


def _refuse_secrets(url: str, key: str) -> None:
    if re.search(r"://[^/?#]*@", url) or _SECRET_QUERY.search(url):
        shown = re.sub(r"://[^/?#]*@", "://", url).partition("?")[0]
        raise UserError(
            f'{key}: the URL of "{shown}" holds credentials, and a recipe is no place for them; put them into the '
            "environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, "
            "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY)"
        )


def _refuse_readers(url: str, key: str, protocols: set[str]) -> None:
    """`UserError` for a protocol that only the user may ask for, since it may log in with keys of the user's."""
    allowed = {name.strip().lower() for name in os.environ.get(ALLOWED, "").split(",")}
    for part in url.split("::"):
        protocol = part.partition("://")[0].lower()
        if protocol in protocols - _OBJECT_STORES - _READERS - allowed:
            known = ", ".join(sorted(_OBJECT_STORES | _READERS))
            raise UserError(
                f'{key}: "{url}": {protocol} may log in with your keys at a host that the recipe names, or read what '
                f"else it names; if you trust it, set {ALLOWED}={protocol} in the environment (read without: {known})"
            )


def _reason(error: Exception) -> str:
    """An error in one line, without any secret of the environment that a store's answer may repeat."""
    text = str(error)
    code, message = (re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("Code", "Message"))
    if code:
        text = f"{code[1]} ({message[1]})" if message else code[1]
    text = " ".join(text.partition("\n\nDebug source")[0].split()) or type(error).__name__
    for name, value in os.environ.items():
        if len(value) >= 6 and _SECRET_VARIABLE.search(name):
            text = text.replace(value, "***")
    return text if len(text) <= 300 else f"{text[:300]}..."


def _is_closed(error: Exception) -> bool:
    """Whether the store does not let this process in, whatever it holds."""
    named = isinstance(error, PermissionError) or type(error).__name__ in (
        "PermissionDeniedError",
        "UnauthenticatedError",
    )
    return named or _NO_CREDENTIALS in str(error) or _status(error) in ("401", "403")


def _status(error: Exception) -> str | None:
    """The HTTP status that an error tells of."""
    said = re.search(r"status code: (\d+)", str(error))
    return said[1] if said else None


def _hint(url: str, error: Exception) -> str:
    kind, status = type(error).__name__, _status(error)
    if isinstance(error, FileNotFoundError) or kind == "NotFoundError" or status == "404":
        return "; there is no such file or directory"
    if url.startswith("s3") and (_is_closed(error) or status == "400"):
        return (
            "; credentials come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION "
            "(AWS_SKIP_SIGNATURE=true for a public bucket)"
        )
    return ""
