"""Build cache of the compiled kernels: one shared library per instruction set, named by the sha256 of everything that
decides its bits. Torch-free.

A library is loaded only if its checksum file matches; a damaged one is built again. If several processes need a missing
library, one compiles it and the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

SOURCES = tuple(sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h")))

_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "avx512bf16", "amx-tile", "amx-bf16"),
    "avx512_bf16": (*_AVX512, "avx512bf16"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma"),
}
"""Compiler options (after -m) of each instruction set, the fastest first."""

# Names in /proc/cpuinfo where they differ.
_CPU_FLAGS = {"avx512bf16": "avx512_bf16", "amx-tile": "amx_tile", "amx-bf16": "amx_bf16"}

# No contraction and no reassociation: only the sources decide where operations are fused, so that results do not depend
# on tile shapes.
FLAGS = (
    *("-O3", "-std=c++20", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-maybe-uninitialized"),
)


_PREFIX = f"meshwright-kernels-{os.geteuid()}-"  # of directories of compiled kernels outside the cache


class KernelsUnavailable(Exception):
    """Error: compiled kernels cannot be built or run on this machine. The message states the reason, in lower case and
    without a full stop."""


@contextmanager
def _convert_errors() -> Iterator[None]:
    """Context manager that converts errors of the compiler and of file access to `KernelsUnavailable` with the reason
    as its message.
    """
    try:
        yield
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or b"").decode(errors="replace").strip().splitlines() or ["no message"]
        reason = next((line for line in lines if "error" in line), lines[0])
        raise KernelsUnavailable(f"{error.cmd[0]} ended with exit code {error.returncode} ({reason})") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(str(error)) from error


def find_compiler() -> str:
    """Return the path of the C++ compiler: the compiler that the environment variable CXX names, else g++. Raises
    KernelsUnavailable if it is not installed."""
    name = os.environ.get("CXX") or "g++"
    if (found := shutil.which(name)) is None:
        raise KernelsUnavailable(f"there is no C++ compiler {name} (CXX names another)")
    return found


def list_supported_instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets that both this processor and the operating system support ("amx", "avx512_bf16",
    "avx512", "avx2"), the most capable first; empty on other processors than x86-64."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    return tuple(
        name for name, options in INSTRUCTION_SETS.items() if all(_CPU_FLAGS.get(o, o) in flags for o in options)
    )


def get_cache_directory() -> Path:
    """Return the cache directory of compiled kernels: meshwright/kernels under $XDG_CACHE_HOME, by default ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "meshwright" / "kernels"


def compute_version(compiler: str, instruction_set: str) -> str:
    """Return the version of the compiled library for `instruction_set` ("amx", "avx512_bf16", "avx512" or "avx2"): the
    hex SHA-256 of kernel sources, compiler version and flags. compiler: path of the C++ compiler. Raises
    KernelsUnavailable if the compiler does not run."""
    with _convert_errors():
        described = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    digest = hashlib.sha256(described + repr((FLAGS, INSTRUCTION_SETS[instruction_set])).encode())
    for path in SOURCES:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def list_directories() -> list[Path]:
    """Return the directories that may have compiled kernels: the cache directory, and those that `build` has created
    for this user where the cache could not be written. Directories with such names that others may write, or that
    others have created, are left out."""
    return [get_cache_directory(), *sorted(filter(_is_private, _get_temporary_root().glob(f"{_PREFIX}*")))]


def _get_temporary_root() -> Path:
    """Return the directory that the environment variable TMPDIR names, else /tmp."""
    return Path(os.environ.get("TMPDIR") or "/tmp")


def find_uncached(instruction_sets: Sequence[str]) -> list[str]:
    """Return those of `instruction_sets` whose library `build` would compile, in their order: the cache has no
    undamaged one. Raises KernelsUnavailable if the compiler is missing or does not run."""
    compiler = find_compiler()
    return [name for name in instruction_sets if _find_library(compute_version(compiler, name)) is None]


def build(
    instruction_set: str, log: Callable[[str], None] = lambda line: None, count: tuple[int, int] = (1, 1)
) -> tuple[Path, str]:
    """Compile the kernels for `instruction_set` to a shared library, unless the cache has an undamaged one. Return
    (path of the library, its version from `compute_version`). Where the cache directory cannot be written, the library
    is kept in a directory for temporary files with a random name, so that no other user can create it first
    (`list_directories` finds it).

    log: called with one line before and one after compiling, with one before waiting for another process that compiles,
    and for the first library with one if the cache directory cannot be written. count: (number, total) of this library
    among those that the caller compiles one after another, for `log`. Raises KernelsUnavailable if the compiler fails
    or the library cannot be written.
    """
    compiler = find_compiler()
    version = compute_version(compiler, instruction_set)
    library = _find_library(version)
    if library is None:
        kernels = f"CPU kernels for {format_instruction_set(instruction_set)}"
        place = " ({} of {})".format(*count) if count[1] > 1 else ""
        with _convert_errors():
            library = _make_directory(log if count[0] == 1 else lambda line: None) / f"{version}.so"
            with _lock(library.with_suffix(".lock"), log):
                if not _is_intact(library):  # no other process has compiled it meanwhile
                    log(f"compiling {kernels}{place}, once for this version ...")
                    began = time.perf_counter()
                    _compile(compiler, instruction_set, library)
                    log(f"compiled {kernels} in {time.perf_counter() - began:.1f} s")
    return library, version


def format_instruction_set(name: str) -> str:
    """Return the usual spelling of an instruction set: "avx512_bf16" becomes "AVX512-BF16"."""
    return name.upper().replace("_", "-")


def _find_library(version: str) -> Path | None:
    """Return the path of an undamaged library of `version` (from `compute_version`); None if there is none."""
    return next((path for path in (each / f"{version}.so" for each in list_directories()) if _is_intact(path)), None)


def _make_directory(log: Callable[[str], None]) -> Path:
    """Create the cache directory and return its path. If it cannot be written, return this user's directory for
    temporary files instead, which is created if there is none, and call `log` with one line."""
    directory, *others = list_directories()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
        return directory
    except OSError as error:
        temporary = others[0] if others else Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_get_temporary_root()))
        log(f"{directory} cannot be written ({error.strerror}): the compiled kernels are kept in {temporary}")
        return temporary


def _is_private(directory: Path) -> bool:
    """Return True if `directory` is a directory, no link, that belongs to this user and that nobody else may write."""
    with suppress(OSError):
        status = directory.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return False


@contextmanager
def _lock(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Context manager that holds an exclusive lock on the file `path`. The lock is also released when the process ends.
    log: called with one line before waiting.

    On a file system without locks nothing is locked, and several processes may compile at a time. This is safe, because
    each process renames only complete files into place."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("waiting for another process that compiles the kernels")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _is_intact(library: Path) -> bool:
    """Return True if the file `library` belongs to this user, is writable by nobody else, and has the SHA-256 that the
    checksum file next to it contains."""
    try:
        status = library.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return False
        return _get_checksum_path(library).read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def _get_checksum_path(library: Path) -> Path:
    """Return the path of the file next to `library` that contains the library's SHA-256."""
    return library.with_suffix(".sha256")


def _compile(compiler: str, instruction_set: str, library: Path) -> None:
    """Compile the kernels for `instruction_set` into the file `library`, and write the library's SHA-256 into its
    checksum file. Both are written under temporary names and renamed. compiler: path of the C++ compiler."""
    sources = [str(path) for path in SOURCES if path.suffix == ".cpp"]
    options = [f"-m{option}" for option in INSTRUCTION_SETS[instruction_set]]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / "kernels.so"
        subprocess.run(
            [compiler, *FLAGS, *options, *sources, "-o", str(made)], check=True, capture_output=True, timeout=600
        )
        made.chmod(0o700)  # under any umask
        checksum = Path(scratch) / "sha256"
        checksum.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
        os.replace(made, library)
        os.replace(checksum, _get_checksum_path(library))
