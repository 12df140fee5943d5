"""V-Half and V-Min: two chunks per rank in a V shape, timed to bound the activation memory.

Both use the method of Qi, Wan, Amar, Lin: Pipeline Parallelism with Controllable Memory, arXiv 2405.15362: choose a
*building block*, the slots in which each rank works on one micro-batch; repeat it for every micro-batch; then remove
the idle slots at both ends as far as memory allows. The longer the block lets a rank wait between a forward and its
weight gradient, the more micro-batches are in flight on it, and the more activations it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from meshwright.program.pipeline import Builder, Kind, PipelineProgram, RankBuilder, place_in_v_shape

# Steps of a rank for one micro-batch, on the chunk that it reaches first (0) and second (1).
F0, F1, I1, I0, W1, W0 = range(6)
_KIND = (Kind.FORWARD, Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.INPUT_GRADIENT, *2 * (Kind.WEIGHT_GRADIENT,))
_CHUNK = (0, 1, 1, 0, 1, 0)
_HOLDS = (1, 1, 0, 0, -1, -1)  # change in activations held, in chunks
_INTERVAL = 6  # slots between blocks; equals the steps of a rank, so that it is never idle

Block = list[tuple[int, int, int, int]]  # slots of F0, F1, I1 and I0 by rank; different modulo the interval


def v_half(ranks: int, micro_batches: int) -> PipelineProgram:
    """Generate the V-Half pipeline schedule: half of 1F1B's activations, half of its bubble; two stages per rank in a V
    shape.

    arXiv 2405.15362, section 3. The forward of a micro-batch takes two time slots (of one step each) on every rank of
    the first half of the stages, and one slot on every rank of the second half.

    Costs, with forward = input gradient = weight gradient = 1 on a rank (1/2 on a stage) and free transfers:
    - bubble: (3 x ranks - 4) / 2 for odd ranks, (3 x ranks - 7) / 2 for even ones (2 ranks: 1/2), for at least `ranks`
    micro-batches; 1F1B's is 3 x ranks - 3. With other times F, I and W there is no bubble while the pipeline is full if
    W + 2I >= 2F and W + 2F >= 2I
    - peak activations: (ranks + 2) // 2 micro-batches
    - weight copies: 1
    - transfers: twice as many as 1F1B
    """
    wait = 3 if ranks % 2 == 0 else 0
    block = [
        (2 * rank, 3 * ranks - rank - 2, 3 * ranks + wait + 2 * rank - 1, 6 * ranks + wait - rank - 2)
        for rank in range(ranks)
    ]
    return _repeat_block("v-half", block, micro_batches, most_held=2 * ((ranks + 2) // 2))


def v_min(ranks: int, micro_batches: int) -> PipelineProgram:
    """Generate the V-Min pipeline schedule: a third of 1F1B's activations, two thirds of its bubble; two stages per
    rank in a V shape.

    arXiv 2405.15362, section 3. A micro-batch moves on to the next stage in every time slot, forward and backward, so
    that its activations are freed as early as possible.

    Costs, with forward = input gradient = weight gradient = 1 on a rank (1/2 on a stage) and free transfers:
    - bubble: 2 x ranks - 5/2, or 2 x ranks - 7/2 if 3 divides ranks (2 ranks: 1), for at least 2 x ranks micro-batches;
    1F1B's is 3 x ranks - 3. With other times there may be a bubble while the pipeline is full too
    - peak activations: (ranks + 4) // 3 micro-batches
    - weight copies: 1
    - transfers: twice as many as 1F1B
    """
    wait = 2 if ranks % 3 == 0 else 0
    block = [
        (rank, 2 * ranks - rank - 1, 2 * ranks + wait + rank, 4 * ranks + wait - rank - 1) for rank in range(ranks)
    ]
    return _repeat_block("v-min", block, micro_batches, most_held=2 * ((ranks + 4) // 3))


def _repeat_block(name: str, block: Block, micro_batches: int, most_held: int) -> PipelineProgram:
    """Build a V-shaped pipeline schedule by repeating the steps of one micro-batch (the building block). Micro-batch k
    starts six time slots after micro-batch k - 1. Then all steps move earlier into idle slots, as far as memory allows.

    name: name of the schedule. micro_batches: number of micro-batches. block: [ranks], time slots in which micro-batch
    0 runs its two forwards and its two input gradients on each rank; its two weight gradients take the two free slots
    of the six. most_held: limit on the saved activations of a rank, in activations of one micro-batch on one stage;
    `block` itself must respect the limit.
    """
    ranks = len(block)
    program = Builder(name, ranks, micro_batches, (place_in_v_shape(ranks),))
    states = [
        _RankState(writer, planned_slots, ranks, micro_batches)
        for writer, planned_slots in zip(program.ranks, block, strict=True)
    ]
    passes_done = [0] * micro_batches
    left = sum(len(rank.waiting) for rank in states)
    while left:
        moved = [rank.run_slot(passes_done, most_held) for rank in states]
        for micro_batch in moved:  # the result of a slot is available from the next one on
            if micro_batch is not None:
                passes_done[micro_batch] += 1
        before, left = left, sum(len(rank.waiting) for rank in states)
        assert left < before, "no step can run: the block itself needs more memory"
    return program.build()


class _RankState:
    """State of one rank while a V-shaped schedule is built, one time slot (equal time unit) after another.

    writer: builder that the rank's steps are appended to. planned_slots: time slots of the two forwards and two input
    gradients of micro-batch 0 on this rank. ranks: number of ranks. micro_batches: number of micro-batches.

    Attributes:
        pass_indices: Indices of the four steps of `planned_slots` in the sequence of all 4 x ranks forwards and input
            gradients of a micro-batch (forwards from rank 0 to the last rank and back, then input gradients likewise).
        waiting: Steps not yet run, as (planned time slot, step, micro-batch), in planned order.
        left: Number of steps not yet run, for each of the six steps of a micro-batch.
        ready_weights: Weight gradients that can run, as (step, micro-batch).
        held: Saved activations on the rank now, in units of one micro-batch on one stage.
    """

    def __init__(
        self, writer: RankBuilder, planned_slots: tuple[int, int, int, int], ranks: int, micro_batches: int
    ) -> None:
        """Plan the rank's steps, weight gradients in the free slots; arguments: see the class."""
        rank, self.writer = writer.rank, writer
        self.pass_indices = (rank, 2 * ranks - 1 - rank, 2 * ranks + rank, 4 * ranks - 1 - rank)
        # Weight gradients take the two free slots, soon after their input gradients.
        free = set(range(_INTERVAL)) - {due % _INTERVAL for due in planned_slots}
        after = [[due + 1 + (slot - due - 1) % _INTERVAL for due in planned_slots[I1:]] for slot in sorted(free)]
        weights = min(([after[a][0], after[b][1]] for a, b in permutations((0, 1))), key=sum)
        self.waiting = sorted(
            (due + _INTERVAL * micro_batch, step, micro_batch)
            for step, due in enumerate((*planned_slots, *weights))
            for micro_batch in range(micro_batches)
        )
        self.left = [micro_batches] * 6
        self.ready_weights: set[tuple[int, int]] = set()  # weight gradients that can run: step, micro-batch
        self.held = 0

    def run_slot(self, passes_done: list[int], most_held: int) -> int | None:
        """Choose the step that the rank runs in the current time slot, and append it to the rank's schedule. Return the
        micro-batch of the step if it is a forward or input gradient, whose result the next stage needs. Return None for
        a weight gradient, or if no step can run.

        passes_done: [micro-batches], number of forwards and input gradients that each micro-batch has completed so far,
        over all ranks. most_held: maximum saved activations of the rank, in activations of one micro-batch on one
        stage."""
        able = self._find_ready(passes_done, most_held)
        if self.left[F0]:
            place = next(able, None)
        else:  # during cool-down, weight gradients last: no other rank waits for them
            place = min(able, key=lambda place: (self.waiting[place][1] in (W1, W0), place), default=None)
        if place is None:
            return None
        _, step, micro_batch = self.waiting.pop(place)
        self.writer.add(_KIND[step], micro_batch, self.writer.stages[0][_CHUNK[step]])
        self.left[step] -= 1
        self.held += _HOLDS[step]
        if step in (W1, W0):
            self.ready_weights.remove((step, micro_batch))
            return None
        if step in (I1, I0):
            self.ready_weights.add((step + 2, micro_batch))
        return micro_batch

    def _find_ready(self, passes_done: list[int], most_held: int) -> Iterator[int]:
        """Yield the steps of the rank that can run now, in planned order, as indices into `self.waiting` (the steps not
        yet run).

        A step can run if its input has arrived. A forward also needs free memory. A forward may overtake steps that are
        planned earlier only if memory suffices for its activations in addition to the peak of the overtaken steps'
        activations. While the pipeline is full, no step overtakes another: only the first planned step is considered.
        (The pipeline is full from the rank's first input gradient on its first stage until its last forward on that
        stage.)

        passes_done: [micro-batches], number of forwards and input gradients that each micro-batch has completed so far,
        over all ranks. most_held: maximum saved activations of the rank, in activations of one micro-batch on one
        stage."""
        steady = self.left[I0] < len(passes_done) and self.left[F0] > 0
        held = highest = self.held
        seen: set[int] = set()
        looked_at = 1 if steady else len(self.left) - self.left.count(0)  # only the next step of each kind can run
        for place, (_, step, micro_batch) in enumerate(self.waiting):
            if step not in seen:
                if step in (W1, W0):
                    ready = (step, micro_batch) in self.ready_weights
                else:
                    ready = passes_done[micro_batch] == self.pass_indices[step]
                if ready and (step not in (F0, F1) or highest < most_held):
                    yield place
            seen.add(step)
            if len(seen) == looked_at:
                return
            held += _HOLDS[step]
            highest = max(highest, held)
