"""Legend of the layout notation, and the recipe lines of a planned layout."""

from __future__ import annotations

import re
from collections.abc import Iterable

from meshwright.layout import Layout
from meshwright.names import PRECISIONS
from meshwright.planner.search.estimate import Estimate

_PARTS = (
    (r"dp\d+", "dpN", "N replicas of the model (data parallelism)"),
    (r"zero1", "zero1", "optimizer states sharded over dp and cp"),
    (r"zero2", "zero2", "optimizer states and gradients sharded over dp and cp"),
    (r"zero3", "zero3", "optimizer states, gradients and parameters sharded over dp and cp"),
    (r"hs\d+", "hsN", "sharded inside groups of N ranks, replicated between them"),
    (r"tp\d+", "tpN", "every matrix split over N ranks (tensor parallelism)"),
    (r"tp\d+:nosp", ":nosp", "norms replicated on tp ranks, without sequence parallelism"),
    (r"cp\d+", "cpN", "every sequence split over N ranks (context parallelism)"),
    (r"cp\d+:ring", ":ring", "ring attention"),
    (r"cp\d+:ulysses", ":ulysses", "attention heads exchanged by all-to-all"),
    (r"ep\d+", "epN", "experts distributed over N ranks (expert parallelism)"),
    (r"ep\d+:etp\d+", ":etpN", "every expert split over N ranks"),
    (r"pp\d+", "ppN", "layers split into N pipeline ranks"),
    (r"pp\d+:.+", ":SCHEDULE:V", "pipeline schedule, with V stages per rank"),
    (r"mb\d+", "mbN", "N micro-batches per step and replica"),
    (
        r"ac:selective",
        "ac:selective",
        "all activations except the results of matrix products and reductions recomputed in backward",
    ),
    (r"ac:full", "ac:full", "all activations of blocks recomputed in backward"),
    *((name, name, "precision of matrix products") for name in PRECISIONS),
)


def notation_legend(layouts: Iterable[Layout]) -> list[tuple[str, str]]:
    """Return (part of the layout notation, meaning), such as ("dpN", "N replicas ..."), for every part that occurs in
    `layouts`."""
    words = {word for layout in layouts for word in str(layout).split()}

    def occurs(pattern: str) -> bool:
        """Return True if the regular expression `pattern` matches a word of the layouts; one without ":" may also match
        the beginning of a word, up to a ":"."""
        return any(re.fullmatch(pattern if ":" in pattern else rf"{pattern}(:.*)?", word) for word in words)

    return [(part, meaning) for pattern, part, meaning in _PARTS if occurs(pattern)]


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
