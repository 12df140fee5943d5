"""Predicted saved activations match the engine's, storage by storage."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest

from bench.shared.saved_cases import Case, Watched, difference, watch
from meshwright.comm.local import LocalRanks
from meshwright.layout import Layout
from meshwright.planner.cost.micro_batch import MicroBatch, Routed
from meshwright.planner.memory.saved import saved_activations
from meshwright.planner.memory.snapshot import Allocation
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.config import ModelConfig
from meshwright.spec.presets import PRESETS, preset
from meshwright.spec.stages import whole_model

TINY = [name for name, one in PRESETS.items() if name.endswith("-tiny") and not preset(name).encoder]
FAMILIES = tuple({preset(name).family: name for name in reversed(TINY)}.values())
"""A small model of each decoder family."""

RECOMPUTE = ("none", "selective", "full")
DOCUMENTS = [[0, 5], [0, 9]]
NOT_HOOKED = ("loss", "balance", "attention.first_visible")
"""Tensors that functions keep without `save_for_backward`, and the roots of the backward pass."""


def model(name: str) -> ModelConfig:
    changes = {"sliding_window": 8} if name in ("mistral-tiny", "llama4-tiny") else {}
    return dataclasses.replace(preset(name), layers=3, vocabulary=97, **changes)  # an odd vocabulary, which tp pads


def check(case: Case, found: Watched) -> None:
    unexpected, missing = difference(found)
    assert not unexpected and not missing, (case, unexpected, missing)
    assert found.predicted
    if "ac:" not in case.layout:
        narrow = case.dtype in ("bfloat16", "float16")
        own = (*NOT_HOOKED, *(["input"] if narrow and case.config.norm == "rmsnorm" and case.config.pre_norms else []))
        hooked = Counter(each.bytes for each in found.predicted if not each.name.startswith(own) and each.bytes)
        assert hooked == Counter(size for size, _ in found.packed), case


def cases(name: str, recompute: str, every: bool) -> list[Case]:
    """A model in one stage, its first, a middle and its last one, each type, one document a row and several: every
    family with both types and both kinds of rows, and in turns with the stages; with recomputation, one of these."""
    layout = "dp1" if recompute == "none" else f"dp1 ac:{recompute}"
    shapes = [
        ("float32", 1, 0, True, None), ("bfloat16", 1, 0, True, DOCUMENTS),
        ("float32", 3, 1, True, DOCUMENTS), ("bfloat16", 2, 1, False, None),
    ]  # fmt: skip
    turn = [*FAMILIES].index(name)
    shapes = shapes[2 * (turn % 2) :][:2] if recompute == "none" else shapes[turn % 4 :][:1]
    if every:
        shapes = [
            (dtype, stages, stage, at_once, starts)
            for dtype in ("float32", "bfloat16", "float16", "float64")
            for stages, stage, at_once in ((1, 0, True), (2, 0, False), (2, 1, False), (3, 1, True))
            for starts in (None, DOCUMENTS)
        ]
    return [
        Case(model(name), layout, dtype=dtype, stages=stages, stage=stage, at_once=at_once, starts=starts)
        for dtype, stages, stage, at_once, starts in shapes
    ]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["some", "all"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", FAMILIES)
def test_saved_activations_match_prediction(name: str, recompute: str, every: bool) -> None:
    for case in cases(name, recompute, every):
        check(case, watch(case))


ADAPTERS: dict[str, list[dict[str, Any]]] = {
    "llama-tiny": [{"kind": "dora"}, {"packed": "nf4"}, {"targets": ("q_proj", "v_proj")}, {"targets": ("down_proj",)}],
    "qwen3-tiny": [{"targets": ("layers.1.mlp.up_proj", "*layers.2.*")}],
    "gpt2-tiny": [{}],
    "qwen2-moe-tiny": [{}, {"targets": ("q_proj",)}, {"targets": ("*.experts.*.up_proj", "*.experts.*.down_proj")}],
    "mixtral-tiny": [{"targets": ("w1", "w2", "w3")}, {"kind": "dora", "targets": ("w1", "w2", "w3")},
                      {"targets": ("w2",)}],
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTERS)
def test_saved_activations_with_adapter_match_prediction(name: str) -> None:
    """Neither inputs of frozen products nor anything before the first adapter is saved."""
    shapes = ("dp1", "float32", 1, 0), ("dp1 ac:selective", "bfloat16", 1, 0), ("dp1", "bfloat16", 2, 1)
    for settings, (layout, dtype, stages, stage) in itertools.product(ADAPTERS[name], shapes):
        config = dataclasses.replace(model(name), adapter=AdapterConfig(rank=4, **settings))
        case = Case(config, layout, dtype=dtype, stages=stages, stage=stage)
        found = watch(case)
        unexpected, missing = difference(found)
        assert not unexpected and not missing, (case, unexpected, missing)
        assert all(isinstance(each.bytes, int) for each in found.predicted), case


@pytest.mark.parametrize("name", ["llama-tiny", "mixtral-tiny"])
def test_preference_loss_saves_head_input_and_two_values_per_token(name: str) -> None:
    """In addition, a few values per pair."""
    for dtype, stages, stage in (("float32", 1, 0), ("bfloat16", 2, 1)):
        case = Case(model(name), dtype=dtype, stages=stages, stage=stage, starts=DOCUMENTS, pairs=True)
        found = watch(case)
        unexpected, missing = difference(found)
        assert sum(size for size, _ in unexpected) <= 120 and max(unexpected)[0] <= 8 * case.rows, unexpected
        assert all(each.bytes <= 8 * case.rows for each in missing), missing
        named = {each.name: each.bytes for each in found.predicted}
        tokens, itemsize = case.rows * case.sequence, 4 if dtype == "float32" else 2
        assert named["head.input"] == tokens * case.config.hidden * itemsize and named["head.known"] == 2 * tokens * 4
        assert "head.weight.gradient" not in named


LAYOUTS = (
    *("tp4", "tp4:nosp", "cp4", "cp2:ulysses tp2", "cp2 tp2", "cp4:ulysses", "dp4 zero3", "dp2 tp2 zero2"),
    *("dp2 cp2 zero1",),
)
EXPERT_LAYOUTS = (
    *("dp4 ep4", "dp2 tp2 ep2", "dp2 tp2:nosp ep4", "tp4 ep2:etp2", "cp2 tp2 ep2", "tp2:nosp cp2 ep1:etp2", "tp4:nosp"),
    *("dp4 zero3 ep2:etp2", "cp4:ulysses"),
)
DENSE = ("llama-tiny", "gpt2-tiny", "qwen2-tiny", "qwen3-tiny", "mistral-tiny")
MIXED = ("mixtral-tiny", "qwen2-moe-tiny", "qwen3-moe-tiny", "dots1-tiny")
OTHERS = [name for name in FAMILIES if preset(name).projection_norm or preset(name).unrotated_layers]
"""Families of which tp ranks save something that the others do not."""


def spread_cases(every: bool) -> list[Case]:
    """Return each layout with a model, or all combinations."""
    found = []
    for names, layouts in ((DENSE, LAYOUTS), (MIXED, EXPERT_LAYOUTS)):
        for at, layout in enumerate(layouts):
            chosen = [(at % len(names), at % 3, at % 8)]
            for number, which, variant in itertools.product(range(len(names)), range(3), range(8)) if every else chosen:
                config = model(names[number])
                config = dataclasses.replace(config, experts=4) if config.experts else config
                recompute = "" if RECOMPUTE[which] == "none" else f" ac:{RECOMPUTE[which]}"
                narrow, packed, middle = variant & 1, variant & 2, variant & 4
                found.append(
                    Case(
                        config, layout + recompute, dtype="bfloat16" if narrow else "float32",
                        starts=DOCUMENTS if packed else None, stages=3 if middle else 1, stage=1 if middle else 0,
                    )
                )  # fmt: skip
    overlapped = "tp4", "tp4 ac:selective", "tp4:nosp ac:selective"
    found += [Case(model("llama-tiny"), layout, overlap="chunks") for layout in overlapped]
    layouts = "tp4:nosp ac:selective", "tp2 dp2"
    return [*found, *(Case(model(name), layouts[at % 2], dtype="bfloat16") for at, name in enumerate(OTHERS))]


@pytest.mark.parametrize(
    "every",
    [False, pytest.param(True, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1200)])],
    ids=["some", "all"],
)
def test_saved_activations_of_ranks_match_prediction(every: bool) -> None:
    with LocalRanks(4) as ranks:
        for case in spread_cases(every):
            for found in ranks.run(watch, case):
                check(case, found)


def bytes_of(saved: list[Allocation]) -> int:
    return sum(each.bytes for each in saved)


def test_saved_activations_of_llama_layer_match_count_by_hand() -> None:
    """Rows of T tokens, H hidden, N + 2K heads of D, F columns; two bytes a number, four of what is summed."""
    config = preset("llama-3-8b")
    rows, sequence = 1, 8192
    saved = saved_activations(MicroBatch.of(config, Layout(), rows, sequence), whole_model(config))
    layer = [each for each in saved if each.name.startswith("layers.7.")]
    t, h, f, q, kv = rows * sequence, 4096, 14336, 4096, 1024
    norms = 2 * (4 * t * h + 4 * t + 4 * t * h)  # in float32: the input, 1 / root mean square, and their product
    attention = 2 * t * (h + (q + 2 * kv) + (q + kv) + q)
    mlp = 2 * t * (h + 2 * f + f + f)
    assert bytes_of(layer) == norms + attention + mlp


def test_full_recomputation_saves_only_layer_input() -> None:
    config = preset("llama-3-8b")
    saved = saved_activations(MicroBatch.of(config, Layout(recompute="full"), 2, 4096), whole_model(config))
    layers = [each for each in saved if each.name.startswith("layers.")]
    assert [each.bytes for each in layers] == [2 * 2 * 4096 * 4096] * config.layers  # 2 s b h


def test_sequence_parallelism_divides_unsharded_activations() -> None:
    """Korthikanti et al. 2022, section 4.2.2: with it everything in a layer but gathered inputs is 1/t."""
    config, sequence = preset("llama-2-70b"), 4096
    for name in ("norm.input", "norm.scale", "norm.scaled"):
        whole, cut = (
            [
                each.bytes
                for each in saved_activations(
                    MicroBatch.of(config, Layout(tp=8, tensor_sequence_parallel=flag), 1, sequence), whole_model(config)
                )
                if each.name.endswith(name) and each.name.startswith("layers.")
            ]
            for flag in (False, True)
        )
        assert cut == [size // 8 for size in whole] and cut


def test_expert_memory_follows_routed_tokens() -> None:
    config, layout = preset("mixtral-8x7b-v0.1"), Layout.parse("dp8 ep8")
    even = saved_activations(MicroBatch.of(config, layout, 1, 4096), whole_model(config))
    twice = Routed(2 * 4096 * 2, 2 * 4096 * 2)
    uneven = saved_activations(MicroBatch.of(config, layout, 1, 4096, routed={3: twice}), whole_model(config))
    width = config.expert_intermediate
    more = 4096 * 2 * (2 * (config.hidden + 4 * width) + 8 * 2)
    assert bytes_of(uneven) - bytes_of(even) == more
