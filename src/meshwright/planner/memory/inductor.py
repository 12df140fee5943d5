"""Memory while the kernels of a compiled graph run one after another, allocated as PyTorch's inductor does: a kernel
allocates the buffers that it writes, and they are freed after the last kernel that reads them.

A later buffer of the same type and size reuses the one freed last, if keeping it allocated until then does not raise
the peak that inductor estimates (torch/_inductor/codegen/wrapper.py, `AllocateLine.should_reuse_buffer`). Inductor does
not see allocations inside operators.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from meshwright.planner.cost.micro_batch import Number
from meshwright.planner.memory.snapshot import Allocation, NamedSnapshot, activation, count_bytes


class Kernel(NamedTuple):
    """A kernel of a compiled graph.

    name: label of the kernel; reads: names of the tensors that it reads; makes: tensors that it writes, each into a
    buffer; over: {tensor that it writes: tensor that it reads, whose buffer is overwritten}; inside: temporary
    allocations while it runs; operator: True for a custom operator, whose buffers inductor does not reuse."""

    name: str
    reads: tuple[str, ...]
    makes: tuple[Allocation, ...]
    over: Mapping[str, str] = {}
    inside: tuple[Allocation, ...] = ()
    operator: bool = False


class KernelMemory(NamedTuple):
    """Memory that is allocated while one kernel of a compiled graph runs.

    name: label of the kernel; buffers: {tensor: buffer} of all allocated buffers; gone: bytes of graph inputs that were
    freed so far; inside: temporary allocations of the kernel."""

    name: str
    buffers: Mapping[str, Allocation]
    gone: int = 0
    inside: tuple[Allocation, ...] = ()

    @property
    def bytes(self) -> Number:
        """Bytes allocated in addition to the graph's inputs; inputs that were freed count as negative bytes."""
        return count_bytes(self.buffers.values()) + count_bytes(self.inside) - self.gone

    def snapshot(self, unit: str) -> NamedSnapshot:
        """Return the name and tensors of this memory snapshot. unit: prefix of the tensors' names, such as
        "layers.3"."""
        found = [each._replace(name=f"{unit}.{name}", dtype="") for name, each in self.buffers.items()]
        freed = [activation(f"{unit}: freed", -self.gone)] if self.gone else []
        return f".{self.name}", [*found, *self.inside, *freed]


def simulate_allocations(
    kernels: Sequence[Kernel], inputs: Mapping[str, int], results: Collection[str]
) -> list[KernelMemory]:
    """Simulate how PyTorch's inductor allocates buffers while kernels run in order; return the memory during each
    kernel.

    inputs: {name: bytes} of the graph's inputs that are freed after their last use; results: names of the tensors that
    the graph returns, which are never freed.
    """
    every, end = range(len(kernels)), len(kernels) - 1
    names = [dict.fromkeys((*kernel.reads, *(made.name for made in kernel.makes))) for kernel in kernels]
    ends = dict.fromkeys(inputs, end) | {name: at for at in every for name in names[at]}
    ends |= dict.fromkeys(results, end)
    lives = [(made, at, ends[made.name]) for at in every for made in kernels[at].makes]  # buffer, first and last kernel
    left = [sum(size for name, size in inputs.items() if ends[name] >= at) for at in every]
    # By this estimate inductor decides on reuse. It has neither reuse of buffers nor temporaries inside kernels.
    estimate = list(left)
    for made, first, last in lives:
        for at in range(first, last + 1):
            estimate[at] += made.bytes
    peak = max(estimate, default=0)
    replaced = {old: at for at in every for old in kernels[at].over.values()}
    lives = [(made, first, replaced[made.name] - 1 if made.name in replaced else last) for made, first, last in lives]
    reusable = {made.name: made for made, at, _ in lives if not (kernels[at].operator or made.name in replaced)}
    waiting: list[tuple[Allocation, int]] = []  # freed buffers that may be reused, each with its last kernel
    for at in every:
        for made in kernels[at].makes:
            alike = [each for each in waiting if (each[0].dtype, each[0].bytes) == (made.dtype, made.bytes)]
            if not alike or kernels[at].operator or made.name in kernels[at].over:
                continue
            buffer, freed = alike[-1]
            between = range(freed + 1, at)
            if between and made.bytes + max(estimate[each] for each in between) > peak:
                continue
            for each in between:  # the buffer stays allocated until it is reused
                estimate[each] += made.bytes
            waiting.remove(alike[-1])
            lives.append((buffer._replace(name=f"{buffer.name} (its place)"), freed + 1, at - 1))
        waiting += [(reusable[name], at) for name in names[at] if ends[name] == at and name in reusable]
    buffers: list[dict[str, Allocation]] = [{} for _ in every]
    for made, first, last in lives:
        for at in range(first, last + 1):
            buffers[at][made.name] = made
    given = sum(inputs.values())
    return [KernelMemory(kernels[at].name, buffers[at], given - left[at], kernels[at].inside) for at in every]


def find_peak(kernels: Sequence[Kernel], inputs: Mapping[str, int], results: Collection[str]) -> KernelMemory:
    """Return the memory during the kernel with the highest peak, if kernels run in the given order; the first of
    several equal ones. inputs: {name: bytes} of the graph's inputs that are freed after their last use; results: names
    of the tensors that the graph returns."""
    return max(simulate_allocations(kernels, inputs, results), key=lambda held: held.bytes)
