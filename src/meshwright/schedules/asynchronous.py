"""Asynchronous schedules, which never drain: weights change while micro-batches are in flight, with weight stashing.

Both run 1F1B for as long as training lasts; a program covers several updates. Costs are for p ranks.
"""

from __future__ import annotations

from meshwright.errors import UserError
from meshwright.program.pipeline import Builder, PipelineProgram, place_cyclically
from meshwright.schedules.interleaved import split_into_rounds
from meshwright.schedules.synchronous import generate_1f1b


def pipedream(ranks: int, micro_batches: int) -> PipelineProgram:
    """Generate the PipeDream pipeline schedule: 1F1B with an optimizer step after each backward, on stashed weights.

    Narayanan et al., SOSP 2019, sections 3.2 and 3.3; first in Harlap et al. 2018, arXiv 1806.03377. A backward uses
    the weights of its forward, which are stashed until then; gradients on rank r of p are p - 1 - r updates stale.

    Any number of ranks and micro-batches. Costs, for p ranks:
    - bubble: none once the pipeline is full
    - peak activations: p - r micro-batches on rank r
    - weight copies: p - r on rank r
    - transfers: as many as 1F1B
    """
    return generate_1f1b("pipedream", ranks, micro_batches, update_each=True)


def pipedream_2bw(ranks: int, micro_batches: int) -> PipelineProgram:
    """Generate the PipeDream-2BW pipeline schedule: double-buffered weights, an optimizer step for each batch of at
    least `ranks` micro-batches.

    Narayanan et al. 2021, arXiv 2006.09503, section 3.1, figure 2. All ranks run a batch with the same version of the
    weights. Batch k uses the weights updated by all batches up to k - 2, so gradients are one update stale. A new
    version is complete with the last gradient of its batch, but stays in the second buffer until the rank's update step
    switches to it, just before the first forward that uses it.

    Needs at least `ranks` micro-batches (`UserError`); they are split into as many near-equal batches of at least
    `ranks` as possible. Costs, for p ranks:
    - bubble: none once the pipeline is full
    - peak activations: p - r micro-batches on rank r
    - weight copies: 2
    - transfers: as many as 1F1B
    """
    if micro_batches < ranks:
        raise UserError(
            f"pipedream-2bw on {ranks} ranks needs at least {ranks} micro-batches, not {micro_batches}: "
            "smaller batches would need more than two versions of the weights"
        )
    batches = split_into_rounds(ranks, micro_batches)
    switch = {later[0]: batch[-1] for batch, later in zip(batches, batches[2:], strict=False)}
    program = Builder("pipedream-2bw", ranks, micro_batches, (place_cyclically(ranks),))
    for rank in program.ranks:
        warm_up = ranks - 1 - rank.rank
        for m in range(warm_up):
            rank.forward(m)
        for m in range(micro_batches):
            ahead = warm_up + m
            if ahead in switch:
                rank.update(switch[ahead])
            if ahead < micro_batches:
                rank.forward(ahead)
            rank.backward(m)
        for batch in batches[-2:]:
            rank.update(batch[-1])
    return program.build()
