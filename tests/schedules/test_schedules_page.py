"""Every figure in docs/schedules.md is recomputed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshwright.names import SCHEDULES as KNOWN
from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.pipeline import LETTERS, PipelineProgram, build_program
from meshwright.program.pipeline_text import format_pipeline, parse_pipeline
from meshwright.program.simulate_pipeline import Durations, simulate_pipeline
from meshwright.schedules.library import generate
from meshwright.schedules.named import SCHEDULES
from meshwright.schedules.pytorch_csv import to_csv
from meshwright.schedules.synchronous import one_f_one_b

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "schedules.md").read_text()
RANKS, MICRO_BATCHES = 8, 32


def rows(head: str) -> list[list[str]]:
    """Return the rows of the table whose header begins with `head`."""
    [table] = re.findall(rf"^\| {re.escape(head)}.*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", PAGE, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def span(values: np.ndarray) -> str:
    low, high = f"{values.min():g}", f"{values.max():g}"
    return low if low == high else f"{low} to {high}"


def test_documented_figures_match_simulation():
    found = []
    for name in SCHEDULES:
        program = generate(name, RANKS, MICRO_BATCHES)
        timing = simulate_pipeline(program, Durations.per_rank(program))
        found.append(
            [
                f"`{name}`",
                f"{timing.makespan:g}",
                f"{100 * timing.bubble_fraction:.1f}%",
                f"{timing.idle.max():g}",
                span(timing.peak_activations),
                f"{timing.weight_copies.max():g}",
                str(timing.messages_sent.max()),
            ]
        )
    assert rows("schedule | makespan | bubble fraction") == found


def test_published_comparison_matches_simulation():
    D, N = RANKS, MICRO_BATCHES
    published = {
        "0": 0.0,
        "(D−1)/(N+D−1)": (D - 1) / (N + D - 1),
        "about (D−1)/(D+1/2)": (D - 1) / (D + 0.5),
        "(D−2)/(2N+D−2)": (D - 2) / (2 * N + D - 2),
    }
    table = rows("published as")
    assert len(table) == 6
    for _, name, formula, value, simulated, _, weights, _, activations in table:
        program = generate(name.strip("`"), D, N)
        half = 0.5 if name == "`chimera`" else 1.0  # Chimera's formula assumes B = F
        timing = simulate_pipeline(program, Durations.per_rank(program, 1, half, half))
        bubble = timing.steady_bubble_fraction if program.asynchronous else timing.bubble_fraction
        assert value == f"{100 * published[formula]:.1f}%"
        assert simulated == f"{100 * bubble:.1f}%"
        assert bubble == pytest.approx(published[formula], abs=0.003)
        assert [weights, activations] == [span(timing.weight_copies), span(timing.peak_activations)]


def straight_on(program: PipelineProgram, steps: int) -> PipelineProgram:
    """Return several training steps in sequence, without synchronization of the ranks between them."""
    s = program.steps
    columns = [s.rank, s.group, s.kind, s.stage, s.replica, s.micro_batch, s.component]
    once = np.stack(columns, axis=1)
    again = [once + np.array([0, k * len(s), 0, 0, 0, k * program.micro_batches, 0]) for k in range(steps)]
    return build_program(
        program.name, program.ranks, steps * program.micro_batches, program.placement, np.concatenate(again)
    )


def test_documented_step_costs_with_and_without_synchronisation_match():
    [heads] = re.findall(r"^\| 8 ranks, 32 micro-batches, F = I = W = 1 \|(.*)\|$", PAGE, re.MULTILINE)
    meets, goes_on = rows("8 ranks, 32")
    for head, meeting, going in zip(heads.split("|"), meets[1:], goes_on[1:], strict=True):
        program = generate(head.strip(" `"), RANKS, MICRO_BATCHES)

        def lasts(steps: int, program: PipelineProgram = program) -> float:
            several = straight_on(program, steps)
            check_pipeline(several)
            return simulate_pipeline(several, Durations.per_rank(several)).makespan

        assert float(meeting) == lasts(1)
        assert float(going) == lasts(4) - lasts(3)


def test_every_schedule_and_step_kind_is_documented():
    sections = re.findall(r"^### (.*)$", PAGE.partition("## The schedules")[2].partition("\n## ")[0], re.MULTILINE)
    assert [name for section in sections for name in section.split(" and ")] == list(KNOWN)
    assert re.findall(r"`([A-Z_]+)`", " ".join(row[0] for row in rows("kind | step"))) == list(LETTERS.values())


@pytest.mark.parametrize("write", [format_pipeline, to_csv])
def test_documented_1f1b_listings_are_generated_ones(write: Callable[[PipelineProgram], str]):
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert write(one_f_one_b(2, 2)) in blocks


def test_documented_program_text_parses():
    [text] = [
        text for text in re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if "pipeline" in text
    ]
    assert parse_pipeline(text).steps == one_f_one_b(2, 2).steps


def test_documented_python_runs(capsys: pytest.CaptureFixture[str]):
    search, parts, clock = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(search, {})
    assert "V wins: makespan 28.2, 1.02" in capsys.readouterr().out
    exec(parts, {})
    assert capsys.readouterr().out.startswith("6.0 ")
    exec(clock, {})
    assert "27.0 " in capsys.readouterr().out
