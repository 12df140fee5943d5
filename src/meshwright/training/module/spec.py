"""The arguments of a script's `fit`: module, loss and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import torch
from torch import nn
from torch.utils.data import default_collate

from meshwright.parallel.module.table import ChooseUnit
from meshwright.training.module.data import Collate, Samples

Loss = Callable[[nn.Module, Any], torch.Tensor]
Measure = Callable[[nn.Module, Any], torch.Tensor | float]


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """The arguments of `fit`, documented there and in `FitOptions`."""

    build: Callable[[], nn.Module]
    loss: Loss
    data: Samples
    collate: Collate = default_collate
    count: Callable[[Any], int | torch.Tensor] | None = None
    reduction: Literal["mean", "sum"] = "mean"
    validation: Samples | None = None
    measures: Mapping[str, Measure] = field(default_factory=dict)
    units: ChooseUnit | None = None
    decays: Callable[[str, nn.Parameter], bool] | None = None
    workers: int = 0


class FitOptions(TypedDict, total=False):
    """Options of `fit`.

    Attributes:
        collate: Returns a batch, given a list of items; `torch.utils.data.default_collate` unless given.
        count: Number of items in a batch, such as labels that are not ignored; default: its samples. The step's loss is
            the sum over all items of all ranks, divided by their number, whatever the layout.
        reduction: `"mean"`, or `"sum"` if the loss is the sum over the batch's items; mean unless given.
        validation: Validation data, as `data`.
        measures: `{"accuracy": f}`: `f(module, batch)` is a sum over the batch's items; its mean over the validation
            data goes into metrics.jsonl and the result.
        units: True for a module, given its name and itself, that is one FSDP unit (all-gathered together by
            ZeRO-3); default: chosen by size and module lists.
        decays: True for a parameter to which weight decay applies; default: those with two or more dims.
        workers: `DataLoader` processes of each rank; 0 unless given.
    """

    collate: Collate
    count: Callable[[Any], int | torch.Tensor] | None
    reduction: Literal["mean", "sum"]
    validation: Samples | None
    measures: Mapping[str, Measure] | None
    units: ChooseUnit | None
    decays: Callable[[str, nn.Parameter], bool] | None
    workers: int
