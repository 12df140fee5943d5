"""Runs a pipeline program on this rank of an axis: its steps in their order, and the messages between stages.

A group's messages are posted together. What arrives is waited for where a step reads it. What leaves is kept until its
receiver is known to have it, which is when something comes back that the receiver made after using it. Stages that
follow each other on one rank hand their tensors on without a copy. What a step computes is not known here: a model's
stage, or a nap (`Compute`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
import torch

from meshwright.comm.collectives import all_reduce, barrier, transfer
from meshwright.comm.handle import Handle
from meshwright.comm.mesh import Axis, Mesh
from meshwright.comm.transport import Message
from meshwright.errors import UserError
from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.consumed_sends import Value, find_carried_value, find_consumed_sends, find_read_value
from meshwright.program.dataflow import GRADIENT, OUTPUT
from meshwright.program.pipeline import ARRIVING, COMPUTING, Kind, PipelineProgram
from meshwright.schedules.transfers import with_transfers

ACTIVATION_SITE = "pipeline.activations"
GRADIENT_SITE = "pipeline.gradients"
START_SITE = "pipeline.start"
PROGRAM_SITE = "start.program"


class Compute(Protocol):
    """What the steps of a program do. Tensors come without history and leave with or without one."""

    def forward(self, stage: int, replica: int, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        """The stage's output, given what enters it. The first stage gets None; the last one keeps its loss and returns
        None."""

    def backward(self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of what entered the stage (of the first stage: None), given that of its output (of the last
        stage: None); and those of its weights."""

    def input_gradient(
        self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None
    ) -> torch.Tensor | None:
        """As `backward`, but the gradients of weights wait for `weight_gradient`."""

    def weight_gradient(self, stage: int, replica: int, micro_batch: int) -> None:
        """What `input_gradient` has left to do."""

    def buffer(self, stage: int, replica: int, micro_batch: int) -> torch.Tensor:
        """Memory for what enters `stage`; its gradient has the same shape and dtype. Contiguous, with any values."""


def check_same_everywhere(program: PipelineProgram, mesh: Mesh) -> None:
    """Raises UserError on every rank of `mesh` where one has another program than rank 0: ranks search or read theirs
    on their own, and with two of them they would wait for messages that nobody sends. Its name does not count."""
    if mesh.pp.size == 1:
        return
    digest = hashlib.sha256(repr((program.ranks, program.micro_batches, program.placement)).encode())
    for column in fields(program.steps):
        digest.update(np.asarray(getattr(program.steps, column.name), np.int64).tobytes())
    found = torch.zeros(mesh.world_size, dtype=torch.int64, device=mesh.device)
    found[mesh.rank] = int.from_bytes(digest.digest()[:7], "little")
    all_reduce(found, mesh.world, PROGRAM_SITE)
    digests = found.tolist()
    others = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if others:
        schedule = mesh.layout.schedule
        why = "is the file" if schedule.startswith("@") else "is the version of meshwright"
        raise UserError(
            f"the pipeline's program {schedule} of rank {others[0]} is another than that of rank 0; {why} the same on "
            f"every host?"
        )


@dataclass(frozen=True, slots=True)
class _Step:
    kind: Kind
    stage: int
    replica: int
    micro_batch: int
    reads: Value | None  # from another stage
    makes: Value | None  # for another stage
    answers: tuple[Value, ...]  # what this rank sent and others have used, once what this step reads is there


@dataclass(frozen=True, slots=True)
class _Transfer:
    value: Value
    peer: int
    arrives: bool
    enters: int  # the stage whose input it is, or the gradient of whose input
    site: str
    name: str


@dataclass(frozen=True, slots=True)
class _Group:
    """Computation or transfers, never both."""

    steps: list[_Step]
    transfers: list[_Transfer]


class Pipeline:
    """A program made ready for this rank of `axis`: transfers are added where it has none, and all of it is checked.

    Raises ProgramError for a program that does not hold.
    """

    def __init__(self, program: PipelineProgram, axis: Axis) -> None:
        assert program.ranks == axis.size, (program.name, program.ranks, axis.size)
        assert not program.asynchronous, f"{program.name} updates weights while micro-batches are under way"
        assert not program.steps.component.any(), f"{program.name} cuts layers into their parts"
        self.program, self.axis = with_transfers(program), axis
        self.checked = check_pipeline(self.program)
        self._groups = _groups_of(self.program, axis.rank)
        if not axis.trivial and axis.communicator.device.type == "cuda":
            barrier(axis, START_SITE)  # NCCL connects a group at its first call, in which all of its ranks take part

    def run(self, compute: Compute) -> None:
        """Take this rank's steps. Raises RankLost when a neighbour does not answer."""
        _Run(self.axis, compute).take(self._groups)

    def run_forwards(self, compute: Compute, micro_batches: int) -> None:
        """Take the forwards of the first `micro_batches` alone, in the same order. Raises RankLost."""
        groups = []
        for group in self._groups:
            steps = [
                replace(step, answers=())  # who gets nothing back learns at the end that it has been used
                for step in group.steps
                if step.kind == Kind.FORWARD and step.micro_batch < micro_batches
            ]
            transfers = [each for each in group.transfers if each.value[0] == OUTPUT and each.value[3] < micro_batches]
            if steps or transfers:
                groups.append(_Group(steps, transfers))
        _Run(self.axis, compute).take(groups)


class _Run:
    """The tensors of one run that are between two stages."""

    def __init__(self, axis: Axis, compute: Compute) -> None:
        self.axis, self.compute = axis, compute
        self.here: dict[Value, torch.Tensor] = {}  # made on this rank: for a stage here, or to be sent
        self.arriving: dict[Value, tuple[Handle, torch.Tensor]] = {}
        self.leaving: dict[Value, Handle] = {}  # each holds its tensor

    def take(self, groups: list[_Group]) -> None:
        for group in groups:
            if group.transfers:
                self.post(group.transfers)
            for step in group.steps:
                self.step(step)
        for handle in self.leaving.values():
            handle.wait()
        assert not self.here and not self.arriving, "a checked program uses whatever it makes"

    def post(self, group: list[_Transfer]) -> None:
        """Post a group's messages together."""
        messages = []
        for each in group:
            _, replica, _, micro_batch = each.value
            tensor = (
                self.compute.buffer(each.enters, replica, micro_batch) if each.arrives else self.here.pop(each.value)
            )
            messages.append(Message(tensor.contiguous(), each.peer, each.arrives, each.site, each.name))
        for each, message, handle in zip(group, messages, transfer(messages, self.axis), strict=True):
            if each.arrives:
                self.arriving[each.value] = handle, message.tensor
            else:
                self.leaving[each.value] = handle

    def step(self, step: _Step) -> None:
        """Compute one step; no reference to what it read stays here."""
        where = step.stage, step.replica, step.micro_batch
        if step.kind == Kind.WEIGHT_GRADIENT:
            self.compute.weight_gradient(*where)
            return
        take = {
            Kind.FORWARD: self.compute.forward,
            Kind.BACKWARD: self.compute.backward,
            Kind.INPUT_GRADIENT: self.compute.input_gradient,
        }[step.kind]
        made = take(*where, self.read(step))
        assert (made is None) == (step.makes is None), f"{step}: the wrong end of the pipeline"
        if made is not None and step.makes is not None:
            self.here[step.makes] = made.detach()

    def read(self, step: _Step) -> torch.Tensor | None:
        """What a step reads from another stage, once it is there."""
        if step.reads is None:
            return None
        if step.reads in self.here:
            return self.here.pop(step.reads)
        handle, tensor = self.arriving.pop(step.reads)
        handle.wait()
        for value in step.answers:
            self.leaving.pop(value).wait()
        return tensor


def _groups_of(program: PipelineProgram, rank: int) -> list[_Group]:
    """This rank's steps, group by group."""
    s, last = program.steps, program.stages - 1
    answers = find_consumed_sends(program, rank)
    groups: list[_Group] = []
    for at in s.of_rank(rank):
        if not groups or s.group[at] != s.group[at - 1]:
            groups.append(_Group([], []))
        kind, stage = Kind(int(s.kind[at])), int(s.stage[at])
        replica, micro_batch = int(s.replica[at]), int(s.micro_batch[at])
        if kind in COMPUTING:
            makes = None
            if kind == Kind.FORWARD and stage < last:
                makes = OUTPUT, replica, stage, micro_batch
            elif kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and stage > 0:
                makes = GRADIENT, replica, stage, micro_batch
            what = find_read_value(program, at)
            groups[-1].steps.append(_Step(kind, stage, replica, micro_batch, what, makes, tuple(answers.get(at, ()))))
        else:
            value = find_carried_value(program, at)
            enters, site = (value[2] + 1, ACTIVATION_SITE) if value[0] == OUTPUT else (value[2], GRADIENT_SITE)
            arrives, name = kind in ARRIVING, program.describe(at)
            groups[-1].transfers.append(_Transfer(value, program.find_peer(at), arrives, enters, site, name))
    return groups
