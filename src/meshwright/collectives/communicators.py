"""Communicators of a layout under NCCL: which mesh axes share one. Torch-free.

NCCL runs the calls of a communicator one after the other. Axes over the same ranks share a communicator, unless the
calls of one would then wait for those of another with which they should overlap. Separate are:

- calls of layers, such as a ring step or a dispatch of tokens, from all-gathers of parameters and reductions of
  gradients over the same ranks;
- under ZeRO-3 reductions of gradients from all-gathers of parameters: in backward, the all-gather of the next FSDP unit
  is posted behind the reduce-scatter of the last one. FairScale's FSDP gained 8.5% and 20% by it
  (facebookresearch/fairscale, pull request 897); Megatron's FSDP and PyTorch's `fully_shard` offer it
  (NVIDIA/Megatron-LM, 2663; pytorch/pytorch, 186335).

Below ZeRO-3 the latter would gain nothing: all-gathers of updated parameters are posted after the last reduction of a
step has ended, and the first reduction of the next step is posted after a forward pass. On gloo, which runs the calls
of a group concurrently, no group is separate.

Kernels of several communicators cannot deadlock if all ranks post them in one order and the device keeps to it, or has
room for all of them (NCCL's user guide, "Using multiple NCCL communicators concurrently"). All ranks post in one order.
`NCCL_LAUNCH_ORDER_IMPLICIT=1` makes devices keep to it; it is not set, because each call then starts after those posted
before it have started: a layer's call would again wait while reductions are queued.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from meshwright.layout import Layout

LAYER_AXES = ("tp", "cp", "pp", "ep", "etp")
"""Axes over which layers communicate while they compute."""
STATE_AXES = ("data", "shard", "replica")
"""Axes over which parameters are gathered and gradients reduced, while layers compute."""
REDUCTION_AXES = {"reduction": "shard", "expert_reduction": "expert_shard"}
"""Axes over which ZeRO reduce-scatters gradients -> axes of the same ranks, over which it all-gathers parameters."""
EXPERT_STATE_AXES = ("expert_data", "expert_shard", "expert_reduction", "expert_replica")
"""Counterparts of state and reduction axes for parameters of experts."""


class Communicator(NamedTuple):
    """Ranks of a communicator, numbered `stride` apart. purpose: as in `list_purposes`, the name of a sub-axis
    of pp, or ""."""

    size: int
    stride: int
    purpose: str


def list_purposes(layout: Layout) -> dict[str, str]:
    """Return {mesh axis: "layers" or "reductions"} for the axes whose communicators are separate from those of other
    axes over the same ranks."""
    of_states = {_find_ranks(layout, axis) for axis in STATE_AXES}
    found = {axis: "layers" for axis in LAYER_AXES if _find_ranks(layout, axis) in of_states}
    return found | (dict.fromkeys(REDUCTION_AXES, "reductions") if layout.zero == 3 else {})


def list_communicators(
    layout: Layout, sub_axes: Mapping[str, Communicator] = MappingProxyType({})
) -> dict[Communicator, list[str]]:
    """Return the communicators of more than one rank that a rank of the engine uses, each with its mesh axes.

    sub_axes: further axes of the rank, over ranks that hold the same parameters
    (`spec.partition.Partition.list_sub_axes`)."""
    found: dict[Communicator, list[str]] = {}
    purposes = list_purposes(layout)
    for axis in (*LAYER_AXES, *STATE_AXES, "reduction", *EXPERT_STATE_AXES, "world"):
        size, stride = _find_ranks(layout, axis)
        if size > 1 and (layout.expert_parallel or not axis.startswith("e")):
            found.setdefault(Communicator(size, stride, purposes.get(axis, "")), []).append(axis)
    for axis, communicator in sub_axes.items():
        found.setdefault(communicator, []).append(axis)
    return found


def _find_ranks(layout: Layout, axis: str) -> tuple[int, int]:
    """Return the number of ranks in a group of a mesh axis and the distance of two neighbours: each group is an
    arithmetic progression."""
    axis = REDUCTION_AXES.get(axis, axis)
    return layout.group_size(axis), _find_stride(layout, axis)


def _find_stride(layout: Layout, axis: str) -> int:
    """Return the distance of two neighbouring ranks in a group of a mesh axis other than a reduction's."""
    if axis.endswith("replica"):
        shard = axis.replace("replica", "shard")
        return _find_stride(layout, shard) * layout.group_size(shard)
    strides = {"tp": 1, "etp": 1, "world": 1, "ep": layout.etp, "pp": layout.tp * layout.cp * layout.dp}
    return strides.get(axis, layout.ep * layout.etp if axis.startswith("expert") else layout.tp)
