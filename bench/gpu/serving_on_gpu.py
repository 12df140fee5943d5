"""Serving on one GPU, checked and measured in one run of under ten minutes.

    python bench/gpu/serving_on_gpu.py [--small]

Measured first, on random weights in bf16 of the shapes of Llama 3.2 1B and 3.1 8B, DeepSeek-V2-Lite (latent attention)
and 8 layers of Llama 4 Scout (attention in chunks): memory against the ledger of `serve`; tokens per second and time to
first token at 1, 8 and 32 requests, greedy and drawn; share of the measured read bandwidth that decoding at batch 1
reaches (goal: 80%); what `batch_invariant` costs. Then checked: logits in float32 and bfloat16 against the training
model in float64 on the CPU, for each kind of model; for Llama, latent attention and Llama 4, steps captured in CUDA
graphs against eager ones, and with `batch_invariant` the bits of answers alone, among others, in chunks, and after a
prefix hit.
`--small` shrinks the measured model, so that the script itself can be tried without a GPU, in Triton's interpreter
(TRITON_INTERPRET=1). Writes `bench/results/gpu_serving.json`; exit code 1 when a check does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import operator
import statistics
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from cases import Cases, free_memory

from meshwright.comm.mesh import Mesh
from meshwright.kernels import device_operations
from meshwright.layout import Layout
from meshwright.model.transformer import Transformer
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.planner.serving.runners import CONTEXT_BYTES, serving_ledger
from meshwright.serving.device_runner import DeviceRunner
from meshwright.serving.engine import Engine, build_scheduler
from meshwright.serving.offline import run_requests
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling
from meshwright.serving.weights import RankWeights
from meshwright.spec.config import ModelConfig
from meshwright.spec.presets import preset
from meshwright.spec.stages import whole_model

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
FAMILIES = ("llama-tiny", "mistral-tiny", "qwen2-tiny", "qwen3-tiny", "gpt2-tiny", "mixtral-tiny", "qwen2-moe-tiny",
            "qwen3-moe-tiny", "dots1-tiny", "deepseek-v2-tiny", "gpt-oss-tiny", "olmo3-tiny", "deepseek-v3-tiny",
            "granite-tiny", "gemma2-tiny", "gemma3-tiny", "llama4-tiny")  # fmt: skip
ERRORS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest errors of a logit, of the largest logit."""
REQUESTS = (1, 8, 32)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "": {},
    ", log-probabilities of 1": {"logprobs": 1},
    ", temperature 1": {"temperature": 1.0},
    ", temperature 0.8, top-k 50": {"temperature": 0.8, "top_k": 50},
}
TOKENS = 128
"""Tokens of each prompt, and tokens of each answer."""


class RandomWeights(RankWeights):
    """Random weights of a whole model, a function of seed and name, in place of a checkpoint's (`RankWeights`)."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.stage = config, whole_model(config)
        self._shapes = {name: each.shape for name, each in Transformer(config, device="meta").named_parameters()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter on the device; norms are near 1."""
        shape = self._shapes[name]
        generator = torch.Generator(DEVICE).manual_seed(zlib.crc32(name.encode()))
        value = torch.randn(shape, generator=generator, device=DEVICE) * (0.06 if len(shape) > 1 else 0.1)
        return (value + ("norm" in name and name.endswith("weight"))).to(dtype)


def build(
    config: ModelConfig, dtype: torch.dtype, sizes: ServingSizes, invariant: bool = False, graphs: bool = CUDA
) -> DeviceRunner:
    """A runner of random weights."""
    sizes = dataclasses.replace(sizes, dtype=str(dtype).removeprefix("torch."))
    weights, mesh = RandomWeights(config), Mesh.single(device=DEVICE)
    return DeviceRunner(weights, mesh, sizes, device_operations, batch_invariant=invariant, graphs=graphs)


def draw_prompts(config: ModelConfig, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of random tokens, each a function of its length and place."""
    return [
        np.random.default_rng((place, length)).integers(0, config.vocabulary, length).tolist()
        for place, length in enumerate(lengths)
    ]


def answer(
    runner: DeviceRunner,
    sizes: ServingSizes,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling | None = None,
) -> dict[str, Any]:
    """Answers to all prompts at once, by default greedy with log-probabilities; times of first tokens and of
    everything."""
    engine = Engine(runner, build_scheduler(runner.config, sizes))
    sampling = sampling or Sampling(max_tokens=count, logprobs=1)
    requests = [Request(str(number), tuple(prompt), sampling) for number, prompt in enumerate(prompts)]
    results: list[list[Any]] = [[] for _ in requests]
    first, cached, begun = dict[int, float](), 0, time.perf_counter()
    for output in run_requests(engine, requests):
        number = int(output.request_id)
        if output.results:
            first.setdefault(number, time.perf_counter() - begun)
        results[number] += [(each.token, each.logprob, each.top) for each in output.results]
        cached += output.cached_tokens
    return {"results": results, "first": list(first.values()), "seconds": time.perf_counter() - begun,
            "cached": cached, "engine": engine}  # fmt: skip


def logit_error(name: str, dtype: torch.dtype, invariant: bool) -> float:
    """Largest error of the log-probabilities of a prompt's tokens, read in two chunks, and of its greedy answer's,
    against float64 on the CPU with the same rounded weights, over the largest log-probability. Of a mixture of experts
    in half precision the error that 95% of the tokens keep: rounding changes the expert of a token whose scores are
    nearly equal."""
    config = dataclasses.replace(preset(name), layers=3, vocabulary=257, max_positions=384)
    if config.sliding_window is not None:
        config = dataclasses.replace(config, sliding_window=40)
    chunk = 200 if CUDA else 48
    sizes = ServingSizes(chunk, 4, 384, blocks=64, scored_rows=chunk)
    weights, model = RandomWeights(config), Transformer(config, dtype=torch.float64)
    (prompt,) = draw_prompts(config, [300 if CUDA else 60])
    runner = build(config, dtype, sizes, invariant, graphs=False)
    engine = Engine(runner, build_scheduler(config, sizes))
    sampling = Sampling(max_tokens=6, logprobs=0, prompt_logprobs=0)
    scored, answered = list[Any](), list[Any]()
    for output in run_requests(engine, [Request("0", tuple(prompt), sampling)]):
        scored = output.prompt_results or scored
        answered += output.results
    found = scored[-len(prompt) + 1 :] + answered
    tokens = torch.tensor([prompt[0]] + [each.token for each in found])
    with torch.no_grad():
        for parameter in weights:
            model.get_parameter(parameter).copy_(weights.read(parameter, dtype).cpu())
        want = model.logits(tokens[None, :-1])[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    assert tokens[1 : len(prompt)].tolist() == prompt[1:] and len(answered) == 6
    got = torch.tensor([each.logprob for each in found], dtype=torch.float64)
    errors = (got - want).abs() / want.abs().max()
    return float(errors.quantile(0.95) if config.experts and dtype != torch.float32 else errors.max())


def scout(layers: int, **changes: Any) -> ModelConfig:
    """Llama 4 Scout with fewer layers, the last of each four without rotary positions and chunks."""
    kinds = tuple(layer % 4 != 3 for layer in range(layers))
    plain = tuple(layer for layer in range(layers) if not kinds[layer])
    changes = {"windowed_layers": kinds, "unrotated_layers": plain, **changes}
    return dataclasses.replace(preset("llama-4-scout"), layers=layers, **changes)


def medium(small: bool, kind: str = "llama") -> tuple[ModelConfig, ServingSizes]:
    """A model whose prompts span several sections of attention and whose products have splits. kind: "llama", "latent"
    (attention) or "chunks" (of attention)."""
    changes: dict[str, Any] = {"vocabulary": 300 if small else 32000, "max_positions": 384 if small else 2048}
    budget, sequences, length, blocks = (128, 4, 384, 80) if small else (512, 32, 2048, 1024)
    sizes = ServingSizes(budget, sequences, length, blocks=blocks, scored_rows=0)
    if kind == "latent":
        return dataclasses.replace(
            preset("deepseek-v3-tiny" if small else "deepseek-v2-lite"), layers=3, **changes
        ), sizes
    if kind == "chunks":
        changes["sliding_window"] = 100
        if small:
            return dataclasses.replace(preset("llama4-tiny"), **changes), sizes
        return scout(4, experts=4, **changes), sizes
    config = dataclasses.replace(preset("llama-3.2-1b"), layers=4, **changes)
    if small:
        config = dataclasses.replace(config, layers=1, hidden=64, heads=4, kv_heads=2, intermediate=96, head_dim=16)
    return config, sizes


def same_bits(small: bool, invariant: bool, kind: str) -> dict[str, int]:
    """Answers out of those to all prompts at once that differ, by what else is done."""
    config, sizes = medium(small, kind)
    runner = build(config, torch.bfloat16 if CUDA else torch.float32, sizes, invariant)
    count = 3 if small else 48
    prompts = draw_prompts(config, (290, 3, 40) if small else (700, 3, 900, 64, 257, 256, 1, 500, 33, 640, 120, 77))
    together = answer(runner, sizes, prompts, count)["results"]
    found = {"alone": [answer(runner, sizes, [each], count)["results"][0] for each in prompts]}
    chunked = dataclasses.replace(sizes, token_budget=sizes.token_budget // 4 + 3)
    found["in chunks"] = answer(runner, chunked, prompts, count)["results"]
    engine = answer(runner, sizes, prompts[:1], count)["engine"]  # now its prefix cache contains the first prompt
    again = list(run_requests(engine, [Request("0", tuple(prompts[0]), Sampling(max_tokens=count, logprobs=1))]))
    assert sum(output.cached_tokens for output in again) > 0, "no prefix hit"
    hit = [(each.token, each.logprob, each.top) for output in again for each in output.results]
    differing = {name: sum(a != b for a, b in zip(each, together, strict=True)) for name, each in found.items()}
    return {**differing, "prefix hit": int(hit != together[0]), "of": len(prompts)}


def graphs_equal_eager(small: bool, invariant: bool, kind: str) -> bool:
    """Answers by replayed graphs have the bits of eager ones."""
    config, sizes = medium(small, kind)
    prompts = draw_prompts(config, (5, 9) if small else (5, 300, 17, 60, 8))
    answers = []
    for graphs in (CUDA, False):
        runner = build(config, torch.bfloat16 if CUDA else torch.float32, sizes, invariant, graphs)
        answers.append(answer(runner, sizes, prompts, 3 if small else 24)["results"])
    return bool(answers[0] == answers[1])


@cache
def read_bandwidth() -> float:
    """Bytes per second of the better of a sum and a copy (read and written) over 4 GiB."""
    source = torch.ones((1 << 30) if CUDA else (1 << 22), dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    rates = []
    for work, factor in ((lambda: source.sum(), 1), (lambda: target.copy_(source), 2)):
        rates.append(factor * source.nbytes / seconds_of(work, 10))
    return max(rates)


def seconds_of(work: Any, times: int) -> float:
    """Median seconds of a call, the device's work included, after three calls."""
    seconds = []
    for turn in range(times + 3):
        begun = time.perf_counter()
        work()
        if CUDA:
            torch.cuda.synchronize()
        if turn >= 3:
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def measure(config: ModelConfig, invariant: bool, small: bool) -> dict[str, Any]:
    """Times and rates of one model."""
    tokens = 8 if small else TOKENS
    sizes = ServingSizes(512, REQUESTS[-1], 2 * tokens, blocks=REQUESTS[-1] * 2 * tokens // 16 + 64, scored_rows=0)
    begun = time.perf_counter()
    runner = build(config, torch.bfloat16 if CUDA else torch.float32, sizes, invariant)
    found: dict[str, Any] = {"seconds_to_build": round(time.perf_counter() - begun, 1)}
    chosen = config.experts_per_token / config.experts if config.experts else 1.0
    read = sum(
        int(each.nbytes * (chosen if ".experts." in name else 1))
        for name, each in runner._model.named_parameters()
        if config.tied or "embedding" not in name
    )
    found["bytes_of_a_token"] = read + runner.memory()["kv"] // (sizes.blocks + 1) * (3 * tokens // 2 // 16)
    for requests in REQUESTS[:1] if small else REQUESTS:
        prompts = draw_prompts(config, [tokens] * requests)
        for name, options in SAMPLINGS.items():
            sampling = Sampling(max_tokens=tokens, **options)
            answer(runner, sizes, prompts, 4, dataclasses.replace(sampling, max_tokens=4))
            rounds = [answer(runner, sizes, prompts, tokens, sampling) for _ in range(1 if small else 3)]
            seconds, first = (statistics.median(each) for each in (
                [each["seconds"] for each in rounds], [max(each["first"]) for each in rounds]))  # fmt: skip
            found[f"{requests} requests{name}"] = {
                "output_tokens_per_second": round(requests * tokens / seconds, 1),
                "decode_tokens_per_second": round(requests * (tokens - 1) / (seconds - first), 1),
                "last_first_token_seconds": round(first, 5),
            }
    decode = found["1 requests"]["decode_tokens_per_second"]
    found["share_of_bandwidth"] = round(decode * found["bytes_of_a_token"] / read_bandwidth(), 4)
    if CUDA:  # without scheduling and sampling
        graph, _ = runner._graphs[1]
        found["graph_seconds"] = seconds_of(graph.replay, 20)
        found["share_of_bandwidth_of_graph"] = round(read / found["graph_seconds"] / read_bandwidth(), 4)
    return found


def add_in_order(a: Any, b: Any, dtype: Any) -> Any:
    """Matrix product that adds in one order for all rows."""
    return np.add.reduce(a.astype(dtype)[:, :, None] * b.astype(dtype), axis=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", help="regular expression of the cases to run; the results of others stay")
    options = parser.parse_args()
    small = options.small
    torch.set_float32_matmul_precision("highest")
    if not CUDA:  # matrix products of the interpreter, in one order for all rows of a tile
        np.matmul = add_in_order  # type: ignore[assignment]
    header = {"device": torch.cuda.get_device_name() if CUDA else "cpu", "versions": device_operations.VERSION,
              "torch": torch.__version__, "prompt_and_answer_tokens": TOKENS}  # fmt: skip
    cases = Cases("gpu_serving" if CUDA and not small else None, header, only=options.only)
    if CUDA:
        for shape, name in (("1B", "llama-3.2-1b"), ("DeepSeek-V2-Lite", "deepseek-v2-lite")):
            measure_memory = partial(memory, preset(name))
            cases.run("memory", shape, measure_memory, lambda found: found["used"] <= found["predicted"])
    cases.run("bandwidth", "bytes per second", read_bandwidth)
    kinds = ("llama", "latent", "chunks")
    shapes = {f"small {kind}": medium(True, kind)[0] for kind in kinds}
    if not small:
        shapes = {
            "1B": preset("llama-3.2-1b"), "8B": preset("llama-3.1-8b"), "DeepSeek-V2-Lite": preset("deepseek-v2-lite"),
            "Llama 4 Scout, 8 of 48 layers": scout(8),
        }  # fmt: skip
    for shape, config in shapes.items():
        pair = []
        for invariant in (False, True):
            free_memory()
            title = f"{shape} {'batch-invariant' if invariant else 'plain'}"
            pair.append(cases.run("serving", title, partial(measure, config, invariant, small)))
        if all(pair):
            cases.run("cost of batch invariance", shape, partial(compare, *pair))
    for invariant in (False, True):
        name = "batch-invariant" if invariant else "plain"
        for family in FAMILIES[:: 4 if small or invariant else 1]:
            for dtype, limit in ERRORS.items() if CUDA else [(torch.float32, 1e-4)]:
                error = partial(logit_error, family, dtype, invariant)
                cases.run("errors", f"{family} {dtype} {name}", error, partial(operator.gt, limit))
        for kind in kinds if CUDA else ():  # else both runs are eager
            check = partial(graphs_equal_eager, small, invariant, kind)
            cases.run("checks", f"graphs equal eager, {kind}, {name}", check, bool)
    none = lambda found: not sum(count for what, count in found.items() if what != "of")  # noqa: E731
    for kind in kinds:
        cases.run("differing answers", f"{kind}, batch-invariant", partial(same_bits, small, True, kind), none)
        cases.run("differing answers", f"{kind}, plain", partial(same_bits, small, False, kind))
    return cases.end()


def memory(config: ModelConfig) -> dict[str, Any]:
    """Peak of the allocated bytes over steps of the token budget and of 32 sequences, plus what CUDA takes outside the
    allocator (context, kernels), against the ledger of `serve`; all without KV blocks. Runs first, so that only the
    kernels of this one model are loaded."""
    sizes = ServingSizes(512, REQUESTS[-1], 1024, "bfloat16", blocks=1024)
    (rank,) = serving_ledger(config, Layout(), sizes, "cuda").stages
    runner = build(config, torch.bfloat16, sizes)
    free_memory()  # of the random weights
    scored = Sampling(max_tokens=32, logprobs=1, prompt_logprobs=1, temperature=0.9, top_p=0.9)
    for sampling in (None, scored):
        answer(runner, sizes, draw_prompts(config, [400] * REQUESTS[-1]), 32, sampling)
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    peak = torch.cuda.max_memory_allocated() - sizes.blocks * rank.kv_block
    return {"predicted": rank.fixed, "used": peak + context, "allocated_peak": peak, "context": context,
            "assumed_context": CONTEXT_BYTES}  # fmt: skip


def compare(plain: dict[str, Any], invariant: dict[str, Any]) -> dict[str, float]:
    """Time with batch invariance over time without, by number of requests."""
    return {
        f"{requests} {what}": round(plain[requests][what] / invariant[requests][what], 3)
        for requests in (f"{number} requests" for number in REQUESTS)
        for what in ("output_tokens_per_second", "decode_tokens_per_second")
        if requests in plain
    }


if __name__ == "__main__":
    raise SystemExit(main())
