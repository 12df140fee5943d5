"""Zero bubble: the backward in two halves, so that weight gradients, which nobody waits for, fill what was idle time.

Qi et al. 2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, sections 2.1 and 2.2: the two schedules made by hand
for equal times of forward (F), input gradient (I) and weight gradient (W). Costs are for p ranks and m micro-batches.
"""

from __future__ import annotations

from meshwright.program.pipeline import Builder, PipelineProgram, place_cyclically


def zb_h1(ranks: int, micro_batches: int) -> PipelineProgram:
    """The memory of 1F1B and, for equal times, a third of its bubble (section 2.1, figure 3 top).

    Any number of ranks and micro-batches. Costs:
    - bubble: (p - 1)(F + I - W), from m = p on
    - peak activations: min(m, p) micro-batches on every rank
    - weight copies: 1
    - transfers: those of 1F1B
    """
    return _zero_bubble("zb-h1", ranks, micro_batches, ahead=1)


def zb_h2(ranks: int, micro_batches: int) -> PipelineProgram:
    """No bubble at all for equal times, for twice the memory (section 2.2, figure 3 bottom).

    Rank r starts and ends r forwards after rank 0, so one step on its own still lasts m(F + I + W) + (p - 1)F: the
    promise is about many steps, in which no rank waits for the others between two of them.

    Any number of ranks and micro-batches. Costs:
    - bubble: rank 0 waits (p - 1)(F + I - 2W), from m = 2p - 1 on
    - peak activations: min(m, 2p - 1) micro-batches on every rank
    - weight copies: 1
    - transfers: those of 1F1B
    """
    return _zero_bubble("zb-h2", ranks, micro_batches, ahead=2)


def _zero_bubble(name: str, ranks: int, micro_batches: int, ahead: int) -> PipelineProgram:
    """A rank starts `ahead` forwards earlier than the next one and leaves `ahead` weight gradients fewer for later, so
    that all of them hold the same number of activations. Without a forward left to do, none is put off any more."""
    program = Builder(name, ranks, micro_batches, (place_cyclically(ranks),))
    for rank in program.ranks:
        warm_up, put_off, done = ahead * (ranks - 1 - rank.rank), ahead * rank.rank, 0
        for m in range(min(warm_up, micro_batches)):
            rank.forward(m)
        for m in range(micro_batches):
            draining = warm_up + m >= micro_batches
            if not draining:
                rank.forward(warm_up + m)
            rank.input_gradient(m)
            if draining or m >= put_off:
                rank.weight_gradient(done)
                done += 1
        for m in range(done, micro_batches):
            rank.weight_gradient(m)
    return program.build()
