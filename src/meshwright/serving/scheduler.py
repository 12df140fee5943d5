"""Continuous batching with chunked prefill: choice of the tokens that the next step computes.

Shapes: T tokens of a step, S sequences of a step, W block tables of a sequence, B blocks of the longest one, R rows of
logits, V vocabulary, N entries of several tables in one row."""

from __future__ import annotations

import time
from array import array
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.errors import UserError
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving.admission import AdmissionState, AnswerLengthRatio
from meshwright.serving.blocks import BlockPool
from meshwright.serving.logit_rows import LogitRow, StepOutput
from meshwright.serving.request import FinishReason, Output, Request
from meshwright.serving.sampling import TokenResult
from meshwright.serving.sequence import Chunk, Sequence
from meshwright.spec.block_tables import BLOCK_TOKENS, count_blocks, first_block_in_window, max_sequence_tokens

Integers = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class StepBatch:
    """Tokens of one step as a ragged batch of S sequences, with their slots in the paged KV cache. All arrays are
    int32, C-contiguous, and new in each step.

    Sequence s has the tokens `starts[s]:starts[s + 1]` of the step; they have consecutive positions, the last of which
    is `context[s] - 1`. Every token attends to the positions up to its own, within the model's window.

    Attributes:
        tokens: Token IDs [T].
        positions: Position of each token in its sequence [T].
        slots: For each of W block tables, the slot of the KV cache into which each token's key and value are written
            [W, T]: block * 16 + offset in the block.
        starts: Index of each sequence's first token [S + 1]; starts[S] = T.
        context: Number of each sequence's tokens in the KV cache after this step [S].
        block_tables: Block tables [W, S, B]: entry [w, s, b] is the index of sequence s's KV block number b (16
            positions each) in table w. Entries past the context or before the window are 0, not to be read.
        output_rows: Ascending indices (0 to T - 1) of the tokens whose logits are wanted [R]; may be empty.
        chunks: The tokens of each sequence [S]."""

    tokens: Integers
    positions: Integers
    slots: Integers
    starts: Integers
    context: Integers
    block_tables: Integers
    output_rows: Integers
    chunks: list[Chunk]

    @property
    def keys(self) -> int:
        """Number of keys to which the tokens attend without a window (those up to their own), summed over tokens."""
        return sum(len(at) * (at.start + at.stop + 1) // 2 for at in (chunk.positions for chunk in self.chunks))

    def outputs(self) -> Iterator[tuple[Sequence, int]]:
        """Yield (sequence, position in the sequence) for each token whose logits are wanted, in order."""
        return ((chunk.sequence, position) for chunk in self.chunks for position in chunk.output_positions)


class Scheduler:
    """Scheduler of continuous batching with chunked prefill over one pool of KV blocks. Deterministic: every rank of a
    replica runs its own copy with the same calls.

    A step takes a token of each decoding sequence, then chunks of prompts, the oldest first, up to the token budget, of
    which up to an eighth is for decoding alone. Requests are admitted by priority, then arrival, as long as every
    admitted sequence can get all KV blocks that it needs to finish (`AdmissionState`).

    sizes: sizes of the pool and of a step; its token budget is at least its number of sequences. groups: number of
    pipeline groups, each sequence in one.

    Attributes:
        pool: Pool of KV blocks.
        windows: Sliding window of each block table in tokens; None: no window."""

    def __init__(self, sizes: ServingSizes, windows: SequenceOf[int | None] = (None,), groups: int = 1) -> None:
        """Create a scheduler without requests and an empty pool of KV blocks; arguments: see the class."""
        assert sizes.token_budget >= sizes.max_sequences >= groups >= 1, sizes
        self.pool = BlockPool(sizes.blocks)
        self._sizes, self.windows, self._groups = sizes, tuple(windows), groups
        self._sliding = [(table, window) for table, window in enumerate(windows) if window is not None]
        self._requests: dict[str, Sequence] = {}  # unfinished
        self._queue: list[Sequence] = []  # waiting for admission: by priority, then in order of arrival
        self._admitted: list[Sequence] = []  # oldest first
        self._ages, self._answers = 0, AnswerLengthRatio()
        self._state: AdmissionState | None = None  # of this step
        self._refused: tuple[Sequence, int] | None = None  # head of the queue, and `pool.releases` at that time
        self._blocked: tuple[Sequence | None, int] = None, 0  # head of the queue without KV blocks, sequences admitted
        self._prompt_tokens = sizes.token_budget  # of the last step, at most
        self._totals = Counter(prefix_queries=0, prefix_hits=0, pauses=0)

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if its ID is in use, or if prompt and `max_tokens` together exceed what the
        KV pool can hold, or `max_length`."""
        if request.id in self._requests:
            raise UserError(f"request ID {request.id} is in use: should be unique among unfinished requests")
        sequence = Sequence(request, self.windows, self._sizes.token_budget)
        most = self._sizes.max_length
        if sum(sequence.most_blocks) > self.pool.size:
            most = max_sequence_tokens(self.pool.size, self.windows, self._sizes.token_budget, most)
        request.check_length(most)
        self._requests[request.id] = sequence
        insort(self._queue, sequence, key=lambda each: each.request.priority)

    def cancel(self, request_id: str) -> Output | None:
        """Cancel the request with the ID `request_id` and return its last output; None if the ID is unknown or the
        request has finished. Its KV blocks are freed at once, or, if a batch in flight writes to them, when that
        batch's results are recorded by `record_results`."""
        if (sequence := self._requests.get(request_id)) is None:
            return None
        if sequence.age < 0:
            self._queue.remove(sequence)
        self._finish(sequence, "cancelled")
        return Output(request_id, [], "cancelled", sequence.cached_tokens)

    def schedule(self, group: int = 0) -> StepBatch | None:
        """Return the next batch for a pipeline group (0 without a pipeline); None if no sequence of the group can run.
        The group's previous batch must have been recorded."""
        self._state = None
        if self._queue:
            self._admit(group)
        mine = [sequence for sequence in self._admitted if sequence.group == group]  # by age
        mine.sort(key=lambda sequence: len(sequence.tokens) - sequence.computed > 1)  # decoding ones first
        picked: list[Chunk] = []
        budget, rows = self._sizes.token_budget, self._sizes.logit_rows
        decoding = sum(len(sequence.tokens) - sequence.computed == 1 for sequence in mine)
        budget -= max(0, min(-(-self._sizes.max_sequences // self._groups), budget // 8) - decoding)  # for later ones
        self._prompt_tokens = budget - decoding
        for sequence in mine:
            assert not sequence.in_flight, f"the last batch of group {group} has not been recorded"
            wanted = min(len(sequence.tokens) - sequence.computed, budget)
            if sequence.scores_prompt:
                wanted = min(wanted, rows)
            if wanted and rows and (count := self._allocate(sequence, wanted)):
                picked.append(sequence.make_chunk(count))
                budget -= count
                rows -= len(picked[-1].output_positions)
        return self._build_batch(picked) if picked else None

    def schedule_following(self, batch: StepBatch) -> StepBatch | None:
        """Return the decode step that follows `batch` before the results of `batch` are known; its token IDs are 0
        until `batch` has sampled them. Return None unless `batch` decodes all admitted sequences, each of them can
        continue, and no request waits."""
        going = [each for each, *_ in batch.chunks if each.answered + 1 < each.request.sampling.max_tokens]
        decoding = len(going) == len(self._admitted) == len(batch.tokens) == len(batch.output_rows)
        self._state = None
        if self._queue or not decoding or any(each.finish_reason or self._allocate(each, 2) < 2 for each in going):
            return None
        following = [range(each.computed + 1, each.computed + 2) for each in going]
        return self._build_batch(list(map(Chunk, going, following, following)))

    def record_results(self, batch: StepBatch, results: SequenceOf[TokenResult]) -> list[Output]:
        """Record the results of a batch that has been computed; return the new outputs, one for each request that got
        tokens or ended. results: from `sample_batch`, one result for each of the batch's R output rows."""
        outputs: list[Output] = []
        end = 0
        for sequence, positions, output_positions in batch.chunks:
            begin, end = end, end + len(output_positions)
            sequence.in_flight -= 1
            if sequence.finish_reason is not None:  # cancelled during the step, or ended by the batch before
                if not sequence.in_flight:
                    self._release(sequence)
            elif (output := self._record_tokens(sequence, len(positions), results[begin:end])) is not None:
                outputs.append(output)
        assert len(results) == end
        return outputs

    @property
    def idle(self) -> bool:
        """True if no request waits or runs and no batch of a cancelled request is in flight."""
        return not self._requests and not self._admitted

    @property
    def stats(self) -> dict[str, int]:
        """Figures by name. Present numbers of sequences: `waiting`, `running`, `paused` (they keep their KV blocks, but
        cannot get more), and `places`, the number that can run at a time: those that ran in this step if the next one
        lacks KV blocks, else the maximum, also while the next one waits for the turn of a pipeline group, or for the KV
        blocks of a common prefix. `prompt_tokens`: maximum number of prompt tokens of a step besides the sequences that
        decode, at least 1. Present numbers of KV blocks: `free` (without content), `cached` (evictable), `held`.
        Totals: `prefix_queries` and `prefix_hits` (tokens looked up and found in the prefix cache), `pauses` of
        sequences."""
        paused, admitted = sum(sequence.paused for sequence in self._admitted), len(self._admitted)
        places = self._blocked[1] if self._blocked[0] in self._queue[:1] else self._sizes.max_sequences
        sequences = {"waiting": len(self._queue), "running": admitted - paused, "paused": paused, "places": places}
        return {**sequences, "prompt_tokens": max(1, self._prompt_tokens), **self.pool.stats, **self._totals}

    def _get_admission_state(self) -> AdmissionState:
        """Return the `AdmissionState` (deadlock avoidance) of all admitted sequences, computed once per step."""
        if self._state is None:
            for place, sequence in enumerate(self._admitted):
                sequence.place = place
            tables, admitted = range(len(self.windows)), self._admitted
            remaining = [each.total_blocks - each.blocks for each in admitted]
            owned = [[self.pool.owned[each.age, table] for table in tables] for each in admitted]
            most = [each.most_blocks for each in admitted]
            self._state = AdmissionState(self.pool.available, len(tables), remaining, most, owned)
        return self._state

    def _admit(self, group: int) -> None:
        """Admit waiting requests to the pipeline group `group`, in order, as long as the admission state stays safe and
        the KV pool has room for answers of the predicted lengths, so that running sequences need not pause soon."""
        sizes = Counter(sequence.group for sequence in self._admitted)
        growth = sum(sequence.expect_growth(self._answers) for sequence in self._admitted)
        while self._queue and len(self._admitted) < self._sizes.max_sequences:
            if sizes[group] > min(sizes[each] for each in range(self._groups)):
                break
            sequence, self._blocked = self._queue[0], (self._queue[0], len(self._admitted))
            if self._refused == (sequence, self.pool.releases):
                break
            if not sequence.scores_prompt:  # else the prefix is empty
                sequence.chain.extend(sequence.tokens)
            most = (len(sequence.tokens) - 1) // BLOCK_TOKENS  # without the last token, whose logits are needed
            count, found = self.pool.find(sequence.chain.hashes[:most], self.windows)
            if self._should_wait_for_prefix(sequence, count):
                self._blocked = None, 0
                break
            youngest = [[self.pool.find_youngest_holder(block) for block in blocks] for blocks in found]
            places = {each.age: place for place, each in enumerate(self._admitted)}
            shared = Counter(
                (places[age], table) for table, ages in enumerate(youngest) for age in ages if age is not None
            )
            joined = self._get_admission_state().admit(
                sequence.most_blocks, sequence.total_blocks - count, [ages.count(None) for ages in youngest], shared
            )
            if not joined.safe or not joined.compute_allowance(len(self._admitted)):
                self._refused = (sequence, self.pool.releases)
                break
            growth += sequence.expect_growth(self._answers) - sum(map(len, found))
            if self._admitted and growth > joined.available:
                break
            self._admit_sequence(self._queue.pop(0), group, count, found)
            sizes[group] += 1
            self._state = joined

    def _should_wait_for_prefix(self, sequence: Sequence, found: int) -> bool:
        """Return True if the admission of a waiting sequence should be delayed, because a running sequence is about to
        compute the KV block that follows its cached prefix. The prefix-cache hit is then longer. found: number of
        blocks of the cached prefix."""
        if sequence.scores_prompt or found >= (len(sequence.tokens) - 1) // BLOCK_TOKENS:
            return False
        wanted = sequence.chain.hashes[found]
        return any(
            other.computed // BLOCK_TOKENS <= found < len(other.chain.hashes) and other.chain.hashes[found] == wanted
            for other in self._admitted
            if other.finish_reason is None and not other.paused
        )

    def _admit_sequence(self, sequence: Sequence, group: int, count: int, found: list[list[int]]) -> None:
        """Admit a waiting sequence to a pipeline group. count: number of KV blocks of its cached prefix. found: for
        each block table, the indices of the prefix's blocks inside the sliding window."""
        sequence.age = self._ages
        sequence.group = group
        sequence.admitted = time.perf_counter()
        sequence.place = len(self._admitted)
        self._ages += 1
        self._admitted.append(sequence)
        for table, blocks in enumerate(found):
            for block in blocks:
                self.pool.share(block, sequence.age)
            sequence.released[table] = count - len(blocks)
            sequence.tables[table].extend([0] * sequence.released[table] + blocks)
        sequence.computed = count * BLOCK_TOKENS
        sequence.cached_tokens = min(sequence.computed, len(sequence.request.tokens))
        self._totals.update(prefix_queries=len(sequence.tokens), prefix_hits=sequence.computed)

    def _allocate(self, sequence: Sequence, wanted: int) -> int:
        """Allocate KV blocks for the next `wanted` tokens of a sequence, as many as `AdmissionState` allows (deadlock
        avoidance). Return the number of tokens that fit; if it is 0, the sequence pauses."""
        room = sequence.blocks * BLOCK_TOKENS - sequence.computed
        if room < wanted:
            state = self._get_admission_state()
            missing = min(count_blocks(wanted - room), state.compute_allowance(sequence.place))
            state.take(sequence.place, missing)
            for _ in range(missing):
                for table, blocks in enumerate(sequence.tables):
                    blocks.append(self.pool.allocate(sequence.age, table))
            room += missing * BLOCK_TOKENS
        if (pauses := not room) is not sequence.paused:
            sequence.paused = pauses
            self._totals["pauses"] += pauses
        return min(wanted, room)

    def _build_batch(self, picked: list[Chunk]) -> StepBatch:
        """Return the batch of the picked chunks. A token that a batch in flight has yet to sample has ID 0."""
        tokens, positions, slots, context, tables, output_rows = (array("i") for _ in range(6))
        starts = array("i", [0])
        for sequence, own, wanted in picked:
            sequence.in_flight += 1
            offset = len(tokens) - own.start
            output_rows.extend(range(offset + wanted.start, offset + wanted.stop))
            tokens += sequence.tokens[own.start : own.stop] or array("i", [0])
            positions.extend(own)
            starts.append(len(tokens))
            context.append(own.stop)
        width, many = count_blocks(max(context)), len(self.windows)
        padding = array("i", [0]) * width
        for table in range(many):
            for sequence, own, _ in picked:
                blocks = sequence.tables[table]
                for position in own:
                    slots.append(blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS)
                tables += blocks[:width] + padding[len(blocks) :]
        arrays = map(np.asarray, (tokens, positions, slots, starts, context, tables, output_rows))
        tokens_T, positions_T, slots_N, starts_S, context_S, tables_N, rows_R = arrays
        slots_WT, tables_WSB = slots_N.reshape(many, -1), tables_N.reshape(many, len(picked), width)
        return StepBatch(tokens_T, positions_T, slots_WT, starts_S, context_S, tables_WSB, rows_R, picked)

    def _record_tokens(self, sequence: Sequence, count: int, results: SequenceOf[TokenResult]) -> Output | None:
        """Record that `count` tokens of a sequence were computed, and the results of its output rows (tokens whose
        logits are wanted). Return the output for its request; None if there is nothing new."""
        if TokenResult(-1) in results:
            self._finish(sequence, "error")  # its blocks are not registered in the prefix cache
            return Output(sequence.request.id, [], "error", sequence.cached_tokens)
        ends = sequence.computed + count == len(sequence.tokens)
        self._register_full_blocks(sequence, count)
        sampling, first = sequence.request.sampling, not sequence.answered
        sampled = list(results[-1:]) if ends and sampling.max_tokens else []
        if scores := first and sequence.scores_prompt:
            sequence.prompt_results.extend(results[: len(results) - len(sampled)])
        if not ends:
            return None
        for result in sampled:
            sequence.tokens.append(result.token)
            if sequence.counts is not None:
                sequence.counts.add(result.token)
        if sampled and sampled[0].token in sampling.stop_tokens:
            self._finish(sequence, "stop")
        elif sequence.answered == sampling.max_tokens:
            self._finish(sequence, "length")
        output = Output(sequence.request.id, sampled, sequence.finish_reason, sequence.cached_tokens)
        if first:
            output.prompt_results = sequence.prompt_results if scores else None
            output.prefill_seconds = time.perf_counter() - sequence.admitted
        return output

    def _register_full_blocks(self, sequence: Sequence, count: int) -> None:
        """Advance a sequence by `count` computed tokens: register the KV blocks that are now full in the prefix cache,
        and release blocks that have left the sliding window of their table."""
        full = sequence.computed // BLOCK_TOKENS
        sequence.computed += count
        if sequence.computed // BLOCK_TOKENS > full:
            sequence.chain.extend(sequence.tokens)
            for block in range(full, sequence.computed // BLOCK_TOKENS):
                for blocks in sequence.tables:
                    self.pool.register(blocks[block], sequence.chain.hashes[block])
        for table, window in self._sliding:
            blocks, first = sequence.tables[table], first_block_in_window(sequence.computed, window)
            for block in range(sequence.released[table], first):
                self.pool.release(blocks[block], sequence.age)
                blocks[block], sequence.released[table] = 0, block + 1

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence with a finish reason ("stop", "length" ...); its KV blocks are released, unless a batch in
        flight writes to them."""
        del self._requests[sequence.request.id]
        sequence.finish_reason, sequence.paused = reason, False
        if sequence.age >= 0 and (most := sequence.request.sampling.max_tokens):
            self._answers.observe(sequence.answered, most)
        if sequence.age >= 0 and not sequence.in_flight:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Release the KV blocks of a sequence that has ended."""
        for block in reversed(range(sequence.blocks)):
            for blocks, released in zip(sequence.tables, sequence.released, strict=True):
                if block >= released:
                    self.pool.release(blocks[block], sequence.age)
        self._admitted.remove(sequence)
        if not self._admitted:
            lost = self.pool.stats["held"]
            assert not lost, f"idle, but {lost} of {self.pool.size} KV blocks are neither free nor cached"


def sample_batch(batch: StepBatch, logits: StepOutput) -> list[TokenResult]:
    """Return one result for each of the R output rows of a batch: for the last known token of a sequence a newly
    sampled token, for any other row (`prompt_logprobs`) the prompt's next token with its log-probability. The results
    depend on the arguments alone. logits: float32 [R, V] for V vocabulary entries, or R objects of type `LogitRow`."""
    rows = map(LogitRow, logits) if isinstance(logits, np.ndarray) else logits
    return [sequence.sample_row(row, position) for row, (sequence, position) in zip(rows, batch.outputs(), strict=True)]
