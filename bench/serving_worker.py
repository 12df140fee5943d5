"""A contender of bench/serving.py that generates in its own process, without HTTP, and runs in its own environment:
`python bench/serving_worker.py NAME --model DIRECTORY --dtype bf16 --threads 2`.

It prints one JSON line when it is ready, then answers each line `{"prompts": [[token IDs]], "tokens": n}` with the
seconds to the first token and to the end of each prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Tokens = list[list[int]]
Events = Iterator[tuple[int, list[int]]]
"""Index of a prompt and the next of its tokens, as they are generated."""


def openvino(options: argparse.Namespace) -> tuple[Callable[[Tokens, int], Events], dict[str, Any]]:
    """OpenVINO GenAI's continuous batching."""
    import numpy
    import openvino
    import openvino_genai

    settings = {"cache_size": 2, "max_num_seqs": 32, "enable_prefix_caching": False}  # cache: GB
    scheduler = openvino_genai.SchedulerConfig()
    for name, value in settings.items():
        setattr(scheduler, name, value)
    dtype = {"bf16": "bf16", "fp32": "f32"}[options.dtype]
    supported = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if dtype == "bf16" and "BF16" not in supported:
        dtype = "f32"  # no bf16 instructions on this CPU: 16-bit weights are expanded
    key_values = "f32" if options.dtype == "fp32" else "f16"
    properties = {
        "INFERENCE_PRECISION_HINT": dtype,
        "KV_CACHE_PRECISION": key_values,
        "INFERENCE_NUM_THREADS": options.threads,
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)
    numbers = iter(range(1 << 30))

    def generate(prompts: Tokens, tokens: int) -> Events:
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        handles = [
            pipeline.add_request(next(numbers), openvino.Tensor(numpy.array([prompt], numpy.int64)), config)
            for prompt in prompts
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        yield index, list(output.generated_ids)

    precision = f"products {dtype}, weights {'fp32' if options.dtype == 'fp32' else 'fp16'}, key-value {key_values}"
    return generate, {"precision": precision, "settings": {**settings, **properties}}


def transformers(options: argparse.Namespace) -> tuple[Callable[[Tokens, int], Events], dict[str, Any]]:
    """The continuous batching of transformers.

    On a CPU it has paged attention as `sdpa` or `paged|eager` alone, which is slower, and no CUDA graphs, asynchronous
    batches or fast decode path. Every query of a batch is multiplied by the keys of all its sequences and masked, so
    that prompts in short batches are faster. By default it reserves all memory for the cache and masks it in every
    step: no token within a minute.
    """
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(options.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation="sdpa").eval()
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=128)
    settings: dict[str, Any] = {"page_size": 32, "num_blocks": 320, "max_batch_tokens": 256}
    settings |= {"max_requests_per_batch": 32, "allow_block_sharing": False}  # no prefix cache
    manager = model.init_continuous_batching(
        generation_config=config, continuous_batching_config=ContinuousBatchingConfig(**settings)
    )
    manager.start()
    turns = iter(range(1 << 30))

    def generate(prompts: Tokens, tokens: int) -> Events:
        turn = next(turns)
        names = {f"{turn}-{index}": index for index in range(len(prompts))}
        for name, index in names.items():
            manager.add_request(prompts[index], request_id=name, max_new_tokens=tokens, streaming=True)
        seen = dict.fromkeys(names, 0)
        while names:
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError("no result within 60 s")
            if result.error:
                raise RuntimeError(result.error)
            name = result.request_id
            yield names[name], list(result.generated_tokens[seen[name] :])
            seen[name] = len(result.generated_tokens)
            if result.is_finished():
                del names[name]

    return generate, {"precision": options.dtype, "settings": {"attention": "sdpa", **settings}}


def engine(options: argparse.Namespace) -> tuple[Callable[[Tokens, int], Events], dict[str, Any]]:
    """Meshwright's engine in this process: what HTTP and the front process cost is the difference to the server."""
    import meshwright as mw
    from meshwright.kernels.choice import load_kernels

    loaded = mw.load(options.model, dtype=options.dtype)

    def generate(prompts: Tokens, tokens: int) -> Events:
        answers = loaded.generate(prompts, max_tokens=tokens, temperature=0.0, ignore_eos=True)
        for index, answer in enumerate(answers):
            yield index, list(answer.tokens)

    kernels = load_kernels()
    return generate, {"precision": options.dtype, "instruction_set": kernels.instruction_set if kernels else "torch"}


WORKERS = {"openvino": openvino, "transformers": transformers, "engine": engine}


def answer(generate: Callable[[Tokens, int], Events], prompts: Tokens, tokens: int) -> dict[str, Any]:
    """Measurements of one turn, seconds."""
    begun = time.perf_counter()
    arrivals: list[list[float]] = [[] for _ in prompts]
    generated: Tokens = [[] for _ in prompts]
    for index, fresh in generate(prompts, tokens):
        if fresh:
            arrivals[index].append(time.perf_counter() - begun)
            generated[index] += fresh
    seconds = time.perf_counter() - begun
    counts = {len(each) for each in generated}
    if counts != {tokens}:
        return {"error": f"answers of {sorted(counts)} tokens instead of {tokens}"}
    return {"seconds": seconds, "arrivals": arrivals, "tokens": generated}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=WORKERS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    generate, description = WORKERS[options.name](options)
    print(json.dumps({"ready": True, **description}), flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        print(json.dumps(answer(generate, turn["prompts"], turn["tokens"])), flush=True)


if __name__ == "__main__":
    main()
