"""ZB-V, DualPipeV and DualPipe: the order of every rank, against PyTorch's generators and the published picture."""

from __future__ import annotations

import pytest

from meshwright.errors import UserError
from meshwright.program.pipeline import LETTERS, Kind, PipelineProgram
from meshwright.schedules.chimera import chimera
from meshwright.schedules.dualpipe import dualpipe
from meshwright.schedules.dualpipe_v import dualpipe_v
from meshwright.schedules.zb_v import zb_v


def order(program: PipelineProgram) -> list[list[str]]:
    """Return each rank's groups in PyTorch's notation, such as `0F3`; overlapped steps are joined by +."""
    ranks: list[list[str]] = []
    for rank in range(program.ranks):
        groups: dict[int, list[str]] = {}
        for step in program.steps.of_rank(rank):
            groups.setdefault(int(program.steps.group[step]), []).append(program.describe(step))
        ranks.append(["+".join(group) for group in groups.values()])
    return ranks


def pytorch_order(name: str, ranks: int, micro_batches: int) -> list[list[str]]:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    def written(action: object) -> str:
        inner = action.sub_actions  # type: ignore[attr-defined]
        return "+".join(map(written, inner)) if inner else str(action)

    listed = get_schedule_ops(name, ranks, micro_batches, num_stages_per_rank=2)
    return [[written(action) for action in rank if action is not None] for rank in listed]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_zb_v_order_matches_pytorch_for_any_micro_batches(ranks: int):
    for micro_batches in (1, 2, 3, 2 * ranks - 1, 2 * ranks, 2 * ranks + 1, 4 * ranks):
        assert order(zb_v(ranks, micro_batches)) == pytorch_order("ZBVZeroBubble", ranks, micro_batches), micro_batches


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_dualpipe_v_has_pytorchs_order(ranks: int):
    for micro_batches in (2 * ranks, 2 * ranks + 1, 3 * ranks, 5 * ranks):
        assert order(dualpipe_v(ranks, micro_batches)) == pytorch_order("DualPipeV", ranks, micro_batches)


# Figure 5 of the DeepSeek-V3 report: 8 ranks, 20 micro-batches. Written out by hand, a line for each of the eight steps
# that the public code counts; micro-batches 0 to 9 run down the ranks, 10 to 19 up.
PICTURE = {
    0: """
        F0 F1 F2 F3 F4 F5
        F6 F10
        I10 W10 F11 I11 W11 F12 I12 W12 F13
        F7+B13 F14+B0 F8+B14 F15+B1 F9+B15 F16+B2
        B16 F17+B3 B17 F18+B4 B18 F19+B5
        B19 I6
        W6 I7 W7 I8 W8 I9
        W9
    """,
    3: """
        F0 F10 F1 F11 F2 F12 F3 F13
        F4 B10 F14+B0 F5+B11 F15+B1 F6+B12 F16+B2 F7+B13 F17+B3 F8+B14 F18+B4 F9+B15 F19+B5
        B16 B6 B17 B7 I18 I8 I19 I9
        W18 W8 W19 W9
    """,
    4: """
        F10 F0 F11 F1 F12 F2 F13 F3
        F14 B0 F4+B10 F15+B1 F5+B11 F16+B2 F6+B12 F17+B3 F7+B13 F18+B4 F8+B14 F19+B5 F9+B15
        B6 B16 B7 B17 I8 I18 I9 I19
        W8 W18 W9 W19
    """,
    7: """
        F10 F11 F12 F13 F14 F15
        F16 F0
        I0 W0 F1 I1 W1 F2 I2 W2 F3
        F17+B3 F4+B10 F18+B4 F5+B11 F19+B5 F6+B12
        B6 F7+B13 B7 F8+B14 B8 F9+B15
        B9 I16
        W16 I17 W17 I18 W18 I19
        W19
    """,
}


def drawn(program: PipelineProgram, rank: int) -> list[str]:
    """Return a rank's order without its stages: F3, F4+B13."""
    return [
        "+".join(word.lstrip("01234567'") for word in group.replace("'", "").split("+"))
        for group in order(program)[rank]
    ]


@pytest.mark.parametrize("rank", PICTURE)
def test_dualpipe_has_the_order_of_the_published_picture(rank: int):
    assert drawn(dualpipe(8, 20), rank) == PICTURE[rank].split()


def test_chimera_has_the_order_of_its_figure_3():
    """4 ranks, 4 micro-batches: 0 and 1 run down, 2 and 3 run up the ranks and end on rank 0."""
    program = chimera(4, 4)
    assert " ".join(drawn(program, 0)) == "F0 F1 F2 B2 F3 B3 B0 B1"
    assert " ".join(drawn(program, 1)) == "F0 F2 F1 F3 B2 B0 B3 B1"
    assert " ".join(drawn(program, 2)) == "F2 F0 F3 F1 B0 B2 B1 B3"
    assert " ".join(drawn(program, 3)) == "F2 F3 F0 B0 F1 B1 B2 B3"


def test_second_chimera_unit_fills_bubble_of_first():
    assert " ".join(drawn(chimera(4, 8), 0)) == "F0 F1 F4 B4 F5 B5 B0 F2 B1 F3 F6 B6 F7 B7 B2 B3"


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 14), (6, 12), (8, 20)])
def test_dualpipe_is_its_own_mirror_image(ranks: int, micro_batches: int):
    """Rank r runs one direction as rank ranks-1-r runs the other."""
    program = dualpipe(ranks, micro_batches)
    s = program.steps

    def seen(rank: int, mirrored: bool) -> list[tuple[int, ...]]:
        return [
            (
                int(s.group[i]),
                int(s.kind[i]),
                int(s.stage[i]),
                int(s.replica[i]) ^ mirrored,
                (int(s.micro_batch[i]) + mirrored * micro_batches // 2) % micro_batches,
            )
            for i in s.of_rank(rank)
        ]

    for rank in range(ranks):
        assert seen(rank, False) == seen(ranks - 1 - rank, True)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_dualpipe_v_is_half_of_doubled_dualpipe(ranks: int):
    """Replica 1's micro-batches correspond to those of the second chunk."""
    micro_batches = 3 * ranks
    whole, half = dualpipe(2 * ranks, 2 * micro_batches).steps, dualpipe_v(ranks, micro_batches).steps
    mine = whole.rank < ranks
    assert (whole.micro_batch[mine] % micro_batches).tolist() == half.micro_batch.tolist()
    for column in ("rank", "group", "kind", "stage"):
        assert getattr(whole, column)[mine].tolist() == getattr(half, column).tolist()


def test_dualpipe_runs_every_micro_batch_on_every_rank():
    s = dualpipe(6, 18).steps
    for rank in range(6):
        steps = list(s.of_rank(rank))
        letters = [LETTERS[Kind(int(s.kind[i]))] for i in steps]
        assert letters.count("F") == letters.count("B") + letters.count("I") == 18
        assert letters.count("I") == letters.count("W")


@pytest.mark.parametrize(
    ("make", "ranks", "micro_batches", "right"),
    [
        (dualpipe, 3, 12, "the number of ranks must be even"),
        (dualpipe, 8, 12, "must be even and at least 16"),
        (dualpipe, 4, 9, "must be even and at least 8"),
        (dualpipe_v, 4, 7, "at least 8"),
    ],
)
def test_unsupported_v_schedule_arguments_are_refused_with_correction(make, ranks: int, micro_batches: int, right: str):
    with pytest.raises(UserError, match=right):
        make(ranks, micro_batches)
