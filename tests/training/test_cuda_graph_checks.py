"""Recipes whose forward and backward a CUDA graph cannot replay are refused before the run."""

from __future__ import annotations

import dataclasses
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.errors import UserError
from meshwright.launcher.recipe_checks import check_cuda_graphs, check_recipe
from meshwright.recipe import load_recipe
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.presets import preset
from meshwright.training.cuda_graphs import graph_passes
from tests.training.test_cuda_graphs import EXPERTS

OF_EXPERTS = [f"{name.replace('_', '.', 1)}={value}" for name, value in EXPERTS.items()]
PAIRS = ["data.records=preference", "data.train_on=responses", "data.document_mask=true"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        *(
            (
                [f"layout={layout}"],
                "CUDA graphs are not supported under cp and pp; use only dp and tp",
            )
            for layout in ("tp2 cp2", "dp2 cp2", "pp2 mb2")
        ),
        (["layout=dp2 zero2"], "CUDA graphs are not supported under zero2; use zero1"),
        (["layout=dp2 zero1 tp2"], None),
        (PAIRS, 'a CUDA graph is for objective "next-token"; "dpo" has inputs of changing shapes'),
        (["data.document_mask=true"], None),
        (
            ["data.document_mask=true", "model.family=gemma2"],
            "a replay of a CUDA graph makes no copies of the host's masks, which attention with a softcap needs for "
            "packed documents; set data.document_mask=false",
        ),
        *(
            (
                [*OF_EXPERTS, *more],
                "the host reads how many tokens each expert gets, unless layers have sizes that are multiples of 8 and "
                "are in bf16; write bf16 in the layout",
            )
            for more in (
                [],
                ["layout=dp1 bf16", "model.expert_intermediate=20"],
                ["layout=tp2 bf16", "model.expert_intermediate=24"],
                ["layout=dp1 fp16"],
            )
        ),
        ([*OF_EXPERTS, "layout=dp2 zero1 bf16"], None),
        ([*OF_EXPERTS, "layout=tp2 bf16"], None),
        (
            [*OF_EXPERTS, "layout=tp2 ep2 bf16"],
            "CUDA graphs are not supported under ep; use only dp and tp",
        ),
        ([], None),
    ],
)
def test_recipe_that_no_graph_can_repeat_is_refused(overrides: list[str], reason: str | None, tiny_recipe: Path):
    changed = ["data.document_mask=false", *overrides]
    check_recipe(load_recipe(tiny_recipe, changed))
    recipe = load_recipe(tiny_recipe, [*changed, "train.cuda_graphs=true"])
    if reason is None:
        check_recipe(recipe)
        return
    with pytest.raises(UserError, match=re.escape(reason)) as error:
        check_recipe(recipe)
    assert str(error.value) == f'override "train.cuda_graphs=true": train.cuda_graphs: {reason}'


def test_windows_of_attention_with_softcap_are_refused_unless_sequences_fit_in_them(tiny_recipe: Path):
    recipe = load_recipe(tiny_recipe, ["train.cuda_graphs=true", "data.document_mask=false", "data.sequence=40"])
    check_cuda_graphs(recipe, dataclasses.replace(preset("gemma2-tiny"), sliding_window=40))
    with pytest.raises(UserError, match="attention with a softcap needs for sliding windows; set data.sequence=39"):
        check_cuda_graphs(recipe, dataclasses.replace(preset("gemma2-tiny"), sliding_window=39))
    check_cuda_graphs(recipe, dataclasses.replace(preset("gemma2-tiny"), sliding_window=39, attention_softcap=None))


def test_what_kernels_of_a_model_need_decides_what_is_refused(tiny_recipe: Path):
    """Chunks of attention as long as a sequence, heads of attention sinks, adapters that are not on experts."""
    given = ["train.cuda_graphs=true", "data.document_mask=true", "data.sequence=40", "layout=dp1 bf16"]
    recipe, plain = load_recipe(tiny_recipe, given), preset("gpt-oss-tiny")
    chunks = preset("llama4-tiny")
    adapters = [AdapterConfig(rank=3, targets=targets) for targets in (("q_proj",), ("q_proj", "w1"))]
    mixture = preset("mixtral-tiny")
    allowed = (
        dataclasses.replace(chunks, sliding_window=40, adapter=adapters[0]),
        plain,
        dataclasses.replace(mixture, adapter=adapters[0]),
    )
    for config in allowed:
        check_cuda_graphs(recipe, config)
    refused = {
        "attention with chunks needs for sliding windows": dataclasses.replace(chunks, sliding_window=39),
        "sinks, in types and head sizes that flash attention lacks,": dataclasses.replace(plain, head_dim=12),
        "sizes that are multiples of 8": dataclasses.replace(mixture, adapter=adapters[1]),
    }
    for reason, config in refused.items():
        with pytest.raises(UserError, match=reason):
            check_cuda_graphs(recipe, config)


@pytest.mark.parametrize(("capability", "able"), [((9, 0), True), ((10, 3), True), ((8, 0), False), ((12, 0), False)])
def test_experts_on_a_gpu_without_grouped_product_are_refused(
    capability: tuple[int, int], able: bool, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    recipe = load_recipe(tiny_recipe, ["train.cuda_graphs=true"])
    passes: Any = mock.Mock()
    passes.engine.mesh.device = torch.device("cuda")
    graph_passes(mock.Mock(), passes, recipe, preset("llama-tiny"))
    with nullcontext() if able else pytest.raises(UserError, match=f"this one has {capability[0]}.{capability[1]}"):
        graph_passes(mock.Mock(), passes, recipe, preset("mixtral-tiny"))
