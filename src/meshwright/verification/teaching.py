"""Distillation in verification problems: a small teacher of another width and depth, and the loss by its definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model.initialise import initial_value
from meshwright.recipe import Recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.distillation import make_teacher_layout, read_teacher_config
from meshwright.spec.parameters import parameter_table
from meshwright.training.distillation_loss import DistillationLoss, make_distillation

Weights = Mapping[str, torch.Tensor]  # model parameter -> its values, [output, input] for matrices


@dataclass(frozen=True, slots=True)
class DistillationSettings:
    """Settings of distillation in a verification problem.

    loss: settings of the loss. teacher: configuration of the teacher, whose parameters are random. layout: how the
    teacher is sharded, a value of `distill.layout`."""

    loss: DistillationLoss
    teacher: ModelConfig
    layout: str = "same"

    def scale_down(
        self, layout: Layout, student: ModelConfig, scale: Callable[[ModelConfig], ModelConfig]
    ) -> DistillationSettings:
        """Return these settings with a scaled-down teacher for `student`, a scaled-down model on `layout`. The
        teacher's hidden size differs from the student's if the teacher's model family allows that. scale: function that
        scales a configuration down. Raises `UserError` if hidden states cannot be compared."""
        make_teacher_layout(layout, self.layout, self.teacher)
        teacher = dataclasses.replace(scale(self.teacher), vocabulary=student.vocabulary)
        try:
            teacher = dataclasses.replace(teacher, hidden=2 * teacher.hidden)
        except UserError:
            pass
        loss = self.loss
        if loss.layer_map:
            if layout.pp > 1:
                raise UserError(f'layout "{layout}": distill.hidden compares layers of one pipeline rank; leave pp out')
            ends = {(0, 0), (student.layers - 1, teacher.layers - 1)}
            loss = dataclasses.replace(loss, layer_map=tuple(sorted(ends)))
        return dataclasses.replace(self, loss=loss, teacher=teacher)

    def add_projections(self, student: ModelConfig) -> ModelConfig:
        """Return the configuration of the student with linear projections of its hidden states to the teacher's hidden
        size, for the layers that are compared."""
        pairs = tuple((layer, self.teacher.hidden) for layer, _ in self.loss.layer_map)
        return dataclasses.replace(student, projections=pairs)

    def to_table(self) -> dict[str, object]:
        """Return the [distill] table of a recipe with these settings; the teacher's directory is a placeholder."""
        loss = self.loss
        table: dict[str, object] = {
            "teacher": "synthetic", "loss": loss.divergence, "temperature": loss.temperature, "mixing": loss.mixing,
            "layout": self.layout,
        }  # fmt: skip
        if loss.divergence == "jsd":
            table["beta"] = loss.beta
        if loss.layer_map:
            pairs = [list(pair) for pair in loss.layer_map]
            table |= {"hidden": True, "hidden_weight": loss.hidden_weight, "layer_map": pairs}
        return table

    def make_weights(self, seed: int, dtype: torch.dtype) -> Weights:
        """Return the teacher's parameters, drawn from `seed` and rounded to `dtype`, as float64 tensors."""
        return {
            tensor.name: torch.cat([
                (value.T if entry.transposed else value).to(dtype).double().reshape(entry.model_shape)
                for entry in tensor.entries
                for value in (initial_value(entry, seed),)
            ])
            for tensor in parameter_table(self.teacher).tensors
        }  # fmt: skip


class ReferenceTeacher(NamedTuple):
    """Teacher of a distillation problem for the single-device reference. teaching: distillation settings. weights: the
    teacher's parameters, by the training engine's names."""

    teaching: DistillationSettings
    weights: Weights


def make_distillation_settings(recipe: Recipe) -> DistillationSettings | None:
    """Return the settings of the distillation that a recipe describes; None if the recipe names no teacher."""
    teacher = read_teacher_config(recipe)
    loss = make_distillation(recipe, layers=1 << 20 if recipe.distill.layer_map else 1)
    if teacher is None or loss is None:
        return None
    return DistillationSettings(loss, teacher, recipe.distill.layout)


def compute_distillation_loss(
    loss: DistillationLoss, logits_BSV: torch.Tensor, wanted_BSV: torch.Tensor, hard_BS: torch.Tensor
) -> torch.Tensor:
    """Return the distillation loss of each token [B, S] by its definition (Hinton et al. 2015; Agarwal et al. 2023, eq.
    2). logits_BSV: logits of the student. wanted_BSV: logits of the teacher. hard_BS: cross-entropy of the text."""
    q, p = (torch.softmax(each / loss.temperature, dim=-1) for each in (logits_BSV, wanted_BSV))
    m = {"forward_kl": q, "reverse_kl": p}.get(loss.divergence, loss.beta * p + (1 - loss.beta) * q)
    share = {"forward_kl": 1.0, "reverse_kl": 0.0}.get(loss.divergence, loss.beta)
    divergence_BS = share * (p * (p.log() - m.log())).sum(-1) + (1 - share) * (q * (q.log() - m.log())).sum(-1)
    return loss.mixing * hard_BS + (1 - loss.mixing) * loss.temperature**2 * divergence_BS


def compute_hidden_loss(
    loss: DistillationLoss, weights: Weights, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]
) -> torch.Tensor | float:
    """Return for each token [B, S] the loss between hidden states of student and teacher; 0 if no layers are compared.
    weights: parameters of the student, including the projections of its hidden states to the teacher's hidden size.
    ours, theirs: outputs [B, S, H] of all layers of the student and of the teacher."""
    total: torch.Tensor | float = 0.0
    for student, teacher in loss.layer_map:
        difference = ours[student] @ weights[f"projections.{student}.weight"].T - theirs[teacher]
        total = total + loss.hidden_weight * (difference**2).mean(dim=-1) / len(loss.layer_map)
    return total
