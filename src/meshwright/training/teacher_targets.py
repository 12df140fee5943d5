"""The teacher's side of a micro-batch in distillation: logits, computed chunk by chunk from its final hidden states, or
its most probable tokens from a cache, and the outputs of some of its layers.

With tensor parallelism each rank holds a vocabulary slice of student and teacher; log-sum-exps and the divergence's
sums are all-reduced in the forward pass alone.

Shapes: T tokens, C tokens of a chunk, V vocabulary (of this rank), K most probable tokens, H hidden of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from meshwright.model.axis_operations import TensorOperations
from meshwright.model.loss import IGNORED, Chunk, OutputHead, cap_logits_
from meshwright.model.precision import at_least_float32
from meshwright.spec.chunks import split_loss_chunks
from meshwright.training.distillation_loss import DistillationLoss

SITES = ("distill.maximum", "distill.sum", "distill.divergence")
TOP_K_SITE = "distill.top_k"
HIDDEN_SITE = "distill.hidden"
_WIDE_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Logits that are converted to float64 at a time, by device."""
_MIN_LOG_PROBABILITY = -87.0  # log of the smallest probability of "all other tokens": of float32


@dataclass(slots=True)
class TeacherTargets:
    """Targets that the teacher of a distillation sets for one micro-batch on this rank.

    loss: settings of the distillation loss. vocabulary: number of token IDs that teacher and student have in common,
    whose distributions are compared; None: all. metric_sums: float64 [3], sums over target tokens of the cross-entropy,
    the divergence and the squared difference of hidden states; every forward pass adds to them. layers: {index of a
    teacher's layer: its output [B, S, H]} (with sequence parallelism this tp rank's slice of the tokens), compared with
    the student's hidden states.

    Set if the teacher model runs with the student: states_TH: the teacher's final hidden states; head: the part of
    its output head for this rank's vocabulary slice. Set if targets are cached: top_ids_TK: the teacher's K most
    probable tokens (int64); top_log_p_TO: log-probabilities of O = K + 1 outcomes, these K tokens and, last, all other
    tokens together, at the loss's temperature.

    source: function that sets these attributes, called by `fill` just before the student's forward pass; None: they are
    already set. frees: True to release the teacher's states after the loss, possible if the micro-batch's backward
    follows its forward immediately.
    """

    loss: DistillationLoss
    metric_sums: torch.Tensor
    states_TH: torch.Tensor | None = None
    head: OutputHead | None = None
    top_ids_TK: torch.Tensor | None = None
    top_log_p_TO: torch.Tensor | None = None
    layers: dict[int, torch.Tensor] = field(default_factory=dict)
    vocabulary: int | None = None
    source: Callable[[TeacherTargets], None] | None = None
    frees: bool = False

    def fill(self) -> None:
        """Set the teacher's hidden states or cached tokens by calling `source`, which runs the teacher model or reads
        its cache; do nothing if they are already set. Collective if the teacher model is run."""
        if self.source is not None and self.states_TH is None and self.top_ids_TK is None:
            self.source(self)

    def make_chunk(self, *arguments: Any) -> Chunk:
        """Build the object that computes the distillation loss of one chunk of tokens. arguments: arguments of
        `model.loss.Chunk`."""
        return (LogitChunk if self.top_ids_TK is None else TopKChunk)(*arguments)

    def compute_hidden_loss(self, model: Any, targets_BS: torch.Tensor) -> torch.Tensor | float:
        """Return the loss that compares hidden states of student and teacher, times its weight and summed over target
        tokens (scalar); 0 if no layers are compared. The teacher's states are released afterwards if `frees` is True.

        model: the student after its forward pass, whose attribute `layer_outputs` has the outputs of the compared
        layers. targets_BS: target token IDs; -100 for ignored tokens."""
        layers = self.layers
        if self.frees:
            self.states_TH = self.head = self.top_ids_TK = self.top_log_p_TO = None
            self.layers = {}
        pairs, tensor = self.loss.layer_map, model.axes.tensor
        if not pairs:
            return 0.0
        if tensor.sequence_parallel:
            targets_BS = targets_BS.chunk(tensor.size, dim=1)[tensor.rank]
        counted_BS = targets_BS != IGNORED
        total = torch.zeros((), dtype=at_least_float32(layers[pairs[0][1]].dtype), device=targets_BS.device)
        for student, teacher in pairs:
            x_BSH, model.layer_outputs[student] = model.layer_outputs[student], None
            wanted_BSH = layers[teacher]
            if wanted_BSH.shape[1] > x_BSH.shape[1]:  # the teacher is not sharded over tp
                wanted_BSH = wanted_BSH.chunk(tensor.size, dim=1)[tensor.rank]
            wide = at_least_float32(x_BSH.dtype)
            found_BSH = model.projections[str(student)](x_BSH).to(wide)
            error_BS = (found_BSH - wanted_BSH.to(wide)).square().mean(dim=-1)
            total = total + (error_BS * counted_BS).sum() / len(pairs)
        if tensor.sequence_parallel:
            total = tensor.reduce(total, HIDDEN_SITE)
        self.metric_sums[2] += total.detach()
        return self.loss.hidden_weight * total


class _DistillationChunk(Chunk):
    """Logits and distillation losses of a chunk of C tokens; base class for two kinds of teacher targets. The loss of a
    token is a H + (1 - a) T² D. H is the cross-entropy, a the `mixing`, T the temperature, and D the divergence from
    the teacher's distribution, which a subclass computes.

    Arguments: tokens: slice that selects the chunk from all T tokens. logits_CV: logits of this rank's V token IDs,
    later overwritten. targets_C: target token IDs, -100 for ignored tokens. head: student's output head, which has the
    teacher's targets. known_KC: K values of each token that the forward pass has saved for backward: the two values of
    `Chunk`, then the values that `_all_reduce_divergence` returned; None in forward.
    """

    _divergence_C: torch.Tensor

    def __init__(
        self, tokens: slice, logits_CV: torch.Tensor, targets_C: torch.Tensor, head: OutputHead,
        known_KC: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(tokens, logits_CV, targets_C, head, None if known_KC is None else known_KC[:2])
        self._teacher: TeacherTargets = head.teacher
        self._loss, self._head = self._teacher.loss, head
        self._prepare_teacher(tokens)
        if known_KC is None:
            self.known += self._all_reduce_divergence(head.tensor)
            metric_sums = torch.stack([self.losses_C, self._divergence_C * self._counted_C]).double().sum(dim=1)
            self._teacher.metric_sums[:2] += metric_sums
            soft = (1 - self._loss.mixing) * self._loss.temperature**2
            self.losses_C = self._loss.mixing * self.losses_C + soft * self._divergence_C * self._counted_C
        else:
            self.known += list(known_KC[2:])

    def _prepare_teacher(self, tokens: slice) -> None:
        """Compute the teacher's targets of the chunk and store them in attributes of the subclass. `LogitChunk` stores
        logits of the teacher model, `TopKChunk` log-probabilities from the cache. No communication. tokens: slice that
        selects the chunk from all T tokens."""
        raise NotImplementedError

    def _all_reduce_divergence(self, tensor: TensorOperations) -> list[torch.Tensor]:
        """Compute the divergence of each token by all-reduces over tp, and set `_divergence_C` to it. Return the
        tensors [C], such as log-sum-exps, that `_divergence_gradient` needs in backward. tensor: communication of tp.
        """
        raise NotImplementedError

    def _divergence_gradient(self, part: slice) -> torch.Tensor:
        """Return the gradient of the divergence with respect to the student's logits / T, [P, V], for the P tokens of
        the chunk in the slice `part`."""
        raise NotImplementedError

    def _scale_logits(self, part: slice) -> torch.Tensor:
        """Return the student's logits divided by the temperature, [P, V], in float32 or float64, for the P tokens of
        the chunk in the slice `part`."""
        return self._mask_padding(self._logits_CV[part].to(self._counted_C.dtype) / self._loss.temperature)

    def _mask_padding(self, scaled_PV: torch.Tensor) -> torch.Tensor:
        """Mask in place the logits of token IDs that student and teacher do not both have: set them to the lowest
        finite number, which gives a probability of 0. Return `scaled_PV`, logits / T of P tokens over this rank's
        vocabulary slice."""
        if (vocabulary := self._teacher.vocabulary) is not None:
            scaled_PV[:, max(0, vocabulary - self._head.first_token) :] = torch.finfo(scaled_PV.dtype).min
        return scaled_PV

    def differentiate(self, factors_C: torch.Tensor | None = None) -> torch.Tensor:
        """Overwrite the chunk's logits with their gradients (of the distillation loss), and return the gradients, [C,
        V]. factors_C: factor on the loss of each token; None: 1."""
        factors_C = torch.ones_like(self._counted_C) if factors_C is None else factors_C
        # T² times the derivative 1 / T of logits / T.
        soft_C = (1 - self._loss.mixing) * self._loss.temperature * self._counted_C * factors_C
        pieces = [self._scaled_gradient(part, soft_C) for part in self._token_slices()]
        super().differentiate(factors_C * self._loss.mixing)
        for part, piece in zip(self._token_slices(), pieces, strict=True):
            self._logits_CV[part] += piece
        return self._logits_CV

    def _scaled_gradient(self, part: slice, factors_C: torch.Tensor) -> torch.Tensor:
        """Return T times the gradient of the divergence with respect to the student's logits, [P, V], in the dtype of
        the logits, for the P tokens of the chunk in the slice `part`. factors_C: factor on the gradient of each token
        of the chunk."""
        piece = self._divergence_gradient(part) * factors_C[part, None]
        if self._softcap:
            piece *= 1 - (self._logits_CV[part].to(piece.dtype) / self._softcap).square()
        return piece.to(self._logits_CV.dtype)


class LogitChunk(_DistillationChunk):
    """Chunk of tokens in the distillation loss for a teacher model that runs with the student (no cached targets).
    The teacher's logits are computed for the chunk from its final hidden states; the divergence covers the whole
    vocabulary."""

    def _prepare_teacher(self, tokens: slice) -> None:
        """Compute the teacher's logits of the chunk on this rank's vocabulary slice, with the teacher's softcap
        applied, and store them in the attribute `_wanted_CV`. tokens: slice that selects the chunk from all T tokens.
        """
        states_TH, head = self._teacher.states_TH, self._teacher.head
        assert states_TH is not None and head is not None
        logits_CV = states_TH[tokens] @ head.weight_VH.T
        self._wanted_CV = cap_logits_(logits_CV, head.softcap) if head.softcap else logits_CV

    def _log_probabilities(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities (of teacher, of student) over this rank's vocabulary slice, [P, V] each, for the
        P tokens of the chunk in the slice `part`."""
        _, _, log_q_sum_C, log_p_sum_C, *_ = self.known
        return self._scale_wanted(part) - log_p_sum_C[part, None], self._scale_logits(part) - log_q_sum_C[part, None]

    def _scale_wanted(self, part: slice) -> torch.Tensor:
        """Return the teacher's logits divided by the temperature, [P, V], in float32 or float64, for the P tokens of
        the chunk in the slice `part`."""
        return self._mask_padding(self._wanted_CV[part].to(self._counted_C.dtype) / self._loss.temperature)

    def _all_reduce_divergence(self, tensor: TensorOperations) -> list[torch.Tensor]:
        """Compute the divergence over the whole vocabulary by all-reduces over tp, and set `_divergence_C` to it.
        Return three tensors [C] for `_divergence_gradient`: the log-sum-exps of the student and of the teacher, and the
        sum over the vocabulary of q dD/dq (second result of `DistillationLoss.terms`). tensor: communication of tp."""
        parts = [
            torch.stack([
                torch.logsumexp(self._scale_logits(part), dim=1),
                torch.logsumexp(self._scale_wanted(part), dim=1),
            ])
            for part in self._token_slices()
        ]  # fmt: skip
        sums_2C = _all_reduce_log_sum_exp(torch.cat(parts, dim=1), tensor)
        self.known = [*self.known[:2], *sums_2C]
        totals = []
        for part in self._token_slices():
            # Without a name that would keep the terms of a slice while those of the next one are computed.
            totals.append(torch.stack([each.sum(dim=1) for each in self._loss.terms(*self._log_probabilities(part))]))
        totals_2C = torch.cat(totals, dim=1)
        tensor.all_reduce(totals_2C, SITES[2])
        self._divergence_C, weight_C = totals_2C
        self.known = self.known[:2]
        return [*sums_2C, weight_C]

    def _divergence_gradient(self, part: slice) -> torch.Tensor:
        """Return the gradient of the divergence with respect to the student's logits / T, [P, V], for the P tokens of
        the chunk in the slice `part`."""
        log_p, log_q = self._log_probabilities(part)
        return self._loss.terms(log_p, log_q)[1] - log_q.exp() * self.known[4][part, None]


class TopKChunk(_DistillationChunk):
    """Chunk of tokens whose divergence has K + 1 outcomes, for cached targets: the teacher's K most probable tokens,
    and all other tokens together."""

    def _prepare_teacher(self, tokens: slice) -> None:
        """Select the chunk's cached log-probabilities, and find which of the teacher's K cached tokens are in this
        rank's vocabulary slice; store both in attributes. tokens: slice that selects the chunk from all T tokens."""
        ids_TK, top = self._teacher.top_ids_TK, self._teacher.top_log_p_TO
        assert ids_TK is not None and top is not None
        local_CK = ids_TK[tokens] - self._head.first_token
        self._held_CK = (local_CK >= 0) & (local_CK < self._logits_CV.shape[1])
        self._places_CK = torch.where(self._held_CK, local_CK, 0)
        self._log_p_CO = top[tokens].to(self._counted_C.dtype).clamp(min=_MIN_LOG_PROBABILITY)

    def _log_sum_exps(self, part: slice) -> list[torch.Tensor]:
        """Return two log-sum-exps [P] of the student's logits / T over this rank's vocabulary slice: over all tokens,
        and over the tokens that are not among the teacher's K. part: slice that selects P tokens of the chunk.
        """
        scaled = self._scale_logits(part)
        total = torch.logsumexp(scaled, dim=1)
        tokens, ranks = self._held_CK[part].nonzero(as_tuple=True)
        scaled[tokens, self._places_CK[part][tokens, ranks]] = torch.finfo(scaled.dtype).min
        return [total, torch.logsumexp(scaled, dim=1)]

    def _gather_top_k(self, part: slice) -> torch.Tensor:
        """Return the student's logits / T of the teacher's K tokens, [P, K]; 0 for tokens outside of this rank's
        vocabulary slice. part: slice that selects P tokens of the chunk."""
        return self._scale_logits(part).gather(1, self._places_CK[part]) * self._held_CK[part]

    def _all_reduce_divergence(self, tensor: TensorOperations) -> list[torch.Tensor]:
        """Compute the divergence over the K + 1 outcomes by all-reduces over tp, and set `_divergence_C` to it. Return
        three tensors [C] for `_divergence_gradient`: the student's log-sum-exp; the sum over outcomes of a = q dD/dq
        (second result of `DistillationLoss.terms`); and a / q of the outcome "all other tokens". q: an outcome's
        probability under the student. tensor: communication of tp.
        """
        parts = [torch.stack(self._log_sum_exps(part)) for part in self._token_slices()]
        log_sum_C, log_others_C = _all_reduce_log_sum_exp(torch.cat(parts, dim=1), tensor)
        found_CK = torch.cat([self._gather_top_k(part) for part in self._token_slices()])
        tensor.all_reduce(found_CK, TOP_K_SITE)
        log_q_CK = found_CK - log_sum_C[:, None]
        # Summed, not 1 minus the sum of the K: that would round a small probability to nothing.
        rest_C = (log_others_C - log_sum_C).clamp(min=_MIN_LOG_PROBABILITY)
        log_q_CO = torch.cat([log_q_CK, rest_C[:, None]], dim=1)
        cost_CO, weights_CO = self._loss.terms(self._log_p_CO, log_q_CO)
        self._divergence_C = cost_CO.sum(dim=1)
        weight_C, rest_C = weights_CO.sum(dim=1), weights_CO[:, -1] / log_q_CO[:, -1].exp()
        return [log_sum_C, weight_C, rest_C]

    def _divergence_gradient(self, part: slice) -> torch.Tensor:
        """Return the gradient of the divergence with respect to the student's logits / T, [P, V], for the P tokens of
        the chunk in the slice `part`."""
        _, _, log_sum_C, weight_C, rest_C = (each[part] for each in self.known)
        gradient = (self._scale_logits(part) - log_sum_C[:, None]).exp() * (rest_C - weight_C)[:, None]
        log_q_CK = self._gather_top_k(part) - log_sum_C[:, None]
        weights_CK = self._loss.terms(self._log_p_CO[part, :-1], log_q_CK)[1]
        tokens, ranks = self._held_CK[part].nonzero(as_tuple=True)
        exact_CK = weights_CK - log_q_CK.exp() * weight_C[:, None]
        gradient[tokens, self._places_CK[part][tokens, ranks]] = exact_CK[tokens, ranks]
        return gradient


def _all_reduce_log_sum_exp(values_NC: torch.Tensor, tensor: TensorOperations) -> torch.Tensor:
    """Return log Σ exp(value), [N, C], where the sum is over the `values_NC` [N, C] of all tp ranks. tensor:
    communication of tp."""
    highest_NC = values_NC.clone()
    tensor.all_reduce(highest_NC, SITES[0], op="max")
    sums_NC = (values_NC - highest_NC).exp()
    tensor.all_reduce(sums_NC, SITES[1])
    return highest_NC + sums_NC.log()


@torch.no_grad()
def top_log_probabilities(
    states_TH: torch.Tensor, head: OutputHead, temperature: float, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each of T tokens, the K most probable next tokens. The first result is their IDs [T, K] (int64), the
    second their log-probabilities [T, K + 1] (float64), the last of which belongs to all other tokens together. With
    tensor parallelism the results are equal on all tp ranks. Collective.

    states_TH: input of the output head. head: output head, on this rank's vocabulary slice. temperature: divisor of the
    logits. top_k: K."""
    tokens, width = len(states_TH), len(head.weight_VH)
    ids_TK = torch.empty(tokens, top_k, dtype=torch.int64, device=states_TH.device)
    log_p_TO = torch.empty(tokens, top_k + 1, dtype=torch.float64, device=states_TH.device)
    start = 0
    for chunk in split_loss_chunks(tokens, width, states_TH.device.type):
        logits_CV = states_TH[start : start + chunk] @ head.weight_VH.T
        if head.softcap:
            cap_logits_(logits_CV, head.softcap)
        at_once = max(1, _WIDE_LOGITS[states_TH.device.type] // width)
        for first in range(0, chunk, at_once):
            scaled_PV = logits_CV[first : first + at_once].double() / temperature
            here = slice(start + first, start + first + len(scaled_PV))
            ids_TK[here], log_p_TO[here] = _find_top_k(scaled_PV, head, top_k)
        start += chunk
    return ids_TK, log_p_TO


def _find_top_k(scaled_PV: torch.Tensor, head: OutputHead, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `top_k` = K most probable tokens of each of P tokens: their IDs [P, K], and log-probabilities [P, K +
    1], the last of which belongs to all other tokens together. scaled_PV: logits / T over this rank's vocabulary slice;
    overwritten. head: output head, which has the slice's first token ID and the communication over tp. Collective."""
    tensor, lowest = head.tensor, torch.finfo(scaled_PV.dtype).min
    log_sum_P = _all_reduce_log_sum_exp(torch.logsumexp(scaled_PV, dim=1)[None], tensor)[0]
    best_PK, local_PK = scaled_PV.topk(min(top_k, scaled_PV.shape[1]), dim=1)
    missing = top_k - best_PK.shape[1]  # of a slice with fewer tokens than K
    best_PK, ids_PK = F.pad(best_PK, (0, missing), value=lowest), F.pad(local_PK + head.first_token, (0, missing))
    best_PK, order_PK = tensor.gather(best_PK, TOP_K_SITE, 1).topk(top_k, dim=1)
    ids_PK = tensor.gather(ids_PK, TOP_K_SITE, 1).gather(1, order_PK)
    held_PK = (ids_PK >= head.first_token) & (ids_PK < head.first_token + scaled_PV.shape[1])
    tokens, places = held_PK.nonzero(as_tuple=True)
    scaled_PV[tokens, ids_PK[tokens, places] - head.first_token] = lowest
    # Summed, not 1 minus the sum of the K: that would round a small probability to nothing.
    others_P = _all_reduce_log_sum_exp(torch.logsumexp(scaled_PV, dim=1)[None], tensor)[0]
    log_p_PO = torch.cat([best_PK, others_P[:, None]], dim=1) - log_sum_P[:, None]
    log_p_PO[:, -1].clamp_(min=_MIN_LOG_PROBABILITY)
    return ids_PK, log_p_PO
