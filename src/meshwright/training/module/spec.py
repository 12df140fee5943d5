"""The arguments of a script's `fit`: module, loss and data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from meshwright.parallel.module.table import ChooseUnit
from meshwright.training.module.data import Collate, Samples

Loss = Callable[[nn.Module, Any], torch.Tensor]
Measure = Callable[[nn.Module, Any], torch.Tensor | float]


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """The arguments of `fit`, documented there."""

    build: Callable[[], nn.Module]
    loss: Loss
    data: Samples
    collate: Collate
    count: Callable[[Any], int | torch.Tensor] | None
    reduction: Literal["mean", "sum"]
    validation: Samples | None
    measures: dict[str, Measure]
    units: ChooseUnit | None
    decays: Callable[[str, nn.Parameter], bool] | None
    workers: int
