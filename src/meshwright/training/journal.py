"""Tells how a run goes: lines and a bar for who watches, `metrics.jsonl` for who comes later, the result at the end."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch

from meshwright.checkpoint import Checkpointer
from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.errors import Terminated, UserError
from meshwright.model.preference import REWARDS, Rewards, preference_of
from meshwright.monitoring.memory import release_freed_memory
from meshwright.monitoring.metrics import MetricsFile, SlowRankWatch, read_metrics
from meshwright.monitoring.progress import Progress
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.monitoring.step_memory import StepMemory
from meshwright.monitoring.trackers import FAILED, FINISHED, STOPPED
from meshwright.monitoring.tracking import Tracking
from meshwright.planner.devices import peak_flops
from meshwright.planner.flops import FLOPS_CONVENTION, training_flops_per_token
from meshwright.probe.matmul import measure_matmul_rate
from meshwright.recipe import Recipe
from meshwright.training.learning_rate import learning_rate
from meshwright.training.prediction import Prediction, StepTimes, compared, measured_memory, predict
from meshwright.training.trainer import PARAMETER_DTYPES, Trainer, Validation, Verdict

GIB = 2**30


class Journal:
    """What is told about one run. Every rank has one and calls it alike; only rank 0's is heard and writes."""

    rate_name = "tokens_per_second"

    def __init__(self, recipe: Recipe, mesh: Mesh, directory: RunDirectory, show_progress: bool) -> None:
        self.recipe, self.mesh, self.directory = recipe, mesh, directory
        self.device = torch.device(mesh.device)
        self.leader = mesh.rank == 0
        self.progress = Progress(recipe.train.steps, show=show_progress and self.leader)
        self.metrics: MetricsFile | None = None
        self.tracking: Tracking | None = None
        self._metrics_trouble = ""
        self.sent_bytes: dict[str, int] | None = None  # of this rank in the last step, by call site
        self.sent_bytes_by_axis: dict[str, int] | None = None
        self.memory = StepMemory(self.device)
        self.times = StepTimes()
        self.prediction: Prediction | None = None  # of rank 0
        self._watch = SlowRankWatch(mesh.world_size, recipe.train.slow_rank_factor)
        self._slow_rank: int | None = None  # named at the end of the last window
        self._figures: dict[str, list[float]] = {"loss": [], "validation_loss": [], self.rate_name: []}
        if preference_of(recipe) is not None:
            self._figures |= {prefix + name: [] for prefix in ("", "validation_") for name in REWARDS}

    def say(self, line: str) -> None:
        """One line for who watches."""
        self.progress.line(line)

    def begin(self, trainer: Trainer, resumed_from: str | None) -> None:
        """The steps are about to begin: say and write what with. `UserError` when the run directory takes nothing."""
        recipe, layout = self.recipe, trainer.layout
        self._measure_peak(trainer)
        release_freed_memory()
        model, data = self._introduction(trainer)
        kind, count = self.device.type, self.mesh.world_size
        threads = f" x {torch.get_num_threads()} threads" if kind == "cpu" else ""
        self.say(f"model: {model}")
        self.say(f"layout: {layout} on {count} {kind} process{'es' if count > 1 else ''}{threads}")
        self.say(f"data: {data}, {self._work_per_step():,} a step, {recipe.train.steps} steps")
        for line in self._packed(trainer):
            self.say(line)
        done, steps = trainer.steps_done, recipe.train.steps
        if resumed_from and done < steps:
            self.say(f"resumed from {resumed_from}: {done} of {steps} steps are done")
        elif resumed_from:
            self.nothing_to_do(resumed_from, done)
        if self.leader:
            self.directory.write_recipe(_as_run(recipe, trainer).to_toml())
            try:
                self.metrics = MetricsFile(self.directory.metrics, done)
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise UserError(f"{self.directory.metrics} cannot be written: {reason}") from None
            with self.memory.aside():
                self.tracking = Tracking(recipe, str(layout), self.directory, done, self.say)
        if self.leader:
            self.prediction = self._predict(trainer)
            for line in self.prediction.lines() if done < steps else ():
                self.say(line)
            self._track(done + 1, {"predicted": self.prediction.document()})
        self.progress.begin(done)
        self.memory.begin()

    def _measure_peak(self, trainer: Trainer) -> None:
        """Find what the share of the peak is a share of."""
        self.flops_per_token = training_flops_per_token(trainer.config, self.recipe.data.sequence)
        self.peak = device_peak_flops(self.mesh, trainer.layout.precision or "fp32")

    def _introduction(self, trainer: Trainer) -> tuple[str, str]:
        """The model and the data, in a few words each."""
        config = trainer.config
        return (
            f"{config.family}, {trainer.table.numel / 1e6:.2f} M parameters, {config.layers} layers, "
            f"hidden {config.hidden}, vocabulary {config.vocabulary}",
            f"{trainer.tokens.tokens:,} training tokens",
        )

    def _packed(self, trainer: Trainer) -> Iterable[str]:
        """Of examples in rows, what was cut or left out."""
        return trainer.data.format_packing_lines()

    def _predict(self, trainer: Trainer) -> Prediction:
        return predict(trainer, self.memory)

    def nothing_to_do(self, checkpoint: str, done: int) -> None:
        """Say that `checkpoint` has the `done` steps that the recipe wants, or more."""
        steps = self.recipe.train.steps
        more = f" of train.steps, and {done - steps} more" if done > steps else ""
        self.say(f"nothing to do: {checkpoint} has all {steps} steps{more}; raise train.steps to train on")

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell trackers how the run ended, leave the terminal as it was, close the file."""
        if self.tracking is not None:
            stopped = kind is not None and issubclass(kind, (Terminated, KeyboardInterrupt))
            self.tracking.finish(FINISHED if kind is None else STOPPED if stopped else FAILED)
            self.tracking = None
        self.progress.close()
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None

    # --- while it runs

    def step(
        self,
        trainer: Trainer,
        verdict: Verdict,
        seconds: float,
        validation: Validation | None,
        profiled: bool = False,
    ) -> None:
        """A step is done, skipped or not; `seconds` is what it took, without validation. profiled: it took longer."""
        if not self.leader:
            return
        scale, parts = trainer.loss_scale, trainer.clock.seconds()
        if verdict.finite and not profiled:
            self.times.add(seconds, parts, trainer.clock.waiting_seconds())
        done, rate = trainer.steps_done, self._work_per_step() / seconds
        line: dict[str, Any] = {
            "step": done,
            "loss": verdict.loss,
            "gradient_norm": verdict.gradient_norm,
            "learning_rate": learning_rate(done - 1, self.recipe.train),
            self.rate_name: rate,
            **self._share_of_peak(rate),
            "memory_gib": self.memory.peak_bytes() / GIB,
            "seconds": seconds,
            "seconds_by_part": parts,
        }
        if profiled:
            line["profiled"] = True
        if scale.dynamic:
            line["loss_scale"] = verdict.loss_scale
        if not verdict.finite:
            line |= {"skipped": True, "skipped_steps": trainer.skipped}
            lower = f"; the loss is scaled by {scale.value:g} from now on" if scale.value != verdict.loss_scale else ""
            said = f"loss {verdict.loss}, gradient norm {verdict.gradient_norm}{lower}"
            self.say(f"step {done} skipped on all ranks: {said}")
        if verdict.rewards is not None:
            line |= verdict.rewards.document()
        if validation is not None:
            line |= (found := validation.document())
            others = "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in validation.measures.items())
            said = f"step {done}: validation loss {found['validation_loss']:.4f}{others}"
            self.say(said + ("" if validation.rewards is None else _in_words(validation.rewards)))
        left_out = {*(() if verdict.finite else ("loss", *REWARDS)), *((self.rate_name,) if profiled else ())}
        for key, values in self._figures.items():
            if key in line and key not in left_out:
                values.append(line[key])
        notable = validation is not None or not verdict.finite or done == self.recipe.train.steps
        if notable or done % self.recipe.train.log_every == 0:
            self._write(line)
        if not profiled:
            self._watch_ranks(done, verdict)
        rewards = "" if verdict.rewards is None else _in_words(verdict.rewards)
        self.progress.step(done, f"loss {verdict.loss:.3f}{rewards}  {self._rate_text(rate)}")

    def saving(self, step: int, stall_seconds: float) -> None:
        """A save has begun and held training up for so long."""
        self._write({"event": "save", "step": step, "stall_seconds": stall_seconds})

    def save_failed(self, step: int, reason: str) -> None:
        """A save could not be completed, and training goes on."""
        self._write({"event": "save_failed", "step": step, "reason": reason})
        self.say(f"{reason}; training goes on and the next save tries again")

    def mfu(self, tokens_per_second: float) -> float:
        """Model FLOP utilisation of all devices together, against their dense peak."""
        return tokens_per_second * self.flops_per_token / (self.peak * self.mesh.world_size)

    def _share_of_peak(self, rate: float) -> dict[str, float]:
        return {"mfu": self.mfu(rate)}

    def _rate_text(self, rate: float) -> str:
        return f"{rate:,.0f} tokens/s  MFU {self.mfu(rate):.0%}"

    def _work_per_step(self) -> int:
        return self.recipe.train.batch * self.recipe.data.sequence

    def _watch_ranks(self, done: int, verdict: Verdict) -> None:
        slow = self._watch.add(verdict.rank_seconds)
        if slow is None:
            self._slow_rank = None if self._watch.between_windows else self._slow_rank
            return
        rank, ratio = slow
        self._write({"event": "slow_rank", "step": done, "rank": rank, "ratio_to_median": ratio})
        if rank != self._slow_rank:  # said once, not with every window that it stays so
            others = f"rank {1 - rank}'s" if self.mesh.world_size == 2 else "the median of the others'"
            steps = f"steps {done - self._watch.window + 1} to {done}"
            self.say(f"rank {rank} is slow: in {steps} its own work took {ratio:.1f} times as long as {others}")
        self._slow_rank = rank

    def _write(self, line: dict[str, Any]) -> None:
        if self.metrics is None:
            return
        if self.tracking is not None:
            self.tracking.line(line)
        trouble = self.metrics.write(line) or ""
        if trouble and not self._metrics_trouble:
            self.say(f"{self.directory.metrics} cannot be written ({trouble}): its lines wait until it can")
        self._metrics_trouble = trouble

    def _track(self, step: int, values: dict[str, Any]) -> None:
        if self.tracking is not None:
            self.tracking.values(step, values)

    # --- after

    def stopped(self, trainer: Trainer, checkpointer: Checkpointer) -> None:
        """The run was told to stop, and has saved."""
        self._track(trainer.steps_done, _paths(checkpointer))

    def result(self, trainer: Trainer, checkpointer: Checkpointer) -> dict[str, Any]:
        """The result document. Where this process had nothing left to do, its figures are those of `metrics.jsonl`."""
        prediction = {} if self.prediction is None else self.prediction.document()
        measured = {
            "memory_bytes": measured_memory(trainer.memory(), self.memory, prediction),
            **self.times.document(self.device),
            "sent_bytes_by_axis": self.sent_bytes_by_axis,
        }
        if (line := compared(prediction, measured)) is not None and self._figures[self.rate_name]:
            self.say(line)
        return (
            self._outcome(trainer)
            | {
                "layout": str(trainer.layout),
                "parameters": trainer.table.numel,
                "predicted": {
                    "state_bytes": trainer.predicted_bytes(),
                    "sent_bytes_per_step": trainer.predicted_traffic(),
                    **self._flops_of_work(),
                    **prediction,
                },
                "measured": {
                    "state_bytes": trainer.memory(),
                    "sent_bytes_per_step": self.sent_bytes,
                    "peak_memory_bytes": self.memory.peak_bytes(),
                    **measured,
                },
            }
            | _paths(checkpointer)
        )

    def _outcome(self, trainer: Trainer) -> dict[str, Any]:
        """How far it came, how well and how fast."""
        figures = self._figures if self._figures[self.rate_name] else self._earlier_figures()
        rates = figures[self.rate_name]
        rate = statistics.median(rates) if rates else None
        return {
            "step": trainer.steps_done,
            **{key: values[-1] if values else None for key, values in figures.items() if values is not rates},
            "skipped_steps": trainer.skipped,
            self.rate_name: rate,
            **self._share_of_all_peaks(rate),
        }

    def _share_of_all_peaks(self, rate: float | None) -> dict[str, Any]:
        return {
            "mfu": None if rate is None else self.mfu(rate),
            "flops_convention": FLOPS_CONVENTION,
            "peak_flops_per_device": self.peak,
        }

    def _flops_of_work(self) -> dict[str, float]:
        return {"flops_per_token": self.flops_per_token}

    def keep_result(self, result: dict[str, Any]) -> None:
        """Leave the result document in the run directory; it is answered all the same where that takes nothing."""
        told = ("predicted", "measured", "checkpoint", "best_checkpoint")
        self._track(result["step"], {key: result[key] for key in told})
        if self.leader:
            try:
                self.directory.write_result(result)
            except UserError as error:
                self.say(str(error))

    def earlier_result(self, trainer: Trainer, checkpointer: Checkpointer) -> dict[str, Any] | None:
        """Rank 0: the result that the run left which did all these steps, with its checkpoints where they lie now."""
        result = self.directory.read_result() if self.leader else None
        if result is None or result.get("step") != trainer.steps_done:
            return None
        return result | _paths(checkpointer)

    def _earlier_figures(self) -> dict[str, list[float]]:
        figures: dict[str, list[float]] = {key: [] for key in self._figures}
        if self.leader:
            for line in read_metrics(self.directory.metrics):
                for key, values in figures.items():
                    if line.get(key) is not None:
                        values.append(line[key])
        return figures


def _as_run(recipe: Recipe, trainer: Trainer) -> Recipe:
    """The recipe with the number of threads that was chosen."""
    run = recipe.run.model_copy(update={"threads": trainer.threads or recipe.run.threads})
    return recipe.model_copy(update={"run": run})


def _in_words(rewards: Rewards) -> str:
    """Behind a loss, for who watches."""
    return f"  margin {rewards.margin:.3f}  accuracy {rewards.accuracy:.0%}"


def _paths(checkpointer: Checkpointer) -> dict[str, str | None]:
    """The newest and the best checkpoint, as the result document names them."""
    newest, best = checkpointer.newest(), checkpointer.best()
    return {
        "checkpoint": str(newest.path) if newest else None,
        "best_checkpoint": str(best.path) if best else None,
    }


def device_peak_flops(mesh: Mesh, precision: str) -> float:
    """Dense peak of one device in this precision: published for GPUs, measured (all ranks at once) for CPUs."""
    device = torch.device(mesh.device)
    if device.type == "cuda":
        published = peak_flops(torch.cuda.get_device_name(device), precision)
        if published is not None:
            return published
    collectives.barrier(mesh.world, "start.peak")
    rate = torch.tensor(measure_matmul_rate(PARAMETER_DTYPES[precision], device), dtype=torch.float64, device=device)
    collectives.all_reduce(rate, mesh.world, "start.peak")
    return float(rate) / mesh.world_size
