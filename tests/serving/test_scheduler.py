"""Scheduler against each request alone, with a runner whose logits are a hash of all tokens so far."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from meshwright.errors import UserError
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving.blocks import BlockPool, HashChain
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import Sampling, TokenResult
from meshwright.serving.scheduler import Scheduler, StepBatch, sample_batch
from meshwright.spec.block_tables import BLOCK_TOKENS, max_blocks_held
from tests.serving.pool_checks import check_scheduler

VOCABULARY = 40
Windows = tuple[int | None, ...]


class HashRunner:
    """Runner whose cache holds the tokens themselves, with the number of the block table: a row's logits are a hash of
    the tokens in the window of each table, read through it, so that a wrong, stale or foreign block shows in the
    answer."""

    def __init__(self, blocks: int, windows: Windows = (None,)) -> None:
        self.cache = np.full(blocks * BLOCK_TOKENS, -1, np.int32)
        self.windows = windows

    def run(self, batch: StepBatch) -> np.ndarray:
        for array in (batch.tokens, batch.positions, batch.slots, batch.starts, batch.context, batch.block_tables):
            assert array.dtype == np.int32 and array.flags.c_contiguous
        assert batch.slots.shape == (len(self.windows), len(batch.tokens)) and len(batch.block_tables) == len(
            batch.slots
        )
        assert batch.slots.size == len(set(batch.slots.flat)), "two tokens are written into one slot"
        assert batch.keys == int((batch.positions + 1).sum())
        assert [position for _, position in batch.outputs()] == batch.positions[batch.output_rows].tolist()
        self.cache[batch.slots] = batch.tokens + VOCABULARY * np.arange(len(self.windows))[:, None]
        logits = np.zeros((len(batch.output_rows), VOCABULARY), np.float32)
        for place, row in enumerate(batch.output_rows.tolist()):
            s = int(np.searchsorted(batch.starts, row, side="right")) - 1
            position = int(batch.positions[row])
            digest = hashlib.blake2b(b"%d" % position, digest_size=VOCABULARY)
            for table, window in zip(batch.block_tables, self.windows, strict=True):
                seen = np.arange(0 if window is None else max(0, position - window + 1), position + 1)
                digest.update(self.cache[table[s, seen // BLOCK_TOKENS] * BLOCK_TOKENS + seen % BLOCK_TOKENS].tobytes())
            logits[place] = np.frombuffer(digest.digest(), np.uint8) / 32
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


def answer_alone(request: Request, windows: Windows = (None,)) -> Answer:
    """The answer without a window in the scheduler, where no block is released before the end."""
    blocks = 40 * len(windows)
    scheduler = Scheduler(ServingSizes(1000, 1, 640, blocks=blocks), [None] * len(windows))
    runner, answer = HashRunner(blocks, windows), Answer()
    scheduler.add(request)
    while not scheduler.idle:
        batch = scheduler.schedule()
        for output in scheduler.record_results(batch, sample_batch(batch, runner.run(batch))):
            answer.add(output)
    return answer


@st.composite
def requests(draw) -> list[Request]:
    count = draw(st.integers(3, 9))
    stem = tuple(range(4, 34)) * 2
    made = []
    for number in range(count):
        tail = tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8)))
        tokens = stem[: draw(st.sampled_from([0, 10, 20, 40, 60]))] + tail
        sampling = Sampling(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            top_k=draw(st.sampled_from([0, 5])),
            top_p=draw(st.sampled_from([1.0, 0.8])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.3])),
            seed=number,
            max_tokens=draw(st.sampled_from([0, 1, 20, 35, 44])),
            stop_tokens=frozenset(draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=1))),
            logprobs=draw(st.sampled_from([None, 0, 2])),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        )
        made.append(Request(str(number), tokens, sampling, priority=draw(st.integers(0, 1))))
    return made


@settings(max_examples=24)
@given(
    wanted=requests(),
    arrivals=st.lists(st.integers(0, 10), min_size=9, max_size=9),
    cancels=st.dictionaries(st.integers(0, 60), st.integers(0, 8), max_size=3),
    shape=st.tuples(st.integers(1, 5), st.integers(0, 20), st.integers(0, 3), st.integers(1, 3)),
    windows=st.sampled_from([(None,), (None,), (1,), (10,), (40,), (None, 10), (40, None), (10, 10, None), (1, 40)]),
    share=st.sampled_from([0.0, 0.5]),
    ahead=st.booleans(),
)
def test_every_answer_equals_isolated_request_and_blocks_are_conserved(
    wanted: list[Request],
    arrivals: list[int],
    cancels: dict[int, int],
    shape: tuple[int, ...],
    windows: Windows,
    share: float,
    ahead: bool,
):
    max_sequences, more_tokens, more_blocks, groups = shape
    max_sequences = max(max_sequences, groups)
    longest = BLOCK_TOKENS * 7
    blocks = sum(max_blocks_held(longest, windows, max_sequences + more_tokens)) + more_blocks
    sizes = ServingSizes(max_sequences + more_tokens, max_sequences, longest, blocks=blocks, scored_rows=0)
    scheduler = Scheduler(sizes, windows, groups)
    scheduler._answers.ratio = share  # with 0, more sequences are admitted and pause
    runner = HashRunner(blocks, windows)
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
        batch = None
        if (landed := flying[group]) is not None:
            batch = scheduler.schedule_following(landed[0]) if ahead else None
            for output in scheduler.record_results(*landed):
                answers[output.request_id].add(output)
            if batch is not None:
                batch.tokens[:] = [result.token for result in landed[1]]
        oldest = None if batch is not None else next(iter(scheduler._admitted), None)
        batch = scheduler.schedule(group) if batch is None else batch
        flying[group] = None if batch is None else (batch, sample_batch(batch, runner.run(batch)))
        if oldest is not None and oldest.group == group:
            assert batch is not None and oldest in [chunk.sequence for chunk in batch.chunks], (
                "the oldest sequence waits"
            )
        if batch is not None:
            assert len(batch.tokens) <= max_sequences + more_tokens and len(batch.output_rows) <= max_sequences
        check_scheduler(scheduler)
        tick += 1
        assert tick < 5000, "the scheduler does not end"
    for request in wanted:
        alone, answer = answer_alone(request, windows), answers[request.id]
        if answer.reason == "cancelled":
            alone.tokens = alone.tokens[: len(answer.tokens)]
            alone.reason, alone.prompt = answer.reason, answer.prompt
        assert answer == alone
    stats = scheduler.stats
    assert (stats["waiting"], stats["running"], stats["paused"], stats["held"]) == (0, 0, 0, 0)


def finish(scheduler: Scheduler, runner: HashRunner) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    while not scheduler.idle:
        batch = scheduler.schedule()
        for output in scheduler.record_results(batch, sample_batch(batch, runner.run(batch))):
            answers.setdefault(output.request_id, Answer()).add(output)
        check_scheduler(scheduler)
    return answers


def make(blocks: int = 40, windows: Windows = (None,), groups: int = 1, **options: int) -> tuple[Scheduler, HashRunner]:
    chosen = {"token_budget": 64, "max_sequences": 4, "max_length": 320, "scored_rows": 0, **options}
    return Scheduler(ServingSizes(blocks=blocks, **chosen), windows, groups), HashRunner(blocks, windows)


def step(scheduler: Scheduler, runner: HashRunner) -> StepBatch:
    batch = scheduler.schedule()
    scheduler.record_results(batch, sample_batch(batch, runner.run(batch)))
    return batch


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first + 7 * n) % VOCABULARY for n in range(length))


@pytest.mark.parametrize("windows", [(None,), (20,), (20, None)])
@pytest.mark.parametrize("known", [1, 17, 39])
def test_replayed_sequences_continue_unchanged(known: int, windows: Windows):
    sampling = Sampling(
        temperature=1.0, seed=3, max_tokens=40, frequency_penalty=0.5, min_tokens=38, logprobs=1, prompt_logprobs=1
    )
    request = Request("a", prompt(37), sampling)
    alone = answer_alone(request, windows)
    sent = tuple(result.token for result in alone.tokens[:known])
    rest = answer_alone(replace(request, replayed=sent), windows)
    assert rest.tokens == alone.tokens[known:]
    assert (rest.reason, rest.prompt) == (alone.reason, None)


def test_decoding_sequences_come_first_and_prompts_fill_token_budget():
    scheduler, runner = make(token_budget=20)  # of which 2 are reserved for decoding
    scheduler.add(Request("short", prompt(5), Sampling(max_tokens=30)))
    step(scheduler, runner)
    scheduler.add(Request("long", prompt(50, 3), Sampling(max_tokens=2)))
    batches = [step(scheduler, runner) for _ in range(4)]
    assert [batch.starts.tolist() for batch in batches] == [[0, 1, 19], [0, 1, 19], [0, 1, 15], [0, 1, 2]]
    assert [batch.output_rows.tolist() for batch in batches] == [[0], [0], [0, 14], [0, 1]]
    assert batches[2].positions[1:].tolist() == list(range(36, 50))
    assert batches[2].context.tolist() == [8, 50]


@pytest.mark.parametrize(("budget", "chunk"), [(20, 18), (64, 60), (4, 4)])
def test_chunks_of_prompts_are_equally_long_with_and_without_decoding_sequences(budget: int, chunk: int):
    scheduler, runner = make(token_budget=budget)
    scheduler.add(Request("long", prompt(3 * chunk), Sampling(max_tokens=2)))
    assert len(step(scheduler, runner).tokens) == chunk
    for name in ("a", "b"):
        scheduler.add(Request(name, prompt(1, ord(name)), Sampling(max_tokens=30)))
    batch = step(scheduler, runner)
    assert batch.starts[-1] == min(chunk + 2, budget)


def test_prompts_and_answers_are_found_in_the_prefix_cache():
    scheduler, runner = make()
    scheduler.add(Request("first", prompt(32), Sampling(max_tokens=33)))
    first = finish(scheduler, runner)["first"]
    text = prompt(32) + tuple(result.token for result in first.tokens)
    for length, hit in ((32, 16), (33, 32), (64, 48), (65, 64)):  # the last token is always computed
        scheduler.add(Request("again", text[:length], Sampling(max_tokens=1)))
        outputs = []
        while not scheduler.idle:
            batch = scheduler.schedule()
            outputs += scheduler.record_results(batch, sample_batch(batch, runner.run(batch)))
        assert [output.cached_tokens for output in outputs] == [hit]
    drawn = Request("drawn", text, Sampling(temperature=1.0, max_tokens=9))
    scheduler.add(drawn)
    assert finish(scheduler, runner)["drawn"] == answer_alone(drawn)
    for other in (Request("salted", text, Sampling(max_tokens=1), cache_salt="x"), Request("else", prompt(64, 1))):
        before = scheduler.stats["prefix_hits"]
        scheduler.add(other)
        finish(scheduler, runner)
        assert scheduler.stats["prefix_hits"] == before


def test_lower_priority_numbers_are_admitted_first_then_earlier_arrivals():
    scheduler, runner = make(max_sequences=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        scheduler.add(Request(name, prompt(3), Sampling(max_tokens=1), priority=priority))
    assert list(finish(scheduler, runner)) == ["d", "b", "a", "c"]


def test_prefill_time_begins_at_the_admission():
    scheduler, runner = make(max_sequences=1)
    scheduler.add(Request("a", prompt(5), Sampling(max_tokens=2)))
    scheduler.add(Request("b", prompt(7), Sampling(max_tokens=2)))
    found: dict[str, list[float]] = {"a": [], "b": []}
    while (batch := scheduler.schedule()) is not None:
        time.sleep(0.05)
        for output in scheduler.record_results(batch, sample_batch(batch, runner.run(batch))):
            found[output.request_id].append(output.prefill_seconds)
    for first, second in found.values():
        assert 0.05 <= first < 0.095 and second == 0.0


def test_cancelled_request_frees_blocks_by_next_step():
    scheduler, runner = make()
    for name in "ab":
        scheduler.add(Request(name, prompt(40, ord(name)), Sampling(max_tokens=20)))
    scheduler.add(Request("c", prompt(300), Sampling(max_tokens=20)))
    step(scheduler, runner)
    assert scheduler.cancel("a").finish_reason == "cancelled"  # between steps: immediately
    check_scheduler(scheduler)
    assert [scheduler.cancel(name) for name in ("a", "unknown")] == [None, None]
    batch = scheduler.schedule()
    assert scheduler.cancel("b") is not None  # during a step: when it is published
    held = scheduler.stats["held"]
    outputs = scheduler.record_results(batch, sample_batch(batch, runner.run(batch)))
    assert "b" not in {output.request_id for output in outputs}
    check_scheduler(scheduler)
    assert scheduler.stats["held"] == held - 3
    assert scheduler.cancel("c") is not None
    assert scheduler.idle and scheduler.stats["held"] == 0


def test_following_step_is_scheduled_only_if_all_sequences_decode_and_nothing_else_can_run():
    scheduler, runner = make(blocks=4, max_sequences=3, max_length=64)
    for name in "ab":
        scheduler.add(Request(name, prompt(14, ord(name)), Sampling(max_tokens=6)))
    batch = scheduler.schedule()
    assert scheduler.schedule_following(batch) is None  # a prompt
    scheduler.record_results(batch, sample_batch(batch, runner.run(batch)))
    batch = scheduler.schedule()
    scheduler.add(Request("c", prompt(3), Sampling(max_tokens=1)))
    assert scheduler.schedule_following(batch) is None  # a request waits
    assert scheduler.cancel("c") is not None
    following = scheduler.schedule_following(batch)
    assert following is not None and (following.positions.tolist(), following.context.tolist()) == ([15, 15], [16, 16])
    for each in (batch, following):
        scheduler.record_results(each, sample_batch(each, runner.run(each)))
    batch = scheduler.schedule()  # takes the last two blocks
    scheduler.cancel("a")
    assert scheduler.schedule_following(batch) is None
    scheduler.record_results(batch, sample_batch(batch, runner.run(batch)))
    batch = scheduler.schedule()
    following = scheduler.schedule_following(batch)
    assert following is not None
    scheduler.record_results(batch, sample_batch(batch, runner.run(batch)))
    assert scheduler.schedule_following(following) is None  # b ends with its sixth token
    scheduler.record_results(following, sample_batch(following, runner.run(following)))
    assert scheduler.idle


def test_following_step_does_not_run_without_a_block_for_its_token():
    scheduler, runner = make(blocks=3, max_sequences=2, max_length=48)
    for name, length in (("a", 15), ("b", 15)):
        scheduler.add(Request(name, prompt(length, ord(name)), Sampling(max_tokens=18)))
    scheduler._answers.ratio = 0.0
    step(scheduler, runner)
    batch = scheduler.schedule()
    assert len(batch.chunks) == 2 and batch.context.tolist() == [16, 16]
    assert scheduler.schedule_following(batch) is None, "one block is left for two sequences"


def test_sequence_cancelled_with_two_batches_in_flight_keeps_its_blocks_until_the_second():
    scheduler, runner = make()
    scheduler.add(Request("a", prompt(20), Sampling(max_tokens=9)))
    step(scheduler, runner)
    batch = scheduler.schedule()
    following = scheduler.schedule_following(batch)
    assert following is not None and scheduler.cancel("a") is not None
    for each, held in ((batch, 2), (following, 0)):
        assert scheduler.record_results(each, sample_batch(each, runner.run(each))) == []
        assert scheduler.stats["held"] == held
    assert scheduler.idle


def test_cancelled_waiting_request_never_runs():
    scheduler, runner = make(max_sequences=1)
    for name in "abc":
        scheduler.add(Request(name, prompt(5), Sampling(max_tokens=3)))
    step(scheduler, runner)
    assert scheduler.stats["waiting"] == 2
    scheduler.cancel("b")
    assert scheduler.stats["waiting"] == 1
    assert list(finish(scheduler, runner)) == ["a", "c"]


@pytest.mark.parametrize(("windows", "most"), [((20,), 4), ((None, 20), 19 + 4), ((20, None, 20), 4 + 19 + 4)])
def test_blocks_before_the_window_are_freed(windows: Windows, most: int):
    scheduler, runner = make(blocks=most, windows=windows, token_budget=16)
    request = Request("a", prompt(100), Sampling(max_tokens=200))  # 19 blocks in a table without a window
    scheduler.add(request)
    held, answer = 0, Answer()
    while not scheduler.idle:
        batch = scheduler.schedule()
        for output in scheduler.record_results(batch, sample_batch(batch, runner.run(batch))):
            answer.add(output)
        check_scheduler(scheduler)
        held = max(held, scheduler.stats["held"])
    assert most - len(windows) <= held <= most and answer == answer_alone(request, windows)
    scheduler, _ = make(blocks=most - 1, windows=windows, token_budget=16)
    with pytest.raises(UserError, match="should be at most"):
        scheduler.add(request)


def test_window_in_some_layers_lets_more_sequences_run():
    """Two tables take twice the blocks of half the size: 80 of them hold three sequences of 200 tokens, where each of
    26 blocks fit no further one."""
    most = {}
    for windows in ((None, None), (None, 20)):
        scheduler, runner = make(blocks=80, windows=windows)
        scheduler._answers.ratio = 1.0  # admitted as if every answer took all its tokens
        for name in "abcd":
            scheduler.add(Request(name, prompt(60, ord(name)), Sampling(max_tokens=140)))
        most[windows] = 0
        while not scheduler.idle:
            most[windows] = max(most[windows], len(step(scheduler, runner).chunks))
        assert scheduler.stats["pauses"] == 0
    assert most == {(None, None): 3, (None, 20): 4}


@pytest.mark.parametrize("windows", [(20,), (20, None)])
def test_only_blocks_before_the_window_may_be_missing_from_cached_prefix(windows: Windows):
    scheduler, runner = make(blocks=40, windows=windows)
    first = Request("first", prompt(100), Sampling(max_tokens=1))
    scheduler.add(first)
    finish(scheduler, runner)
    hashes = HashChain(first.tokens).hashes
    for table, block, hit in ((0, 0, 96), (0, 5, 80), (len(windows) - 1, 0, 80 * (len(windows) == 1))):
        evict(scheduler.pool, table, hashes[block])
        before = scheduler.stats["prefix_hits"]
        again = replace(first, id=f"{table} {block}", tokens=(*first.tokens[:96], block, 1))
        assert scheduler.pool.find(hashes, windows)[0] * BLOCK_TOKENS == hit
        scheduler.add(again)
        assert finish(scheduler, runner)[again.id] == answer_alone(again, windows)
        assert scheduler.stats["prefix_hits"] - before == hit
        evict(scheduler.pool, table, hashes[block])


def evict(pool: BlockPool, table: int, content: bytes) -> None:
    """Evict the content of a cached block."""
    if (block := pool._block_of.pop((table, content), None)) is not None:
        pool._hashes[block] = None
        del pool._cached[block]
        pool._free.append(block)


def test_logits_rows_are_bounded_and_cover_every_prompt_token():
    scheduler, runner = make(scored_rows=6)
    scheduler.add(Request("a", prompt(40), Sampling(max_tokens=0, prompt_logprobs=0)))
    scheduler.add(Request("b", prompt(9), Sampling(max_tokens=3)))
    answers: dict[str, Answer] = {}
    while not scheduler.idle:
        batch = scheduler.schedule()
        assert len(batch.output_rows) <= 6
        for output in scheduler.record_results(batch, sample_batch(batch, runner.run(batch))):
            answers.setdefault(output.request_id, Answer()).add(output)
    assert (answers["a"].tokens, answers["a"].reason) == ([], "length")
    assert answers["a"].prompt[0] is None
    assert [result.token for result in answers["a"].prompt[1:]] == list(prompt(40)[1:])


def test_pipeline_groups_are_balanced_and_separate():
    scheduler, runner = make(groups=3, max_sequences=6)
    for name in "abcdef":
        scheduler.add(Request(name, prompt(4), Sampling(max_tokens=20)))
    batches = [None] * 3
    for tick in range(9):
        if batches[tick % 3] is not None:
            scheduler.record_results(batches[tick % 3], sample_batch(batches[tick % 3], runner.run(batches[tick % 3])))
        batches[tick % 3] = scheduler.schedule(tick % 3)
    members = [{chunk.sequence.request.id for chunk in batch.chunks} for batch in batches]
    assert [len(each) for each in members] == [2, 2, 2] and set.union(*members) == set("abcdef")
    with pytest.raises(AssertionError, match="has not been recorded"):
        scheduler.schedule(0)


@pytest.mark.parametrize(("longest", "together"), [(140, 1), (90, 2)])
def test_places_are_those_that_run_while_the_next_request_lacks_blocks(longest: int, together: int):
    """A pool of 10 blocks: with answers of 140 tokens a second sequence would be unsafe, with answers of 90 tokens a
    third one would soon have to pause."""
    scheduler, runner = make(10, max_sequences=8)
    for number in range(4):
        scheduler.add(Request(str(number), prompt(10, number), Sampling(max_tokens=longest)))
    step(scheduler, runner)
    assert (scheduler.stats["waiting"], scheduler.stats["places"]) == (4 - together, together)
    while not scheduler.idle:
        batch = scheduler.schedule()
        stats = scheduler.stats
        assert batch is not None
        scheduler.record_results(batch, sample_batch(batch, runner.run(batch)))
        assert stats["places"] == (stats["running"] + stats["paused"] if stats["waiting"] else 8)
        assert scheduler.stats["places"] == stats["places"], "ends of sequences are no lack of blocks"


def test_request_that_waits_for_a_common_prefix_leaves_places_open_after_blocks_were_lacking():
    scheduler, runner = make(10, max_sequences=8, token_budget=16)
    for name, length, longest in (("long", 10, 140), ("first", 40, 5), ("second", 40, 5)):
        scheduler.add(Request(name, prompt(length, length), Sampling(max_tokens=longest)))
    step(scheduler, runner)
    assert (scheduler.stats["waiting"], scheduler.stats["places"]) == (2, 1)
    while scheduler.stats["waiting"] == 2:
        step(scheduler, runner)
    assert (scheduler.stats["running"], scheduler.stats["places"]) == (1, 8)
    finish(scheduler, runner)


@pytest.mark.parametrize(("blocks", "places"), [(200, 8), (10, 1)])
def test_request_that_waits_for_the_turn_of_a_pipeline_group_closes_no_places(blocks: int, places: int):
    """A burst enters in turns, one sequence more than the other group has; only a lack of KV blocks closes places, and
    does so in the turn of either group."""
    scheduler, runner = make(blocks, groups=2, max_sequences=8)
    for number in range(8):
        scheduler.add(Request(str(number), prompt(10, number), Sampling(max_tokens=140)))
    first = scheduler.schedule(0)
    assert first is not None and scheduler.stats["places"] == 8
    scheduler.schedule(1)
    assert scheduler.stats["waiting"] and scheduler.stats["places"] == places
    scheduler.record_results(first, sample_batch(first, runner.run(first)))
    scheduler.schedule(0)
    assert scheduler.stats["waiting"] and scheduler.stats["places"] == places


def test_request_that_no_step_has_considered_closes_no_places():
    scheduler, runner = make(10, max_sequences=8)
    for name in ("long", "blocked"):
        scheduler.add(Request(name, prompt(10), Sampling(max_tokens=140)))
    step(scheduler, runner)
    assert scheduler.stats["places"] == 1
    scheduler.cancel("blocked")
    scheduler.add(Request("new", prompt(10), Sampling(max_tokens=5)))
    assert scheduler.stats["places"] == 8


def test_request_that_can_never_run_is_refused():
    scheduler, _ = make(blocks=10)
    scheduler.add(Request("a", prompt(100), Sampling(max_tokens=61)))
    for request, message in (
        (Request("a", (1,)), "request ID a is in use"),
        (Request("b", prompt(100), Sampling(max_tokens=62)), "should be at most 160 tokens together"),
        (Request("b", prompt(300), Sampling(max_tokens=21)), "should be at most 160 tokens together"),
    ):
        with pytest.raises(UserError, match=message):
            scheduler.add(request)


def test_equal_prompts_that_arrive_together_are_computed_once():
    scheduler, runner = make(token_budget=48)
    prompt = tuple(range(30)) * 2
    wanted = [Request(str(n), prompt, Sampling(temperature=1.0, max_tokens=5, seed=3), choice=n) for n in range(3)]
    other = Request("other", prompt[:16] + (5,) * 20, Sampling(max_tokens=5))
    for request in (*wanted, other):
        scheduler.add(request)
    answers = finish(scheduler, runner)
    assert scheduler.stats["prefix_hits"] == 2 * 48 + 16
    assert all(answers[request.id] == answer_alone(request) for request in (*wanted, other))


@pytest.mark.parametrize("options", [{}, {"prompt_logprobs": 0}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_logits_end_only_their_own_request(options: dict[str, float], value: float):
    scheduler, runner = make()
    damaged = Request("damaged", tuple(range(40)), Sampling(max_tokens=5, **options))
    sound = Request("sound", tuple(range(1, 30)), Sampling(max_tokens=5))
    answer = Answer()
    scheduler.add(damaged)
    scheduler.add(sound)
    while not scheduler.idle:
        batch = scheduler.schedule()
        logits = runner.run(batch)
        place = next((at for at, each in enumerate(batch.chunks) if each.sequence.request is damaged), None)
        if place is not None:
            mine = (batch.output_rows >= batch.starts[place]) & (batch.output_rows < batch.starts[place + 1])
            logits[mine, 7] = value
        for output in scheduler.record_results(batch, sample_batch(batch, logits)):
            if output.request_id == "damaged":
                assert output == Output("damaged", [], "error")
            else:
                answer.add(output)
        check_scheduler(scheduler)
    assert answer == answer_alone(sound)
    assert scheduler.pool.find(HashChain(damaged.tokens).hashes)[0] == 0, "the prefix cache has damaged blocks"
