"""Reports a run: lines and a progress bar on the console, `metrics.jsonl`, trackers, and the result document."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from meshwright.checkpoint import Checkpointer
from meshwright.comm.mesh import Mesh
from meshwright.emulation.scheduler import is_emulated_rank
from meshwright.errors import Terminated, UserError, error_reason
from meshwright.layout import Layout
from meshwright.monitoring.comparison import Prediction, StepTimes, collect_measured_memory, format_comparison
from meshwright.monitoring.memory import release_freed_memory
from meshwright.monitoring.metrics import MetricsFile, SlowRankWatch, read_metrics
from meshwright.monitoring.progress import Progress
from meshwright.monitoring.records import RunDescription, RunEnd, StepRecord
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.monitoring.step_memory import StepMemory
from meshwright.monitoring.trackers import FAILED, FINISHED, STOPPED
from meshwright.monitoring.tracking import Tracking
from meshwright.recipe import Recipe
from meshwright.spec.flops import FLOPS_CONVENTION

GIB = 2**30


class Journal:
    """Reporter of one run: writes to the console, to `metrics.jsonl` and to trackers (TensorBoard, MLflow ...). Every
    rank calls the methods in the same order; only rank 0 prints and writes.

    recipe: the run's recipe. mesh: mesh of its ranks. directory: run directory. show_progress: True to print progress
    on the console.
    """

    run: RunDescription
    """Set by `begin`."""

    def __init__(self, recipe: Recipe, mesh: Mesh, directory: RunDirectory, show_progress: bool) -> None:
        """Create the journal of a run; `begin` opens its files and trackers. directory: run directory. show_progress:
        print a line for each logged step."""
        self.recipe, self.mesh, self.directory = recipe, mesh, directory
        self.device = torch.device(mesh.device)
        self.leader = mesh.rank == 0
        self.progress = Progress(recipe.train.steps, show=show_progress and self.leader)
        self.metrics: MetricsFile | None = None
        self.tracking: Tracking | None = None
        self._metrics_problem = ""
        self.sent_bytes: dict[str, int] | None = None  # by this rank in the last step, by call site
        self.sent_bytes_by_axis: dict[str, int] | None = None
        self.memory = StepMemory(self.device)
        self.times = StepTimes()
        self.prediction: Prediction | None = None
        self._watch = SlowRankWatch(mesh.world_size, recipe.train.slow_rank_factor)
        self._slow_rank: int | None = None  # reported at the end of the last window
        self._figures: dict[str, list[float]] = {}  # key of metrics.jsonl -> values of the steps of this process

    @property
    def rate_name(self) -> str:
        """Key of the throughput in metrics.jsonl and in the result document: "tokens_per_second" or
        "samples_per_second"."""
        return f"{self.run.unit}_per_second"

    def log(self, line: str) -> None:
        """Print one line on the console (rank 0 only)."""
        self.progress.print_line(line)

    def begin(
        self,
        run: RunDescription,
        layout: str,
        done: int,
        resumed_from: str | None,
        threads: int | None,
    ) -> None:
        """Report the run before its first step, and open `metrics.jsonl` and the trackers.

        run: description of model and data. layout: notation such as "dp2 zero1 bf16". resumed_from: name of the
        checkpoint from which the run resumes; None: a fresh run. done: number of steps done in this checkpoint; 0 in a
        fresh run. threads: compute threads of each rank; None except on CPUs. `UserError` if the run directory cannot
        be written.
        """
        self.run, recipe = run, self.recipe
        self._figures = {key: [] for key in ("loss", "validation_loss", self.rate_name, *run.metric_names)}
        release_freed_memory()
        kind, count, steps = self.device.type, self.mesh.world_size, recipe.train.steps
        each = "" if threads is None else f" x {threads} thread{'s' * (threads > 1)}"
        self.log(f"model: {run.model}")
        ranks = "emulated ranks" if is_emulated_rank() else f"{kind} process{'es' if count > 1 else ''}"
        self.log(f"layout: {layout} on {count} {ranks}{each}")
        self.log(f"data: {run.data}, {run.units_per_step:,} a step, {steps} steps")
        for line in run.notes:
            self.log(line)
        if resumed_from and done < steps:
            self.log(f"resumed from {resumed_from}: {done} of {steps} steps are done")
        elif resumed_from:
            self.log_already_done(resumed_from, done, layout)
        if self.leader:
            self.directory.write_recipe(_set_threads(recipe, threads).to_toml())
            try:
                self.metrics = MetricsFile(self.directory.metrics, done)
            except OSError as error:
                raise UserError(f"{self.directory.metrics} cannot be written: {error_reason(error)}") from None
            with self.memory.exclude_allocations():
                self.tracking = Tracking(recipe, layout, self.directory, done, self.log)

    def begin_steps(self, done: int, prediction: Prediction) -> None:
        """Report the prediction (on rank 0), and begin to measure memory and progress. done: number of steps already
        done; prediction: predicted time, memory and traffic. Called when all memory that persists between steps is
        allocated."""
        self.prediction = prediction
        if self.leader:
            for line in prediction.format_lines() if done < self.recipe.train.steps else ():
                self.log(line)
            if self.recipe.train.compile and done < self.recipe.train.steps:
                self.log(f"compiling during step {done + 1}, which takes longer than the others (train.compile)")
            if self.recipe.train.tensor_overlap != "off":
                self.log(_describe_product_overlap(self.mesh))
            if self.recipe.train.cuda_graphs and self.device.type == "cpu":
                self.log("train.cuda_graphs changes nothing on a CPU: it is for GPUs")
            self._queue_for_trackers(done + 1, {"predicted": prediction.to_json_dict()})
        self.progress.begin(done)
        self.memory.begin()

    def log_already_done(
        self, checkpoint: str, done: int, layout: Layout | str, state: Mapping[str, Any] | None = None
    ) -> None:
        """Log that the run has no steps left, because its newest checkpoint has at least `train.steps` steps.

        checkpoint: name of the checkpoint. done: number of steps done in the checkpoint. layout: layout that the user
        requested now. state: content of the checkpoint's `state.json`, which names the layout of the run; the logged
        line mentions this layout if it differs from the requested layout. None: not compared."""
        steps = self.recipe.train.steps
        more = f" of train.steps, and {done - steps} more" if done > steps else ""
        earlier = str(layout if state is None else state.get("layout", layout))
        unused = f" (layout {layout} is not used: these steps ran with {earlier})" if earlier != str(layout) else ""
        self.log(f"nothing to do: {checkpoint} has all {steps} steps{more}; increase train.steps to continue{unused}")

    def __enter__(self) -> Journal:
        """Return the journal."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report the run's end to trackers (finished, stopped or failed), restore the terminal, close
        `metrics.jsonl`."""
        if self.tracking is not None:
            stopped = kind is not None and issubclass(kind, (Terminated, KeyboardInterrupt))
            self.tracking.finish(FINISHED if kind is None else STOPPED if stopped else FAILED)
            self.tracking = None
        self.progress.close()
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None

    # --- during the run

    def record_step(self, record: StepRecord) -> None:
        """Report one training step (`record`), applied or skipped: write its line of `metrics.jsonl`, update the
        console, and check for slow ranks."""
        if not self.leader:
            return
        outcome = record.outcome
        if outcome.finite and not record.profiled:
            self.times.add(record.seconds, record.seconds_by_part, record.waiting_seconds)
        done, rate = record.step, self.run.units_per_step / record.seconds
        line: dict[str, Any] = {
            "step": done,
            "loss": outcome.loss,
            "gradient_norm": outcome.gradient_norm,
            "learning_rate": record.learning_rate,
            self.rate_name: rate,
            **({} if (mfu := self._compute_mfu(rate)) is None else {"mfu": mfu}),
            "memory_gib": self.memory.read_peak() / GIB,
            "seconds": record.seconds,
            "seconds_by_part": record.seconds_by_part,
        }
        if record.profiled:
            line["profiled"] = True
        if record.next_loss_scale is not None:
            line["loss_scale"] = outcome.loss_scale
        if not outcome.finite:
            line |= {"skipped": True, "skipped_steps": record.skipped_steps}
            self._log_skipped(record)
        line |= outcome.metrics.values
        if (validation := record.validation) is not None:
            line |= validation.to_json_dict()
            self.log(f"step {done}: validation loss {validation.loss:.4f}{validation.metrics.text}")
        self._store_values(line, record)
        notable = validation is not None or not outcome.finite or done == self.recipe.train.steps
        if notable or done % self.recipe.train.log_every == 0:
            self._write_line(line)
        if not record.profiled:
            self._watch_ranks(done, outcome.rank_seconds)
        self.progress.step(done, self._format_figures(record, rate))

    def _log_skipped(self, record: StepRecord) -> None:
        """Log that the step of `record` was skipped on all ranks because its loss or gradient norm was not finite."""
        outcome, after = record.outcome, record.next_loss_scale
        lower = "" if after in (None, outcome.loss_scale) else f"; the loss scale is now {after:g}"
        reason = f"loss {outcome.loss}, gradient norm {outcome.gradient_norm}{lower}"
        self.log(f"step {record.step} skipped on all ranks: {reason}")

    def _store_values(self, line: dict[str, Any], record: StepRecord) -> None:
        """Store a step's values for the result document. Loss and metrics of a skipped step, and the throughput of a
        profiled step, are left out. line: the step's line of `metrics.jsonl`. record: results and times of the step."""
        left_out = {
            *(() if record.outcome.finite else ("loss", *record.outcome.metrics.values)),
            *((self.rate_name,) if record.profiled else ()),
        }
        for key, values in self._figures.items():
            if key in line and key not in left_out:
                values.append(line[key])

    def record_save_stall(self, step: int, stall_seconds: float) -> None:
        """Write the event `save` to `metrics.jsonl`, called when the save's stall is known. step: step of the
        checkpoint; stall_seconds: time for which the save has held training up."""
        self._write_line({"event": "save", "step": step, "stall_seconds": stall_seconds})

    def record_save_failure(self, step: int, reason: str) -> None:
        """Write and log the event that the checkpoint save of step `step` failed; training continues. reason: error
        text."""
        self._write_line({"event": "save_failed", "step": step, "reason": reason})
        self.log(f"{reason}; training continues, and the next save tries again")

    def _compute_mfu(self, rate: float) -> float | None:
        """Return the model FLOP utilisation of all devices together, as a fraction of their dense peak; None if FLOPs
        or peak are unknown. rate: tokens or samples per second of all ranks."""
        if self.run.flops_per_unit is None or self.run.peak_flops is None:
            return None
        return rate * self.run.flops_per_unit / (self.run.peak_flops * self.mesh.world_size)

    def _format_figures(self, record: StepRecord, rate: float) -> list[str]:
        """Format a step's values as texts for the console, the most important first. record: results and times of the
        step. rate: tokens or samples per second of all ranks."""
        mfu = self._compute_mfu(rate)
        return [
            f"loss {record.outcome.loss:.3f}{record.outcome.metrics.text}",
            f"{rate:,.0f} {self.run.unit}/s",
            f"lr {record.learning_rate:.2e}",
            f"grad norm {record.outcome.gradient_norm:.3g}",
            *(() if mfu is None else (f"MFU {mfu:.1%}",)),
        ]

    def _watch_ranks(self, done: int, rank_seconds: Sequence[float]) -> None:
        """Check for a slow rank at the end of each window of consecutive steps. A rank whose own work took much longer
        than the work of the other ranks is logged, unless it was logged for the previous window. done: number of steps
        done; rank_seconds: seconds of each rank's own work in this step, without waiting."""
        slow = self._watch.add(rank_seconds)
        if slow is None:
            self._slow_rank = None if self._watch.between_windows else self._slow_rank
            return
        rank, ratio = slow
        self._write_line({"event": "slow_rank", "step": done, "rank": rank, "ratio_to_median": ratio})
        if rank != self._slow_rank:  # logged once, not again for every window
            others = f"rank {1 - rank}'s" if self.mesh.world_size == 2 else "the median of the others'"
            steps = f"steps {done - self._watch.window + 1} to {done}"
            self.log(f"rank {rank} is slow: in {steps} its own work took {ratio:.1f} times as long as {others}")
        self._slow_rank = rank

    def _write_line(self, line: dict[str, Any]) -> None:
        """Write one line to `metrics.jsonl` and queue it for the trackers. The first failure to write is logged."""
        if self.metrics is None:
            return
        if self.tracking is not None:
            self.tracking.queue_line(line)
        problem = self.metrics.write(line) or ""
        if problem and not self._metrics_problem:
            self.log(f"{self.directory.metrics} cannot be written ({problem}); its lines are kept and written later")
        self._metrics_problem = problem

    def _queue_for_trackers(self, step: int, values: dict[str, Any]) -> None:
        """Queue values that are not in `metrics.jsonl`, such as the prediction, for the trackers. step: step to which
        they belong; values: nested dicts."""
        if self.tracking is not None:
            self.tracking.queue_values(step, values)

    # --- at the end

    def record_stop(self, step: int, checkpointer: Checkpointer) -> None:
        """Send the paths of the newest and best checkpoint to the trackers, as values of step `step`. checkpointer:
        knows these paths. Called after the last save of a run that is stopped by SIGTERM or an interrupt."""
        self._queue_for_trackers(step, _get_checkpoint_paths(checkpointer))

    def make_result(self, end: RunEnd, checkpointer: Checkpointer, fullest: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result document (JSON dict) of the run: outcome, predicted and measured values, checkpoint paths.

        end: final step, bytes of model states and predicted traffic. checkpointer: knows the newest and best
        checkpoint. fullest: "rank" and "memory_bytes" (measured peaks of allocator and process) of the rank with the
        largest peak. If this process had no steps left, the outcome is read from `metrics.jsonl`.
        """
        predicted = {} if self.prediction is None else self.prediction.to_json_dict()
        measured = {
            "memory_bytes": collect_measured_memory(end.state_bytes, self.memory, predicted),
            "fullest_rank": dict(fullest),
            **self.times.to_json_dict(self.device),
            "sent_bytes_by_axis": self.sent_bytes_by_axis,
        }
        if (line := format_comparison(predicted, measured)) is not None and self._figures[self.rate_name]:
            self.log(line)
        flops = self.run.flops_per_unit
        return (
            self._collect_outcome(end)
            | {
                "layout": end.layout,
                "parameters": self.run.parameters,
                "predicted": {
                    "state_bytes": end.predicted_state_bytes,
                    "sent_bytes_per_step": end.predicted_sent_bytes,
                    **({} if flops is None else {"flops_per_token": flops}),
                    **predicted,
                },
                "measured": {
                    "state_bytes": end.state_bytes,
                    "sent_bytes_per_step": self.sent_bytes,
                    "peak_memory_bytes": self.memory.read_peak(),
                    **measured,
                },
            }
            | _get_checkpoint_paths(checkpointer)
        )

    def _collect_outcome(self, end: RunEnd) -> dict[str, Any]:
        """Return the entries of the result document on the run's outcome: step, skipped steps, last loss and metrics,
        median throughput, MFU. end: final step and number of skipped steps."""
        figures = self._figures if self._figures[self.rate_name] else self._read_earlier_figures()
        rates = figures[self.rate_name]
        rate = statistics.median(rates) if rates else None
        utilisation: dict[str, Any] = {}
        if self.run.flops_per_unit is not None:
            utilisation = {
                "mfu": None if rate is None else self._compute_mfu(rate),
                "flops_convention": FLOPS_CONVENTION,
                "peak_flops_per_device": self.run.peak_flops,
            }
        return {
            "step": end.step,
            **{key: values[-1] if values else None for key, values in figures.items() if values is not rates},
            "skipped_steps": end.skipped_steps,
            self.rate_name: rate,
            **utilisation,
        }

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the result document to the run directory and send it to the trackers; log a failure to write."""
        tracked = ("predicted", "measured", "checkpoint", "best_checkpoint")
        self._queue_for_trackers(result["step"], {key: result[key] for key in tracked})
        if self.leader:
            try:
                self.directory.write_result(result)
            except UserError as error:
                self.log(str(error))

    def read_earlier_result(self, step: int, checkpointer: Checkpointer) -> dict[str, Any] | None:
        """Read the result document that an earlier start of the run stored, and replace its checkpoint paths by the
        current paths; return the document. Return None on all ranks but 0, and also if there is no such document or if
        it belongs to another number of steps. step: number of steps that the run has done. checkpointer: knows the
        newest and best checkpoint."""
        result = self.directory.read_result() if self.leader else None
        if result is None or result.get("step") != step:
            return None
        return result | _get_checkpoint_paths(checkpointer)

    def _read_earlier_figures(self) -> dict[str, list[float]]:
        """Read loss, metrics and throughput of all steps from `metrics.jsonl` on rank 0; return key -> list of values,
        with empty lists on other ranks."""
        figures: dict[str, list[float]] = {key: [] for key in self._figures}
        if self.leader:
            for line in read_metrics(self.directory.metrics):
                for key, values in figures.items():
                    if line.get(key) is not None:
                        values.append(line[key])
        return figures


def _set_threads(recipe: Recipe, threads: int | None) -> Recipe:
    """Return the recipe with `run.threads` set to `threads`, the chosen number; None: the recipe unchanged."""
    run = recipe.run.model_copy(update={"threads": threads or recipe.run.threads})
    return recipe.model_copy(update={"run": run})


def _get_checkpoint_paths(checkpointer: Checkpointer) -> dict[str, str | None]:
    """Return {"checkpoint": path of the newest checkpoint, "best_checkpoint": path of the checkpoint with the lowest
    validation loss}, both known to `checkpointer`; None for a missing checkpoint."""
    newest, best = checkpointer.find_newest(), checkpointer.find_best()
    return {"checkpoint": str(newest.path) if newest else None, "best_checkpoint": str(best.path) if best else None}


def _describe_product_overlap(mesh: Mesh) -> str:
    """Return a line that says how tensor-parallel products overlap with their collective calls on this mesh."""
    if mesh.tp.trivial:
        return f'train.tensor_overlap changes nothing in layout "{mesh.layout}": it needs tp'
    means = {"off": "not at all on a CPU", "chunks": "in chunks", "symmetric": "by symmetric memory"}
    return f"products of tensor parallelism overlap {means[mesh.communicator.product_overlap]}"
