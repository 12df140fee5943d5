"""Schedules split into attention, dispatch, MLP and combine, and the placement of layers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.pipeline import Builder, Component, Kind, PipelineProgram, place_cyclically
from meshwright.program.simulate_pipeline import Durations, simulate_pipeline
from meshwright.schedules.chimera import chimera
from meshwright.schedules.components import ComponentDurations, simulate_components, with_components
from meshwright.schedules.dualpipe import dualpipe
from meshwright.schedules.dualpipe_v import dualpipe_v
from meshwright.schedules.library import generate
from meshwright.schedules.placement import format_placement, split_evenly
from meshwright.schedules.synchronous import one_f_one_b
from meshwright.schedules.transfers import with_transfers
from meshwright.schedules.v_shape import v_half, v_min
from meshwright.schedules.zb_v import zb_v

PROGRAMS = [dualpipe(2, 4), dualpipe(4, 10), dualpipe_v(3, 7), zb_v(2, 5), v_half(3, 4), one_f_one_b(3, 5)]
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)

EVEN = ComponentDurations((1, 1, 1, 1), (1, 1, 1, 1), (1, 1))
# Computation is longer than every all-to-all that overlaps with it, which is fully hidden.
HIDDEN = ComponentDurations((3, 2, 4, 2), (3, 2, 4, 2), (2, 3))
COSTLY = ComponentDurations((1, 4, 2, 3), (1, 5, 2, 4), (1, 2), transfer=0.5)


def groups(program: PipelineProgram, rank: int) -> list[list[str]]:
    found: dict[int, list[str]] = {}
    for step in program.steps.of_rank(rank):
        found.setdefault(int(program.steps.group[step]), []).append(program.describe(step))
    return list(found.values())


@each_program
def test_split_program_is_valid_with_same_memory(program: PipelineProgram):
    cut = with_components(program)
    whole = check_pipeline(program)
    assert check_pipeline(cut).peak_activations.tolist() == whole.peak_activations.tolist()
    kinds = cut.steps.kind
    counts = np.bincount(program.steps.kind, minlength=4)
    assert np.bincount(kinds, minlength=4).tolist() == [4 * counts[0], 4 * counts[1], 4 * counts[2], 2 * counts[3]]
    assert not (cut.steps.component == Component.WHOLE).any()
    assert with_components(cut) == cut


def test_a_pair_becomes_the_four_groups_of_figure_4():
    """In each, one direction computes and the other communicates."""
    program = Builder("pair", 1, 2, (place_cyclically(1),))
    (rank,) = program.ranks
    rank.forward(0)
    with rank.overlap():
        rank.forward(1)
        rank.backward(0)
    rank.input_gradient(1)
    rank.weight_gradient(1)
    cut = with_components(program.build())
    check_pipeline(cut)
    assert groups(cut, 0) == [
        *[["0F0.attention"], ["0F0.dispatch"], ["0F0.mlp"], ["0F0.combine"]],
        ["0F1.attention", "0B0.combine"],
        ["0F1.dispatch", "0B0.mlp"],
        ["0F1.mlp", "0B0.dispatch"],
        ["0F1.combine", "0B0.attention"],
        *[["0I1.combine"], ["0I1.mlp"], ["0I1.dispatch"], ["0I1.attention"]],
        *[["0W1.mlp"], ["0W1.attention"]],
    ]


def test_components_keep_order_of_sends_and_receives():
    program = with_transfers(one_f_one_b(3, 4))
    cut = with_components(program)
    check_pipeline(cut)
    assert (cut.steps.kind >= Kind.SEND_FORWARD).sum() == (program.steps.kind >= Kind.SEND_FORWARD).sum()
    assert simulate_components(program, COSTLY).timing.makespan > 0


@pytest.mark.parametrize(
    ("durations", "apart", "overlapped"),
    [(EVEN, 10, 6), (HIDDEN, 27, 19), (COSTLY, 25, 4 + 4 + 5 + 3)],
)
def test_overlapped_pair_takes_longest_stream_of_each_group(
    durations: ComponentDurations, apart: float, overlapped: float
):
    """EVEN: attention 1 | combine; MLP's backward 2 | dispatch; MLP 1 | dispatch; attention's backward 2 | combine."""
    assert durations.tabulate()[:2].sum() == apart  # a forward and a full backward, one after the other
    assert durations.overlapped == overlapped


@each_program
@pytest.mark.parametrize("durations", [EVEN, HIDDEN, COSTLY])
def test_split_layers_last_as_long_as_overlapping_pairs(program: PipelineProgram, durations: ComponentDurations):
    parts, whole = simulate_components(program, durations), simulate_pipeline(program, durations.to_durations())
    assert parts.timing.makespan == pytest.approx(whole.makespan)
    assert parts.timing.busy == pytest.approx(whole.busy)
    assert parts.timing.peak_activations.tolist() == whole.peak_activations.tolist()


@each_program
@pytest.mark.parametrize("durations", [EVEN, HIDDEN, COSTLY])
def test_streams_run_one_step_and_components_follow_predecessors(
    program: PipelineProgram, durations: ComponentDurations
):
    timing = simulate_components(program, durations)
    cut = timing.timing.program
    s = cut.steps
    all_to_all = np.isin(s.component, (Component.DISPATCH, Component.COMBINE))
    assert (timing.start >= timing.timing.start).all() and (timing.end <= timing.timing.end + 1e-9).all()
    for rank in range(cut.ranks):
        for stream in (all_to_all, ~all_to_all):
            steps = np.flatnonzero(stream & (s.rank == rank))
            steps = steps[np.argsort(timing.start[steps], kind="stable")]
            assert (timing.start[steps][1:] >= timing.end[steps][:-1] - 1e-9).all()
    for kind, order in ((Kind.FORWARD, 1), (Kind.BACKWARD, -1), (Kind.INPUT_GRADIENT, -1)):
        mine = np.flatnonzero(s.kind == kind)
        keys = (order * s.component[mine], s.micro_batch[mine], s.stage[mine], s.replica[mine])
        mine = mine[np.lexsort(keys)].reshape(-1, 4)
        assert (timing.start[mine][:, 1:] >= timing.end[mine][:, :-1] - 1e-9).all()


def test_steady_state_hides_all_to_all_behind_longer_computation():
    """Only steps outside overlapped pairs have exposed all-to-all."""
    short, long = (simulate_components(dualpipe(4, m), HIDDEN) for m in (10, 30))
    assert short.exposed.tolist() == long.exposed.tolist()
    assert (long.all_to_all > short.all_to_all + 1).all()
    alone = simulate_components(one_f_one_b(4, 10), HIDDEN)
    assert alone.exposed.tolist() == alone.all_to_all.tolist()


def test_dualpipe_wins_when_all_to_all_equals_computation():
    """DeepSeek-V3 puts the ratio of computation to communication at about 1 to 1."""
    p, m = 8, 20
    costs = ComponentDurations((1, 1, 1, 1), (1, 1, 1, 1), (1, 1))
    two_stages = ComponentDurations((0.5,) * 4, (0.5,) * 4, (0.5, 0.5))
    overlapping = simulate_components(dualpipe(p, m), costs).timing.makespan
    folded = simulate_components(dualpipe_v(p, m), two_stages).timing.makespan
    others = [
        simulate_components(one_f_one_b(p, m), costs).timing.makespan,
        simulate_components(zb_v(p, m), two_stages).timing.makespan,
    ]
    assert max(overlapping, folded) < min(others)


def test_first_and_last_layer_lie_on_the_first_rank():
    assert format_placement(dualpipe_v(4, 8), 16) == (
        "rank   chunk 0                          chunk 1\n"
        "0      stage 0: embedding, layers 0-1   stage 7: layers 14-15, head\n"
        "1      stage 1: layers 2-3              stage 6: layers 12-13\n"
        "2      stage 2: layers 4-5              stage 5: layers 10-11\n"
        "3      stage 3: layers 6-7              stage 4: layers 8-9\n"
    )
    assert format_placement(dualpipe(4, 8), 6) == (
        "rank   replica 0                        replica 1\n"
        "0      stage 0: embedding, layers 0-1   stage 3: layer 5, head\n"
        "1      stage 1: layers 2-3              stage 2: layer 4\n"
        "2      stage 2: layer 4                 stage 1: layers 2-3\n"
        "3      stage 3: layer 5, head           stage 0: embedding, layers 0-1\n"
    )


def test_a_rank_with_one_stage_has_one_column():
    assert format_placement(one_f_one_b(2, 2)) == (
        "rank\n0      stage 0: embedding, layer 0\n1      stage 1: layer 1, head\n"
    )


def test_uneven_layer_counts_differ_by_at_most_one():
    assert split_evenly(5, 3) == [range(2), range(2, 4), range(4, 5)]
    for layers, stages in ((61, 16), (5, 5), (32, 7)):
        cut = split_evenly(layers, stages)
        assert [layer for held in cut for layer in held] == list(range(layers))
        assert max(map(len, cut)) - min(map(len, cut)) <= 1
    with pytest.raises(UserError, match="at least 8 layers"):
        format_placement(dualpipe_v(4, 8), 7)


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "schedules.md").read_text()


def test_documented_component_figures_match_simulation():
    table = PAGE[PAGE.index("| exposed all-to-all") :].split("\n\n")[0]
    rows = re.findall(r"^\| `(\S+)` \| (\d+) \| (\d+) \|$", table, re.MULTILINE)
    assert [name for name, *_ in rows] == ["1f1b", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"]
    for name, makespan, exposed in rows:
        program = generate(name, 8, 20)
        share = 1 / program.chunks
        timing = simulate_components(program, ComponentDurations((share,) * 4, (share,) * 4, (share, share)))
        assert (timing.timing.makespan, timing.exposed.max()) == (int(makespan), int(exposed)), name
        assert timing.all_to_all.tolist() == [80] * 8


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
def test_documented_placements_match_output(name: str):
    assert f"```text\n{format_placement(generate(name, 4, 8), 16)}```" in PAGE


def test_documented_forward_doubling_and_v_min_figures_hold():
    def makespan(program: PipelineProgram, f: float = 1, i: float = 1, w: float = 1) -> float:
        return simulate_pipeline(program, Durations.per_rank(program, f, i, w)).makespan

    assert makespan(chimera(8, 32)) == 126
    doubled = chimera(8, 32, forward_doubling=True)
    assert makespan(doubled) == 105
    assert simulate_pipeline(doubled, Durations.per_rank(doubled)).peak_activations.max() == 16
    assert makespan(v_min(8, 64), 1, 1.1, 0.9) - makespan(v_min(8, 32), 1, 1.1, 0.9) == pytest.approx(32 * 3.3)
