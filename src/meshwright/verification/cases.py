"""Small training problems on which a layout is verified, each for features that the others do not cover."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from meshwright.layout import Layout
from meshwright.schedules.library import generate_for_layout
from meshwright.spec.chunks import CHUNK_LOGITS
from meshwright.spec.config import ModelConfig
from meshwright.spec.policy import TILE_QUERIES
from meshwright.spec.refuse import refuse
from meshwright.training.preference_loss import Preference
from meshwright.verification.problem import ADAMW, SGD, Problem, choose_sequence_length, scale_down_config
from meshwright.verification.teaching import DistillationSettings


@dataclass(frozen=True, slots=True)
class Case:
    """Verification case: a named training problem on which a layout is compared with one device.

    name: such as "updates". problem: model, data and optimizer. resume_layout: layout on which the last steps run, from
    the checkpoint that the verified layout saved after the first steps; None: all steps run on the verified layout.
    """

    name: str
    problem: Problem
    resume_layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class CaseBuilder:
    """Builder of the verification cases (named small training problems) for one layout and model.

    Attributes:
        layout: Layout to be verified.
        config: Model, which is scaled down before use.
        dtype: Parameter dtype, "float64" or "float32".
        preference: Settings of the preference loss (DPO or IPO); None: next-token loss.
        teaching: Distillation, whose teacher is scaled down too; None: no teacher.
        batch: Wanted global batch in sequences. If this is not a multiple of dp x micro-batches, the smallest such
            multiple that is at least 8 is used instead.
        compiled: True if the recipe trains under torch.compile.
        overlap: True if the recipe overlaps tensor-parallel products with their collectives; here they are in chunks.
    """

    layout: Layout
    config: ModelConfig
    dtype: str = "float64"
    preference: Preference | None = None
    teaching: DistillationSettings | None = None
    batch: int = 8
    compiled: bool = False
    overlap: bool = False

    def make_default_cases(self) -> list[Case]:
        """Return the default cases. "updates": optimizer updates with clipping and resumes. "long sequences": attention
        over several tiles. "dtypes": parameters in a narrower dtype than their master weights. "late completion" (with
        several ranks): no buffer is touched while a collective call uses it. If `compiled` is True, also a case with
        one step under torch.compile with backend "aot_eager", which traces graphs but generates no code."""
        cases = [
            Case("updates", self.make_update_problem()),
            Case("long sequences", self.make_long_sequence_problem()),
            Case("dtypes", self.make_dtype_problem()),
            *([self.make_late_case()] if self.layout.world_size > 1 else []),
        ]
        return [*cases, *([self.make_compiled_case("aot_eager")] if self.compiled else [])]

    def make_all_cases(self) -> list[Case]:
        """Return all cases: the default cases, SGD without fused gradient accumulation, a loss computed in several
        chunks, bf16 training, a resume on another layout and, if `compiled` is True, a step with torch.compile's
        backend "inductor"."""
        return [
            *self.make_default_cases(),
            Case("sgd", dataclasses.replace(self.make_sgd_problem(), training=SGD, fused_gradient_accumulation=False)),
            Case("loss chunks", self.make_loss_chunk_problem()),
            self.make_bf16_case(),
            Case(
                "resume on another layout",
                self.make_update_problem(self.layout.world_size),
                choose_other_layout(self.layout),
            ),
            *([self.make_compiled_case("inductor")] if self.compiled else []),
        ]

    def make_sgd_problem(self, layers: int = 5) -> Problem:
        """Return a training problem of three steps of plain SGD on short sequences. layers: minimum number of layers of
        the model."""
        config = self._scale_down(layers)
        sequence = choose_sequence_length(self.layout)
        problem = Problem(config, self._choose_batch(), self.dtype, sequence, preference=self.preference)
        return self._complete(problem)

    def make_update_problem(self, ranks: int = 1, layers: int = 5) -> Problem:
        """Return a training problem of four optimizer steps with weight decay and gradient clipping. Step 1 (from 0) is
        non-finite and skipped; training is resumed from a checkpoint after two and after three steps.

        In float64 the optimizer is AdamW with a dynamic loss scale. In float32 the optimizer is SGD, because AdamW's
        updates for near-zero gradients depend on rounding. ranks: the batch is a multiple of this number. layers:
        minimum number of layers.
        """
        training = ADAMW if self.dtype == "float64" else dataclasses.replace(SGD, clip=0.5)
        plain = self.make_sgd_problem(layers)
        batch = math.lcm(plain.batch, ranks)
        return dataclasses.replace(plain, batch=batch, training=training, steps=4, nan_step=1, resumed_at=(2, 3))

    def make_long_sequence_problem(self) -> Problem:
        """Return a training problem of one SGD step on sequences that span several tiles of the attention computation.
        Under ring attention each rank's slice of a sequence is longer than a tile."""
        ring = self.layout.cp > 1 and self.layout.cp_method == "ring"
        wanted = 2 * self.layout.cp * (TILE_QUERIES + 9) if ring else 2 * TILE_QUERIES + 45
        return self._make_one_step_problem(wanted, self._scale_down(2))

    def make_loss_chunk_problem(self) -> Problem:
        """Return a training problem of one step whose vocabulary is so large that the loss of a micro-batch is computed
        in several chunks."""
        tokens = 4 * TILE_QUERIES + 45
        vocabulary = CHUNK_LOGITS["cpu"] // tokens + 11
        config = dataclasses.replace(self._scale_down(1), vocabulary=vocabulary * self.layout.tp)
        problem = self._make_one_step_problem(tokens * self.layout.cp, config)
        return dataclasses.replace(problem, batch=self.layout.dp * self.layout.micro_batches)

    def make_dtype_problem(self) -> Problem:
        """Return a training problem of two SGD steps with parameters of half the width of their master weights. The
        problem reveals parameters that were not set to the rounded master weights after an update."""
        narrow = {"float64": "float32", "float32": "bfloat16"}[self.dtype]
        plain = self.make_sgd_problem(2)
        # Large weights and updates would amplify rounding errors beyond the tolerance in deep models with post-norms.
        config = dataclasses.replace(plain.config, initializer_range=0.05)
        training = dataclasses.replace(SGD, learning_rate=0.002)
        return dataclasses.replace(
            plain, config=config, training=training, steps=2, dtype=narrow, master_dtype=self.dtype
        )

    def make_momentum_problem(self) -> Problem:
        """Return a training problem of two SGD steps with momentum. In the narrow dtype of `make_dtype_problem`, a
        wrong momentum of the second step would pass bfloat16's tolerance."""
        return dataclasses.replace(self.make_sgd_problem(2), training=SGD, steps=2)

    def make_late_case(self) -> Case:
        """Return the verification case "late completion": two SGD steps in which every collective call completes only
        when it is waited for. Until then its buffers hold NaN, which exposes reads of a buffer during the call."""
        plain = dataclasses.replace(self.make_sgd_problem(2), training=SGD, steps=2, late_completion=True)
        return Case("late completion", plain)

    def make_bf16_case(self) -> Case:
        """Return the verification case "bf16": three SGD steps with bf16 parameters and float32 master weights, as in
        bf16 training."""
        return Case(
            "bf16", dataclasses.replace(self.make_sgd_problem(), dtype="bfloat16", master_dtype="float32", training=SGD)
        )

    def make_compiled_case(self, backend: str) -> Case:
        """Return a verification case of one training step and a validation in which layers, final norm and loss run
        under torch.compile. backend: backend of torch.compile, "aot_eager" or "inductor". The model has two layers, or
        with pipeline parallelism one layer more than there are stages."""
        problem = dataclasses.replace(self.make_sgd_problem(2), training=SGD, steps=1, compile_backend=backend)
        return Case(f"compiled by {backend}", problem)

    def _make_one_step_problem(self, tokens: int, config: ModelConfig) -> Problem:
        """Return a training problem of one SGD step of the model `config` on sequences of at least `tokens` tokens."""
        sequence = choose_sequence_length(self.layout, tokens)
        window = None if config.sliding_window is None else TILE_QUERIES + 9
        config = dataclasses.replace(config, max_positions=2 * sequence, sliding_window=window)
        problem = Problem(config, self._choose_batch(), self.dtype, sequence, 1, SGD, preference=self.preference)
        return self._complete(problem)

    def _complete(self, problem: Problem) -> Problem:
        """Return `problem` with the builder's teacher and overlap, checked by `_check_runnable`."""
        overlap = "chunks" if self.overlap else "off"
        return self._check_runnable(self._add_teacher(dataclasses.replace(problem, tensor_overlap=overlap)))

    def _add_teacher(self, problem: Problem) -> Problem:
        """Return `problem` with distillation from a scaled-down teacher; unchanged if the builder has no teacher. If
        hidden states are to be matched, the model gets projections to the teacher's hidden size."""
        if self.teaching is None:
            return problem

        def scale(teacher: ModelConfig) -> ModelConfig:
            """Return a small model of the teacher's kind, of another depth than the student."""
            small = self._scale_down(problem.config.layers - 1, teacher)
            window = None if small.sliding_window is None else problem.config.sliding_window or small.sliding_window
            return dataclasses.replace(small, max_positions=problem.config.max_positions, sliding_window=window)

        teaching = self.teaching.scale_down(self.layout, problem.config, scale)
        return dataclasses.replace(problem, config=teaching.add_projections(problem.config), teaching=teaching)

    def _scale_down(self, layers: int, config: ModelConfig | None = None) -> ModelConfig:
        """Return the model `config` scaled down for the layout; None: the builder's model. layers: minimum number of
        layers; with pipeline parallelism the model has at least one layer more than there are stages."""
        layout = self.layout
        layers = max(layers, generate_for_layout(layout).stages + (layout.pp > 1))  # uneven: one stage has a layer more
        ulysses = layout.cp if layout.cp_method == "ulysses" else 1
        return scale_down_config(config or self.config, layout.tp, ulysses, layers, layout.ep, layout.etp)

    def _choose_batch(self) -> int:
        """Return the global batch in sequences: the builder's `batch` if this is a multiple of dp x micro-batches, else
        the smallest such multiple that is at least 8."""
        share = self.layout.dp * self.layout.micro_batches
        return share * math.ceil(8 / share) if self.batch % share else self.batch

    def _check_runnable(self, problem: Problem) -> Problem:
        """Return the training problem `problem` unchanged. Raises `UserError` if the builder's layout cannot run its
        model, batch size or sequence length."""
        refuse(self.layout, problem.config, problem.batch, problem.sequence, self.layout.world_size)
        return problem


def choose_other_layout(layout: Layout) -> Layout:
    """Return a layout on the same number of ranks with other axes than `layout`: data parallelism alone or, if `layout`
    has no other axis, another ZeRO stage. For a single rank, return a layout with another number of micro-batches."""
    ranks = layout.world_size
    if ranks == 1:
        return Layout(micro_batches=1 if layout.micro_batches > 1 else 2)
    other = Layout(dp=ranks, zero=1)
    return other if layout.dp < ranks else Layout(dp=ranks, zero=0 if layout.zero else 3)
