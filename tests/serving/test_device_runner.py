"""The runner of a GPU: its steps on a CPU with the reference operations, and on CUDA tensors without memory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright import kernels
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.huggingface import load_huggingface
from meshwright.model.transformer import Transformer
from meshwright.planner.serving.ledger import RankLedger, ServingSizes
from meshwright.planner.serving.runners import CONTEXT_BYTES, SPLIT_COLUMNS, serving_ledger
from meshwright.serving.device_runner import DeviceRunner, StepSizes
from meshwright.serving.engine import Engine, PipelineEngine, build_runner, build_scheduler
from meshwright.serving.offline import run_requests
from meshwright.serving.rank_starter import RankPlan
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling
from meshwright.serving.weights import RankWeights
from meshwright.spec.block_tables import block_tables
from meshwright.spec.config import ModelConfig
from meshwright.spec.presets import preset
from meshwright.spec.stages import whole_model
from tests.conftest import covering
from tests.serving import device_reference
from tests.serving.pool_checks import check_scheduler
from tests.serving.small_models import FAMILIES, list_features, list_layout_features, small_config, write_model
from tests.serving.step_batches import Chunk, make_batch

SIZES = ServingSizes(64, 6, 64, blocks=48)
PROMPTS = [[7, 9, 250, 3], [100], np.random.default_rng(0).integers(0, 256, 37).tolist(), [5, 6]]
SHAPES = ("llama-tiny", "mistral-tiny", "gpt2-tiny", "qwen3-moe-tiny", "deepseek-v3-tiny", "llama4-tiny")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directory of each family's model, with changes of its configuration."""
    place, made = tmp_path_factory.mktemp("models"), dict[tuple[str, ...], Path]()

    def find(name: str, **changes: int) -> Path:
        key = name, *map(str, changes.values())
        if key not in made:
            made[key] = write_model(place / "-".join(key), small_config(name, **changes))
        return made[key]

    return find


def make_runner(
    directory: Path, batch_invariant: bool = False, graphs: bool = False, dtype: str = "float32"
) -> DeviceRunner:
    mesh, sizes = Mesh.single(), replace(SIZES, dtype=dtype)
    weights = RankWeights(directory, mesh)
    return DeviceRunner(weights, mesh, sizes, device_reference, batch_invariant=batch_invariant, graphs=graphs)


def answer(runner, budget: int) -> list[list[int]]:
    return run_prompts(Engine(runner, build_scheduler(runner.config, ServingSizes(budget, 6, 64, blocks=48))))


def run_prompts(engine: Engine) -> list[list[int]]:
    """Greedy tokens of all prompts in one batch; 3 of the 4 decode together for a while, padded to 4."""
    requests = [Request(str(n), tuple(each), Sampling(max_tokens=9 - 2 * n)) for n, each in enumerate(PROMPTS)]
    answers: list[list[int]] = [[] for _ in requests]
    for output in run_requests(engine, requests):
        answers[int(output.request_id)] += [result.token for result in output.results]
    check_scheduler(engine.scheduler)
    return answers


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_the_cpu_runner(name: str, directories: Callable[[str], Path]):
    expected = answer(build_runner(RankPlan(str(directories(name)), "dp1", SIZES), Mesh.single()), 64)
    runner = make_runner(directories(name), batch_invariant=name == "llama-tiny")
    assert answer(runner, 64) == answer(runner, 11) == expected
    assert len({token for each in expected for token in each}) > 3


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny"])
def test_sampled_tokens_are_those_of_the_cpu_runner(name: str, directories: Callable[[str], Path]):
    options = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 5, "temperature": 2.0, "logprobs": 2},
    ]
    options += [{"presence_penalty": 1.0, "prompt_logprobs": 1, "temperature": 0.5}]
    requests = [
        Request(str(n), tuple(each), Sampling(seed=n, max_tokens=8, **options[n])) for n, each in enumerate(PROMPTS)
    ]
    found = []
    for runner in (
        build_runner(RankPlan(str(directories(name)), "dp1", SIZES), Mesh.single()),
        make_runner(directories(name)),
    ):
        outputs = list(run_requests(Engine(runner, build_scheduler(runner.config, SIZES)), requests))
        scored = [each for output in outputs for each in output.prompt_results or () if each is not None]
        results = [(output.request_id, each) for output in outputs for each in output.results]
        found.append((results, [("prompt", each) for each in scored]))
    for mine, expected in zip(*found, strict=True):
        assert [(name, each.token) for name, each in mine] == [(name, each.token) for name, each in expected]
        for (_, a), (_, b) in zip(mine, expected, strict=True):
            assert [token for token, _ in a.top] == [token for token, _ in b.top]
            assert (a.logprob is None) == (b.logprob is None) and (a.logprob or 0) == pytest.approx(
                b.logprob or 0, abs=1e-4
            )


def test_closed_iterator_completes_the_step_that_was_launched_ahead(directories: Callable[[str], Path]):
    runner = make_runner(directories("llama-tiny"))
    engine = Engine(runner, build_scheduler(runner.config, SIZES))
    outputs = run_requests(engine, [Request("a", (3, 4, 5), Sampling(max_tokens=20))])
    for _ in range(3):
        next(outputs)
    assert engine.ahead is not None
    outputs.close()
    assert engine.ahead is None and engine.idle
    assert run_prompts(engine) == answer(runner, 64)


def test_interrupt_of_a_step_is_raised_as_it_is(directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    runner = make_runner(directories("llama-tiny"))
    engine = Engine(runner, build_scheduler(runner.config, SIZES))
    outputs = run_requests(engine, [Request("a", (3, 4, 5), Sampling(max_tokens=20))])
    next(outputs)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(outputs)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "qwen3-moe-tiny", "dots1-tiny"])
def test_gemv_computes_one_token_from_parameters_unless_batch_invariant(
    name: str, directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    """A weight that a kernel has just written, such as the float32 router of dots1, would be read too early."""
    given, gemv = list[torch.Tensor](), device_reference.gemv
    monkeypatch.setattr(device_reference, "gemv", lambda x, weight, *rest, **options: (
        given.append(weight), gemv(x, weight, *rest, **options))[1])  # fmt: skip
    one, two = ([Chunk([7], 0, [3])], [Chunk([7], 0, [3]), Chunk([9], 0, [4])])
    for invariant, chunks, expected in ((False, one, True), (False, two, False), (True, one, False)):
        runner = make_runner(directories(name), batch_invariant=invariant, dtype="bfloat16")
        given.clear()
        runner.run(make_batch(chunks))
        assert bool(given) == expected and all(isinstance(weight, torch.nn.Parameter) for weight in given)
        if expected:
            head = runner._model.embedding if runner._model.head is None else runner._model.head
            assert given[-1] is head.weight and len(given) >= 2 * runner.config.layers + 1


def test_attention_gets_the_longest_context_of_the_step(directories: Callable[[str], Path]):
    """Not of the longest sequence that is possible, for which it would launch kernels many times."""
    runner = make_runner(directories("deepseek-v3-tiny"))
    with patch.object(device_reference, "attend", wraps=device_reference.attend) as attend:
        runner.run(make_batch([Chunk(PROMPTS[2][:20], 0, [3, 4]), Chunk([7], 5, [6])]))
        runner.run(make_batch([Chunk(PROMPTS[2][20:], 20, [3, 4, 5]), Chunk([7], 6, [6])]))
        runner.run(make_batch([Chunk([7], 7, [6])]))
    assert [call.args[2].context for call in attend.call_args_list[:: runner.config.layers]] == [20, 37, 8]


def test_padding_does_not_touch_blocks_of_sequences(directories: Callable[[str], Path]):
    runner = make_runner(directories("llama-tiny"))
    runner.run(make_batch([Chunk(PROMPTS[2], 0, [3, 4, 5])]))
    keys = runner._cache[0][0][: SIZES.blocks * 16].clone()
    runner.run(make_batch([Chunk([1], 0, [number]) for number in (10, 11, 12)]))
    changed = (runner._cache[0][0][: SIZES.blocks * 16] != keys).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert changed == [160, 176, 192]


def test_graphs_are_captured_for_padded_sizes_and_replayed(
    directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    """With substitutes for CUDA graphs: a replay repeats the captured computation, for the same sizes."""
    replays, captured, compute = list[int](), list[StepSizes](), DeviceRunner.compute

    class Graph:
        def pool(self) -> None: ...

        def replay(self) -> None:
            found = next(found for each, found in runner._graphs.values() if each is self)
            replays.append(self.sizes.tokens)
            found.copy_(compute(runner, self.sizes))

    @contextmanager
    def capture(graph: Graph, pool: None) -> Iterator[None]:
        yield
        graph.sizes = captured[-1]

    def record(runner: DeviceRunner, sizes: StepSizes, x_TH: torch.Tensor | None = None) -> torch.Tensor:
        captured.append(sizes)
        return compute(runner, sizes, x_TH)

    monkeypatch.setattr(DeviceRunner, "compute", record)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    sampled, summarize = list[int](), device_reference.summarize_logits
    monkeypatch.setattr(
        device_reference,
        "summarize_logits",
        lambda logits, draws: sampled.append(len(logits)) or summarize(logits, draws),
    )
    runner = make_runner(directories("llama-tiny"), graphs=True)
    assert sorted(runner._graphs) == [1, 2, 4, 8]
    assert sampled == [1]  # its kernels are compiled, too
    caches = [each for pair in runner._cache for each in pair]
    assert not any(each[: SIZES.blocks * 16].any() for each in caches)  # capturing touches the padding's block alone
    assert answer(runner, 64) == answer(make_runner(directories("llama-tiny")), 64)
    assert set(replays) == {1, 2, 4}
    assert {(graph.sizes.context, graph.sizes.decoding) for graph, _ in runner._graphs.values()} == {(64, True)}


def answer_on_rank(directory: str, layout: str) -> tuple[list[list[int]], dict[str, int], int]:
    """Answers, bytes by kind and stage of one of several ranks."""
    mesh = Mesh.create(Layout.parse(layout))
    weights = RankWeights(Path(directory), mesh)
    runner = DeviceRunner(weights, mesh, SIZES, device_reference, graphs=False)
    runner._warm_up()  # the warm-up steps, which also on a GPU capture nothing here
    scheduler = build_scheduler(runner.config, ServingSizes(11, 6, 64, blocks=48), groups=mesh.pp.size)
    engine = Engine(runner, scheduler) if mesh.pp.size == 1 else PipelineEngine(runner, scheduler, mesh)
    found = run_prompts(engine), runner.memory(), mesh.pp.rank
    mesh.close()
    return found


LAYOUTS = [
    *(("tp2:nosp", name) for name in ("mistral-tiny", "gpt2-tiny", "qwen3-moe-tiny", "qwen2-moe-tiny", "olmo2-tiny")),
    *(("pp2", name) for name in ("llama-tiny", "gpt2-tiny", "mixtral-tiny")),
    *((layout, name) for layout in ("tp2:nosp", "pp2") for name in ("deepseek-v3-tiny", "llama4-tiny")),
    *(("tp2:nosp ep2", name) for name in ("qwen2-moe-tiny", "llama4-tiny", "gpt-oss-tiny")),
]


@pytest.mark.parametrize(("layout", "name"), covering(LAYOUTS, lambda layout, name: list_layout_features(name, layout)))
def test_two_ranks_answer_like_one(layout: str, name: str, two: LocalRanks, directories: Callable[..., Path]):
    changes = {"experts": 4} if "ep" in layout else {}
    directory = directories(name, **changes)
    expected = answer(make_runner(directory), 11)
    stages = serving_ledger(small_config(name, **changes), Layout.parse(layout), SIZES, "cuda").stages
    for answers, memory, stage in two.run(answer_on_rank, str(directory), layout):
        assert answers == expected
        check_memory(memory, stages[stage])
    assert len({token for each in expected for token in each}) > 3


def score_in_bfloat16(directory: str, layout: str) -> dict[str, np.ndarray]:
    """Logits of a prompt on one rank in bfloat16, by the runner of a GPU and by that of a CPU."""
    mesh = Mesh.single() if layout == "dp1" else Mesh.create(Layout.parse(layout))
    sizes = replace(SIZES, dtype="bfloat16")
    device = DeviceRunner(RankWeights(Path(directory), mesh), mesh, sizes, device_reference, graphs=False)
    runners = {"gpu": device, "cpu": build_runner(RankPlan(directory, layout, sizes), mesh)}
    tables = len(block_tables(device.config, 1).windows)
    batch, found = make_batch([Chunk(PROMPTS[2], 0, [3, 4, 5])], tables=tables), dict[str, np.ndarray]()
    for kind, runner in runners.items():
        rows = runner.run(batch)
        found[kind] = rows.copy() if isinstance(rows, np.ndarray) else np.stack([row.on_host() for row in rows])
    mesh.close()
    return found


@pytest.mark.parametrize(
    ("layout", "name"), [("dp1", "llama4-tiny"), ("tp2:nosp", "olmo2-tiny"), ("tp2:nosp", "olmo3-tiny")]
)
def test_norms_of_queries_and_keys_in_bfloat16_are_as_exact_as_the_models(
    layout: str, name: str, two: LocalRanks, directories: Callable[..., Path]
):
    """Norms before scaled rotations (YaRN), and over the heads of all ranks. The median over tokens, as a router may
    choose another expert."""
    directory = directories(name)
    if layout == "dp1":
        ranks = [score_in_bfloat16(str(directory), layout)]
    else:
        ranks = two.run(score_in_bfloat16, str(directory), layout)
    model, _ = load_huggingface(directory, torch.bfloat16)
    tokens_BS = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        own = model.output_logits(model.hidden(tokens_BS))[0].double()
        model.double()  # the same, rounded weights
        exact = model.output_logits(model.hidden(tokens_BS))[0]
    error = lambda logits_RV: float(((logits_RV - exact).norm(dim=1) / exact.norm(dim=1)).median())  # noqa: E731
    assert 1e-4 < error(own) < 0.05
    errors = [error(torch.from_numpy(found).double()) for rank in ranks for found in rank.values()]
    assert len(errors) == 2 * len(ranks) and max(errors) < 1.5 * error(own)


def check_memory(memory: dict[str, int], rank: RankLedger) -> None:
    assert memory["kv"] == SIZES.blocks * rank.kv_block
    assert (memory["weights"], memory["workspace"]) == (rank.weights, rank.workspace)


@pytest.mark.parametrize("name", covering(FAMILIES, list_features))
def test_predicted_memory_matches_allocation(name: str, directories: Callable[[str], Path]):
    memory, config = make_runner(directories(name)).memory(), small_config(name)
    check_memory(memory, serving_ledger(config, Layout(), SIZES, "cuda").stages[0])
    deep = 3 if len({config.layer_window(layer) for layer in range(3)}) == 1 else 1  # layers of a block
    cached = config.latent.cached_dim if config.latent else 2 * config.kv_heads * config.head_dim
    assert memory["kv"] == 48 * 16 * deep * cached * 4
    many = len(block_tables(config, 1).windows)
    numbers, tables = (6 + many) * 64, 8 * many * 4
    assert memory["pinned"] == 2 * (4 * (numbers + tables) + 8 * 3 * 64)  # for two steps in turn


def test_unsupported_configurations_on_gpu_are_refused(
    directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    mesh, directory = Mesh.single(device="cuda"), directories("llama-tiny")
    with pytest.raises(UserError, match="dtype float64: on a GPU serving takes float32, bfloat16, float16"):
        build_runner(RankPlan(str(directory), "dp1", replace(SIZES, dtype="float64")), mesh)
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("triton_attention", "triton_kernels", "device_operations"):
        monkeypatch.delitem(sys.modules, f"meshwright.kernels.{name}", raising=False)
        monkeypatch.delattr(kernels, name, raising=False)
    with pytest.raises(UserError, match="serving on a GPU needs triton: run pip install triton"):
        build_runner(RankPlan(str(directory), "dp1", SIZES), mesh)


@pytest.mark.parametrize(
    ("name", "batch_invariant"),
    covering(
        product(SHAPES, (False, True)),
        lambda name, invariant: {*list_features(name), (invariant, bool(preset(name).experts))},
    ),
)
def test_step_on_cuda_tensors_has_no_host_synchronisation(name: str, batch_invariant: bool):
    """A tensor without memory has no values: reading one raises an error. Experts are whole or on two ranks."""
    config, device = small_config(name, **({"experts": 4} if preset(name).experts else {})), torch.device("cuda", 0)
    with FakeTensorMode(allow_non_fake_inputs=True), _Indexing():
        runner = DeviceRunner(
            _NoTensors(config, expert_ranks=2 if config.experts and batch_invariant else 0), Mesh.single(device=device),
            replace(SIZES, dtype="bfloat16"), device_reference, batch_invariant=batch_invariant, graphs=False,
        )  # fmt: skip
        for sizes in (StepSizes(4, 4, 4, 64, decoding=True), StepSizes(20, 7, 3, 37)):
            logits = runner.compute(sizes)
            assert (logits.shape, logits.dtype, logits.device) == ((sizes.rows, 257), torch.float32, device)
        assert all(each.device == device and each.dtype == torch.bfloat16 for each in runner._model.parameters())
        assert all(each.device == device for each in runner._cache)


class _Peak(TorchDispatchMode):
    """Bytes of live tensors that operators have created: now, and the peak. Views of `older` tensors do not count."""

    def __init__(self, older: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = {each.untyped_storage()._cdata for each in older}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return found

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


class _Launches:
    """The operations of `device_operations`, reduced to the allocation of their results."""

    VERSION = "nothing"
    add_norm = staticmethod(lambda x, delta, weight, epsilon: torch.empty_like(x))
    rotate_and_store = rotate_and_store_latent = multiply_heads = staticmethod(lambda *arguments: None)
    swiglu = staticmethod(lambda up: up.new_empty(len(up), up.shape[1] // 2))
    grouped_product = staticmethod(lambda x, weight, ends: x.new_empty(len(x), weight.shape[1]))

    @staticmethod
    def attend(qkv, cache, tiles, scores, scratch, arrivals):
        kv_heads, size = cache[0].shape[1:]
        if scores.key_only:
            return qkv.new_empty(len(qkv), qkv.shape[1] // size * (size - scores.key_only))
        return qkv.new_empty(len(qkv), qkv.shape[1] - 2 * kv_heads * size)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "qwen2-moe-tiny", "deepseek-v3-tiny", "llama4-tiny"])
def test_tensors_of_a_step_fit_predicted_slack(name: str):
    config = small_config(name, hidden=256, vocabulary=997) if name == "llama-tiny" else small_config(name)
    device, budget = torch.device("cuda", 0), 512
    sizes = ServingSizes(budget, 6, 64, "bfloat16", blocks=48)
    with FakeTensorMode(allow_non_fake_inputs=True), _Indexing():
        runner = DeviceRunner(_NoTensors(config), Mesh.single(device=device), sizes, _Launches(), graphs=False)
        older = *runner._model.parameters(), *runner._cache, runner._numbers, runner._tables
        with torch.inference_mode(), _Peak(older) as peak:
            runner.compute(StepSizes(budget, budget // 16, 256, 64))
    (rank,) = serving_ledger(config, Layout(), ServingSizes(budget, 6, 64, "bfloat16"), "cuda").stages
    partial_sums = 4 * SPLIT_COLUMNS * budget  # of batch-invariant products, which are not computed here
    predicted = rank.slack - CONTEXT_BYTES - partial_sums + rank.logits
    assert 0.5 * predicted <= peak.most <= predicted


class _NoTensors:
    """Weights of a rank without tensors, perhaps of the last of the ranks of ep."""

    def __init__(self, config: ModelConfig, expert_ranks: int = 0) -> None:
        self.config, self.stage, self.first_expert = config, whole_model(config), 0
        self.dispatcher = None
        if expert_ranks:
            self.first_expert = config.experts - config.experts // expert_ranks
            self.dispatcher = SimpleNamespace(expert_ranks=expert_ranks, width_ranks=1, width_rank=0)

    def build_model(self, axes: AxisOperations, device: torch.device, dtype: torch.dtype) -> Transformer:
        axes = replace(axes, dispatcher=self.dispatcher)
        model = Transformer(self.config, axes=axes, device=device, dtype=dtype, stages=[self.stage])
        return model.requires_grad_(False).eval()


class _Indexing(TorchFunctionMode):
    """Indexes tensors by operators alone: torch's own way asks for the device, which a CPU build does not have."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function is torch.Tensor.__getitem__:
            return _index(*arguments)[0]
        if function is torch.Tensor.__setitem__:
            base, index, value = arguments
            view, chosen = _index(base, index, read=False)
            return (
                torch.ops.aten.copy_(view, value) if chosen is None else torch.ops.aten.index_put_(view, chosen, value)
            )
        return function(*arguments, **(options or {}))


def _index(base, index, read=True):
    """The view that numbers, slices and None make, and the tensors that index it, which are applied to `read`."""
    dim, chosen = 0, []
    indices = index if isinstance(index, tuple) else (index,)
    for place, each in enumerate(indices):
        if each is None:
            base = base.unsqueeze(dim)
        elif isinstance(each, int):
            base, dim = torch.ops.aten.select(base, dim, each), dim - 1
        elif each is Ellipsis:
            dim = base.dim() - 1 - sum(later is not None for later in indices[place + 1 :])
        elif isinstance(each, slice):
            base = torch.ops.aten.slice(base, dim, each.start, each.stop)
        else:
            chosen += [None] * (dim - len(chosen)) + [each]
        dim += 1
    if not chosen:
        return base, None
    return (torch.ops.aten.index(base, chosen) if read else base), chosen
