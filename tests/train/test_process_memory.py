"""The memory of a rank's process: its machine's constants are measured once and kept; a prediction is their sum."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.plan.ledger import Item, Ledger
from meshwright.plan.machine_profile import PROBE_VARIABLE
from meshwright.train import process_memory
from meshwright.train.memory import LARGEST_MMAP_THRESHOLD
from meshwright.train.process_memory import (
    FORMAT,
    ProcessConstants,
    constants_file,
    predict_process_memory,
    process_constants,
)

MIB = 2**20
CONSTANTS = ProcessConstants(16 * MIB, 0.4, MIB // 2, 50 * MIB, 30 * MIB)


def keep_constants() -> None:
    """Have this machine's file say `CONSTANTS` of runs in float32 and bf16."""
    path = constants_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = [process_memory._key(precision, False) for precision in ("fp32", "bf16")]
    keys += [f"{precision} 1 threads" for precision in ("fp32", "bf16")]
    table = {"format": FORMAT, **process_memory._machine(), "constants": dict.fromkeys(keys, asdict(CONSTANTS))}
    path.write_text(json.dumps(table))


@pytest.fixture
def measured(tmp_path, monkeypatch) -> list[tuple[str, bool]]:
    """What was measured, on a machine of which nothing is known; it may be measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(PROBE_VARIABLE, raising=False)
    asked: list[tuple[str, bool]] = []

    def measure(precision: str, compiled: bool, limit_seconds: float = 0.0) -> ProcessConstants:
        asked.append((precision, compiled))
        return CONSTANTS

    monkeypatch.setattr(process_memory, "measure_process_memory", measure)
    return asked


def test_constants_are_measured_once_for_each_precision_and_compiler(measured):
    for _ in range(2):
        assert process_constants("fp32", False, probe=True) == CONSTANTS
        assert process_constants("bf16", True, probe=True) == CONSTANTS
    assert measured == [("fp32", False), ("bf16", True)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'),
        lambda text: text.replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'),
        lambda text: text.replace('"first_use_bytes": ', '"first_use_bytes": -'),
        lambda text: text.replace('"heap_overhead_fraction": 0.4', '"heap_overhead_fraction": NaN'),
        lambda text: text.replace('"kernel_bytes"', '"colonel_bytes"'),
    ],
    ids=["cut", "no-table", "format", "torch", "negative", "not-a-number", "unknown-field"],
)
def test_constants_of_a_damaged_or_foreign_file_are_measured_again(measured, damage):
    process_constants("fp32", False, probe=True)
    path = constants_file()
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    assert process_constants("fp32", False, probe=True) == CONSTANTS
    assert len(measured) == 2
    assert path.read_text() == text


def test_nothing_is_measured_where_that_is_not_wanted(measured, monkeypatch):
    with pytest.raises(UserError, match="no process-memory profile"):
        process_constants("fp32", False, probe=False)
    monkeypatch.setenv(PROBE_VARIABLE, "0")
    with pytest.raises(UserError, match="no process-memory profile"):
        process_constants("fp32", False, probe=True)
    assert measured == [] and not constants_file().exists()


def test_a_directory_that_cannot_be_written_stops_no_prediction(measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert process_constants("fp32", False, probe=True) == CONSTANTS


def trainer(layout: str = "dp1 fp32", *, compiled: bool = False, experts: int = 0) -> Any:
    """What a prediction asks of a `Trainer`: 8 MiB of states, of which 6 MiB are saved."""
    numel = 6 * MIB // 4
    piece = SimpleNamespace(start=0, stop=numel, tensor=torch.empty(0))
    return SimpleNamespace(
        layout=Layout.parse(layout), steps_done=0, memory=lambda: {"parameters": 8 * MIB},
        pieces=lambda owned: [piece],
        config=SimpleNamespace(layers=2, experts=experts, has_experts=lambda layer: bool(experts)),
        tokens=SimpleNamespace(tokens=10 * MIB, dtype=torch.int16),
        recipe=SimpleNamespace(
            train=SimpleNamespace(steps=4, batch=8, compile=compiled), checkpoint=SimpleNamespace(background=True)
        ),
    )  # fmt: skip


def peak_of(*tensors: int) -> Ledger:
    """A ledger of 8 MiB of states and tensors of these sizes."""
    items = [Item("parameters", "all", (2 * MIB,), "float32", 8 * MIB, None, "start", "end")]
    items += [Item("activations", "x", (size,), "uint8", size, 0, "forward", "backward") for size in tensors]
    return Ledger(tuple(items), sum(item.bytes for item in items), "backward", 8 * MIB)


def test_the_prediction_is_the_sum_of_its_items():
    found = predict_process_memory(trainer(), peak_of(10 * MIB, 30 * MIB), 100 * MIB, CONSTANTS, share=0.1)
    items = dict(found.items)
    assert found.peak == sum(items.values())
    assert (items["framework"], items["model states"], items["step tensors"]) == (100 * MIB, 8 * MIB, 40 * MIB)
    assert (items["checkpoint snapshot"], items["checkpoint hashing buffer"]) == (6 * MIB, 6 * MIB)
    assert items["library workspaces"] == 16 * MIB and items["heap overhead"] == round(0.4 * 40 * MIB)
    assert items["compiled code"] == items["compiler workspace"] == items["oneDNN kernel cache"] == 0
    assert items["mapped data"] == 4 * 8 * process_memory.PAGES_READ
    assert items["unexplained"] == round(0.1 * (found.peak - items["unexplained"]))


def test_the_prediction_is_never_below_what_the_process_already_took(monkeypatch):
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: 120 * MIB)
    monkeypatch.setattr(process_memory, "peak_resident_bytes", lambda: 900 * MIB)
    assert predict_process_memory(trainer(), peak_of(MIB), 100 * MIB, CONSTANTS).peak == 900 * MIB


def test_tensors_with_pages_of_their_own_leave_nothing_on_the_heap():
    big = 2 * LARGEST_MMAP_THRESHOLD
    found = predict_process_memory(trainer(), peak_of(10 * MIB, big), 100 * MIB, CONSTANTS)
    assert found.items["heap overhead"] == round(0.4 * 10 * MIB)


def test_compiling_counts_as_far_as_the_step_does_not_need_its_memory_later():
    small, large = (
        predict_process_memory(trainer(compiled=True), peak_of(size), 100 * MIB, CONSTANTS).items
        for size in (10 * MIB, 31 * MIB)
    )
    assert small["compiled code"] == large["compiled code"] == CONSTANTS.compiler_resident_bytes
    assert (small["compiler workspace"], large["compiler workspace"]) == (30 * MIB - 14 * MIB, 0)


def test_kernels_of_experts_are_counted_in_bf16_up_to_what_is_kept():
    few, many, plain = (
        predict_process_memory(trainer(layout, experts=experts), peak_of(MIB), MIB, CONSTANTS).items
        for layout, experts in (("dp1 bf16", 2), ("dp1 bf16", 64), ("dp1 fp32", 64))
    )
    assert few["oneDNN kernel cache"] == 9 * 2 * 2 * 4 * CONSTANTS.kernel_bytes
    assert many["oneDNN kernel cache"] == process_memory.KERNELS_KEPT * CONSTANTS.kernel_bytes
    assert plain["oneDNN kernel cache"] == 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_process_of_this_machine_is_measured():
    found = process_memory.measure_process_memory("bf16", False)
    assert MIB < found.first_use_bytes < 200 * MIB and 0 <= found.heap_overhead_fraction < 2 and found.kernel_bytes > 0
