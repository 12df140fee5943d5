"""What a layout is verified on: the model made small but kept in kind, and batches that are as uneven as they come."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.layout import Layout
from meshwright.model.config import ModelConfig
from meshwright.model.preference import Preference

IGNORED = -100
SEQUENCE = 23  # tokens
MOST_RANKS = 8
MOST_MICRO_BATCHES = 4
MOST_PAIRS = 2  # of responses in a row


@dataclass(frozen=True, slots=True)
class Problem:
    """One training problem in small: `steps` updates by plain SGD from the same weights on the same batches.

    `batch`: sequences a step over all ranks, of `sequence` tokens each; `dtype`: "float64" or "float32"; `preference`:
    what pairs of responses are to teach, if it is not the next token that is learnt.
    """

    config: ModelConfig
    batch: int
    dtype: str = "float64"
    sequence: int = SEQUENCE
    steps: int = 3
    learning_rate: float = 0.2
    seed: int = 11
    preference: Preference | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Some sequences: tokens, targets (-100: none) and a document number per token, all [B, S] int64. `reference`: of
    responses that come in pairs the log-probabilities under the reference, float64 [B, 2 x MOST_PAIRS]."""

    tokens: np.ndarray
    targets: np.ndarray
    document_ids: np.ndarray
    reference: np.ndarray | None = None

    def rows(self, start: int, stop: int) -> Batch:
        """Sequences [start, stop)."""
        reference = None if self.reference is None else self.reference[start:stop]
        return Batch(self.tokens[start:stop], self.targets[start:stop], self.document_ids[start:stop], reference)


def sequence_of(layout: Layout) -> int:
    """Tokens in a row: odd where that is possible."""
    pieces = layout.tp * layout.cp * (2 if layout.cp > 1 and layout.cp_method == "ring" else 1)
    return -(-SEQUENCE // pieces) * pieces


def scaled_down(
    config: ModelConfig, tp: int = 1, ulysses: int = 1, layers: int = 5, ep: int = 1, etp: int = 1
) -> ModelConfig:
    """A model of a few thousand parameters with every feature of `config`, in sizes that divide as badly as they may on
    `tp` ranks, `ulysses` ranks that trade tokens for heads, and `ep` x `etp` that share experts: fewer key-value heads
    than ranks from four on, where heads share them."""
    grouped = config.kv_heads < config.heads
    heads, kv_heads = _heads(tp, ulysses)
    own_head_dim = config.head_dim * config.heads != config.hidden
    windowed = config.windowed_layers
    if windowed is not None:
        mixed = any(windowed) and not all(windowed)
        windowed = tuple(layer % 2 == 0 if mixed else windowed[0] for layer in range(layers))
    scaling = config.rope_scaling
    if scaling is not None and scaling.original_max_positions is not None:
        scaling = dataclasses.replace(scaling, original_max_positions=8)  # so that it matters within the sequence
    experts = _few_experts(config, tp, ep, etp)
    intermediate = experts.get("expert_intermediate", 0) if config.family == "mixtral" else -(-37 // tp) * tp
    return dataclasses.replace(
        config,
        **experts,
        vocabulary=499,
        hidden=6 * heads,
        layers=layers,
        heads=heads,
        kv_heads=(1 if config.kv_heads == 1 else kv_heads) if grouped else heads,
        head_dim=10 if own_head_dim else 6,
        intermediate=intermediate,
        max_positions=2 * SEQUENCE,
        rope_scaling=scaling,
        sliding_window=None if config.sliding_window is None else 7,
        windowed_layers=windowed,
        bos_token=None,
        eos_token=None,
        more_eos_tokens=(),
        initializer_range=0.15,  # far from the linear regime, so that every gradient depends on every other
    )


def _heads(tp: int, ulysses: int) -> tuple[int, int]:
    """The fewest heads, and key-value heads that several of them share, which can be cut; four and two, if they can."""
    for heads in itertools.count(4):
        for kv_heads in range(2, heads):
            on_rank = max(1, kv_heads // tp)
            whole = heads % (tp * ulysses) == 0 and heads % kv_heads == 0
            shared = not (kv_heads % tp and tp % kv_heads) and not (on_rank % ulysses and ulysses % on_rank)
            if whole and shared:
                return heads, kv_heads
    raise AssertionError


def _few_experts(config: ModelConfig, tp: int, ep: int, etp: int) -> dict[str, Any]:
    """Five experts, or what is next that ranks can share, of which a token takes three; one layer without any where the
    model has such layers."""
    if not config.experts:
        return {}
    cut = tp if ep == etp == 1 else etp
    width = next(
        width
        for width in itertools.count(37 if config.family == "mixtral" else 11)
        if width % cut == 0 and (2 * width % tp == 0 or not config.shared_intermediate)
    )
    experts = min(5, config.experts)
    return {
        "experts": -(-experts // ep) * ep,
        "experts_per_token": min(3, config.experts_per_token),
        "expert_intermediate": width,
        "shared_intermediate": 2 * width if config.shared_intermediate else 0,
        "dense_layers": (0,) if config.dense_layers else (),
        "router_loss": 0.1 if config.router_loss else 0.0,  # enough to be seen
    }


def scaled_layout(layout: Layout) -> Layout:
    """The layout on at most `MOST_RANKS` ranks, with what makes it what it is: several stages, several replicas,
    several sharding groups, ranks of tp and cp. A schedule from a file stays as it is. Its precision is left out: the
    problem says in which the sums are formed."""
    layout = layout.with_(precision=None)
    if layout.schedule.startswith("@"):
        return layout
    pp, ranks = layout.pp, MOST_RANKS
    if layout.world_size > MOST_RANKS and pp > 1:
        pp = min(pp, MOST_RANKS if layout.world_size == pp else 2)
        ranks = MOST_RANKS // pp
    most = max(MOST_MICRO_BATCHES, 2 * pp if pp > 1 else 0)  # schedules fill and drain with as many
    layout = layout.with_(pp=pp, micro_batches=min(layout.micro_batches, most))
    if layout.world_size <= MOST_RANKS:
        return layout
    groups = layout.hybrid is not None and layout.hybrid < layout.dp * layout.cp
    cp = min(layout.cp, ranks if layout.dp == layout.tp == 1 else 2)
    ranks //= cp
    tp = min(layout.tp, ranks if layout.dp == 1 else ranks // 4 if groups and cp == pp == 1 else max(1, ranks // 2))
    dp = min(layout.dp, ranks // tp)
    stage = tp * cp * dp
    etp = next(size for size in range(min(layout.etp, stage if layout.ep == 1 else 2), 0, -1) if stage % size == 0)
    ep = next(size for size in range(min(layout.ep, stage // etp), 0, -1) if stage // etp % size == 0)
    hybrid = dp * cp // 2 if groups and dp * cp > 3 else None
    return layout.with_(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, hybrid=hybrid)


def make_batch(problem: Problem, step: int) -> Batch:
    """The batch of a step: rows with one document and with many, with all targets, with few, and one with none, so
    that ranks and micro-batches count different numbers of them, and every step another."""
    if problem.preference is not None:
        return _make_pairs(problem, step)
    random = np.random.default_rng([problem.seed, step])
    rows, sequence = problem.batch, problem.sequence
    tokens = random.integers(0, problem.config.vocabulary, (rows, sequence + 1))
    ids = np.zeros((rows, sequence + 1), dtype=np.int64)
    for row in range(rows):
        if row % 4:
            ids[row, random.choice(np.arange(1, sequence), size=int(random.integers(1, 6)), replace=False)] = 1
    ids = ids.cumsum(axis=1)
    targets = np.where(ids[:, 1:] == ids[:, :-1], tokens[:, 1:], IGNORED)
    for row in range(rows):
        targets[row, random.random(sequence) < (0.0, 0.2, 0.9, 0.5)[(row + step) % 4]] = IGNORED
    targets[(2 + step) % rows] = IGNORED
    return Batch(tokens[:, :-1].copy(), targets, ids[:, :-1].copy())


def _make_pairs(problem: Problem, step: int) -> Batch:
    """Rows with one pair of responses, with two and with none, most with padding behind them; of every document the
    first tokens, its prompt, are no targets."""
    random = np.random.default_rng([problem.seed, step])
    rows, sequence = problem.batch, problem.sequence
    tokens = random.integers(0, problem.config.vocabulary, (rows, sequence + 1))
    ids = np.zeros((rows, sequence), dtype=np.int64)
    targets = np.full((rows, sequence), IGNORED)
    for row in range(rows):
        pairs = (1, 2, 2, 0)[(row + step) % 4]
        inner = np.sort(random.choice(np.arange(1, sequence // 2), size=max(0, 2 * pairs - 1), replace=False)) * 2
        bounds = [0, *inner.tolist(), sequence if row % 3 == 0 else sequence - 1][: 2 * pairs + 1]
        for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
            ids[row, begin:] = number
            prompt = begin + int(random.integers(0, max(1, (end - begin) // 2)))
            targets[row, prompt : end - 1] = tokens[row, prompt + 1 : end]
            ids[row, end:] = number + 1
    told = np.stack([((ids == number) & (targets != IGNORED)).sum(axis=1) for number in range(2 * MOST_PAIRS)], axis=1)
    reference = -math.log(problem.config.vocabulary) * told + random.uniform(-1, 1, told.shape) * (told > 0)
    return Batch(tokens[:, :-1].copy(), targets, ids, reference)


def share_of(batch: Batch, data_rank: int, data_size: int, micro_batches: int) -> list[Batch]:
    """The micro-batches of one rank: consecutive rows, rank after rank, micro-batch after micro-batch."""
    rows = batch.tokens.shape[0] // (data_size * micro_batches)
    first = data_rank * rows * micro_batches
    return [batch.rows(first + index * rows, first + (index + 1) * rows) for index in range(micro_batches)]
