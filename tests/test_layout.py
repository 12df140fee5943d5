"""The layout notation against its contract, and rank groups against a reshaped arange."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.layout import GROUPS, Layout
from meshwright.names import BIDIRECTIONAL_SCHEDULES, SCHEDULE_CHUNKS


def refusal(text: str) -> str:
    with pytest.raises(UserError) as caught:
        Layout.parse(text)
    message = str(caught.value)
    assert "\n" not in message
    return message


FILLED = ("dualpipe", "dualpipe-v", "pipedream-2bw")  # schedules with a minimum number of micro-batches per rank


@st.composite
def layouts(draw: st.DrawFn, most: int = 3) -> Layout:
    """Strategy for valid layouts, with axes of up to `most` ranks."""
    size = st.integers(1, most)
    dp, tp, cp, pp = draw(size), draw(size), draw(size), draw(size)
    zero = draw(st.integers(0, 3))
    divisors = [n for n in range(2, dp * cp + 1) if dp * cp % n == 0]
    experts = draw(st.sampled_from([n for n in range(1, tp * cp * dp + 1) if tp * cp * dp % n == 0]))
    etp = draw(st.sampled_from([n for n in range(1, experts + 1) if experts % n == 0]))
    divisors = [n for n in divisors if (n * tp) % experts == 0 or experts % (n * tp) == 0]
    schedule, chunks = "1f1b", 1
    if pp > 1:
        schedule = draw(
            st.sampled_from([name for name in SCHEDULE_CHUNKS if pp % 2 == 0 or name not in BIDIRECTIONAL_SCHEDULES])
        )
        _, least, most_chunks = SCHEDULE_CHUNKS[schedule]
        chunks = draw(st.integers(least, most_chunks or least + 3))
        schedule = draw(st.sampled_from([schedule, "@schedules/mine.txt"])) if chunks == 1 else schedule
    return Layout(
        dp=dp,
        zero=zero,
        hybrid=draw(st.sampled_from([None, *divisors])) if zero else None,
        tp=tp,
        tensor_sequence_parallel=draw(st.booleans()),
        cp=cp,
        cp_method=draw(st.sampled_from(["ring", "ulysses"])),
        pp=pp,
        schedule=schedule,
        chunks=chunks,
        micro_batches=2 * (draw(size) + (pp if schedule in FILLED else 0))
        if schedule in (*BIDIRECTIONAL_SCHEDULES, *FILLED)
        else draw(size),
        ep=experts // etp,
        etp=etp,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        offload=draw(st.sampled_from([None, "cpu", "nvme"])),
        precision=draw(st.sampled_from([None, "fp32", "tf32", "bf16", "fp16", "fp8"])),
    )


@given(layouts())
def test_printed_layout_parses_back_equal(layout: Layout):
    assert Layout.parse(str(layout)) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_the_example_of_the_contract_is_canonical():
    text = "dp4 zero1 tp2 cp2 pp4:zb-v mb8 ep2 ac:selective bf16"
    layout = Layout.parse(text)
    assert str(layout) == text
    assert layout.world_size == 4 * 2 * 2 * 4
    assert (layout.schedule, layout.chunks, layout.micro_batches, layout.ep) == ("zb-v", 2, 8, 2)


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("dp1", "dp1"),
        ("zero0 tp1:nosp cp1:ulysses pp1:gpipe mb1 ep1 ac:none", "dp1"),
        ("bf16 mb2 zero2 dp2", "dp2 zero2 mb2 bf16"),
        ("dp02", "dp2"),
        ("  dp2\tfp32 ", "dp2 fp32"),
        ("tp2:nosp cp2:ring", "tp2:nosp cp2"),
        ("pp2:1f1b", "pp2"),
        ("pp2:interleaved", "pp2:interleaved"),
        ("pp2:interleaved:2", "pp2:interleaved"),
        ("pp2:interleaved:4", "pp2:interleaved:4"),
        ("pp2:@my/schedule.txt", "pp2:@my/schedule.txt"),
        ("dp4 ep2:etp2", "dp4 ep2:etp2"),
        ("dp4 ep1:etp2", "dp4 ep1:etp2"),
        ("dp2 offload:cpu", "dp2 offload:cpu"),
    ],
)
def test_the_canonical_print_orders_parts_and_drops_defaults(written: str, printed: str):
    assert str(Layout.parse(written)) == printed


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("dp2 zro1", "zero1"),
        ("ddp4", "dp4"),
        ("dp2 fsdp", "zero3"),
        ("fsdp8", "dp8 zero3"),
        ("DP4", "dp4"),
        ("DP8", "dp8"),
        ("TP2:nosp", "tp2:nosp"),
        ("TP=4", "tp4"),
        ("bf15", "bf16"),
        ("offlod:cpu", "offload:"),
        ("ac:ful", "full"),
        ("pp4:zbv", "zb-v"),
        ("cp2:ulises", "ulysses"),
    ],
)
def test_unknown_part_error_names_nearest_part(text: str, nearest: str):
    assert f'did you mean "{nearest}"?' in refusal(text)


def test_unknown_part_error_lists_what_runs():
    known = "dpN, zeroN, hsN, tpN, cpN, ppN, mbN, epN, ac:, fp32, tf32, bf16, fp16; fp8 in plans alone"
    assert refusal("dp2 wide") == f'layout "dp2 wide": unknown part "wide" (known: {known})'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the layout is empty"),
        ("dp0", "dp must be at least 1"),
        ("dp2 mb0", "mb must be at least 1"),
        ("dp-2", "takes a whole number"),
        ("dp2.5", "takes a whole number"),
        ("dp", "takes a whole number"),
        ("dp" + "9" * 5000, "dp must be at most 1,048,576"),
        ("dp99999999999", "dp99999999999: dp must be at most 1,048,576"),
        ("pp2:interleaved:99999999999", "chunks must be at most 1,048,576"),
        ("ep2:etp99999999999", "etp must be at most 1,048,576"),
        ("zero99999999999", "zero takes 0, 1, 2 or 3"),
        ("dp1025 tp1024", "dp x tp x cp x pp = 1,049,600 ranks: at most 1,048,576"),
        ("dp2,zero3", "dp takes a whole number, as in dp2; parts are separated by spaces"),
        ("dp２", "takes a whole number"),  # a full-width digit
        ("zero4", "zero takes 0, 1, 2 or 3"),
        ("dp2 dp2", "set twice"),
        ("fp32 bf16", "bf16 after fp32: this is set twice"),
        ("dp2:x", "dp is written dp2"),
        ("tp2:sp", "tp is written tp2, tp2:nosp"),
        ("ac", "ac:none or ac:selective or ac:full"),
        ("dp2 hs2", "hs2 with zero0"),
        ("dp4 zero1 hs1", "hs1: groups of one rank"),
        ("dp4 zero1 hs3", "hs3: groups of 3 do not divide dp x cp = 4"),
        ("dp2 zero1 hs4", "hs4: groups of 4 do not divide dp x cp = 2"),
        ("dp2 ep3", "ep x etp = 3 does not divide tp x cp x dp = 2"),
        ("dp2 ep2:etp2", "ep x etp = 4 does not divide tp x cp x dp = 2"),
        ("pp4 ep2", "does not divide tp x cp x dp = 1"),
        ("dp6 zero1 hs3 ep2", "hs3: the 3 ranks of a sharding group (hs x tp) and the 2 that hold all experts once"),
        ("pp1:zb-v", "needs at least two stages"),
        ("pp1:@file", "needs at least two stages"),
        ("pp4:@", "file is missing"),
        ("pp4:1f1b:2", "exactly 1 chunk per rank"),
        ("pp4:zb-v:3", "exactly 2 chunks per rank"),
        ("pp4:interleaved:1", "at least 2 chunks per rank"),
        ("pp4:interleaved:0", "chunks must be at least 1"),
        ("pp4:dualpipe mb9", "mb must be even: use mb8 or mb10"),
        ("pp4:dualpipe mb7", "use an even mb of at least mb8 (2 x pp)"),
        ("pp3:dualpipe-v mb5", "use at least mb6 (2 x pp)"),
        ("pp4:gems", "mb must be even: use mb2"),
        ("pp3:chimera mb4", "pp must be even: use pp2 or pp4"),
    ],
)
def test_an_impossible_part_is_refused_with_the_reason(text: str, reason: str):
    assert reason in refusal(text)


def test_layout_from_python_is_checked_like_parsed_one():
    with pytest.raises(UserError, match="hs3"):
        Layout(dp=4, zero=1, hybrid=3)
    with pytest.raises(UserError, match="dp must be at least 1"):
        Layout().with_(dp=0)
    with pytest.raises(UserError, match='unknown schedule "1f2b"'):
        Layout(pp=2, schedule="1f2b")
    assert Layout(dp=2).with_(zero=1, precision="bf16") == Layout.parse("dp2 zero1 bf16")


@given(layouts())
def test_groups_are_slices_of_a_reshaped_arange(layout: Layout):
    ranks = np.arange(layout.world_size).reshape(layout.pp, layout.dp, layout.cp, layout.tp)

    def along(*axes: int) -> set[tuple[int, ...]]:
        moved = np.moveaxis(ranks, axes, range(-len(axes), 0))
        return {
            tuple(map(int, group)) for group in moved.reshape(-1, int(np.prod([ranks.shape[axis] for axis in axes])))
        }

    assert set(layout.groups("tp")) == along(3)
    assert set(layout.groups("cp")) == along(2)
    assert set(layout.groups("dp")) == along(1)
    assert set(layout.groups("pp")) == along(0)
    assert set(layout.groups("data")) == along(1, 2)
    assert set(layout.groups("world")) == along(0, 1, 2, 3)

    size = layout.hybrid or layout.dp * layout.cp
    data = np.array(sorted(along(1, 2))).reshape(-1, layout.dp * layout.cp // size, size)
    assert set(layout.groups("shard")) == {tuple(map(int, group)) for group in data.reshape(-1, size)}
    assert set(layout.groups("replica")) == {tuple(map(int, group)) for block in data for group in block.T}

    experts = np.arange(layout.world_size).reshape(layout.pp, -1, layout.ep, layout.etp)
    assert set(layout.groups("etp")) == {tuple(map(int, group)) for group in experts.reshape(-1, layout.etp)}
    by_expert = np.moveaxis(experts, 2, -1).reshape(-1, layout.ep)
    assert set(layout.groups("ep")) == {tuple(map(int, group)) for group in by_expert}
    by_block = np.moveaxis(experts, 1, -1).reshape(-1, experts.shape[1])
    assert set(layout.groups("expert_data")) == {tuple(map(int, group)) for group in by_block}
    sharing = {rank: number for number, together in enumerate(sharding_groups(layout)) for rank in together}
    parts, copies = set(layout.groups("expert_shard")), set(layout.groups("expert_replica"))
    for group in by_block.tolist():
        inside = {
            number: tuple(rank for rank in group if sharing[rank] == number) for number in map(sharing.get, group)
        }
        assert set(inside.values()) <= parts
        assert set(zip(*inside.values(), strict=True)) <= copies


def sharding_groups(layout: Layout) -> list[set[int]]:
    """The ranks of a stage that share one copy of all but experts: a sharding group with its ranks of tp."""
    tensor = {rank: group for group in layout.groups("tp") for rank in group}
    found = {frozenset(rank for member in group for rank in tensor[member]) for group in layout.groups("shard")}
    return [set(ranks) for ranks in found]


def test_groups_on_two_nodes_of_eight_match_megatron():
    """16 GPUs, tensor 2, pipeline 4, data 2: the docstring of Megatron-LM's parallel_state.initialize_model_parallel,
    which says to put ranks 0 to 7 on the first node."""
    layout = Layout.parse("dp2 tp2 pp4")
    neighbours = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)]
    assert layout.groups("tp") == neighbours
    assert layout.groups("dp") == [
        (0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15),
    ]  # fmt: skip
    assert layout.groups("pp") == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    inside = [group for axis in ("tp", "dp") for group in layout.groups(axis)]
    assert all(group[0] // 8 == group[-1] // 8 for group in inside)  # the pipeline alone crosses


def test_hybrid_sharding_groups_match_torch_documentation():
    """16 ranks in 2 groups of 8: init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp_replicate", "dp_shard"))."""
    layout = Layout.parse("dp16 zero3 hs8")
    assert layout.groups("shard") == [tuple(range(8)), tuple(range(8, 16))]
    assert layout.groups("replica") == [(0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15)]
    assert layout.groups("data") == [tuple(range(16))]


@given(layouts(), st.sampled_from(GROUPS))
def test_the_groups_of_every_axis_partition_the_ranks(layout: Layout, axis: str):
    groups = layout.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert len({len(group) for group in groups}) == 1
    assert all(list(group) == sorted(group) for group in groups)
    assert {len(group) for group in layout.groups(axis)} == {layout.group_size(axis)}


@given(layouts())
def test_rank_position_in_group_is_its_coordinate(layout: Layout):
    for axis in ("tp", "cp", "dp", "pp"):
        for group in layout.groups(axis):
            assert [layout.coordinates(rank)[axis] for rank in group] == list(range(len(group)))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("pp2:pipedream", "pp2:pipedream"),
        ("pp2:pipedream-2bw mb2", "pp2:pipedream-2bw"),
        ("dp2 offload:cpu", "offload:cpu"),
        ("fp8", "fp8"),
    ],
)
def test_layouts_that_cannot_run_are_refused_by_name(text: str, part: str):
    with pytest.raises(UserError, match=rf"{part}: this version cannot run .* yet; it runs .*bf16"):
        Layout.parse(text).check_implemented()


@pytest.mark.parametrize(
    "text",
    [
        "dp1",
        "dp4 zero3 hs2 mb4 ac:full bf16",
        "dp2 zero2 fp32 ac:selective",
        "dp2 zero3 tp2:nosp",
        "cp2:ulysses",
        "dp2 fp16",
        "tf32",
    ],
)
def test_runnable_layouts_are_not_refused(text: str):
    Layout.parse(text).check_implemented()
