"""Legend of the layout notation, and the recipe lines of a planned layout."""

from __future__ import annotations

import re
from collections.abc import Iterable

from meshwright.layout import Layout
from meshwright.planner.search.estimate import Estimate
from meshwright.toml import read_packaged_toml


def notation_legend(layouts: Iterable[Layout]) -> list[tuple[str, str]]:
    """Return (part of the layout notation, meaning), such as ("dpN", "N replicas ..."), for every part that occurs in
    `layouts`."""
    words = {word for layout in layouts for word in str(layout).split()}

    def occurs(pattern: str) -> bool:
        """Return True if the regular expression `pattern` matches a word of the layouts; one without ":" may also match
        the beginning of a word, up to a ":"."""
        return any(re.fullmatch(pattern if ":" in pattern else rf"{pattern}(:.*)?", word) for word in words)

    parts = read_packaged_toml("planner/show/notation.toml")["parts"]
    return [(part, meaning) for pattern, part, meaning in parts if occurs(pattern)]


def recipe_block(estimate: Estimate) -> str:
    """Return TOML lines of recipe keys with which `meshwright train` runs an estimate's layout, sequence length and
    batch."""
    problem = estimate.problem
    return f'layout = "{estimate.layout}"\ndata.sequence = {problem.sequence}\ntrain.batch = {problem.batch}\n'


def selection_note(best: Iterable[Estimate]) -> str:
    """Return a note to print below a table of the best layouts. It says that the table has the fastest layout of each
    kind, and explains the mark "tight" if a layout has this mark. best: estimates in the table."""
    tight = any(one.tight for one in best)
    mark = " Tight: less than 5% of the memory limit stays free." if tight else ""
    return f"The fastest layout of each kind; others of the same kind differ in the sizes of the axes.{mark}"
