"""`layout = "auto"`: the planner chooses for the measured machine; without a profile an error says what to do."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.launcher.recipe_checks import check_recipe
from meshwright.layout import Layout
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.models import config_of
from meshwright.planner.search.estimate import estimate_layout, problem_of
from meshwright.planner.search.search import search
from meshwright.recipe import Recipe, load_recipe
from meshwright.spec.refuse import refuse
from meshwright.toml import format_toml
from meshwright.training import automatic
from meshwright.training.automatic import search_fastest_layout
from tests.planner.calibration_cases import cluster_file

TABLES: dict[str, Any] = {
    "layout": "auto",
    "run": {"device": "cpu"},
    "model": {"family": "llama", "layers": 4, "hidden": 64, "heads": 4},
    "data": {"source": "stdlib", "tokenizer": "bytes", "sequence": 64},
    "train": {"steps": 2, "batch": 8, "learning_rate": 1e-3},
}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of four processes with a cluster file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "meshwright" / "cluster.toml"
    path.parent.mkdir()
    device = {"name": "cpu", "memory_bytes": 4e9, "memory_gb_per_second": 8.0, "peaks": {"fp32": 0.05, "bf16": 0.01}}
    path.write_text(format_toml({"device": device, "devices": 4, "inside_gb_per_second": 1.0}))
    return path


def test_planner_chooses_among_all_layouts_of_the_machine(measured: Path):
    said: list[str] = []
    recipe = Recipe.from_tables(TABLES)
    layout = Layout.parse(search_fastest_layout(recipe, None, said.append))
    assert layout.world_size == 4 and layout.precision is None
    refuse(layout, config_of(recipe)[0], 8, 64, 4)
    assert len(said) == 1 and str(layout) in said[0] and "the fastest of" in said[0]
    assert Layout.parse(search_fastest_layout(recipe, 2, said.append)).world_size == 2  # as many as were started


def test_planner_prices_the_teacher_of_a_distillation(measured: Path, tmp_path: Path):
    """A teacher of six layers of four times the width computes much more than the student of four layers."""
    teacher = {
        "model_type": "llama", "vocab_size": 257, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 4,
    }  # fmt: skip
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(teacher))
    predicted = []
    for more in ({}, {"distill": {"teacher": str(tmp_path / "teacher")}}):
        said: list[str] = []
        layout = search_fastest_layout(Recipe.from_tables(TABLES | more), None, said.append)
        seconds = re.search(r"([\d.e-]+) s a step", said[0])
        assert seconds is not None and layout in said[0]
        predicted.append(float(seconds[1]))
    alone, distilled = predicted
    assert distilled > 3 * alone


def test_planner_prices_cuda_graphs(monkeypatch: pytest.MonkeyPatch):
    """On a GPU whose memory is too small for the workspaces of a capture (64 MiB), but not for a run without graphs."""
    plain, graphed = (
        Recipe.from_tables(TABLES | {"train": TABLES["train"] | {"cuda_graphs": graphs}}) for graphs in (False, True)
    )
    gpu = cluster("1xh100-sxm")
    least = min(each.memory.device_bytes for each in search(problem_of(plain, gpu), 100).best)
    small = replace(gpu, device=replace(gpu.device, memory_bytes=least + 2**25))
    monkeypatch.setattr(automatic, "_find_devices", lambda *_: small)
    assert Layout.parse(search_fastest_layout(plain, None, print)).world_size == 1
    with pytest.raises(UserError, match="none of .* layouts fits into the memory"):
        search_fastest_layout(graphed, None, print)


def test_planner_offers_what_train_accepts_with_cuda_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a CPU too, where graphs change no step time."""
    cpus = cluster(str(cluster_file(tmp_path, devices=4, devices_per_node=4)))
    monkeypatch.setattr(automatic, "_find_devices", lambda *_: cpus)
    tables = TABLES | {"data": TABLES["data"] | {"document_mask": False}}
    recipes = [Recipe.from_tables(tables | {"train": TABLES["train"] | {"cuda_graphs": it}}) for it in (False, True)]
    launched, graphed = (problem_of(recipe, cpus) for recipe in recipes)
    found = search(graphed, 1000)
    assert cpus.kind == "cpu" and found.searched == len(found.best) == 72
    assert found.best[0].time.seconds == estimate_layout(launched, found.best[0].layout).time.seconds
    for layout in (*(str(each.layout) for each in found.best[::6]), search_fastest_layout(recipes[1], None, print)):
        check_recipe(Recipe.from_tables(recipes[1].to_tables() | {"layout": layout}))


def test_unmeasured_machine_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match='run "meshwright probe", or "meshwright train" without --no-probe'):
        search_fastest_layout(Recipe.from_tables(TABLES), None, print)


def test_model_without_fitting_layout_is_one_line(measured: Path):
    measured.write_text(measured.read_text().replace("4000000000.0", "2000000.0"))
    with pytest.raises(UserError, match="none of .* layouts fits into the memory"):
        search_fastest_layout(Recipe.from_tables(TABLES), None, print)


def test_commands_other_than_train_need_a_layout(tmp_path: Path):
    path = tmp_path / "recipe.toml"
    path.write_text(format_toml(TABLES))
    with pytest.raises(UserError, match=r'recipe.toml: layout "auto" is resolved by `meshwright train` only; give one'):
        _ = load_recipe(path).parsed_layout
