"""Tables and sums of the learning path (docs/learn) that no command prints are recomputed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from meshwright.parallel.ring_spans import list_held_chunks, list_spans
from meshwright.planner.api import plan
from meshwright.planner.cost.rates import constants
from meshwright.planner.search.estimate import Estimate
from meshwright.planner.show.explain import explain
from meshwright.schedules.api import schedule
from meshwright.spec.flops import training_flops_per_token
from meshwright.spec.parameter_entries import REDUCTIONS_IN_FLIGHT
from meshwright.spec.presets import preset

LEARN = Path(__file__).resolve().parent.parent / "docs" / "learn"
GIB = 2**30


def read_table(page: str, first: str) -> list[list[str]]:
    """Return the rows below the header of the table of a page whose header begins with the cell `first`; each row is a
    list of its cells, without backticks and bold type."""
    lines = (LEARN / f"{page}.md").read_text().partition(f"\n| {first} |")[2].split("\n")[2:]
    rows = [re.sub("[`*]", "", line).strip("|").split("|") for line in lines[: lines.index("")]]
    return [[cell.strip() for cell in row] for row in rows]


@pytest.fixture(scope="module")
def plans() -> Mapping[str, Estimate]:
    """Plans of page 4 by layout: Llama-3 8B on 8 H100, one sequence of 8,192 tokens."""
    return {name: plan("llama-3-8b", "8xh100-sxm", name, sequence=8192, batch=1).best for name in ("tp8:nosp", "tp8")}


def test_saved_activations_of_tensor_parallel_layouts(plans: Mapping[str, Estimate]):
    *rows, total = read_table("4-tensor-sequence", "saved activations, GiB")
    kinds = (
        ("attention_norm.", "mlp_norm."),
        ("attention.qkv.input", "mlp.up.input"),
        ("attention.",),
        ("mlp.",),
        ("masks",),
        ("",),
    )
    assert len(rows) == len(kinds)
    for column, estimate in enumerate(plans.values(), start=1):
        sizes = [0.0] * len(kinds)
        for item in estimate.memory.items:
            if item.category == "activations":
                name = re.sub(r"^layers\.\d+\.", "", item.name)
                sizes[next(n for n, kind in enumerate(kinds) if name.startswith(kind))] += item.bytes / GIB
        for row, size in zip(rows, sizes, strict=True):
            assert float(row[column] or 0) == pytest.approx(size, abs=0.006), row
        assert float(total[column]) == pytest.approx(sum(sizes), abs=0.005)
    # Korthikanti et al. 2022, section 4: bytes per element of b s h on each of 8 tensor-parallel ranks.
    paper = [2 + 2, 2 + 2, 3 * 2 + 2, 8 + 8, 1 + 1]
    assert [float(row[3]) for row in rows[:-1]] == [each / 8 for each in paper] and sum(paper) == 34
    assert float(total[3]) == 34 / 8


def test_computation_of_tensor_parallel_layouts(plans: Mapping[str, Estimate]):
    *rows, total = read_table("4-tensor-sequence", "computation of a step, ms")
    for column, estimate in enumerate(plans.values(), start=1):
        milliseconds = dict.fromkeys(("norm", "residual", "else"), 0.0)
        for row in explain(estimate.problem, estimate.layout, 0):
            milliseconds[row.operation if row.operation in milliseconds else "else"] += 1e3 * row.seconds
        assert [row[column] for row in rows] == [f"{each:.1f}" for each in milliseconds.values()]
        assert total[column] == f"{sum(milliseconds.values()):.1f}"


def test_launches_of_kernels_are_not_divided_by_tensor_parallelism(plans: Mapping[str, Estimate]):
    text = (LEARN / "4-tensor-sequence.md").read_text()
    without, divided = (
        {
            name: [row for row in explain(one.problem, one.layout, 0) if row.operation == name]
            for name in ("norm", "residual")
        }
        for one in plans.values()
    )
    for name, words in (
        ("norm", "{:,} kernels in norms; in milliseconds, their launches take {:.1f}, "),
        ("residual", "{} in residual additions, whose launches take {:.2f}, "),
    ):
        count = round(sum(row.count for row in without[name]))
        launches = count * float(constants()["memory"]["launch_seconds"])
        assert words.format(count, 1e3 * launches) in text
        before, after = (sum(row.seconds for row in rows[name]) for rows in (without, divided))
        assert (before - launches) / 8 + launches == pytest.approx(after, rel=1e-6)


def test_tensors_of_rows_of_saved_activations(plans: Mapping[str, Estimate]):
    """The list below the table of page 4 has every tensor of at least 5 MiB of the rows that it explains."""
    page = (LEARN / "4-tensor-sequence.md").read_text()
    listed = page.partition("The rows from the tensors")[2].partition("With sequence parallelism the norms")[0]
    explained = ("attention_norm.", "mlp_norm.", "attention.qkv.input", "mlp.up.input")  # by the table itself
    for layout, estimate in plans.items():
        sizes: dict[str, float] = {}
        for item in estimate.memory.items:
            name = re.sub(r"^layers\.\d+\.", "", item.name)
            if item.category == "activations" and not name.startswith(explained):
                sizes[name] = sizes.get(name, 0.0) + item.bytes / GIB
        for name, size in sizes.items():
            words = rf"[^;]* {size:.2f} each" if "norm" in name else rf" (2 × [\d.]+/8 = )?{size:.2f}\b"
            assert size < 5 / 1024 or re.search(f"`{re.escape(name)}`{words}", listed), (layout, name, size)


def test_bubbles_of_schedules():
    for name, *figures in read_table("3-pipelines", "p = 4, m = 8"):
        timing = schedule(name, stages=4, micro_batches=8).timing
        waiting = timing.makespan - 24
        expected = (timing.makespan, waiting, 100 * waiting / timing.makespan, 100 * waiting / 24)
        for figure, value in zip(figures, expected, strict=False):
            assert float(figure.rstrip("%")) == pytest.approx(value, abs=0.051 if "%" in figure else 1e-9), name
        assert float(figures[4]) == max(timing.peak_activations)


def test_messages_of_interleaved_1f1b():
    text = " ".join((LEARN / "3-pipelines.md").read_text().split())
    sent = [schedule(name, stages=4, micro_batches=8).timing.messages_sent for name in ("interleaved", "1f1b")]
    assert [int(each.sum()) for each in sent] == [2 * 8 * (4 * 2 - 1), 2 * 8 * (4 - 1)]
    assert (
        "2m(pv − 1) = {} instead of 2m(p − 1) = {} over all ranks".format(*(int(each.sum()) for each in sent)) in text
    )
    assert f"(pv − 1)/(p − 1) = {sent[0].sum() / sent[1].sum():.2f} times" in text
    assert (
        "{} to {} per rank instead of {} to {}".format(*(int(of()) for each in sent for of in (each.min, each.max)))
        in text
    )


def test_key_chunks_of_each_ring_step():
    """Each rank passes the chunks that it has to the next rank, and all ranks have equal work in every step."""
    held = [list_held_chunks(rank, 4) for rank in range(4)]
    source = list(range(4))
    for step, *cells in read_table("5-layouts", "ring step"):
        assert cells == [f"{one}, {other}" for one, other in held]
        tokens = 8
        for rank in range(4):
            pairs = sum(
                len(range(tokens)[span.queries]) * len(range(tokens)[span.keys])
                / (2 if span.query_start == span.key_start else 1)
                for span in list_spans(rank, source[rank], 4, tokens)
            )  # fmt: skip
            assert pairs == 2 * (tokens / 2) ** 2, step
        held, source = [held[-1], *held[:-1]], [source[-1], *source[:-1]]
    assert held[0] == list_held_chunks(0, 4)


def test_gradients_of_zero2():
    memory = plan("llama-3-8b", "8xh100-sxm", "dp8 zero2 ac:full", sequence=4096, batch=8).best.memory
    sizes = {"shards": 0.0, "buffers": 0.0}
    for item in memory.items:
        if item.category == "gradients":
            sizes["buffers" if "buffer" in item.name else "shards"] += item.bytes / GIB
    text = " ".join((LEARN / "2-zero.md").read_text().split())
    sentence = text.partition("With `zero2` the gradients are ")[2].partition(" `workspace` is")[0]
    assert sentence.startswith(f"{sum(sizes.values()):.2f} GiB")
    assert f"shards are only {sizes['shards']:.2f} GiB" in sentence
    assert f"{sizes['buffers']:.2f} GiB are three buffers" in sentence and REDUCTIONS_IN_FLIGHT + 1 == 3


def test_communication_of_zero_stages():
    """Page 2: zero3 takes a third longer than zero1, and zero0 no longer."""
    layouts = ("dp8 ac:full", "dp8 zero1 ac:full", "dp8 zero3 ac:full")
    plans = [plan("llama-3-8b", "8xh100-sxm", layout, sequence=4096, batch=8).best for layout in layouts]
    zero0, zero1, zero3 = (each.communication_seconds for each in plans)
    assert zero3 == pytest.approx(zero1 * 4 / 3, rel=0.05) and zero0 <= zero1


def test_model_flops_of_a_token():
    text = " ".join((LEARN / "2-zero.md").read_text().split())
    assert "6 × 7.50 × 10⁹ FLOPs for the parameters" in text
    assert "6 × 32 × 4,096 × 4,096 (layers × hidden × sequence) for attention, 48.25 × 10⁹ in all" in text
    flops = training_flops_per_token(preset("llama-3-8b"), 4096)
    assert flops == pytest.approx(48.25e9, rel=1e-4)
    assert flops - 6 * 32 * 4096 * 4096 == pytest.approx(6 * 7.50e9, rel=1e-3)
    found = plan("llama-3-8b", "8xh100-sxm", "dp8 zero3 ac:full", sequence=4096, batch=8).best
    rate = found.tokens_per_second_per_device
    shown = f"Times {rate:,.0f} tokens/s that is {flops * rate / 1e12:.1f} TFLOP/s, {flops * rate / 989e12:.1%} of"
    assert shown in text
