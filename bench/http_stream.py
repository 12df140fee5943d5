"""Cost of a streamed token in the server's front process: processor time from the engine's output to the socket.

An engine that computes nothing gives 32 streams a token each, step after step, through the real application and server
in a process of their own; clients are plain sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.shared.fake_engine import FakeEngine, make_prompts
from common import write_result
from meshwright.launcher.signals import StopSignals
from meshwright.serving.gate import HttpSettings
from meshwright.serving.http import HttpApp
from meshwright.serving.http_server import open_socket, serve_http
from meshwright.serving.replica import OutputCallback
from meshwright.serving.request import Output, Request

STREAMS, WARM_TOKENS = 32, 20
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "5 log-probabilities": {"logprobs": 5},
    "stop strings": {"stop": ["%%%%", "####"]},
}


class SteppingEngine(FakeEngine):
    """Engine that gives every running request a token each `step_seconds`, as one message of a replica does."""

    def submit(self, request: Request, on_output: OutputCallback) -> None:
        if not self.requests:
            self._stepping = asyncio.create_task(self._step())
            self._streams: dict[str, tuple[OutputCallback, Request, list[int]]] = {}
        self.requests.append(request)
        self._streams[request.id] = on_output, request, [0]

    def cancel(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(self.step_seconds or 0)
            for on_output, request, count in list(self._streams.values()):
                token = self.tokens[count[0] % (len(self.tokens) - 1)]
                count[0] += 1
                last = count[0] >= request.sampling.max_tokens
                result = self._result(token, request.sampling.logprobs)
                on_output(Output(request.id, [result], "length" if last else None))


def serve(step_seconds: float) -> None:
    """Run the server on a free port, which is printed, until SIGTERM."""
    import uvloop

    with tempfile.TemporaryDirectory() as directory:
        prompts = make_prompts(Path(directory), 4096)
        engine = SteppingEngine(prompts)
        engine.step_seconds = step_seconds
        listener = open_socket("127.0.0.1", 0)
        print(listener.getsockname()[1], flush=True)
        with StopSignals() as signals:
            uvloop.run(serve_http(HttpApp(engine, prompts, HttpSettings("m")), listener, engine, signals))


async def read_stream(port: int, body: dict[str, Any]) -> int:
    """Send one request and read its stream to the end; return the number of events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({"prompt": "hello", "stream": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    events = 0
    while part := await reader.read(1 << 16):
        events += part.count(b"data: ")
    writer.close()
    return events


async def run_streams(port: int, tokens: int, body: dict[str, Any]) -> int:
    """Read all streams at once; return the number of events."""
    return sum(await asyncio.gather(*(read_stream(port, {"max_tokens": tokens, **body}) for _ in range(STREAMS))))


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--serve", action="store_true", help="run as the server")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens per stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-seconds", type=float, default=0.01)
    options = parser.parse_args()
    if options.serve:
        serve(options.step_seconds)
        return
    command = [sys.executable, __file__, "--serve", "--step-seconds", str(options.step_seconds)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    asyncio.run(run_streams(port, WARM_TOKENS, {}))
    costs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(options.rounds):
        for kind, body in KINDS.items():
            before, begun = processor_seconds(server.pid), time.perf_counter()
            events = asyncio.run(run_streams(port, options.tokens, body))
            assert events >= STREAMS * options.tokens, (kind, events)
            costs[kind].append(1e6 * (processor_seconds(server.pid) - before) / (STREAMS * options.tokens))
            print(f"{kind}: {costs[kind][-1]:.1f} us a token, {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    server.terminate()
    server.wait()
    result = {
        "streams": STREAMS,
        "tokens": options.tokens,
        "step_seconds": options.step_seconds,
        "load_average": os.getloadavg()[0],
        "microseconds_per_token": {
            kind: {"median": statistics.median(all_), "all": all_} for kind, all_ in costs.items()
        },
    }
    write_result("http_stream", result)


if __name__ == "__main__":
    main()
