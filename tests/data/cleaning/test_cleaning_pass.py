"""The cleaning pass: duplicates by external sort, resumption after a kill, and the report."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data.cleaning import cleaning_pass, duplicates
from meshwright.data.cleaning.cleaning_pass import CleaningResult, run_cleaning_pass
from meshwright.data.cleaning.duplicate_finder import DuplicateFinder
from meshwright.data.cleaning.report import render_cleaning_page
from meshwright.data.cleaning.rule_notes import RULE_NOTES
from meshwright.data.cleaning.rules import RULES, Cleaner
from meshwright.data.cleaning.segments import KEPT
from meshwright.data.sources.reading import Reader
from meshwright.data.sources.resolution import find_files
from meshwright.recipe import CleanRecipe, SourceRecipe

WORDS = [f"word{number}" for number in range(3000)]


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(60, 120))) for _ in range(count)]


def write(directory: Path, documents: list[str], files: int = 3) -> Path:
    directory.mkdir()
    for number in range(files):
        lines = [json.dumps({"text": text}) for text in documents[number::files]]
        (directory / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def cleaned(source: Path, work: Path, **recipe: Any) -> CleaningResult:
    return run_cleaning_pass(
        find_files([str(source)]), Reader(), Cleaner(CleanRecipe(**recipe)), work, lambda line: None
    )


def rules(result: CleaningResult) -> list[str | None]:
    return [None if code == KEPT else RULES[code - 1] for code in result.codes.tolist()]


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning_pass, "SEGMENT_CHARACTERS", 4000)
    monkeypatch.setattr(duplicates, "KEYS_PER_PARTITION", 16)


def test_exact_duplicates_of_kept_documents_are_dropped(tmp_path: Path):
    source = write(tmp_path / "source", ["one", "two", " one\n", "One", "ab", "ab"], files=1)
    assert rules(cleaned(source, tmp_path / "work")) == [None, None, "exact_duplicates", None, None, "exact_duplicates"]
    source = write(tmp_path / "short", ["ab", "  ab  "], files=1)
    assert rules(cleaned(source, tmp_path / "work2", minimum_characters=5)) == ["length", None]
    assert rules(cleaned(source, tmp_path / "work3", exact_duplicates=False)) == [None, None]


def test_near_duplicates_are_dropped(tmp_path: Path, small_segments: None):
    originals = texts(60)
    changed = [text.replace(text.split()[30], "changed", 1) for text in originals[:30]]
    source = write(tmp_path / "source", originals + changed, files=1)
    found = rules(cleaned(source, tmp_path / "work", near_duplicates=True, minhash_bands=32, minhash_rows=4))
    assert found == [None] * 60 + ["near_duplicates"] * 30
    assert rules(cleaned(source, tmp_path / "work2")) == [None] * 90


def test_near_duplicate_of_dropped_document_is_dropped(tmp_path: Path):
    class Chain:
        """The second document shares a band with the first, the third shares another band with the second."""

        first, documents = 0, 3

        def __contains__(self, name: str) -> bool:
            return False

        def read_column(self, name: str) -> Any:
            columns = {"code": [KEPT] * 3, "digest": [[1, 0], [2, 0], [3, 0]], "bands": [[1, 5], [1, 6], [2, 6]]}
            return np.array(columns[name], np.uint64)

    cleaner = Cleaner(CleanRecipe(near_duplicates=True, minhash_bands=2, minhash_rows=1))
    found = DuplicateFinder([Chain()], cleaner, tmp_path)  # type: ignore[list-item]
    near = 1 + RULES.index("near_duplicates")
    assert found.codes.tolist() == [KEPT, near, near]
    assert found.earlier == {"near_duplicates": {1: 0, 2: 1}} and found.first == {"near_duplicates": 1}


@pytest.mark.parametrize("part", [4, 16, 1000])
def test_repeated_keys_match_dictionary(tmp_path: Path, part: int):
    draw = np.random.default_rng(0)
    keys = draw.integers(0, 2**64, (40, 2), np.uint64)[draw.integers(0, 40, 300)]
    chunks = [(keys[at : at + 70], np.arange(at, min(at + 70, 300))) for at in range(0, 300, 70)]
    found = {}
    for numbers, earlier in duplicates.find_repeated_keys(iter(chunks), 300, tmp_path / "parts", part):
        found |= dict(zip(numbers.tolist(), earlier.tolist(), strict=True))
    first: dict[bytes, int] = {}
    expected = {}
    for number, key in enumerate(keys):
        if (known := first.setdefault(key.tobytes(), number)) != number:
            expected[number] = known
    assert found == expected
    assert not (tmp_path / "parts").exists()


def test_result_is_independent_of_segments_and_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    documents = texts(80) + texts(20) + ["", "again\n" * 9]
    source = write(tmp_path / "source", documents)
    settings = {"near_duplicates": True, "mask": ["email"], "heuristics": ["gopher-repetition"]}
    whole = cleaned(source, tmp_path / "whole", **settings)
    monkeypatch.setattr(cleaning_pass, "SEGMENT_CHARACTERS", 3000)
    monkeypatch.setattr(duplicates, "KEYS_PER_PARTITION", 10)
    parts = cleaned(source, tmp_path / "parts", **settings)
    assert len(parts.segments) > 5 and len(whole.segments) == 1
    assert parts.codes.tolist() == whole.codes.tolist()
    assert (parts.documents_by_file, parts.kept, parts.longest_kept) == (
        whole.documents_by_file,
        whole.kept,
        whole.longest_kept,
    )
    assert parts.report == whole.report


def test_pass_resumes_after_last_complete_segment(tmp_path: Path, small_segments: None):
    source = write(tmp_path / "source", texts(100))
    expected = cleaned(source, tmp_path / "undisturbed")
    names = sorted(path.name for path in (tmp_path / "undisturbed").iterdir())
    for stop in range(0, len(names), 3):
        work = tmp_path / f"{stop}"
        work.mkdir()
        for name in names[:stop]:
            (work / name).write_bytes((tmp_path / "undisturbed" / name).read_bytes())
        (work / names[stop]).write_bytes((tmp_path / "undisturbed" / names[stop]).read_bytes()[:-1])  # truncated
        before = {name: (work / name).stat().st_mtime_ns for name in names[:stop]}
        result = cleaned(source, work)
        assert {name: (work / name).stat().st_mtime_ns for name in names[:stop]} == before
        assert {name: (work / name).read_bytes() for name in names} == {
            name: (tmp_path / "undisturbed" / name).read_bytes() for name in names
        }
        assert result.report == expected.report and result.codes.tolist() == expected.codes.tolist()


PROGRAM = """
import sys
from pathlib import Path
from meshwright.data.cleaning import cleaning_pass, duplicates
from meshwright.data.cleaning.rules import Cleaner
from meshwright.data.sources.reading import Reader
from meshwright.data.sources.resolution import find_files
from meshwright.recipe import CleanRecipe, SourceRecipe
cleaning_pass.SEGMENT_CHARACTERS, duplicates.KEYS_PER_PARTITION = 20_000, 200
print("ready", flush=True)
recipe = CleanRecipe(near_duplicates=True, mask=["email"])
directory = Path(sys.argv[2])
cleaning_pass.run_cleaning_pass(find_files([sys.argv[1]]), Reader(), Cleaner(recipe), directory, lambda line: None)
"""


def test_pass_killed_at_any_time_ends_with_same_segments(tmp_path: Path):
    source = write(tmp_path / "source", texts(600) + texts(100))

    def start(work: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, str(source), str(work)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout and process.stdout.readline() == "ready\n"
        process.stdout.close()
        return process

    begun = time.perf_counter()
    assert start(tmp_path / "undisturbed").wait(60) == 0
    usual = time.perf_counter() - begun
    draw, kills = random.Random(2), 0
    for _ in range(5):
        process = start(tmp_path / "killed")
        time.sleep(draw.uniform(0, usual / 3))
        os.kill(process.pid, signal.SIGKILL)
        kills += process.wait(60) == -signal.SIGKILL
    assert kills >= 2
    assert start(tmp_path / "killed").wait(60) == 0
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("undisturbed", "killed")
    ]
    assert files[0] == files[1] and len(files[0]) > 10


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cleaning_pass, "SEGMENT_CHARACTERS", 40_000)
    monkeypatch.setattr(duplicates, "KEYS_PER_PARTITION", 100)
    peaks = []
    for count in (200, 1000):
        # A tenth of the documents repeats an earlier one; the documents stay on disk.
        source = write(tmp_path / f"{count}", texts(count, count) + texts(count // 10, count))
        cleaned(source, tmp_path / "warm")  # one-time imports and compilation
        tracemalloc.start()
        result = cleaned(source, tmp_path / f"work {count}", near_duplicates=True)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert result.report["dropped"]["exact_duplicates"] == count // 10
    assert peaks[1] < 1.3 * peaks[0]


def test_cleaning_report_counts_sum_up(tmp_path: Path, small_segments: None):
    documents = [*texts(50), *texts(10), "mail me: a.b@example.org", "\a\a\a", "again\n" * 9, "größer, 世界"]
    source = write(tmp_path / "source", documents)
    result = cleaned(source, tmp_path / "work", mask=["email", "phone"])
    report = result.report
    assert report["dropped"] == {
        "encoding": 0,
        "control_characters": 1,
        "length": 0,
        "repetition": 1,
        "exact_duplicates": 10,
    }
    kept = [text for text, rule in zip(in_order(documents), rules(result), strict=True) if rule is None]
    kept = [text.replace("a.b@example.org", "<email>") for text in kept]
    assert report["documents"] == {"before": len(documents), "after": len(kept)}
    assert report["bytes"] == {
        side: len("".join(all).encode()) for side, all in (("before", documents), ("after", kept))
    }
    assert report["masked"] == {"email": 1, "phone": 0}
    for side, all in (("before", documents), ("after", kept)):
        characters = "".join(all)
        counts = report["characters"][side]
        assert sum(counts.values()) == len(characters)
        assert counts["digits"] == sum(one in "0123456789" for one in characters)
        assert counts["Chinese, Japanese, Korean"] == 2 and counts["Latin beyond a to z"] == 2
        lengths = [0] * 33
        for text in all:
            lengths[len(text).bit_length()] += 1
        assert report["lengths"][side] == lengths
    assert sorted(source["source"] for source in report["sources"]) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert sum(source["after"]["documents"] for source in report["sources"]) == len(kept)
    assert {rule: len(samples) for rule, samples in report["samples"].items()} == {
        "control_characters": 1,
        "repetition": 1,
        "exact_duplicates": 4,
    }
    for sample in report["samples"]["exact_duplicates"]:
        assert sample["text"] == sample["earlier"] and sample["why"].startswith("repeats ")


def test_documents_of_several_sources_are_counted_under_their_names(tmp_path: Path):
    for name in ("web", "books"):
        write(tmp_path / name, texts(4, seed=len(name)), files=2)
    sources = [SourceRecipe(path=str(tmp_path / "web"), name="the web"), SourceRecipe(path=str(tmp_path / "books"))]
    files = find_files(sources, key="data.sources")
    result = run_cleaning_pass(files, Reader(), Cleaner(CleanRecipe()), tmp_path / "work", lambda line: None)
    counted = {source["source"]: source["after"]["documents"] for source in result.report["sources"]}
    assert counted == {"the web": 4, str(tmp_path / "books"): 4}


def in_order(documents: list[str]) -> list[str]:
    return [*itertools.chain.from_iterable(documents[number::3] for number in range(3))]


def test_page_has_all_report_figures_without_external_resources(tmp_path: Path):
    hostile = "<script>alert(1)</script>\n" * 9
    source = write(tmp_path / "source", [*texts(20), *texts(5), hostile])
    result = cleaned(source, tmp_path / "work", near_duplicates=True)
    page = render_cleaning_page("a & b.toml", result.report)
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page and "a &amp; b.toml" in page
    assert "http" not in page and "src=" not in page
    for rule in result.report["rules"]:
        assert f"<b>{rule}</b>" in page
    assert "threshold 0.719" in page and "0.924" in page  # 14 bands of 8 rows, similarity 0.8


def test_every_rule_has_a_note():
    assert [*RULE_NOTES] == [*RULES]
