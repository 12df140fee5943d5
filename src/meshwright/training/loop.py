"""A training run on one rank: resume, train to the last step, validate, save, and stop cleanly on signals and
errors."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.checkpoint import Checkpointer, CheckpointPath, SaveOptions
from meshwright.checkpoint.agreed_saves import abandon_save, wait_for_save
from meshwright.checkpoint.agreement import Agreement
from meshwright.comm.mesh import Mesh
from meshwright.comm.record import count_sent_between
from meshwright.data import PreparedData, prepare
from meshwright.errors import CheckFailed, RankLost, Terminated, UserError
from meshwright.launcher.rank_threads import format_thread_change
from meshwright.launcher.stopping import StopRequest
from meshwright.layout import Layout
from meshwright.monitoring.clock import Marks
from meshwright.monitoring.comparison import Prediction
from meshwright.monitoring.journal import Journal
from meshwright.monitoring.profile import Profile
from meshwright.monitoring.records import RunEnd, StepOutcome, StepRecord, Validation
from meshwright.monitoring.resuming import check_resume, format_schedule_change
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.probe.communication import choose_precision
from meshwright.recipe import Recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.refuse import refuse
from meshwright.training.deterministic import deterministic
from meshwright.training.device_peak import device_peak_flops
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.learning_rate import learning_rate
from meshwright.training.model_config import resolve_model_config
from meshwright.training.prediction import predict
from meshwright.training.task import RunStart
from meshwright.training.trainer import Trainer


def train(recipe: Recipe, mesh: Mesh, run_directory: RunDirectory, *, show_progress: bool = True) -> dict[str, Any]:
    """Run or resume the recipe's training on this rank and return the result document: a JSON dict of step, loss,
    predicted and measured figures, complete only on rank 0.

    mesh: device mesh of this rank. run_directory: directory for metrics and checkpoints, already locked. show_progress:
    print a line for each logged step. Raises `Terminated` after SIGTERM and `KeyboardInterrupt` after an interrupt,
    once a checkpoint is saved; `CheckFailed` when too many steps in a row were not finite; `UserError` for mistakes in
    the recipe and for a last save that failed."""
    with deterministic(recipe.train.deterministic, recipe.train.compile):
        return Run(recipe, mesh, run_directory, show_progress).run()


def make_save_options(recipe: Recipe, tokenizer_directory: Path | None = None) -> SaveOptions:
    """Return the recipe's checkpoint settings. tokenizer_directory: directory whose files are copied into each
    checkpoint; None: no files are copied."""
    settings = recipe.checkpoint
    return SaveOptions(settings.dtype, settings.keep, settings.keep_best, settings.background, tokenizer_directory)


class _LaunchedStep(NamedTuple):
    """Training step that a device may still compute.

    number: number of the step, from 1. begun: time of `time.perf_counter` before its launch. sent: bytes that this rank
    sent in the step, by call site and by mesh axis. marks: ends of its phases. profiled: True if the profiler recorded
    the step, which makes it slower."""

    number: int
    begun: float
    sent: tuple[dict[str, int], dict[str, int]]
    marks: Marks
    profiled: bool


class Run:
    """Training run on one rank: trains to the last step and writes checkpoints, metrics and console output. After
    SIGTERM or an interrupt it saves a checkpoint and stops.

    recipe: settings of the run. mesh: device mesh of this rank. run_directory: directory of the run's files, already
    locked. show_progress: print a line for each logged step."""

    def __init__(self, recipe: Recipe, mesh: Mesh, run_directory: RunDirectory, show_progress: bool) -> None:
        """Prepare data and model, and load the newest checkpoint if there is one. show_progress: print a line for each
        logged step. Collective."""
        self._set_up(recipe, mesh, run_directory, show_progress)
        data = prepare(recipe.data, recipe.run.seed, log=self.journal.log)
        config = resolve_model_config(recipe, data)
        layout = recipe.parsed_layout
        refuse(layout, config, recipe.train.batch, recipe.data.sequence, mesh.world_size)
        options = make_save_options(recipe, data.tokenizer_directory)
        self.checkpointer = Checkpointer(run_directory.checkpoints, mesh, config, options, self.journal.log)
        self.resumed_from = self._resume(layout, config, data)

    def _set_up(self, recipe: Recipe, mesh: Mesh, run_directory: RunDirectory, show_progress: bool) -> None:
        """Create the attributes that runs of language models and of user modules share: the journal (console output and
        metrics file), the object by which ranks exchange flags, the handlers of SIGTERM and interrupts, and the
        profiler.

        recipe, mesh, run_directory, show_progress: arguments of the constructor."""
        self.recipe = recipe
        self.mesh = mesh
        self.journal = Journal(recipe, mesh, run_directory, show_progress)
        self.agreement = Agreement(mesh)
        self.stop = StopRequest()
        self.profile = Profile(recipe, mesh, run_directory, lambda line: self.journal.log(line))
        self.saved_state: dict[str, Any] | None = None
        """`state.json` of the checkpoint from which the run resumes."""
        self._resume_notes: list[str] = []
        self._unfinished: deque[_LaunchedStep] = deque()
        """Steps whose outcomes are still to be read, oldest first; between two steps at most one."""
        self._finished_at = 0.0

    def run(self) -> dict[str, Any]:
        """Train to the last step, or until SIGTERM or an interrupt, and return the result document (JSON dict of
        figures and checkpoint paths). If the run already has all its steps, return its stored result document."""
        with self.checkpointer:
            if (finished := self._find_finished_result()) is not None:
                return finished
            with self.stop, self.journal:
                self._prepare_first_step()
                while self.trainer.steps_done < self.recipe.train.steps:
                    self._step()
                self._finish_saving()
                result = self._make_result()
                self.journal.write_result(result)
                return result

    def _step(self) -> None:
        """Run one training step, then validation, logging and a checkpoint if they are due. If nothing but a log line
        is due, a step on a GPU is finished only after the next one is launched, so that the GPU does not wait for the
        host between steps."""
        train = self.recipe.train
        trainer = self.trainer
        profiled = self.profile.before_step(trainer)
        if profiled:
            self.journal.memory.stop()
        record = self.mesh.record
        sites, axes = record.sent_by_site(), record.sent_by_axis()
        begun = time.perf_counter()
        try:
            trainer.launch_step(stop=self.stop.requested, save_failed=self.checkpointer.failed() is not None)
        except RankLost:
            raise  # an earlier step may wait for that rank
        except Exception:
            with suppress(Exception):  # the failure of the launch is to be reported
                for step in self._unfinished:
                    self._finish_step(step)
            raise
        self.journal.memory.step_done()
        sent = count_sent_between(sites, record.sent_by_site()), count_sent_between(axes, record.sent_by_axis())
        done = trainer.steps_done
        self._unfinished.append(_LaunchedStep(done, begun, sent, trainer.clock.marks, profiled))
        last = done == train.steps
        due = last or done % (self.recipe.checkpoint.every or train.steps) == 0
        # Every checkpoint needs its validation loss.
        validates = train.validate_every > 0 and (due or done % train.validate_every == 0)
        at_once = due or validates or profiled or done + 1 == self.profile.first  # a recording begins on an idle device
        stop = save_failed = False
        while len(self._unfinished) > (trainer.can_launch_ahead and not (at_once or stop or save_failed)):
            step = self._unfinished.popleft()
            outcome, validation = self._finish_step(step, validates and step.number == done)
            self._check_skipped_steps(step.number)
            stop, save_failed = stop or outcome.stop, save_failed or outcome.save_failed
        if self._unfinished:
            return
        if save_failed:
            self.journal.record_save_failure(done, abandon_save(self.checkpointer, self.agreement))
        if due or stop:
            self._save(None if validation is None else validation.loss)
        if stop and not last:
            self._finish_saving()
            self.journal.record_stop(done, self.checkpointer)
            self._raise_stopped()

    def _finish_step(self, step: _LaunchedStep, validates: bool = False) -> tuple[StepOutcome, Validation | None]:
        """Wait for the outcome of a launched step, validate if `validates`, and log the step. Return the outcome, and
        the result of the validation (None without one). Collective."""
        trainer = self.trainer
        outcome = trainer.finish_step()
        finished = time.perf_counter()
        seconds = finished - max(step.begun, self._finished_at)
        self._finished_at = finished
        if outcome.finite:
            self.journal.sent_bytes, self.journal.sent_bytes_by_axis = step.sent
        if step.profiled:
            self.profile.after_step(trainer, ending=outcome.stop)
        validation = None
        if validates:
            self.journal.memory.stop()
            validation = trainer.task.validate()
        # Before the save, so that every step is recorded.
        if self.journal.leader:
            record = StepRecord(
                step=step.number,
                outcome=outcome,
                learning_rate=learning_rate(step.number - 1, self.recipe.train),
                skipped_steps=trainer.skipped,
                validation=validation,
                seconds=seconds,
                seconds_by_part=trainer.clock.seconds(step.marks),
                waiting_seconds=trainer.clock.compute_waiting_seconds(step.marks),
                next_loss_scale=trainer.loss_scale.value if trainer.loss_scale.dynamic else None,
                profiled=step.profiled,
            )
            self.journal.record_step(record)
        return outcome, validation

    def _make_result(self) -> dict[str, Any]:
        """Build the result document (JSON dict of figures and checkpoint paths) after the last step of the run. It
        reports the memory of the rank with the largest peak. Collective."""
        memory = self.journal.memory
        fullest = self.agreement.broadcast_from_largest(memory.read_peak(), {"memory_bytes": memory.peaks_to_json()})
        trainer = self.trainer
        end = RunEnd(
            step=trainer.steps_done,
            skipped_steps=trainer.skipped,
            layout=str(trainer.layout),
            state_bytes=trainer.memory(),
            predicted_state_bytes=trainer.predicted_bytes(),
            predicted_sent_bytes=trainer.task.predicted_traffic(),
        )
        return self.journal.make_result(end, self.checkpointer, fullest)

    def _predict(self) -> Prediction:
        """Return the predictions of memory, step time and traffic, which are reported before the first step. Every rank
        predicts its memory; the result also has the prediction of the rank that needs the most memory. Collective."""
        found = predict(self.trainer, self.journal.memory)
        fullest = self.agreement.broadcast_from_largest(found.peak_bytes, found.memory_to_json())
        return dataclasses.replace(found, fullest=fullest)

    # --- before the first step

    def _find_finished_result(self) -> dict[str, Any] | None:
        """Return the stored result document if the resumed run already has all its steps (an empty dict on ranks other
        than 0); None if steps remain or no result is stored. Collective."""
        if self.resumed_from is None or self.trainer.steps_done < self.recipe.train.steps:
            return None
        result = self.journal.read_earlier_result(self.trainer.steps_done, self.checkpointer)
        if not self.agreement.all_true(result is not None or self.mesh.rank != 0):
            return None
        trainer = self.trainer
        self.journal.log_already_done(self.resumed_from, trainer.steps_done, trainer.layout, self.saved_state)
        return result or {}

    def _prepare_first_step(self) -> None:
        """Prepare the task's inputs before the first step and report the start of the run. If this fails on one rank,
        all ranks raise that rank's `UserError`. Collective."""
        directory = RunDirectory(self.recipe.run_directory).path
        with self.journal.memory.exclude_allocations():
            if self.recipe.checkpoint.background:
                self.checkpointer.reserve(self.trainer.slices(owned=True))  # no page faults in the first save
            self.trainer.task.prepare(RunStart(directory, self.agreement, self.saved_state, self.journal.log))
        self.trainer.before_update = self.checkpointer.wait_on_stream
        self.checkpointer.on_stall = self.journal.record_save_stall
        problem = None
        try:
            layout = self.trainer.layout
            description = self.trainer.task.describe()
            if description.flops_per_unit is not None:
                peak = device_peak_flops(self.mesh, layout.precision or "fp32")
                description = dataclasses.replace(description, peak_flops=peak)
            progress = self.trainer.steps_done, self.resumed_from, self.trainer.threads
            self.journal.begin(description, str(layout), *progress)
        except UserError as error:
            problem = str(error)
        self.agreement.raise_first(problem)
        self.journal.begin_steps(self.trainer.steps_done, self._predict())
        for line in self._resume_notes:
            self.journal.log(line)

    def _resolve_precision(self, layout: Layout, previous: str | None) -> Layout:
        """Return `layout` with an explicit precision: the layout's own if it names one; else the precision of
        `previous`, the layout text in the checkpoint (None: no checkpoint); else the faster of bf16 and fp32 on this
        device."""
        earlier = None if previous is None else Layout.parse(previous).precision
        return dataclasses.replace(layout, precision=layout.precision or earlier or choose_precision(self.mesh))

    def _resume(self, layout: Layout, config: ModelConfig, data: PreparedData) -> str | None:
        """Create the trainer and load the newest complete checkpoint into it; return the checkpoint's name, None if the
        run starts afresh.

        layout, config, data: layout, model configuration and tokenized data of the run. Collective."""
        state = check_resume(self.recipe, data.sha256)
        while True:
            resolved = self._resolve_precision(layout, state["layout"] if state else None)
            self.journal.memory.start()
            task = LanguageModelTask(self.recipe, resolved, config, data, self.mesh, initialise=False)
            self.trainer = Trainer(task)
            base = self.recipe.base_directory
            if base is not None and config.adapter is not None:  # checkpoints hold the adapter alone
                task.load_weights(Path(base), resumes=state is not None)
            loaded = self.checkpointer.load_newest(self.trainer.slices(owned=False))
            if loaded is None:
                if base is not None and config.adapter is None:
                    task.load_weights(Path(base))
                elif base is None:
                    task.parallel.initialise(self.recipe.run.seed)
                return None
            checkpoint, state = loaded
            if self._resolve_precision(layout, state["layout"]) == resolved:
                break
            # The newest checkpoint is damaged and the older one has another precision: build the model again.
            del task, self.trainer
        return self._restore(checkpoint, state)

    def _restore(self, checkpoint: CheckpointPath, state: dict[str, Any]) -> str:
        """Restore the trainer's counters from `state`, the content of the checkpoint's `state.json`, and return the
        checkpoint's name. Differences between run and checkpoint (learning-rate schedule, threads) become log lines,
        which are printed before the first step."""
        self.trainer.restore(state)
        self.saved_state = state
        threads = format_thread_change(state.get("threads"), self.trainer.threads)
        notes = format_schedule_change(state, self.recipe.train), threads
        self._resume_notes = [line for line in notes if line is not None]
        return checkpoint.name

    # --- saving and stopping

    def _check_skipped_steps(self, step: int) -> None:
        """Raise `CheckFailed` on all ranks if more than `train.maximum_skipped` steps in a row, or all steps of the
        run, were skipped because the loss or gradient norm was not finite. In a row, a step does not count if its loss
        was finite and a dynamic loss scale was halved because its gradients overflowed. step: number of the step that
        was finished last."""
        trainer, limit = self.trainer, self.recipe.train.maximum_skipped
        if (untrained := trainer.skipped == self.recipe.train.steps) or trainer.skipped_in_a_row > limit:
            wait_for_save(self.checkpointer, self.agreement)  # an earlier save may still be in progress
            newest = self.checkpointer.find_newest()
            count = "every step" if untrained else f"{trainer.skipped_in_a_row} steps in a row" if limit else "a step"
            raise CheckFailed(
                f"{count}, the last of them step {step}, had a loss or gradient that is not finite "
                f"(train.maximum_skipped = {limit}); the newest intact checkpoint is "
                f"{newest.name if newest else 'none yet'}; a lower train.learning_rate or train.clip usually helps"
            )

    def _save(self, validation_loss: float | None) -> None:
        """Wait for the previous save, then start to save a checkpoint of this step. validation_loss: mean loss after
        this step (None: not measured), by which the best checkpoint is chosen and retained."""
        self.journal.memory.stop()
        step = self.trainer.steps_done
        if (reason := wait_for_save(self.checkpointer, self.agreement)) is not None:
            self.journal.record_save_failure(step, reason)
        state = self.trainer.state()
        self.checkpointer.save(step, self.trainer.slices(owned=True), state, validation_loss=validation_loss)

    def _finish_saving(self) -> None:
        """Wait for the last save. If it failed on any rank, every rank raises `UserError`. Collective."""
        if (reason := wait_for_save(self.checkpointer, self.agreement)) is not None:
            raise UserError(reason)

    def _raise_stopped(self) -> None:
        """Raise `KeyboardInterrupt` after an interrupt, else `Terminated` (SIGTERM); the checkpoint is already
        saved."""
        signal = "an interrupt" if self.stop.interrupted else "SIGTERM"
        line = f"stopped by {signal} after saving step {self.trainer.steps_done}; the same command resumes the run"
        raise (KeyboardInterrupt if self.stop.interrupted else Terminated)(line)
