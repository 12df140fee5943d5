"""Small training runs, in this process or on local ranks, and their outcomes."""

from __future__ import annotations

import errno
import sysconfig
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.collectives.named import load_named_programs
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh, calls_in_flight
from meshwright.monitoring.metrics import read_metrics
from meshwright.monitoring.records import Validation
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.recipe import Recipe, load_recipe_text
from meshwright.training import loop
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.model_config import resolve_model_config
from meshwright.training.trainer import Trainer

LEFT = ("metrics.jsonl", "result.json", "recipe.resolved.toml")
"""Files of a run directory that only a run that trains writes."""
Values = dict[tuple[str, str], torch.Tensor]  # (kind of state, row) -> all its elements, flat as the model stores it

SOURCES = [str(Path(sysconfig.get_path("stdlib"), name)) for name in ("argparse.py", "ast.py", "inspect.py")]


def recipe(place: Path, layout: str, **changes: Any) -> Recipe:
    """Return the recipe of a small Llama on the text of three modules, in directory `place`/run, with data in
    `place`/cache or next to it. `changes`: train_steps=3, model_tied=True ..."""
    tables: dict[str, Any] = {
        "layout": layout,
        "run": {"directory": str(place / "run"), "seed": 5, "device": "cpu"},
        "model": {
            "family": "llama", "layers": 3, "hidden": 40, "heads": 4, "kv_heads": 2, "intermediate": 72, "tied": True,
        },
        "data": {"source": SOURCES, "tokenizer": "bytes", "sequence": 48, "cache": str(place.parent / "cache")},
        "train": {"steps": 6, "batch": 8, "learning_rate": 3e-3, "warmup": 2, "validation_sequences": 13},
    }  # fmt: skip
    for key, value in changes.items():
        table, _, field = key.partition("_")
        if isinstance(value, dict):
            tables[key] = value
        else:
            tables.setdefault(table, {})[field] = value
    return Recipe.from_tables(tables, trust=True)


def metrics(place: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics."""
    return read_metrics(place / "run" / "metrics.jsonl")


def trace(place: Path) -> list[tuple[Any, ...]]:
    """Return what must be equal bit for bit in two runs: number, loss, gradient norm, learning rate and validation of
    each step."""
    keys = ("step", "loss", "gradient_norm", "learning_rate", "validation_loss")
    return [tuple(line.get(key) for key in keys) for line in metrics(place) if "loss" in line]


class Crash(Exception):
    """Exception that ends a run in a test."""


def train(text: str, crash_after: int = 0, fault: str = "") -> dict[str, Any]:
    """Train on this rank; return the result, the log and this rank's part of the state. `crash_after`: step after which
    it ends immediately. `fault`: function of this module, called with the run before it begins."""
    wanted = load_recipe_text(text, "recipe", trust=True)
    torch.set_num_threads(1)  # threads of two ranks would contend for two cores
    torch.manual_seed(
        torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    )  # no result may depend on it
    loop.device_peak_flops = lambda mesh, precision: 1e9
    programs = load_named_programs(wanted.collectives, wanted.parsed_layout)
    mesh = Mesh.create(wanted.parsed_layout, "cpu", programs=programs)
    directory = RunDirectory(wanted.run_directory)
    directory.create()
    run = loop.Run(wanted, mesh, directory, show_progress=False)
    said: list[str] = []
    run.journal.log = said.append  # type: ignore[method-assign]
    if fault:
        globals()[fault](run)
    before_step = run._step

    def step() -> None:
        before_step()
        if run.trainer.steps_done == crash_after:
            run.checkpointer.wait()
            raise Crash

    run._step = step  # type: ignore[method-assign]
    result: dict[str, Any] = {}
    error = ""
    try:
        with loop.deterministic(wanted.train.deterministic, wanted.train.compile):
            result = run.run()
    except Crash:
        pass
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    state = [replace(piece, tensor=piece.tensor.clone()) for piece in run.trainer.slices(owned=True)]
    mesh.close()
    return {"result": result, "state": state, "said": said, "error": error, "layout": str(run.trainer.layout)}


def run(
    ranks: LocalRanks | None, place: Path, layout: str, crash_after: int = 0, fault: str = "", **changes: Any
) -> list[dict[str, Any]]:
    """Return the outcome of `train` on each rank; in this process if `ranks` is None."""
    text = recipe(place, layout, **changes).to_toml()
    return [train(text, crash_after, fault)] if ranks is None else ranks.run(train, text, crash_after, fault)


def run_without_error(*where: Any, **changes: Any) -> list[dict[str, Any]]:
    """Call `run` and check that no rank ends with an error."""
    outcomes = run(*where, **changes)
    assert all(outcome["error"] == "" for outcome in outcomes), outcomes[0]["error"]
    return outcomes


def traced_and_generated(test: Callable[..., None]) -> Callable[..., None]:
    """Parametrize a test of compiled models with `fault`: without generated code (test_training.py generates it on one
    device), and, exhaustively, with it."""
    generated = pytest.param("", id="generated", marks=[pytest.mark.slow, pytest.mark.exhaustive])
    return pytest.mark.parametrize("fault", [pytest.param("without_generated_code", id="traced"), generated])(test)


def assert_same_steps(place: Path, expected: Path, steps: int | None = None) -> None:
    """Check that steps, or the first `steps` of `expected`, are equal within rounding: number, loss, norm, learning
    rate, validation loss."""
    found, wanted = trace(place), trace(expected)[:steps]
    assert found and len(found) == (steps or len(wanted)) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours[0], ours[3]) == (theirs[0], theirs[3])
        assert ours[1:3] == pytest.approx(theirs[1:3], rel=5e-6), ours[0]
        assert ours[4] == (None if theirs[4] is None else pytest.approx(theirs[4], rel=5e-6)), ours[0]


def assert_same_state(outcomes: list[dict[str, Any]], expected: Values, least_norm: float = 0.0) -> None:
    """Check that states are equal within rounding, row by row, relative to the row's norm or `least_norm`."""
    for key, ours in whole_state(outcomes).items():
        error = (ours - expected[key]).norm() / expected[key].norm().clamp(min=least_norm)
        assert error < 1e-4, (key, float(error))


def whole_state(outcomes: list[dict[str, Any]]) -> Values:
    """Assemble the state of a run from what its ranks own: every element belongs to exactly one rank."""
    pieces: dict[tuple[str, str], list[TensorSlice]] = {}
    for outcome in outcomes:
        for piece in outcome["state"]:
            pieces.setdefault((piece.kind, piece.name), []).append(piece)
    whole: Values = {}
    for key, found in pieces.items():
        size = sum(piece.stop - piece.start for piece in found)
        whole[key] = torch.full((size,), torch.nan, dtype=found[0].tensor.dtype)
        for piece in found:
            piece.write_into(whole[key])
        assert bool(whole[key].isfinite().all()), key  # no element is missing
    return whole


def same(a: Values, b: Values) -> bool:
    """Return True if two states are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# --- faults


def without_generated_code(run: loop.Run) -> None:
    """No fault: compiled blocks run as traced, forward and backward, since code generation takes most of the time."""
    run.trainer.task.model.compile_blocks(backend="aot_eager")


def on_rank(run: loop.Run, rank: int) -> bool:
    return run.mesh.rank == rank


def _at_finish(run: loop.Run, spoil: Callable[[ZeroEngine, int], None]) -> None:
    parallel, finish = run.trainer.parallel, run.trainer.parallel.finish

    def spoilt() -> None:
        finish()
        spoil(parallel, run.trainer.steps_done + 1)

    parallel.finish = spoilt  # type: ignore[method-assign]


def nan_gradient_in_step_2(run: loop.Run) -> None:
    """Rank 1 has a NaN in its gradients in step 2, and infinity in step 4."""

    def spoil(parallel: ZeroEngine, step: int) -> None:
        if step in (2, 4) and on_rank(run, 1):
            parallel.shards[2].gradient[7] = torch.nan if step == 2 else torch.inf

    _at_finish(run, spoil)


def nan_parameter_from_step_3(run: loop.Run) -> None:
    """One parameter of rank 1 becomes NaN before step 3 and stays so."""
    step = run.trainer.launch_step

    def spoilt(**options: Any) -> Any:
        if run.trainer.steps_done == 2 and on_rank(run, 1):
            run.trainer.parallel.shards[1].master[5] = torch.nan
            run.trainer.parallel.all_gather_parameters()
        return step(**options)

    run.trainer.launch_step = spoilt  # type: ignore[method-assign]


def rank_1_sleeps(run: loop.Run) -> None:
    """Rank 1 needs three times as long for its own work, on a busy machine too: when it reads data, it sleeps twice as
    long as the previous step took, at most a second."""
    read, woken = run.trainer.task.load_step, time.monotonic()

    def slow(step: int) -> Any:
        nonlocal woken
        if on_rank(run, 1):
            time.sleep(min(1.0, max(0.05, 2 * (time.monotonic() - woken))))
            woken = time.monotonic()
        return read(step)

    run.trainer.task.load_step = slow  # type: ignore[method-assign]


def keep_states(run: loop.Run) -> None:
    """Log whether each step changed this rank's master weights."""
    step = run.trainer.launch_step

    def watched(**options: Any) -> Any:
        before = [shard.master.clone() for shard in run.trainer.parallel.shards]
        verdict = step(**options)
        after = [shard.master for shard in run.trainer.parallel.shards]
        moved = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        run.journal.log(f"moved {run.trainer.steps_done}: {moved}")
        return verdict

    run.trainer.launch_step = watched  # type: ignore[method-assign]


def skip_and_watch(run: loop.Run) -> None:
    nan_gradient_in_step_2(run)
    keep_states(run)


def update_early(run: loop.Run) -> None:
    """Updates begin before the host knows the outcome of a step, as on GPUs."""
    run.trainer.updates_early = True


def skip_and_watch_early_updates(run: loop.Run) -> None:
    update_early(run)
    skip_and_watch(run)


def update_early_and_finish_at_once(run: loop.Run) -> None:
    """As `update_early`, but no step is launched before the one before it is finished."""
    update_early(run)
    run.trainer.task.objective.estimates = True
    assert not run.trainer.can_launch_ahead


def launch_of_step_4_fails(run: loop.Run) -> None:
    """Step 4 fails at its launch, before step 3 is finished. Log each update that waits for the copies of a save."""
    update_early(run)
    mock.patch.object(run.checkpointer, "wait_on_stream", lambda: run.journal.log("waits for copies")).start()
    load = run.trainer.task.load_step

    def failing(step: int) -> Any:
        if step == 3:
            raise OSError("the data cannot be read")
        return load(step)

    mock.patch.object(run.trainer.task, "load_step", failing).start()


def stop_in_step_4_early_updates(run: loop.Run) -> None:
    update_early(run)
    stop_in_step_4(run)


def stop_in_step_4(run: loop.Run) -> None:
    """Rank 1 alone receives a stop request while the others train on."""
    step = run.trainer.launch_step

    def asked(**options: Any) -> Any:
        if run.trainer.steps_done == 3 and on_rank(run, run.mesh.world_size - 1):
            options["stop"] = True
        return step(**options)

    run.trainer.launch_step = asked  # type: ignore[method-assign]


def disk_fills_and_empties(run: loop.Run) -> None:
    """Another file fills the disk before step 3, is deleted before step 5, and fills it again before step 7."""
    step = run.trainer.launch_step
    ballast = run.journal.directory.path / "ballast"

    def disturbed(**options: Any) -> Any:
        if run.trainer.steps_done in (2, 6) and on_rank(run, 0):
            run.checkpointer.wait()
            fill(ballast)
        if run.trainer.steps_done == 4 and on_rank(run, 0):
            run.checkpointer.wait()
            ballast.unlink()
        return step(**options)

    run.trainer.launch_step = disturbed  # type: ignore[method-assign]


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file:
        for size in (65536, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC


def planned_validation(run: loop.Run) -> None:
    """The validation loss decreases and increases again."""
    losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5}
    task: Any = run.trainer.task
    task.validate = lambda: Validation(losses[run.trainer.steps_done])


def first_gradients(text: str) -> list[torch.Tensor]:
    """Return the gradients of the first step on this rank, as the optimizer gets them."""
    wanted = load_recipe_text(text, "recipe", trust=True)
    mesh = Mesh.create(wanted.parsed_layout, "cpu")
    from meshwright.data import prepare

    data = prepare(wanted.data, wanted.run.seed)
    trainer = Trainer(LanguageModelTask(wanted, wanted.parsed_layout, resolve_model_config(wanted, data), data, mesh))
    gradients: list[torch.Tensor] = []
    finish = trainer.parallel.finish

    def keep() -> None:
        finish()
        gradients.extend(shard.gradient.clone() for shard in trainer.parallel.shards)

    trainer.parallel.finish = keep  # type: ignore[method-assign]
    trainer.step()
    return gradients


def documents_of_steps(text: str, steps: int) -> tuple[Any, Any]:
    """Return the document starts in the sequences of the first steps: from the prediction, and from the
    micro-batches."""
    wanted = load_recipe_text(text, "recipe", trust=True)
    mesh = Mesh.create(wanted.parsed_layout, "cpu")
    from meshwright.data import prepare

    data = prepare(wanted.data, wanted.run.seed)
    trainer = Trainer(LanguageModelTask(wanted, wanted.parsed_layout, resolve_model_config(wanted, data), data, mesh))
    predicted, found = trainer.task.document_starts(0, steps), []
    for step in range(steps):
        for tokens, _, documents in trainer.task.load_step(step):
            starts_BS = torch.zeros_like(tokens) if documents.starts_BS is None else documents.starts_BS
            found += [tuple(row.unique().tolist()) for row in starts_BS]
    mesh.close()
    return predicted, tuple(found)


def train_and_show(text: str) -> list[TensorSlice]:
    """Train on this rank and return all master weights that it holds."""
    wanted = load_recipe_text(text, "recipe", trust=True)
    torch.set_num_threads(1)
    loop.device_peak_flops = lambda mesh, precision: 1e9
    mesh = Mesh.create(wanted.parsed_layout, "cpu")
    directory = RunDirectory(wanted.run_directory)
    directory.create()
    run = loop.Run(wanted, mesh, directory, show_progress=False)
    run.run()
    mesh.close()
    return [replace(piece, tensor=piece.tensor.clone()) for piece in run.trainer.parallel.master_slices(owned=False)]


def trackers_hang_after_step_3(run: loop.Run) -> None:
    """Trackers receive nothing after step 3, as if the process were killed before that."""
    begin = run.journal.begin

    def begun(*where: Any) -> None:
        begin(*where)
        if run.journal.tracking is not None:
            line = run.journal.tracking.queue_line
            run.journal.tracking.queue_line = lambda entry: line(entry) if entry["step"] <= 3 else None  # type: ignore[method-assign]

    run.journal.begin = begun  # type: ignore[method-assign]


def count_calls_when_a_profile_ends(run: loop.Run) -> None:
    """Log the number of calls in flight when torch's profiler stops; each of them would corrupt memory."""
    before = run.profile.before_step

    def before_step(trainer: Trainer) -> bool:
        watched = before(trainer)
        if run.profile._recording is not None:
            operators = run.profile._recording.operators
            stop = type(operators).stop

            def stopped() -> None:
                run.journal.log(f"in flight at its end: {len(calls_in_flight)}")
                stop(operators)

            operators.stop = stopped
        return watched

    run.profile.before_step = before_step  # type: ignore[method-assign]


def many_more_tokens_in_a_step(run: loop.Run) -> None:
    """Divide the loss as if the step had a million times as many tokens."""
    passes = run.trainer.passes
    train = passes.train
    mock.patch.object(passes, "train", lambda batches, divisor: train(batches, lambda: 2**20 * divisor())).start()


def infinity_on_rank_1_in_step_3(run: loop.Run) -> None:
    """One gradient of rank 1 alone overflows in step 3. Each rank logs the loss scale and its master weights after
    every step."""
    keep_states(run)
    finish = run.trainer.finish_step

    def spoil(parallel: ZeroEngine, number: int) -> None:
        if number == 3 and on_rank(run, 1):
            parallel.shards[0].gradient[1] = torch.inf

    def watched() -> Any:
        verdict = finish()
        sums = [float(shard.master.double().sum()) for shard in run.trainer.parallel.shards]
        run.journal.log(f"scale {run.trainer.loss_scale.value:g}")
        run.journal.log(f"masters {sums}")
        return verdict

    _at_finish(run, spoil)
    run.trainer.finish_step = watched  # type: ignore[method-assign]
