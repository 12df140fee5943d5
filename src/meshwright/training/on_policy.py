"""On-policy sequences of distillation: the student continues prompts with a KV cache (Agarwal et al. 2023,
arXiv:2306.13649, algorithm 1).

A token depends on its logits and on a uniform number keyed by (seed, step, sequence, position), not on the layout.

Shapes: B sequences, S tokens of each, C cached tokens, N query heads, K key-value heads, D head size, H hidden, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.model.axis_operations import Units
from meshwright.model.documents import Documents, MicroBatch, move
from meshwright.model.loss import IGNORED
from meshwright.model.precision import at_least_float32
from meshwright.model.transformer import Transformer
from meshwright.spec.config import ModelConfig

_STEP, _TOKENS = 1, 2  # purposes of random numbers
SITE = "distill.samples"
CHUNK = 2048
"""Tokens of all prompts that are computed at a time, which bounds the attention scores."""
GROUP = 65_536
"""Positions of the sequences that are sampled together on a rank, unless one micro-batch has more. It bounds the KV
cache and the attention scores."""
CHECK_EVERY = 16
"""Sampled tokens between checks that a sequence of any rank still goes on."""


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

    model: the student. units: hooks that all-gather the parameters of its FSDP units. mesh: device mesh of the run.
    ends: token IDs that end a sequence. temperature: divisor of the logits. seed: seed of the run."""

    def __init__(
        self, model: Transformer, units: Units, mesh: Mesh, *, ends: Sequence[int], temperature: float, seed: int
    ) -> None:
        self._model, self._units, self._mesh = model, units, mesh
        self._ends, self._temperature, self._seed = tuple(ends), temperature, seed

    @torch.no_grad()
    def sample(
        self, micro_batch: MicroBatch, prompts: Sequence[torch.Tensor], step: int, rows: NDArray[np.int64]
    ) -> MicroBatch:
        """Sample a continuation of each of the `prompts` (token IDs). Return a micro-batch of the shape of
        `micro_batch`, in which each sequence is a prompt and its continuation, as one document. Targets are the sampled
        tokens up to and including the first end-of-sequence token; all other targets are -100, and tokens after it are
        0. The prompts are computed in chunks of tokens; afterwards, each decoding step adds one token to every
        sequence.

        step: index of the step; rows: indices of the sequences in the training split. The random draws are seeded by
        `step` and `rows`. Collective."""
        (count, length), device = micro_batch.tokens_BS.shape, self._mesh.device
        uniform = np.stack([np.random.default_rng([self._seed, step, _TOKENS, row]).random(length) for row in rows])
        uniform_BS = move(torch.from_numpy(uniform), device)
        # A prompt that fills its sequence is not continued: its last position has no target either.
        counts = [len(prompt) if len(prompt) < length else length + 1 for prompt in prompts]
        text_BL = torch.zeros(count, length + 1, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            text_BL[row, : len(prompt)] = prompt
        targets_BS = torch.full((count, length), IGNORED, dtype=torch.int64, device=device)
        lengths_B, every = torch.tensor(counts, device=device), torch.arange(count, device=device)
        ended_B = lengths_B > length
        ends = torch.tensor(self._ends, dtype=torch.int64, device=device)
        cache = _DenseCache(self._model.config, count, length)
        longest, draws = self._agree(
            max((each for each in counts if each < length + 1), default=0), length + 1 - min(counts)
        )
        if not draws:
            return MicroBatch(text_BL[:, :-1].contiguous(), targets_BS, Documents())
        hidden_BH = self._compute_prompts(text_BL[:, :longest], lengths_B, cache)
        for draw in range(draws):
            places_B = lengths_B - 1 + draw
            inside_B = places_B < length
            places_B = places_B.clamp(max=length - 1)
            sums_BV = torch.softmax(self._next_logits(hidden_BH).double() / self._temperature, dim=1).cumsum(dim=1)
            wanted_B1 = (uniform_BS[every, places_B] * sums_BV[:, -1])[:, None]
            drawn_B = torch.searchsorted(sums_BV, wanted_B1, right=True)[:, 0].clamp(max=sums_BV.shape[1] - 1)
            sampled_B = inside_B & ~ended_B
            text_BL[every, places_B + 1] = torch.where(sampled_B, drawn_B, text_BL[every, places_B + 1])
            targets_BS[every, places_B] = torch.where(sampled_B, drawn_B, targets_BS[every, places_B])
            ended_B |= sampled_B & torch.isin(drawn_B, ends)
            finished = draw % CHECK_EVERY == CHECK_EVERY - 1 and not self._agree(int(not ended_B.all()))[0]
            if finished or draw + 1 == draws:
                break
            places_B1 = (places_B + 1).clamp(max=length - 1)[:, None]
            hidden_BH = self._compute_hidden(text_BL.gather(1, places_B1), places_B1, cache)[:, 0]
        return MicroBatch(text_BL[:, :-1].contiguous(), targets_BS, Documents())

    def _agree(self, *numbers: int) -> list[int]:
        """Return the maximum of each of `numbers` over all ranks, so that all ranks make the same collective calls.
        Collective."""
        found = torch.tensor(numbers, device=self._mesh.device)
        collectives.all_reduce(found, self._mesh.world, SITE, op="max")
        return found.tolist()

    def _compute_prompts(self, text_BL: torch.Tensor, lengths_B: torch.Tensor, cache: _DenseCache) -> torch.Tensor:
        """Run the student on prompts `text_BL` [B, L], padded to the same length, and fill `cache`; return the final
        hidden states [B, H] of the prompts' last tokens. lengths_B: length of each prompt in tokens; a length above L
        counts as L."""
        last_B = lengths_B.clamp(max=text_BL.shape[1]) - 1
        hidden_BH: torch.Tensor | None = None
        chunk = max(1, CHUNK // len(text_BL))
        for first in range(0, text_BL.shape[1], chunk):
            tokens_BS = text_BL[:, first : first + chunk]
            stop = first + tokens_BS.shape[1]
            places_BS = torch.arange(first, stop, device=tokens_BS.device).expand(len(tokens_BS), -1)
            found_BSH = self._compute_hidden(tokens_BS, places_BS, cache)
            here = (last_B - first).clamp(min=0, max=stop - first - 1)
            found_BH = found_BSH[torch.arange(len(here), device=here.device), here]
            inside_B1 = (last_B >= first)[:, None]
            hidden_BH = found_BH if hidden_BH is None else torch.where(inside_B1, found_BH, hidden_BH)
        assert hidden_BH is not None, "a prompt has a token"
        return hidden_BH

    def _compute_hidden(self, tokens_BS: torch.Tensor, places_BS: torch.Tensor, cache: _DenseCache) -> torch.Tensor:
        """Return the final hidden states [B, S, H] of `tokens_BS`, at the positions `places_BS`. cache: KV cache of the
        earlier tokens, to which `tokens_BS` are added."""
        cache.select(places_BS)
        return self._model.hidden(tokens_BS, units=self._units, cache=cache, positions=places_BS)

    def _next_logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """Return the next-token logits [B, V] for `hidden_BH`, the final hidden state of one token of each sequence."""
        self._units.enter("head", None)  # ZeRO-3 has resharded the output head
        return self._model.output_logits(hidden_BH[:, None])[:, 0]


class _DenseCache:
    """KV cache in plain tensors, for `count` sequences of up to `length` tokens (implements
    `model.attention_inputs.AttentionCache`). config: configuration of the model."""

    length = 0

    def __init__(self, config: ModelConfig, count: int, length: int) -> None:
        self._config, self._shape = config, (count, length)
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._first: dict[int, torch.Tensor] = {}
        """Layer with a window -> first position to which a token at each position attends [length]."""

    def select(self, places_BS: torch.Tensor) -> None:
        """Set the positions at which the next call stores S tokens of each sequence: `places_BS`, not necessarily after
        the tokens stored last. A token attends to all positions up to its own."""
        self._places_BS, self._known = places_BS, int(places_BS.max()) + 1
        self._at_C = torch.arange(self._known, device=places_BS.device)
        self._visible_BSC = self._at_C <= places_BS[..., None]

    def attend(
        self, layer: int, q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Store the keys `k_BKSD` and values `v_BKSD` of S new tokens of each sequence in the cache of layer number
        `layer`. Return the attention [B, N, S, D] of the new queries `q_BNSD`; each query attends to the positions up
        to its own.

        sinks: learned score of each query head [N], one more term of the softmax's denominator; None: none."""
        assert v_BKSD is not None
        places_BS, config, known = self._places_BS, self._config, self._known
        if layer not in self._pairs:
            shapes = ((self._shape[0], x.shape[1], self._shape[1], x.shape[3]) for x in (k_BKSD, v_BKSD))
            self._pairs[layer] = tuple(k_BKSD.new_zeros(shape) for shape in shapes)  # type: ignore[assignment]
        keys, values = self._pairs[layer]
        sequences_B1 = torch.arange(len(places_BS), device=keys.device)[:, None]
        keys[sequences_B1, :, places_BS] = k_BKSD.transpose(1, 2)
        values[sequences_B1, :, places_BS] = v_BKSD.transpose(1, 2)
        wide = at_least_float32(q_BNSD.dtype)
        q = q_BNSD.to(wide).unflatten(1, (keys.shape[1], -1))
        scores = config.score_scale * torch.einsum("bkgsd,bkcd->bkgsc", q, keys[:, :, :known].to(wide))
        if cap := config.attention_softcap:
            scores = cap * torch.tanh(scores / cap)
        visible_BSC = self._visible_BSC
        if config.layer_window(layer) is not None:
            if layer not in self._first:
                first = [config.first_key(layer, place) for place in range(self._shape[1])]
                self._first[layer] = torch.tensor(first, device=keys.device)
            visible_BSC = visible_BSC & (self._at_C >= self._first[layer][places_BS][..., None])
        scores = scores.masked_fill(~visible_BSC[:, None, None], float("-inf"))
        if sinks is not None:
            more = sinks.to(wide).view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, more], dim=-1)
        weights = scores.softmax(dim=-1)[..., :known]
        out = torch.einsum("bkgsc,bkcd->bkgsd", weights, values[:, :, :known].to(wide))
        return out.flatten(1, 2).to(q_BNSD.dtype)

    def advance(self, tokens: int) -> None:
        """Do nothing: `select` gives the positions. Part of the interface of the model's caches. tokens: ignored."""
