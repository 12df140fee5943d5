"""Page that compares several runs: results, differing recipe keys, and their curves in common charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.draw.markup import Content, element
from meshwright.draw.page import page, paragraph, table
from meshwright.errors import UserError
from meshwright.monitoring.recipe_keys import compare_recipes
from meshwright.monitoring.report import list_main_results, read_run, write_page
from meshwright.monitoring.report_charts import COLOURS, draw_runs, find_throughput_unit


def write_run_comparison(directories: Sequence[Path]) -> Path:
    """Write `comparison.html`, which compares several runs, into the first of their directories; return its path.

    `UserError` if a run has no training step, if there are more runs than chart colours, or if some runs count
    throughput in tokens and others in samples.
    """
    unlike = {directory.resolve(): directory for directory in directories}
    if not 2 <= len(unlike) <= len(COLOURS):
        raise UserError(f"a comparison takes 2 to {len(COLOURS)} different runs, not {len(unlike)}")
    runs = [read_run(directory) for directory in unlike.values()]
    if len({find_throughput_unit(run.lines) for run in runs}) > 1:
        raise UserError("some runs count throughput in tokens and others in samples, and cannot be compared")
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(directory) for directory in unlike.values()]
    facts = [dict(list_main_results(run.lines, run.result)) for run in runs]
    results = [
        (row, *(each.get(row, "–") for each in facts)) for row in dict.fromkeys(key for each in facts for key in each)
    ]
    keys = compare_recipes([run.recipe for run in runs])
    parts: list[Content] = [
        element("h1", f"{len(runs)} runs"),
        table(("", *names), results),
        element("h2", "Recipe keys that differ"),
        table(("", *names), [(key, *values) for key, values in keys.items()]) if keys else paragraph("None."),
        *draw_runs({name: run.lines for name, run in zip(names, runs, strict=True)}),
    ]
    path = directories[0] / "comparison.html"
    write_page(path, lambda: page("comparison of runs", *parts, narrow=True))
    return path
