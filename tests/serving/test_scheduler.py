"""Scheduler against each request alone, with a runner whose logits are a hash of all tokens so far."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from meshwright.serving.blocks import BLOCK_TOKENS, BlockPool
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import Sampling, TokenResult
from meshwright.serving.scheduler import Scheduler, StepBatch, sample_batch

VOCABULARY = 40


class HashRunner:
    """Runner whose cache holds the tokens themselves: a row's logits are a hash of the tokens in its window, read
    through the block table, so that a wrong, stale or foreign block shows in the answer."""

    def __init__(self, blocks: int, window: int | None = None) -> None:
        self.cache = np.full(blocks * BLOCK_TOKENS, -1, np.int32)
        self.window = window

    def run(self, batch: StepBatch) -> np.ndarray:
        for array in (batch.tokens, batch.positions, batch.slots, batch.starts, batch.context, batch.block_tables):
            assert array.dtype == np.int32 and array.flags.c_contiguous
        assert len(batch.slots) == len(set(batch.slots.tolist())), "two tokens are written into one slot"
        self.cache[batch.slots] = batch.tokens
        logits = np.zeros((len(batch.output_rows), VOCABULARY), np.float32)
        for place, row in enumerate(batch.output_rows.tolist()):
            s = int(np.searchsorted(batch.starts, row, side="right")) - 1
            position = int(batch.positions[row])
            begin = 0 if self.window is None else max(0, position - self.window + 1)
            seen = np.arange(begin, position + 1)
            tokens = self.cache[batch.block_tables[s, seen // BLOCK_TOKENS] * BLOCK_TOKENS + seen % BLOCK_TOKENS]
            digest = hashlib.blake2b(tokens.tobytes() + b"%d" % position, digest_size=VOCABULARY).digest()
            logits[place] = np.frombuffer(digest, np.uint8) / 32
        return logits


@dataclass
class Answer:
    tokens: list[TokenResult] = field(default_factory=list)
    prompt: list | None = None
    reason: str | None = None

    def add(self, output: Output) -> None:
        assert self.reason is None, "an output after the last"
        self.tokens += output.results
        self.reason = output.finish_reason
        if output.prompt_results is not None:
            assert self.prompt is None
            self.prompt = output.prompt_results


def answer_alone(request: Request, window: int | None) -> Answer:
    blocks = 40
    scheduler = Scheduler(BlockPool(blocks), token_budget=1000, max_sequences=1, max_length=640)
    runner, answer = HashRunner(blocks, window), Answer()
    scheduler.add(request)
    while not scheduler.idle:
        batch = scheduler.schedule()
        for output in scheduler.publish(batch, sample_batch(batch, runner.run(batch))):
            answer.add(output)
    return answer


@st.composite
def requests(draw) -> list[Request]:
    count = draw(st.integers(1, 9))
    stems = [tuple(range(5, 5 + n)) * 4 for n in (3, 7, 9)]
    made = []
    for number in range(count):
        stem = draw(st.sampled_from(stems))
        tail = tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=20)))
        tokens = (stem[: draw(st.integers(0, len(stem)))] + tail) or (1,)
        sampling = Sampling(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            top_k=draw(st.sampled_from([0, 5])),
            top_p=draw(st.sampled_from([1.0, 0.8])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.3])),
            seed=number,
            max_tokens=draw(st.integers(0, 50)),
            stop_tokens=frozenset(draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=1))),
            logprobs=draw(st.sampled_from([None, 0, 2])),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        )
        made.append(Request(str(number), tokens, sampling, priority=draw(st.integers(0, 1))))
    return made


@settings(max_examples=25, deadline=None)
@given(
    wanted=requests(),
    arrivals=st.lists(st.integers(0, 30), min_size=9, max_size=9),
    cancels=st.dictionaries(st.integers(0, 60), st.integers(0, 8), max_size=3),
    shape=st.tuples(st.integers(1, 5), st.integers(0, 20), st.integers(0, 12), st.integers(1, 3)),
    window=st.sampled_from([None, None, 1, 10, 40]),
)
def test_every_answer_equals_the_request_alone_and_no_block_is_lost(
    wanted: list[Request], arrivals: list[int], cancels: dict[int, int], shape: tuple[int, ...], window: int | None
):
    max_sequences, more_tokens, more_blocks, groups = shape
    max_sequences = max(max_sequences, groups)
    blocks = 7 + more_blocks
    scheduler = Scheduler(
        BlockPool(blocks),
        token_budget=max_sequences + more_tokens,
        max_sequences=max_sequences,
        max_length=BLOCK_TOKENS * 7,
        window=window,
        groups=groups,
    )
    runner = HashRunner(blocks, window)
    answers = {request.id: Answer() for request in wanted}
    flying: list[tuple[StepBatch, list[TokenResult]] | None] = [None] * groups
    tick = 0
    while tick <= 60 or not scheduler.idle:
        for request, arrival in zip(wanted, arrivals, strict=False):
            if arrival == tick:
                scheduler.add(request)
        if tick in cancels and (output := scheduler.cancel(str(cancels[tick]))) is not None:
            answers[output.request_id].add(output)
        group = tick % groups  # a batch is published when its group comes round again
        if (landed := flying[group]) is not None:
            for output in scheduler.publish(*landed):
                answers[output.request_id].add(output)
        oldest = next(iter(scheduler._admitted), None)
        batch = scheduler.schedule(group)
        flying[group] = None if batch is None else (batch, sample_batch(batch, runner.run(batch)))
        if oldest is not None and oldest.group == group:
            assert batch is not None and oldest in batch.sequences, "the oldest sequence waits"
        if batch is not None:
            assert len(batch.tokens) <= max_sequences + more_tokens and len(batch.output_rows) <= max_sequences
        scheduler.check()
        tick += 1
        assert tick < 5000, "the scheduler does not end"
    for request in wanted:
        alone, answer = answer_alone(request, window), answers[request.id]
        if answer.reason == "cancelled":
            alone.tokens = alone.tokens[: len(answer.tokens)]
            alone.reason, alone.prompt = answer.reason, answer.prompt
        assert answer == alone
    stats = scheduler.stats
    assert (stats.waiting, stats.running, stats.paused, stats.held) == (0, 0, 0, 0)
