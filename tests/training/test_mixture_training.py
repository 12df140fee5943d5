"""Training on weighted sources: the mixture follows the weights on every layout, and continues after a crash."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data import prepare
from meshwright.errors import UserError
from tests.training import training_cases as cases

LIBRARY = Path(sysconfig.get_path("stdlib"))
SOURCES = [
    {"path": str(LIBRARY / "heapq.py"), "weight": 1},
    {"path": str(LIBRARY / "textwrap.py"), "weight": 2},
]
CHANGES: dict[str, Any] = {"data_source": None, "data_sources": SOURCES, "checkpoint_every": 2, "run_seed": 3}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixtures")


def losses(place: Path) -> list[float]:
    return [line["loss"] for line in cases.metrics(place) if "loss" in line]


def test_mixture_order_is_equal_across_layouts_and_crashes(home, two):
    (alone,) = cases.run(None, home / "mixture alone", "dp1 fp32", **CHANGES)
    assert alone["error"] == ""
    broken = home / "mixture broken"
    cases.run(two, broken, "dp2 zero1 mb2 fp32", crash_after=3, **CHANGES)
    (resumed,) = cases.run(None, broken, "dp1 mb4 fp32", **CHANGES)
    assert "resumed from step-000002: 2 of 6 steps are done" in resumed["said"]
    assert losses(broken) == pytest.approx(losses(home / "mixture alone"), rel=1e-5)
    recipe = cases.recipe(broken, "dp1 fp32", **CHANGES)
    data = prepare(recipe.data, recipe.run.seed)
    first, _ = data.split("train").sequences_by_source
    samples = data.make_sample_order().sample(np.arange(48))
    assert int((samples < first).sum()) == 16  # samples of 6 steps of 8


def test_changed_mixture_weights_change_samples_and_refuse_resume(home):
    place = home / "mixture weights"
    other = [SOURCES[0] | {"weight": 5}, SOURCES[1]]
    cases.run(None, place, "dp1 fp32", **CHANGES | {"train_steps": 2})
    with pytest.raises(UserError, match=r"data.sources was \[\{path = .*it may not change"):
        cases.run(None, place, "dp1 fp32", **CHANGES | {"data_sources": other})
    cases.run(None, home / "mixture other", "dp1 fp32", **CHANGES | {"data_sources": other, "train_steps": 2})
    assert losses(home / "mixture other")[0] != pytest.approx(losses(place)[0], rel=1e-5)
