"""Choice of the device on which each process computes. Imports torch only where the answer depends on the machine."""

from __future__ import annotations

import ctypes
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError
from meshwright.launcher.host_memory import GPU, HostMemory
from meshwright.names import DEVICES, unknown

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from meshwright.launcher.rendezvous import RendezvousInfo


def choose_single_device(wanted: str) -> str:
    """Choose the device of a program that uses a single device: return "cpu" or "cuda". CUDA_VISIBLE_DEVICES determines
    which GPU.

    wanted: "auto" (the GPU if there is one), "cpu" or "cuda". `UserError` for an unknown name or a missing device.
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


def choose_rank_devices(wanted: str, ranks: int) -> list[HostMemory]:
    """Choose the devices for `ranks` ranks on this machine; return the memory of each rank's GPU, an empty list if they
    run on CPUs. A child process queries the GPUs, so that torch is not imported here.

    wanted: "auto", "cpu" or "cuda". `UserError` for an unknown name, or fewer GPUs than ranks.
    """
    if wanted not in DEVICES:
        raise UserError(unknown("device", wanted, DEVICES))
    found: list[HostMemory] = []
    if wanted != "cpu" and _has_driver():
        looked = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True)
        if looked.returncode:
            reason = (looked.stderr.strip() or str(looked.returncode)).splitlines()[-1]
            raise UserError(
                f'device "{wanted}": the GPUs of this machine cannot be queried ({reason}); "cpu" needs none'
            )
        found = [HostMemory(total, free, GPU) for free, total in json.loads(looked.stdout)]
    if len(found) < ranks and (found or wanted == "cuda"):
        raise UserError(
            f'device "{wanted}": this machine has {_format_devices(len(found))}, and each of the layout\'s {ranks} '
            f'rank{"s" if ranks > 1 else ""} here needs one; "cpu" computes the same, more slowly'
        )
    return found[:ranks]


def _has_driver() -> bool:
    """Return True if a CUDA driver is installed (a precondition for GPUs, checked without importing torch)."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def read_device_memory() -> HostMemory:
    """Return the total and the available memory of this process's current GPU in bytes, as a `HostMemory`."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return HostMemory(total, free, GPU)


def refuse_device_of_layout(device: str, layout: object, prefix: str = "") -> None:
    """Raise `UserError` if a user requests the device "cuda" together with a layout (`layout` is not None): the local
    ranks of a layout compute on the CPU. prefix: text before the option names "device" and "layout" in the message,
    such as "--"."""
    if layout is not None and device == "cuda":
        raise UserError(
            f"{prefix}layout with {prefix}device cuda: the ranks of a layout compute on the CPU; leave one of them out"
        )


def choose_device(wanted: str, local_rank: int) -> str:
    """Return the device of a rank, "cpu" or "cuda:N" with N = `local_rank`. wanted: "auto", "cpu" or "cuda".
    `UserError` if there is no such device."""
    if wanted == "cpu":
        return "cpu"
    count = len(_list_visible_devices())
    if wanted == "auto" and count == 0:
        return "cpu"
    if local_rank >= count:
        raise UserError(
            f'device "{wanted}": this machine has {_format_devices(count)}, and rank {local_rank} on it needs '
            'its own; start fewer ranks here or choose device "cpu"'
        )
    return f"cuda:{local_rank}"


@dataclass(frozen=True, slots=True)
class RankDevices:
    """Host and GPUs of one rank that torchrun, Kubernetes or SLURM started.

    host: host name. local_rank: index of the rank on that host, from 0; None if unknown. devices: UUIDs of the GPUs
    that are visible to the rank."""

    host: str
    local_rank: int | None
    devices: Sequence[str]


def agree_on_device(wanted: str, info: RendezvousInfo, store: Store) -> str:
    """Choose this rank's device, "cpu" or "cuda:N", in agreement with all other ranks that torchrun, Kubernetes or
    SLURM started.

    wanted: "auto", "cpu" or "cuda". info: this rank's number, the number of ranks, and the local rank if known. store:
    key-value store that all ranks share. Collective: every rank calls it, and all raise the same `UserError` if any
    rank has no device. The function also works if the local rank is unknown, or if each rank sees only one GPU.
    """
    if wanted == "cpu":
        return "cpu"
    own = RankDevices(socket.gethostname(), info.local_rank, _list_visible_devices())
    store.set(f"meshwright/seat/{info.rank}", json.dumps(asdict(own)))
    if info.rank == 0:
        texts = store.multi_get([f"meshwright/seat/{rank}" for rank in range(info.ranks)])
        try:
            answer: dict[str, object] = {
                "devices": assign_devices(wanted, [RankDevices(**json.loads(text)) for text in texts])
            }
        except UserError as error:
            answer = {"problem": str(error)}
        store.set("meshwright/devices", json.dumps(answer))
    agreed = json.loads(store.get("meshwright/devices"))
    if "problem" in agreed:
        raise UserError(agreed["problem"])
    return str(agreed["devices"][info.rank])


def assign_devices(wanted: str, rank_devices: Sequence[RankDevices]) -> list[str]:
    """Assign a device, "cpu" or "cuda:N", to each rank, and return the list. N is an index among the GPUs visible to
    the rank: the local rank, or 0 if only one GPU is visible.

    wanted: "auto", "cpu" or "cuda". rank_devices: host and GPUs of each rank. `UserError` if a rank has no GPU, or two
    ranks would share one.
    """
    if wanted == "auto" and not any(each.devices for each in rank_devices):
        return ["cpu"] * len(rank_devices)
    chosen: list[str] = []
    taken: dict[tuple[str, str], int] = {}
    for rank, (each, local) in enumerate(zip(rank_devices, _number_local_ranks(rank_devices), strict=True)):
        index = 0 if len(each.devices) == 1 else local
        if not 0 <= index < len(each.devices):
            raise UserError(
                f'device "{wanted}": {each.host} has {_format_devices(len(each.devices))}, and rank {rank}, '
                f'number {local} there, needs its own; start fewer ranks there or choose device "cpu"'
            )
        other = taken.setdefault((each.host, each.devices[index]), rank)
        if other != rank:
            raise UserError(
                f'device "{wanted}": ranks {other} and {rank} on {each.host} would share one GPU; start one rank '
                'for each GPU, let each see all GPUs or only its own, or choose device "cpu"'
            )
        chosen.append(f"cuda:{index}")
    return chosen


def _number_local_ranks(rank_devices: Sequence[RankDevices]) -> list[int]:
    """Return the local rank (number on its host) of each global rank. If the local ranks that the ranks of a host
    reported are all different, these are returned; else the ranks of the host are numbered from 0 in order of global
    rank. rank_devices: host and GPUs of each global rank."""
    by_host: dict[str, list[int]] = {}
    for rank, each in enumerate(rank_devices):
        by_host.setdefault(each.host, []).append(rank)
    numbers = [0] * len(rank_devices)
    for ranks in by_host.values():
        local_ranks = [number for rank in ranks if (number := rank_devices[rank].local_rank) is not None]
        trusted = len(set(local_ranks)) == len(ranks)
        for rank, number in zip(ranks, local_ranks if trusted else range(len(ranks)), strict=True):
            numbers[rank] = number
    return numbers


def _list_visible_devices() -> list[str]:
    """Return the UUIDs of the GPUs visible to this process."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def get_pci_address(device: str) -> str:
    """Return the address on the PCI bus of a GPU "cuda:N", such as "0000:1b:00.0", as Linux' /sys names it."""
    import torch

    found: Any = torch.cuda.get_device_properties(device)  # torch's type stubs lack these fields
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _format_devices(count: int) -> str:
    """Format `count` CUDA devices as text, such as "2 CUDA devices"."""
    return f"{count} CUDA device{'s' if count != 1 else ''}" if count else "no CUDA device"
