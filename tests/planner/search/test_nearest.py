"""The nearest layouts if none fits."""

from __future__ import annotations

from meshwright.planner.api import plan
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.search.estimate import problem_of
from meshwright.planner.search.nearest import find_nearest, resize_cluster
from meshwright.planner.search.screen import screen
from meshwright.planner.search.search import search
from meshwright.planner.search.shortlist import add_device_overhead
from meshwright.planner.show.text import nearest_text, search_text

WANTED = {"sequence": 2048, "batch": 64}


def test_nearest_reports_least_memory_and_sufficient_devices():
    found = search(problem_of("llama-3-70b", "8xa100-40", **WANTED))
    closest = find_nearest(found)
    assert closest is not None and not found.best and not closest.least.fits and closest.enough is not None
    room = found.problem.cluster.device.memory_bytes
    # By closed forms, which are at most a fifth off here, no layout needs much less.
    assert (
        add_device_overhead(found.problem, screen(found.problem).bytes).min()
        > 0.8 * closest.least.memory.device_bytes
        > 0.8 * room
    )
    # The suggested number of devices suffices; half of it does not.
    assert plan("llama-3-70b", f"{closest.devices}xa100-40", closest.enough.layout, **WANTED).best.fits
    half = problem_of("llama-3-70b", f"{closest.devices // 2}xa100-40", **WANTED)
    assert add_device_overhead(half, screen(half).bytes).min() > 0.9 * room
    text = f"{search_text(found)}\n{nearest_text(closest)}"
    assert f"{closest.devices} devices would suffice: {closest.enough.layout}, " in text and "none of them fits" in text
    assert closest.document()["enough"]["devices"] == closest.devices


def test_larger_cluster_has_same_links_or_those_of_catalogue():
    assert resize_cluster(cluster("2xh100-sxm"), 16) == cluster({"device": "h100-sxm", "devices": 16})
    slow = cluster({"device": "h100-sxm", "devices": 16, "across_gb_per_second": 1})
    more = resize_cluster(slow, 32)
    assert more is not None and (more.devices, more.nodes, more.across) == (32, 4, slow.across)
    mine = cluster({"device": {"like": "h100-sxm", "memory_bytes": 1e9}, "devices": 8})
    assert resize_cluster(mine, 16) is None  # unknown links
