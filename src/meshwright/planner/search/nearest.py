"""The layout that needs the least memory if none fits, and the number of devices that would suffice."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.hardware.cluster import Cluster, cluster
from meshwright.planner.hardware.devices import find_device
from meshwright.planner.memory.rank_memory import peak_device_bytes
from meshwright.planner.problem import Problem
from meshwright.planner.search.estimate import Estimate, estimate_layout
from meshwright.planner.search.screen import ScreenedLayouts, screen
from meshwright.planner.search.search import SearchResult
from meshwright.planner.search.shortlist import DOUBT_ABOVE, add_device_overhead

MOST_ASKED = 8
"""Number of layouts whose memory the ledger computes: those with the lowest closed-form memory, whose median error is
8%."""

MOST_DOUBLINGS = 6
"""How often the search for a sufficient cluster doubles the number of devices, from the smallest plausible number."""


@dataclass(frozen=True, slots=True)
class Nearest:
    """Two estimates for a search in which no layout fits.

    least: layout with the lowest memory peak on the given devices. enough: layout that fits on 2, 4, ... times as many
    devices; None if the links of more devices are unknown, or no number of devices that was tried suffices."""

    least: Estimate
    enough: Estimate | None

    @property
    def devices(self) -> int | None:
        """Number of devices on which a layout fits; None if unknown."""
        return None if self.enough is None else self.enough.problem.cluster.devices

    def document(self) -> dict[str, Any]:
        """Return the JSON entry "nearest" of `plan --json`: both layouts, and the number of devices that suffices."""
        return {
            "least": self.least.document(),
            "enough": None if self.enough is None else {"devices": self.devices} | self.enough.document(),
        }


def find_nearest(result: SearchResult) -> Nearest | None:
    """Return the layouts that come closest to fitting, for a search in which no layout fits. Return None if training
    cannot run any of the layouts with the lowest memory. result: result of the search."""
    assert not result.best
    least = _least(result.problem, result.screened)
    return None if least is None else Nearest(least, _enough(least))


def _least(problem: Problem, screened: ScreenedLayouts) -> Estimate | None:
    """Return the estimate of the layout with the lowest memory peak by the memory ledger; if several fit, of the
    fastest. None if training cannot run any layout that was tried. screened: closed-form predictions; the layouts with
    the lowest predicted memory are tried."""
    sized: list[tuple[float, float, Layout]] = []  # bytes, at least those that may be used; closed-form seconds; layout
    for at in np.argsort(screened.bytes, kind="stable"):
        layout = screened.layout(at)
        if problem.accepts(layout):
            with suppress(UserError):
                size = peak_device_bytes(problem, layout)
                sized.append((max(float(size), problem.usable_bytes), float(screened.seconds[at]), layout))
        if len(sized) == MOST_ASKED:
            break
    return estimate_layout(problem, min(sized, key=lambda each: each[:2])[2]) if sized else None


def _enough(least: Estimate) -> Estimate | None:
    """Return the estimate of a layout that fits on 2, 4, ... times as many devices; None if none fits or the links are
    unknown. least: estimate of the layout with the lowest memory peak on the given devices."""
    problem, room = least.problem, least.problem.usable_bytes
    # What more ranks can share is at most all of it.
    factor = max(2, 2 ** math.floor(math.log2(least.memory.device_bytes / room)))
    for _ in range(MOST_DOUBLINGS):
        larger = resize_cluster(problem.cluster, factor * problem.cluster.devices)
        if larger is None:
            return None
        wanted = replace(problem, cluster=larger)
        every = screen(wanted)
        near = len(every.candidate) and add_device_overhead(wanted, every.bytes).min() < DOUBT_ABOVE * room
        one = _least(wanted, every) if near else None
        if one is not None and one.fits:
            return one
        factor *= 2
    return None


def resize_cluster(here: Cluster, devices: int) -> Cluster | None:
    """Return a cluster of `devices` devices like `here`. If `here` has several nodes, nodes of the same size are added.
    If it has one node, the result is the catalogue's cluster for its device. None if the links of the larger cluster
    are unknown."""
    if here.nodes > 1:
        return replace(here, name=f"{devices}x{here.device.name}", devices=devices)
    if here.measured is None and find_device(here.device.name) == here.device:
        with suppress(UserError):  # not whole nodes, or links that nobody has published
            return cluster({"device": here.device.name, "devices": devices})
    return None
