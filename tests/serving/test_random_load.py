"""Engines with real models under random load: every answer equals that of its request alone, to the last bit.

The load varies arrivals, cancellations, lengths, shared prompts, chunk sizes and the pressure on the KV pool.
"""

from __future__ import annotations

import math
import operator
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.kernels.choice import PLAIN_TORCH
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving.device_logits import DeviceLogits
from meshwright.serving.device_runner import DeviceRunner
from meshwright.serving.engine import Engine, Runner, build_runner, build_scheduler
from meshwright.serving.logit_rows import StepOutput
from meshwright.serving.rank_starter import RankPlan
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import Sampling, TokenResult
from meshwright.serving.scheduler import StepBatch
from meshwright.serving.weights import RankWeights
from meshwright.spec.block_tables import block_tables, max_blocks_held
from tests.conftest import exhaustive
from tests.serving import device_reference
from tests.serving.pool_checks import check_scheduler
from tests.serving.small_models import NEEDS_COMPILER, small_config, write_model

LENGTH, MOST_TOKENS, MOST_SEQUENCES, MOST_BLOCKS = 112, 40, 6, 40
SIZES = ServingSizes(MOST_TOKENS, MOST_SEQUENCES, LENGTH, blocks=MOST_BLOCKS, scored_rows=0)


@dataclass
class Answer:
    """Answer to one request, as a client receives it."""

    tokens: list[TokenResult] = field(default_factory=list)
    prompt: list[TokenResult | None] | None = None
    reason: str | None = None

    def add(self, output: Output) -> None:
        assert self.reason is None, "an output after the last"
        self.tokens += output.results
        self.reason = output.finish_reason
        self.prompt = output.prompt_results or self.prompt


@pytest.fixture(scope="module")
def make_runner(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str | None], Runner]:
    """Builds the runner of a small model: (name, dtype, instruction set; None: the fastest)."""

    def make(name: str, dtype: str, kernels: str | None) -> Runner:
        directory = write_model(tmp_path_factory.mktemp("model") / name, small_config(name, max_positions=128))
        plan = RankPlan(str(directory), "dp1", replace(SIZES, dtype=dtype), instruction_set=kernels)
        return build_runner(plan, Mesh.single())

    return make


def draw_requests(draw: random.Random, vocabulary: int) -> list[Request]:
    """Some requests: prompts that share beginnings, greedy and sampled, with and without log-probabilities."""
    stem = [draw.randrange(vocabulary) for _ in range(40)]
    made = []
    for number in range(draw.randint(4, 9)):
        tail = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 8))]
        tokens = tuple(stem[: draw.choice([0, 5, 16, 31, 32, 40])] + tail)
        sampling = Sampling(
            temperature=draw.choice([0.0, 0.7, 1.3]),
            top_p=draw.choice([1.0, 0.9]),
            repetition_penalty=draw.choice([1.0, 1.1]),
            seed=draw.randrange(100),
            stop_tokens=frozenset(range(0, vocabulary, 64)) if number % 4 == 0 else frozenset(),
            max_tokens=min(draw.choice([0, 1, 20, LENGTH, LENGTH]), LENGTH - len(tokens)),
            logprobs=draw.choice([None, 0, 3]),
            prompt_logprobs=draw.choice([None, None, 2]),
        )
        salt, priority = draw.choice(["", "", "salt"]), draw.randint(0, 1)
        made.append(Request(str(number), tokens, sampling, priority=priority, cache_salt=salt))
    again = draw.choice(made)  # another choice of the same prompt, or a retry of the same request
    return [*made, replace(again, id="again", choice=draw.randint(0, 1))]


def run_alone(runner: Runner, request: Request) -> Answer:
    """The answer to a request in an empty engine with the whole pool and the largest steps."""
    engine, answer = Engine(runner, build_scheduler(runner.config, SIZES)), Answer()
    engine.add(request)
    while not engine.idle:
        for output in engine.step():
            answer.add(output)
    return answer


def agree(one: Answer, other: Answer) -> bool:
    """The same tokens with log-probabilities equal but for rounding: the reference of the GPU kernels is not exact."""

    def list_scores(results: Sequence[TokenResult | None]) -> list[float]:
        return [value for each in results if each for value in (each.logprob or 0, *(top for _, top in each.top))]

    names = ([(each.token, each.top and each.top[0][0]) for each in answer.tokens] for answer in (one, other))
    scores = (list_scores([*answer.tokens, *(answer.prompt or ())]) for answer in (one, other))
    return operator.eq(*names) and one.reason == other.reason and next(scores) == pytest.approx(next(scores), abs=1e-4)


def run_load(runner: Runner, seed: int, same: Callable[[Answer, Answer], bool] = operator.eq) -> Counter[str]:
    """Run random requests together, with random sizes, and compare each answer by `same`; return what happened."""
    draw = random.Random(seed)
    requests = draw_requests(draw, runner.config.vocabulary)
    sequences = draw.randint(2, MOST_SEQUENCES)
    budget = draw.randint(sequences, MOST_TOKENS)
    least = sum(max_blocks_held(LENGTH, block_tables(runner.config, 1).windows, budget))
    blocks = draw.randint(least, min(2 * least, MOST_BLOCKS))
    sizes = ServingSizes(budget, sequences, LENGTH, blocks=blocks, scored_rows=0)
    scheduler = build_scheduler(runner.config, sizes)
    predicted = draw.choice([0.0, 0.0, 1.0])  # share of max_tokens; with 0, more sequences are admitted and pause
    engine, answers = Engine(runner, scheduler), {request.id: Answer() for request in requests}
    arrivals = sorted((draw.randint(0, 12), number) for number in range(len(requests)))
    cancels = {draw.randint(0, 30): draw.choice(requests).id for _ in range(draw.randint(0, 3))}
    tick = 0
    while arrivals or not engine.idle:
        while arrivals and arrivals[0][0] <= tick:
            engine.add(requests[arrivals.pop(0)[1]])
        scheduler._answers.ratio = predicted
        outputs = engine.step()
        if (cancelled := engine.cancel(cancels.get(tick, ""))) is not None:
            outputs.append(cancelled)
        for output in outputs:
            answers[output.request_id].add(output)
        check_scheduler(scheduler)
        tick += 1
        assert tick < 2000, "the engine does not end"
    stats = scheduler.stats
    assert stats["free"] + stats["cached"] == sizes.blocks and stats["held"] == 0
    for request in requests:
        alone, answer = run_alone(runner, request), answers[request.id]
        if answer.reason == "cancelled":
            alone = Answer(alone.tokens[: len(answer.tokens)], answer.prompt and alone.prompt, "cancelled")
        assert same(answer, alone), (seed, request)
    happened = Counter({name: int(stats[name]) for name in ("pauses", "prefix_hits")})
    return happened + Counter(answer.reason for answer in answers.values())


@pytest.mark.parametrize("seeds", [range(12), *exhaustive(*(range(at, at + 50) for at in range(12, 412, 50)))], ids=str)
@pytest.mark.parametrize(
    ("name", "dtype", "kernels"),
    [
        pytest.param("qwen2-tiny", "float32", None, marks=NEEDS_COMPILER),  # a window in some of the layers
        pytest.param("mixtral-tiny", "bfloat16", None, marks=NEEDS_COMPILER),
        *exhaustive(
            ("llama-tiny", "bfloat16", None), ("gpt2-tiny", "float32", None), ("qwen2-tiny", "float16", PLAIN_TORCH)
        ),
    ],
)
def test_answers_under_random_load_equal_those_of_requests_alone(
    make_runner: Callable[[str, str, str | None], Runner], name: str, dtype: str, kernels: str | None, seeds: range
):
    runner, happened = make_runner(name, dtype, kernels), Counter[str]()
    for seed in seeds:
        happened += run_load(runner, seed)
    assert all(happened[what] for what in ("pauses", "prefix_hits", "cancelled", "length")), happened


class OverwritingRunner(DeviceRunner):
    """Device runner whose logits, as those of a CUDA graph, are overwritten by the next step."""

    launched_ahead = 0
    logits = torch.zeros(0)

    def run(
        self, batch: StepBatch, hidden: npt.NDArray[np.float32] | None = None, after: DeviceLogits | None = None
    ) -> StepOutput:
        found = super().run(batch, hidden, after)
        with torch.inference_mode():
            self.logits.fill_(math.nan)
        if isinstance(found, DeviceLogits):
            self.logits = found.logits
        self.launched_ahead += after is not None
        return found


@pytest.mark.parametrize("seeds", [[1, 4], *exhaustive([0, 3])], ids=str)
def test_answers_of_steps_launched_ahead_equal_those_of_requests_alone(seeds: list[int], tmp_path: Path):
    weights = RankWeights(write_model(tmp_path, small_config("qwen2-tiny", max_positions=128)), Mesh.single())
    runner = OverwritingRunner(weights, Mesh.single(), SIZES, device_reference, batch_invariant=True, graphs=False)
    happened = Counter[str]()
    for seed in seeds:
        happened += run_load(runner, seed, agree)
    assert all(happened[what] for what in ("prefix_hits", "stop", "length")), happened
    assert runner.launched_ahead > 10


def test_answers_in_plain_torch_equal_those_of_requests_alone(make_runner: Callable[[str, str, str | None], Runner]):
    assert run_load(make_runner("llama-tiny", "float32", PLAIN_TORCH), seed=1)
