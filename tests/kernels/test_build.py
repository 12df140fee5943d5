"""Claims on the build cache: content-addressed, repaired when damaged, None without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.kernels import build
from meshwright.kernels.choice import load_kernels


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes its arguments into the output file and a line for each call beside itself; the cache is
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
    return script


def count_calls(compiler: Path) -> int:
    calls = compiler.parent / "calls"
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_library_is_compiled_once_and_found_afterwards(compiler: Path):
    first = build.build("avx2")
    assert first is not None and first == build.build("avx2")
    path, version = first
    assert path.read_text() == "library\n" and path.stem == version
    assert path.parent == compiler.parent / "cache" / "meshwright" / "kernels"
    assert count_calls(compiler) == 1


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
    assert built is not None
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
    assert {path.suffix for path in library.parent.iterdir()} == {".so", ".sha256"}


@pytest.mark.parametrize("reason", ["none", "fails", "not executable", "no place"])
def test_kernels_are_none_without_a_working_compiler_or_cache(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, reason: str
):
    if reason == "none":
        monkeypatch.setenv("CXX", "no-such-compiler")
    elif reason == "fails":
        compiler.write_text("#!/bin/sh\nexit 1\n")
    elif reason == "not executable":
        compiler.write_text("#!/no/such/shell\n")
    else:
        (compiler.parent / "cache").write_text("a file")
    assert load_kernels() is None


def test_instruction_set_that_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "supported_instruction_sets", lambda: ("avx2",))
    with pytest.raises(ValueError, match="runs avx2, not amx"):
        load_kernels("amx")


def test_sources_have_at_most_600_lines_of_code():
    """Comments, blank lines and lines that only close brackets do not count (Python has none of the last)."""
    lines = [line.partition("//")[0].strip() for path in build.SOURCES for line in path.read_text().splitlines()]
    assert sum(bool(line.strip("{}();,")) for line in lines) <= 600
