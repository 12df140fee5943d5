"""What each rank does in the tests of models that are cut over ranks to be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.documents import Documents
from meshwright.parallel.inference import SplitModel
from meshwright.parallel.stage_compute import MicroBatch
from meshwright.serving.generate import Generator
from meshwright.serving.sampling import Sampling

PROMPT = "def f("
DRAWN = Sampling(temperature=1.3, top_k=50, top_p=0.95, seed=5)


def batches(count: int, vocabulary: int) -> list[MicroBatch]:
    make = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, vocabulary, (2, 13), generator=make) for _ in range(count)]
    ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    return [(row[:, :-1], row[:, 1:], Documents.from_ids(ids)) for row in rows]


def read(directory: str, layouts: list[str]) -> list[dict[str, Any]]:
    """Tokens and losses under each layout, and what this rank holds."""
    results = []
    for text in layouts:
        mesh = Mesh.create(Layout.parse(text))
        split = SplitModel(Path(directory), mesh, torch.float64)
        generator = Generator.of_model(split, split.config, Path(directory))
        mesh.record.clear()
        results.append(
            {
                "greedy": generator.generate(PROMPT, 12).tokens,
                "uncached": generator.generate(PROMPT, 5, cached=False).tokens,
                "drawn": generator.generate(PROMPT, 12, DRAWN).tokens,
                "loss": split.losses(batches(5, split.config.vocabulary)),
                "held": sum(parameter.numel() for parameter in split.model.parameters()),
                "sites": {entry["site"] for entry in mesh.record.table()},
            }
        )
        mesh.close()
    return results
