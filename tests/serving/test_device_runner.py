"""The runner of a GPU: its steps on a CPU with the reference operations, and on CUDA tensors without memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from meshwright import kernels, serving
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.serving.device_runner import DeviceRunner
from meshwright.serving.engine import Engine, build_scheduler
from meshwright.serving.offline import run_requests
from meshwright.serving.request import Request
from meshwright.serving.runner import build_runner
from meshwright.serving.sampling import Sampling
from meshwright.serving.step_limits import StepLimits
from meshwright.serving.weights import RankWeights
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import whole_model
from tests.serving import device_reference
from tests.serving.pool_checks import check_scheduler
from tests.serving.small_models import FAMILIES, small_config, write_model
from tests.serving.step_batches import Chunk, make_batch

LIMITS = StepLimits(blocks=48, token_budget=64, max_sequences=6, max_length=64, logit_rows=64)
PROMPTS = [[7, 9, 250, 3], [100], np.random.default_rng(0).integers(0, 256, 37).tolist(), [5, 6]]
SHAPES = ("llama-tiny", "mistral-tiny", "gpt2-tiny", "qwen3-moe-tiny")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of each family's model."""
    place, made = tmp_path_factory.mktemp("models"), dict[str, Path]()

    def find(name: str) -> Path:
        if name not in made:
            made[name] = write_model(place / name, small_config(name))
        return made[name]

    return find


def make_runner(directory: Path, batch_invariant: bool = False, graphs: bool = False) -> DeviceRunner:
    mesh = Mesh.single()
    weights = RankWeights(directory, mesh)
    return DeviceRunner(
        weights, mesh, torch.float32, LIMITS, device_reference, batch_invariant=batch_invariant, graphs=graphs
    )  # fmt: skip


def answer(runner, budget: int) -> list[list[int]]:
    """Greedy tokens of all prompts at once; 3 of the 4 decode together for a while, padded to 4."""
    limits = StepLimits(48, budget, 6, 64)
    engine = Engine(runner, build_scheduler(runner.config, limits))
    requests = [Request(str(n), tuple(each), Sampling(max_tokens=9 - 2 * n)) for n, each in enumerate(PROMPTS)]
    answers: list[list[int]] = [[] for _ in requests]
    for output in run_requests(engine, requests):
        answers[int(output.request_id)] += [result.token for result in output.results]
    check_scheduler(engine.scheduler)
    return answers


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_the_cpu_runner(name: str, directories: Callable[[str], Path]):
    expected = answer(build_runner(directories(name), Mesh.single(), "float32", LIMITS), 64)
    runner = make_runner(directories(name), batch_invariant=name == "llama-tiny")
    assert answer(runner, 64) == answer(runner, 11) == expected
    assert len({token for each in expected for token in each}) > 3


def test_padding_leaves_the_blocks_of_sequences_alone(directories: Callable[[str], Path]):
    runner = make_runner(directories("llama-tiny"))
    runner.run(make_batch([Chunk(PROMPTS[2], 0, [3, 4, 5])]))
    keys = runner._cache[0][0][: LIMITS.blocks * 16].clone()
    runner.run(make_batch([Chunk([1], 0, [number]) for number in (10, 11, 12)]))
    changed = (runner._cache[0][0][: LIMITS.blocks * 16] != keys).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert changed == [160, 176, 192]


def test_graphs_are_captured_for_padded_sizes_and_replayed(
    directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    """With stand-ins for CUDA's: a replay computes what was captured into the same tensor."""
    replays = list[int]()

    class Graph:
        def pool(self) -> None: ...

        def replay(self) -> None:
            size, found = next((size, found) for size, (each, found) in runner._graphs.items() if each is self)
            replays.append(size)
            found.copy_(runner.compute((size, size, size), True))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    runner = make_runner(directories("llama-tiny"), graphs=True)
    assert sorted(runner._graphs) == [1, 2, 4, 8]
    caches = [each for pair in runner._cache for each in pair]
    assert not any(each[: LIMITS.blocks * 16].any() for each in caches)  # capturing touches the padding's block alone
    assert answer(runner, 64) == answer(make_runner(directories("llama-tiny")), 64)
    assert set(replays) == {1, 2, 4}


def test_memory_is_what_is_allocated(directories: Callable[[str], Path]):
    runner, config = make_runner(directories("llama-tiny")), small_config("llama-tiny")
    memory = runner.memory()
    assert memory["kv"] == 49 * 16 * 3 * 2 * config.kv_heads * config.head_dim * 4
    assert memory["logits"] == 64 * 257 * 4
    assert memory["weights"] == sum(each.nbytes for each in runner._model.parameters())


def test_what_a_gpu_cannot_serve_is_refused(directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    mesh, directory = Mesh.single(device="cuda"), directories("llama-tiny")
    with pytest.raises(UserError, match="dtype float64: on a GPU serving takes float32, bfloat16, float16"):
        build_runner(directory, mesh, "float64", LIMITS)
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("kernels.triton_kernels", "serving.device_operations"):
        monkeypatch.delitem(sys.modules, f"meshwright.{name}", raising=False)
    monkeypatch.delattr(serving, "device_operations", raising=False)
    monkeypatch.delattr(kernels, "triton_kernels", raising=False)
    with pytest.raises(UserError, match="serving on a GPU needs triton: run pip install triton"):
        build_runner(directory, mesh, "float32", LIMITS)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_step_runs_on_cuda_tensors_without_a_host_synchronisation(name: str, batch_invariant: bool):
    """A tensor without memory has no values: what asks for one raises."""
    config, device = small_config(name), torch.device("cuda", 0)
    with FakeTensorMode(allow_non_fake_inputs=True), _Indexing():
        runner = DeviceRunner(
            _NoTensors(config), Mesh.single(device=device), torch.bfloat16, LIMITS, device_reference,
            batch_invariant=batch_invariant, graphs=False,
        )  # fmt: skip
        for counts, decoding in (((4, 4, 4), True), ((20, 7, 3), False)):
            logits = runner.compute(counts, decoding)
            assert (logits.shape, logits.dtype, logits.device) == ((counts[2], 257), torch.float32, device)
        assert all(each.device == device and each.dtype == torch.bfloat16 for each in runner._model.parameters())
        assert all(each.device == device for pair in runner._cache for each in pair)


class _NoTensors:
    """The weights of a rank, without any tensor to read."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.stage = config, whole_model(config)

    def __iter__(self) -> Iterator[str]:
        return iter(())


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
    for each in index if isinstance(index, tuple) else (index,):
        if each is None:
            base = base.unsqueeze(dim)
        elif isinstance(each, int):
            base, dim = torch.ops.aten.select(base, dim, each), dim - 1
        elif each is Ellipsis:
            dim = base.dim() - 1  # here only None follows
        elif isinstance(each, slice):
            base = torch.ops.aten.slice(base, dim, each.start, each.stop)
        else:
            chosen += [None] * (dim - len(chosen)) + [each]
        dim += 1
    if not chosen:
        return base, None
    return (torch.ops.aten.index(base, chosen) if read else base), chosen
