"""The teacher of distillation on one rank: a frozen model on the run's own ranks, which only runs forward.

It has the tensor, context, expert and pipeline parallelism of the run (or is left unsharded over tp). Its parameters
are replicated over data-parallel ranks, or sharded as under ZeRO-3.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from meshwright.comm.mesh import EXPERT_AXES, Axis, Mesh
from meshwright.layout import Layout
from meshwright.model.checkpoint_files import CheckpointFiles
from meshwright.model.documents import MicroBatch
from meshwright.model.huggingface import match_entries, read_entry
from meshwright.model.loss import OutputHead
from meshwright.model.transformer import Transformer
from meshwright.parallel.flat_buffers import make_slice_reader
from meshwright.parallel.parallelize import build_axes
from meshwright.parallel.pipeline import Key, Pipeline
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.program.pipeline import Kind
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_path
from meshwright.spec.distillation import make_teacher_layout
from meshwright.spec.parameter_entries import ParameterEntry
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.stage_times import program_for


class Teacher:
    """Frozen teacher model of distillation on one rank, which runs forward passes only.

    config: architecture of the teacher, with the student's number of token IDs (`spec.distillation.fit_vocabulary`).
    mesh: device mesh of the run. layout_and_sequence: pair of the recipe's `distill.layout`, which selects how the
    teacher is sharded, and the number of tokens of a sequence. dtype: dtype of the parameters. layers: indices of the
    layers whose outputs are returned. seed: seed of random parameters; None: `load` reads the parameters. Raises
    `UserError` if the teacher cannot run on the layout. Collective.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        layout_and_sequence: tuple[str, int],
        dtype: torch.dtype,
        layers: Sequence[int] = (),
        seed: int | None = None,
    ) -> None:
        self.config, self.layers, (text, sequence) = config, tuple(layers), layout_and_sequence
        self.mesh = mesh = _make_teacher_mesh(mesh, make_teacher_layout(mesh.layout, text, config))
        table = parameter_table(config).frozen
        program = program_for(mesh.layout, config, sequence)
        partition = Partition.of(program, config, table, sequence)
        self._model = Transformer(
            config, axes=build_axes(mesh), device="meta", dtype=dtype, stages=partition.stages_on(mesh.pp.rank)
        )
        self._model.requires_grad_(False)
        self.engine = ZeroEngine(self._model, table, mesh, seed=seed, parameter_dtype=dtype, partition=partition)
        self._pipeline = Pipeline(program, mesh.pp)

    def load(self, directory: Path) -> None:
        """Load the teacher's weights from a Hugging Face directory. Embedding and output head are cut, or padded with
        zero rows, to the vocabulary of `config`. `UserError` if the weights are damaged or of another model."""
        files, stored = CheckpointFiles(directory), config_from_path(directory)
        names = match_entries(files, parameter_table(stored), stored)

        def read(entry: ParameterEntry) -> torch.Tensor:
            """Return the value of a parameter entry, with as many rows as the entry."""
            value = read_entry(files, entry, names)
            rows, wanted = value.shape[0], entry.disk_shape[0]
            if rows == wanted:
                return value
            return torch.cat([value[:wanted], value.new_zeros(max(0, wanted - rows), *value.shape[1:])])

        self.engine.load(make_slice_reader(read))

    @torch.no_grad()
    def run(self, micro_batches: Sequence[MicroBatch]) -> dict[int, TeacherStates]:
        """Run the teacher's forward pass on `micro_batches`. Return {index of a micro-batch: the teacher's hidden
        states} for the micro-batches whose last pipeline stage is on this rank. The parameters of the output head stay
        unsharded until the next call. Collective."""
        forward = _Forward(self, micro_batches)
        self._pipeline.run_forwards(forward, len(micro_batches))
        if forward.found:
            self.engine.prefetchers[self.engine.partition.stages[-1].index].enter("head", None)
        return forward.found

    def output_head(self, student: Axis) -> OutputHead:
        """Return the teacher's output head for the token IDs of this rank's slice of the student's vocabulary. student:
        mesh axis tp of the run, over which the student's vocabulary is sharded."""
        head = self._model.output_head()
        if self.mesh.tp.size == student.size:
            return head
        width = -(-self.config.vocabulary // student.size)
        return head._replace(weight_VH=head.weight_VH[student.rank * width : (student.rank + 1) * width])


@dataclasses.dataclass(frozen=True, slots=True)
class TeacherStates:
    """Hidden states of the teacher for a micro-batch of T tokens.

    states_TH: final hidden states, the input of the output head. layers: {index of a layer: its output [B, S, H]} (with
    sequence parallelism this tp rank's slice of the tokens)."""

    states_TH: torch.Tensor
    layers: dict[int, torch.Tensor]


class _Forward:
    """Executor of the forwards of the pipeline stages of `teacher` on this rank, for `micro_batches` (implements
    `parallel.pipeline.Compute`). Attribute `found`: {index of a micro-batch: the teacher's hidden states}, for the
    micro-batches whose last stage is on this rank."""

    def __init__(self, teacher: Teacher, micro_batches: Sequence[MicroBatch]) -> None:
        self._teacher, self._micro_batches = teacher, micro_batches
        self.found: dict[int, TeacherStates] = {}

    def run(self, kind: Kind, key: Key, x: torch.Tensor | None) -> torch.Tensor | None:
        """Run the forward of a micro-batch through one pipeline stage and return the stage's output; None for the last
        stage.

        kind: always forward; key: indices (stage, replica, micro-batch); x: the stage's input, None for the first
        stage."""
        assert kind == Kind.FORWARD
        engine, model = self._teacher.engine, self._teacher._model
        stage, units = engine.partition.stages[key[0]], engine.prefetchers[key[0]]
        units.keeps_last = False
        tokens_BS, _, documents = self._micro_batches[key[2]]
        model.layer_outputs = dict.fromkeys(self._teacher.layers)
        out_BSH = model.hidden(tokens_BS, documents, units, stage=stage, x_BSH=x)
        if not stage.last:
            return out_BSH
        self.found[key[2]] = TeacherStates(out_BSH.flatten(0, 1), model.layer_outputs)
        model.layer_outputs = {}
        return None

    def buffer(self, key: Key) -> torch.Tensor:
        """Return an uninitialised buffer [B, S, H] in which the input of a pipeline stage is received (with sequence
        parallelism, S is the length of this tp rank's token slice). key: indices (stage, replica, micro-batch)."""
        tokens_BS, mesh = self._micro_batches[key[2]].tokens_BS, self._teacher.mesh
        rows, sequence = tokens_BS.shape
        if mesh.layout.tensor_sequence_parallel:
            sequence //= mesh.tp.size
        shape = rows, sequence, self._teacher.config.hidden
        return torch.empty(shape, dtype=self._teacher.engine.parameter_dtype, device=mesh.device)


def _make_teacher_mesh(mesh: Mesh, layout: Layout) -> Mesh:
    """Return the device mesh of a teacher: the ranks of the run's `mesh` with the teacher's `layout`. If the run has tp
    and the teacher has not, all ranks along tp hold the same parameters of the teacher."""
    changed = copy.copy(mesh)
    changed.layout = layout
    if layout.tp != mesh.tp.size:
        changed.tp = Axis("tp", (mesh.rank,), 0, None, mesh.communicator)
        changed.rank = mesh.rank // mesh.tp.size
    if not layout.expert_parallel:
        for name, same in EXPERT_AXES.items():
            setattr(changed, name, getattr(mesh, same))
    return changed
