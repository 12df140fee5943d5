"""What a foreign module holds beside its trained parameters: buffers and frozen parameters, the same on every rank.

Buffers that a forward pass changes (running statistics) differ from rank to rank, since ranks see other samples. After
every step they are made one again: real numbers become the mean over the ranks, whole ones those of rank 0.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.comm.collectives import all_reduce, broadcast
from meshwright.comm.mesh import Mesh
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.parallel.module.table import kept_values

START_SITE = "module.start"
CHANGED_SITE = "module.buffers.changed"
BUFFER_SITE = "module.buffers"


def same_values(module: nn.Module, mesh: Mesh) -> None:
    """Give every rank the parameters and buffers that rank 0's module has."""
    with torch.no_grad():
        for value in [*module.parameters(), *module.buffers()]:
            if value.numel():
                whole = value.detach().contiguous()
                broadcast(whole.reshape(-1).view(torch.uint8), mesh.world, START_SITE)
                value.copy_(whole)


class KeptValues:
    """Buffers and frozen parameters of `module` on this rank."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._module, self._mesh = module, mesh
        self._before: dict[str, torch.Tensor] = {}
        self.changing: set[str] = set()
        """The buffers that a step has changed on any rank."""
        self._looks = 0
        self._looking = False

    def begin_step(self) -> None:
        """Remember the buffers that the step may change. At the steps 1, 2, 4, 8 ... of this process all are looked
        at."""
        self._looks += 1
        self._looking = self._looks & (self._looks - 1) == 0
        buffers = self._buffers()
        names = buffers if self._looking else self.changing
        self._before = {name: buffers[name].detach().clone() for name in names}

    def end_step(self) -> None:
        """Make the changed buffers the same on all ranks."""
        buffers, mesh = self._buffers(), self._mesh
        if self._looking and buffers:
            changed = [not _same(self._before[name], value) for name, value in buffers.items()]
            flags = torch.tensor(changed, dtype=torch.int64, device=mesh.device)
            all_reduce(flags, mesh.data, CHANGED_SITE)
            self.changing |= {name for name, flag in zip(buffers, flags.tolist(), strict=True) if flag}
        for real in (True, False):
            found = [buffers[name] for name in buffers if name in self.changing]
            self._make_one([each for each in found if each.is_floating_point() == real], real)

    def take_back(self) -> None:
        """The step is skipped: what it changed is as before."""
        buffers = self._buffers()
        with torch.no_grad():
            for name, value in self._before.items():
                buffers[name].copy_(value)

    def numbers(self) -> tuple[int, int]:
        """How many real and how many whole numbers `end_step` sums over ranks."""
        buffers = self._buffers()
        sizes = [0, 0]
        for name in self.changing:
            sizes[not buffers[name].is_floating_point()] += buffers[name].numel()
        return sizes[0], sizes[1]

    def looked_at(self) -> int:
        """How many buffers the last step has compared."""
        return len(self._buffers()) if self._looking else 0

    def nbytes(self) -> int:
        """Bytes that they take."""
        return sum(value.nbytes for value in kept_values(self._module, saved=False).values())

    def slices(self, owned: bool) -> list[TensorSlice]:
        """As slices of a checkpoint, which rank 0 writes."""
        if owned and self._mesh.rank:
            return []
        slices = []
        for name, value in kept_values(self._module, saved=True).items():
            assert value.is_contiguous(), name
            slices.append(TensorSlice("master", name, 0, value.numel(), value.detach().reshape(-1)))
        return slices

    def _buffers(self) -> dict[str, torch.Tensor]:
        return dict(self._module.named_buffers())

    def _make_one(self, values: list[torch.Tensor], real: bool) -> None:
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


def contiguous_buffers(module: nn.Module) -> None:
    """Have every buffer and frozen parameter lie in memory as a checkpoint has it."""
    for inner in module.modules():
        for name, value in inner._buffers.items():
            if value is not None and not value.is_contiguous():
                inner._buffers[name] = value.contiguous()
    for parameter in module.parameters():
        if not parameter.requires_grad and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _same(before: torch.Tensor, after: torch.Tensor) -> bool:
    return torch.equal(before, after) or torch.equal(before.nan_to_num(), after.nan_to_num())
