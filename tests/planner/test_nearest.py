"""Where nothing fits, what comes nearest."""

from __future__ import annotations

from meshwright.planner.cluster import cluster
from meshwright.planner.estimate import evaluate, problem_of
from meshwright.planner.nearest import nearest, of_devices
from meshwright.planner.screen import screen
from meshwright.planner.search import on_device, search
from meshwright.planner.text import found_text, nearest_text

WANTED = {"sequence": 2048, "batch": 64}


def test_what_needs_the_least_is_told_and_how_many_devices_are_enough():
    found = search(problem_of("llama-3-70b", "8xa100-40", **WANTED))
    told = nearest(found)
    assert told is not None and not found.best and not told.least.fits and told.enough is not None
    room = found.problem.cluster.device.memory_bytes
    # By closed forms, which err by a fifth at most where it is small, nothing needs much less.
    assert (
        on_device(found.problem, screen(found.problem).bytes).min() > 0.8 * told.least.memory.device_bytes > 0.8 * room
    )
    # Followed, the advice fits; with half of the devices nothing does.
    assert evaluate("llama-3-70b", f"{told.devices}xa100-40", told.enough.layout, **WANTED).fits
    half = problem_of("llama-3-70b", f"{told.devices // 2}xa100-40", **WANTED)
    assert on_device(half, screen(half).bytes).min() > 0.9 * room
    text = f"{found_text(found)}\n{nearest_text(told)}"
    assert f"{told.devices} devices would suffice: {told.enough.layout}, " in text and "none of them fits" in text
    assert told.document()["enough"]["devices"] == told.devices


def test_more_devices_are_connected_as_these_are_or_as_the_catalogue_says():
    assert of_devices(cluster("2xh100-sxm"), 16) == cluster({"device": "h100-sxm", "devices": 16})
    slow = cluster({"device": "h100-sxm", "devices": 16, "across_gb_per_second": 1})
    more = of_devices(slow, 32)
    assert more is not None and (more.devices, more.nodes, more.across) == (32, 4, slow.across)
    mine = cluster({"device": {"like": "h100-sxm", "memory_bytes": 1e9}, "devices": 8})
    assert of_devices(mine, 16) is None  # nobody knows how
