"""Arguments of a script's `fit`: module, loss and data."""

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
    """Arguments of `fit`.

    build: function that returns the module. loss: function (module, batch) -> scalar tensor. data: map-style data set.
    collate, count, reduction, validation, measures, units, decays, workers: the options documented in `FitOptions`."""

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
        collate: Function from a list of samples to a batch; `torch.utils.data.default_collate` unless given.
        count: Function from a batch to the number of items that the loss averages over, such as labels that are not
            ignored; default: number of samples. The step's loss is the sum over all items of all ranks, divided by
            their number, whatever the layout.
        reduction: `"mean"` if `loss` returns the mean over the batch's items, `"sum"` if it returns their sum; default:
            mean.
        validation: Validation data, a map-style data set; None: no validation.
        measures: Metric functions by name, such as `{"accuracy": f}`: `f(module, batch)` returns a sum over the batch's
            items, whose mean over the validation data goes into metrics.jsonl and the result.
        units: Function of a module's name and the module; True makes it one FSDP unit (all-gathered together by
            ZeRO-3); default: chosen by size and module lists.
        decays: Function of a parameter's name and the parameter; True if weight decay applies to it; default: it
            applies to parameters with two or more dims.
        workers: Number of `DataLoader` processes of each rank; 0 unless given.
    """

    collate: Collate
    count: Callable[[Any], int | torch.Tensor] | None
    reduction: Literal["mean", "sum"]
    validation: Samples | None
    measures: Mapping[str, Measure] | None
    units: ChooseUnit | None
    decays: Callable[[str, nn.Parameter], bool] | None
    workers: int
