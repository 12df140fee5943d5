"""Which device each process computes on. Asks torch only where the answer depends on the machine."""

from __future__ import annotations

import ctypes
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from meshwright.errors import UserError
from meshwright.launcher.host_memory import GPU, HostMemory
from meshwright.names import DEVICES, unknown

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from meshwright.launcher.rendezvous import Place


def one_device(wanted: str) -> str:
    """Resolve a device name of `DEVICES` to "cpu" or "cuda"; "auto" is the GPU if there is one.

    `UserError` for an unknown name or a missing device. CUDA_VISIBLE_DEVICES determines which GPU is used.
    """
    if wanted not in DEVICES:
        raise UserError(unknown("device", wanted, DEVICES))
    if wanted == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise UserError('device "cuda": this machine has no CUDA device; "cpu" computes the same, more slowly')
    return "cpu"


_MEASURE = (
    "import json, torch; many = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
    "print(json.dumps([torch.cuda.mem_get_info(index) for index in range(many)]))"
)


def devices_of_ranks(wanted: str, ranks: int) -> list[HostMemory]:
    """Resolve a device name of `DEVICES` for `ranks` ranks of this machine; return the memory of their GPUs, none for
    "cpu". Free of torch: a process of its own looks at the GPUs.

    `UserError` for an unknown name, or fewer GPUs than ranks.
    """
    if wanted not in DEVICES:
        raise UserError(unknown("device", wanted, DEVICES))
    found: list[HostMemory] = []
    if wanted != "cpu" and _has_driver():
        looked = subprocess.run([sys.executable, "-c", _MEASURE], stdout=subprocess.PIPE, text=True, check=True)
        found = [HostMemory(total, free, GPU) for free, total in json.loads(looked.stdout)]
    if len(found) < ranks and (found or wanted == "cuda"):
        raise UserError(
            f'device "{wanted}": this machine has {_format_devices(len(found))}, and each of the layout\'s {ranks} '
            f'rank{"s" if ranks > 1 else ""} here needs one; "cpu" computes the same, more slowly'
        )
    return found[:ranks]


def _has_driver() -> bool:
    """Return True if there is a CUDA driver, without which no GPU is looked for."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def current_device_memory() -> HostMemory:
    """Return the memory of this process's GPU."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return HostMemory(total, free, GPU)


def refuse_device_of_layout(device: str, layout: object, prefix: str = "") -> None:
    """Raise `UserError` for device "cuda" together with a layout, whose local ranks compute on the CPU. prefix: of both
    names in the message, such as "--".
    """
    if layout is not None and device == "cuda":
        raise UserError(
            f"{prefix}layout with {prefix}device cuda: the ranks of a layout compute on the CPU; leave one of them out"
        )


def choose_device(wanted: str, local_rank: int) -> str:
    """Return "cpu" or "cuda:N" for the recipe's run.device (`wanted`), one GPU for each local rank.

    `UserError` when there is no such device.
    """
    if wanted == "cpu":
        return "cpu"
    count = len(_visible_devices())
    if wanted == "auto" and count == 0:
        return "cpu"
    if local_rank >= count:
        raise UserError(
            f'run.device = "{wanted}": this machine has {_format_devices(count)}, and rank {local_rank} on it needs '
            'one of its own; start fewer ranks here or set run.device = "cpu"'
        )
    return f"cuda:{local_rank}"


@dataclass(frozen=True, slots=True)
class Seat:
    """Host and GPUs of one rank that another tool started: host name, local rank if known, UUIDs of the GPUs visible to
    it."""

    host: str
    local_rank: int | None
    devices: Sequence[str]


def agree_on_device(wanted: str, place: Place, store: Store) -> str:
    """Return this rank's device, "cpu" or "cuda:N", where torchrun, Kubernetes or SLURM started the ranks.

    wanted: the recipe's run.device. Collective: every rank calls it with the common store; all raise the same
    `UserError`. The local rank may be unknown, and each rank may see one GPU only.
    """
    if wanted == "cpu":
        return "cpu"
    seat = Seat(socket.gethostname(), place.local_rank, _visible_devices())
    store.set(f"meshwright/seat/{place.rank}", json.dumps(asdict(seat)))
    if place.rank == 0:
        said = store.multi_get([f"meshwright/seat/{rank}" for rank in range(place.ranks)])
        try:
            answer: dict[str, object] = {"devices": assign_devices(wanted, [Seat(**json.loads(text)) for text in said])}
        except UserError as error:
            answer = {"problem": str(error)}
        store.set("meshwright/devices", json.dumps(answer))
    agreed = json.loads(store.get("meshwright/devices"))
    if "problem" in agreed:
        raise UserError(agreed["problem"])
    return str(agreed["devices"][place.rank])


def assign_devices(wanted: str, seats: Sequence[Seat]) -> list[str]:
    """Return the device of each rank, "cpu" or "cuda:N" among the GPUs visible to it: N is its local rank, or 0 if it
    sees one.

    wanted: the recipe's run.device; seats: by rank. `UserError` when a rank has no GPU, or two ranks share one.
    """
    if wanted == "auto" and not any(seat.devices for seat in seats):
        return ["cpu"] * len(seats)
    chosen: list[str] = []
    taken: dict[tuple[str, str], int] = {}
    for rank, (seat, local) in enumerate(zip(seats, _local_ranks(seats), strict=True)):
        index = 0 if len(seat.devices) == 1 else local
        if not 0 <= index < len(seat.devices):
            raise UserError(
                f'run.device = "{wanted}": {seat.host} has {_format_devices(len(seat.devices))}, and rank {rank}, '
                f'number {local} there, needs one of its own; start fewer ranks there or set run.device = "cpu"'
            )
        other = taken.setdefault((seat.host, seat.devices[index]), rank)
        if other != rank:
            raise UserError(
                f'run.device = "{wanted}": ranks {other} and {rank} on {seat.host} would share one GPU; start one rank '
                'for each GPU, let each see all GPUs or one of its own, or set run.device = "cpu"'
            )
        chosen.append(f"cuda:{index}")
    return chosen


def _local_ranks(seats: Sequence[Seat]) -> list[int]:
    """Return each rank's local rank: as reported if all ranks of its host reported different ones, else in order of
    ranks."""
    by_host: dict[str, list[int]] = {}
    for rank, seat in enumerate(seats):
        by_host.setdefault(seat.host, []).append(rank)
    numbers = [0] * len(seats)
    for ranks in by_host.values():
        local_ranks = [number for rank in ranks if (number := seats[rank].local_rank) is not None]
        trusted = len(set(local_ranks)) == len(ranks)
        for rank, number in zip(ranks, local_ranks if trusted else range(len(ranks)), strict=True):
            numbers[rank] = number
    return numbers


def _visible_devices() -> list[str]:
    """Return the UUIDs of the GPUs visible to this process."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def _format_devices(count: int) -> str:
    """Format a number of CUDA devices."""
    return f"{count} CUDA device{'s' if count != 1 else ''}" if count else "no CUDA device"
