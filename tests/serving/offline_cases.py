"""What each rank does in the tests of engines that are split over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.serving.offline import build_offline_engine, run_requests
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling

PROMPTS = [[7, 9, 250, 3], [100], list(range(3, 24))]


def requests() -> list[Request]:
    """Greedy and drawn answers with log-probabilities, and one that scores its prompt."""
    return [
        Request("greedy", tuple(PROMPTS[0]), Sampling(max_tokens=9, logprobs=1)),
        Request("drawn", tuple(PROMPTS[1]), Sampling(temperature=1.2, top_p=0.9, seed=4, max_tokens=9, logprobs=0)),
        Request("scored", tuple(PROMPTS[2]), Sampling(max_tokens=0, prompt_logprobs=0)),
    ]


def run(directory: str, layout: str) -> dict[str, Any]:
    """Results of the requests together and of each alone, by request ID; and bytes of weights and matrices."""
    mesh = Mesh.create(Layout.parse(layout))
    engine = build_offline_engine(Path(directory), mesh, "float32")
    together = collect(engine, requests())
    alone = {request.id: collect(engine, [request])[request.id] for request in requests()}
    memory = engine.runner.memory()
    mesh.close()
    return {"together": together, "alone": alone, "held": memory["weights"] + memory.get("packed", 0)}


def collect(engine: Any, wanted: list[Request]) -> dict[str, list[tuple[int, float]]]:
    """Tokens and log-probabilities by request ID, those of a scored prompt included."""
    found: dict[str, list[tuple[int, float]]] = {request.id: [] for request in wanted}
    for output in run_requests(engine, wanted):
        results = [*filter(None, output.prompt_results or ()), *output.results]
        found[output.request_id] += [(result.token, result.logprob) for result in results]
    return found
