"""Training step of the engine without the trainer around it, for races against PyTorch's wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.shared.backward_pass import run_backward
from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.transformer import Transformer
from meshwright.parallel.parallelize import build_axes
from meshwright.parallel.step import count_targets
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.recipe.tables import TrainRecipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.training.optimizer import Optimizer


def make_engine_step(
    config: ModelConfig, layout: Layout, dtype: torch.dtype, seed: int, train: TrainRecipe
) -> Callable[[Any], float]:
    """Return a function that trains one step on a batch (tokens, targets), clips gradients to norm 1, and returns the
    loss. layout: without pipeline. dtype: of the parameters. seed: of the initial values. train: the optimizer."""
    mesh = Mesh.create(layout)
    model = Transformer(config, axes=build_axes(mesh), dtype=dtype)
    parallel = ZeroEngine(model, parameter_table(config), mesh, seed=seed, parameter_dtype=dtype)
    optimizer = Optimizer(parallel.shards, train)

    def step(batch: Any) -> float:
        tokens, goals = batch
        targets = count_targets([goals], mesh)()
        parallel.begin_step(1)
        loss = model(tokens, goals, units=parallel.prefetchers[0]) / targets
        run_backward(parallel, loss)
        parallel.finish()
        verdict = torch.stack([loss.detach().double() / mesh.tp.size, parallel.squared_norm_share()])
        all_reduce(verdict, mesh.world, "step.verdict")
        optimizer.step(train.learning_rate, min(1.0, 1.0 / (float(verdict[1]) ** 0.5 + 1e-6)))
        parallel.all_gather_parameters()
        return float(verdict[0])

    return step
