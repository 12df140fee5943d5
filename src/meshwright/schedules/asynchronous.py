"""Pipelines that are never drained: weights are updated while micro-batches are under way, which keep the version that
their forward used.

Both run in the order of 1F1B, for as long as training lasts; a program shows several updates of it. Costs are for p
ranks.
"""

from __future__ import annotations

from meshwright.errors import UserError
from meshwright.program.pipeline import Builder, PipelineProgram, place_cyclically
from meshwright.schedules.interleaved import rounds


def pipedream(ranks: int, micro_batches: int) -> PipelineProgram:
    """PipeDream: an update after each backward (Narayanan et al., SOSP 2019, sections 3.2 and 3.3; first as Harlap et
    al. 2018, arXiv 1806.03377).

    A backward uses the weights that its forward used, which are stashed until then; a gradient of rank r is p - 1 - r
    updates late.

    Any number of ranks and micro-batches. Costs:
    - bubble: none once the pipeline is full
    - peak activations: p - r micro-batches on rank r
    - weight copies: p - r on rank r
    - transfers: those of 1F1B
    """
    program = Builder("pipedream", ranks, micro_batches, (place_cyclically(ranks),))
    for rank in program.ranks:
        warm_up = min(ranks - 1 - rank.rank, micro_batches)
        for m in range(warm_up):
            rank.forward(m)
        for m in range(micro_batches):
            if warm_up + m < micro_batches:
                rank.forward(warm_up + m)
            rank.backward(m)
            rank.update(m)
    return program.build()


def pipedream_2bw(ranks: int, micro_batches: int) -> PipelineProgram:
    """PipeDream-2BW: two buffers of weights, an update a batch of at least p micro-batches (Narayanan et al. 2021,
    arXiv 2006.09503, section 3.1, figure 2).

    A batch is done on all ranks with one version: the one made of the gradients up to the batch before last, so each
    gradient is one update late. A version is made when its last gradient is there, and kept in the second buffer; the
    update stands where the rank switches to it, just before the first forward that uses it.

    At least `ranks` micro-batches (`UserError`); they make as many batches of at least `ranks` as there are, as equal
    as can be. Costs:
    - bubble: none once the pipeline is full
    - peak activations: p - r micro-batches on rank r
    - weight copies: 2
    - transfers: those of 1F1B
    """
    if micro_batches < ranks:
        raise UserError(
            f"pipedream-2bw on {ranks} ranks needs at least {ranks} micro-batches, not {micro_batches}: "
            f"with smaller batches two versions of the weights would not do"
        )
    batches = rounds(ranks, micro_batches)
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
