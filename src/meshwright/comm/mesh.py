"""Device mesh: this rank's coordinates on every axis of a layout, and the process group of each axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwright.collectives.communicators import REDUCTION_AXES, list_purposes
from meshwright.collectives.named import NamedProgram
from meshwright.comm.backend import compute_backend_timeout, get_group_backends
from meshwright.comm.faults import Fault, Faults
from meshwright.comm.named_programs import NamedPrograms
from meshwright.comm.programs import Executable
from meshwright.comm.record import Record
from meshwright.errors import RankLost, UserError
from meshwright.flight_recorder.call_ring import get_process_writer
from meshwright.flight_recorder.wrapped_calls import CallRecorder
from meshwright.layout import Layout

AXIS_NAMES = ("tp", "cp", "pp", "ep", "etp", "data", "shard", "reduction", "replica", "world")
EXPERT_AXES = {f"expert_{name}": name for name in ("data", "shard", "reduction", "replica")}
"""Axes of experts -> the axes that they equal without expert parallelism."""

MakeGroup = Callable[[Sequence[tuple[int, ...]], str], dist.ProcessGroup | None]


calls_in_flight: dict[Any, CommunicationState] = {}
"""Handles (`comm.handle.Handle`) of calls in flight -> their communicator. A handle is referenced until it is waited
for even if the caller drops it: a transfer whose buffer is freed too early blocks its connection, and with it every
later message from that rank."""

SETTLING_SECONDS = 10.0
"""Seconds for which `Mesh.close` waits for such calls."""


class CommunicationState:
    """Communication state of one process, shared by its mesh axes: byte counts of calls, flight recorder (ring of
    recent calls), injected fault.

    device: device of the tensors that are communicated. timeout_seconds: limit of one wait. programs: {(axis name,
    operation): collective program}; the programs run in place of the backend's own calls.
    """

    def __init__(
        self, device: torch.device | str = "cpu", timeout_seconds: float = 600.0,
        programs: Mapping[tuple[str, str], NamedProgram] | None = None,
    ) -> None:  # fmt: skip
        self.programs = NamedPrograms(programs, timeout_seconds, device)
        self.record = Record()
        self.calls: CallRecorder = get_process_writer()
        self.faults = Faults()
        self.device = torch.device(device)
        self.timeout_seconds = timeout_seconds
        self.waited_seconds = 0.0  # host time spent waiting for calls, since the process started
        self.trivial_calls = False
        """If True, calls over one rank are made too, to test a backend in one process (NCCL on one GPU)."""
        self.around: Callable[[str], AbstractContextManager[Any]] = nullcontext
        """Returns the context manager in which a site's calls are posted; a profile labels their kernels with it."""
        self.meanwhile: Callable[[], None] | None = None
        """Called while a call of backward is in flight: queues other work on the device."""
        self.product_overlap = "off"
        """How tensor-parallel products overlap with their collective calls (`products.choose_product_overlap`)."""
        self.launched_rows: dict[str, tuple[Any, torch.Tensor]] = {}
        """Key of each axis over which rows are in flight (`operators.launch_rows`) -> handle and received rows."""
        self.release_graphs: Callable[[], None] = lambda: None
        """Releases the CUDA graphs that contain collective calls: until then ncclCommDestroy waits."""

    @contextmanager
    def record_new_groups(self, everybody: tuple[int, ...], first: tuple[int, ...], operation: str) -> Iterator[None]:
        """Context manager in which the ranks `everybody` create process groups together; records that as one call in
        the flight recorder. first: ranks of the first of the groups. operation: name of torch's function. A
        RuntimeError inside the context becomes RankLost.
        """
        group = self.calls.register_group(everybody)
        number = self.calls.post(group, "mesh.groups", operation, "world", 0, "ranks", first)
        self.calls.wait(number)
        try:
            yield
        except RuntimeError as error:
            self.calls.give_up()
            reason = " ".join(str(error).split())[:300]
            who = f"rank {dist.get_rank()} had no answer in mesh.groups ({operation} over world)"
            raise RankLost(f"{who}: {reason}") from error
        self.calls.done(number)


@dataclass(frozen=True)
class Axis:
    """One axis of the device mesh as seen by one rank: the ranks of this rank's group along the axis.

    name: such as "tp". ranks: global ranks of this group, in order. rank: index of this rank in `ranks`. group: process
    group of these ranks (usually None if the axis has one rank). communicator: communication state of the process.
    purpose: purpose for which the process group is apart from others of these ranks
    (`collectives.communicators.list_purposes`); "" without one.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    communicator: CommunicationState = field(default_factory=CommunicationState, compare=False, repr=False)
    purpose: str = ""

    @property
    def size(self) -> int:
        """Number of ranks along the mesh axis."""
        return len(self.ranks)

    @property
    def trivial(self) -> bool:
        """True if the axis has one rank, so that collective calls over it communicate nothing. False also if a test
        forces calls over one rank.
        """
        return len(self.ranks) == 1 and not self.communicator.trivial_calls

    def program(self, operation: str, size: int) -> Executable | None:
        """Return the prepared collective program that runs over this axis in place of the backend's own call; None: the
        backend's call is used.

        operation: such as "all_reduce". size: bytes of the vector."""
        return self.communicator.programs.find(self.name, operation, self.ranks, self.group, size)

    @cached_property
    def backends(self) -> dict[str, str]:
        """Names of the torch.distributed backends of this axis's process group, by device type, such as {"cpu":
        "gloo"}."""
        return get_group_backends(self.group)

    @cached_property
    def recorder_group(self) -> int:
        """Number that identifies the axis's process group in the flight recorder; axes over the same ranks have the
        same number, unless their groups differ in purpose.
        """
        return self.communicator.calls.register_group(self.ranks, purpose=self.purpose)

    @property
    def key(self) -> str:
        """String that identifies this axis within the process. Custom operators, which accept no Python objects, get
        the key as an argument and call `find_axis` with it."""
        return f"{self.name}{self.ranks}{self.purpose}"


class Replica(NamedTuple):
    """Data-parallel replica of a rank. rank: index of the replica; size: number of replicas."""

    rank: int
    size: int


_axes: dict[str, list[Axis]] = {}
"""Axes of this process by key, for custom operators: one for each mesh with these ranks, the newest last. The newest
serves all of these meshes, as their groups have the same ranks."""


def find_axis(key: str) -> Axis:
    """Return the axis of this process whose `Axis.key` is `key`. Called in custom operators, which accept strings but
    no Python objects."""
    return _axes[key][-1]


class Mesh:
    """Device mesh of a parallel layout: all its axes as seen by one rank.

    `tp cp pp ep etp`: tensor, context, pipeline, expert and expert-tensor parallelism. `dp`: this rank's data-parallel
    replica. `data`: dp x cp, over which gradients are summed; no call is made over dp alone. `shard`: ranks over which
    ZeRO shards model states (`data`, or with `hsN` groups of N ranks inside it). `reduction`: the axis `shard` with the
    process group of its reductions of gradients. `replica`: ranks with equal shards, one in each sharding group.
    `expert_data expert_shard expert_reduction expert_replica`: the counterparts for expert parameters under ep x etp,
    otherwise equal to data, shard, reduction and replica. `world`: all ranks.

    Built by `Mesh.create` or `Mesh.single`. rank: global rank. device: device of the rank's tensors. communicator:
    communication state of the process. make_group: function (groups, purpose) that returns this rank's process group
    among `groups`, disjoint tuples of global ranks (None if it is in none, or alone in its own). purpose: see `Axis`.
    Every rank calls it for the same axes, in the same order. purposes: purposes of axes, by name (None: no axis has
    one)."""

    tp: Axis
    cp: Axis
    dp: Replica
    pp: Axis
    ep: Axis
    etp: Axis
    data: Axis
    shard: Axis
    reduction: Axis
    replica: Axis
    expert_data: Axis
    expert_shard: Axis
    expert_reduction: Axis
    expert_replica: Axis
    world: Axis

    def __init__(
        self, layout: Layout, rank: int, device: torch.device, communicator: CommunicationState, make_group: MakeGroup,
        purposes: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.rank = rank
        self.dp = Replica(layout.coordinates(rank)["dp"], layout.dp)
        self.world_size = layout.world_size
        self.device = device
        self.communicator = communicator
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {}
        self._make_group = make_group
        for name in (*AXIS_NAMES, *(EXPERT_AXES if layout.expert_parallel else ())):
            over = REDUCTION_AXES.get(name, name)
            axis = self._make_axis(over, layout.groups(over), (purposes or {}).get(name, ""))
            assert axis is not None, f"axis {name} without rank {rank}"
            setattr(self, name, axis)
            _axes.setdefault(axis.key, []).append(axis)
        if not layout.expert_parallel:
            for name, same in EXPERT_AXES.items():
                setattr(self, name, getattr(self, same))

    @property
    def record(self) -> Record:
        """Counters of this process's collective calls, by call site and axis."""
        return self.communicator.record

    @property
    def faults(self) -> Faults:
        """Fault injection of this process, which applies to its collective calls."""
        return self.communicator.faults

    @classmethod
    def single(cls, layout: Layout | None = None, device: torch.device | str = "cpu") -> Mesh:
        """Build the mesh of one device without process groups: every axis has size 1, and collective calls return their
        input.

        layout: layout of one rank; None: the default layout. Raises UserError for a layout of more than one rank.
        """
        layout = Layout() if layout is None else layout
        if layout.world_size != 1:
            raise UserError(f'layout "{layout}" needs {layout.world_size} processes, this is one')
        return cls(layout, 0, torch.device(device), CommunicationState(device), lambda *_: None)

    @classmethod
    def create(
        cls, layout: Layout, device: torch.device | str = "cpu", timeout_seconds: float = 600.0,
        programs: Mapping[tuple[str, str], NamedProgram] | None = None,
    ) -> Mesh:  # fmt: skip
        """Build the mesh over the running `torch.distributed` world. Every rank calls it, with the same arguments.

        device: device of this rank's tensors. timeout_seconds: limit of one wait for a call. programs: {(axis name,
        operation): collective program}, from `collectives.named.load_named_programs`, which replace the backend's calls
        (None: no programs). Raises UserError if the layout needs another world size."""
        if layout.world_size == 1 and not dist.is_initialized():
            return cls.single(layout, device)
        if layout.world_size != (world_size := dist.get_world_size()):
            raise UserError(f'layout "{layout}" needs {layout.world_size} processes, there are {world_size}')
        rank, everybody = dist.get_rank(), tuple(range(world_size))
        timeout = compute_backend_timeout(device, timeout_seconds)
        nccl = "nccl" if get_group_backends(None).get(torch.device(device).type) == "nccl" else None
        splits = nccl is not None and getattr(dist.group.WORLD, "bound_device_id", None) is not None
        split = partial(dist.split_group, None, timeout=timeout, backend=nccl)
        communicator = CommunicationState(device, timeout_seconds, programs)
        # Axes over the same ranks share one group, unless they differ in purpose.
        groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {(everybody, ""): dist.group.WORLD}

        def make_group(partition: Sequence[tuple[int, ...]], purpose: str) -> dist.ProcessGroup | None:
            """Return this rank's process group among those of `partition`; groups that exist already are reused. See
            `Mesh` for arguments and result."""
            keys = [(ranks, purpose) for ranks in partition]
            missing = [key for key in keys if len(key[0]) > 1 and key not in groups]
            # If the world is bound to GPUs, all groups of an axis are made in one call, which splits its communicator.
            # With NCCL only the world has gloo too, for host tensors: a gloo group connects all pairs of its ranks.
            for together in [missing] if splits and missing else [[key] for key in missing]:
                first, *_ = ranks = [list(each) for each, _ in together]
                with communicator.record_new_groups(everybody, tuple(first), "split_group" if splits else "new_group"):
                    new = split(ranks) if splits else dist.new_group(first, timeout, nccl)
                    if nccl is None and rank in first:  # else one rank could close the group while others still connect
                        dist.barrier(new)
                for key in together:
                    groups[key] = new if rank in key[0] else None
            return next((groups.get(key) for key in keys if rank in key[0]), None)

        mesh = cls(layout, rank, torch.device(device), communicator, make_group, list_purposes(layout) if nccl else {})
        mesh._groups = groups
        return mesh

    def make_block_axis(self, name: str, size: int) -> Axis:
        """Divide the ranks of the mesh axis `name` (such as "tp") into blocks of `size` consecutive ranks; return the
        sub-axis of the block that contains this rank. Collective over all ranks, with the same arguments, because it
        creates process groups."""
        axis: Axis = getattr(self, name)
        blocks = [part[at : at + size] for part in self.layout.groups(name) for at in range(0, len(part), size)]
        return axis if size == axis.size else self._make_axis(f"{name}/{size}", blocks) or axis

    def make_subset_axis(self, name: str, indices: Sequence[int]) -> Axis | None:
        """Return the sub-axis of the ranks at the given `indices` (from 0) along the mesh axis `name`, such as "pp";
        None on ranks at other indices. Collective over all ranks, with the same arguments, because it creates process
        groups.
        """
        everywhere = len(indices) == getattr(self, name).size
        title = name if everywhere else f"{name}[{','.join(map(str, indices))}]"
        return self._make_axis(title, [tuple(ranks[at] for at in indices) for ranks in self.layout.groups(name)])

    def _make_axis(self, name: str, groups: Sequence[tuple[int, ...]], purpose: str = "") -> Axis | None:
        """Create a process group for each of `groups` (tuples of global ranks). Return an axis called `name` over the
        group that contains this rank; None if no group does. Collective over all ranks, with the same arguments.
        purpose: see `Axis`."""
        group, ranks = self._make_group(groups, purpose), next((g for g in groups if self.rank in g), None)
        return None if ranks is None else Axis(name, ranks, ranks.index(self.rank), group, self.communicator, purpose)

    def inject(self, fault: Fault | None) -> None:
        """Inject `fault` into the collective calls of this process in place of the previous fault (None: remove the
        previous fault).

        Every rank must call this with the same fault, because a fault "wrong group" creates process groups."""
        other = self._make_axis(f"not {fault.axis}", fault.groups) if fault and fault.kind == "wrong group" else None
        self.faults.inject(fault, other)

    def close(self) -> None:
        """Wait for calls in flight, and destroy the process groups that this mesh created. Every rank calls it."""
        for call in [call for call, whose in calls_in_flight.items() if whose is self.communicator]:
            call.settle(SETTLING_SECONDS)
        self.communicator.release_graphs()
        self.communicator.programs.close()
        for key, axes in list(_axes.items()):  # a reference to a group keeps its connections and threads alive
            axes[:] = [axis for axis in axes if axis.communicator is not self.communicator]
            if not axes:
                del _axes[key]
        for group in (group for group in self._groups.values() if group not in (None, dist.group.WORLD)):
            dist.destroy_process_group(group)
        self._groups = {}
