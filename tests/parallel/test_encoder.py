"""Data-parallel encoders with every ZeRO stage compute the gradient of one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from bench.shared.backward_pass import run_backward
from bench.shared.packed_documents import documents_from_starts
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.encoder import Encoder
from meshwright.model.initialise import initialise
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.parallel.step import count_targets
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset

ROWS, SEQUENCE = 8, 20
MASKED = dataclasses.replace(preset("bert-tiny"), layers=3, vocabulary=97)
CLASSES = dataclasses.replace(MASKED, head="classes", labels=("no", "maybe", "yes"))


def batch(config: Any) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Tokens, targets (fewer in some sequences than in others), and document starts."""
    make = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 97, (ROWS, SEQUENCE), generator=make)
    if config.head == "classes":
        return tokens, torch.tensor([0, 1, -100, 2, 1, 1, 0, -100]), [[0]] * ROWS
    places = torch.rand(ROWS, SEQUENCE, generator=make) < torch.linspace(0.0, 0.5, ROWS)[:, None]
    return tokens, tokens.where(places, -100), [[0], [0, 7], [0, 1, 2], [0], [0, 19], [0], [0, 10], [0]]


def reduced(config: Any, layout_text: str) -> list:
    """Slices of this rank's reduced gradient of the whole batch, and its share of the loss."""
    layout, table = Layout.parse(layout_text), parameter_table(config)
    mesh = Mesh.create(layout)
    model = Encoder(config, dtype=torch.float64, recompute=ActivationCheckpointing(layout.recompute))
    parallel = ZeroEngine(model, table, mesh, seed=1, parameter_dtype=torch.float64, master_dtype=torch.float64)
    tokens, targets, starts = batch(config)
    rows = range(mesh.data.rank, ROWS, mesh.data.size)
    parts = [list(rows)[number :: layout.micro_batches] for number in range(layout.micro_batches)]
    count = count_targets([targets[part] for part in parts], mesh)()
    parallel.begin_step(len(parts))
    for part in parts:
        documents = documents_from_starts([starts[row] for row in part], SEQUENCE)
        run_backward(parallel, model(tokens[part], targets[part], documents, parallel.prefetchers[0]) / count)
    parallel.finish()
    mesh.close()
    return parallel.slices_like("gradient", [shard.gradient for shard in parallel.shards], owned=False)


def on_one_device(config: Any) -> dict[str, torch.Tensor]:
    model, table = Encoder(config, dtype=torch.float64), parameter_table(config)
    initialise(model, table, 1)
    tokens, targets, starts = batch(config)
    documents = documents_from_starts(starts, SEQUENCE)
    (model(tokens, targets, documents) / (targets != -100).sum()).backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        entry.name: whole[entry.tensor][entry.offset : entry.offset + entry.model_shape[0]].flatten()
        for entry in table.entries
    }


@pytest.mark.timeout(300)
def test_replicas_match_one_device() -> None:
    with LocalRanks(4) as ranks:
        for config, layouts in (
            (MASKED, ("dp4", "dp4 zero1", "dp4 zero2 mb2", "dp4 zero3 mb2 ac:full", "dp4 zero3 hs2 ac:selective")),
            (CLASSES, ("dp4 zero3 mb2",)),
        ):
            want = on_one_device(config)
            for layout in layouts:
                seen = set()
                for pieces in ranks.run(reduced, config, layout):
                    for piece in pieces:
                        mine = want[piece.name][piece.start : piece.stop]
                        torch.testing.assert_close(piece.tensor, mine, rtol=1e-9, atol=1e-12, msg=piece.name)
                        seen.add(piece.name)
                assert seen == set(want), layout
