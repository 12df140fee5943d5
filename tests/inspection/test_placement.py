"""Predicted placement matches training, counted from the tensors."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.comm.local import LocalRanks
from meshwright.errors import UserError
from meshwright.inspection.placement import describe_placement
from meshwright.inspection.report import inspect_model
from meshwright.model.transformer import Transformer
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameter_entries import ALIGNMENT
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from tests.inspection.placement_cases import parameter_bytes


def config() -> ModelConfig:
    """Return a model with five layers and a tied embedding."""
    return dataclasses.replace(preset("qwen3-tiny"), layers=5)


def padded(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def of_layers(model: ModelConfig, layers: list[int], more: str) -> int:
    """Return the elements of the tensors of `layers`, and of those whose name matches `more`; each unit is padded to
    aligned buffers."""
    units: dict[str, int] = {}
    for entry in parameter_table(model).entries:
        layer = re.match(r"model\.layers\.(\d+)\.", entry.name)
        if (layer and int(layer[1]) in layers) or re.match(more, entry.name):
            units[layer[1] if layer else entry.unit] = units.get(layer[1] if layer else entry.unit, 0) + entry.numel
    return sum(map(padded, units.values()))


def test_stages_hold_their_layers_embedding_and_head():
    model = config()
    found = describe_placement(model, "pp2", "F32", 128)["ranks"]
    assert [rank["pp"] for rank in found] == [0, 1]
    assert found[0]["layers"] + found[1]["layers"] == list(range(model.layers))
    assert found[0]["embedding"] and found[1]["head"] and not found[0]["head"]
    assert found[0]["elements"] == of_layers(model, found[0]["layers"], r"model\.embed")
    last = r"model\.norm|lm_head" + (r"|model\.embed" if model.tied else "")
    assert found[1]["elements"] == of_layers(model, found[1]["layers"], last)
    assert all(rank["bytes"] == 4 * rank["elements"] for rank in found)


@pytest.mark.parametrize(("layout", "shards"), [("dp4", 1), ("dp4 zero1", 1), ("dp4 zero3", 4), ("dp4 zero3 hs2", 2)])
def test_zero_3_alone_shards_parameters_between_steps(layout: str, shards: int):
    whole = describe_placement(config(), "dp1", "F32", 128)["ranks"][0]["elements"]
    found = describe_placement(config(), layout, "F32", 128)["ranks"]
    assert len(found) == 4
    for rank in found:
        assert whole / shards <= rank["elements"] < whole / shards * 1.01 + 32 * 40


def test_placed_bytes_follow_precision_and_stored_dtype():
    by_disk, by_layout = (describe_placement(config(), layout, "BF16", 128) for layout in ("pp2", "pp2 fp32"))
    assert (by_disk["precision"], by_layout["precision"]) == ("bf16", "fp32")
    assert [2 * rank["bytes"] for rank in by_disk["ranks"]] == [rank["bytes"] for rank in by_layout["ranks"]]
    training = by_disk["ranks"][0]["training_bytes"]
    assert training["optimizer"] == 2 * training["masters"] == 4 * training["parameters"]


def test_placement_of_experts_matches_expert_parallelism():
    model = dataclasses.replace(preset("mixtral-tiny"), experts=6)
    found = describe_placement(model, "dp2 ep2", "F32", 128)["ranks"]
    assert found[0]["experts"] + found[1]["experts"] == list(range(6))


def test_v_shaped_schedule_places_both_chunks_on_their_rank():
    found = describe_placement(config(), "pp2:zb-v mb4", "F32", 128)["ranks"]
    assert [rank["stages"] for rank in found] == [[0, 3], [1, 2]]
    assert found[0]["embedding"] and found[0]["head"] and not found[1]["head"]


def test_placed_elements_match_training_buffers():
    with LocalRanks(4, threads=1) as ranks:
        for layout in ("pp2 dp2 zero3", "tp2 pp2", "dp2 pp2:interleaved mb2", "pp2:zb-v mb4 dp2 zero2"):
            kept = ranks.run(parameter_bytes, config(), layout, 128)
            assert [rank["bytes"] for rank in describe_placement(config(), layout, "F32", 128)["ranks"]] == kept, layout


def test_command_groups_ranks_with_equal_contents(tmp_path: Path, command_line: Callable[..., Any]):
    model = config()
    save_huggingface(Transformer(model, dtype=torch.bfloat16), tmp_path / "model")
    shown = command_line("inspect", tmp_path / "model", "--layout", "pp2 tp2", "--no-statistics").output
    assert re.search(r"^0-1 +0-\d+ +embedding", shown, re.MULTILINE) and re.search(r"^2-3 .*head", shown, re.MULTILINE)
    document = json.loads(command_line("inspect", tmp_path / "model", "--layout", "pp2 tp2", "--json").output)
    assert document["parameters_of_config"] == document["elements"]
    assert [rank["tp"] for rank in document["placement"]["ranks"]] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("layout", "said"), [("tp3", "heads"), ("pp99", "5 layers"), ("nonsense", "unknown"), ("dp999999", "at most")]
)
def test_layout_impossible_for_model_is_refused_in_one_line(tmp_path: Path, layout: str, said: str):
    save_huggingface(Transformer(config()), tmp_path / "model")
    with pytest.raises(UserError, match=said) as caught:
        inspect_model(tmp_path / "model", layout=layout, values=None)
    assert "\n" not in str(caught.value)
