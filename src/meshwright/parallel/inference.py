"""Evaluation and generation with a model split over tp and pp ranks.

Each rank has the parameters of its stage (its tensor-parallel slices), without gradients or master weights, and the KV
cache of its layers. Messages between stages are those of the pipeline runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from meshwright.comm.collectives import all_reduce, broadcast
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model.cache import KeyValueCache
from meshwright.model.huggingface import CheckpointFiles, match_rows, read_row
from meshwright.model.transformer import Transformer
from meshwright.parallel.axes import axis_operations
from meshwright.parallel.flat_buffers import flat_layout
from meshwright.parallel.pipeline import Pipeline
from meshwright.parallel.stage_compute import MicroBatch
from meshwright.schedules.library import generate
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_path
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.refuse import refuse

TOKEN_SITE = "generation.token"
LOSS_SITE = "evaluation.loss"
_BALANCED_FOR = 2048  # tokens of a row for which stages are of equal work


def parse_inference_layout(text: str, config: ModelConfig) -> Layout:
    """Parse a layout string for evaluation or generation, which support tp and pp alone.

    A single new token cannot be split over ranks, so tp runs without sequence parallelism. Raises UserError for other
    axes and for a layout that does not fit the model.
    """
    layout = Layout.parse(text)
    reading = Layout(tp=layout.tp, tensor_sequence_parallel=layout.tp == 1, pp=layout.pp)
    if layout not in (reading, reading.with_(tensor_sequence_parallel=True)):
        raise UserError(f'layout "{layout}": evaluation and generation run on tpN and ppN alone, as in "tp2 pp2"')
    refuse(reading, config, batch=1)
    return reading


class SplitModel:
    """This rank's part of a model, loaded from a Hugging Face directory or checkpoint, its parameters cast to `dtype`.
    Raises UserError as `load_huggingface` does."""

    def __init__(self, directory: Path, mesh: Mesh, dtype: torch.dtype = torch.float32) -> None:
        files, self.config, self.mesh = CheckpointFiles(directory), config_from_path(directory), mesh
        table = parameter_table(self.config)
        program = generate("1f1b", mesh.pp.size, mesh.pp.size)  # as many micro-batches as fill it
        partition = Partition.of(program, self.config, table, min(_BALANCED_FOR, self.config.max_positions))
        self.stages = partition.stages
        self._pipeline = Pipeline(program, mesh.pp)
        held = partition.held(mesh.pp.rank)
        self.model = Transformer(
            self.config, axes=axis_operations(mesh), device=mesh.device, dtype=dtype, stages=held
        ).eval()
        names = match_rows(files, table, self.config)
        coordinates = mesh.layout.coordinates(mesh.rank)
        with torch.no_grad():
            for name in partition.units_at(mesh.pp.rank):
                unit = flat_layout(table, name, 1, mesh.layout, coordinates)
                flat = torch.zeros(unit.numel, dtype=dtype)
                unit.fill(flat, 0, lambda row: read_row(files, row, names))
                for placed, values in zip(unit.tensors, unit.views(flat), strict=True):
                    self.model.get_parameter(placed.tensor.name).copy_(values)

    def losses(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return the sum of the token losses of some micro-batches (nats), the same on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        size = self.mesh.pp.size
        with torch.no_grad():
            for first in range(0, len(micro_batches), size):
                forwards = _LossForwards(self, micro_batches[first : first + size])
                self._pipeline.run_forwards(forwards, len(forwards.micro_batches))
                total += forwards.total
        all_reduce(total, self.mesh.pp, LOSS_SITE)
        return float(total)

    def next_token(
        self, tokens_BS: torch.Tensor, cache: KeyValueCache | None, choose: Callable[[torch.Tensor], int]
    ) -> int:
        """Return the token that `choose` draws from the logits [V] after one sequence of tokens, the same on every
        rank. With a `cache` the tokens follow the cached ones. Ranks of tp have equal logits, so `choose` must draw
        alike on them."""
        with torch.no_grad():
            forward = _NextTokenForward(self, tokens_BS, cache)
            self._pipeline.run_forwards(forward, 1)
            token = torch.zeros(1, dtype=torch.int64, device=self.mesh.device)
            if forward.scores_V is not None:
                token.fill_(choose(forward.scores_V))
            broadcast(token, self.mesh.pp, TOKEN_SITE, source=self.mesh.pp.size - 1)
        return int(token)


class _ForwardOnlyCompute:
    """Forward-only implementation of `Compute` (parallel/pipeline.py)."""

    def __init__(self, split: SplitModel, micro_batches: Sequence[torch.Tensor]) -> None:
        self.split, self.tokens = split, micro_batches

    def buffer(self, stage: int, replica: int, micro_batch: int) -> torch.Tensor:
        """Return an uninitialised receive buffer for the input of `stage`, [B, S, H]."""
        model, tokens_BS = self.split.model, self.tokens[micro_batch]
        dtype = next(model.parameters()).dtype
        return torch.empty((*tokens_BS.shape, model.config.hidden), dtype=dtype, device=tokens_BS.device)

    def backward(self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None) -> torch.Tensor | None:
        """Raise AssertionError: inference has no backward pass."""
        raise AssertionError("nothing is trained here")

    input_gradient = backward

    def weight_gradient(self, stage: int, replica: int, micro_batch: int) -> None:
        """Raise AssertionError: inference has no backward pass."""
        raise AssertionError("nothing is trained here")


class _LossForwards(_ForwardOnlyCompute):
    """Pipeline forwards that add up the token losses of micro-batches in `total` (nats)."""

    def __init__(self, split: SplitModel, micro_batches: Sequence[MicroBatch]) -> None:
        super().__init__(split, [tokens_BS for tokens_BS, _, _ in micro_batches])
        self.micro_batches, self.total = micro_batches, 0.0

    def forward(self, stage: int, replica: int, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        """Run a stage on `x`; return its output, or None on the last stage, whose loss is added to `total`."""
        part = self.split.stages[stage]
        out = self.split.model.run_stage(part, x, *self.micro_batches[micro_batch]).x
        if not part.last:
            return out
        self.total += float(out)
        return None


class _NextTokenForward(_ForwardOnlyCompute):
    """Pipeline forward that stores the next-token logits of one sequence in `scores_V`."""

    def __init__(self, split: SplitModel, tokens_BS: torch.Tensor, cache: KeyValueCache | None) -> None:
        super().__init__(split, [tokens_BS])
        self.cache = cache
        self.scores_V: torch.Tensor | None = None

    def forward(self, stage: int, replica: int, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        """Run a stage on `x`; return its output, or None on the last stage, whose logits are stored in `scores_V`."""
        part, model = self.split.stages[stage], self.split.model
        out_BSH = model.hidden(self.tokens[0], cache=self.cache, stage=part, x_BSH=x)
        if not part.last:
            return out_BSH
        self.scores_V = model.scores(out_BSH[:, -1:])[0, -1]
        return None
