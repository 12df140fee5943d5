"""Costs of distillation: forward FLOPs of the teacher, and the all-reduces of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.layout import Layout
from meshwright.spec import distillation
from meshwright.spec.config import ModelConfig
from meshwright.spec.flops import forward_flops_per_token, training_flops_per_token

if TYPE_CHECKING:
    from meshwright.recipe import Recipe


@dataclass(frozen=True, slots=True)
class TeacherWork:
    """Sizes of the teacher model in a distillation step.

    Attributes:
        config: The teacher's model config; its vocabulary size is set to the student's.
        held: How the teacher is sharded: value of the recipe's `distill.layout`, such as "same".
        item_bytes: Bytes of an element of the teacher's parameters; 0: as the student's.
        top_k: Number of cached logits per token if the teacher's outputs are read from a cache; 0 if the teacher runs
            in every step.
        projected: Number of the teacher's layers whose outputs are compared with the student's.
        divergence: Divergence of the loss, such as "forward_kl".
        on_policy: True if the student samples the text of some steps.
    """

    config: ModelConfig
    held: str = "same"
    item_bytes: int = 0
    top_k: int = 0
    projected: int = 0
    divergence: str = "forward_kl"
    on_policy: bool = False

    def refuse(self, layout: Layout, batch: int, sequence: int) -> None:
        """Raise `UserError` if the teacher cannot run on the ranks of a layout, as training does. batch, sequence:
        sequences of a step, tokens of each."""
        distillation.refuse_comparison(layout, self.projected > 0, self.on_policy)
        if not self.top_k:
            distillation.refuse_teacher(layout, self.held, self.config, batch, sequence, planning=True)

    def forward_flops_per_token(self, sequence: int) -> float:
        """Return the FLOPs of the teacher's forward for one token; 0 if its outputs are cached. sequence: tokens that
        attend to each other."""
        return 0.0 if self.top_k else sum(forward_flops_per_token(self.config, sequence).values())

    def compute_share(self, student: ModelConfig, sequence: int) -> float:
        """Return (FLOPs of the teacher) / (FLOPs of training the student) for one token. sequence: tokens that attend
        to each other."""
        return self.forward_flops_per_token(sequence) / training_flops_per_token(student, sequence)

    def list_sums(self, layout: Layout) -> list[tuple[str, int]]:
        """Return (call site, number of values per token) for each all-reduce over tp in the distillation loss; an empty
        list without tp."""
        last = ("distill.top_k", self.top_k) if self.top_k else ("distill.divergence", 2)
        return [("distill.maximum", 2), ("distill.sum", 2), last] if layout.tp > 1 else []


def make_teacher_work(recipe: Recipe, student: ModelConfig) -> TeacherWork | None:
    """Return the sizes of the teacher that a recipe names; None without one. student: configuration of the trained
    model. Raises `UserError` if the teacher's configuration cannot be read."""
    config, given = distillation.read_teacher_config(recipe), recipe.distill
    if config is None:
        return None
    distillation.check_teacher(recipe, student)
    size = {None: 0, "float64": 8, "float32": 4}.get(given.dtype, 2)
    projected = len({teacher for _, teacher in distillation.map_layers(recipe, student.layers)})
    config = distillation.fit_vocabulary(config, student.vocabulary)
    return TeacherWork(config, given.layout, size, given.top_k, projected, given.loss, given.on_policy > 0)
