"""Which device each process computes on. Asks torch only where the answer depends on the machine."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from meshwright.errors import UserError
from meshwright.names import DEVICES, unknown

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from meshwright.launcher.rendezvous import Place


def one_device(wanted: str) -> str:
    """ "cpu" or "cuda" for one of the names `DEVICES`; "auto": the GPU where there is one. `UserError` when there is no
    such name or no such device. CUDA_VISIBLE_DEVICES says which GPU is the first."""
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


def refuse_device_of_layout(device: str, layout: object) -> None:
    """Raise `UserError` for a device on which the local ranks of a layout do not compute."""
    if layout is not None and device == "cuda":
        raise UserError("layout with device cuda: the ranks of a layout compute on the CPU; leave one of them out")


def choose_device(wanted: str, local_rank: int) -> str:
    """ "cpu" or "cuda:N" for the recipe's run.device, where this machine's ranks are numbered and share what is there.
    `UserError` when there is no such device."""
    if wanted == "cpu":
        return "cpu"
    count = len(_visible_devices())
    if wanted == "auto" and count == 0:
        return "cpu"
    if local_rank >= count:
        raise UserError(
            f'run.device = "{wanted}": this machine has {_devices(count)}, and rank {local_rank} on it needs one of '
            'its own; start fewer ranks here or set run.device = "cpu"'
        )
    return f"cuda:{local_rank}"


@dataclass(frozen=True, slots=True)
class Seat:
    """What a rank that others started knows of its place: the machine, its number among the ranks there if somebody
    said so, and the GPUs that it may use, each by a name of its own."""

    host: str
    local_rank: int | None
    devices: Sequence[str]


def agree_on_device(wanted: str, place: Place, store: Store) -> str:
    """The same for ranks that others started, who need not have said which rank is the how-many-th of its machine, and
    may have bound each rank to a GPU of its own. Every rank calls this; all raise the same `UserError`."""
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
    """The device of each rank, "cpu" or "cuda:N" of what it may use: its number on its machine, or the only one that it
    was bound to. `UserError` when a rank would have none, or two the same."""
    if wanted == "auto" and not any(seat.devices for seat in seats):
        return ["cpu"] * len(seats)
    chosen: list[str] = []
    taken: dict[tuple[str, str], int] = {}
    for rank, (seat, local) in enumerate(zip(seats, _local_ranks(seats), strict=True)):
        index = 0 if len(seat.devices) == 1 else local
        if not 0 <= index < len(seat.devices):
            raise UserError(
                f'run.device = "{wanted}": {seat.host} has {_devices(len(seat.devices))}, and rank {rank}, number '
                f'{local} there, needs one of its own; start fewer ranks there or set run.device = "cpu"'
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
    """Each rank's number on its machine: as they were told where all ranks of the machine were told different ones,
    else in the order of ranks."""
    by_host: dict[str, list[int]] = {}
    for rank, seat in enumerate(seats):
        by_host.setdefault(seat.host, []).append(rank)
    numbers = [0] * len(seats)
    for ranks in by_host.values():
        told = [number for rank in ranks if (number := seats[rank].local_rank) is not None]
        trusted = len(set(told)) == len(ranks)
        for rank, number in zip(ranks, told if trusted else range(len(ranks)), strict=True):
            numbers[rank] = number
    return numbers


def _visible_devices() -> list[str]:
    """The GPUs that this process may use, by names that are theirs alone on the machine."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def _devices(count: int) -> str:
    return f"{count} CUDA device{'s' if count != 1 else ''}" if count else "no CUDA device"
