"""Costs of distillation: forward FLOPs of the teacher, and the all-reduces of the loss."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.layout import Layout
from meshwright.planner.cost.flops import forward_flops_per_token, training_flops_per_token
from meshwright.recipe import Recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.distillation import map_layers, read_teacher_config


@dataclass(frozen=True, slots=True)
class TeacherWork:
    """The teacher of a training step. config: its model; held: a value of `distill.layout`; item_bytes: of its
    parameters, 0: as the run's; top_k: number of cached tokens, 0: it runs; projected: number of its layers whose
    outputs are held and compared."""

    config: ModelConfig
    held: str = "same"
    item_bytes: int = 0
    top_k: int = 0
    projected: int = 0

    def forward_flops_per_token(self, sequence: int) -> float:
        """Return the floating-point operations of the teacher for one token; 0 with a cache."""
        return 0.0 if self.top_k else sum(forward_flops_per_token(self.config, sequence).values())

    def compute_share(self, student: ModelConfig, sequence: int) -> float:
        """Return the teacher's operations of a step relative to those of training the student."""
        return self.forward_flops_per_token(sequence) / training_flops_per_token(student, sequence)

    def list_sums(self, layout: Layout) -> list[tuple[str, int]]:
        """Return (call site, numbers per token) of the all-reduces over tp of the distillation loss."""
        if layout.tp == 1:
            return []
        if self.top_k:
            return [("distill.maximum", 2), ("distill.sum", 2), ("distill.top_k", self.top_k)]
        return [("distill.maximum", 2), ("distill.sum", 2), ("distill.divergence", 2)]


def make_teacher_work(recipe: Recipe, layers: int) -> TeacherWork | None:
    """Return the teacher that a recipe names, as the planner counts it; None without one. layers: number of layers of
    the student. Raises `UserError` if the teacher's configuration cannot be read."""
    config, given = read_teacher_config(recipe), recipe.distill
    if config is None:
        return None
    size = {None: 0, "float64": 8, "float32": 4}.get(given.dtype, 2)
    projected = len({teacher for _, teacher in map_layers(recipe, layers)})
    return TeacherWork(config, given.layout, size, given.top_k, projected)
