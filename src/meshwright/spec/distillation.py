"""The teacher of distillation as data: its layout on the ranks of a run, the layers that are compared, the projections
that the student gets, and the check that it can teach the model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_path
from meshwright.spec.refuse import refuse

if TYPE_CHECKING:
    from meshwright.recipe import Recipe


def read_teacher_config(recipe: Recipe) -> ModelConfig | None:
    """Read the model configuration of the teacher that `recipe` names (`distill.teacher`); None without a teacher.
    Raises `UserError` if the teacher's directory is missing or damaged, or Meshwright cannot run the model.
    """
    if recipe.distill.teacher is None:
        return None
    try:
        config = config_from_path(recipe.distill.teacher)
        if config.encoder or config.planning_only:
            raise UserError(f"{config.family} is an encoder" if config.encoder else str(config.planning_only))
    except UserError as error:
        raise UserError(f"{recipe.where('distill.teacher')}: distill.teacher: {error}") from None
    return config


def map_layers(recipe: Recipe, layers: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs (student's layer, teacher's layer) whose outputs distillation compares, as indices from 0; empty
    unless `distill.hidden` is true. The pairs are those in `distill.layer_map`, if given. Otherwise the teacher is
    divided into n equal parts, and the student's i-th layer is compared with the last layer of the i-th part (uniform
    mapping: Jiao et al. 2019, arXiv:1909.10351, section 3.1).

    recipe: recipe with the table [distill]. layers: n, number of the student's layers."""
    if not recipe.distill.hidden:
        return ()
    if recipe.distill.layer_map:
        return tuple((student, teacher) for student, teacher in recipe.distill.layer_map)
    teacher = read_teacher_config(recipe)
    assert teacher is not None, "checked by the recipe"
    return tuple((layer, max(0, (layer + 1) * teacher.layers // layers - 1)) for layer in range(layers))


def add_projections(config: ModelConfig, recipe: Recipe) -> ModelConfig:
    """Return `config` with the projections that the recipe's [distill] table needs: for each compared layer, a linear
    map from the model's hidden size to the teacher's hidden size."""
    pairs, teacher = map_layers(recipe, config.layers), read_teacher_config(recipe)
    if not pairs or teacher is None:
        return config
    return dataclasses.replace(config, projections=tuple((student, teacher.hidden) for student, _ in pairs))


def make_teacher_layout(layout: Layout, text: str, config: ModelConfig) -> Layout:
    """Return the layout of a teacher on the ranks of a run. layout: layout of the run. text: value of `distill.layout`,
    such as "same" or "zero3 tp1". config: configuration of the teacher. Raises `UserError` if `text` asks for tp1 and
    the run has pipeline or expert parallelism."""
    words = text.split()
    sharded = words[0] == "zero3" or (words[0] == "same" and layout.zero == 3)
    made = layout.with_(zero=3 if sharded else 0, hybrid=layout.hybrid if sharded else None, recompute="none")
    if not config.experts:
        made = made.with_(ep=1, etp=1)
    if "tp1" in words:
        if layout.pp > 1 or layout.expert_parallel:
            raise UserError(f'distill.layout "{text}" runs on dp, zero, hs, tp and cp alone, not on "{layout}"')
        made = made.with_(tp=1)
    return made


def check_teacher(recipe: Recipe, student: ModelConfig, layout: Layout | None = None) -> None:
    """Raise `UserError` unless the recipe's teacher can distil the model `student` (its configuration) on `layout`
    (None: on any). Nothing is checked if the recipe has no teacher.

    Checked are the sequence length, the pairs of layers that are compared, on-policy sampling, and the layout in which
    the teacher runs. The vocabularies are compared by `check_vocabularies` instead."""
    teacher, given = read_teacher_config(recipe), recipe.distill
    if teacher is None:
        return
    sequence = recipe.data.sequence
    if sequence > teacher.max_positions:
        raise UserError(f"distill.teacher has {teacher.max_positions} positions; shorten data.sequence {sequence}")
    for of_student, of_teacher in map_layers(recipe, student.layers):
        for whose, layer, layers in (("model", of_student, student.layers), ("teacher", of_teacher, teacher.layers)):
            if layer >= layers:
                raise UserError(
                    f"{recipe.where('distill.layer_map')}: distill.layer_map names layer {layer} of the {whose}, whose "
                    f"layers are 0 to {layers - 1}"
                )
    if given.on_policy and student.latent:
        raise UserError(f"distill.on_policy: latent attention (family {student.family}) is not sampled in training yet")
    if given.on_policy and recipe.data.records != "text" and recipe.data.pack:
        raise UserError("distill.on_policy continues the prompt of one example a sequence: set data.pack = false")
    if given.on_policy and (given.on_policy_prompt or 1) >= sequence:
        raise UserError(f"distill.on_policy_prompt {given.on_policy_prompt} leaves nothing of data.sequence {sequence}")
    if given.top_k >= teacher.vocabulary:
        raise UserError(f"distill.top_k {given.top_k} is not below the teacher's vocabulary of {teacher.vocabulary}")
    if layout is None:
        return
    refuse_comparison(layout, given.hidden, given.on_policy > 0)
    if not given.top_k:
        refuse_teacher(layout, given.layout, teacher, recipe.train.batch, sequence)


def refuse_comparison(layout: Layout, hidden: bool, on_policy: bool) -> None:
    """Raise `UserError` if the student cannot be compared with its teacher on the layout of a run. hidden: True if
    outputs of layers are compared; on_policy: True if the student samples the text of some steps."""
    if hidden and layout.pp > 1:
        raise UserError(
            f'layout "{layout}": distill.hidden compares layers that pipeline ranks do not hold together; leave pp out'
        )
    if on_policy and (layout.pp > 1 or layout.cp > 1 or (layout.tp > 1 and layout.tensor_sequence_parallel)):
        raise UserError(
            f'layout "{layout}": distill.on_policy samples on dp with any zero and on tpN:nosp; leave out '
            "pp, cp and tp's sequence parallelism"
        )


def refuse_teacher(
    layout: Layout, text: str, config: ModelConfig, batch: int, sequence: int, *, planning: bool = False
) -> None:
    """Raise `UserError` if the teacher cannot run on the ranks of a run. layout: layout of the run; text: value of
    `distill.layout`; config: configuration of the teacher; batch, sequence: sequences of a step, tokens of each;
    planning: see `refuse`."""
    try:
        refuse(make_teacher_layout(layout, text, config), config, batch, sequence, planning=planning)
    except UserError as error:
        raise UserError(f"distill.teacher on the run's ranks: {error}") from None


def check_vocabularies(recipe: Recipe, student: int, tokens: int | None) -> None:
    """Check that the next-token distributions of teacher and student can be compared; raise `UserError` if not. The
    check passes if both models have equally many token IDs, or if both have all IDs of a common tokenizer, so that any
    further IDs are padding.

    recipe: names the teacher. student: number of token IDs of the trained model. tokens: number of token IDs of the
    common tokenizer; None if it is unknown or not the teacher's."""
    teacher = read_teacher_config(recipe)
    if teacher is None:
        return
    common = min(teacher.vocabulary, student)
    if teacher.vocabulary != student and (tokens is None or common < tokens):
        raise UserError(
            f"{recipe.where('distill.teacher')}: distill.teacher has a vocabulary of {teacher.vocabulary:,} token IDs "
            f"and the model one of {student:,}: their distributions cannot be compared; use the teacher's tokenizer "
            f"and model.vocabulary = {teacher.vocabulary}"
        )
    if recipe.distill.top_k >= common:
        raise UserError(f"distill.top_k {recipe.distill.top_k} is not below the {common:,} token IDs of the model")


def fit_vocabulary(teacher: ModelConfig, student: int) -> ModelConfig:
    """Return the configuration `teacher` with its number of token IDs changed to `student`, the trained model's number,
    so that both models shard the vocabulary alike. Only padding IDs are removed from the end or added."""
    return dataclasses.replace(teacher, vocabulary=student)
