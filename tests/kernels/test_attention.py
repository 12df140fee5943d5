"""RoPE, KV cache and attention: results match float64, and their bits depend neither on how a sequence is divided into
steps, nor on other sequences, nor on the places of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meshwright.kernels.library import Kernels
from meshwright.kernels.operations import Attention, LatentAttention, LayerCache, RopeStore
from tests.kernels.conftest import Batch

LENGTHS = (1, 16, 17, 65, 130, 200)


@dataclass(frozen=True)
class Case:
    """An attention layer. `rotated`: features that are rotated. `chunks`: the window is cut from position 0."""

    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    norms: bool = False
    window: int = 0
    dtype: str = "float32"
    sinks: bool = False
    chunks: bool = False
    softcap: float = 0.0

    def first_key(self, position: int) -> int:
        if self.chunks:
            return position // self.window * self.window
        return max(0, position + 1 - self.window) if self.window else 0


CASES = [
    Case(9, 3, 64, 64),
    Case(9, 3, 64, 64, window=70, dtype="bfloat16"),
    Case(4, 4, 8, 8, norms=True, window=5),
    Case(8, 2, 18, 10, norms=True, dtype="bfloat16"),
    Case(5, 1, 128, 0, window=33),
    Case(6, 2, 16, 16, sinks=True, softcap=2.0),
    Case(6, 2, 16, 16, window=20, dtype="bfloat16", sinks=True),
    Case(4, 2, 16, 16, window=20, chunks=True),
]


def tables(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [P, rotated / 2]."""
    half = case.rotated // 2
    angles = np.outer(np.arange(max(LENGTHS)), 100.0 ** -(np.arange(half) / max(1, half)))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def draw_sinks(case: Case) -> np.ndarray | None:
    """Sinks of the query heads, some far below and some far above the scores."""
    return np.linspace(-100, 100, case.heads, dtype=np.float32) / 10 if case.sinks else None


def draw_inputs(case: Case) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Projected queries, keys and values of each sequence, and the norm weights."""
    rng = np.random.default_rng(0)
    width = (case.heads + 2 * case.kv_heads) * case.head_dim
    rows = [rng.standard_normal((length, width), dtype=np.float32) for length in LENGTHS]
    return rows, rng.random(case.head_dim, dtype=np.float32), rng.random(case.head_dim, dtype=np.float32)


def cut_into_steps(members: list[int], chunk: int, seed: int) -> Iterator[tuple[dict[int, range], Batch]]:
    """Yield each step of the sequences `members`, which run together: {sequence: positions of at most `chunk` tokens},
    and the batch. `seed`: order of the blocks; block 0 is not used."""
    longest = -(-max(LENGTHS) // 16)
    order = 1 + np.random.default_rng(seed).permutation(len(members) * longest)
    block_tables = order.reshape(len(members), longest).astype(np.int32)
    done = dict.fromkeys(members, 0)
    while active := [s for s in members if done[s] < LENGTHS[s]]:
        ranges = {s: range(done[s], min(LENGTHS[s], done[s] + chunk)) for s in active}
        positions = np.concatenate([np.array(r, np.int32) for r in ranges.values()])
        starts = np.cumsum([0, *map(len, ranges.values())]).astype(np.int32)
        table = np.ascontiguousarray(block_tables[[members.index(s) for s in active]])
        blocks = np.concatenate([table[i, np.array(r) // 16] for i, r in enumerate(ranges.values())])
        slots = (blocks * 16 + positions % 16).astype(np.int32)
        yield ranges, Batch(positions, positions, slots, starts, table, positions[:0])
        done |= {s: r.stop for s, r in ranges.items()}


def run_in_chunks(kernels: Kernels, case: Case, members: list[int], chunk: int, seed: int = 0) -> list[np.ndarray]:
    """Attention outputs of the sequences `members`, which run together, `chunk` tokens of each in a step. `seed`: order
    of the blocks. The cache starts full of NaN but for what the sequences write; block 0 stays so."""
    inputs, query_norm, key_norm = draw_inputs(case)
    longest = -(-max(LENGTHS) // 16)
    shapes = LayerCache.compute_shapes(1 + len(members) * longest, case.kv_heads, case.head_dim)
    dtype = np.float32 if case.dtype == "float32" else np.uint16
    keys, values = (np.full(shape, np.nan if dtype == np.float32 else 0x7FC0, dtype) for shape in shapes)
    values[..., case.head_dim :] = 0  # the padding of the features
    cache = LayerCache(keys, values, case.head_dim)
    cosine, sine = tables(case)
    outs = {s: np.zeros((LENGTHS[s], case.heads * case.head_dim), np.float32) for s in members}
    for ranges, batch in cut_into_steps(members, chunk, seed):
        for i, r in enumerate(ranges.values() if case.window else ()):  # the scheduler has freed what is behind it
            batch.block_tables[i, : case.first_key(r.start) // 16] = 0
        qkv = np.concatenate([inputs[s][r.start : r.stop] for s, r in ranges.items()])
        out = np.zeros((len(qkv), case.heads * case.head_dim), np.float32)
        operations = kernels.create_op_list()
        rotation = (cosine, sine) if case.rotated else (None, None)
        norms = (query_norm, key_norm) if case.norms else (None, None)
        operations.append(RopeStore(qkv, cache, case.heads, *rotation, *norms))
        options = (case.head_dim**-0.5, case.window, case.softcap, draw_sinks(case), case.chunks)
        operations.append(Attention(out, qkv, cache, case.heads, *options))
        operations.run(batch)
        for i, (s, r) in enumerate(ranges.items()):
            outs[s][r.start : r.stop] = out[batch.starts[i] : batch.starts[i + 1]]
    return list(outs.values())


def attend_exactly(case: Case, sequence: int) -> torch.Tensor:
    """The output of one sequence in float64, from cached keys and values rounded to the cache's type."""
    inputs, *norms = draw_inputs(case)
    x = torch.from_numpy(inputs[sequence]).double().unflatten(-1, (-1, case.head_dim))
    q, k, v = x.split([case.heads, case.kv_heads, case.kv_heads], 1)
    cosine, sine = (torch.from_numpy(t[: len(x)]).double()[:, None] for t in tables(case))

    def prepare(heads: torch.Tensor, norm: np.ndarray) -> torch.Tensor:
        if case.norms:
            heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6) * torch.from_numpy(norm)
        a, b = heads[..., : case.rotated].chunk(2, -1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine, heads[..., case.rotated :]], -1)

    q, k = prepare(q, norms[0]), prepare(k, norms[1])
    if case.dtype == "bfloat16":
        k, v = k.float().bfloat16().double(), v.float().bfloat16().double()
    first = torch.tensor([case.first_key(position) for position in range(len(x))])[:, None]
    key = torch.arange(len(x))
    visible = (key <= key[:, None]) & (key >= first)
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    if not case.sinks:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True).transpose(0, 1).flatten(1)
    k, v = (t.repeat_interleave(case.heads // case.kv_heads, 0) for t in (k, v))
    scores = q @ k.mT * case.head_dim**-0.5
    scores = case.softcap * torch.tanh(scores / case.softcap) if case.softcap else scores
    sinks = torch.from_numpy(draw_sinks(case)).double()[:, None, None].expand(-1, len(x), 1)
    weights = torch.cat([scores.masked_fill(~visible, -torch.inf), sinks], -1).softmax(-1)[..., :-1]
    return (weights @ v).transpose(0, 1).flatten(1)


def check_bits(kernels: Kernels, run: Callable[..., list[Any]]) -> None:
    """Check that the results of `run` (sequences, chunk size) have the same bits in any chunks, batches and threads."""
    whole = run(list(range(len(LENGTHS))), 1000)
    for threads, members, chunk in [(1, [5], 1), (3, [5, 0, 3], 7), (2, [2, 4, 5, 1], 16), (2, [3, 5], 50)]:
        kernels.set_threads(threads)
        for member, out in zip(members, run(members, chunk, seed=chunk), strict=True):
            assert np.array_equal(out, whole[member]), (threads, members, chunk)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_equals_float64(kernels: Kernels, case: Case):
    for sequence, out in enumerate(run_in_chunks(kernels, case, list(range(len(LENGTHS))), 1000)):
        exact = attend_exactly(case, sequence)
        tolerance = 2e-6 if case.dtype == "float32" else 3e-3  # a key near a tie may round to the other side
        assert np.abs(out - exact.numpy()).max() < tolerance * exact.abs().max()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_bits_ignore_chunks_batch_threads_and_blocks(kernels: Kernels, case: Case):
    check_bits(kernels, partial(run_in_chunks, kernels, case))


@pytest.mark.parametrize("window", [0, 1100])
def test_long_context_has_the_same_bits_on_any_number_of_threads(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, window: int
):
    """Contexts of several spans, which threads share out where sequences are few."""
    monkeypatch.setitem(globals(), "LENGTHS", (2100, 40))
    case = Case(4, 2, 16, 0, window=window)
    kernels.set_threads(1)
    whole = run_in_chunks(kernels, case, [0, 1], 700)
    exact = attend_exactly(case, 0)
    assert np.abs(whole[0] - exact.numpy()).max() < 3e-6 * exact.abs().max()
    for threads, members, chunk in [(3, [0], 2099), (2, [0, 1], 2099), (2, [1, 0], 16), (3, [0], 1033)]:
        kernels.set_threads(threads)
        for member, out in zip(members, run_in_chunks(kernels, case, members, chunk), strict=True):
            assert np.array_equal(out, whole[member]), (threads, members, chunk)


@dataclass(frozen=True)
class LatentCase:
    """A layer of latent attention. `plain`, `rotated`: features of a query without and with position."""

    heads: int
    rank: int
    plain: int
    rotated: int
    value_dim: int
    query_rank: int | None = None
    dtype: str = "float32"

    def draw(self, *names: str) -> list[np.ndarray]:
        """Weights by name; each is the same in every call."""
        cached, queries = self.rank + self.rotated, self.heads * (self.plain + self.rotated)
        shapes = {
            "down": (cached + (self.query_rank or queries), 40),
            "latent_norm": (self.rank,),
            "query_norm": (self.query_rank or 1,),
            "query_up": (queries, self.query_rank or 1),
            "key_up": (self.heads, self.rank, self.plain),
            "value_up": (self.heads, self.value_dim, self.rank),
            **{f"x{number}": (length, 40) for number, length in enumerate(LENGTHS)},
        }
        seeds = {name: number for number, name in enumerate(shapes)}
        return [np.random.default_rng(seeds[name]).standard_normal(shapes[name], np.float32) for name in names]


LATENT_CASES = [
    LatentCase(3, 20, 8, 4, 6, query_rank=9),
    LatentCase(32, 16, 5, 6, 17),
    LatentCase(17, 33, 8, 4, 6, query_rank=9, dtype="bfloat16"),
]


def run_latent_in_chunks(
    kernels: Kernels, case: LatentCase, members: list[int], chunk: int, seed: int = 0
) -> list[np.ndarray]:
    """Latent attention of the sequences `members`, which run together; arguments as for `run_in_chunks`."""
    longest, cached = -(-max(LENGTHS) // 16), case.rank + case.rotated
    shapes = LayerCache.compute_shapes(1 + len(members) * longest, 1, cached, latent=True)
    dtype = np.float32 if case.dtype == "float32" else np.uint16
    keys, values = (np.full(shape, np.nan if dtype == np.float32 else 0x7FC0, dtype) for shape in shapes)
    names = ("down", "query_up", "key_up", "value_up")
    down, query_up, key_up, value_up = (kernels.pack(each, case.dtype) for each in case.draw(*names))
    latent_norm, query_norm = case.draw("latent_norm", "query_norm")
    with_queries = case.query_rank is not None
    cosine, sine = tables(Case(1, 1, case.rotated, case.rotated))
    outs = {s: np.zeros((LENGTHS[s], case.heads * case.value_dim), np.float32) for s in members}
    for ranges, batch in cut_into_steps(members, chunk, seed):
        x = np.concatenate([case.draw(f"x{s}")[0][r.start : r.stop] for s, r in ranges.items()])
        out, wide, queries, attended = (
            np.zeros((len(x), case.heads * width + more), np.float32)
            for width, more in ((case.value_dim, 0), (cached, down.n), (case.plain + case.rotated, 0), (cached, 0))
        )
        operations = kernels.create_op_list()
        operations.append(
            LatentAttention(
                out, x, down, latent_norm, query_norm if with_queries else None, query_up if with_queries else None,
                key_up, value_up, wide, queries, attended, LayerCache(keys, values, cached), cosine, sine, 0.3,
            )
        )  # fmt: skip
        operations.run(batch)
        for i, (s, r) in enumerate(ranges.items()):
            outs[s][r.start : r.stop] = out[batch.starts[i] : batch.starts[i + 1]]
    return list(outs.values())


def attend_to_latents_exactly(case: LatentCase, sequence: int) -> torch.Tensor:
    """The output of one sequence in float64, with keys and values of all heads; weights rounded as they are packed."""
    names = ("down", "query_up", "key_up", "value_up", "latent_norm", "query_norm", f"x{sequence}")
    wide = [torch.from_numpy(each) for each in case.draw(*names)]
    down, query_up, key_up, value_up = (
        (each.bfloat16() if case.dtype == "bfloat16" else each).double() for each in wide[:4]
    )
    latent_norm, query_norm, x = (each.double() for each in wide[4:])

    def normalise(vectors: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return vectors * torch.rsqrt(vectors.square().mean(-1, keepdim=True) + 1e-6) * weight

    latent, k_rotary, q = (x @ down.T).split([case.rank, case.rotated, len(down) - case.rank - case.rotated], -1)
    if case.query_rank is not None:
        q = normalise(q, query_norm) @ query_up.T
    q_plain, q_rotary = q.unflatten(-1, (case.heads, -1)).split([case.plain, case.rotated], -1)
    cosine, sine = (
        torch.from_numpy(t[: len(x)]).double()[:, None] for t in tables(Case(1, 1, case.rotated, case.rotated))
    )

    def rotate(heads: torch.Tensor) -> torch.Tensor:
        a, b = heads.chunk(2, -1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

    latent = normalise(latent, latent_norm)
    k = torch.cat(
        [torch.einsum("tr,hrp->thp", latent, key_up), rotate(k_rotary[:, None]).expand(-1, case.heads, -1)], -1
    )
    v = torch.einsum("tr,hvr->thv", latent, value_up)
    q, k, v = (t.transpose(0, 1) for t in (torch.cat([q_plain, rotate(q_rotary)], -1), k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_latent_attention_equals_decompressed_keys_and_values_in_float64(kernels: Kernels, case: LatentCase):
    for sequence, out in enumerate(run_latent_in_chunks(kernels, case, list(range(len(LENGTHS))), 1000)):
        exact = attend_to_latents_exactly(case, sequence)
        tolerance = 2e-5 if case.dtype == "float32" else 0.1  # rounded inputs of products and latent vectors
        assert np.abs(out - exact.numpy()).max() < tolerance * exact.abs().max()


@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_latent_attention_bits_ignore_chunks_batch_threads_and_blocks(kernels: Kernels, case: LatentCase):
    check_bits(kernels, partial(run_latent_in_chunks, kernels, case))


def test_cache_of_another_shape_is_refused(kernels: Kernels):
    keys, values = (np.zeros(shape, np.float32) for shape in LayerCache.compute_shapes(2, 3, 8))
    qkv = np.zeros((4, (3 + 6) * 8), np.float32)
    for wrong in (LayerCache(keys, values, 16), LayerCache(values, keys, 8), LayerCache(keys, values.astype(float), 8)):
        with pytest.raises(ValueError, match=r"LayerCache|contiguous"):
            kernels.create_op_list().append(RopeStore(qkv, wrong, 3))
