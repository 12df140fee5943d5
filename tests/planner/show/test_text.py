"""Printed text: tables that fit the terminal, units of bytes, the list of tensors."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from meshwright.cli.main import meshwright
from meshwright.collectives.quantities import format_size
from meshwright.planner.api import plan
from meshwright.planner.show.explain import explain, find_busiest_rank
from meshwright.planner.show.text import explain_text, seconds_text
from meshwright.terminal import wrap_line

REQUEST = ("plan", "llama-3.1-405b", "--cluster", "1024xh100-sxm", "--sequence", "8192", "--batch", "512")
SEARCH = ("plan", "llama-3-8b", "--cluster", "8xh100-sxm", "--sequence", "8192", "--batch", "64")
LAYOUT = ("--layout", "dp8 zero1 tp8 pp16:interleaved:2 mb64")


def run(*arguments: str, columns: int = 0) -> str:
    environment = {"COLUMNS": str(columns)} if columns else {}
    result = CliRunner(env=environment).invoke(meshwright, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_tables_fit_the_terminal(columns: int):
    text = run(*SEARCH, columns=columns) + run(*REQUEST, *LAYOUT, "--explain", "--ledger", columns=columns)
    lines = [line for line in text.splitlines() if not line.startswith(("llama-3", "  layout = "))]
    assert max(map(len, lines)) <= columns, max(lines, key=len)
    for words in ("fastest", "low - high", "time: compute", "of which", "bound by", "mlp.up.output"):
        assert words in text, words


def test_wrapped_lines_lose_no_text():
    line = "  activations  27.88  " + ", ".join(f"mlp.up.output x {number}" for number in range(30))
    cut = wrap_line(line, 80, " " * 22).split("\n")
    assert len(cut) > 5 and all(len(part) <= 80 for part in cut)
    assert " ".join(part.strip() for part in cut) == line.strip()
    assert all(part.startswith(" " * 22) for part in cut[1:])
    assert wrap_line("a" * 100, 80, "  ") == "a" * 100


def test_unit_depends_on_largest_size():
    assert [format_size(size) for size in (2**29, 3 * 2**30, 5000)] == ["512.0 MiB", "3.0 GiB", "4.9 KiB"]


def test_ledger_lists_every_tensor_with_stage_and_lifetime():
    answer = json.loads(run(*REQUEST, *LAYOUT, "--ledger", "--json"))
    assert (answer["ledger"][0]["pp"], answer["ledger"][-1]["pp"]) == (0, 15)
    for rank in answer["ledger"]:
        assert sum(item["bytes"] for item in rank["items"]) == rank["peak_bytes"]
    each = 8192 * 2 * 53248 // 8 * 2  # gate and up projections, in bf16
    counts = dict.fromkeys(("layers.0", "layers.63"), 0)  # the first rank's two chunks
    for item in answer["ledger"][0]["items"]:
        layer, _, tensor = item["name"].partition(".mlp.up.output")
        if layer in counts and (not tensor or tensor.startswith(" x ")):
            assert (item["shape"], item["dtype"]) == ([1, 8192, 2 * 53248 // 8], "bfloat16")
            assert item["stage"] == (0 if layer == "layers.0" else 16)
            assert (item["category"], item["first"], item["last"]) == ("activations", "forward", "backward")
            counts[layer] += item["bytes"] // each
    # Narayanan et al. 2021: the first rank has 2 (pp - 1) + (chunks - 1) pp + 1 forwards in flight, pp of chunk 2.
    assert counts == {"layers.0": 31, "layers.63": 16}


def test_items_of_each_memory_row_add_up_to_its_size():
    text = run(*REQUEST, *LAYOUT, columns=1000)
    rows = text.partition("of which\n")[2].partition("\n\n")[0].splitlines()
    rest = 0
    for row in rows:
        category, size, shown = row.split(maxsplit=2)
        if category == "unexplained":
            assert shown.startswith("allowance of 5% of all tensors")
            continue
        if category == "NCCL":  # of dp, tp and all ranks, and of messages to two other nodes
            assert float(size) == pytest.approx((3 * 24 * 28 + 2 * 2 * 14) / 1024, abs=0.005) and shown[:7] == "buffers"
            continue
        items = [float(each) for each in re.findall(r" (\d+\.\d\d)(?=,|$)", shown)]
        rest += " more " in shown
        assert sum(items) == pytest.approx(float(size), abs=0.005 * (len(items) + 1)), row
    assert len(rows) > 6 and rest > 1


@pytest.mark.parametrize(
    "layout", ["dp2 tp8 mb16", "dp4 pp4 mb8 ac:full", "dp4 zero1 pp4:interleaved:3 mb8", "dp4 pp4:zb-v mb8"]
)
def test_operations_add_up_to_computation_of_a_step(layout: str):
    one = plan("llama-3-8b", "16xh100-sxm", layout, sequence=4096, batch=64).best
    rank = find_busiest_rank(one.problem, one.layout)
    rows = explain(one.problem, one.layout, rank)
    together = one.layout.micro_batches * sum(row.seconds for row in rows)
    assert together == pytest.approx(one.time.breakdown["compute"], rel=1e-9)
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert "computation of a micro-batch" in explain_text(one.layout, rank, rows)


def test_times_are_printed_with_bounds():
    one = plan("llama-3-8b", "16xh100-sxm", "dp2 tp8 mb16", sequence=4096, batch=64).best
    time = one.time
    bounds = seconds_text(one.problem, one.layout, time.seconds)
    assert bounds == f"{time.seconds:.3g} s ({time.low:.3g} to {time.high:.3g})"


@pytest.mark.parametrize(
    ("batch", "words"), [(1, "; 1 sequence of 99 tokens on"), (2, "; 2 sequences of 99 tokens on")]
)
def test_first_line_counts_sequences(batch: int, words: str):
    text = run(
        "plan", "gpt2", "--cluster", "1xh100-sxm", "--sequence", "99", "--batch", str(batch), "--layout", "dp1"
    )  # fmt: skip
    assert words in text.splitlines()[0]
