"""Backward of one micro-batch through a model that is a single pipeline stage."""

from __future__ import annotations

import torch

from meshwright.parallel.zero_engine import ZeroEngine


def run_backward(parallel: ZeroEngine, loss: torch.Tensor) -> None:
    """Run the backward pass of one micro-batch from its scalar `loss`. parallel: engine that owns the parameters."""
    (stage,) = parallel.partition.stages
    parallel.start_pass(stage)
    loss.backward()
    parallel.end_pass(stage)
