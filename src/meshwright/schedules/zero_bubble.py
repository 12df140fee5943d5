"""Zero-bubble schedules ZB-H1 and ZB-H2: backwards are split, and weight gradients fill the former bubble.

Qi et al. 2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, sections 2.1 and 2.2: the two handcrafted schedules,
for equal times of forward (F), input gradient (I) and weight gradient (W). Costs are for p ranks and m micro-batches.
"""

from __future__ import annotations

import numpy as np

from meshwright.program.pipeline import Builder, PipelineProgram, place_cyclically


def zb_h1(ranks: int, micro_batches: int) -> PipelineProgram:
    """Generate the ZB-H1 pipeline schedule: the memory of 1F1B and, for equal times, a third of its bubble.

    Qi et al. 2024, arXiv 2401.10241, section 2.1, figure 3 top. Any number of ranks and micro-batches. Costs, for p
    ranks, m micro-batches, and F, I and W the times of a rank's forward, input gradient and weight gradient:
    - bubble: (p - 1)(F + I - W), for m >= p
    - peak activations: min(m, p) micro-batches on every rank
    - weight copies: 1
    - transfers: as many as 1F1B
    """
    return _generate_zero_bubble("zb-h1", ranks, micro_batches, ahead=1)


def zb_h2(ranks: int, micro_batches: int) -> PipelineProgram:
    """Generate the ZB-H2 pipeline schedule: no bubble for equal times, at twice the memory of 1F1B.

    Qi et al. 2024, arXiv 2401.10241, section 2.2, figure 3 bottom. Rank r starts and ends r forwards after rank 0, so a
    single training step still lasts m(F + I + W) + (p - 1)F: the bubble vanishes only over many training steps without
    synchronization of the ranks between them.

    Any number of ranks and micro-batches. Costs, for p ranks, m micro-batches, and F, I and W the times of a rank's
    forward, input gradient and weight gradient:
    - bubble: (p - 1)(F + I - 2W) on rank 0, for m >= 2p - 1
    - peak activations: min(m, 2p - 1) micro-batches on every rank
    - weight copies: 1
    - transfers: as many as 1F1B
    """
    return _generate_zero_bubble("zb-h2", ranks, micro_batches, ahead=2)


def _generate_zero_bubble(name: str, ranks: int, micro_batches: int, ahead: int) -> PipelineProgram:
    """Generate the zero-bubble pipeline schedule called `name`: ZB-H1 (ahead=1) or ZB-H2 (ahead=2).

    ahead: rank r of p runs ahead x (p - 1 - r) warm-up forwards, and its weight gradients lag ahead x r micro-batches
    behind its input gradients, so that all ranks save equally many activations. Once a rank has no forwards left, it
    runs one weight gradient after each input gradient.
    """
    program = Builder(name, ranks, micro_batches, (place_cyclically(ranks),))
    for rank in program.ranks:
        warm_up = ahead * (ranks - 1 - rank.rank)
        passes = np.stack([np.arange(micro_batches), np.full(micro_batches, rank.rank)], axis=1)
        put_off = min(ahead * rank.rank, max(0, micro_batches - warm_up))  # no longer than there are forwards
        rank.alternate(passes, passes, warm_up, put_off)
    return program.build()
