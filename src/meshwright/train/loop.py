"""A training run of one rank: resume, step until done, validate, save, and end cleanly whatever happens."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from pathlib import Path
from typing import Any

import torch

from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.data import prepare
from meshwright.errors import CheckFailed, Terminated, UserError
from meshwright.layout import Layout
from meshwright.model.config import config_from_recipe
from meshwright.model.refuse import refuse
from meshwright.plan.devices import peak_flops
from meshwright.plan.flops import FLOPS_CONVENTION, training_flops_per_token
from meshwright.probe.matmul import bf16_is_faster, matmul_flops_per_second
from meshwright.recipe import Recipe, load_recipe_text, resume_differences
from meshwright.train.checkpoint import Checkpointer
from meshwright.train.learning_rate import learning_rate
from meshwright.train.metrics import MetricsFile, SlowRankWatch, peak_memory_bytes
from meshwright.train.progress import Progress
from meshwright.train.run_directory import RunDirectory
from meshwright.train.trainer import PARAMETER_DTYPES, Trainer, Verdict

GIB = 2**30


def train(recipe: Recipe, mesh: Mesh, run_directory: RunDirectory, *, show_progress: bool = True) -> dict[str, Any]:
    """Run or resume `recipe` on this rank and return the result document (the same on every rank).

    Raises `Terminated` after SIGTERM and a save, `CheckFailed` when too many steps in a row were not finite, and
    `UserError` for mistakes in the recipe and for a last save that failed.
    """
    return Run(recipe, mesh, run_directory, show_progress).run()


class Run:
    """The state around `Trainer`: checkpoints, metrics, progress, signals."""

    def __init__(self, recipe: Recipe, mesh: Mesh, run_directory: RunDirectory, show_progress: bool) -> None:
        self.recipe, self.mesh, self.directory = recipe, mesh, run_directory
        self.leader = mesh.rank == 0
        data = prepare(recipe.data, recipe.run.seed, log=lambda line: None)
        self.config = config_from_recipe(recipe.model, recipe.data.sequence, data.vocabulary)
        if self.config.eos_token is None:  # generation has to know where the tokenizer's texts begin and end
            start, end = data.tokenizer.start, data.tokenizer.end
            self.config = dataclasses.replace(self.config, bos_token=start, eos_token=end)
        layout = recipe.parsed_layout
        refuse(layout, self.config, recipe.train.batch, recipe.data.sequence, mesh.world_size)
        self.notes: list[str] = []  # lines from before there is a progress display
        self.progress: Progress | None = None
        self.checkpointer = Checkpointer(
            run_directory.checkpoints,
            mesh,
            self.config,
            dtype=recipe.checkpoint.dtype,
            keep=recipe.checkpoint.keep,
            keep_best=recipe.checkpoint.keep_best,
            tokenizer_directory=data.tokenizer_directory,
            background=recipe.checkpoint.background,
            log=self.log,
        )
        previous = self._previous_state()
        layout = self._resolve_precision(layout, previous)
        self.trainer = Trainer(recipe, layout, self.config, data, mesh)
        self.resumed_from = self._resume()
        self.peak = self._peak_flops(layout)
        self.flops_per_token = training_flops_per_token(self.config, recipe.data.sequence)
        self.stop_requested = False
        self.skipped = self.skipped_in_a_row = 0
        self.best_loss = math.inf
        self.last_saved = self.trainer.steps_done if self.resumed_from else -1
        self.show_progress = show_progress and self.leader

    def log(self, line: str) -> None:
        """One line for the person watching; only rank 0 speaks."""
        if self.leader:
            if self.progress is None:
                self.notes.append(line)
            else:
                self.progress.line(line)

    def run(self) -> dict[str, Any]:
        """Train to the last step, or until told to stop; see `train`."""
        previous_handler = signal.signal(signal.SIGTERM, self._request_stop)
        metrics = MetricsFile(self.directory.metrics, self.trainer.steps_done) if self.leader else None
        self.progress = Progress(self.recipe.train.steps, self.trainer.steps_done, show=self.show_progress)
        try:
            self._introduce()
            return self._loop(metrics)
        finally:
            self.progress.close()
            if metrics is not None:
                metrics.close()
            signal.signal(signal.SIGTERM, previous_handler)

    def _loop(self, metrics: MetricsFile | None) -> dict[str, Any]:
        recipe, trainer, checkpointer = self.recipe, self.trainer, self.checkpointer
        watch = SlowRankWatch(self.mesh.world_size, recipe.train.slow_rank_factor)
        rates: list[float] = []
        losses: list[float] = []
        validation_loss: float | None = None
        while trainer.steps_done < recipe.train.steps:
            begun = time.perf_counter()
            verdict = trainer.step(stop=self.stop_requested, save_failed=checkpointer.failed() is not None)
            done = trainer.steps_done
            seconds = time.perf_counter() - begun
            if verdict.finite:
                losses.append(verdict.loss)
            self._count_skipped(verdict, done)
            if verdict.save_failed:
                self._give_up_save()
            rates.append(recipe.train.batch * recipe.data.sequence / seconds)
            line = self._step_line(done, verdict, seconds)

            last = done == recipe.train.steps
            if recipe.train.validate_every and (last or done % recipe.train.validate_every == 0):
                line["validation_loss"] = validation_loss = trainer.validate()
            due = recipe.checkpoint.every and done % recipe.checkpoint.every == 0
            if due or last or verdict.stop:
                checkpointer.save(
                    done, trainer.pieces(owned=True), trainer.state(), validation_loss=line.get("validation_loss")
                )
                line["save_stall_seconds"] = checkpointer.stall_seconds
            self._report(metrics, line, watch.add(verdict.rank_seconds), verdict)
            if verdict.stop:
                self._finish_saving()
                raise Terminated(f"stopped by SIGTERM after saving step {done}; the same command goes on from there")
        self._finish_saving()
        return self._result(losses, rates, validation_loss)

    # --- before the first step

    def _previous_state(self) -> dict[str, Any] | None:
        newest = self.checkpointer.newest()
        if newest is None:
            return None
        state = newest.state()
        resume_differences(load_recipe_text(state["recipe"], "the checkpoint's recipe"), self.recipe)
        return state

    def _resolve_precision(self, layout: Layout, previous: dict[str, Any] | None) -> Layout:
        """The layout with its precision made explicit: as before the interruption, else bf16 where it is faster."""
        if layout.precision is not None:
            return layout
        if previous is not None:
            return dataclasses.replace(layout, precision=Layout.parse(previous["layout"]).precision)
        faster = torch.tensor(float(self.leader and bf16_is_faster(self.mesh.device)), device=self.mesh.device)
        collectives.all_reduce(faster, self.mesh.world, "start.precision")
        return dataclasses.replace(layout, precision="bf16" if faster > 0 else "fp32")

    def _resume(self) -> str | None:
        """Load the newest whole checkpoint; its name, or None for a fresh run."""
        loaded = self.checkpointer.load_newest(self.trainer.pieces(owned=False), self._all_agree)
        if loaded is None:
            if self.recipe.model.load_weights:
                self.trainer.load_weights(Path(self.recipe.model.from_path or ""))
            return None
        path, state = loaded
        self.trainer.restore(state)
        return path.name

    def _all_agree(self, mine: bool) -> bool:
        """Whether every rank says yes."""
        no = torch.tensor(float(not mine), device=self.mesh.device)
        collectives.all_reduce(no, self.mesh.world, "start.agreement")
        return not no > 0

    def _peak_flops(self, layout: Layout) -> float:
        """Dense peak of one device in this precision: published for GPUs, measured (all ranks at once) for CPUs."""
        device = torch.device(self.mesh.device)
        if device.type == "cuda":
            published = peak_flops(torch.cuda.get_device_name(device), layout.precision or "bf16")
            if published is not None:
                return published
        collectives.barrier(self.mesh.world, "start.peak")
        rate = torch.tensor(
            matmul_flops_per_second(PARAMETER_DTYPES[layout.precision or "fp32"], device),
            dtype=torch.float64,
            device=device,
        )
        collectives.all_reduce(rate, self.mesh.world, "start.peak")
        return float(rate) / self.mesh.world_size

    def _introduce(self) -> None:
        trainer, table = self.trainer, self.trainer.table
        for note in self.notes:
            self.log(note)
        self.log(
            f"model: {self.config.family}, {table.numel / 1e6:.2f} M parameters, {self.config.layers} layers, "
            f"hidden {self.config.hidden}, vocabulary {self.config.vocabulary}"
        )
        threads = f" x {torch.get_num_threads()} threads" if torch.device(self.mesh.device).type == "cpu" else ""
        self.log(
            f"layout: {trainer.layout} on {self.mesh.world_size} {torch.device(self.mesh.device).type} "
            f"process{'es' if self.mesh.world_size > 1 else ''}{threads}"
        )
        self.log(
            f"data: {trainer.tokens.tokens:,} training tokens, {self.recipe.train.batch * self.recipe.data.sequence:,} "
            f"a step, {self.recipe.train.steps} steps"
        )
        if self.resumed_from:
            self.log(f"resumed from {self.resumed_from}: {trainer.steps_done} steps are done")

    # --- during

    def _request_stop(self, *_: object) -> None:
        self.stop_requested = True

    def _count_skipped(self, verdict: Verdict, done: int) -> None:
        if verdict.finite:
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        limit = self.recipe.train.maximum_skipped
        self.log(f"step {done} skipped on all ranks: loss {verdict.loss}, gradient norm {verdict.gradient_norm}")
        if self.skipped_in_a_row > limit:
            raise CheckFailed(
                f"{self.skipped_in_a_row} steps in a row (the last: step {done}) had a loss or gradient that is not "
                f"finite, more than train.maximum_skipped = {limit}; newest whole checkpoint: "
                f"{self._newest_name()}; a lower train.learning_rate or train.clip usually helps"
            )

    def _give_up_save(self) -> None:
        """Some rank could not write: all ranks drop that save and train on; the next save tries again."""
        reason = self.checkpointer.failed()
        self.checkpointer.abandon()
        self.log(reason or "a save failed on another rank; training goes on and the next save tries again")

    def _finish_saving(self) -> None:
        """Wait for the last save; all ranks fail together when any of them could not write."""
        self.checkpointer.wait()
        reason = self.checkpointer.failed()
        if not self._all_agree(reason is None):
            self.checkpointer.abandon()
            raise UserError(
                reason or f"the last save failed on another rank; {self._newest_name()} is the newest whole"
            )

    def _newest_name(self) -> str:
        newest = self.checkpointer.newest()
        return newest.name if newest else "none"

    def _step_line(self, done: int, verdict: Verdict, seconds: float) -> dict[str, Any]:
        tokens_per_second = self.recipe.train.batch * self.recipe.data.sequence / seconds
        line: dict[str, Any] = {
            "step": done,
            "loss": verdict.loss,
            "gradient_norm": verdict.gradient_norm,
            "learning_rate": learning_rate(done - 1, self.recipe.train),
            "tokens_per_second": tokens_per_second,
            "mfu": self._mfu(tokens_per_second),
            "memory_gib": peak_memory_bytes(torch.device(self.mesh.device)) / GIB,
            "seconds": seconds,
            "seconds_by_part": self.trainer.clock.seconds(),
        }
        if not verdict.finite:
            line["skipped"] = True
        return line

    def _report(
        self, metrics: MetricsFile | None, line: dict[str, Any], slow: tuple[int, float] | None, verdict: Verdict
    ) -> None:
        if metrics is None:
            return
        done = line["step"]
        if done % self.recipe.train.log_every == 0 or "validation_loss" in line or done == self.recipe.train.steps:
            metrics.write(line)
        if slow is not None:
            rank, ratio = slow
            metrics.write({"event": "slow_rank", "step": done, "rank": rank, "ratio_to_median": ratio})
            self.log(f"rank {rank} works {ratio:.1f} times as long as the others' median (up to step {done})")
        figures = f"loss {verdict.loss:.3f}  {line['tokens_per_second']:,.0f} tokens/s  MFU {line['mfu']:.0%}"
        if "validation_loss" in line:
            self.log(f"step {done}: validation loss {line['validation_loss']:.4f}")
        assert self.progress is not None
        self.progress.step(done, figures)

    def _mfu(self, tokens_per_second: float) -> float:
        return tokens_per_second * self.flops_per_token / (self.peak * self.mesh.world_size)

    # --- after

    def _result(self, losses: list[float], rates: list[float], validation_loss: float | None) -> dict[str, Any]:
        median = sorted(rates)[len(rates) // 2] if rates else None
        newest = self.checkpointer.newest()
        return {
            "step": self.trainer.steps_done,
            "loss": losses[-1] if losses else None,
            "validation_loss": validation_loss,
            "skipped_steps": self.skipped,
            "tokens_per_second": median,
            "mfu": self._mfu(median) if median else None,
            "flops_convention": FLOPS_CONVENTION,
            "peak_flops_per_device": self.peak,
            "layout": str(self.trainer.layout),
            "parameters": self.trainer.table.numel,
            "predicted": {
                "state_bytes": self.trainer.parallel.predicted_bytes(),
                "flops_per_token": self.flops_per_token,
            },
            "measured": {
                "state_bytes": self.trainer.parallel.memory(),
                "peak_memory_bytes": peak_memory_bytes(torch.device(self.mesh.device)),
            },
            "checkpoint": str(newest.path) if newest else None,
        }
