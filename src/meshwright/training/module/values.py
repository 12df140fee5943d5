"""Buffers and frozen parameters of a user's module, kept equal on every rank.

Buffers that a forward pass changes (running statistics) differ between ranks, since ranks see other samples. After
every step they are synchronized: floating-point buffers by their mean over ranks, integer ones from rank 0.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from meshwright.comm import backend
from meshwright.comm.collectives import all_reduce, broadcast
from meshwright.comm.mesh import Mesh
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.parallel.module.table import list_untrained_tensors

START_SITE = "module.start"
CHANGED_SITE = "module.buffers.changed"
BUFFER_SITE = "module.buffers"


def broadcast_values(module: nn.Module, mesh: Mesh) -> None:
    """Broadcast rank 0's parameters and buffers of `module` to every rank of the mesh, in place. Collective."""
    with torch.no_grad():
        for value in [*module.parameters(), *module.buffers()]:
            if value.numel():
                whole = value.detach().contiguous()
                broadcast(whole.reshape(-1).view(torch.uint8), mesh.world, START_SITE)
                value.copy_(whole)


class UntrainedTensors:
    """Buffers and frozen parameters of a user's module on one rank of `mesh`, which the optimizer does not update.
    After each step, buffers that the forward pass changes, such as batch-norm statistics, are synchronized over ranks.
    One object serves the whole run."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        """Register the module's buffers and frozen parameters; no buffer is known to change yet."""
        self._module, self._mesh = module, mesh
        self._before: dict[str, torch.Tensor] = {}
        self.changing: set[str] = set()
        """The buffers that a step has changed on any rank."""
        self._looks = 0
        self._looking = False

    @property
    def has_buffers(self) -> bool:
        """True if the module has buffers."""
        return bool(self._buffers())

    def begin_step(self) -> None:
        """Copy the buffers that earlier steps have changed, so that `restore_buffers` can undo a skipped step. In steps
        1, 2, 4, 8 ... of this process copy all buffers; `end_step` then compares them with their new values, to find
        further buffers that steps change.
        """
        self._looks += 1
        self._looking = self._looks & (self._looks - 1) == 0
        buffers = self._buffers()
        names = buffers if self._looking else self.changing
        self._before = {name: buffers[name].detach().clone() for name in names}

    def end_step(self) -> None:
        """Synchronize over the data-parallel ranks the buffers that steps change: floating-point buffers get their mean
        over ranks, integer buffers the values of rank 0. Collective."""
        buffers, mesh = self._buffers(), self._mesh
        if self._looking and buffers:
            changed = [not _equal_with_nan(self._before[name], value) for name, value in buffers.items()]
            flags = torch.tensor(changed, dtype=torch.int64, device=mesh.device)
            all_reduce(flags, mesh.data, CHANGED_SITE)
            self.changing |= {name for name, flag in zip(buffers, flags.tolist(), strict=True) if flag}
        for real in (True, False):
            found = [buffers[name] for name in buffers if name in self.changing]
            self._synchronize([each for each in found if each.is_floating_point() == real], real)

    def restore_buffers(self) -> None:
        """Undo a skipped step: restore the buffers that `begin_step` copied."""
        buffers = self._buffers()
        with torch.no_grad():
            for name, value in self._before.items():
                buffers[name].copy_(value)

    def count_synchronized(self) -> tuple[int, int]:
        """Return the numbers of elements that `end_step` synchronizes over ranks, as (number in floating-point buffers,
        number in integer buffers)."""
        buffers = self._buffers()
        sizes = [0, 0]
        for name in self.changing:
            sizes[not buffers[name].is_floating_point()] += buffers[name].numel()
        return sizes[0], sizes[1]

    def count_compared(self) -> int:
        """Return the number of buffers that the last `end_step` compared with their values before the step, to find
        buffers that change: the number of all buffers in steps 1, 2, 4, 8 ..., else 0."""
        return len(self._buffers()) if self._looking else 0

    def nbytes(self) -> int:
        """Return the size of all buffers and frozen parameters in bytes."""
        return sum(value.nbytes for value in list_untrained_tensors(self._module, saved=False).values())

    def slices(self, names: Collection[str], owned: bool) -> list[TensorSlice]:
        """Return the buffers and frozen parameters called `names` as checkpoint slices. owned: True to return only the
        slices that this rank writes (all on rank 0, none elsewhere), on a GPU with copies of the buffers, since the
        next forward may change these while the slices are copied to the host; False to return all."""
        if owned and self._mesh.rank:
            return []
        slices, buffers = [], self._buffers()
        for name, value in list_untrained_tensors(self._module, saved=True).items():
            if name not in names:
                continue
            assert value.is_contiguous(), name
            if owned and name in buffers and backend.current_stream(value.device) is not None:
                value = value.detach().clone()
            slices.append(TensorSlice("master", name, 0, value.numel(), value.detach().reshape(-1)))
        return slices

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the module's buffers by name."""
        return dict(self._module.named_buffers())

    def _synchronize(self, values: list[torch.Tensor], real: bool) -> None:
        """Make the buffers `values` equal on all data-parallel ranks, in place: floating-point buffers (real: True) get
        their mean over ranks, integer buffers (real: False) the values of rank 0. Collective."""
        data = self._mesh.data
        if not values or data.size == 1:
            return
        together = torch.cat([each.reshape(-1).to(torch.float64 if real else torch.int64) for each in values])
        if not real and data.rank:
            together.zero_()
        all_reduce(together, data, BUFFER_SITE)
        if real:
            together /= data.size
        with torch.no_grad():
            for each, part in zip(values, together.split([each.numel() for each in values]), strict=True):
                each.copy_(part.view(each.shape))


def make_buffers_contiguous(module: nn.Module) -> None:
    """Make every buffer and frozen parameter of the module contiguous in memory, as checkpoints store them."""
    for inner in module.modules():
        for name, value in inner._buffers.items():
            if value is not None and not value.is_contiguous():
                inner._buffers[name] = value.contiguous()
    for parameter in module.parameters():
        if not parameter.requires_grad and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _equal_with_nan(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return True if the tensors `before` and `after` are equal, where NaN counts as equal to NaN."""
    return torch.equal(before, after) or torch.equal(before.nan_to_num(), after.nan_to_num())
