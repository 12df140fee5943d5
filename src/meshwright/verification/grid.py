"""Default layouts of `meshwright verify`: every axis of parallelism, and every pair of axes."""

from __future__ import annotations

import itertools
from typing import Any

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import ASYNCHRONOUS_SCHEDULES, SCHEDULE_CHUNKS

MIXTURES = (
    Layout(dp=2, zero=3),
    Layout(tp=2),
    Layout(cp=2),
    Layout(pp=2, schedule="zb-h1", micro_batches=2),
)
"""Layouts that leave every expert on every rank and yet are verified with a mixture of experts."""


def build_layout_grid() -> list[Layout]:
    """Return the default layouts, of up to 8 ranks: the `MIXTURES`, and layouts chosen greedily from the candidates, by
    newly covered features per rank, until every feature (axis, ZeRO stage, schedule ...) and every pair of features is
    covered."""
    chosen = list(MIXTURES)
    brings = {layout: _features(layout) for layout in _candidates()}
    missing = set().union(*brings.values())
    while missing:
        best = max(brings, key=lambda layout: len(brings[layout] & missing) / layout.world_size)
        missing -= brings.pop(best)
        if best not in chosen:
            chosen.append(best)
    return chosen


def _features(layout: Layout) -> set[tuple[str, ...]]:
    """Return the combinations of features that a layout covers, as tuples of names such as ("tp2",) or ("tp2",
    "zero1"): each feature, each pair, and ("alone", features ...) if it has at most two."""
    sets = {f"{axis}{getattr(layout, axis)}" for axis in ("dp", "tp", "cp", "pp") if getattr(layout, axis) > 1}
    sets |= {name for name in ("ep", "etp", "micro_batches") if getattr(layout, name) > 1}
    sets |= {f"zero{layout.zero}"} if layout.zero else set()
    sets |= {f"hybrid{layout.hybrid}"} if layout.hybrid else set()
    sets |= {layout.recompute} - {"none"}
    if layout.tp > 1:
        sets.add("sp" if layout.tensor_sequence_parallel else "nosp")
    if layout.cp > 1:
        sets.add(layout.cp_method)
    if layout.pp > 1:
        sets.add(f"{layout.schedule} {layout.chunks}")
    alone = {("alone", *sorted(sets))} if len(sets) <= 2 else set()
    return {(one,) for one in sets} | set(itertools.combinations(sorted(sets), 2)) | alone


def _candidates() -> list[Layout]:
    """Return the layouts of up to 8 ranks from which the grid is chosen: dp x ZeRO stage x micro-batches x recompute,
    alone and combined with tensor, context, pipeline and expert parallelism."""
    recomputes = ("none", "selective", "full")
    layouts = [Layout(micro_batches=2), Layout(recompute="selective"), Layout(recompute="full", micro_batches=4)]
    for dp in (2, 3, 4):
        for zero in (0, 1, 2, 3):
            for micro_batches in (1, 2) if dp == 3 else (1, 2, 4):
                recompute = recomputes[(zero + micro_batches + dp) % 3]
                layouts.append(Layout(dp=dp, zero=zero, micro_batches=micro_batches, recompute=recompute))
    for zero in (1, 2, 3):
        for micro_batches in (1, 2):
            layouts.append(Layout(dp=4, zero=zero, hybrid=2, micro_batches=micro_batches))
        layouts.append(Layout(dp=4, zero=zero, recompute=recomputes[zero - 1]))
        layouts.append(Layout(dp=2, zero=zero, recompute=recomputes[zero % 3], micro_batches=2))
    layouts += [Layout(dp=8, zero=3, hybrid=4), Layout(dp=8, zero=2, hybrid=2, micro_batches=2), Layout(dp=8, zero=1)]
    layouts += _tensor_layouts() + _context_layouts() + _pipeline_layouts() + _expert_layouts() + _remaining_pairs()
    return [layout for layout in dict.fromkeys(layouts) if _is_runnable(layout)]


def _is_runnable(layout: Layout) -> bool:
    """Return True if the engine implements every feature of the layout."""
    try:
        layout.refuse_unbuilt()
    except UserError:
        return False
    return True


def _remaining_pairs() -> list[Layout]:
    """Return layouts for the pairs of features that the other lists of candidate layouts do not cover."""
    ulysses: dict[str, Any] = {"cp": 2, "cp_method": "ulysses"}
    nosp: dict[str, Any] = {"tp": 2, "tensor_sequence_parallel": False}
    sharded: dict[str, Any] = {"dp": 4, "hybrid": 2}
    return [
        Layout(**sharded, zero=2, recompute="full"),
        Layout(**sharded, zero=1, **nosp),
        Layout(**sharded, zero=2, etp=2),
        Layout(**sharded, zero=3, pp=2, schedule="chimera", micro_batches=2, recompute="full"),
        Layout(**sharded, zero=3, pp=2, schedule="zb-h1", micro_batches=2),
        Layout(cp=2, ep=2),
        Layout(**ulysses, ep=2, zero=1),
        Layout(tp=2, cp=2, ep=2, etp=2),
        Layout(**nosp, **ulysses, ep=2, etp=2),
        Layout(cp=2, pp=2, schedule="chimera", micro_batches=2),
        Layout(**ulysses, pp=2, micro_batches=2),
        Layout(**ulysses, pp=2, schedule="zb-h1", micro_batches=2),
        Layout(dp=2, pp=2, ep=2, micro_batches=2),
        Layout(dp=2, pp=2, ep=2, schedule="dualpipe", micro_batches=4),
        Layout(dp=2, pp=2, ep=2, schedule="zb-v", chunks=2, micro_batches=4),
        Layout(dp=2, pp=2, etp=2, micro_batches=2),
        Layout(dp=2, pp=2, etp=2, schedule="chimera", micro_batches=2),
        Layout(dp=2, zero=1, pp=2, etp=2, schedule="zb-h1", micro_batches=2),
        Layout(**nosp, pp=2, micro_batches=2),
        Layout(**nosp, pp=2, schedule="chimera", micro_batches=2),
    ]


def _tensor_layouts() -> list[Layout]:
    """Return layouts of tp with and without sequence parallelism. From tp4 on, the scaled-down model has fewer
    key-value heads than tp ranks."""
    layouts = [Layout(tp=tp, tensor_sequence_parallel=parallel) for tp in (2, 3, 4) for parallel in (True, False)]
    layouts += [Layout(tp=4, recompute=recompute, micro_batches=2) for recompute in ("none", "selective", "full")]
    layouts += [
        Layout(tp=2, tensor_sequence_parallel=False, recompute=recompute) for recompute in ("selective", "full")
    ]
    for zero in (0, 1, 2, 3):
        recompute = ("none", "selective", "full", "none")[zero]
        layouts.append(Layout(dp=2, zero=zero, tp=2, recompute=recompute, micro_batches=1 + zero % 2))
        layouts.append(Layout(dp=2, zero=zero, tp=2, tensor_sequence_parallel=False, micro_batches=2 - zero % 2))
    layouts += [Layout(dp=4, zero=zero, hybrid=2, tp=2, micro_batches=zero % 2 + 1) for zero in (1, 2, 3)]
    layouts += [Layout(dp=2, zero=3, tp=4, tensor_sequence_parallel=parallel) for parallel in (True, False)]
    return [*layouts, Layout(tp=8)]


def _expert_layouts() -> list[Layout]:
    """Return layouts of expert parallelism (ep, etp or both), alone and combined with every ZeRO stage, hybrid
    sharding and tensor parallelism.
    """
    layouts = [Layout(dp=dp, ep=dp, recompute=recompute) for dp, recompute in ((2, "none"), (3, "selective"))]
    layouts += [Layout(dp=2, etp=2, micro_batches=2), Layout(dp=4, ep=2, etp=2, recompute="full")]
    layouts += [Layout(dp=4, zero=zero, ep=2, micro_batches=1 + zero % 2) for zero in (1, 2, 3)]
    layouts += [Layout(dp=4, zero=zero, hybrid=2, ep=ep) for zero, ep in ((1, 2), (2, 4), (3, 2))]
    layouts += [Layout(dp=8, zero=3, hybrid=4, ep=2, micro_batches=2), Layout(dp=8, zero=2, ep=4, etp=2)]
    for sequence_parallel, recompute in ((True, "full"), (False, "selective")):
        tensor = Layout(tp=2, tensor_sequence_parallel=sequence_parallel)
        layouts += [tensor.with_(ep=2), tensor.with_(dp=2, zero=3, ep=2, etp=2, recompute=recompute)]
        layouts.append(tensor.with_(dp=2, zero=1, ep=4, micro_batches=2))
    layouts.append(Layout(dp=4, zero=2, hybrid=2, tp=2, ep=4))
    return layouts


def _context_layouts() -> list[Layout]:
    """Return layouts of context parallelism with ring attention and Ulysses. From cp4 on, the scaled-down model has
    fewer key-value heads than cp ranks."""
    layouts = []
    for method in ("ring", "ulysses"):
        layouts += [Layout(cp=cp, cp_method=method) for cp in (2, 3, 4)]
        for index, recompute in enumerate(("none", "selective", "full")):
            layouts.append(Layout(cp=2, cp_method=method, recompute=recompute, micro_batches=2, zero=index + 1))
        layouts.append(Layout(dp=2, zero=2, cp=2, cp_method=method))
        layouts.append(Layout(tp=2, cp=2, cp_method=method))
        layouts.append(Layout(dp=2, zero=3, hybrid=2, tp=2, cp=2, cp_method=method, recompute="selective"))
    layouts.append(Layout(tp=2, tensor_sequence_parallel=False, cp=4))
    layouts += [Layout(zero=2, cp=2, ep=2), Layout(tp=2, cp=2, cp_method="ulysses", ep=2, etp=2, micro_batches=2)]
    return [*layouts, Layout(cp=8)]


def _pipeline_layouts() -> list[Layout]:
    """Return layouts of every synchronous pipeline schedule, and of stages with each other axis."""
    layouts = []
    for index, (name, (chunks, _, _)) in enumerate(SCHEDULE_CHUNKS.items()):
        if name not in ASYNCHRONOUS_SCHEDULES:
            pp = 4 if chunks == 1 and name != "auto" else 2
            layouts.append(Layout(pp=pp, schedule=name, chunks=chunks, micro_batches=2 * pp))
            zero, recompute = index % 4, ("none", "selective", "full")[index % 3]
            layouts.append(
                Layout(dp=2, zero=zero, pp=2, schedule=name, chunks=chunks, micro_batches=4, recompute=recompute)
            )
    layouts += [
        Layout(pp=3, schedule="zb-v", chunks=2, micro_batches=5),
        Layout(pp=2, schedule="interleaved", chunks=3, micro_batches=4),
        Layout(dp=4, zero=3, hybrid=2, pp=2, micro_batches=2),
        Layout(tp=2, pp=2, micro_batches=2),
        Layout(tp=2, tensor_sequence_parallel=False, pp=2, schedule="zb-v", micro_batches=2, recompute="full"),
        Layout(tp=2, pp=4, schedule="chimera", micro_batches=4),
        Layout(dp=2, zero=3, tp=2, pp=2, schedule="zb-v", micro_batches=2, recompute="selective"),
        Layout(cp=2, pp=2, micro_batches=2),
        Layout(cp=2, cp_method="ulysses", pp=2, schedule="dualpipe", micro_batches=4),
        Layout(zero=2, cp=2, pp=2, schedule="zb-h1", micro_batches=2),
        Layout(tp=2, cp=2, pp=2, schedule="interleaved", micro_batches=2),
        Layout(dp=2, zero=1, cp=2, pp=2, schedule="v-half", micro_batches=4),
    ]
    return [*layouts, Layout(pp=8, micro_batches=4)]
