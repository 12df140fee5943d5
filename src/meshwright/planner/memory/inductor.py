"""Memory while the kernels of a compiled graph run one after another, allocated as PyTorch's inductor does: a kernel
allocates the buffers that it writes, and they are freed after the last kernel that reads them.

A later buffer of the same type and size reuses the one freed last, if keeping it allocated until then does not raise
the peak that inductor estimates (torch/_inductor/codegen/wrapper.py, `AllocateLine.should_reuse_buffer`). Inductor does
not see allocations inside operators.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.planner.cost.micro_batch import Number
from meshwright.planner.memory.snapshot import Allocation, NamedSnapshot, activation, count_bytes


class Buffer(NamedTuple):
    """Memory buffer that a kernel of a compiled graph writes.

    name: name of the tensor in the buffer; kind: element type, "x" (type of activations), "wide" (at least float32),
    "index" or "int32"; bytes: size; category: category of the memory ledger; operator: True if a custom operator
    returns the buffer, which inductor then does not reuse."""

    name: str
    kind: str
    bytes: int
    category: str = "activations"
    operator: bool = False


class Kernel(NamedTuple):
    """A kernel of a compiled graph.

    name: label of the kernel; reads: names of the tensors that it reads; makes: buffers that it writes; over: {tensor
    that it writes: tensor that it reads, whose buffer is overwritten}; inside: temporary allocations while it runs."""

    name: str
    reads: tuple[str, ...]
    makes: tuple[Buffer, ...]
    over: Mapping[str, str] = {}
    inside: tuple[Allocation, ...] = ()


@dataclass(slots=True)
class KernelMemory:
    """Memory that is allocated while one kernel of a compiled graph runs.

    name: label of the kernel; buffers: {tensor: buffer} of all allocated buffers; gone: bytes of graph inputs that were
    freed so far; inside: temporary allocations of the kernel."""

    name: str
    buffers: dict[str, Buffer] = field(default_factory=dict)
    gone: int = 0
    inside: tuple[Allocation, ...] = ()

    @property
    def bytes(self) -> Number:
        """Bytes allocated in addition to the graph's inputs; inputs that were freed count as negative bytes."""
        return count_bytes(self.buffers.values()) + count_bytes(self.inside) - self.gone

    def snapshot(self, unit: str) -> NamedSnapshot:
        """Return the name and tensors of this memory snapshot. unit: prefix of the tensors' names, such as
        "layers.3"."""
        found = [Allocation(each.category, f"{unit}.{name}", bytes=each.bytes) for name, each in self.buffers.items()]
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
    last = {name: at for at, kernel in enumerate(kernels) for name in kernel.reads}
    reckoned = _estimate_bytes(kernels, inputs, results, last)
    overall = max(reckoned, default=0)
    live: dict[str, Buffer] = {}
    waiting: list[tuple[Buffer, int]] = []  # freed, and after which kernel: some other may take its place
    reused: dict[int, list[tuple[Buffer, int]]] = {}  # by the kernel after which it was freed: until when it stays
    found: list[KernelMemory] = []
    gone = 0

    def take(made: Buffer, now: int) -> None:
        """Reuse a freed buffer for `made` if inductor would: it then counts as allocated from its release until kernel
        `now`."""
        at = next((at for at in reversed(range(len(waiting))) if waiting[at][0][1:3] == made[1:3]), None)  # kind, bytes
        if at is None:
            return
        buffer, freed = waiting[at]
        between = range(freed + 1, now)
        if between and made.bytes + max(reckoned[each] for each in between) > overall:
            return
        for each in between:
            reckoned[each] += made.bytes
        del waiting[at]
        reused.setdefault(freed, []).append((buffer, now))

    for now, kernel in enumerate(kernels):
        for made in kernel.makes:
            if not made.operator and made.name not in kernel.over:
                take(made, now)
        for replaced in kernel.over.values():
            live.pop(replaced, None)
        live |= {made.name: made for made in kernel.makes}
        found.append(KernelMemory(kernel.name, dict(live), gone, kernel.inside))
        for name in dict.fromkeys((*kernel.reads, *(made.name for made in kernel.makes))):
            if last.get(name, now) != now or name in results:
                continue
            gone += inputs.get(name, 0)
            buffer = live.pop(name, None)
            if buffer is not None and not buffer.operator:
                waiting.append((buffer, now))
    for freed, until in reused.items():
        for buffer, taken in until:
            for held in found[freed + 1 : taken]:
                held.buffers[f"{buffer.name} (its place)"] = buffer
    return found


def _estimate_bytes(
    kernels: Sequence[Kernel], inputs: Mapping[str, int], results: Collection[str], last: Mapping[str, int]
) -> list[int]:
    """Return the bytes that inductor estimates during each kernel, by which it decides on the reuse of buffers. The
    estimate has no reuse of buffers, and no temporaries inside kernels.

    inputs: {name: bytes} of the graph's inputs; results: names of the tensors that the graph returns; last: {tensor:
    index of the last kernel that reads it}."""
    now = sum(inputs.values())
    sizes = dict(inputs)
    found = []
    for at, kernel in enumerate(kernels):
        sizes |= {made.name: made.bytes for made in kernel.makes}
        now += sum(made.bytes for made in kernel.makes)
        found.append(now)
        names = {*kernel.reads, *(made.name for made in kernel.makes)}
        now -= sum(sizes.get(name, 0) for name in names if last.get(name, at) == at and name not in results)
    return found


def find_peak(kernels: Sequence[Kernel], inputs: Mapping[str, int], results: Collection[str]) -> KernelMemory:
    """Return the memory during the kernel with the highest peak, if kernels run in the given order; the first of
    several equal ones. inputs: {name: bytes} of the graph's inputs that are freed after their last use; results: names
    of the tensors that the graph returns."""
    return max(simulate_allocations(kernels, inputs, results), key=lambda held: held.bytes)
