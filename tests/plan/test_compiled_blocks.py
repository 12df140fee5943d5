"""What compiled blocks keep is what torch's partitioner keeps of them, and the peak of a compiled step is the
allocator's."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from meshwright.comm.local import LocalRanks
from tests.plan.saved_cases import Case, Watched, watch
from tests.plan.test_saved import DOCUMENTS, NOT_HOOKED, model

DENSE = ("llama-tiny", "gpt2-tiny", "qwen2-tiny", "qwen3-tiny", "mistral-tiny")
PARTITIONED = "aot_eager"
"""The backend that partitions as inductor does and compiles nothing."""


def check(case: Case, found: Watched) -> None:
    of_functions = [name for name in NOT_HOOKED if name != "attention.first_visible"]  # a graph's own argument
    if "full" in case.layout:  # what all layers share is not given to autograd
        of_functions.append("rotation.")
    said = [each for each in found.predicted if not each.name.startswith(tuple(of_functions))]
    assert Counter(each.bytes for each in said) == Counter(size for size, _ in found.packed), (case, said, found.packed)


@pytest.mark.parametrize("recompute", ["", " ac:selective", " ac:full"])
@pytest.mark.parametrize("name", DENSE)
def test_a_compiled_forward_keeps_what_was_said(name: str, recompute: str) -> None:
    config = dataclasses.replace(model(name), layers=2)
    for dtype, starts in (("float32", None), ("bfloat16", DOCUMENTS)):
        case = Case(config, f"dp1{recompute}", dtype=dtype, starts=starts, backend=PARTITIONED)
        check(case, watch(case))


def test_ranks_keep_their_parts_of_compiled_blocks() -> None:
    names = ("llama-tiny", "qwen3-tiny")
    layouts = (
        "tp2",
        "tp2:nosp",
        "cp2",
        "cp2:ulysses",
        "tp2 ac:selective",
        "cp2 ac:selective",
        "cp2:ulysses ac:selective",
    )
    with LocalRanks(2) as ranks:
        for number, layout in enumerate(layouts):
            config = dataclasses.replace(model(names[number % 2]), layers=2)
            case = Case(config, layout, backend=PARTITIONED)
            for found in ranks.run(watch, case):
                check(case, found)
