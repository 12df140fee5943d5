"""Small training problems on which a layout is verified, each for features that the others do not cover."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from meshwright.layout import Layout
from meshwright.model.preference import Preference
from meshwright.model.tiled_attention import TILE_QUERIES
from meshwright.schedules.library import generate_for_layout
from meshwright.spec.chunks import CHUNK_LOGITS
from meshwright.spec.config import ModelConfig
from meshwright.spec.refuse import refuse
from meshwright.verification.problem import ADAMW, SGD, Problem, choose_sequence_length, scale_down_config


@dataclass(frozen=True, slots=True)
class Case:
    """Verification case: a training problem with a name, such as "updates".

    problem: model, data and optimizer. resume_layout: layout on which the last steps run; they resume from the
    checkpoint that the verified layout saved after the first steps. None: all steps run on the verified layout.
    """

    name: str
    problem: Problem
    resume_layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class CaseBuilder:
    """Builder of the verification cases (named small training problems) for one layout and model.

    layout: layout to be verified. config: model, which is scaled down before use. dtype: parameter dtype, "float64" or
    "float32". preference: loss of preference pairs, such as DPO; None: next-token loss. batch: global batch in
    sequences; a value that is not a multiple of dp x micro-batches is replaced by the smallest such multiple of at
    least 8. compiled: True if the recipe trains under torch.compile.
    """

    layout: Layout
    config: ModelConfig
    dtype: str = "float64"
    preference: Preference | None = None
    batch: int = 8
    compiled: bool = False

    def default(self) -> list[Case]:
        """Return the default cases: "updates" (optimizer updates with clipping and resumes), "long sequences" (SGD,
        several attention tiles) and "dtypes" (parameters in a narrower dtype than their master weights). If the recipe
        compiles, add a step under torch.compile with backend "aot_eager", which runs the traced graphs without
        generating code and makes the verification slower."""
        cases = [Case("updates", self.updates()), Case("long sequences", self.long()), Case("dtypes", self.dtypes())]
        return [*cases, *([self.compiled_by("aot_eager")] if self.compiled else [])]

    def thorough(self) -> list[Case]:
        """Return all cases: the default ones, SGD without fused gradient accumulation, a loss in several chunks, bf16,
        a resume on another layout and, if the recipe compiles, a step of generated code."""
        return [
            *self.default(),
            Case("sgd", dataclasses.replace(self.plain(), training=SGD, fused_gradient_accumulation=False)),
            Case("loss chunks", self.loss_chunks()),
            self.bf16(),
            Case("resume on another layout", self.updates(self.layout.world_size), choose_other_layout(self.layout)),
            *([self.compiled_by("inductor")] if self.compiled else []),
        ]

    def plain(self, layers: int = 5) -> Problem:
        """Return a problem of three steps of plain SGD on short sequences. layers: minimum number of layers of the
        model."""
        config = self._config(layers)
        sequence = choose_sequence_length(self.layout)
        return self._checked(Problem(config, self._batch(), self.dtype, sequence, preference=self.preference))

    def updates(self, ranks: int = 1, layers: int = 5) -> Problem:
        """Return a problem of four steps with weight decay and active clipping, one non-finite step, and two resumes:
        right after the skipped step, and one step later. In float64: AdamW with a dynamic loss scale; in float32: SGD,
        as AdamW's updates of near-zero gradients depend on rounding. ranks: the batch becomes a multiple of this
        number. layers: minimum number of layers."""
        training = ADAMW if self.dtype == "float64" else dataclasses.replace(SGD, clip=0.5)
        plain = self.plain(layers)
        batch = math.lcm(plain.batch, ranks)
        return dataclasses.replace(plain, batch=batch, training=training, steps=4, nan_step=1, resumed_at=(2, 3))

    def long(self) -> Problem:
        """Return a problem of one SGD step on sequences of several attention tiles, with one or many documents; under
        ring attention, each rank's slices are longer than a tile."""
        ring = self.layout.cp > 1 and self.layout.cp_method == "ring"
        wanted = 2 * self.layout.cp * (TILE_QUERIES + 9) if ring else 2 * TILE_QUERIES + 45
        return self._of_length(wanted, self._config(2))

    def loss_chunks(self) -> Problem:
        """Return a problem of one step on a vocabulary so large that the loss of a micro-batch is computed in several
        chunks."""
        tokens = 4 * TILE_QUERIES + 45
        vocabulary = CHUNK_LOGITS["cpu"] // tokens + 11
        config = dataclasses.replace(self._config(1), vocabulary=vocabulary * self.layout.tp)
        problem = self._of_length(tokens * self.layout.cp, config)
        return dataclasses.replace(problem, batch=self.layout.dp * self.layout.micro_batches)

    def dtypes(self) -> Problem:
        """Return a problem of two SGD steps whose parameters have half the width of their master weights, which shows
        parameters that were not rounded from their master weights."""
        narrow = {"float64": "float32", "float32": "bfloat16"}[self.dtype]
        plain = dataclasses.replace(self.plain(2), training=SGD, steps=2)
        return dataclasses.replace(plain, dtype=narrow, master_dtype=self.dtype)

    def bf16(self) -> Case:
        """Return a case of three SGD steps with bf16 parameters and float32 master weights, as in bf16 training."""
        return Case("bf16", dataclasses.replace(self.plain(), dtype="bfloat16", master_dtype="float32", training=SGD))

    def compiled_by(self, backend: str) -> Case:
        """Return a case of one training step and a validation in which the layers, final norm and loss run under
        torch.compile. The model has two layers (with pipeline stages at least one more than stages), enough for every
        kind of layer that it has. backend: of torch.compile, "aot_eager" or "inductor"."""
        problem = dataclasses.replace(self.plain(2), training=SGD, steps=1, compile_backend=backend)
        return Case(f"compiled by {backend}", problem)

    def _of_length(self, tokens: int, config: ModelConfig) -> Problem:
        """Return a problem of one SGD step on sequences of at least `tokens` tokens. config: the model."""
        sequence = choose_sequence_length(self.layout, tokens)
        window = None if config.sliding_window is None else TILE_QUERIES + 9
        config = dataclasses.replace(config, max_positions=2 * sequence, sliding_window=window)
        return self._checked(Problem(config, self._batch(), self.dtype, sequence, 1, SGD, preference=self.preference))

    def _config(self, layers: int) -> ModelConfig:
        """Return the model scaled down for the layout. layers: minimum number of layers; with pipeline stages there is
        at least one layer more than stages."""
        layout = self.layout
        layers = max(layers, generate_for_layout(layout).stages + (layout.pp > 1))  # uneven: one stage has a layer more
        ulysses = layout.cp if layout.cp_method == "ulysses" else 1
        return scale_down_config(self.config, layout.tp, ulysses, layers, layout.ep, layout.etp)

    def _batch(self) -> int:
        """Return the global batch in sequences: `batch` if it is a multiple of dp x micro-batches, else the smallest
        such multiple of at least 8."""
        share = self.layout.dp * self.layout.micro_batches
        return share * math.ceil(8 / share) if self.batch % share else self.batch

    def _checked(self, problem: Problem) -> Problem:
        """Return `problem` unchanged; `UserError` if the layout cannot run its model, batch and sequence length."""
        refuse(self.layout, problem.config, problem.batch, problem.sequence, self.layout.world_size)
        return problem


def choose_other_layout(layout: Layout) -> Layout:
    """Return a layout on the same number of ranks that differs from `layout` as much as possible: data parallelism
    alone, with another ZeRO stage; on one rank, another number of micro-batches."""
    ranks = layout.world_size
    if ranks == 1:
        return Layout(micro_batches=1 if layout.micro_batches > 1 else 2)
    other = Layout(dp=ranks, zero=1)
    return other if layout.dp < ranks else Layout(dp=ranks, zero=0 if layout.zero else 3)
