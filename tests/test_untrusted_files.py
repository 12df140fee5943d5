"""Every reader refuses endless files, oversized files, and files with false declared sizes."""

from __future__ import annotations

import ast
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.data.cleaning.blocked_words import BlockedWords, hash_word_list
from meshwright.data.records.messages import MalformedRecord, load_json
from meshwright.errors import UserError
from meshwright.inspection.files import TensorFiles
from meshwright.monitoring.report_inputs import read_recipe, read_result, read_steps
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.models import tokenizer_vocabulary
from meshwright.program.load import load_program
from meshwright.recipe import load_recipe
from meshwright.schedules.library import load_schedule as load_pipeline
from meshwright.spec.config_json import config_from_path
from meshwright.toml import parse_toml
from meshwright.untrusted import parse_json, read_file

READERS: dict[str, Callable[[Path], object]] = {
    "recipe.toml": load_recipe,
    "cluster.toml": lambda path: cluster(str(path)),
    "program.txt": lambda path: load_program(path, "collective"),
    "program.json": lambda path: load_pipeline(str(path)),
    "schedule.csv": lambda path: load_pipeline(str(path)),
    "words.txt": lambda path: BlockedWords(str(path)),
    "hashed.txt": lambda path: hash_word_list(str(path)),
    "tokenizer.json": lambda path: tokenizer_vocabulary(str(path)),
    "config.json": config_from_path,
    "metrics.jsonl": read_steps,
    "result.json": read_result,
    "run.toml": read_recipe,
}


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """Limit the address space, so that an endless read raises MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", READERS)
def test_endless_file_is_refused_by_every_reader(name: str, tmp_path: Path, bounded_memory: None):
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match="a device or a pipe, not a file"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", ["hashed.txt", "metrics.jsonl", "run.toml", "words.txt"])
def test_pipe_without_writer_is_refused(name: str, tmp_path: Path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="a device or a pipe, not a file"):
        READERS[name](tmp_path / name)


def test_endless_line_of_jobs_is_refused(command_line, bounded_memory: None):
    outcome = command_line("plan", "--jobs", "/dev/zero")
    assert outcome.code == 2 and "line 1 has more than 16,777,216 characters" in outcome.errors


def answer_of(command_line, tmp_path: Path, **changes: object) -> str:
    """Return the error of `plan --jobs` for a request with these changes."""
    request = {"model": "gpt2", "cluster": "8xh100-sxm", "sequence": 8, "batch": 8, **changes}
    (tmp_path / "jobs.jsonl").write_text(json.dumps(request) + "\n")
    return json.loads(command_line("plan", "--jobs", tmp_path / "jobs.jsonl").output)["error"]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("documents", 10**400, "documents: takes a number, at least 1, not a number of about 401 digits"),
        ("sequence", -(10**400), "sequence: takes a whole number, at least 1, not a number of about 401 digits"),
        ("top", 10**400, "top: takes a whole number from 1 to 100, not a number of about 401 digits"),
        ("batch", "9" * 1000, "batch: takes a whole number, at least 1, not '9999"),
    ],
)
def test_wrong_value_of_a_request_is_shortened(key: str, value: object, said: str, tmp_path: Path, command_line):
    error = answer_of(command_line, tmp_path, **{key: value})
    assert error.startswith(said) and len(error) < 110


def test_impossible_file_name_is_error_of_its_request(tmp_path: Path, command_line):
    with pytest.raises(OSError, match="no file has such a name"):
        read_file("a\0b")
    assert "no file has such a name (embedded null byte)" in answer_of(command_line, tmp_path, model="x\0.toml")


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ([2**62] * 65, r"tensor w has 65 dimensions: at most 64 are read"),
        ([2**63], "not a safetensors file: its header"),
        ([2**62] * 64, r"needs [\d,.]+ bytes, its offsets span 4"),
    ],
)
def test_tensor_shape_is_bounded_before_its_product(tmp_path: Path, shape: list[int], said: str):
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(UserError, match=said):
        TensorFiles(tmp_path)


# --- direct reads


# Modules may read without untrusted.py only trusted files, or files that they bound and check themselves.
DIRECT_READS = {
    "untrusted": "is the bounded reader",
    **dict.fromkeys(
        (
            "data.records.template_sources",
            "draw.page",
            "draw.picture",
            "spec.presets",
            "toml",
            "launcher.launch_script",
        ),
        "files of the package",
    ),
    "serving.protocol.bodies": "the server bounds a body; depth is limited by the parser and checked",
    "emulation.script": "runs the user's own script, as python does",
    **dict.fromkeys(
        (
            "flight_recorder.rank_report",
            "machine",
            "threads",
            "launcher.hosts",
            "monitoring.memory",
            "monitoring.profile",
            "launcher.host_memory",
            "launcher.gpu_process",
            "kernels.build",
            "kernels.choice",
            "processes",
            "probe.stopwatch",
        ),
        "/proc, /sys and caches and traces of its own",
    ),
    **dict.fromkeys(
        ("checkpoint.contents", "checkpoint.save_markers"),
        "files that this run or this machine wrote",
    ),
    **dict.fromkeys(
        (
            "data.limited_process",
            "launcher.device",
            "launcher.launcher",
            "training.module.run",
            "probe.ranks",
            "launcher.rank_threads",
            "launcher.rank_process",
            "serving.messages",
            "serving.replicas",
            "checkpoint.agreement",
            "training.first_start",
        ),
        "JSON between its own processes",
    ),
    **dict.fromkeys(
        (
            "data.cleaning.decontamination",
            "synthesis.endpoint",
            "data.records.messages",
            "data.records.record_files",
            "data.cleaning.segments",
            "data.tokenizers.special_tokens",
            "data.tokenizers.tokenizer",
            "data.tokenizers.kinds",
        ),
        "documents and records, whose size has its own limits and whose RecursionError is caught; tokenizers' text",
    ),
}


def direct_reads(source: str) -> list[int]:
    """The lines that call read_text, read_bytes, json.loads, json.load or pydantic_core's from_json."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = {"json.loads", "json.load", "from_json"}
    return [
        call.lineno
        for call in calls
        if (name := ast.unparse(call.func)) in names or name.endswith((".read_text", ".read_bytes"))
    ]


def test_huge_integer_is_refused_without_advice_for_programmers():
    message = r"an integer of 5,000 digits is too large\)?$"
    with pytest.raises(ValueError, match=message):
        parse_json("1" * 5000)
    with pytest.raises(UserError, match=message):
        parse_toml("a = " + "1" * 5000, "a.toml")
    with pytest.raises(MalformedRecord, match=message):
        load_json("1" * 5000, "a record")


def test_paths_are_read_through_untrusted(repository: Path):
    root = repository / "src" / "meshwright"
    reads = {
        ".".join(path.relative_to(root).with_suffix("").parts): direct_reads(path.read_text())
        for path in root.rglob("*.py")
    }
    found = {module for module, lines in reads.items() if lines}
    assert found - DIRECT_READS.keys() == set(), "read with meshwright.untrusted, or give the reason here"
    assert DIRECT_READS.keys() - found == set(), "reads nothing directly any more"


@pytest.mark.parametrize(
    "text", ["path.read_text()", "Path(a).read_bytes()", "json.loads(a)", "json.load(a)", "from_json(a)"]
)
def test_direct_reads_are_found(text: str):
    assert direct_reads(text) == [1]
