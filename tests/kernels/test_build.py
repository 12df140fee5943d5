"""Claims on the build cache: content-addressed, compiled once by several processes, repaired when damaged, refused
with a reason without a compiler."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.kernels import build
from meshwright.kernels.build import KernelsUnavailable
from meshwright.kernels.choice import load_kernels, open_kernels


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes its arguments into the output file and a line for each call next to itself; the cache is
    empty."""
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "compiler 1"; exit; fi\n'
        f"echo called >> {tmp_path}/calls\n"
        'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo library > "$2"; fi; shift; done\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return script


def count_calls(compiler: Path) -> int:
    calls = compiler.parent / "calls"
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_library_is_compiled_once_and_found_afterwards(compiler: Path):
    lines = list[str]()
    path, version = build.build("avx2", lines.append)
    assert build.build("avx2", lines.append) == (path, version)
    assert lines[0] == "compiling CPU kernels for AVX2, once for this version ..."
    assert lines[1].startswith("compiled CPU kernels for AVX2 in ") and len(lines) == 2
    assert path.read_text() == "library\n" and path.stem == version
    assert path.parent == compiler.parent / "cache" / "meshwright" / "kernels"
    assert count_calls(compiler) == 1


def test_library_is_compiled_by_one_of_several_processes(compiler: Path):
    """The compiler waits until all processes have begun."""
    barrier = compiler.parent / "go"
    compiler.write_text(
        compiler.read_text().replace("while [ $#", f"until [ -e {barrier} ]; do sleep 0.02; done\nwhile [ $#")
    )
    program = (
        "import sys; from meshwright.kernels.build import build\n"
        "path, _ = build('avx2', lambda line: print(line, flush=True)); print(path.read_text(), end='')"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    first = [process.stdout.readline() for process in processes if process.stdout is not None]
    assert sorted(line.split()[0] for line in first) == ["compiling", "waiting", "waiting"]
    barrier.touch()
    assert [process.communicate()[0].splitlines()[-1] for process in processes] == ["library"] * 3
    assert count_calls(compiler) == 1


def test_library_that_another_process_has_not_finished_is_not_loaded(compiler: Path):
    """Half a library and the lock of who writes it: a second process waits, and then gets the whole one."""
    path, _ = build.build("avx2")
    whole = path.read_bytes()
    path.write_bytes(whole[:3])
    waiting, found = threading.Event(), list[bytes]()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reader = threading.Thread(
            target=lambda: found.append(build.build("avx2", lambda line: waiting.set())[0].read_bytes())
        )
        reader.start()
        assert waiting.wait(60) and not found
        path.write_bytes(whole)
        path.with_suffix(".sha256").write_text(hashlib.sha256(whole).hexdigest())
    reader.join()
    assert found == [whole] and count_calls(compiler) == 1


def test_library_is_compiled_where_files_cannot_be_locked(compiler: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert build.build("avx2")[0].read_text() == "library\n"


def test_libraries_are_separate_per_instruction_set_compiler_and_source(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    versions = {build.compute_version(str(compiler), name) for name in build.INSTRUCTION_SETS}
    assert len(versions) == len(build.INSTRUCTION_SETS) == 4
    source = tmp_path / "kernels.cpp"
    source.write_text("changed")
    monkeypatch.setattr(build, "SOURCES", (source,))
    versions.add(build.compute_version(str(compiler), "avx2"))
    compiler.write_text(compiler.read_text().replace("compiler 1", "compiler 2"))
    versions.add(build.compute_version(str(compiler), "avx2"))
    assert len(versions) == 6


@pytest.mark.parametrize("damage", ["truncate", "change", "no checksum", "foreign checksum", "others may write"])
def test_damaged_file_is_built_again(compiler: Path, damage: str):
    built = build.build("avx2")
    library = built[0]
    checksum = library.with_suffix(".sha256")
    if damage == "truncate":
        library.write_bytes(library.read_bytes()[:-1])
    elif damage == "change":
        library.write_text("Library\n")
    elif damage == "no checksum":
        checksum.unlink()
    elif damage == "others may write":
        library.chmod(0o775)
    else:
        checksum.write_bytes(b"\xff\xfe")
    assert build.build("avx2") == built
    assert library.read_text() == "library\n" and count_calls(compiler) == 2
    assert build.build("avx2") == built and count_calls(compiler) == 2
    assert {path.suffix for path in library.parent.iterdir()} == {".so", ".sha256", ".lock"}


def make_places_unusable(directory: Path) -> None:
    """Neither the cache can be written nor the directory of temporary files."""
    (directory / "cache").write_text("a file")
    os.environ["TMPDIR"] = str(directory / "cache")  # restored by the fixture


def test_library_is_kept_in_a_private_directory_where_the_cache_cannot_be_written(compiler: Path):
    (compiler.parent / "cache").write_text("a file")
    assert build.find_uncached(["avx2"]) == ["avx2"]
    (taken := compiler.parent / f"meshwright-kernels-{os.geteuid()}-").mkdir()
    taken.chmod(0o777)  # as another user could, before any build
    lines = list[str]()
    built = build.build("avx2", lines.append)
    kept = built[0].parent
    place = re.escape(str(compiler.parent / "cache" / "meshwright" / "kernels"))
    assert re.match(
        rf"{place} cannot be written \(Not a directory\): the compiled kernels are kept in {kept}$", lines[0]
    )
    assert kept != taken and kept.parent == compiler.parent and kept.stat().st_mode & 0o777 == 0o700 and len(lines) == 3
    assert build.build("avx2", lines.append) == built and build.find_uncached(["avx2"]) == []
    assert count_calls(compiler) == 1 and len(lines) == 3
    build.build("avx512", lines.append, (2, 3))
    assert len(lines) == 5 and lines[3].startswith("compiling CPU kernels for AVX512 (2 of 3)")
    kept.rename(moved := kept.with_name("moved"))
    kept.symlink_to(moved)  # by another user
    assert build.find_uncached(["avx2"]) == ["avx2"]
    assert build.build("avx2", lines.append)[0].parent not in (kept, taken)


def test_library_in_the_cache_needs_no_directory_of_temporary_files(compiler: Path, monkeypatch: pytest.MonkeyPatch):
    """As in a container whose file system is read-only."""
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert build.build("avx2") == build.build("avx2") and build.find_uncached(["avx2"]) == []
    assert count_calls(compiler) == 1


def test_rank_that_cannot_use_the_chosen_kernels_does_not_compute_without(compiler: Path):
    if not (supported := build.list_supported_instruction_sets()):
        pytest.skip("no kernels for this processor")
    compiler.unlink()
    with pytest.raises(UserError, match=rf"^the chosen {supported[0]} kernels cannot be used here: there is no C\+\+"):
        load_kernels(supported[0])


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda path: path.unlink(), r"there is no C\+\+ compiler .*/compiler"),
        (lambda path: path.write_text("#!/bin/sh\nexit 1\n"), r"compiler ended with exit code 1 \(no message\)"),
        (
            lambda path: path.write_text(
                path.read_text() + "echo note >&2; echo k.cpp: error: no memory >&2; exit 4\n"
            ),
            r"compiler ended with exit code 4 \(k.cpp: error: no memory\)",
        ),
        (lambda path: path.write_text("#!/no/such/shell\n"), "No such file"),
        (
            lambda path: make_places_unusable(path.parent),
            "Not a directory.*/cache/meshwright-kernels-",
        ),
    ],
    ids=["none", "fails", "cannot compile", "not executable", "no place"],
)
def test_kernels_are_unavailable_without_a_working_compiler_or_cache(
    compiler: Path, prepare: Callable[[Path], object], reason: str
):
    if not build.list_supported_instruction_sets():
        pytest.skip("no kernels for this processor")
    prepare(compiler)
    assert load_kernels() is None
    with pytest.raises(KernelsUnavailable, match=reason):
        open_kernels()


def test_instruction_set_that_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "list_supported_instruction_sets", lambda: ("avx2",))
    with pytest.raises(ValueError, match="runs avx2, not amx"):
        load_kernels("amx")


def test_sources_have_at_most_600_lines_of_code_of_at_most_120_columns():
    """Comments, blank lines and lines that only close brackets do not count (Python has none of the last)."""
    lines = [line for path in build.SOURCES for line in path.read_text().splitlines()]
    assert max(map(len, lines)) <= 120
    assert sum(bool(line.partition("//")[0].strip().strip("{}();,")) for line in lines) <= 600
