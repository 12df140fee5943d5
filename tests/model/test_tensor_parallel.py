"""Tensor parallelism: two ranks compute what one device computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import chain, cycle

import pytest

from meshwright.comm.local import LocalRanks
from meshwright.spec.presets import preset
from tests.conftest import exhaustive

ODD = {"vocabulary": 499, "layers": 2}  # a vocabulary that 2 does not divide
CONFIGS = {
    "llama, every bias": dataclasses.replace(
        preset("llama-tiny"), **ODD, qkv_bias=True, output_bias=True, mlp_bias=True, tied=False
    ),
    "llama, one key-value head, tied": dataclasses.replace(preset("llama-tiny"), **ODD, kv_heads=1, tied=True),
    "qwen3": dataclasses.replace(preset("qwen3-tiny"), **ODD),
    "granite": dataclasses.replace(preset("granite-tiny"), **ODD),
    "olmo2, one key-value head": dataclasses.replace(preset("olmo2-tiny"), **ODD, kv_heads=1),
    "gemma2": dataclasses.replace(preset("gemma2-tiny"), **ODD, windowed_layers=(True, False), logit_softcap=0.8),
    "phi3": dataclasses.replace(preset("phi3-tiny"), **ODD),
    "glm4": dataclasses.replace(preset("glm4-tiny"), **ODD),
    "gpt2": dataclasses.replace(preset("gpt2-tiny"), **ODD),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(2) as local:
        yield local


# In turn, one kind of tensor parallelism always and the other exhaustively: models differ in parts that either splits.
IN_TURN = [
    ((name, first), *exhaustive((name, second)))
    for name, (first, second) in zip(CONFIGS, cycle([("tp2", "tp2:nosp"), ("tp2:nosp", "tp2")]), strict=False)
]


@pytest.mark.parametrize(("name", "layout"), [*chain.from_iterable(IN_TURN)])
def test_two_ranks_match_one_device(ranks: LocalRanks, name: str, layout: str):
    config = CONFIGS[name]
    recompute = {"qwen3": "full", "llama": "selective", "gemma2": "selective"}.get(config.family, "none")
    for errors in ranks.run("tests.model.tensor_parallel_cases:compare", layout, config, recompute):
        assert max(errors.values()) < 1e-10, max(errors, key=lambda name: errors[name])
        assert errors["rows that fill up"] == 0


@pytest.mark.parametrize(
    ("layout", "recompute", "backend"),
    [
        ("tp2", "selective", "aot_eager"), *exhaustive(("tp2", "none", "aot_eager")),
        *(("tp2", recompute, None) for recompute in ("none", "selective", "full")),
        ("tp2:nosp", "selective", "aot_eager"), ("tp2:nosp", "full", None),
    ],
)  # fmt: skip
def test_products_of_one_sequence_overlap_in_compiled_blocks_too(
    ranks: LocalRanks, layout: str, recompute: str, backend: str | None
):
    case = layout, CONFIGS["llama, every bias"], recompute, 1, "chunks", backend
    for errors in ranks.run("tests.model.tensor_parallel_cases:compare", *case):
        assert max(errors.values()) < 1e-10, max(errors, key=lambda name: errors[name])
