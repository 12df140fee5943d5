"""The pipeline runtime: every program computes the gradients of one device, within the checker's memory prediction."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from meshwright.comm.local import LocalRanks
from meshwright.errors import UserError
from meshwright.program.pipeline import PipelineProgram
from meshwright.program.pipeline_text import format_pipeline
from meshwright.schedules.library import generate
from meshwright.schedules.named import SCHEDULES
from tests.parallel import pipeline_cases as cases
from tests.program.pipeline_interpreter import random_program

SYNCHRONOUS = [name for name in SCHEDULES if not name.startswith("pipedream")]


def generated(name: str, ranks: int, micro_batches: int) -> PipelineProgram | None:
    try:
        return generate(name, ranks, micro_batches)
    except UserError:
        return None


def check_against_one_device(program: PipelineProgram, results: list[dict[str, Any]]) -> None:
    """Compare the results of one pipeline's ranks with one device."""
    expected, loss = cases.truth(program.stages, program.micro_batches)
    total: dict[int, Any] = defaultdict(float)
    for result in results:
        for stage, gradient in result["gradients"].items():
            total[stage] = total[stage] + gradient
    assert sorted(total) == list(range(program.stages))
    for stage, gradient in total.items():
        np.testing.assert_allclose(gradient, expected[stage].numpy(), rtol=1e-11, atol=1e-13, err_msg=program.name)
    assert sum(result["loss"] for result in results) == pytest.approx(loss, rel=1e-12)
    for rank, result in enumerate(results):
        # The checker counts the memory of all steps of a group together; here a backward may end before a forward.
        least = 0 if program.name == "random" else result["promised"]
        assert least <= result["peak"] <= result["promised"], (program.name, rank)
        assert result["late"] == result["left"] == [], (program.name, rank)


def test_every_schedule_on_4_ranks_trains_like_one_device(four: LocalRanks) -> None:
    for micro_batches, count in ((8, 14), (5, 10), (1, 10)):
        programs = {name: program for name in SYNCHRONOUS if (program := generated(name, 4, micro_batches))}
        assert len(programs) == count
        results = four.run(cases.named, list(programs), 4, micro_batches, "pp4")
        for at, program in enumerate(programs.values()):
            check_against_one_device(program, [rank[at] for rank in results])


def test_every_schedule_with_replicas_trains_like_one_device(four: LocalRanks) -> None:
    results = four.run(cases.named, SYNCHRONOUS, 2, 6, "dp2 pp2")
    for at, name in enumerate(SYNCHRONOUS):
        for ranks in ((0, 2), (1, 3)):
            check_against_one_device(generate(name, 2, 6), [results[rank][at] for rank in ranks])


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "names"),
    [(3, 7, SYNCHRONOUS), (8, 16, ["interleaved", "zb-v", "dualpipe", "chimera"])],
)
def test_schedules_on_other_rank_counts_train_like_one_device(ranks: int, micro_batches: int, names: list[str]) -> None:
    programs = {name: program for name in names if (program := generated(name, ranks, micro_batches))}
    assert len(programs) == (11 if ranks == 3 else 4)
    with LocalRanks(ranks) as local:
        results = local.run(cases.named, list(programs), ranks, micro_batches, f"pp{ranks}", 1)
    for at, program in enumerate(programs.values()):
        check_against_one_device(program, [rank[at] for rank in results])


def test_every_valid_program_executes_unchanged(four: LocalRanks, tmp_path: Any) -> None:
    programs = {seed: random_program(random.Random(seed)) for seed in range(60)}
    on_four = {seed: program for seed, program in programs.items() if program.ranks == 4}
    assert len({(len(p.placement), p.chunks) for p in on_four.values()}) == 3
    results = four.run(cases.random_ones, list(on_four), "pp4")
    for at, program in enumerate(on_four.values()):
        check_against_one_device(program, [rank[at] for rank in results])

    path = tmp_path / "mine.txt"
    path.write_text(format_pipeline(next(iter(on_four.values()))))
    program = generate(f"@{path}")
    results = four.run(cases.named, [f"@{path}"], None, None, "pp4")
    check_against_one_device(program, [rank[0] for rank in results])


def test_one_rank_runs_a_program_without_a_message() -> None:
    with LocalRanks(1) as one:
        ((result,),) = one.run(cases.named, ["1f1b"], 1, 3, "dp1")
    check_against_one_device(generate("1f1b", 1, 3), [result])
    assert result["record"] == []


def test_split_and_full_backwards_run_as_scheduled(four: LocalRanks) -> None:
    results = four.run(cases.named, ["zb-v", "1f1b", "dualpipe"], 4, 8, "pp4")
    for zb_v, plain, dual in results:
        assert zb_v["calls"] == {"F": 16, "I": 16, "W": 16}
        assert plain["calls"] == {"F": 8, "B": 8}
        assert dual["calls"]["B"] + dual["calls"]["I"] == 8 and dual["calls"]["I"] == dual["calls"]["W"]


def test_sent_bytes_match_values_crossing_stage_boundaries(four: LocalRanks) -> None:
    """Each rank sends its stage's output once per micro-batch, and nothing at the turn of the V."""
    results = four.run(cases.named, ["zb-v"], 4, 8, "pp4")
    program = generate("zb-v", 4, 8)
    for rank, (result,) in enumerate(results):
        sent = {entry["site"]: entry["sent_bytes"] for entry in result["record"]}
        home = program.placement[0]
        ahead = [s + 1 for s in range(7) if home[s] == rank != home[s + 1]]
        back = [s for s in range(1, 8) if home[s] == rank != home[s - 1]]
        elements = {
            "pipeline.activations": sum(cases.ROWS * cases.width(s) for s in ahead),
            "pipeline.gradients": sum(cases.ROWS * cases.width(s) for s in back),
        }
        assert sent == {site: 2 * 8 * 8 * count for site, count in elements.items()}, "2 steps, 8 micro-batches"


@pytest.mark.parametrize("site", ["pipeline.activations", "pipeline.gradients"])
@pytest.mark.parametrize("kind", ["skip", "drop", "double", "stale"])
def test_planted_fault_corrupts_only_messages_of_its_site(two: LocalRanks, site: str, kind: str) -> None:
    (_, (healthy,), _), (healthy_loss, (healthy_last,), _) = two.run(cases.spoilt, "nowhere", kind)
    (_, (first,), struck), (loss, (last,), struck_last) = two.run(cases.spoilt, site, kind)
    if site == "pipeline.gradients":
        assert (struck, struck_last) == (2 if kind == "stale" else 3, 0)
        assert loss == healthy_loss and np.array_equal(last, healthy_last)
        if kind in ("skip", "drop"):
            assert not first.any()
        elif kind == "double":
            np.testing.assert_allclose(first, 2 * healthy)
        else:
            assert not np.allclose(first, healthy)
    else:
        assert (struck, struck_last) == (0, 2 if kind == "stale" else 3)
        assert loss != pytest.approx(healthy_loss)
        assert kind not in ("skip", "drop") or loss == 0.0


def test_abandoned_rank_names_its_peer() -> None:
    with LocalRanks(2) as pair:
        waits_for_reader, _ = pair.run(cases.left_alone, 1)
    with LocalRanks(2) as pair:
        _, waits_for_sender = pair.run(cases.left_alone, 0)
    where = "pipeline.gradients (0RECV_B0 over axis pp, message 1 between the two)"
    assert f"rank 0 had nothing from rank 1 in {where}" in waits_for_reader
    where = "pipeline.activations (1RECV_F0 over axis pp, message 1 between the two)"
    assert f"rank 1 had nothing from rank 0 in {where}" in waits_for_sender
