"""Readers of programs, clusters, checkpoints and run directories for `tests.fuzz.parsers`, and valid inputs of each."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from tests.fuzz.inputs import Inputs, decode, spoiled_json, write_input

# --- programs


def read_program(dialect: str, name: str) -> Callable[[bytes, Path], None]:
    def read(data: bytes, directory: Path) -> None:
        from meshwright.program.load import format_program, load_program

        program = load_program(write_input(directory, name, data), dialect)  # type: ignore[call-overload]
        again = write_input(directory, f"again-{name}", format_program(program, name).encode())
        assert format_program(load_program(again, dialect), name).encode() == again.read_bytes()  # type: ignore[call-overload]

    return read


@cache
def program_seeds(dialect: str, name: str) -> list[bytes]:
    from meshwright.collectives.library import generate as collective
    from meshwright.program.load import format_program
    from meshwright.schedules.library import generate as schedule

    if dialect == "collective":
        made: list[Any] = [collective("all-reduce", "ring", 3), collective("all-to-all", "bruck", 4)]
    else:
        made = [schedule("1f1b", 2, 3), schedule("zb-v", 2, 4), schedule("dualpipe", 2, 4)]
    return [format_program(each, name).encode() for each in made]


def program_json(dialect: str) -> Inputs:
    seeds = [json.loads(each) for each in program_seeds(dialect, "p.json")]
    return spoiled_json(seeds, sorted({key for seed in seeds for key in seed}))


def read_csv(data: bytes, directory: Path) -> None:
    from meshwright.schedules.pytorch_csv import from_csv, to_csv

    program = from_csv(decode(data), "schedule.csv")
    again = to_csv(program)
    assert to_csv(from_csv(again, "again")) == again


def csv_seeds() -> list[bytes]:
    from meshwright.schedules.library import generate
    from meshwright.schedules.pytorch_csv import to_csv

    return [to_csv(generate(name, 2, 4)).encode() for name in ("1f1b", "zb-v")]


# --- plans


CLUSTER = b"""
device = "h100-sxm"
devices = 16
devices_per_node = 8
inside_gb_per_second = 450
across_gb_per_second = 50.0
"""
HUGE_CLUSTER = b"""device = "h100-sxm"
devices = 1000000000039
devices_per_node = 999999999999
"""
CLUSTER_KEYS = (
    b"memory_gib = 80", b"[calibration]", b"time_factor = 1.1", b"device = ", b"[device]", b"devices = 3", b"inf",
    b"-0",
    b"[peak_tflops]", b"bf16 = 900", b"runs = 3", b"inside_latency_seconds = 1e-6", b'"a100-80"',
    b"devices_per_node = 3",
)  # fmt: skip


def read_cluster(data: bytes, directory: Path) -> None:
    from meshwright.planner.hardware.cluster import cluster

    cluster(str(write_input(directory, "cluster.toml", data)))


def read_shorthand(data: bytes, directory: Path) -> None:
    from meshwright.planner.hardware.cluster import cluster

    if "/" not in (text := decode(data)):
        cluster(text)


JOB = {"model": "llama-tiny", "cluster": "8xh100-sxm", "sequence": 64, "batch": 8, "layout": "dp4 tp2",
    "engine": "megatron",
       "compile": False, "optimizer": "adamw", "documents": 1.0, "precision": "bf16"}  # fmt: skip
JOB_CLUSTER = {"device": "h100-sxm", "devices": 8, "devices_per_node": 8, "inside_gb_per_second": 450.0}


def read_job(data: bytes, directory: Path) -> None:
    from meshwright.cli.plumbing import format_json_document
    from meshwright.planner.jobs import answer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = answer(decode(data))
    assert "a fault of the planner" not in str(found.get("error")), found
    format_json_document(found)


# --- runs


def damaged() -> tuple[type[Exception], ...]:
    from meshwright.checkpoint.manifest import DamagedCheckpoint

    return (UserError, DamagedCheckpoint)


def manifest_bytes() -> bytes:
    from meshwright.checkpoint.manifest import FileRecord, Manifest

    digest = hashlib.sha256(b"{}").hexdigest()
    return Manifest(3, 2.5, {"config.json": FileRecord(2, digest, (digest,))}).to_json()


def read_manifest(data: bytes, directory: Path) -> None:
    """Return a manifest with a valid hash, or the bytes unchanged."""
    from meshwright.checkpoint import manifest

    try:
        content = json.loads(data)
        content.pop("manifest_sha256", None)
        content["manifest_sha256"] = manifest._hash_content(content)
        data = json.dumps(content).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        pass
    at = directory / "step-000003"
    write_input(at, manifest.MANIFEST, data)
    write_input(at, "config.json", b"{}")
    manifest.check_contents(at, (found := manifest.read_manifest(at)), found.files)
    manifest.check_sizes(at, found)


def read_slices(data: bytes, directory: Path) -> None:
    from meshwright.checkpoint import slices

    write_input(directory, slices.INDEX, data)
    index = slices.read_index(directory)
    slices.check_bounds(index, {"training/rank-00000-of-00001.safetensors": 32})
    wanted = [("master", "a", 0, 4, None), ("m", "a", 0, 4, slices.Columns(0, 2, 4))]
    for reads in slices.plan_reads(index, wanted).values():
        slices.split_reads(reads, 16)


SLICES = {
    "format": 1, "columns": ["kind", "name", "start", "stop", "dtype", "offset"],
    "files": {"training/rank-00000-of-00001.safetensors": [["master", "a", 0, 4, "F32", 0], ["m", "a", 0, 4, "F32",
    16, 0, 2, 4]]},
}  # fmt: skip


def read_state(data: bytes, directory: Path) -> None:
    from meshwright.checkpoint.catalogue import STATE, read_state

    write_input(directory, STATE, data)
    assert isinstance(read_state(directory), dict)


METRICS = b"\n".join(
    json.dumps({"step": n, "loss": 5.0 / n, "tokens_per_second": 10.0, "memory_gib": 0.2, "learning_rate": 1e-3,
                "seconds_by_part": {"forward": 0.1}, "gradient_norm": 1.0, "validation_loss": 4.0,
                "tokens": 100 * n}).encode()
    for n in range(1, 6)
)  # fmt: skip
RESULT: dict[str, Any] = {
    "schema": 1, "step": 5, "loss": 1.0, "validation_loss": 2.0, "tokens_per_second": 10.0, "mfu": 0.1,
    "skipped_steps": 0,
    "peak_flops_per_device": 1e12, "flops_convention": "6 N", "layout": "dp2", "checkpoint": "c",
    "best_checkpoint": "c",
    "predicted": {"step_seconds": 0.1, "device": "cpu", "memory_bytes": {"peak": 10**9},
    "calibration": {"time_factor": 1.1},
                  "step_seconds_low": 0.1, "step_seconds_high": 0.2, "compile": False},
    "measured": {"step_seconds": 0.2, "memory_bytes": {"peak": 10**9, "unexplained": 10**6}, "bytes_sent": 4},
}  # fmt: skip


def read_report(metrics: bytes | None, result: bytes | None, directory: Path, recipe: bytes | None = None) -> None:
    from meshwright.monitoring.report import write_report
    from meshwright.monitoring.run_directory import RECIPE

    if recipe is not None:
        write_input(directory, RECIPE, recipe)

    write_input(directory, "metrics.jsonl", METRICS if metrics is None else metrics)
    write_input(directory, "result.json", json.dumps(RESULT).encode() if result is None else result)
    write_report(directory)


def read_calibrate(data: bytes, directory: Path) -> None:
    from meshwright.planner.calibrate import read_run

    write_input(directory, "result.json", data)
    read_run(directory).document()


def read_prepared(data: bytes, directory: Path) -> None:
    """Damaged files in the cache are prepared again, or refused."""
    from meshwright.data import prepare
    from meshwright.recipe.data import DataRecipe

    text = directory / "text.txt"
    if not text.exists():
        text.write_text("".join(f"One mesh of {n} ranks, and {n * n} of words about it.\n" for n in range(60)))
    recipe = DataRecipe(
        source=str(text), tokenizer="bytes", sequence=16, cache=str(directory / "cache"), validation_fraction=0.0
    )
    made = prepare(recipe, 0)
    manifest = made.directory / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(data)
    try:
        again = prepare(recipe, 0)
        again.summary(1)
        again.split("train").read_batch([0])
    finally:
        manifest.write_bytes(whole)


@cache
def prepared_seed() -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        read_prepared(b"", Path(directory))
        (found,) = Path(directory).rglob("manifest.json")
        return json.loads(found.read_bytes())
