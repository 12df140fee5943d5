"""Which layouts are verified when none is named: every axis that this version runs, and every pair of them."""

from __future__ import annotations

from meshwright.layout import Layout


def grid() -> list[Layout]:
    """Layouts of up to 8 ranks: dp x zero x micro-batches x recompute, hybrid sharding where it can be, tensor
    parallelism with each of them, and context parallelism with each of those."""
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
    return list(dict.fromkeys(layouts + _tensor() + _context()))


def _tensor() -> list[Layout]:
    """tp with sequence parallelism and without; key-value heads are fewer than ranks from tp4 on."""
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


def _context() -> list[Layout]:
    """Both ways of cutting rows; key-value heads are fewer than ranks from cp4 on."""
    layouts = []
    for method in ("ring", "ulysses"):
        layouts += [Layout(cp=cp, cp_method=method) for cp in (2, 3, 4)]
        for index, recompute in enumerate(("none", "selective", "full")):
            layouts.append(Layout(cp=2, cp_method=method, recompute=recompute, micro_batches=2, zero=index + 1))
        layouts.append(Layout(dp=2, zero=2, cp=2, cp_method=method))
        layouts.append(Layout(tp=2, cp=2, cp_method=method))
        layouts.append(Layout(dp=2, zero=3, hybrid=2, tp=2, cp=2, cp_method=method, recompute="selective"))
    layouts.append(Layout(tp=2, tensor_sequence_parallel=False, cp=4))
    return [*layouts, Layout(cp=8)]
