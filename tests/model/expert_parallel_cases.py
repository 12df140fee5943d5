"""Functions that the ranks of test_expert_parallel.py run."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.parallel.parallelize import build_axes
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table

ROWS, SEQUENCE = 4, 12


def whole_model(config: ModelConfig, idle: bool) -> Transformer:
    """Unsharded weights. `idle`: the second half of the layers sends every token to the same few experts."""
    model = Transformer(config, dtype=torch.float64)
    initialise(model, parameter_table(config), seed=1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).double())
        for block in list(model.layers)[config.layers // 2 :] if idle else ():
            router = block.mlp.router
            if router.bias is None:
                router.weight.zero_()  # equal scores: the same experts for every token
            else:
                router.bias.copy_((torch.arange(config.experts) < config.experts_per_token) * 9.0)
    return model


def inputs(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, config.vocabulary, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(3))
    targets = tokens[:, 1:].clone()
    targets[0, 4:] = -100
    return tokens[:, :-1], targets


def compare(layout_text: str, config: ModelConfig, idle: bool = False, compiled: str = "") -> dict[str, float]:
    """Relative errors of a rank's loss and gradients, reduced over the table's axes, against the unsharded model and
    batch; and the smallest number of rows that its experts received in one layer."""
    layout = Layout.parse(layout_text)
    mesh = Mesh.create(layout, timeout_seconds=30)
    try:
        return _compare(layout, mesh, config, idle, compiled)
    finally:
        mesh.close()


def _compare(layout: Layout, mesh: Mesh, config: ModelConfig, idle: bool, compiled: str) -> dict[str, float]:
    table, whole = parameter_table(config), whole_model(config, idle)
    mine = Transformer(config, axes=build_axes(mesh), dtype=torch.float64)
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
        for entry, box, offset in boxes:
            parameters[entry.tensor][box.local_slices] = part(theirs, entry, box, offset)
    if compiled:
        mine.compile_blocks(backend=compiled)

    tokens, targets = inputs(config)
    want = whole(tokens, targets)
    want.backward()
    rows = slice(mesh.dp.rank * ROWS // layout.dp, (mesh.dp.rank + 1) * ROWS // layout.dp)
    loss = mine(tokens[rows], targets[rows])
    loss.backward()
    total = loss.detach().clone()
    all_reduce(total, mesh.data, "test.loss")
    errors = {"loss": float((total - want.detach()).abs())}
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    expected = {name: parameter.grad for name, parameter in theirs.items()}
    least = min(int((gradient.view(len(gradient), -1).norm(dim=1) > 0).sum())
                for name, gradient in gradients.items() if ".experts.down" in name)  # fmt: skip
    for tensor in table.tensors:
        axis = mesh.expert_data if tensor.buffer_kind(layout) == "experts" else mesh.data
        all_reduce(gradients[tensor.name], axis, "test.gradients")
    for entry, box, offset in boxes:
        gradient = gradients[entry.tensor][box.local_slices].clone()
        if "tp" in entry.gradient_axes(layout):
            all_reduce(gradient, mesh.make_block_axis("tp", entry.replicas(layout)), "test.partial")
        error = (gradient - part(expected, entry, box, offset)).abs().max()
        errors[entry.name] = max(errors.get(entry.name, 0.0), float(error))
    return {"worst": max(errors.values()), "loss": errors["loss"], "rows with gradients": least, "calls": calls(mesh)}


def calls(mesh: Mesh) -> dict[str, int]:
    """Number of calls at the sites of experts."""
    return {
        line["site"]: line["calls"] for line in mesh.record.table() if line["site"].startswith(("experts.", "router."))
    }
