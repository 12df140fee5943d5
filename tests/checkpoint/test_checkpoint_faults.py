"""Damaged and partly written checkpoints, a full disk, a kill at any moment: the newest intact checkpoint is loaded,
and nothing else is lost."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.profiler import profile

from meshwright.checkpoint import Checkpointer, SaveOptions, find_best, find_newest, read_manifest, verify_checkpoint
from meshwright.checkpoint import checkpointer as checkpointer_module
from meshwright.checkpoint import snapshot as snapshot_module
from meshwright.checkpoint.manifest import DamagedCheckpoint
from meshwright.checkpoint.saving import Save
from meshwright.checkpoint.snapshot import CHUNK_BYTES, SnapshotBuffers
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.parallel.flat_buffers import TensorSlice
from tests.emulation.streams import ComputeStream, CopyStream
from tests.training import checkpoint_cases as cases

CONFIG = cases.tiny("llama")
LARGER = cases.tiny("llama", hidden=64)


def checkpointer(directory: Path, log: list[str] | None = None, **options) -> Checkpointer:
    lines = log if log is not None else []
    return Checkpointer(directory, Mesh.single(), CONFIG, SaveOptions(**options), lines.append)


def save(keeper: Checkpointer, step: int, **options) -> None:
    keeper.save(step, cases.state_pieces(CONFIG, 0, 1, salt=step), {"step": step}, **options)
    keeper.wait()
    assert keeper.failed() is None


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    keeper = checkpointer(directory)
    save(keeper, 100)
    save(keeper, 200)
    return directory


def resumed_step(directory: Path) -> tuple[int, list[str]]:
    log: list[str] = []
    pieces = cases.empty_like(cases.state_pieces(CONFIG, 0, 1))
    path, state = checkpointer(directory, log).load_newest(pieces)
    assert cases.equal(pieces, cases.state_pieces(CONFIG, 0, 1, salt=path.step)) and state["step"] == path.step
    return path.step, log


FILES = (
    "config.json",
    "model.safetensors",
    "training/state.json",
    "training/index.json",
    "training/rank-00000-of-00001.safetensors",
    "manifest.json",
)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "flipped"])
def test_damaged_checkpoint_falls_back_to_older_one(saved, tmp_path, file, damage):
    directory = tmp_path / "checkpoints"
    shutil.copytree(saved, directory)
    path = directory / "step-000200" / file
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        cases.flip_bit(path)
    else:
        os.truncate(path, 0 if damage == "empty" else path.stat().st_size - 1)
    step, log = resumed_step(directory)
    assert step == 100
    assert len(log) == 1 and "step-000200 is damaged and skipped" in log[0] and file in log[0]
    problems = verify_checkpoint(directory / "step-000200")
    assert len(problems) == 1 and file in problems[0]
    assert verify_checkpoint(directory / "step-000100") == []


def test_any_flipped_byte_is_detected(saved, tmp_path):
    directory = tmp_path / "checkpoints"
    shutil.copytree(saved, directory)
    generator = torch.Generator().manual_seed(0)
    for file in FILES:
        for position in torch.rand(6, generator=generator).tolist():
            cases.flip_bit(directory / "step-000200" / file, position)
            assert verify_checkpoint(directory / "step-000200") != [], (file, position)
            cases.flip_bit(directory / "step-000200" / file, position)
    assert verify_checkpoint(directory / "step-000200") == []


def test_hidden_and_foreign_directories_are_ignored(saved, tmp_path):
    directory = tmp_path / "checkpoints"
    shutil.copytree(saved, directory)
    shutil.copytree(directory / "step-000200", directory / ".step-000300.partial")
    (directory / ".step-000300.partial" / "manifest.json").unlink()
    (directory / "step-000400").write_text("a file")
    (directory / "step-last").mkdir()
    assert resumed_step(directory) == (200, [])
    assert not (directory / ".step-000300.partial").exists()  # removed at the start
    assert (directory / "step-last").is_dir() and (directory / "step-000400").is_file()


def test_no_intact_checkpoint_refuses_to_train(saved, tmp_path):
    directory = tmp_path / "checkpoints"
    shutil.copytree(saved, directory)
    for step in (100, 200):
        (directory / f"step-{step:06d}/manifest.json").unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is intact \(step-000200, step-000100 are damaged\)"):
        resumed_step(directory)


def test_damaged_checkpoint_is_replaced_by_new_save(saved, tmp_path):
    directory = tmp_path / "checkpoints"
    shutil.copytree(saved, directory)
    cases.flip_bit(directory / "step-000200/training/rank-00000-of-00001.safetensors")
    keeper = checkpointer(directory)
    save(keeper, 200)
    assert cases.entries(directory) == ["step-000100", "step-000200"]
    assert verify_checkpoint(directory / "step-000200") == []


def test_retention_keeps_step_just_saved(saved, tmp_path):
    directory = tmp_path / "checkpoints"
    shutil.copytree(saved, directory)
    cases.flip_bit(directory / "step-000200/model.safetensors")
    save(checkpointer(directory, keep=1, keep_best=False), 150)
    assert "step-000150" in cases.entries(directory)
    assert "step-000100" not in cases.entries(directory)


def test_kill_during_replacement_restores_old_checkpoint(saved, tmp_path):
    directory = tmp_path / "checkpoints"
    shutil.copytree(saved, directory)
    (directory / "step-000200").rename(directory / ".step-000200.replaced")
    assert resumed_step(directory) == (200, [])


def test_checkpoint_of_another_model_is_refused_naming_the_field(saved):
    other = cases.tiny("llama", layers=4)
    pieces = cases.empty_like(cases.state_pieces(other, 0, 1))
    with pytest.raises(UserError, match=r"step-000200 holds a model with layers = 3, but the recipe has 4"):
        Checkpointer(saved, Mesh.single(), other).load_newest(pieces)


def test_checkpoint_of_another_optimizer_is_refused(saved):
    pieces = cases.empty_like(cases.state_pieces(CONFIG, 0, 1, kinds=("master", "momentum")))
    with pytest.raises(UserError, match=r"has no momentum \(only exp_avg, exp_avg_sq, master\)"):
        checkpointer(saved).load_newest(pieces)


def test_newest_and_best_checkpoints_are_kept(tmp_path):
    keeper = checkpointer(tmp_path, keep=2)
    for step, loss in ((1, 3.0), (2, 1.5), (3, 2.0), (4, None), (5, float("nan")), (6, 1.9)):
        save(keeper, step, validation_loss=loss)
    assert cases.entries(tmp_path) == ["step-000002", "step-000005", "step-000006"]
    assert (
        find_best(tmp_path).step == 2 and find_best(tmp_path).validation_loss == 1.5 and find_newest(tmp_path).step == 6
    )
    save(checkpointer(tmp_path, keep=1, keep_best=False), 7)
    assert cases.entries(tmp_path) == ["step-000007"]
    assert find_best(tmp_path) is None


def test_save_waits_for_previous_save(tmp_path):
    keeper = checkpointer(tmp_path, keep=9)
    for step in range(1, 5):
        keeper.save(step, cases.state_pieces(CONFIG, 0, 1, salt=step), {})
    keeper.wait()
    assert [verify_checkpoint(tmp_path / f"step-{step:06d}") for step in range(1, 5)] == [[]] * 4


def test_state_may_change_during_background_save(tmp_path):
    keeper = checkpointer(tmp_path)
    pieces = cases.state_pieces(CONFIG, 0, 1)
    keeper.save(1, pieces, {})
    for piece in pieces:
        piece.tensor.zero_()
    keeper.wait()
    loaded = cases.empty_like(pieces)
    keeper.load_newest(loaded)
    assert cases.equal(loaded, cases.state_pieces(CONFIG, 0, 1))
    assert all(weights.any() for weights in load_file(tmp_path / "step-000001/model.safetensors").values())


class CudaRuntime:
    """Stand-in for `torch.cuda.cudart()`, which pins memory or, if `refused`, from the range number `refused` on does
    not. Memory that is freed while it is registered, or unregistered while it is in use, would be an error in CUDA."""

    def __init__(self, refused: int | None = None) -> None:
        self.registered: dict[int, int] = {}
        self._refused = refused

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        refuses = self._refused is not None and len(self.registered) >= self._refused
        assert flags == 1
        assert all(address >= start + length or start >= address + size for start, length in self.registered.items())
        self.registered.update({} if refuses else {address: size})
        return int(refuses)

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.mark.parametrize("refused", [False, True])
def test_snapshot_of_gpu_state_pins_the_bytes_that_it_needs_until_it_needs_more(
    monkeypatch: pytest.MonkeyPatch, refused: bool
):
    """CUDA reports a refusal again at the next launch of a kernel."""
    runtime = CudaRuntime(0 if refused else None)
    launches = list[str]()

    def launch(*_: object, device: str) -> None:
        launches.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch, "zeros", launch)
    monkeypatch.setattr(snapshot_module, "CHUNK_BYTES", 2**40)
    buffers = SnapshotBuffers()
    for numel in (100_001, 70_000, 200_003):
        state = torch.arange(float(numel))
        snapshot = buffers.take([TensorSlice("master", "weights", 0, numel, state)])
        held = snapshot.buffers[0].data_ptr()
        largest = 100_001 if numel < 200_003 else numel
        assert runtime.registered == ({} if refused else {held: 4 * largest})
        assert torch.equal(snapshot.slices[0].tensor, state)
        del snapshot
    del buffers
    assert not runtime.registered and launches == (["cuda"] * 2 if refused else [])


@pytest.mark.parametrize("refused", [None, 2])
def test_snapshot_of_gpu_state_is_pinned_and_copied_in_chunks(monkeypatch: pytest.MonkeyPatch, refused: int | None):
    """A copy never crosses the bounds of a pinned range, which are bounds of pages too: CUDA would refuse it."""
    runtime, chunk, copied = CudaRuntime(refused), 2**16, list[tuple[int, int]]()
    copy = torch.Tensor.copy_

    def watch(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied.append((target.data_ptr(), target.nbytes))
        assert non_blocking
        return copy(target, source)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)  # a launch that reports a refusal
    monkeypatch.setattr(torch.Tensor, "copy_", watch)
    monkeypatch.setattr(torch.cuda, "Stream", CopyStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(snapshot_module.backend, "current_stream", lambda device: ComputeStream())
    monkeypatch.setattr(snapshot_module, "CHUNK_BYTES", chunk)
    states = [torch.randn(70_003), torch.randn(13), torch.arange(40_001).to(torch.bfloat16)]
    pieces = [TensorSlice("master", f"weights {n}", 0, len(state), state) for n, state in enumerate(states)]
    snapshot = SnapshotBuffers().take(pieces)
    assert all(torch.equal(item.tensor, state) for item, state in zip(snapshot.slices, states, strict=True))
    ranges = [(start, start + size) for start, size in copied]
    assert len(ranges) >= sum(buffer.nbytes for buffer in snapshot.buffers) // chunk
    assert sum(size for _, size in copied) == sum(state.nbytes for state in states)
    for start, stop in [*ranges, *((start, start + size) for start, size in runtime.registered.items())]:
        assert 0 < stop - start <= chunk and (stop - 1) // chunk == start // chunk
    if refused is None:
        assert sum(runtime.registered.values()) == sum(state.nbytes for state in states)
    assert CHUNK_BYTES <= 2**30 and CHUNK_BYTES.bit_count() == 1 and CHUNK_BYTES % mmap.PAGESIZE == 0


def test_snapshot_holds_its_sources_until_the_copies_are_complete(monkeypatch: pytest.MonkeyPatch):
    """The clones of buffers that the next forward may change: a GPU reads them after `take` has returned."""
    monkeypatch.setattr(torch.cuda, "Stream", CopyStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for stream in (ComputeStream(), None):
        monkeypatch.setattr(snapshot_module.backend, "current_stream", lambda device, stream=stream: stream)
        clone = torch.randn(100).clone()
        alive = weakref.ref(clone)
        snapshot = SnapshotBuffers().take([TensorSlice("master", "running_mean", 0, 100, clone)])
        del clone
        assert (alive() is not None) == (stream is not None)
        snapshot.wait()
        assert alive() is None


@pytest.mark.parametrize("fails", [False, True])
def test_ended_save_holds_no_device_memory(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A failed save neither, though its copies are never written: clones of buffers would stay until the next save."""
    monkeypatch.setattr(torch.cuda, "Stream", CopyStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(snapshot_module.backend, "current_stream", lambda device: ComputeStream())
    if fails:
        monkeypatch.setattr(Save, "_free_bytes", lambda self: 0)
    keeper = checkpointer(tmp_path, background=False)
    pieces = [replace(piece, tensor=piece.tensor.clone()) for piece in cases.state_pieces(CONFIG, 0, 1)]
    alive = [weakref.ref(piece.tensor) for piece in pieces]
    keeper.save(1, pieces, {})
    del pieces
    assert ("no space left" in (keeper.failed() or "")) == fails
    assert [each() for each in alive if each() is not None] == []


def test_snapshot_reuses_allocated_memory():
    """The snapshot blocks training (`bench/save_stall.py` measures for how long): no fresh memory, and adjacent slices
    in one copy."""
    buffers, flat = SnapshotBuffers(), torch.randn(200_000)
    pieces = [TensorSlice("master", f"row {n}", 0, 1_000, flat[n * 1_000 : (n + 1) * 1_000]) for n in range(200)]
    buffers.reserve(pieces)
    with profile(profile_memory=True) as seen:
        first = buffers.take(pieces)
    copies = [event for event in seen.events() if event.name == "aten::copy_"]
    assert len(copies) == 1 and not any(event.cpu_memory_usage > 0 for event in seen.events())
    assert all(torch.equal(copy.tensor, piece.tensor) for copy, piece in zip(first.slices, pieces, strict=True))
    places = [copy.tensor.data_ptr() for copy in first.slices]
    assert [copy.tensor.data_ptr() for copy in buffers.take(pieces).slices] == places


def test_incomplete_state_is_not_saved(tmp_path):
    keeper = checkpointer(tmp_path)
    pieces = cases.state_pieces(CONFIG, 0, 1)
    keeper.save(1, pieces[:-1], {})
    keeper.wait()
    with pytest.raises(AssertionError, match="exp_avg_sq of"):
        keeper.failed()
    assert find_newest(tmp_path) is None


def test_manifest_of_a_later_format_is_refused(saved, tmp_path):
    shutil.copytree(saved / "step-000200", tmp_path / "step-000200")
    file = tmp_path / "step-000200/manifest.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(DamagedCheckpoint, match="format 2; this version reads format 1"):
        read_manifest(tmp_path / "step-000200")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MiB, which holds one checkpoint of `LARGER` (2 MiB) and not two."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("found", ["before", "while writing"])
def test_full_disk_keeps_older_checkpoints(small_disk, found, monkeypatch):
    if found == "while writing":  # as if another process filled it in the meantime
        from meshwright.checkpoint import saving

        monkeypatch.setattr(saving.Save, "_check_space", lambda self: None)
    config = LARGER
    keeper = Checkpointer(small_disk / "checkpoints", Mesh.single(), config)
    keeper.save(1, cases.state_pieces(config, 0, 1), {})
    keeper.wait()
    assert keeper.failed() is None
    size = sum(file.stat().st_size for file in (small_disk / "checkpoints").rglob("*") if file.is_file())
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    assert size > free, "the disk must not hold a second one"
    keeper.save(2, cases.state_pieces(config, 0, 1), {})
    keeper.wait()
    line = keeper.failed()
    assert "\n" not in line and "checkpoint of step 2 not written" in line and "no space left" in line
    assert ("rank 0 could not write" in line) == (found == "while writing")
    assert "it needs" in line and "free" in line and line.endswith("the newest intact checkpoint is step-000001")
    keeper.abandon()
    assert keeper.failed() is None
    assert cases.entries(small_disk / "checkpoints") == ["step-000001"]
    assert os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize == free
    assert verify_checkpoint(small_disk / "checkpoints/step-000001") == []
    shutil.rmtree(small_disk / "checkpoints/step-000001")
    keeper.save(3, cases.state_pieces(config, 0, 1), {})  # with free space, the same run saves again
    keeper.wait()
    assert keeper.failed() is None and find_newest(small_disk / "checkpoints").step == 3


def test_full_disk_is_reported_on_both_ranks(two, small_disk):
    directory = small_disk / "checkpoints"
    results = two.run(cases.save_without_looking, str(directory), LARGER)
    assert [line for line, _ in results] == [None, None]
    for _, line in results:
        assert "checkpoint of step 2 not written: rank" in line and "no space left on device (it needs" in line
    assert [name for name in cases.entries(directory) if not name.startswith(".last")] == ["step-000001"]
    assert verify_checkpoint(directory / "step-000001") == []


HOLDER = """
import sys, time
from pathlib import Path
from meshwright.comm.mesh import Mesh
from meshwright.checkpoint import Checkpointer
from tests.training import checkpoint_cases as cases

keeper = Checkpointer(Path(sys.argv[1]), Mesh.single(), cases.tiny("llama"))
Path(sys.argv[1], ".step-000001.partial").mkdir()  # as during a save
print("made", flush=True)
time.sleep(60)
"""


def test_checkpointer_of_another_process_is_refused_until_it_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"made\n"
        with pytest.raises(UserError, match=rf"in use by process {holder.pid} on {socket.gethostname()} since") as one:
            checkpointer(tmp_path)
        assert one.value.exit_code == 2 and cases.entries(tmp_path) == [".step-000001.partial"]  # nothing is removed
        holder.kill()
    first, second = checkpointer(tmp_path), checkpointer(tmp_path)  # two in one process share the lock
    assert cases.entries(tmp_path) == []
    with first, second:
        assert tmp_path.resolve() in checkpointer_module._locks
    assert tmp_path.resolve() not in checkpointer_module._locks  # released at the end of the run, not of the process


KILLED = """
import os, sys
from pathlib import Path
from meshwright.comm.mesh import Mesh
from meshwright.checkpoint import Checkpointer, SaveOptions
from tests.training import checkpoint_cases as cases

config = cases.tiny("llama")
for line in sys.stdin:  # one fork per line, killed before that file change
    pid = os.fork()
    if pid == 0:
        keeper = Checkpointer(Path(sys.argv[1]), Mesh.single(), config, SaveOptions(keep=2))
        pieces = cases.empty_like(cases.state_pieces(config, 0, 1))
        loaded = keeper.load_newest(pieces)
        step = loaded[0].step if loaded else 0
        assert not loaded or cases.equal(pieces, cases.state_pieces(config, 0, 1, salt=step))
        cases.lose_power_at(int(line))
        while True:
            step += 1
            keeper.save(step, cases.state_pieces(config, 0, 1, salt=step), {})
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_kill_during_save_keeps_newest_intact_checkpoint(tmp_path):
    directory = tmp_path / "checkpoints"
    steps, partials = [0], 0
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        for change in (*range(2, 20, 4), *range(20, 42)):  # a whole save, deletion of an old checkpoint, the next save
            server.stdin.write(f"{change}\n")
            server.stdin.flush()
            assert int(server.stdout.readline()) == -signal.SIGKILL, (
                "it failed to load the state after the previous kill"
            )
            skipped: list[str] = []
            found = find_newest(directory, skipped.append)
            assert skipped == []  # no partial checkpoint has a checkpoint's name
            if found is not None:
                assert verify_checkpoint(found.path) == []
                assert found.step >= steps[-1]
            steps.append(found.step if found else 0)
            partials += bool(list(directory.glob(".step-*.partial")))
        server.stdin.close()
    assert steps[-1] > 3, steps  # it saved between the kills
    assert partials > 3  # and was killed while saving
