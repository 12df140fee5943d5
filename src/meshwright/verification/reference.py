"""Single-device reference: autograd in float64 on full sequences, textbook optimizer updates, the documented sample
order. It shares no code with `training/` and `parallel/`."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.model.initialise import initial_value
from meshwright.quantization.formats import round_trip
from meshwright.spec.parameters import ParameterTable, parameter_table
from meshwright.verification.adapted_weights import merge_adapter_weights
from meshwright.verification.plain_model import count_responses, run_batch, score_responses
from meshwright.verification.problem import VALIDATION_SEQUENCES, Problem, TrainingSettings
from meshwright.verification.samples import Batch, make_sequences
from meshwright.verification.teaching import ReferenceTeacher

ParameterValues = dict[str, torch.Tensor]  # parameter entry -> its values, flattened as the model stores them
SCORES_AT_ONCE = 1 << 23  # maximum number of attention scores and logits of one forward pass


@dataclass
class Reference:
    """Expected results of a training problem. The constructor computes them by training on one device.

    Attributes:
        losses, norms: Loss and gradient norm of every step.
        gradients: Gradients of every step by parameter (for a router bias: its experts' excess loads per loss term).
        weights: Trained master weights by parameter, before each step and after the last.
        frozen: The frozen parameters of a model with an adapter.
        optimizer: Optimizer state after the last step by kind ("exp_avg" ...) and parameter.
        scales, finite_steps: Loss scale, and number of finite steps since the loss scale last changed, before each step
            and after the last step.
        updates: Number of updates made (the step with NaN activations makes none).
        final_loss: Validation loss after the last step.
    """

    problem: Problem
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[ParameterValues] = field(default_factory=list)
    weights: list[ParameterValues] = field(default_factory=list)
    frozen: ParameterValues = field(default_factory=dict)
    optimizer: dict[str, ParameterValues] = field(default_factory=dict)
    scales: list[float] = field(default_factory=list)
    finite_steps: list[int] = field(default_factory=list)
    updates: int = 0
    final_loss: float = math.nan
    _taught: ReferenceTeacher | None = field(default=None, repr=False)
    _parts: dict[tuple[int, int], list[ParameterValues]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Train all steps of the problem and store the results."""
        problem, training = self.problem, self.problem.training
        self.table: ParameterTable = parameter_table(problem.config)
        kinds = ("exp_avg", "exp_avg_sq") if training.optimizer == "adamw" else ("momentum",) * (training.momentum > 0)
        initial = {
            entry.name: (value.T if entry.transposed else value).reshape(-1)
            for entry in self.table.entries
            for value in (initial_value(entry, problem.seed),)
        }
        self.frozen = {
            entry.name: round_trip(entry.packed, value) if entry.packed else value
            for entry in self.table.entries
            if not entry.trainable
            for value in (initial.pop(entry.name),)
        }
        weights = self._round_to_master(initial)
        if problem.teaching is not None:
            teacher = problem.teaching.make_weights(problem.seed + 1, getattr(torch, problem.dtype))
            self._taught = ReferenceTeacher(problem.teaching, teacher)
        self.optimizer = {kind: {name: torch.zeros_like(w) for name, w in weights.items()} for kind in kinds}
        self.weights.append(weights)
        scale, finite_in_a_row = training.loss_scale, 0
        for step in range(problem.steps):
            self._record_scale(scale, finite_in_a_row)
            loss, gradients = self._compute_gradients(weights, self.make_batch(step))
            counted = [values for name, values in gradients.items() if not self.table.entry(name).balances]
            norm = math.sqrt(sum(float(values.square().sum()) for values in counted))
            self.losses.append(loss)
            self.norms.append(norm)
            self.gradients.append(gradients)
            if step != problem.nan_step:
                weights = self._apply_update(weights, gradients, norm, step)
            self.weights.append(weights)
            # Micikevicius et al. 2018, arXiv:1710.03740, section 3.2: halved on overflow, doubled after finite steps.
            finite_in_a_row = 0 if step == problem.nan_step else finite_in_a_row + 1
            if training.loss_scale_every and finite_in_a_row == 0:
                scale /= 2
            elif training.loss_scale_every and finite_in_a_row == training.loss_scale_every:
                scale, finite_in_a_row = 2 * scale, 0
        self._record_scale(scale, finite_in_a_row)
        first = problem.train_sequences
        batch = make_sequences(problem, range(first, first + VALIDATION_SEQUENCES))
        self.final_loss = self._compute_loss(weights, batch)

    def make_batch(self, step: int) -> Batch:
        """Return the batch of sequences of step `step` (from 0), in the sample order of the training split."""
        problem = self.problem
        numbers = range(step * problem.batch, (step + 1) * problem.batch)
        return make_sequences(
            problem, [compute_sample_index(number, problem.train_sequences, problem.seed) for number in numbers]
        )

    def split_gradient(self, step: int, count: int) -> list[ParameterValues]:
        """Split the gradient of step `step` (from 0) into `count` contributions, one for each of `count` equal parts of
        the batch (consecutive sequences). Return one dict {parameter: contribution} per part; the contributions sum to
        the gradient."""
        if (step, count) not in self._parts:
            batch = self._estimate_kl(self.weights[step], self.make_batch(step))
            rows = self.problem.batch // count
            shares = [batch.slice_sequences(rank * rows, (rank + 1) * rows) for rank in range(count)]
            terms = self._count_terms(batch)
            self._parts[step, count] = [
                self._compute_gradients(self.weights[step], share, terms)[1] for share in shares
            ]
        return self._parts[step, count]

    def _record_scale(self, scale: float, finite_steps: int) -> None:
        """Append `scale`, the loss scale, and `finite_steps`, the number of finite steps since its last change, to the
        results."""
        self.scales.append(scale)
        self.finite_steps.append(finite_steps)

    def compute_expected_counters(self, steps: int) -> dict[str, Any]:
        """Return the expected checkpoint counters by name (steps, samples, skipped steps ...) after `steps` steps."""
        poisoned = self.problem.nan_step
        skipped = int(poisoned is not None and poisoned < steps)
        scale = {"value": self.scales[steps], "finite_steps": self.finite_steps[steps]}
        return {
            "step": steps,
            "samples": steps * self.problem.batch,
            "optimizer_steps": steps - skipped,
            "skipped_steps": skipped,
            "skipped_in_a_row": int(poisoned is not None and poisoned == steps - 1),
            "loss_scale": scale if self.problem.training.loss_scale_every else None,
        }

    # --- loss and gradient

    def _compute_gradients(
        self, weights: ParameterValues, batch: Batch, terms: int | None = None
    ) -> tuple[float, ParameterValues]:
        """Return (mean loss, gradients by parameter) of a batch. weights: master weights, which are rounded to the
        parameter dtype first. terms: number of loss terms by which loss and gradients are divided; None: the number of
        loss terms in the batch."""
        problem, batch = self.problem, self._estimate_kl(weights, batch)
        leaves = self._make_leaves(weights)
        for name in weights:
            leaves[name].requires_grad_()
        tensors = self._build_engine_tensors(leaves)
        terms = terms or self._count_terms(batch)
        loss, contributes = 0.0, False
        excess_loads: dict[str, torch.Tensor] = {}
        for part in self._split_batch(batch):
            found = run_batch(problem.config, tensors, part, problem.preference, self._taught)
            if found.objective.requires_grad:  # False for sequences without preference pairs
                (found.objective / terms).backward(retain_graph=True)  # through the concatenation, which parts share
                contributes = True
            loss += float(found.loss) / terms
            for name, load_E in found.excess_loads.items():
                excess_loads[name] = excess_loads.get(name, torch.zeros_like(load_E)) + load_E / terms
        gradients = {}
        for entry in self.table.trained.entries:
            gradient = excess_loads.get(entry.tensor, leaves[entry.name].grad)
            if gradient is None:
                assert not contributes, f"{entry.name} does not contribute to the loss"
                gradient = torch.zeros_like(leaves[entry.name])
            gradients[entry.name] = gradient.reshape(-1).clone()
        return loss, gradients

    @torch.no_grad()
    def _compute_loss(self, weights: ParameterValues, batch: Batch) -> float:
        """Return the mean loss of a batch in nats per loss term. weights: master weights, which are rounded to the
        parameter dtype first."""
        tensors = self._build_engine_tensors(self._make_leaves(weights))
        batch = self._estimate_kl(weights, batch)
        losses = self.problem.preference, self._taught
        found = [run_batch(self.problem.config, tensors, part, *losses) for part in self._split_batch(batch)]
        return sum(float(each.loss) for each in found) / max(1, sum(each.terms for each in found))

    def _count_terms(self, batch: Batch) -> int:
        """Return the number of loss terms in a batch: target tokens, pairs of responses, or single responses."""
        if self.problem.preference is None:
            return max(1, int((batch.targets >= 0).sum()))
        if self.problem.preference.responses == 1:
            return max(1, int(count_responses(batch).sum()))
        return max(1, sum((int(ids.max()) + 1) // 2 for ids in batch.document_ids))

    def _estimate_kl(self, weights: ParameterValues, batch: Batch) -> Batch:
        """Return the batch with KTO's estimate of the KL divergence: the mean of log p / p_ref (model, reference
        policy) over the responses of `batch.mismatched`, at least 0 (arXiv:2402.01306, section 4.1). For losses that
        need no such estimate return the batch unchanged. weights: master weights."""
        if batch.mismatched is None:
            return batch
        tensors = self._build_engine_tensors(self._make_leaves(weights))
        parts = self._split_batch(batch.mismatched)
        scores = [
            value for part in parts for row in score_responses(self.problem.config, tensors, part) for value in row
        ]
        return replace(batch, kl=max(0.0, sum(scores) / max(1, len(scores))), mismatched=None)

    def _split_batch(self, batch: Batch) -> list[Batch]:
        """Split a batch into smaller batches of consecutive sequences, so that the attention scores and logits of each
        smaller batch fit into memory."""
        config, (rows, sequence) = self.problem.config, batch.tokens.shape
        at_once = max(1, SCORES_AT_ONCE // (sequence * max(config.vocabulary, config.heads * sequence)))
        return [batch.slice_sequences(start, min(rows, start + at_once)) for start in range(0, rows, at_once)]

    def round_to_parameters(self, weights: ParameterValues) -> ParameterValues:
        """Round master weights (parameter -> tensor) to the dtype of the parameters; return parameter -> rounded
        tensor."""
        return {name: values.to(getattr(torch, self.problem.dtype)) for name, values in weights.items()}

    def _make_leaves(self, weights: ParameterValues) -> dict[str, torch.Tensor]:
        """Return the values of all parameters, including frozen parameters, as new float64 tensors by name, rounded to
        the parameter dtype. Gradients can be computed for them (leaves of the autograd graph). weights: master weights
        of the trained parameters."""
        return {
            name: values.double().clone() for name, values in self.round_to_parameters(self.frozen | weights).items()
        }

    def _build_engine_tensors(self, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Concatenate the parameters `leaves` into the tensors of the training engine, which fuses some of them (query,
        key and value; gate and up), with the adapter merged into the weights. Return {name in the training engine:
        float64 tensor}."""
        merged = merge_adapter_weights(self.table, self.problem.config.adapter, leaves)
        return {
            tensor.name: torch.cat([merged[entry.name] for entry in tensor.entries])
            for tensor in self.table.tensors
            if tensor.entries[0].name in merged
        }

    def _round_to_master(self, weights: ParameterValues) -> ParameterValues:
        """Round float64 values (parameter -> tensor) to the dtype of the master weights; return them as float64 by
        parameter."""
        return {
            name: values.to(getattr(torch, self.problem.resolved_master_dtype)).double()
            for name, values in weights.items()
        }

    # --- update

    def _apply_update(
        self, weights: ParameterValues, gradients: ParameterValues, norm: float, step: int
    ) -> ParameterValues:
        """Apply one optimizer update; return the new master weights by parameter. `gradients` (by parameter) are first
        clipped by their global norm, `norm` (as in `torch.nn.utils.clip_grad_norm_`). step: training step, from 0.

        SGD has momentum and coupled weight decay; AdamW follows arXiv:1711.05101, algorithm 2. Only matrices have
        weight decay. Router biases move by a fixed rate against the sign of their excess load (arXiv:2408.15664,
        algorithm 1).
        """
        training = self.problem.training
        rate = learning_rate(step, self.problem.steps, training)
        scale = min(1.0, training.clip / (norm + 1e-6)) if training.clip else 1.0
        self.updates += 1
        after = {}
        for name, w in weights.items():
            entry = self.table.entry(name)
            if entry.balances:  # arXiv:2408.15664, algorithm 1
                after[name] = w - training.router_bias_rate * gradients[name].round(decimals=12).sign()
                continue
            g, decay = gradients[name] * scale, training.weight_decay if len(entry.shape) >= 2 else 0.0
            if training.optimizer == "adamw":
                (beta1, beta2), t = training.betas, self.updates
                m = self.optimizer["exp_avg"][name] = beta1 * self.optimizer["exp_avg"][name] + (1 - beta1) * g
                v = self.optimizer["exp_avg_sq"][name] = (
                    beta2 * self.optimizer["exp_avg_sq"][name] + (1 - beta2) * g * g
                )
                direction = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + training.epsilon)
                after[name] = w - rate * decay * w - rate * direction
            else:
                g = g + decay * w
                if training.momentum:
                    g = self.optimizer["momentum"][name] = training.momentum * self.optimizer["momentum"][name] + g
                after[name] = w - rate * g
        return self._round_to_master(after)


def learning_rate(step: int, steps: int, training: TrainingSettings) -> float:
    """Return the learning rate of step `step` (from 0) in a run of `steps` steps. After a linear warm-up the learning
    rate is constant, or decays linearly or along a cosine to the minimum. training: rates and schedule."""
    peak, warmup = training.learning_rate, training.warmup
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    minimum = peak * training.minimum_learning_rate
    match training.schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - done) + minimum * done
        case _:
            return minimum + (peak - minimum) * (1 + math.cos(math.pi * done)) / 2


def compute_sample_index(number: int, sequences: int, seed: int) -> int:
    """Return the index, in the training split, of the sample that training reads at position `number` (from 0, counted
    over all epochs). The order is a new permutation of `sequences` samples in every epoch: a Feistel network of eight
    rounds with cycle walking, seeded by `seed` and the epoch (docs/data.md)."""
    epoch, place = divmod(number, sequences)
    digest = hashlib.sha512(f"meshwright sample order, seed {seed}, epoch {epoch}".encode()).digest()
    keys = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, 64, 8)]
    half = next(bits for bits in itertools.count(2) if 4**bits >= sequences)
    while True:
        left, right = place >> half, place % 2**half
        for key in keys:
            left, right = right, left ^ (_splitmix64(right + key) % 2**half)
        place = left * 2**half + right
        if place < sequences:
            return place


def _splitmix64(value: int) -> int:
    """Return a 64-bit hash of the 64-bit integer `value`: the finalizer of SplitMix64."""
    value %= 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)
