"""Final selection of a search: the fastest layout of each kind, and why each loses to the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from meshwright.layout import Layout
from meshwright.names import RECOMPUTE
from meshwright.planner.cost.process_groups import Array
from meshwright.planner.cost.step_time import PARTS
from meshwright.planner.search.decided import Decided
from meshwright.planner.search.estimate import Estimate
from meshwright.planner.search.screen import Priced

MOST_KINDS = 12
"""Kinds whose fastest layouts are looked for; further layouts of a longer list are the next fastest of any kind."""


def fastest_of_kinds(decided: Decided, top: int) -> list[Estimate]:
    """Return estimates of `top` layouts, fastest first: the fastest layout of each kind (`layout_kinds`), then the next
    fastest of all. decided: candidates of a search with exact predictions, to which it adds more.

    Layouts of one kind differ only in the sizes of the axes, and their times mostly by less than the error bounds.
    """
    kinds, told, stopped = layout_kinds(decided.every), decided.told.copy(), decided.stopped
    found: list[Estimate] = []
    others: list[tuple[float, int, Layout]] = []
    budget = decided.budget // 3
    for _ in range(min(top, MOST_KINDS)):
        best = decided.estimates(1)
        if not best:
            break
        found += best
        alike = kinds == kinds[decided.best[0][1]]
        others += [entry for entry in decided.best[1:] if alike[entry[1]]]
        if len(found) < top:
            budget -= decided.leave_out(alike, budget)
    told[list(decided.difference)] = np.inf  # decided by now
    decided.told, decided.stopped = told, stopped
    if len(found) < top:
        decided.best = sorted(others)[: top + len(found)]
        found += decided.estimates(top - len(found))
    return sorted(found, key=lambda one: one.time.seconds)


def layout_kinds(every: Priced) -> Array:
    """Return an integer for each candidate layout that is equal for layouts of one kind: the same axes are larger than
    1, recompute is the same, and ZeRO shards the same of nothing, optimizer states or parameters. every: the
    candidates."""
    kinds = [
        (one.layout.tp > 1) + 2 * (one.layout.cp > 1) + 4 * (one.layout.ep > 1)
        + 8 * RECOMPUTE.index(one.layout.recompute)
        for one in every.candidates
    ]  # fmt: skip
    pipelined = np.array([pipe.ranks > 1 for pipe in every.pipes])[every.pipe]
    level = np.array([0, 1, 1, 2])[every.zero]
    return np.asarray((np.array(kinds)[every.candidate] * 2 + pipelined) * 3 + level)


def describe_losses(best: Sequence[Estimate]) -> Iterator[str]:
    """Yield, for each of the best estimates, text on why it is slower than the first: parts that take longer, in % of
    the first's step."""
    for number, one in enumerate(best):
        if number == 0:
            yield "the fastest"
            continue
        first = best[0].time
        more = {part: (one.time.breakdown[part] - first.breakdown[part]) / first.seconds for part in PARTS}
        worse = sorted((part for part in PARTS if more[part] >= 0.001), key=lambda part: -more[part])[:3]
        less = [part for part in PARTS if more[part] <= -0.001]
        most = max(PARTS, key=lambda part: more[part])
        least = f"{most} +{more[most]:.2%}" if more[most] >= 5e-5 else "as fast"
        text = ", ".join(f"{part} +{more[part]:.1%}" for part in worse) or least
        yield text + (
            f" (less {' and '.join(sorted(less, key=lambda part: more[part])[:2])})" if less and worse else ""
        )
