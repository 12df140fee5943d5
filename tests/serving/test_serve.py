"""`meshwright serve` end to end: a server of real ranks, and errors before one starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshwright.errors import Terminated
from meshwright.kernels.build import list_supported_instruction_sets
from meshwright.launcher.host_memory import GPU, HostMemory
from meshwright.layout import Layout
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.planner.serving.runners import serving_ledger
from meshwright.serving import serve as serve_module
from meshwright.spec.config_json import config_from_path
from tests.conftest import exhaustive
from tests.forked_commands import ForkedCommand

GREEDY = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}
DRAWN = {"prompt": "The big dog", "max_tokens": 100, "temperature": 0.8, "seed": 7, "ignore_eos": True, "logprobs": 1}


@pytest.fixture
def stories(shared_data: Path) -> Path:
    return shared_data / "stories260k"


@contextmanager
def running(
    checkpoint: Path, *options: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A server, and the document that it prints when it is ready; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "serve", str(checkpoint), "--port", "0", "--json", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        yield process, json.loads(line) if line else {"error": process.stderr.read()}
    finally:
        process.kill()
        process.communicate()


def complete(url: str, **body: Any) -> str:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def read_stream(url: str, during: Callable[[], None] = lambda: None, **body: Any) -> tuple[str, list[float]]:
    """Text and log-probabilities of a streamed answer; `during` is called after its first tokens."""
    text, logprobs = "", list[float]()
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                if not logprobs:
                    during()
                text += choice["text"]
                logprobs += choice["logprobs"]["token_logprobs"]
    return text, logprobs


def is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_server_of_several_ranks(stories: Path):
    """Ready line, answers, a killed rank during a stream, drain, and signals until the end: one server for all, as its
    start costs seconds."""
    options = "--layout", "pp2", "--served-model-name", "stories", "--step-seconds", "3600", "--queue-requests", "7"
    with running(stories, *options) as (process, ready):
        url = ready["url"]
        assert (ready["model"], ready["layout"], ready["dtype"]) == ("stories", "pp2", "float32")
        many = httpx.post(f"{url}/v1/completions", json={"prompt": ["x"] * (64 + 7 + 1)})
        assert many.status_code == 400 and "at most 71" in many.text  # 64 sequences run, 7 requests wait
        assert ready["kv_blocks"] == 4096 and 0 < ready["seconds_to_ready"] < 300
        measured = ready["memory"]["measured"]
        for item in ("packed", "kv", "logits", "weights"):
            assert measured[item] == pytest.approx(ready["memory"]["predicted"][item], rel=0.02)
        expected = (stories / "greedy_200_tokens.txt").read_text()
        assert expected.startswith(GREEDY["prompt"] + complete(url, **GREEDY).rstrip("�"))
        undisturbed = read_stream(url, **DRAWN)
        assert len(undisturbed[1]) == DRAWN["max_tokens"]

        def kill_rank() -> None:
            """Kill a rank, and wait until the server says that it is not healthy, which the limit of a step does not
            delay."""
            (first, *_) = httpx.get(f"{url}/props").json()["engine"]["ranks"]
            os.kill(first["pid"], signal.SIGKILL)
            while httpx.get(f"{url}/health").status_code == 200:
                time.sleep(0.01)

        assert read_stream(url, kill_rank, **DRAWN) == undisturbed
        assert httpx.get(f"{url}/health").status_code == 200

        ranks = [rank["pid"] for rank in httpx.get(f"{url}/props").json()["engine"]["ranks"]]
        body = {**DRAWN, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        while any(map(is_alive, ranks)):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        assert process.wait(timeout=60) in (143, -signal.SIGTERM)  # the last signal may meet the interpreter's end


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ranks"), [("tp2", 2), *exhaustive(("tp2 dp2", 4))])
def test_externally_started_ranks_serve(layout: str, ranks: int, stories: Path):
    """As torchrun starts them: one process for each rank, of which rank 0 serves HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    places = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    command = ["-m", "meshwright", "serve", str(stories), "--layout", layout]
    others = [
        ForkedCommand(command, Path.cwd(), os.environ | places | {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)})
        for rank in range(1, ranks)
    ]
    try:
        with running(stories, "--layout", layout, RANK="0", LOCAL_RANK="0", **places) as (process, ready):
            assert len(ready["ranks"]) == ranks, ready
            expected = (stories / "greedy_200_tokens.txt").read_text()
            for _ in range(2):
                assert expected.startswith(GREEDY["prompt"] + complete(ready["url"], **GREEDY))
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 143
            assert [other.wait(timeout=60) for other in others] == [0] * (ranks - 1)
    finally:
        for other in others:
            other.kill()


def test_errors_before_a_rank_starts(stories: Path, tmp_path: Path, command_line: Callable[..., Any]):
    empty_keys = tmp_path / "keys"
    empty_keys.write_text("\n")
    (tmp_path / "link").symlink_to(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"caf\xe9")))
    shutil.copytree(stories, (tmp_path / "link").readlink())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for arguments, reason in (
            ([tmp_path / "nothing"], "no such directory"),
            ([tmp_path / "link"], r"caf\udce9' is not UTF-8"),
            ([stories, "--port", port], f"port {port} of 127.0.0.1 is in use"),
            ([stories, "--layout", "cp2"], "serving runs on"),
            ([stories, "--layout", "tp3"], "tp3 does not divide"),
            ([stories, "--dtype", "int3"], "dtype"),
            ([stories, "--device", "gpu"], "unknown device"),
            ([stories, "--device", "cuda", "--layout", "dp1024"], "1024 ranks here needs one"),
            ([stories, "--memory", "1MiB"], "one request of 512 tokens does not fit"),
            ([stories, "--memory", "900TiB"], "are available now"),
            ([stories, "--max-length", 0], "--max-length 0"),
            ([stories, "--token-budget", 0], "--token-budget: 0 is not in the range"),
            ([stories, "--max-sequences", 99, "--token-budget", 9], "--max-sequences 99"),
            ([stories, "--api-key-file", empty_keys], "has no key"),
            ([stories, "--api-key-file", tmp_path], "cannot be read"),
            ([stories, "--host", "300.1.1.1"], "cannot listen on 300.1.1.1"),
            ([stories, "--port", 70000], "--port"),
        ):
            outcome = command_line("serve", *arguments)
            assert (outcome.code, outcome.output) == (2, "")
            assert outcome.errors.count("\n") == 1 and reason in outcome.errors, outcome.errors


def test_what_the_start_says(stories: Path, command_line: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    """One line each; here before a port in use ends the start."""
    gpu = HostMemory(64 << 30, 64 << 30, GPU)
    monkeypatch.setattr(
        serve_module, "choose_rank_devices", lambda wanted, ranks: [] if wanted == "cpu" else [gpu] * ranks
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for device, layout, torchrun, warnings in (
            ("cpu", "dp1", False, []),
            ("cuda", "dp1", False, []),
            ("auto", "dp1", False, ["--device auto has found a GPU for each rank (--device cpu"]),
            ("auto", "dp2", False, ["serving has run on one GPU, not on several yet"]),
            ("cpu", "dp1", True, ["one lost rank ends this server"]),
        ):
            for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
                monkeypatch.setenv(name, value) if torchrun else monkeypatch.delenv(name, raising=False)
            outcome = command_line("serve", stories, "--port", port, "--device", device, "--layout", layout)
            *lines, error = outcome.errors.splitlines()
            assert outcome.code == 2 and "is in use" in error
            assert len(lines) == len(warnings) and all(map(str.__contains__, lines, warnings)), outcome.errors


def test_server_without_compiler_says_why_and_bills_plain_torch(stories: Path, tmp_path: Path):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no license >&2; exit 3\n")
    compiler.chmod(0o755)
    reason = f"{compiler} ended with exit code 3 (no license)"
    if not list_supported_instruction_sets():
        reason = "the processor is no x86-64 with AVX2"
    with running(stories, CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path)) as (process, ready):
        predicted, measured = ready["memory"]["predicted"], ready["memory"]["measured"]
        sizes = ServingSizes(max_length=512)
        ledger = serving_ledger(config_from_path(stories), Layout(), sizes, "torch")
        items = ledger.items()
        assert (predicted["packed"], predicted["workspace"]) == (0, items["workspace"])
        assert predicted["weights"] == measured["weights"] == items["weights"]
        assert predicted["kv"] == measured["kv"] == ready["kv_blocks"] * ledger.kv_block
        engine = httpx.get(f"{ready['url']}/props").json()["engine"]
        assert engine["plain_torch"] == reason and engine["kernels"].startswith("torch ")
        expected = (stories / "greedy_200_tokens.txt").read_text()
        assert expected.startswith(GREEDY["prompt"] + complete(ready["url"], **{**GREEDY, "max_tokens": 8}))
        process.send_signal(signal.SIGTERM)
        log = process.communicate()[1].splitlines()
        assert [line for line in log if "plain torch" in line] == [
            f"warning: computing in plain torch, many times slower than with the compiled kernels: {reason}"
        ]


@pytest.mark.parametrize(
    ("unfinished", "message"), [(0, "were finished"), (2, "^terminated: 2 requests in flight were ended")]
)
def test_end_reports_unfinished_requests(unfinished: int, message: str):
    with pytest.raises(Terminated, match=message):
        serve_module._raise_end(signal.SIGTERM, unfinished)


def test_missing_extra_is_one_line(stories: Path, command_line: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve_module, "EXTRA", ("json", "no_such_module"))
    outcome = command_line("serve", stories)
    assert outcome.code == 2
    assert 'serving needs no_such_module: run pip install "meshwright[serve]"' in outcome.errors


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors"])
def test_damaged_checkpoint_is_one_line(stories: Path, tmp_path: Path, file: str, command_line: Callable[..., Any]):
    shutil.copytree(stories, tmp_path / "model", copy_function=shutil.copyfile)
    if file == "tokenizer.json":
        (tmp_path / "model" / file).unlink()
    else:
        os.truncate(tmp_path / "model" / file, 500_000)
    outcome = command_line("serve", tmp_path / "model", "--port", 0)
    errors = [line for line in outcome.errors.splitlines() if "error" in line]
    assert (outcome.code, outcome.output, len(errors)) == (2, "", 1)
    assert errors[0].startswith("meshwright: error: ") and file in errors[0]
