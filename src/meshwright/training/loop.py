"""A training run of one rank: resume, step until done, validate, save, and end cleanly whatever happens."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import Checkpointer
from meshwright.checkpoint.agreement import Agreement
from meshwright.comm.mesh import Mesh
from meshwright.comm.record import sent_between
from meshwright.data import PreparedData, prepare
from meshwright.data.files import canonical_json
from meshwright.data.packing.shards import limit_rate
from meshwright.errors import CheckFailed, Terminated, UserError
from meshwright.launcher.rank_threads import thread_change_note
from meshwright.launcher.stopping import StopRequest
from meshwright.layout import Layout
from meshwright.monitoring.profile import Profile
from meshwright.monitoring.resuming import check_resume
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.probe.communication import choose_precision
from meshwright.recipe import Recipe
from meshwright.spec.config import ModelConfig, config_from_recipe
from meshwright.spec.refuse import refuse
from meshwright.toml import parse_toml
from meshwright.training.journal import Journal
from meshwright.training.reference import FILE as REFERENCE
from meshwright.training.reference import Reference, found_or_made, read_reference, weights_checksum
from meshwright.training.trainer import Trainer, Verdict


def train(recipe: Recipe, mesh: Mesh, run_directory: RunDirectory, *, show_progress: bool = True) -> dict[str, Any]:
    """Run or resume `recipe` on this rank and return the result document; rank 0's is the run's.

    Raises `Terminated` after SIGTERM and a save (`KeyboardInterrupt` where it was an interrupt), `CheckFailed` when too
    many steps in a row were not finite, and `UserError` for mistakes in the recipe and for a last save that failed.
    """
    with deterministic(recipe.train.deterministic, recipe.train.compile):
        return Run(recipe, mesh, run_directory, show_progress).run()


class Run:
    """The state around `Trainer`: checkpoints, the journal, the wish to stop."""

    def __init__(self, recipe: Recipe, mesh: Mesh, run_directory: RunDirectory, show_progress: bool) -> None:
        self._stand_by(recipe, mesh, run_directory, Journal(recipe, mesh, run_directory, show_progress))
        data = prepare(recipe.data, recipe.run.seed, log=self.journal.say)
        config = model_config(recipe, data)
        layout = recipe.parsed_layout
        refuse(layout, config, recipe.train.batch, recipe.data.sequence, mesh.world_size)
        self.checkpointer = Checkpointer(
            run_directory.checkpoints,
            mesh,
            config,
            dtype=recipe.checkpoint.dtype,
            keep=recipe.checkpoint.keep,
            keep_best=recipe.checkpoint.keep_best,
            tokenizer_directory=data.tokenizer_directory,
            background=recipe.checkpoint.background,
            log=self.journal.say,
        )
        self.resumed_from = self._resume(layout, config, data)

    def _stand_by(self, recipe: Recipe, mesh: Mesh, run_directory: RunDirectory, journal: Journal) -> None:
        """What every run has, whatever it trains."""
        self.recipe, self.mesh, self.journal = recipe, mesh, journal
        self.agreement = Agreement(mesh)
        self.stop = StopRequest()
        self.profile = Profile(recipe, mesh, run_directory, lambda line: self.journal.say(line))
        self._resumed_otherwise: list[str] = []

    def run(self) -> dict[str, Any]:
        """Train to the last step, or until told to stop; see `train`. A run that has finished is left as it is."""
        if (finished := self._finished()) is not None:
            return finished
        with self.stop, self.journal:
            self._begin()
            while self.trainer.steps_done < self.recipe.train.steps:
                self._step()
            self._finish_saving()
            result = self.journal.result(self.trainer, self.checkpointer)
            self.journal.keep_result(result)
            return result

    def _step(self) -> None:
        """One training step and what is due after it."""
        train, trainer = self.recipe.train, self.trainer
        if self.profile.before_step(trainer):
            self.journal.memory.stop()
        record = self.mesh.record
        sites, axes, begun = record.sent_by_site(), record.sent_by_axis(), time.perf_counter()
        verdict = trainer.step(stop=self.stop.requested, save_failed=self.checkpointer.failed() is not None)
        seconds = time.perf_counter() - begun
        self.journal.memory.step_done()
        if verdict.finite:
            self.journal.sent_bytes = sent_between(sites, record.sent_by_site())
            self.journal.sent_bytes_by_axis = sent_between(axes, record.sent_by_axis())
        profiled = self.profile.after_step(trainer, ending=verdict.stop)
        done = trainer.steps_done
        every, last = self.recipe.checkpoint.every, done == train.steps
        due = last or (every > 0 and done % every == 0)
        validation = None
        if train.validate_every and (due or done % train.validate_every == 0):  # saved: so that the best is known
            self.journal.memory.stop()
            validation = trainer.validate()
        # Before the save: no step may be without a line.
        self.journal.step(trainer, verdict, seconds, validation, profiled)
        if verdict.save_failed:
            self.journal.save_failed(done, self._give_up_save())
        self._count_skipped(verdict)
        if due or verdict.stop:
            self._save(None if validation is None else validation.loss)
        if verdict.stop and not last:
            self._finish_saving()
            self.journal.stopped(self.trainer, self.checkpointer)
            self._end_early()

    # --- before the first step

    def _finished(self) -> dict[str, Any] | None:
        """The result of the run that is resumed if it has all its steps: measured while it trained, as now it cannot be
        again. Rank 0's answer; an empty one on the others. None where there is something to do, or no such result."""
        if self.resumed_from is None or self.trainer.steps_done < self.recipe.train.steps:
            return None
        result = self.journal.earlier_result(self.trainer, self.checkpointer)
        if not self.agreement.all_true(result is not None or self.mesh.rank != 0):
            return None
        self.journal.nothing_to_do(self.resumed_from, self.trainer.steps_done)
        return result or {}

    def _begin(self) -> None:
        if self.recipe.checkpoint.background:
            with self.journal.memory.aside():
                self.checkpointer.reserve(self.trainer.pieces(owned=True))  # no page faults in the first save
        if self.trainer.preference is not None:
            with self.journal.memory.aside():
                self._know_reference(RunDirectory(self.recipe.run_directory).path / REFERENCE)
        problem = None
        try:
            self.journal.begin(self.trainer, self.resumed_from)
        except UserError as error:
            problem = str(error)
        for line in self._resumed_otherwise:
            self.journal.say(line)
        if (said := self.agreement.first_text(problem)) is not None:
            raise UserError(said[1])

    def _know_reference(self, path: Path) -> None:
        """Bring in how probable the responses were when training began: kept in the run directory, or computed now. All
        ranks raise the same `UserError` where a run that goes on has it no more."""
        trainer = self.trainer
        if trainer.steps_done:
            problem = None
            try:
                trainer.reference = read_reference(path, trainer.pairs_by_row)
                if trainer.reference.sha256 != self._reference_sha256:
                    problem = f"{path} is that of another run"
            except UserError as error:
                problem = str(error)
            if (said := self.agreement.first_text(problem)) is not None:
                raise UserError(
                    f"{said[1]}: it holds the log-probabilities under the weights that training began with, and a run "
                    "of which some steps are done cannot compute them again; put it back, or begin another run with "
                    "another run.name"
                )
            return
        made_of = {
            "data_sha256": trainer.data.sha256,
            "rows": " ".join(tokens.rows_sha256 for tokens in trainer.pair_rows.values()),
            "weights": weights_checksum(trainer.parallel.master_pieces(owned=True), self.mesh),
            "model": hashlib.sha256(canonical_json(dict(trainer.config.to_huggingface()))).hexdigest(),
            "precision": trainer.layout.precision or "fp32",
        }
        begun = time.perf_counter()

        def make() -> Reference:
            say = limit_rate(lambda done: self.journal.say(f"reference: {done:,} of {rows:,} rows"))
            return trainer.make_reference(made_of, say)

        rows = sum(len(pairs) for pairs in trainer.pairs_by_row.values())
        trainer.reference, earlier = found_or_made(
            path, trainer.pairs_by_row, made_of, make, self.agreement, self.mesh.rank == 0
        )
        responses = sum(len(each.values) for each in trainer.reference.splits.values())
        how = "as an earlier start of this run left them" if earlier else f"in {time.perf_counter() - begun:.1f} s"
        self.journal.say(f"reference: log-probabilities of {responses:,} responses, {how}, in {path}")

    def _resolve_precision(self, layout: Layout, previous: str | None) -> Layout:
        """The layout with its precision made explicit: as in the `previous` one before an interruption, else bf16 where
        it is faster."""
        if layout.precision is not None:
            return layout
        if previous is not None:
            return dataclasses.replace(layout, precision=Layout.parse(previous).precision)
        return dataclasses.replace(layout, precision=choose_precision(self.mesh))

    def _resume(self, layout: Layout, config: ModelConfig, data: PreparedData) -> str | None:
        """Make the trainer and load the newest whole checkpoint; its name, or None for a fresh run."""
        state = check_resume(self.recipe, data.sha256)
        while True:
            resolved = self._resolve_precision(layout, state["layout"] if state else None)
            self.journal.memory.start()
            self.trainer = Trainer(self.recipe, resolved, config, data, self.mesh, initialise=False)
            loaded = self.checkpointer.load_newest(self.trainer.pieces(owned=False))
            if loaded is None:
                if self.recipe.model.load_weights:
                    self.trainer.load_weights(Path(self.recipe.model.from_path or ""))
                else:
                    self.trainer.parallel.initialise(self.recipe.run.seed)
                return None
            checkpoint, state = loaded
            if self._resolve_precision(layout, state["layout"]) == resolved:
                break
            # The newest one is damaged inside, and the older one, which counts, has another precision: once more.
            del self.trainer
        self.trainer.restore(state)
        self._reference_sha256 = state.get("reference_sha256")
        self._note_resumed(state)
        return checkpoint.name

    def _note_resumed(self, state: dict[str, Any]) -> None:
        """Keep the lines about what differs from when the checkpoint was made, to be printed by `_begin`."""
        lines = (self._longer_curve(state), thread_change_note(state.get("threads"), self.trainer.threads))
        self._resumed_otherwise = [line for line in lines if line is not None]

    def _longer_curve(self, state: dict[str, Any]) -> str | None:
        """A line for who resumes with another number of steps than the learning rate was planned for."""
        train, step = self.recipe.train, state["step"]
        before = parse_toml(state["recipe"], "the checkpoint's recipe")["train"]["steps"]
        if before == train.steps or train.schedule not in ("cosine", "linear") or step >= train.steps:
            return None
        return (
            f"train.steps was {before} and is {train.steps}: the learning rate follows the {train.schedule} curve of "
            f"{train.steps} steps from step {step + 1} on"
        )

    # --- saving and stopping

    def _count_skipped(self, verdict: Verdict) -> None:
        """All ranks give up together when too many steps in a row were not finite."""
        limit = self.recipe.train.maximum_skipped
        if self.trainer.skipped_in_a_row > limit:
            self._settle()  # an earlier step's save may still be under way
            newest = self.checkpointer.newest()
            count = f"{self.trainer.skipped_in_a_row} steps in a row" if limit else "a step"
            raise CheckFailed(
                f"{count}, the last of them step {self.trainer.steps_done}, had a loss or gradient that is not finite, "
                f"more than train.maximum_skipped = {limit}; the newest whole checkpoint is "
                f"{newest.name if newest else 'none yet'}; a lower train.learning_rate or train.clip usually helps"
            )

    def _save(self, validation_loss: float | None) -> None:
        self.journal.memory.stop()
        step = self.trainer.steps_done
        if (reason := self._settle()) is not None:
            self.journal.save_failed(step, reason)
        self.checkpointer.save(
            step, self.trainer.pieces(owned=True), self.trainer.state(), validation_loss=validation_loss
        )
        self.journal.saving(step, self.checkpointer.stall_seconds)

    def _settle(self) -> str | None:
        """Return when no rank is saving any more: why the save could not be completed, None when it was.

        Ranks ask each other meanwhile: one whose disk is full may have no room even for a word to the others, which
        wait for its part.
        """
        while True:
            busy = self.checkpointer.busy  # asked first: what has ended has said whether it failed
            if not self.agreement.all_true(self.checkpointer.failed() is None):
                return self._give_up_save()
            if self.agreement.all_true(not busy):
                return None
            time.sleep(0.02)

    def _give_up_save(self) -> str:
        """All ranks drop a save that failed on one of them, whose reason this is; older checkpoints stay."""
        said = self.agreement.first_text(self.checkpointer.failed())
        self.checkpointer.abandon()
        return said[1] if said else "the checkpoint could not be written"

    def _finish_saving(self) -> None:
        """Wait for the last save; all ranks fail together when any of them could not write."""
        if (reason := self._settle()) is not None:
            raise UserError(reason)

    def _end_early(self) -> None:
        signal = "an interrupt" if self.stop.interrupted else "SIGTERM"
        line = f"stopped by {signal} after saving step {self.trainer.steps_done}; the same command goes on from there"
        if self.stop.interrupted:
            raise KeyboardInterrupt(line)
        raise Terminated(line)


def model_config(recipe: Recipe, data: PreparedData) -> ModelConfig:
    """The recipe's model; one that does not say where texts begin and end learns it from the tokenizer, and what ends
    its turns from the template that it is trained with."""
    config = config_from_recipe(recipe.model, recipe.data.sequence, data.vocabulary)
    if config.eos_token is None:
        config = dataclasses.replace(config, bos_token=data.tokenizer.start, eos_token=data.tokenizer.end)
    if data.turn_end is not None and data.turn_end not in config.eos_tokens:
        config = dataclasses.replace(config, more_eos_tokens=(*config.more_eos_tokens, data.turn_end))
    return config


def _kernels_by_rule() -> Any:
    from torch._inductor import config  # takes a second to load

    return config.patch(deterministic=True)


@contextmanager
def deterministic(wanted: bool, compiled: bool) -> Iterator[None]:
    """Inside, the same inputs give the same bits on CUDA too, and operations that cannot promise it are refused.

    Where blocks are `compiled`, Inductor chooses kernels without timing them: a restart would time them anew and could
    choose others."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    # cuBLAS reads this when it is first used: with it, several streams cannot change the order of a sum.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    fresh_memory: Any = torch.utils.deterministic
    fresh_memory.fill_uninitialized_memory = False  # for debugging; costs time
    try:
        with _kernels_by_rule() if compiled else nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(before)
