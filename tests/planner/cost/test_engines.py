"""The table of training engines."""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.cost.engines import ENGINES


def test_engine_has_the_properties_of_the_engine_that_its_table_names():
    eager, core = ENGINES["megatron-core-eager"], ENGINES["megatron-core"]
    assert eager == replace(core, name=eager.name, source=eager.source, host_seconds=120e-6)
    assert core.dispatches_by_node and core.gradient_bytes == 2 and core.host_seconds != 120e-6  # no defaults


def test_no_engine_has_the_source_of_another():
    sources = [each.source for each in ENGINES.values()]
    assert all(sources) and len(set(sources)) == len(sources)
