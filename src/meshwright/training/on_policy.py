"""On-policy sequences of distillation: the student continues prompts token by token, with a KV cache (Agarwal et al.
2023, arXiv:2306.13649, algorithm 1).

A token depends on its logits and on a uniform number keyed by (seed, step, sequence, position), not on the layout.

Shapes: B sequences, S tokens of each, N query heads, K key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.model.documents import Documents
from meshwright.model.loss import IGNORED
from meshwright.model.precision import at_least_float32
from meshwright.model.transformer import Transformer
from meshwright.model.units import Units
from meshwright.parallel.stage_compute import MicroBatch
from meshwright.spec.config import ModelConfig

_STEP, _TOKENS = 1, 2  # purposes of random numbers


def is_on_policy_step(fraction: float, seed: int, step: int) -> bool:
    """Return True if the step with index `step` (from 0) trains the student on texts that it has sampled itself
    (on-policy distillation). The decision is random with probability `fraction`, and seeded by `seed` and `step`, so
    that all ranks decide alike."""
    return bool(np.random.default_rng([seed, step, _STEP]).random() < fraction)


def find_prompts(micro_batch: MicroBatch, text_tokens: int | None) -> list[torch.Tensor]:
    """Return the prompt of each sequence of `micro_batch`, as token IDs [tokens].

    text_tokens: None if the sequences are records of prompts and responses; a prompt is then the tokens up to the first
    target (the whole sequence if it has none). For plain text, the number of tokens after which the prompt ends; the
    prompt begins with the document that contains its last token.
    """
    tokens_BS, targets_BS, documents = micro_batch
    prompts = []
    for row, tokens_S in enumerate(tokens_BS):
        start, stop = 0, text_tokens
        if stop is None:
            trained = (targets_BS[row] != IGNORED).nonzero()
            stop = int(trained[0]) + 1 if len(trained) else len(tokens_S)
        elif documents.starts_BS is not None:
            start = int(documents.starts_BS[row, stop - 1])
        prompts.append(tokens_S[start:stop])
    return prompts


class Sampler:
    """Sampler of continuations of prompts by the student, the model being trained, for on-policy distillation.

    model: the student. units: hooks that all-gather the parameters of its FSDP units. device: device of the parameters.
    ends: token IDs that end a sequence. temperature: divisor of the logits. seed: seed of the run."""

    def __init__(
        self,
        model: Transformer,
        units: Units,
        device: torch.device,
        *,
        ends: Sequence[int],
        temperature: float,
        seed: int,
    ) -> None:
        self._model, self._units, self._device = model, units, device
        self._ends, self._temperature, self._seed = tuple(ends), temperature, seed

    @torch.no_grad()
    def sample(
        self, micro_batch: MicroBatch, prompts: Sequence[torch.Tensor], step: int, rows: NDArray[np.int64]
    ) -> MicroBatch:
        """Sample a continuation of each of the `prompts` (token IDs). Return a micro-batch of the shape of
        `micro_batch`, in which each sequence is a prompt and its continuation, as one document. Targets are the sampled
        tokens up to the first end-of-sequence token, which is included; all other targets are -100.

        step: index of the step; rows: indices of the sequences in the training split; both seed the random draws.
        Collective."""
        tokens_BS, _, _ = micro_batch
        count, length = tokens_BS.shape
        device = self._device
        uniform_BS = np.stack([np.random.default_rng([self._seed, step, _TOKENS, row]).random(length) for row in rows])
        uniform = torch.from_numpy(uniform_BS).to(device)
        # A prompt that fills its sequence is not continued: its last position has no target either.
        counts = [len(prompt) if len(prompt) < length else length + 1 for prompt in prompts]
        lengths_B = torch.tensor(counts, device=device)
        text_BL = torch.zeros(count, length + 1, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            text_BL[row, : len(prompt)] = prompt
        targets_BS = torch.full((count, length), IGNORED, dtype=torch.int64, device=device)
        ended_B = torch.zeros(count, dtype=torch.bool, device=device)
        ends = torch.tensor(self._ends, dtype=torch.int64, device=device)
        cache = _DenseCache(self._model.config, count, length)
        for place in range(length):
            logits_BV = self._next_logits(text_BL[:, place : place + 1], cache)
            sums_BV = torch.softmax(logits_BV.double() / self._temperature, dim=1).cumsum(dim=1)
            wanted_B1 = (uniform[:, place] * sums_BV[:, -1])[:, None]
            drawn_B = torch.searchsorted(sums_BV, wanted_B1, right=True)[:, 0].clamp(max=logits_BV.shape[1] - 1)
            samples_B = place + 1 >= lengths_B
            text_BL[:, place + 1] = torch.where(samples_B, drawn_B, text_BL[:, place + 1])
            targets_BS[:, place] = torch.where(samples_B & ~ended_B, drawn_B, IGNORED)
            ended_B |= samples_B & torch.isin(drawn_B, ends)
        return text_BL[:, :-1].contiguous(), targets_BS, Documents()

    def _next_logits(self, tokens_B1: torch.Tensor, cache: Any) -> torch.Tensor:
        """Return the next-token logits [B, V] after `tokens_B1`, one more token of each sequence. cache: KV cache of
        the tokens before, to which these are added."""
        hidden_B1H = self._model.hidden(tokens_B1, units=self._units, cache=cache)
        self._units.enter("head", None)  # ZeRO-3 has resharded the output head
        return self._model.output_logits(hidden_B1H)[:, 0]


class _DenseCache:
    """KV cache in plain tensors, for `count` sequences of up to `length` tokens (implements
    `model.cache.AttentionCache`). All sequences add one token at a time. config: configuration of the model."""

    def __init__(self, config: ModelConfig, count: int, length: int) -> None:
        self._config, self._shape = config, (count, length)
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.length = 0

    def attend(
        self, layer: int, q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Store the keys `k_BKSD` and values `v_BKSD` of one new token of each sequence (S = 1) in the cache of layer
        number `layer`. Return the attention [B, N, 1, D] of the new queries `q_BNSD` to the cached and the new tokens.

        sinks: learned score of each query head [N], one more term of the softmax's denominator; None: none."""
        assert v_BKSD is not None and q_BNSD.shape[2] == 1
        if layer not in self._pairs:
            shapes = ((self._shape[0], x.shape[1], self._shape[1], x.shape[3]) for x in (k_BKSD, v_BKSD))
            self._pairs[layer] = tuple(k_BKSD.new_zeros(shape) for shape in shapes)  # type: ignore[assignment]
        keys, values = self._pairs[layer]
        keys[:, :, self.length], values[:, :, self.length] = k_BKSD[:, :, 0], v_BKSD[:, :, 0]
        seen = slice(self._config.first_key(layer, self.length), self.length + 1)
        wide = at_least_float32(q_BNSD.dtype)
        q = q_BNSD.to(wide).unflatten(1, (keys.shape[1], -1))[:, :, :, 0]
        scores = self._config.score_scale * torch.einsum("bkgd,bkcd->bkgc", q, keys[:, :, seen].to(wide))
        if cap := self._config.attention_softcap:
            scores = cap * torch.tanh(scores / cap)
        if sinks is not None:
            more = sinks.to(wide).view(scores.shape[1:3])[None, :, :, None].expand(len(scores), -1, -1, 1)
            scores = torch.cat([scores, more], dim=-1)
        weights = scores.softmax(dim=-1)[..., : keys[:, :, seen].shape[2]]
        out = torch.einsum("bkgc,bkcd->bkgd", weights, values[:, :, seen].to(wide))
        return out.flatten(1, 2)[:, :, None].to(q_BNSD.dtype)

    def advance(self, tokens: int) -> None:
        """Add one to the number of cached tokens of each sequence. tokens: always 1."""
        self.length += tokens
