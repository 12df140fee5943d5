"""Times over size of all algorithms on a network of two nodes, simulated once for all tests."""

from __future__ import annotations

from functools import cache

from meshwright.collectives.choose import Chooser
from meshwright.collectives.crossover import Curves
from meshwright.collectives.topologies import parse_topology


@cache
def simulate_example_curves() -> Curves:
    return Curves.simulate(Chooser("all-reduce", parse_topology("nodes:2x3,outer=10GB/s,5us", 6)), most=2**26)
