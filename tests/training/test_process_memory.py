"""Process memory of a rank: the constants of the machine are measured once and stored; a prediction is their sum."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.layout import Layout
from meshwright.machine import VERSION
from meshwright.monitoring.memory import KERNELS_KEPT, LARGEST_MMAP_THRESHOLD
from meshwright.planner.api import plan
from meshwright.planner.hardware import machine_profile
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.hardware.machine_profile import ProcessConstants, ProcessKey
from meshwright.planner.memory.ledger import Ledger
from meshwright.planner.memory.snapshot import Allocation
from meshwright.planner.search.estimate import problem_of
from meshwright.planner.search.search import search
from meshwright.planner.show.text import estimate_text
from meshwright.training import process_memory
from meshwright.training.first_start import measure_process_memory
from meshwright.training.process_memory import predict_process_memory
from tests.planner.calibration_cases import DEVICE, cluster_file

MIB = 2**20
CONSTANTS = ProcessConstants(16 * MIB, 0.4, MIB // 2, 50 * MIB, 30 * MIB, 250 * MIB)


def keep_constants() -> None:
    """Store `CONSTANTS` for runs in float32 and bf16."""
    for precision in ("fp32", "bf16"):
        for threads in {1, torch.get_num_threads()}:
            ProcessKey(precision, threads, False).write(CONSTANTS)


@pytest.fixture
def key(tmp_path, monkeypatch) -> ProcessKey:
    """A key on a machine without stored measurements."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return ProcessKey("fp32", 2, False)


def test_constants_are_stored_per_key(key):
    others = [replace(key, precision="bf16"), replace(key, threads=1), replace(key, compiled=True)]
    key.write(CONSTANTS)
    assert key.read() == CONSTANTS and [each.read() for each in others] == [None] * 3


def test_constants_of_two_torch_versions_are_stored_together(key, monkeypatch):
    key.write(CONSTANTS)
    with monkeypatch.context() as other:
        other.setattr(machine_profile, "torch_version", lambda: "1.0")
        key.write(replace(CONSTANTS, kernel_bytes=1))
    assert key.read() == CONSTANTS


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace(f'"version": {VERSION}', f'"version": {VERSION + 1}'),
        lambda text: text.replace('"precision": "fp32"', '"precision": "bf16"'),
        lambda text: text.replace('"first_use_bytes": ', '"first_use_bytes": -'),
        lambda text: text.replace('"heap_overhead_fraction": 0.4', '"heap_overhead_fraction": NaN'),
        lambda text: text.replace('"kernel_bytes"', '"colonel_bytes"'),
    ],
    ids=["cut", "no-table", "version", "another-key", "negative", "not-a-number", "unknown-field"],
)
def test_damaged_constants_are_none(key, damage):
    key.write(CONSTANTS)
    text = key.path.read_text()
    assert damage(text) != text
    key.path.write_text(damage(text))
    assert key.read() is None


def trainer(layout: str = "dp1 fp32", *, compiled: bool = False, experts: int = 0) -> Any:
    """The attributes of a `Trainer` that a prediction reads: 8 MiB of model states, of which 6 MiB are saved."""
    numel = 6 * MIB // 4
    item = SimpleNamespace(start=0, stop=numel, tensor=torch.empty(0))
    return SimpleNamespace(
        layout=Layout.parse(layout), steps_done=0, memory=lambda: {"parameters": 8 * MIB},
        slices=lambda owned: [item],
        task=SimpleNamespace(
            config=SimpleNamespace(layers=2, experts=experts, has_experts=lambda layer: bool(experts)),
            tokens=SimpleNamespace(tokens=10 * MIB, dtype=torch.int16),
        ),
        recipe=SimpleNamespace(
            train=SimpleNamespace(steps=4, batch=8, compile=compiled), checkpoint=SimpleNamespace(background=True)
        ),
    )  # fmt: skip


def peak_of(*tensors: int) -> Ledger:
    """A ledger of 8 MiB of model states and tensors of these sizes."""
    items = [Allocation("parameters", "all", (2 * MIB,), "float32", 8 * MIB, None, "start", "end")]
    items += [Allocation("activations", "x", (size,), "uint8", size, 0, "forward", "backward") for size in tensors]
    return Ledger(tuple(items), sum(item.bytes for item in items), "backward", 8 * MIB)


def test_prediction_is_the_sum_of_its_items():
    found = predict_process_memory(trainer(), peak_of(10 * MIB, 30 * MIB), 100 * MIB, CONSTANTS, share=0.1)
    items = dict(found.items)
    assert found.peak == sum(items.values())
    assert (items["framework"], items["model states"], items["step tensors"]) == (100 * MIB, 8 * MIB, 40 * MIB)
    assert (items["checkpoint snapshot"], items["checkpoint hashing buffer"]) == (6 * MIB, 6 * MIB)
    assert items["library workspaces"] == 16 * MIB and items["heap overhead"] == round(0.4 * 40 * MIB)
    assert items["compiled code"] == items["compiler workspace"] == items["oneDNN kernel cache"] == 0
    assert items["mapped data"] == 4 * 8 * process_memory.PAGES_READ
    assert items["unexplained"] == round(0.1 * (found.peak - items["unexplained"]))


def test_prediction_is_at_least_memory_already_used(monkeypatch):
    monkeypatch.setattr(process_memory, "read_resident_bytes", lambda: 120 * MIB)
    monkeypatch.setattr(process_memory, "read_peak_resident_bytes", lambda: 900 * MIB)
    assert predict_process_memory(trainer(), peak_of(MIB), 100 * MIB, CONSTANTS).peak == 900 * MIB


def test_large_tensors_leave_no_memory_on_heap():
    big = 2 * LARGEST_MMAP_THRESHOLD
    found = predict_process_memory(trainer(), peak_of(10 * MIB, big), 100 * MIB, CONSTANTS)
    assert found.items["heap overhead"] == round(0.4 * 10 * MIB)


def test_compiler_memory_counts_only_beyond_step_memory():
    small, large = (
        predict_process_memory(trainer(compiled=True), peak_of(size), 100 * MIB, CONSTANTS).items
        for size in (10 * MIB, 31 * MIB)
    )
    assert small["compiled code"] == large["compiled code"] == CONSTANTS.compiler_resident_bytes
    assert (small["compiler workspace"], large["compiler workspace"]) == (30 * MIB - 14 * MIB, 0)


def test_expert_kernels_are_counted_in_bf16(monkeypatch):
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    few, many, plain = (
        predict_process_memory(trainer(layout, experts=experts), peak_of(MIB), MIB, CONSTANTS).items
        for layout, experts in (("dp1 bf16", 2), ("dp1 bf16", 64), ("dp1 fp32", 64))
    )
    assert few["oneDNN kernel cache"] == 6 * 2 * 2 * 4 * CONSTANTS.kernel_bytes
    assert many["oneDNN kernel cache"] == KERNELS_KEPT * CONSTANTS.kernel_bytes
    assert plain["oneDNN kernel cache"] == 0


def test_kernels_follow_the_cache_capacity_and_the_steps_left(monkeypatch):
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "50")
    run = trainer("dp1 bf16", experts=2)
    run.steps_done = 3
    assert process_memory._count_cached_kernels(run) == 6 * 2 * 2
    run.steps_done = 0
    assert process_memory._count_cached_kernels(run) == 50


@pytest.mark.slow
@pytest.mark.exhaustive
def test_process_of_this_machine_is_measured():
    """Two at once, each in a process of its own, find what one alone finds."""
    keys = [ProcessKey(precision, 1, False) for precision in ("bf16", "fp32")]
    found, plain = measure_process_memory(keys, print)
    assert MIB < found.first_use_bytes < 200 * MIB and 0 <= found.heap_overhead_fraction < 2 and found.kernel_bytes > 0
    assert plain.kernel_bytes == 0 and plain.base_bytes == pytest.approx(found.base_bytes, rel=0.05)
    (alone,) = measure_process_memory(keys[:1], print)
    assert alone.base_bytes == pytest.approx(found.base_bytes, rel=0.05)
    assert alone.first_use_bytes == pytest.approx(found.first_use_bytes, abs=16 * MIB)


def test_plan_for_this_cpu_adds_the_process_to_tensors(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine_profile, "processor_name", lambda: DEVICE)
    machine = cluster(str(cluster_file(tmp_path)))
    assert machine.measured is not None
    size = {"sequence": 64, "batch": 2}
    tensors = plan("gpt2", machine, "dp2 fp32", **size).best
    assert tensors.memory.framework_bytes == 0 and any("tensors alone" in line for line in tensors.warnings)
    ProcessKey("fp32", machine.measured.threads, True).write(CONSTANTS)
    ProcessKey("fp32", machine.measured.threads, False).write(CONSTANTS)
    whole = plan("gpt2", machine, "dp2 fp32", **size).best
    assert whole.memory.device_bytes - tensors.memory.device_bytes == 266 * MIB and whole.warnings == ()
    assert "interpreter and libraries 0.24, library workspaces 0.02" in " ".join(estimate_text(whole).split())
    compiled = plan("gpt2", machine, "dp2 fp32", compile=True, **size).best
    assert compiled.memory.framework_bytes == 316 * MIB
    small = replace(machine, device=replace(machine.device, memory_bytes=tensors.memory.device_bytes + 200 * MIB))
    assert not plan("gpt2", small, "dp2 fp32", **size).best.fits
    found = search(problem_of("gpt2", small, precision="fp32", **size), 4)
    assert all(each.memory.device_bytes <= small.device.memory_bytes for each in found.best)
    other = replace(machine, device=replace(machine.device, name="another CPU"))
    assert plan("gpt2", other, "dp2 fp32", **size).best.memory.framework_bytes == 0
