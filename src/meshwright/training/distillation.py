"""Distillation objective: next-token prediction and a teacher's next-token distribution, from a running teacher or from
its cached most probable tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.checkpoint.agreement import Agreement
from meshwright.comm.mesh import Axis
from meshwright.errors import UserError
from meshwright.launcher.recipe_checks import check_teacher_tokenizer
from meshwright.model.documents import Documents, MicroBatch, move
from meshwright.monitoring.records import Metrics
from meshwright.recipe import Recipe
from meshwright.spec.config_json import config_from_path
from meshwright.spec.distillation import check_teacher, fit_vocabulary
from meshwright.spec.policy import DISTILLATION_METRICS
from meshwright.spec.teacher import TeacherWork, make_teacher_work
from meshwright.training.distillation_loss import DistillationLoss
from meshwright.training.objective import NextToken, Policy
from meshwright.training.on_policy import GROUP, Sampler, find_prompts, is_on_policy_step
from meshwright.training.reference import compute_weights_checksum, frozen_slices
from meshwright.training.task import RunStart
from meshwright.training.teacher import Teacher
from meshwright.training.teacher_cache import TeacherCache, hash_teacher
from meshwright.training.teacher_targets import TeacherTargets

METRICS = ("hard_loss", "divergence", "hidden_loss")
"""Names of the metrics: mean cross-entropy of the text, divergence from the teacher (nats per target token, without the
factors of the loss), squared difference of hidden states."""


class Distillation(NextToken):
    """Objective of distillation: the student (the model being trained) learns both the next token of the text and a
    teacher's next-token distribution. The loss is a mean over the target tokens.

    recipe: settings of the run. loss: loss of a token. Attributes: `teacher`: the teacher model, if it runs in every
    step; `cache`: reader of the teacher's most probable tokens, if they were computed before the run. `prepare` sets
    one of these two attributes; the other stays None."""

    metric_count = DISTILLATION_METRICS

    def __init__(self, recipe: Recipe, loss: DistillationLoss) -> None:
        self.recipe, self.loss = recipe, loss
        self.metric_names: Sequence[str] = METRICS if loss.layer_map else METRICS[:2]
        self.teacher: Teacher | None = None
        self.cache: TeacherCache | None = None
        self.teacher_work: TeacherWork | None = None
        self.vocabulary: int | None = None
        """Number of token IDs that are compared if teacher and student do not have equally many; else None."""
        self._checksum = ""
        self.metric_sums = torch.zeros(DISTILLATION_METRICS, dtype=torch.float64)

    def prepare(self, policy: Policy, start: RunStart) -> None:
        """Load the teacher, or open the cache of its most probable tokens. policy: the student; start: run directory,
        resumed state and log. If this fails on any rank, every rank raises `UserError`. Collective."""
        given = self.recipe.distill
        assert given.teacher is not None
        self.teacher_work = make_teacher_work(self.recipe, policy.config)
        check_teacher_tokenizer(self.recipe, policy.data)
        check_teacher(self.recipe, policy.config, policy.layout)
        stored, student = config_from_path(given.teacher).vocabulary, policy.config.vocabulary
        if stored != student:
            self.vocabulary = min(stored, student)
            start.log(
                f"teacher: {stored:,} token IDs, the model {student:,}; the first {self.vocabulary:,} are compared"
            )
        if given.top_k:
            self._open_cache(policy, start.agreement)
        else:
            self._load_teacher(policy, start.agreement, Path(given.teacher))
        teacher = self.teacher
        if start.saved is not None and start.saved.get("teacher", self._checksum) != self._checksum:
            raise UserError(
                f"{self.recipe.where('distill.teacher')}: distill.teacher has changed since this run began; restore "
                f"{given.teacher}, or start a new run with another run.name"
            )
        if teacher is not None:
            start.log(f"teacher: {teacher.engine.table.numel / 1e6:.2f} M parameters from {given.teacher}")
        else:
            start.log(f"teacher: {given.top_k} most probable tokens from {self.cache and self.cache.directory}")

    def _open_cache(self, policy: Policy, agreement: Agreement) -> None:
        """Open the cache of the teacher's most probable tokens. Rank 0 alone reads the teacher's files and computes
        their hash, which identifies the cache. policy: the student; agreement: exchanges texts between ranks. Raises
        `UserError` on every rank if this fails on any rank. Collective."""
        digest, problem = None, None
        if policy.mesh.rank == 0:
            try:
                digest = hash_teacher(str(self.recipe.distill.teacher))
            except UserError as error:
                problem = str(error)
        agreement.raise_first(problem)
        found = agreement.broadcast_first_text(digest)
        assert found is not None, "rank 0 has hashed them or raised"
        try:
            self.cache = TeacherCache(self.recipe, policy.data, found[1])
            self.cache.open()
            self._checksum = self.cache.sha256
        except UserError as error:
            problem = str(error)
        agreement.raise_first(problem)

    def _load_teacher(self, policy: Policy, agreement: Agreement, directory: Path) -> None:
        """Load the teacher from a Hugging Face directory and compute the checksum of its weights. policy: the student;
        agreement: exchanges texts between ranks. Raises `UserError` on every rank if this fails on any rank.
        Collective."""
        given, layers, problem = self.recipe.distill, [layer for _, layer in self.loss.layer_map], None
        dtype = policy.parallel.parameter_dtype if given.dtype is None else getattr(torch, given.dtype)
        config = fit_vocabulary(config_from_path(directory), policy.config.vocabulary)
        teacher = Teacher(config, policy.mesh, (given.layout, self.recipe.data.sequence), dtype, layers)
        try:
            teacher.load(directory)
        except UserError as error:
            problem = str(error)
        agreement.raise_first(problem)
        # If the teacher is not sharded over tp, each rank along tp holds all of its slices.
        counted = teacher.mesh.tp.size == policy.mesh.tp.size or policy.mesh.tp.rank == 0
        self._checksum = compute_weights_checksum(frozen_slices(teacher.engine) if counted else (), teacher.mesh)
        self.teacher = teacher

    def complete(
        self, policy: Policy, micro_batches: Sequence[MicroBatch], rows: Sequence[NDArray[np.int64]], step: int | None
    ) -> list[MicroBatch]:
        """Return this rank's `micro_batches` with the teacher's targets added to each micro-batch whose last pipeline
        stage is on this rank. In an on-policy step, the sequences are first replaced by the student's samples. With
        pipeline parallelism, this call runs the teacher through all stages. Without it, the teacher runs on each
        micro-batch later, just before the student does, so that only one micro-batch's states are in memory.

        policy: the student. rows: indices of the sequences of each micro-batch in the training split. step: index of
        the step; None: validation, where `rows` are indices in the validation split. Collective.
        """
        model: Any = policy.model
        metric_sums = self.metric_sums = torch.zeros(
            DISTILLATION_METRICS, dtype=torch.float64, device=policy.mesh.device
        )
        given, one_stage = self.recipe.distill, policy.mesh.pp.size == 1
        if step is not None and is_on_policy_step(given.on_policy, self.recipe.run.seed, step):
            micro_batches = self._sample(policy, micro_batches, rows, step)
        model.layer_outputs = dict.fromkeys(student for student, _ in self.loss.layer_map)
        made = [TeacherTargets(self.loss, metric_sums, vocabulary=self.vocabulary) for _ in micro_batches]
        if self.cache is not None or one_stage:
            split = "validation" if step is None else "train"
            for number, targets in enumerate(made):
                if self.cache is not None:
                    work = partial(_read_cache, self.cache, micro_batches[number], rows[number], split)
                else:
                    assert self.teacher is not None, "`prepare` has loaded it"
                    work = partial(_run_teacher, self.teacher, micro_batches[number], policy.mesh.tp)
                targets.source, targets.frees = work, one_stage
        else:
            assert self.teacher is not None, "`prepare` has loaded it"
            for number, states in self.teacher.run(micro_batches).items():
                targets = made[number]
                targets.states_TH, targets.layers = states.states_TH, states.layers
                targets.head = self.teacher.output_head(policy.mesh.tp)
        return [
            batch._replace(documents=dataclasses.replace(batch.documents, teacher=targets))
            for batch, targets in zip(micro_batches, made, strict=True)
        ]

    def _sample(
        self, policy: Policy, micro_batches: Sequence[MicroBatch], rows: Sequence[NDArray[np.int64]], step: int
    ) -> list[MicroBatch]:
        """Return on-policy micro-batches: of each sequence in `micro_batches` only the prompt remains, and the student
        samples a continuation.

        policy: the student. rows: indices of the sequences of each micro-batch in the training split; step: index of
        the step. The random draws are seeded by `rows` and `step`. Collective."""
        given, recipe = self.recipe.distill, self.recipe
        text_tokens = None
        if recipe.data.records == "text":
            text_tokens = given.on_policy_prompt or recipe.data.sequence // 2
        (units,) = policy.parallel.prefetchers.values()
        sampler = Sampler(
            policy.model, units, policy.mesh, ends=policy.config.eos_tokens,
            temperature=given.on_policy_temperature, seed=recipe.run.seed,
        )  # fmt: skip
        # Several micro-batches together, because a step of sampling reads all weights for a token of each sequence. All
        # ranks have equally many micro-batches of the same shape, hence equally many groups.
        size = max(1, GROUP // micro_batches[0].tokens_BS.numel())
        made = []
        for first in range(0, len(micro_batches), size):
            group = micro_batches[first : first + size]
            places = rows[first : first + size]
            tokens_BS = torch.cat([each.tokens_BS for each in group])
            together = MicroBatch(tokens_BS, torch.cat([each.targets_BS for each in group]), Documents())
            prompts = [prompt for each in group for prompt in find_prompts(each, text_tokens)]
            tokens, targets, documents = sampler.sample(together, prompts, step, np.concatenate(places))
            counts = [len(each) for each in places]
            parts = zip(tokens.split(counts), targets.split(counts), strict=True)
            made += [MicroBatch(*pair, documents) for pair in parts]
        units.reshard()
        return made

    def state(self) -> dict[str, Any]:
        """Return {"teacher": checksum of the teacher's weights or of its cache} for `state.json`. A resumed run must
        have an equal checksum."""
        return {"teacher": self._checksum}

    def report(self, means: Sequence[float]) -> Metrics:
        """Return the mean cross-entropy of the text, the divergence from the teacher and the difference of hidden
        states, per target token. means: the metric sums divided by the number of target tokens."""
        named = dict(zip(self.metric_names, means, strict=False))
        return Metrics(named, f"  hard {means[0]:.3f}  divergence {means[1]:.4f}")


def _run_teacher(teacher: Teacher, micro_batch: MicroBatch, student: Axis, targets: TeacherTargets) -> None:
    """Run the teacher on `micro_batch` and store its hidden states in `targets`. student: the run's mesh axis tp.
    Collective."""
    found = teacher.run([micro_batch])[0]
    targets.states_TH, targets.layers = found.states_TH, found.layers
    targets.head = teacher.output_head(student)


def _read_cache(
    cache: TeacherCache, micro_batch: MicroBatch, rows: NDArray[np.int64], split: str, targets: TeacherTargets
) -> None:
    """Read the teacher's most probable tokens for `micro_batch` from `cache` and set them in `targets`. rows: indices
    of the micro-batch's sequences in the split `split` ("train" or "validation"). Under context parallelism only the
    tokens of this rank's slice of the sequences are read. Raises `UserError` if a file of the cache is damaged."""
    tokens_BS, _, documents = micro_batch
    parts = [move(torch.from_numpy(part), tokens_BS.device) for part in cache.read(split, rows)]
    if documents.indices_C is not None:
        parts = [part[:, documents.indices_C] for part in parts]
    targets.top_ids_TK, targets.top_log_p_TO = (part.flatten(0, 1) for part in parts)
