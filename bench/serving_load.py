"""The server under load and faults, part by part (`--parts`), on a model of random weights:

- `overload`: ten times the capacity for some minutes: resident memory grows by less than 1%, every admitted request
  ends as it should, the others get 429 with a time to wait.
- `retries`: arrivals fall from ten to 0.8 times the capacity: of the clients refused from then on, 90% succeed at
  their first retry; the time promised to a refused client against the time until a request was admitted. Repeated until
  20 clients probed and 60 returned.
- `disconnects`: 1,000 clients that leave, streaming or not: all blocks come back.
- `kills`: `kill -9` of random ranks under running streams, for each of `--kill-layouts`: every stream, its
  log-probabilities included, equals the undisturbed server's; `/health` says 503 within 2 s; all blocks come back.
- `clients`: what the openai client, lm-eval, vLLM's and guidellm's benchmarks send.
- `schema`: schemathesis over all operations of /openapi.json: no 5xx but the documented 503.
- `lm-eval`: the loss of a text by lm-eval's `local-completions` and by `meshwright evaluate`.

    python bench/serving_load.py [--minutes 10]       # writes bench/results/serving_load.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import read_stored, write_result
from load_faults import disconnects, kills
from load_overload import QUEUE, overload, retries
from load_programs import clients, lm_eval, schema
from serving_client import Client, RequestFailed, run
from serving_models import CACHE, SHAPES
from serving_peers import ContenderFailed, Server, start_meshwright

Part = Callable[[Server, Client, argparse.Namespace], Awaitable[dict[str, Any]]]
PARTS: dict[str, Part] = {
    "disconnects": disconnects,
    "kills": kills,
    "clients": clients,
    "schema": schema,
    "lm-eval": lm_eval,
    "retries": retries,
    "overload": overload,
}


def run_kills(options: argparse.Namespace) -> dict[str, Any]:
    """Run `kills` against a server of each layout."""
    found = {}
    for layout in options.kill_layouts:
        found[layout] = run_part("kills", argparse.Namespace(**{**vars(options), "layout": layout}))
        print(f"kills, {layout}:", "passed" if found[layout]["passed"] else found[layout], flush=True)
    return {"layouts": found, "passed": all(each["passed"] for each in found.values())}


def choose_dtype(part: str, options: argparse.Namespace) -> str:
    """Return the dtype of the part's server; `meshwright evaluate`, to which lm-eval is compared, computes in fp32."""
    return "fp32" if part == "lm-eval" else str(options.dtype)


def run_part(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part of the benchmark against its own server."""
    work = CACHE / "scratch" / "load"
    work.mkdir(parents=True, exist_ok=True)
    arguments = ["--queue-requests", str(QUEUE), *(["--layout", options.layout] if options.layout else [])]
    if name == "schema":  # many of its requests name no length, and are to end within its time limit of a request
        arguments += ["--max-length", "128"]
    server = start_meshwright(options.model, choose_dtype(name, options), work, *arguments)

    async def work_through() -> dict[str, Any]:
        client = Client(server.port)
        try:
            return await PARTS[name](server, client, options)
        finally:
            client.close()

    try:
        found = run(work_through())
        if server.process.poll() is not None:
            raise server.failed(f"the server ended with {server.process.returncode}")
        return found
    finally:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", choices=SHAPES, default="smollm-135m")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--layout", default="", help="layout of the server, but for the part kills")
    parser.add_argument("--kill-layouts", nargs="+", default=["tp3", "dp2", "pp2"], help="layouts of the part kills")
    parser.add_argument("--minutes", type=float, default=10, help="minutes of overload; longest time of retries")
    parser.add_argument("--cycles", type=int, default=4, help="least number of cycles of retries")
    parser.add_argument("--disconnects", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=6, help="kills of each layout")
    parser.add_argument("--examples", type=int, default=100, help="schemathesis examples per operation")
    parser.add_argument("--schema-minutes", type=float, default=8, help="minutes of schemathesis")
    parser.add_argument("--name", default="serving_load", help="name of the file in bench/results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the servers
    failed = []
    for name in options.parts:
        begun = time.monotonic()
        try:
            found = run_kills(options) if name == "kills" else run_part(name, options)
        except (ContenderFailed, RequestFailed, OSError) as error:
            found = {"passed": False, "failure": str(error)}
        part = {
            **found,
            "seconds": round(time.monotonic() - begun, 1),
            "date": datetime.date.today().isoformat(),
            "model": options.model,
            "dtype": choose_dtype(name, options),
        }
        print(name, json.dumps(part, indent=1), flush=True)
        parts = read_stored(options.name).get("parts", {})  # now: another run may have written some meanwhile
        write_result(options.name, {"parts": {**parts, name: part}}, quiet=True)
        failed += [name] * (not part["passed"])
    if failed:
        raise SystemExit(f"did not pass: {', '.join(failed)}")


if __name__ == "__main__":
    main()
