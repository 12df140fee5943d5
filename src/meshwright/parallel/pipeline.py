"""Pipeline parallelism: ranks hold consecutive layers and work on different micro-batches (GPipe: Huang et al. 2018,
arXiv:1811.06965; 1F1B: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; zero bubble: Qi et al. 2024,
arXiv:2401.10241).

Idea: the order of forwards, backwards, sends and receives of each rank is data, a pipeline program; this runtime
executes any checked program as it is written. What a step computes is supplied by a `Compute`.
Mathematics: stage s computes x_(s+1) = f_s(x_s) of each micro-batch, and from the gradient of x_(s+1) those of x_s and
of its weights; a split backward computes the two separately. Gradients of micro-batches are summed.
Communication: x_s goes to the rank of stage s, its gradient returns; consecutive stages on one rank pass tensors
without a copy. A sent tensor is kept until its receiver is known to have used it.
Overlap: the transfers of a group are posted together, and a receive is waited for only when a step reads it.
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


Key = tuple[int, int, int]
"""Indices of a compute step: stage, replica (model copy; bidirectional schedules have several), micro-batch."""


class Compute(Protocol):
    """Interface of the object that executes the compute steps of a pipeline program. Tensors passed to its methods have
    no autograd history; returned tensors may have one."""

    def run(self, kind: Kind, key: Key, x: torch.Tensor | None) -> torch.Tensor | None:
        """Run one compute step of a micro-batch through a stage. There are four kinds:

        * forward: `x` is the stage's input (None on the first stage). Return the stage's output; the last stage keeps
          the loss and returns None;
        * backward: `x` is the gradient of the stage's output (None on the last stage). Compute the weight gradients,
          and return the input gradient (None on the first stage);
        * input gradient (B pass of a split backward): `x` and the result are as in backward, but the weight gradients
          are deferred;
        * weight gradient (W pass): compute the deferred weight gradients. `x` and the result are None.

        `kind`: one of these four kinds; `key`: indices (stage, replica, micro-batch), where replica counts the model
        copies of a bidirectional schedule (else 0)."""

    def buffer(self, key: Key) -> torch.Tensor:
        """Return an uninitialised contiguous buffer for receiving a stage's input, or the input's gradient, from
        another rank; it has the shape and dtype of the input.

        `key`: indices (stage, replica, micro-batch), where replica counts the model copies of a bidirectional schedule.
        """


def check_programs_match(program: PipelineProgram, mesh: Mesh) -> None:
    """Raise UserError on every rank if any rank's pipeline program differs from rank 0's. Each rank generates or reads
    the program by itself, and different programs would deadlock. The programs' names are not compared. Collective over
    all ranks of `mesh`."""
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
        cause = "file" if schedule.startswith("@") else "version of meshwright"
        raise UserError(
            f"the pipeline program {schedule} of rank {others[0]} differs from that of rank 0; is the {cause} the "
            "same on every host?"
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """One compute step of a pipeline program on this rank. A value is an activation or its gradient, as (output or
    gradient, replica, stage, micro-batch).

    `kind`: forward, backward, B or W pass. `key`: indices (stage, replica (model copy), micro-batch). `reads`: value of
    another stage that the step needs; `produces`: value that it computes for another stage; None: no value.
    `acknowledges`: values that this rank sent earlier, and whose memory can be released once `reads` has arrived,
    because the receiver has then used them."""

    kind: Kind
    key: Key
    reads: Value | None  # from another stage
    produces: Value | None  # for another stage
    acknowledges: tuple[Value, ...]  # sends known to be consumed once the value read has arrived


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One send or receive between pipeline ranks.

    `value`: the transferred activation or gradient: (output or gradient, replica, stage, micro-batch), where stage is
    the stage that computes the value. `peer`: index of the other rank on pp; `is_receive`: True for a receive, False
    for a send. `forward_key`: (stage, replica, micro-batch) of the forward step whose input (or the gradient of whose
    input) the value is. `site`, `name`: labels in traces and errors."""

    value: Value
    peer: int
    is_receive: bool
    forward_key: Key  # the step whose input (or its gradient) it is
    site: str
    name: str


@dataclass(frozen=True, slots=True)
class _Group:
    """Group of consecutive steps of a rank's pipeline program: either compute steps, executed in order, or transfers,
    posted together. One of the two lists is empty."""

    steps: list[_Step]
    transfers: list[_Transfer]


class Pipeline:
    """Executor of a pipeline program (each rank's order of forwards, backwards and transfers) on one rank of the mesh
    axis `axis` (pp). The constructor checks the program. If the program has only compute steps, the sends and receives
    between stages are added first.

    Raises ProgramError for an invalid program."""

    def __init__(self, program: PipelineProgram, axis: Axis) -> None:
        assert program.ranks == axis.size, (program.name, program.ranks, axis.size)
        assert not program.asynchronous, f"{program.name} updates weights while micro-batches are in flight"
        assert not program.steps.component.any(), f"{program.name} splits layers"
        self.axis = axis
        self.program = with_transfers(program)
        self.checked = check_pipeline(self.program)
        self._groups = _build_groups(self.program, axis.rank)
        if not axis.trivial and axis.communicator.device.type == "cuda":
            barrier(axis, START_SITE)  # NCCL connects a group at its first call, in which all of its ranks take part

    def run(self, compute: Compute) -> None:
        """Execute this rank's steps of the program once, calling `compute` for each compute step. Raises RankLost if a
        pipeline neighbour does not answer."""
        _PipelineExecution(self.axis, compute).execute(self._groups)

    def run_forwards(self, compute: Compute, micro_batches: int) -> None:
        """Execute only the forward steps of the first `micro_batches` micro-batches, for evaluation, in the order of
        the pipeline program. `compute` executes each step. Raises RankLost if a pipeline neighbour does not answer."""
        groups = []
        for group in self._groups:
            steps = [
                replace(step, acknowledges=())  # without backward, all sends are waited for at the end
                for step in group.steps
                if step.kind == Kind.FORWARD and step.key[2] < micro_batches
            ]
            outputs = [each for each in group.transfers if each.value[0] == OUTPUT]
            transfers = [each for each in outputs if each.value[3] < micro_batches]
            if steps or transfers:
                groups.append(_Group(steps, transfers))
        _PipelineExecution(self.axis, compute).execute(groups)


class _PipelineExecution:
    """State of one execution of a pipeline program on a rank: activations and gradients that are computed here and not
    used yet, being received, or being sent.

    `axis`: mesh axis pp; `compute`: executes the compute steps.
    """

    def __init__(self, axis: Axis, compute: Compute) -> None:
        self.axis = axis
        self.compute = compute
        self.here: dict[Value, torch.Tensor] = {}  # made on this rank: for a stage here, or to be sent
        self.arriving: dict[Value, tuple[Handle, torch.Tensor]] = {}
        self.leaving: dict[Value, Handle] = {}  # each holds its tensor

    def execute(self, groups: list[_Group]) -> None:
        """Execute `groups` (of compute steps or of transfers) in order, then wait for all sends to complete."""
        for group in groups:
            if group.transfers:
                self.post(group.transfers)
            for step in group.steps:
                self.step(step)
        for handle in self.leaving.values():
            handle.wait()
        assert not self.here and not self.arriving, "a checked program consumes all values it produces"

    def post(self, group: list[_Transfer]) -> None:
        """Post the sends and receives of a group together, without waiting for them."""
        messages = []
        for each in group:
            tensor = self.compute.buffer(each.forward_key) if each.is_receive else self.here.pop(each.value)
            messages.append(Message(tensor.contiguous(), each.peer, each.is_receive, each.site, each.name))
        for each, message, handle in zip(group, messages, transfer(messages, self.axis), strict=True):
            if each.is_receive:
                self.arriving[each.value] = handle, message.tensor
            else:
                self.leaving[each.value] = handle

    def step(self, step: _Step) -> None:
        """Execute one compute step: read its input, run it, and store the activation or gradient that it returns for
        another stage."""
        made = self.compute.run(step.kind, step.key, self.read(step))
        assert (made is None) == (step.produces is None), f"{step}: the wrong end of the pipeline"
        if made is not None and step.produces is not None:
            self.here[step.produces] = made.detach()

    def read(self, step: _Step) -> torch.Tensor | None:
        """Return the activation or gradient that `step` needs from another stage, after waiting until it is received;
        None if the step needs none. Then release the sent tensors that are now known to be used (`step.acknowledges`).
        """
        if step.reads is None:
            return None
        if step.reads in self.here:
            return self.here.pop(step.reads)
        handle, tensor = self.arriving.pop(step.reads)
        handle.wait()
        for value in step.acknowledges:
            self.leaving.pop(value).wait()
        return tensor


def _build_groups(program: PipelineProgram, rank: int) -> list[_Group]:
    """Convert a pipeline program to the groups of compute steps and of transfers that pipeline rank `rank` executes;
    return them in order."""
    s = program.steps
    last = program.stages - 1
    consumed = find_consumed_sends(program, rank)
    groups: list[_Group] = []
    for at in s.of_rank(rank):
        if not groups or s.group[at] != s.group[at - 1]:
            groups.append(_Group([], []))
        kind = Kind(int(s.kind[at]))
        if kind in COMPUTING:
            stage, replica, micro_batch = (int(column[at]) for column in (s.stage, s.replica, s.micro_batch))
            produces = None
            if kind == Kind.FORWARD and stage < last:
                produces = OUTPUT, replica, stage, micro_batch
            elif kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and stage > 0:
                produces = GRADIENT, replica, stage, micro_batch
            reads = find_read_value(program, at)
            acknowledges = tuple(consumed.get(at, ()))
            groups[-1].steps.append(_Step(kind, (stage, replica, micro_batch), reads, produces, acknowledges))
        else:
            value = find_carried_value(program, at)
            direction, replica, stage, micro_batch = value
            is_output = direction == OUTPUT
            forward_key = stage + is_output, replica, micro_batch  # an output is the next stage's input
            site = ACTIVATION_SITE if is_output else GRADIENT_SITE
            end = _Transfer(value, program.find_peer(at), kind in ARRIVING, forward_key, site, program.describe(at))
            groups[-1].transfers.append(end)
    return groups
