"""One device's answer: plain autograd on the same model, weights and batches, without any of `parallel/`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from meshwright.comm.mesh import Mesh
from meshwright.model.documents import Documents
from meshwright.model.initialise import initialise
from meshwright.model.pairs import Pairs
from meshwright.model.parameters import ParameterTable, parameter_table
from meshwright.model.preference import Preference
from meshwright.model.stages import whole_model
from meshwright.model.transformer import Transformer
from meshwright.parallel.context import part_of_rows
from meshwright.verify.problem import IGNORED, MOST_PAIRS, Batch, Problem, make_batch

Rows = dict[str, torch.Tensor]  # row name -> its values, 1-D, engine orientation, row-major


@dataclass
class Reference:
    """Losses, norms and gradients of every step, the weights before each and after the last, and the loss of one more
    batch under those. A step in `skipped` makes no update (its gradient was not finite somewhere)."""

    problem: Problem
    skipped: frozenset[int] = frozenset()
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Rows] = field(default_factory=list)
    weights: list[Rows] = field(default_factory=list)
    final_loss: float = math.nan
    _parts: dict[tuple[int, int], list[Rows]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        problem = self.problem
        self.table: ParameterTable = parameter_table(problem.config)
        dtype = getattr(torch, problem.dtype)
        self._model = Transformer(problem.config, dtype=dtype)
        initialise(self._model, self.table, problem.seed)
        for step in range(problem.steps):
            batch = make_batch(problem, step)
            self.weights.append(self._rows(gradients=False))
            loss = self._backward(batch, _terms(batch))
            gradients = self._rows(gradients=True)
            self.losses.append(loss)
            self.gradients.append(gradients)
            counted = [values for name, values in gradients.items() if not self.table.row(name).balances]
            self.norms.append(math.sqrt(sum(float(values.double().square().sum()) for values in counted)))
            if step not in self.skipped:
                with torch.no_grad():
                    for parameter in self._model.parameters():
                        assert parameter.grad is not None
                        parameter.sub_(parameter.grad, alpha=problem.learning_rate)
        self.weights.append(self._rows(gradients=False))
        batch = make_batch(problem, problem.steps)
        with torch.no_grad():
            self.final_loss = float(loss_sum(self._model, batch, self.problem.preference)) / _terms(batch)

    def parts(self, step: int, count: int) -> list[Rows]:
        """The gradient of a step split by ranks: what each of `count` equal shares of the batch contributes."""
        if (step, count) not in self._parts:
            self._set(self.weights[step])
            batch = make_batch(self.problem, step)
            rows = self.problem.batch // count
            parts = []
            for rank in range(count):
                self._backward(batch.rows(rank * rows, (rank + 1) * rows), _terms(batch))
                parts.append(self._rows(gradients=True))
            self._parts[step, count] = parts
        return self._parts[step, count]

    def _backward(self, batch: Batch, terms: int) -> float:
        self._model.zero_grad(set_to_none=True)
        loss = loss_sum(self._model, batch, self.problem.preference) / terms
        loss.backward()
        return float(loss.detach())

    def _rows(self, gradients: bool) -> Rows:
        rows = {}
        for tensor in self.table.tensors:
            parameter = self._model.get_parameter(tensor.name)
            values = parameter.grad if gradients else parameter.detach()
            assert values is not None
            for row in tensor.rows:
                rows[row.name] = values[row.offset : row.offset + row.engine_shape[0]].reshape(-1).clone()
        return rows

    def _set(self, rows: Rows) -> None:
        with torch.no_grad():
            for tensor in self.table.tensors:
                parameter = self._model.get_parameter(tensor.name)
                parameter.copy_(torch.cat([rows[row.name] for row in tensor.rows]).view(tensor.shape))


def loss_sum(model: Transformer, batch: Batch, preference: Preference | None = None) -> torch.Tensor:
    """The summed loss of a batch: over tokens, or over pairs of responses."""
    tokens, targets, documents = tensors_of(batch, model.axes)
    if preference is None:
        return model(tokens, targets, documents)  # type: ignore[no-any-return]
    assert documents.pairs is not None
    out, balance = model.run_stage(whole_model(model.config), None, tokens, targets, documents)
    loss = preference(out, documents.pairs).loss
    return loss if balance is None else loss + (balance - balance.detach())


def tensors_of(batch: Batch, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor, Documents]:
    """Tokens, targets and documents of what this rank has of a batch of whole rows."""
    tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
    documents = Documents.from_ids(batch.document_ids)
    if (pairs := _pairs(batch)) is not None:
        documents = documents.in_pairs(pairs)
    return part_of_rows(tokens, targets, documents, mesh)


def _pairs(batch: Batch) -> Pairs | None:
    if batch.reference is None:
        return None
    pairs = Pairs.from_ids(torch.from_numpy(batch.document_ids), most=MOST_PAIRS)
    return pairs.known_from(torch.from_numpy(batch.reference))


def _terms(batch: Batch) -> int:
    """What the loss of a batch is a mean over: targets, or pairs."""
    pairs = _pairs(batch)
    return max(1, int((batch.targets != IGNORED).sum() if pairs is None else pairs.count))
