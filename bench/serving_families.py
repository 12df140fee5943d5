"""The CPU kernels on families with latent attention, attention sinks, or experts with biases: the serving engine with
its compiled kernels, the same engine in plain torch, and `transformers` generate, in one process, in turns.

    python bench/serving_families.py [--rounds 4] [--threads 1] [--dtypes bfloat16 float32] [--families gpt-oss ...]

Models are random, scaled down from DeepSeek-V3, gpt-oss and Llama 4: 1,024 wide, 8 layers, 16 heads, 16 or 32 experts.
Per contender and round: seconds to the first token of a prompt of 64 tokens, then tokens per second of 8 decode steps
of that sequence. transformers generates greedily from its cache; decode is its time for 9 tokens without its time for
one. Reported are medians and minima of each, and the paired ratios of each round. Before timing, five greedy tokens of
the kernels are compared with those of transformers; the result says whether they are equal. Writes
bench/results/serving_families.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from common import paired_ratio, write_result
from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.comm.mesh import Mesh
from meshwright.kernels.choice import PLAIN_TORCH
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving.engine import Engine, build_runner, build_scheduler
from meshwright.serving.offline import run_requests
from meshwright.serving.rank_starter import RankPlan
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling
from meshwright.spec.config import ModelConfig
from meshwright.spec.latent_attention import LatentAttention
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from serving_models import random_prompts

PROMPT, DECODED = 64, 8
COMMON = {"vocabulary": 32_000, "hidden": 1024, "layers": 8, "heads": 16, "max_positions": 512}
COMMON |= {"bos_token": None, "eos_token": None, "tied": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": (
        "deepseek-v3-tiny",
        {"kv_heads": 16, "head_dim": 96, "latent": LatentAttention(256, 32, 64, 384), "intermediate": 2816}
        | {"experts": 32, "experts_per_token": 4, "expert_intermediate": 256, "shared_intermediate": 256}
        | {"expert_groups": 4, "groups_per_token": 2},
    ),
    "gpt-oss": (
        "gpt-oss-tiny",
        {"kv_heads": 4, "head_dim": 64, "intermediate": 512, "expert_intermediate": 512, "sliding_window": 128}
        | {"experts": 16, "experts_per_token": 4, "windowed_layers": (True, False) * 4},
    ),
    "llama4": (
        "llama4-tiny",
        {"kv_heads": 4, "head_dim": 64, "intermediate": 2816, "sliding_window": 128, "experts": 16}
        | {"expert_intermediate": 512, "shared_intermediate": 512, "dense_layers": (0, 2, 4, 6)}
        | {"windowed_layers": (True, True, True, False) * 2, "unrotated_layers": (3, 7)},
    ),
}
Generate = Callable[[list[int], int], tuple[float, float, list[int]]]
"""Generates tokens greedily: (prompt, count of tokens) -> (seconds to the first, seconds of the others, tokens)."""


def make_model(name: str, directory: Path) -> ModelConfig:
    """Write a random model of `FAMILIES` to a directory."""
    base, sizes = FAMILIES[name]
    config = dataclasses.replace(preset(base), **COMMON, **sizes)
    model = Transformer(config)
    initialise(model, parameter_table(config), seed=0)
    save_huggingface(model, directory)
    return config


def make_engine_contender(directory: Path, dtype: str, threads: int, instruction_set: str | None) -> Generate:
    """Return the generator of the serving engine. instruction_set: `PLAIN_TORCH`: without kernels; None: with them."""
    sizes = ServingSizes(512, 8, 512, dtype, threads, blocks=64, scored_rows=0)
    plan = RankPlan(str(directory), "dp1", sizes, instruction_set=instruction_set)
    runner = build_runner(plan, Mesh.single(device="cpu"))
    assert runner.version.startswith("torch") == (instruction_set == PLAIN_TORCH)

    def generate(prompt: list[int], count: int) -> tuple[float, float, list[int]]:
        engine = Engine(runner, build_scheduler(runner.config, sizes))
        request = Request("0", tuple(prompt), Sampling(max_tokens=count))
        begun, times, tokens = time.perf_counter(), list[float](), list[int]()
        for output in run_requests(engine, [request]):
            times.append(time.perf_counter())
            tokens += [result.token for result in output.results]
        return times[0] - begun, times[-1] - times[0], tokens

    return generate


def make_transformers_contender(directory: Path, dtype: str) -> Generate:
    """Return the generator of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def run(prompt: list[int], count: int) -> tuple[float, list[int]]:
        begun = time.perf_counter()
        found = model.generate(torch.tensor([prompt]), max_new_tokens=count, **options)
        return time.perf_counter() - begun, found[0, len(prompt) :].tolist()

    def generate(prompt: list[int], count: int) -> tuple[float, float, list[int]]:
        first, _ = run(prompt, 1)
        whole, tokens = run(prompt, count)
        return first, max(whole - first, 1e-9), tokens

    return generate


def race(name: str, directory: Path, dtype: str, rounds: int, threads: int) -> dict[str, Any]:
    """Return the figures of one family, whose model is in a directory, in one dtype."""
    contenders = {
        "kernels": make_engine_contender(directory, dtype, threads, None),
        "plain torch": make_engine_contender(directory, dtype, threads, PLAIN_TORCH),
        "transformers": make_transformers_contender(directory, dtype),
    }
    found = {each: generate(random_prompts(1, PROMPT)[0], 5)[2] for each, generate in contenders.items()}  # warm-up
    seconds: dict[str, dict[str, list[float]]] = {each: {"first": [], "decode": []} for each in contenders}
    for turn in range(rounds):
        prompt = random_prompts(1, PROMPT, seed=1 + turn)[0]
        for each in (*contenders,) if turn % 2 else (*reversed(contenders),):
            first, rest, _ = contenders[each](prompt, 1 + DECODED)
            seconds[each]["first"].append(first)
            seconds[each]["decode"].append(rest)
            print(f"  {name} {dtype} round {turn}, {each}: {first:.3f} s, {DECODED / rest:.1f} tokens/s", flush=True)
    ours = seconds["kernels"]
    return {
        "tokens_of_transformers": found["kernels"] == found["transformers"],
        "contenders": {
            each: {
                "first_token_seconds": round(statistics.median(times["first"]), 4),
                "first_token_seconds_least": round(min(times["first"]), 4),
                "decode_tokens_per_second": round(DECODED / statistics.median(times["decode"]), 2),
                "decode_tokens_per_second_most": round(DECODED / min(times["decode"]), 2),
                **(
                    {}
                    if each == "kernels"
                    else {f"{part}_ratio": paired_ratio(ours[part], times[part]) for part in times}
                ),
            }
            for each, times in seconds.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    results: dict[str, Any] = {}
    for name in arguments.families:
        with tempfile.TemporaryDirectory() as place:
            config = make_model(name, Path(place))
            parameters = parameter_table(config).numel
            for dtype in arguments.dtypes:
                found = race(name, Path(place), dtype, arguments.rounds, arguments.threads)
                results[f"{name} {dtype}"] = {"parameters": parameters, **found}
                gc.collect()
    write_result("serving_families", {"threads": arguments.threads, "rounds": arguments.rounds, "models": results})


if __name__ == "__main__":
    main()
