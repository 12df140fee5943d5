"""Pipeline ranks give the answers of a single engine for any order of batches in the stages."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.program.pipeline import Kind
from meshwright.serving import engine as engine_module
from meshwright.serving.engine import Engine, PipelineEngine, derive_steady_state
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling, TokenResult
from meshwright.serving.scheduler import Scheduler, StepBatch
from tests.serving.pool_checks import check_scheduler

VOCABULARY = 499


class FakeRunner:
    """A stage that outputs a function of tokens and positions, and checks that its input is that of its batch."""

    instruction_set, version = "none", "fake"

    def __init__(self, stage: int, stages: int) -> None:
        self.first, self.last = stage == 0, stage == stages - 1
        self.config = SimpleNamespace(vocabulary=VOCABULARY, hidden=4)

    def run(self, batch: StepBatch, hidden: np.ndarray | None = None) -> np.ndarray:
        numbers = [batch.tokens, batch.positions, batch.slots[0], batch.tokens * 0]
        expected = np.stack(numbers, axis=1).astype(np.float32)
        assert self.first or np.array_equal(hidden, expected)
        if not self.last:
            return expected
        logits = np.zeros((len(batch.output_rows), VOCABULARY), np.float32)
        rows = batch.output_rows
        logits[np.arange(len(rows)), (batch.tokens[rows] * 31 + batch.positions[rows] * 7) % VOCABULARY] = 1
        return logits

    def memory(self) -> dict[str, int]:
        return {}


Answers = dict[str, tuple[list[TokenResult], str]]


def run_engine(engine: Any, seed: int) -> Answers:
    """Tokens with log-probabilities and end of each request of a random sequence of arrivals and cancels."""
    draw = random.Random(seed)
    found: Answers = {}
    tokens: dict[str, list[TokenResult]] = {}
    waiting = [
        Request(
            f"r{number}",
            tuple(draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 60))),
            Sampling(
                max_tokens=draw.randrange(0, 20),
                logprobs=draw.choice([None, 0, 20]) if number else 2**13,
                temperature=draw.choice([0, 1]),
            ),
        )
        for number in range(25)
    ]
    cancelled = {draw.randrange(25): draw.randrange(1, 40) for _ in range(4)}
    for step in range(10_000):
        while waiting and draw.random() < 0.3:
            engine.add(waiting.pop(0))
        for number, when in cancelled.items():
            if when == step:
                engine.cancel(f"r{number}")
        if not waiting and engine.idle:
            break
        for output in engine.step() if not engine.idle else []:
            tokens.setdefault(output.request_id, []).extend(output.results)
            if output.finish_reason is not None:
                found[output.request_id] = tokens.pop(output.request_id), output.finish_reason
    check_scheduler(engine.scheduler)
    assert engine.idle
    return {name: each for name, each in found.items() if int(name[1:]) not in cancelled}


def make_scheduler(groups: int) -> Scheduler:
    return Scheduler(ServingSizes(32, 8, 80, blocks=24, scored_rows=0), groups=groups)


def run_rank(layout: str, seeds: list[int]) -> list[Answers]:
    """The answers of a rank of a pipeline; no message has more alternatives than the vocabulary."""
    mesh = Mesh.create(Layout.parse(layout))
    runner = FakeRunner(mesh.pp.rank, mesh.pp.size)
    decode, widths = engine_module._decode_results, [0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine_module, "_decode_results", lambda sent: widths.append(sent.shape[1]) or decode(sent))
        found = [run_engine(PipelineEngine(runner, make_scheduler(mesh.pp.size), mesh), seed) for seed in seeds]
    assert max(widths) == (0 if runner.last else 2 + 2 * VOCABULARY)
    mesh.close()
    return found


@pytest.mark.parametrize(("layout", "ranks"), [("pp2", "two"), ("pp4", "four"), ("tp2:nosp pp2", "four")])
def test_pipeline_answers_like_one_engine(request: pytest.FixtureRequest, layout: str, ranks: str):
    pool: LocalRanks = request.getfixturevalue(ranks)
    seeds = [1, 2]
    expected = [run_engine(Engine(FakeRunner(0, 1), make_scheduler(1)), seed) for seed in seeds]  # type: ignore
    assert all(len(answers) > 15 for answers in expected)
    assert pool.run(run_rank, layout, seeds) == [expected] * pool.world_size


def test_steady_state_computes_previous_stages_batch_next_slot():
    for stages in (2, 3, 5, 8):
        for stage in range(stages):
            steps = [step for group in derive_steady_state(stages, stage) for step in group]
            assert steps[0] == (Kind.FORWARD, -stage)
            assert (Kind.BACKWARD, 1 - stages) in steps
            assert ((Kind.SEND_FORWARD, -stage) in steps) == (stage < stages - 1)
            assert ((Kind.RECEIVE_FORWARD, 1 - stage) in steps) == (stage > 0)
            assert ((Kind.SEND_BACKWARD, 1 - stages) in steps) == (stage > 0)
            assert len(steps) == 2 + 2 * (stage > 0) + 2 * (stage < stages - 1)
