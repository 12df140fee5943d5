"""Functions that the ranks of test_tensor_parallel.py run."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.documents import Documents
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.parallel.parallelize import build_axes
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table

IDS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])


def whole_model(config: ModelConfig) -> Transformer:
    model = Transformer(config, dtype=torch.float64)
    initialise(model, parameter_table(config), seed=1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).double())
    return model


def inputs(config: ModelConfig, rows: int) -> tuple[torch.Tensor, torch.Tensor, Documents]:
    tokens = torch.randint(0, config.vocabulary, (2, 13), generator=torch.Generator().manual_seed(3))
    tokens[0, 3] = config.vocabulary - 1  # in the last rank's slice
    targets = tokens[:, 1:].clone()
    targets[0, 4] = -100
    return tokens[:rows, :-1], targets[:rows], Documents.from_ids(IDS[:rows])


def largest(x: torch.Tensor) -> float:
    """Largest absolute value; infinite if any is NaN."""
    return float(x.abs().max().nan_to_num(nan=torch.inf))


def compare(
    layout_text: str, config: ModelConfig, recompute: str, rows: int = 2, overlap: str = "off",
    backend: str | None = None,
) -> dict[str, float]:  # fmt: skip
    """Relative errors of a rank's loss, logits and each gradient against the unsharded model, the number of graph
    breaks, and 1 if input gradients are summed by another number of calls than expected. overlap: of products with
    their collectives; backend: of torch.compile, None: not compiled. Uninitialised memory is NaN, also that of results
    that selective checkpointing discards."""
    torch.use_deterministic_algorithms(True)
    layout = Layout.parse(layout_text)
    mesh = Mesh.create(layout)
    mesh.communicator.product_overlap = overlap
    table, whole = parameter_table(config), whole_model(config)
    axes = dataclasses.replace(build_axes(mesh), recompute=ActivationCheckpointing(recompute))
    mine = Transformer(config, axes=axes, dtype=torch.float64)
    if backend is not None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        mine.compile_blocks(backend=backend)
    theirs, parameters = dict(whole.named_parameters()), dict(mine.named_parameters())
    assert {name: tuple(parameter.shape) for name, parameter in parameters.items()} == {
        tensor.name: tensor.local_shape(layout) for tensor in table.tensors
    }
    boxes = [
        (entry, box, entry.offset)
        for entry in table.entries
        for box in table.local_slices(entry, layout, layout.coordinates(mesh.rank))
    ]

    def part(tensors: dict[str, torch.Tensor], entry: Any, box: Any, offset: int) -> torch.Tensor:
        return tensors[entry.tensor][offset : offset + entry.model_shape[0]][box.slices]

    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(1e3)  # padded rows must not count
        for entry, box, offset in boxes:
            parameters[entry.tensor][box.local_slices] = part(theirs, entry, box, offset)

    batch = inputs(config, rows)
    want, loss = whole(*batch), mine(*batch)
    want.backward()
    loss.backward()
    errors = {
        "loss": largest(loss - want),
        "logits": largest(mine.logits(batch[0], batch[2]) - whole.logits(batch[0], batch[2])),
    }
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    expected = {name: parameter.grad for name, parameter in theirs.items()}
    summed: dict[str, torch.Tensor] = {}
    for entry, box, offset in boxes:
        gradient = gradients[entry.tensor][box.local_slices].clone()
        if "tp" in entry.gradient_axes(layout) and entry.replicas(layout) == layout.tp:
            torch.distributed.all_reduce(gradient)
        error = largest(gradient - part(expected, entry, box, offset))
        errors[entry.name] = max(errors.get(entry.name, 0.0), error)
        summed[entry.name] = gradient
    covered = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    for entry, box, _ in boxes:
        covered[entry.tensor][box.local_slices] = 1
    errors["rows that fill up"] = max(largest(gradients[name] * (1 - covered[name])) for name in gradients)
    if overlap != "off":  # in chunks without sequence parallelism, unless a weight gradient covers the whole sum
        chunks = 1 if layout.tensor_sequence_parallel or backend is None else layout.tp
        calls = sum(call["calls"] for call in mesh.record.table() if call["site"] == "mlp.input.backward")
        errors["calls of input gradients"] = float(calls != chunks * config.layers)
    if backend is not None:
        errors["graph breaks"] = float(sum(torch._dynamo.utils.counters["graph_break"].values()))
    torch.use_deterministic_algorithms(False)
    return errors
