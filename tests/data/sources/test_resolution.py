"""Resolution of sources to files, and errors for sources without files."""

from __future__ import annotations

import errno
import glob
import os
import sysconfig
from pathlib import Path

import pytest

from meshwright.data.sources.resolution import find_files
from meshwright.errors import UserError


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of texts, the current one."""
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "deep/d.jsonl", "deep/e.jsonl.gz", ".hidden", "deep/.git/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(*sources: str, format: str = "auto") -> list[str]:
    return [file.name for file in find_files(sources, format)]


def refusal(source: str) -> str:
    with pytest.raises(UserError) as caught:
        find_files([source])
    return str(caught.value)


def test_standard_library_excludes_tests_and_packages():
    files = find_files(["stdlib"])
    found = {file.name for file in files}
    assert {"stdlib/pydoc_data/topics.py", "stdlib/json/decoder.py", "stdlib/os.py"} <= found
    parts = {part for name in found for part in name.split("/")[:-1]}
    assert parts.isdisjoint({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
    assert all(name.endswith(".py") for name in found)
    assert sum(file.path.stat().st_size for file in files) > 8e6


def test_python_without_library_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "this Python has none" in refusal("stdlib")


def test_directory_yields_visible_files_sorted_by_name(corpus: Path):
    assert names(str(corpus)) == ["a.txt", "b.txt", "deep/d.jsonl", "deep/e.jsonl.gz", "deep/er/c.txt"]


def test_sources_keep_their_order(corpus: Path):
    assert names("b.txt", "a.txt") == ["b.txt", "a.txt"]


def test_glob_matches_any_depth(corpus: Path):
    assert names("*.txt") == ["a.txt", "b.txt"]
    assert names("**/*.txt") == ["a.txt", "b.txt", "deep/er/c.txt"]
    assert names(f"{corpus}/deep/**/*.txt") == ["er/c.txt"]


def test_linked_directories_are_followed_alike_by_folders_and_globs_and_cycles_end(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory
):
    other = tmp_path_factory.mktemp("other")
    (other / "inside").mkdir()
    (other / "inside" / "z.txt").touch()
    (corpus / "deep" / "linked").symlink_to(other)
    (corpus / "deep" / "up").symlink_to(corpus)
    (other / "loop").symlink_to(other / "loop")
    expected = ["a.txt", "b.txt", "deep/er/c.txt", "deep/linked/inside/z.txt"]
    assert names("**/*.txt") == expected
    (other / "back").symlink_to(corpus / "deep")  # a cycle of two links
    assert names(str(corpus), format="text") == sorted([*expected, "deep/d.jsonl", "deep/e.jsonl.gz"])


@pytest.mark.timeout(20)  # 2^40 paths lead through both links
@pytest.mark.parametrize("source", [".", "**", "**/*.*", "**/**/*.*", "d*/**/*.*"])
def test_globs_read_each_real_directory_once_whatever_its_links(corpus: Path, source: str):
    """Links from two directories to each other, two links of a directory to itself, and one to a sibling."""
    for name in ("deep/one", "deep/two"):
        (corpus / name).mkdir()
        (corpus / name / "f.txt").touch()
    (corpus / "deep" / "one" / "there").symlink_to(corpus / "deep" / "two")
    (corpus / "deep" / "two" / "back").symlink_to(corpus / "deep" / "one")
    (corpus / "deep" / "same").symlink_to(corpus / "deep")
    (corpus / "deep" / "self").symlink_to(corpus / "deep")
    (corpus / "copy").symlink_to(corpus / "deep" / "one")
    inside = ["deep/d.jsonl", "deep/e.jsonl.gz", "deep/er/c.txt", "deep/one/f.txt", "deep/two/f.txt"]
    outside = ["a.txt", "b.txt"] if source.startswith((".", "**")) else []
    assert names(source, format="text") == sorted([*outside, *inside])


@pytest.mark.parametrize(
    "pattern",
    ["**", "**/*", "**/*.txt", "*/**/c*", "**/er/*", "**/de*/**/*.jsonl", "d??p/**", "**/[ab].txt", "*", "**x"],
)
def test_globs_without_links_match_like_those_of_python(corpus: Path, pattern: str):
    expected = sorted(match for match in glob.glob(pattern, recursive=True) if Path(match).is_file())
    assert [str(file.path) for file in find_files([pattern], "text")] == expected if expected else refusal(pattern)


def test_file_names_are_independent_of_corpus_location(corpus: Path, tmp_path_factory: pytest.TempPathFactory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "deep").mkdir()
    (elsewhere / "deep" / "x.txt").touch()
    (corpus / "deep" / "x.txt").touch()
    assert names(f"{corpus}/deep/x*") == names(f"{elsewhere}/deep/x*") == ["x.txt"]


def test_suffix_sets_format_unless_given(corpus: Path):
    formats = {file.name: file.format for file in find_files(["."])}
    assert formats["deep/d.jsonl"] == formats["deep/e.jsonl.gz"] == "jsonl"
    assert formats["a.txt"] == "text"
    assert {file.format for file in find_files(["."], "jsonl")} == {"jsonl"}


def test_only_explicit_file_is_named(corpus: Path):
    assert [file.named for file in find_files(["a.txt", "b*.txt", "deep/er"])] == [True, False, False]


def test_cache_inside_corpus_is_not_a_source(corpus: Path):
    before = names(".")
    prepared = corpus / "deep" / ("0a" * 16)
    prepared.mkdir()
    (prepared / "text.txt").touch()
    assert [file.name for file in find_files(["."], cache=corpus / "deep")] == before
    assert len(names(".")) == len(before) + 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("a.tx", 'did you mean "a.txt"?'),
        ("deep/d.json", 'did you mean "deep/d.jsonl"?'),
        ("depe/d.jsonl", 'did you mean "deep"?'),
        ("stdlb", 'did you mean "stdlib"?'),
        ("deep/*.parquet", "deep holds d.jsonl, e.jsonl.gz, er"),
        ("quite different", "this directory holds a.txt, b.txt, deep"),
        ("a.txt/x", "does not exist"),
    ],
)
def test_missing_source_error_lists_existing_names(corpus: Path, source: str, said: str):
    line = refusal(source)
    assert line.startswith(f'data.source: "{source}" ')
    assert said in line
    assert "\n" not in line


@pytest.mark.parametrize("source", [".", "**/*.txt", "deep"])
def test_unreadable_directories_are_an_error_and_links_that_lead_nowhere_are_skipped(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, source: str
):
    (corpus / "deep" / "dangling").symlink_to("nothing")
    assert names(source)
    real = os.scandir

    def scan(path: Path):
        """As the system does for a user without permission, which root always has."""
        if str(path).endswith("er"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert refusal(source) == f'data.source: "{source}": deep/er cannot be read: Permission denied'


def test_an_empty_directory_is_refused(tmp_path: Path):
    assert "no files in" in refusal(str(tmp_path))
