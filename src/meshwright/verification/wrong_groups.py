"""Wrong process groups of a mesh axis, for the injection of the fault "wrong group"."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

from meshwright.layout import Layout


def list_axis_groups(layout: Layout, name: str) -> list[tuple[int, ...]]:
    """Return all groups of ranks along the mesh axis or sub-axis `name` of a layout, as tuples of global ranks.

    name: "data", "tp/2" (blocks of 2 consecutive ranks of tp) or "pp[0,3]" (ranks at indices 0 and 3 of pp).
    """
    if match := re.fullmatch(r"(\w+)/(\d+)", name):
        size = int(match[2])
        whole = layout.groups(match[1])
        return [ranks[start : start + size] for ranks in whole for start in range(0, len(ranks), size)]
    if match := re.fullmatch(r"(\w+)\[([\d,]+)\]", name):
        return [tuple(ranks[int(place)] for place in match[2].split(",")) for ranks in layout.groups(match[1])]
    return layout.groups(name)


def make_wrong_groups(layout: Layout, name: str, equal: bool, alike: Sequence[Hashable]) -> list[tuple[int, ...]]:
    """Return process groups to use in place of the right groups of the mesh axis `name` of `layout`, for the injected
    fault "wrong group". Each wrong group is a tuple of global ranks. Ranks that cannot be regrouped are in none; the
    list may be empty.

    Ranks are regrouped among ranks with equal values in `alike` and, unless the axis spans pipeline stages, of one
    stage. Wrong groups are as large as the right groups and consist of consecutive ranks. If the right groups
    themselves consist of consecutive ranks, a wrong group takes the ranks with one index in their right groups instead.

    equal: False: where there is a single right group of more than two ranks, cut it into halves; True: leave it out.
    alike: [ranks], a value that describes the calls that each rank makes. Ranks with different calls in one group would
    wait for calls that are never made.
    """
    across = name == "world" or name.startswith("pp")
    classes: dict[Hashable, list[tuple[int, ...]]] = {}
    for ranks in list_axis_groups(layout, name):
        stage = 0 if across else layout.coordinates(ranks[0])["pp"]
        classes.setdefault((stage, alike[ranks[0]]), []).append(ranks)
    others: list[tuple[int, ...]] = []
    for groups in classes.values():
        size = len(groups[0])
        if len(groups) > 1 and size > 1:
            flat = sorted(rank for ranks in groups for rank in ranks)
            cut = [tuple(flat[start : start + size]) for start in range(0, len(flat), size)]
            if sorted(cut) == sorted(groups):  # strided: consecutive ranks are the right groups
                cut = [tuple(flat[start :: len(groups)]) for start in range(len(groups))]
            others += cut
        elif size > 2 and not equal:
            others += [groups[0][: size // 2], groups[0][size // 2 :]]
    return others
