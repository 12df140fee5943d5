"""One unit's flat buffers on one rank: parameters, master copy, gradients, and which part of them this rank owns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from meshwright.comm.collectives import all_gather
from meshwright.comm.handle import Handle
from meshwright.comm.mesh import Axis
from meshwright.model.initialise import initial_value
from meshwright.parallel.pieces import FlatUnit

GATHER_SITE = "data.parameters"


@dataclass(frozen=True, slots=True)
class FlatAxes:
    """Between which ranks a flat buffer lies: its gradient is a sum over `data`, ZeRO shards it over `shard`, and ranks
    of `replica` hold the same shard. `holders`: ranks of other pipeline stages that hold it too, and use it on their
    own; None where there are no others."""

    data: Axis
    shard: Axis
    replica: Axis
    holders: Axis | None = None


class UnitBuffers:
    """The memory of one unit. Every tensor here is 1-D; `start`, `stop` are this rank's range of the flat buffer.

    parameters   the whole unit in the parameter dtype; the model's parameters are views of it. Under ZeRO-3 its memory
                 is there only while somebody computes with it (`release` resizes the storage to nothing, so that
                 tensors saved for the backward pass stay valid once it is gathered again).
    source       this rank's range of the parameters, which the others gather from; a view of `parameters`, except
                 under ZeRO-3.
    master       what the optimizer updates, [start, stop); the same memory as `source` where the dtypes agree.
    gradient     the sum over ranks and micro-batches, [start, stop), in the dtype of the master.
    copies       ranks that hold the same masters (of the same place on tp); this is the `copy`-th of them.
    accumulator  the whole unit's gradient before reduction; None where it exists only during the backward pass
                 (ZeRO-2 and 3).
    """

    def __init__(
        self,
        flat: FlatUnit,
        zero: int,
        axes: FlatAxes,
        device: torch.device,
        parameter_dtype: torch.dtype,
        master_dtype: torch.dtype,
    ) -> None:
        self.flat, self.zero, self.axes = flat, zero, axes
        copies, holders = axes.data if zero == 0 else axes.replica, axes.holders
        self.copies = copies.size * (1 if holders is None else holders.size)
        self.copy = copies.rank if holders is None else copies.rank * holders.size + holders.rank
        if zero == 0:
            self.start, self.stop = 0, flat.numel
        else:
            length = flat.padded // axes.shard.size
            self.start, self.stop = axes.shard.rank * length, (axes.shard.rank + 1) * length
        self.parameters = torch.zeros(flat.padded, dtype=parameter_dtype, device=device)
        mine = self.parameters[self.start : self.stop]
        length = self.stop - self.start
        if zero < 3:
            self.source = mine
        else:
            self.source = torch.zeros(length, dtype=parameter_dtype, device=device)
        same = parameter_dtype == master_dtype
        self.master = self.source if same else torch.zeros(length, dtype=master_dtype, device=device)
        self.accumulator: torch.Tensor | None = None
        if zero < 2:
            self.accumulator = torch.zeros(flat.padded, dtype=master_dtype, device=device)
            self.gradient = self.accumulator[self.start : self.stop]
        else:
            self.gradient = torch.zeros(length, dtype=master_dtype, device=device)
        self.gathered = True
        self.gathering: Handle | None = None
        self._bytes = self.parameters.untyped_storage().nbytes()

    def bind(self, model: nn.Module) -> list[nn.Parameter]:
        """Make the model's parameters views of `parameters`, in the order of `flat.tensors`.

        The views get version counters of their own (`.data`): a gather that fills the memory again must not look to
        autograd like a change of the values that it saved.
        """
        bound = []
        for placed in self.flat.tensors:
            parent, _, leaf = placed.tensor.name.rpartition(".")
            module = model.get_submodule(parent)
            before = getattr(module, leaf)
            assert (before.shape or (1,)) == placed.shape, (placed.tensor.name, before.shape, placed.shape)
            parameter = before
            if before.device.type == "meta":
                parameter = nn.Parameter(torch.empty(0, dtype=self.parameters.dtype, device=self.parameters.device))
                module.register_parameter(leaf, parameter)
            # Else whoever has this parameter too (a tied layer, an LSTM's list of its weights) keeps having it.
            parameter.data = self.parameters[placed.offset : placed.offset + placed.numel].view(before.shape)
            bound.append(parameter)
        return bound

    def initialise(self, seed: int) -> None:
        """Fill the master's range with initial values: each row depends on (seed, name) alone."""
        for part, first, last in self.flat.within(self.start, self.stop):
            value = initial_value(part.row, seed)
            mine = part.of((value.t() if part.row.transposed else value).reshape(-1))
            self.master[first - self.start : last - self.start].copy_(mine[first - part.offset : last - part.offset])

    def take_over(self, model: nn.Module) -> None:
        """Fill the master's range with the values that the model's parameters have now (before `bind`)."""
        for placed in self.flat.tensors:
            value, offset = model.get_parameter(placed.tensor.name).detach(), placed.offset
            first, last = max(self.start, offset), min(self.stop, offset + placed.numel)
            if first < last and value.device.type != "meta":
                part = value.reshape(-1)[first - offset : last - offset]
                self.master[first - self.start : last - self.start].copy_(part)

    # --- parameters

    def fetch(self) -> None:
        """Start to gather the whole unit, unless it is there or under way."""
        if self.gathered or self.gathering is not None:
            return
        if self.zero == 3:
            self.parameters.untyped_storage().resize_(self._bytes)
        self.gathering = all_gather(self.parameters, self.source, self.axes.shard, GATHER_SITE, async_op=True)

    def need(self) -> None:
        """Return when the whole unit is there."""
        if self.gathered:
            return
        self.fetch()
        assert self.gathering is not None
        self.gathering.wait()
        self.gathering = None
        self.gathered = True

    def release(self) -> None:
        """Give the memory of the gathered parameters back (ZeRO-3)."""
        if self.gathering is not None:
            self.need()
        if self.gathered:
            self.parameters.untyped_storage().resize_(0)
            self.gathered = False

    def publish(self) -> None:
        """Round the master to the parameter dtype and make the gathered copy out of date (ZeRO-1 and 2 start anew)."""
        if self.zero == 3:
            self.release()
        elif self.gathering is not None:
            self.need()
        if self.source.data_ptr() != self.master.data_ptr():
            self.source.copy_(self.master)
        if self.zero in (1, 2):
            self.gathered = False
            self.fetch()

    # --- gradients

    def gradient_views(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a whole-unit gradient buffer that belong to each parameter, in their shapes."""
        return [whole[at.offset : at.offset + at.numel].view(at.shape) for at in self.flat.tensors]
