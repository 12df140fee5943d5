"""Coordinate check of µP: sizes of activations, and of their change in the first steps, over the width of the model.

Yang & Hu et al., Tensor Programs V (arXiv:2203.03466), appendix D.1: under a correct parametrization these do not
depend on the width; under the standard one they grow with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.files import replace_file
from meshwright.comm.mesh import Mesh
from meshwright.data import PreparedData
from meshwright.draw.axis import make_log_axis
from meshwright.draw.line_chart import Plot, Series
from meshwright.draw.picture import stack_pictures
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.monitoring.report_charts import COLOURS
from meshwright.recipe import Recipe
from meshwright.spec.config import ModelConfig
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.model_config import resolve_model_config
from meshwright.training.trainer import Trainer

PARTS = ("embedding", "attention", "mlp", "logits")


@dataclass(frozen=True)
class CoordinateCheck:
    """Result of a coordinate check (of µP): sizes of a model's activations at several widths, all measured on the same
    batch.

    hidden: hidden size of each width. steps: number of training steps. sizes: {name in `PARTS`, such as "logits": root
    mean square of that output before the first step, one for each width}. changes: {name in `PARTS`: root mean square
    of the output's change over all steps, one for each width}.
    """

    hidden: tuple[int, ...]
    steps: int
    sizes: dict[str, list[float]]
    changes: dict[str, list[float]]

    def find_growth(self) -> dict[str, float]:
        """Return {name in `PARTS`, such as "logits": exponent p}. The attribute `changes` of this output grows with the
        hidden size as (hidden size)^p; p is fitted by least squares to the logarithms. An exponent near 0 (at most
        about 0.2 for small models) means that the learning rate transfers to other widths."""
        x = torch.tensor(self.hidden, dtype=torch.float64).log()
        y = torch.tensor([self.changes[part] for part in PARTS], dtype=torch.float64).log()
        x = x - x.mean()
        return dict(zip(PARTS, ((y * x).sum(1) / (x * x).sum()).tolist(), strict=True))

    def write(self, path: Path) -> None:
        """Draw two charts, `sizes` and `changes` over the width, to the SVG file `path`."""
        pictures = []
        for title, curves in (("before the first step", self.sizes), (f"change in {self.steps} steps", self.changes)):
            values = [max(value, 1e-12) for part in PARTS for value in curves[part]]
            plot = Plot(
                make_log_axis(self.hidden, "hidden size", lambda number: f"{number:g}"),
                make_log_axis(values, "", lambda number: f"{number:g}"), right=640, bottom=210,
            )  # fmt: skip
            series = [
                Series(part, list(zip(self.hidden, curves[part], strict=True)), colour, "named", dots=True)
                for part, colour in zip(PARTS, COLOURS, strict=False)
            ]
            for one in series:
                plot.draw_line(one)
            entries = [(one.name, {"style": f"fill:var(--{one.colour})"}) for one in series]
            plot.picture.add_legend(entries, plot.left, plot.right, 262)
            pictures.append((f"Root mean square of activations, {title}", plot.picture.to_svg(680, 270, title)))
        replace_file(path, stack_pictures(pictures, "coordinate check").encode(), sync=False)


def check_coordinates(recipe: Recipe, data: PreparedData, factors: Sequence[int], steps: int = 4) -> CoordinateCheck:
    """Train the recipe's model for a few steps at several widths on the CPU, in this process, and return the sizes of
    its activations.

    recipe: the training recipe, used with a constant learning rate. data: prepared data of the recipe. factors: widths
    as integer multiples of the recipe's width; the head size stays the same. steps: number of training steps. Raises
    `UserError` for a factor below 1.
    """
    config = resolve_model_config(recipe, data)
    tables = recipe.to_tables()
    tables["train"] |= {"warmup": 0, "decay": 0, "schedule": "constant", "compile": False}
    plain = Recipe.from_tables(tables)
    sizes: dict[str, list[float]] = {part: [] for part in PARTS}
    changes: dict[str, list[float]] = {part: [] for part in PARTS}
    for factor in factors:
        task = LanguageModelTask(plain, Layout(), widen(config, factor), data, Mesh.single(device="cpu"))
        trainer = Trainer(task)
        before = _record_activations(task)
        for _ in range(steps):
            trainer.step()
        after = _record_activations(task)
        for part in PARTS:
            sizes[part].append(_compute_root_mean_square(before[part]))
            changes[part].append(_compute_root_mean_square(after[part] - before[part]))
    return CoordinateCheck(tuple(config.hidden * factor for factor in factors), steps, sizes, changes)


def widen(config: ModelConfig, factor: int) -> ModelConfig:
    """Return `config` with its width multiplied by `factor`: hidden size, intermediate sizes and numbers of heads; the
    head size stays the same. Raises `UserError` for a factor below 1."""
    if factor < 1:
        raise UserError(f"a width factor is at least 1, not {factor}")
    names = ("hidden", "heads", "kv_heads", "intermediate", "expert_intermediate", "shared_intermediate")
    return dataclasses.replace(config, **{name: getattr(config, name) * factor for name in names})


def _record_activations(task: LanguageModelTask) -> dict[str, torch.Tensor]:
    """Run a forward pass of the task's model on the first micro-batch of the first step. Return {name in `PARTS`:
    output in float64}: the outputs of the embedding and of the last layer's attention and MLP, and the logits of the
    first 512 tokens."""
    model: Any = task.model
    found: dict[str, torch.Tensor] = {}

    def make_hook(name: str) -> Any:
        """Return a forward hook that stores the module's output as `name`."""

        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            """Store `output` under the name given to `make_hook`; a forward hook of PyTorch, with its arguments."""
            found[name] = (output[0] if isinstance(output, tuple) else output).detach().double()

        return hook

    last = model.layers[-1]
    modules = {"embedding": model.embedding, "attention": last.attention, "mlp": last.mlp, "hidden": model.final_norm}
    handles = [module.register_forward_hook(make_hook(name)) for name, module in modules.items()]
    tokens_BS, targets_BS, documents = task.load_step(0)[0]
    with torch.no_grad():
        model(tokens_BS, targets_BS, documents)
    for handle in handles:
        handle.remove()
    hidden = found.pop("hidden")
    found["logits"] = hidden.flatten(0, -2)[:512] @ model.head_weight.detach().double().T
    return found


def _compute_root_mean_square(values: torch.Tensor) -> float:
    """Return the root mean square of the elements of `values`."""
    return math.sqrt(float(values.square().mean()))
