"""Runners: each decoder family matches transformers and training's forward, and a token's bits do not depend on the
batch."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from meshwright.comm.mesh import Mesh
from meshwright.kernels.choice import PLAIN_TORCH
from meshwright.layout import Layout
from meshwright.model.huggingface import load_huggingface
from meshwright.planner.serving.ledger import KERNEL_DTYPES, ServingSizes
from meshwright.planner.serving.runners import serving_ledger
from meshwright.serving import engine as engine_module
from meshwright.serving.engine import Engine, Runner, build_runner, build_scheduler
from meshwright.serving.lowering import Segment
from meshwright.serving.native_runner import NativeRunner
from meshwright.serving.offline import run_requests
from meshwright.serving.rank_starter import RankPlan
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling, TokenResult
from meshwright.spec.block_tables import block_tables, max_blocks_held
from tests.conftest import covering
from tests.serving.pool_checks import check_scheduler
from tests.serving.small_models import FAMILIES, NEEDS_COMPILER, list_features, small_config, write_model
from tests.serving.step_batches import Chunk, make_batch, read_in_pieces

SIZES = ServingSizes(64, 8, 64, blocks=128)
PROMPTS = [[7, 9, 250, 3], [100], [int(token) for token in np.random.default_rng(0).integers(0, 256, 21)]]
KINDS = ["torch", pytest.param("kernels", marks=NEEDS_COMPILER)]
IN_TORCH = (
    *((name, "float32") for name in ("mistral-tiny", "gpt2-tiny")),
    *((name, "bfloat16") for name in ("qwen3-moe-tiny", "deepseek-v3-tiny", "gpt-oss-tiny", "llama4-tiny")),
)
SOME = covering(FAMILIES, list_features)
"""Other families use parts of the model that these use, too, and run with --exhaustive only."""
GREEDY = [
    *covering([("torch", name) for name in FAMILIES], lambda build, name: list_features(name)),
    *(pytest.param("kernels", name, marks=NEEDS_COMPILER) for name in FAMILIES),
]
INVARIANT = [
    *covering([("torch", *case) for case in IN_TORCH], lambda build, name, dtype: {dtype, *list_features(name)}),
    *covering(
        [pytest.param("kernels", *case, marks=NEEDS_COMPILER) for case in product(FAMILIES, KERNEL_DTYPES)],
        lambda build, name, dtype: {(dtype, *feature) for feature in list_features(name)},
    ),
]
LOADED = [
    ("torch", "gpt2-tiny"),
    *(pytest.param("kernels", name, marks=NEEDS_COMPILER) for name in ("mistral-tiny", "qwen2-tiny", "gpt2-tiny")),
]
Build = Callable[..., Runner]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of each family's model."""
    place, made = tmp_path_factory.mktemp("models"), dict[str, Path]()

    def find(name: str) -> Path:
        if name not in made:
            made[name] = write_model(place / name, small_config(name))
        return made[name]

    return find


@pytest.fixture(params=KINDS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds a runner of one kind."""
    if request.param == "torch":
        monkeypatch.setattr(engine_module, "load_kernels", lambda instruction_set: None)

    def make(directory: Path, dtype: str = "float32", threads: int = 1, sizes: ServingSizes = SIZES) -> Runner:
        sizes = dataclasses.replace(sizes, dtype=dtype, threads=threads)
        built = build_runner(RankPlan(str(directory), "dp1", sizes), Mesh.single())
        assert built.version.startswith("torch") == (request.param == "torch")
        return built

    return make


def tables_of(runner: Runner) -> int:
    """Number of block tables of a sequence."""
    return len(block_tables(runner.config, 1).windows)


def run_greedily(
    runner: Runner, prompts: Sequence[Sequence[int]], budget: int = 64, count: int = 8, blocks: int = 128
) -> list[list[TokenResult]]:
    """Tokens of the answers to all prompts at once, with their log-probabilities and those of two alternatives."""
    sizes = dataclasses.replace(SIZES, token_budget=budget, blocks=blocks)
    engine = Engine(runner, build_scheduler(runner.config, sizes))
    requests = [
        Request(str(number), tuple(prompt), Sampling(max_tokens=count, logprobs=2))
        for number, prompt in enumerate(prompts)
    ]
    answers: list[list[TokenResult]] = [[] for _ in prompts]
    for output in run_requests(engine, requests):
        answers[int(output.request_id)] += output.results
    check_scheduler(engine.scheduler)
    return answers


@pytest.mark.parametrize(("build", "name"), GREEDY, indirect=["build"])
def test_greedy_tokens_match_transformers(name: str, build: Build, directories: Callable[[str], Path]):
    runner = build(directories(name))
    prompts, count = (PROMPTS[:2], 4) if runner.version.startswith("torch") else (PROMPTS, 8)  # torch is slow
    model = transformers.AutoModelForCausalLM.from_pretrained(directories(name), dtype=torch.float32)
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [model.generate(torch.tensor([each]), **options)[0, len(each) :].tolist() for each in prompts]
    answers = run_greedily(runner, prompts, count=count)
    assert [[result.token for result in answer] for answer in answers] == expected
    assert len({token for answer in expected for token in answer}) > 3


@pytest.mark.parametrize("name", ["deepseek-v2-tiny", "deepseek-v3-tiny"])
def test_latent_attention_caches_one_vector_per_token_and_layer(
    name: str, build: Build, directories: Callable[[str], Path]
):
    """In place of the keys and values of all heads, in as many bytes as the ledger has; kernels pad the vector."""
    runner = build(directories(name), "bfloat16")
    sizes = dataclasses.replace(SIZES, dtype="bfloat16")
    plain = runner.version.startswith("torch")
    ledger = serving_ledger(runner.config, Layout(), sizes, "torch" if plain else "kernels")
    vector = 16 + 8 if plain else 32
    assert runner.memory()["kv"] == SIZES.blocks * ledger.kv_block == SIZES.blocks * 16 * 3 * vector * 2
    assert runner.memory()["weights"] == ledger.stages[0].weights


def test_norms_over_ranks_match_float64_without_temporaries_of_the_whole_step():
    """Temporaries that the memory ledger does not count are at most of 64 rows."""
    rows, widths = 2000, (1024, 256)
    random = np.random.default_rng(1)
    slices = random.standard_normal((rows, sum(widths) + 256)).astype(np.float32)
    norms = tuple(random.standard_normal(width).astype(np.float32) for width in widths)
    x, others = slices.astype(np.float64), random.random((rows, 2)).astype(np.float32)
    runner: Any = SimpleNamespace(
        config=SimpleNamespace(norm_epsilon=1e-6), _tensor=SimpleNamespace(size=2), _all_reduce=lambda own: own + others
    )
    tracemalloc.start()
    try:
        NativeRunner._normalise_over_ranks(runner, Segment(0, slices, norms=norms), slices)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.1 * slices.nbytes
    for norm, weight in enumerate(norms):
        part = x[:, sum(widths[:norm]) : sum(widths[: norm + 1])]
        mean = ((part**2).sum(axis=1) + others[:, norm]) / (2 * part.shape[1])
        part *= weight / np.sqrt(mean + 1e-6)[:, None]
    assert np.abs(slices - x).max() < 1e-5 and np.array_equal(slices[:, -256:], x[:, -256:])


def test_plain_torch_runs_where_the_plan_names_it(directories: Callable[[str], Path]):
    """A server without a compiler names it in the plan, so that no rank uses its own kernels."""
    runner = build_runner(
        RankPlan(str(directories("llama-tiny")), "dp1", SIZES, instruction_set=PLAIN_TORCH), Mesh.single()
    )
    assert runner.version.startswith("torch")


@pytest.mark.parametrize("name", SOME)
def test_logits_match_training_forward(name: str, build: Build, directories: Callable[[str], Path]):
    model, _ = load_huggingface(directories(name))
    tokens = np.random.default_rng(1).integers(0, 256, 25).tolist()
    with torch.no_grad():
        want = model.logits(torch.tensor([tokens]))[0].numpy()
    runner = build(directories(name))
    found = runner.run(make_batch([Chunk(tokens, 0)], tables=tables_of(runner)))
    assert np.abs(found - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(("build", "name", "dtype"), INVARIANT, indirect=["build"])
def test_logit_bits_depend_only_on_own_sequence(
    name: str, dtype: str, build: Build, directories: Callable[[str], Path]
):
    """Not on chunks, KV blocks, other sequences of the step or the number of threads."""
    runner, other = build(directories(name), dtype), build(directories(name), dtype, threads=2)
    tokens = np.random.default_rng(2).integers(0, 256, 53).tolist()
    tables = tables_of(runner)
    whole = runner.run(make_batch([Chunk(tokens, 0, [5, 9, 3, 20])], tables=tables)).copy()
    assert np.isfinite(whole).all()
    for pieces, table in (([1] * 18 + [35], [2, 4, 6, 8]), ([7, 1, 13, 17, 15], [30, 11, 7, 5])):
        assert np.array_equal(read_in_pieces(runner, tokens, pieces, table, tables), whole)
    mixed = [Chunk(tokens[:10], 0, [40]), Chunk(tokens[15:32], 15, [30, 11, 7, 5]), Chunk([5], 0, [41])]
    assert np.array_equal(runner.run(make_batch(mixed, tables=tables))[10:27], whole[15:32])
    assert np.array_equal(other.run(make_batch([Chunk(tokens, 0)], tables=tables)), whole)


@pytest.mark.parametrize(("build", "name"), LOADED, indirect=["build"])
def test_answers_are_independent_of_load_budget_and_prefix_hits(
    name: str, build: Build, directories: Callable[[str], Path]
):
    runner = build(directories(name))
    long = PROMPTS[2] + PROMPTS[2]
    prompts = [*PROMPTS, long, [*long[:35], 1], long]
    together = run_greedily(runner, prompts)
    assert all(result.logprob is not None and len(result.top) == 2 for answer in together for result in answer)
    assert together == run_greedily(runner, prompts, budget=9) == [run_greedily(runner, [each])[0] for each in prompts]
    few = sum(max_blocks_held(len(long) + 8, block_tables(runner.config, 1).windows, 9))  # blocks of one of them
    assert run_greedily(runner, prompts, budget=9, blocks=few) == together
    engine = Engine(runner, build_scheduler(runner.config, SIZES))
    request = Request("again", tuple(long), Sampling(max_tokens=5, logprobs=2))
    first, second = (list(run_requests(engine, [request])) for _ in range(2))
    assert [output.results for output in second] == [output.results for output in first]
    assert (first[0].cached_tokens, second[0].cached_tokens) == (0, 32)


@NEEDS_COMPILER
def test_memory_of_a_tied_head_counts_one_matrix(directories: Callable[[str], Path], tmp_path: Path):
    sizes = []
    for tied in (True, False):
        directory = write_model(tmp_path / str(tied), small_config("llama-tiny", tied=tied))
        sizes.append(build_runner(RankPlan(str(directory), "dp1", SIZES), Mesh.single()).memory())
    config = small_config("llama-tiny")
    assert sizes[1]["weights"] - sizes[0]["weights"] == 4 * config.vocabulary * config.hidden
    assert sizes[1]["packed"] == sizes[0]["packed"]


def test_other_dtypes_run_in_plain_torch(directories: Callable[[str], Path]):
    sizes = dataclasses.replace(SIZES, dtype="float64")
    runner = build_runner(RankPlan(str(directories("llama-tiny")), "dp1", sizes), Mesh.single())
    assert runner.version.startswith("torch")
    model, _ = load_huggingface(directories("llama-tiny"), torch.float64)
    with torch.no_grad():
        want = model.logits(torch.tensor([PROMPTS[2]]))[0].numpy()
    np.testing.assert_allclose(runner.run(make_batch([Chunk(PROMPTS[2], 0)])), want, rtol=1e-6)
