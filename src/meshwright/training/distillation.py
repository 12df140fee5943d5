"""Distillation objective: next-token prediction and a teacher's next-token distribution, from a running teacher or from
its cached most probable tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.errors import UserError
from meshwright.launcher.recipe_checks import check_teacher_tokenizer
from meshwright.monitoring.records import Metrics
from meshwright.parallel.stage_compute import MicroBatch
from meshwright.planner.cost.teacher import TeacherWork, make_teacher_work
from meshwright.recipe import Recipe
from meshwright.spec.config_json import config_from_path
from meshwright.spec.distillation import check_teacher
from meshwright.spec.policy import DISTILLATION_METRICS
from meshwright.training.distillation_loss import DistillationLoss
from meshwright.training.objective import NextToken, Policy
from meshwright.training.on_policy import Sampler, find_prompts, is_on_policy_step
from meshwright.training.reference import compute_weights_checksum, frozen_slices
from meshwright.training.task import RunStart
from meshwright.training.teacher import Teacher
from meshwright.training.teacher_cache import TeacherCache
from meshwright.training.teacher_targets import TeacherTargets

METRICS = ("hard_loss", "divergence", "hidden_loss")
"""Names of the metrics: mean cross-entropy of the text, divergence from the teacher (nats per target token, without the
factors of the loss), squared difference of hidden states."""


class Distillation(NextToken):
    """Objective of distillation: the student (the model being trained) learns both the next token of the text and a
    teacher's next-token distribution. The loss is a mean over the target tokens.

    recipe: settings of the run. loss: loss of a token. Attributes: `teacher`: the teacher model, which runs in every
    step; `cache`: reader of the teacher's most probable tokens, if they were computed before the run. `prepare` sets
    one of the two; the other one stays None."""

    metric_count = DISTILLATION_METRICS

    def __init__(self, recipe: Recipe, loss: DistillationLoss) -> None:
        self.recipe, self.loss = recipe, loss
        self.metric_names: Sequence[str] = METRICS if loss.layer_map else METRICS[:2]
        self.teacher: Teacher | None = None
        self.cache: TeacherCache | None = None
        self.teacher_work: TeacherWork | None = None
        self._checksum = ""
        self.metric_sums = torch.zeros(DISTILLATION_METRICS, dtype=torch.float64)

    def prepare(self, policy: Policy, start: RunStart) -> None:
        """Load the teacher, or open the cache of its most probable tokens. policy: the student; start: run directory,
        resumed state and log. If this fails on any rank, every rank raises `UserError`. Collective."""
        given = self.recipe.distill
        assert given.teacher is not None
        self.teacher_work = make_teacher_work(self.recipe, policy.config.layers)
        check_teacher_tokenizer(self.recipe, policy.data)
        check_teacher(self.recipe, policy.config, policy.layout)
        teacher, problem = None, None
        if not given.top_k:
            dtype = policy.parallel.parameter_dtype if given.dtype is None else getattr(torch, given.dtype)
            config, layers = config_from_path(given.teacher), [teacher for _, teacher in self.loss.layer_map]
            teacher = Teacher(config, policy.mesh, (given.layout, self.recipe.data.sequence), dtype, layers)
        try:
            if teacher is None:
                self.cache = TeacherCache(self.recipe, policy.data)
                self.cache.open()
            else:
                teacher.load(Path(given.teacher))
        except UserError as error:
            problem = str(error)
        if (first := start.agreement.broadcast_first_text(problem)) is not None:
            raise UserError(first[1])
        self.teacher = teacher
        if self.cache is not None:
            self._checksum = self.cache.sha256
        elif teacher is not None:
            self._checksum = compute_weights_checksum(frozen_slices(teacher.engine), teacher.mesh)
        if start.saved is not None and start.saved.get("teacher", self._checksum) != self._checksum:
            raise UserError(
                f"{self.recipe.where('distill.teacher')}: distill.teacher has changed since this run began; restore "
                f"{given.teacher}, or start a new run with another run.name"
            )
        if teacher is not None:
            start.log(f"teacher: {teacher.engine.table.numel / 1e6:.2f} M parameters from {given.teacher}")
        else:
            start.log(f"teacher: {given.top_k} most probable tokens from {self.cache and self.cache.directory}")

    def complete(
        self, policy: Policy, micro_batches: Sequence[MicroBatch], rows: Sequence[NDArray[np.int64]], step: int | None
    ) -> list[MicroBatch]:
        """Return this rank's `micro_batches` with the teacher's targets added (those whose last pipeline stage is on
        this rank). In an on-policy step their sequences are first replaced by the student's samples.

        policy: the student. rows: indices of the sequences of each micro-batch, in the training split; step: index of
        the step. step None: validation, with indices in the validation split. Collective."""
        model: Any = policy.model
        metric_sums = self.metric_sums = torch.zeros(
            DISTILLATION_METRICS, dtype=torch.float64, device=policy.mesh.device
        )
        if self.cache is not None:
            split = "validation" if step is None else "train"
            return [self._read_cache(self.cache, *each, split) for each in zip(micro_batches, rows, strict=True)]
        given = self.recipe.distill
        if step is not None and is_on_policy_step(given.on_policy, self.recipe.run.seed, step):
            micro_batches = self._sample(policy, micro_batches, rows, step)
        assert self.teacher is not None, "`prepare` has loaded it"
        found = self.teacher.run(micro_batches)
        model.layer_outputs = dict.fromkeys(student for student, _ in self.loss.layer_map)
        completed = list(micro_batches)
        for number, states in found.items():
            tokens_BS, targets_BS, documents = micro_batches[number]
            targets = TeacherTargets(self.loss, metric_sums, states.states_TH, layers=states.layers)
            targets.head = self.teacher.output_head(policy.mesh.tp)
            completed[number] = tokens_BS, targets_BS, dataclasses.replace(documents, teacher=targets)
        return completed

    def _read_cache(
        self, cache: TeacherCache, micro_batch: MicroBatch, rows: NDArray[np.int64], split: str
    ) -> MicroBatch:
        """Return `micro_batch` with the teacher's most probable tokens, read from `cache`, added as targets.

        rows: indices of its sequences in the split `split` ("train" or "validation"). Under context parallelism only
        the tokens of this rank's slice of the sequences are added."""
        tokens_BS, targets_BS, documents = micro_batch
        parts = [torch.from_numpy(part).to(tokens_BS.device) for part in cache.read(split, rows)]
        if documents.indices_C is not None:
            parts = [part[:, documents.indices_C] for part in parts]
        ids_TK, top_log_p_TO = (part.flatten(0, 1) for part in parts)
        assert self.metric_sums is not None, "`complete` has set them"
        targets = TeacherTargets(self.loss, self.metric_sums, top_ids_TK=ids_TK, top_log_p_TO=top_log_p_TO)
        return tokens_BS, targets_BS, dataclasses.replace(documents, teacher=targets)

    def _sample(
        self, policy: Policy, micro_batches: Sequence[MicroBatch], rows: Sequence[NDArray[np.int64]], step: int
    ) -> list[MicroBatch]:
        """Return on-policy micro-batches: of each sequence in `micro_batches` only the prompt remains, and the student
        samples a continuation.

        policy: the student. rows: indices of the sequences of each micro-batch in the training split; step: index of
        the step; both seed the random draws. Collective."""
        given, recipe = self.recipe.distill, self.recipe
        text_tokens = None
        if recipe.data.records == "text":
            text_tokens = given.on_policy_prompt or recipe.data.sequence // 2
        (units,) = policy.parallel.prefetchers.values()
        sampler = Sampler(
            policy.model, units, policy.mesh.device, ends=policy.config.eos_tokens,
            temperature=given.on_policy_temperature, seed=recipe.run.seed,
        )  # fmt: skip
        sampled = [
            sampler.sample(each, find_prompts(each, text_tokens), step, numbers)
            for each, numbers in zip(micro_batches, rows, strict=True)
        ]
        units.reshard()
        return sampled

    def state(self) -> dict[str, Any]:
        """Return {"teacher": checksum of the teacher's weights or of its cache} for `state.json`. A resumed run must
        have the same checksum."""
        return {"teacher": self._checksum}

    def report(self, means: Sequence[float]) -> Metrics:
        """Return the mean cross-entropy of the text, the divergence from the teacher and the difference of hidden
        states, per target token. means: the metric sums divided by the number of target tokens."""
        named = dict(zip(self.metric_names, means, strict=False))
        return Metrics(named, f"  hard {means[0]:.3f}  divergence {means[1]:.4f}")
