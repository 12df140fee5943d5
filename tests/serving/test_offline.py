"""Engines on several ranks give the answers of one process, and each request its answer in isolation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.comm.local import LocalRanks
from meshwright.spec.config_json import config_from_path
from meshwright.spec.refuse import serving_layout
from tests.conftest import covering
from tests.serving import offline_cases as cases
from tests.serving.small_models import NEEDS_COMPILER, list_layout_features, small_config, write_model

# Windows and grouped heads (mistral); learned positions, biases and a tied head (gpt2); experts with a shared one
# (qwen2-moe) and without (gpt-oss).
CASES = [
    ("mistral-tiny", "tp4"),
    ("deepseek-v3-tiny", "tp2 pp2"),
    ("qwen2-tiny", "pp2 dp2"),  # windows in some layers
    ("gpt2-tiny", "tp2 pp2"),
    ("qwen2-moe-tiny", "tp2 pp2"),
    pytest.param("qwen2-moe-tiny", "tp4 ep2", marks=NEEDS_COMPILER),
    pytest.param("mixtral-tiny", "tp2 pp2 ep2", marks=NEEDS_COMPILER),
    ("olmo3-tiny", "tp2 pp2"),  # norms over the heads of all ranks
    pytest.param("gpt-oss-tiny", "tp2 pp2 ep2", marks=NEEDS_COMPILER),
    ("llama4-tiny", "tp2 pp2"),
    pytest.param("deepseek-v3-tiny", "tp2 pp2 ep2", marks=NEEDS_COMPILER),
    ("mistral-tiny", "tp2 pp2"),
    ("gpt2-tiny", "tp4"),
    ("gpt-oss-tiny", "tp2 pp2"),
    pytest.param("qwen2-moe-tiny", "tp4 ep4", marks=NEEDS_COMPILER),
]
Run = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def run_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Directory of a model and what one process answers with it."""
    place, made = tmp_path_factory.mktemp("models"), dict[str, Run]()

    def find(name: str) -> Run:
        if name not in made:
            changes = {"experts": 4} if name in ("qwen2-moe-tiny", "mixtral-tiny", "gpt-oss-tiny") else {"tied": True}
            directory = write_model(place / name, small_config(name, **changes))
            made[name] = directory, cases.run(str(directory), "dp1")
        return made[name]

    return find


@pytest.mark.parametrize(("name", "layout"), covering(CASES, list_layout_features))
def test_several_ranks_answer_like_one_process(
    four: LocalRanks, run_alone: Callable[[str], Run], name: str, layout: str
):
    directory, alone = run_alone(name)
    config = config_from_path(directory)
    ranks = four.run(cases.run, str(directory), str(serving_layout(layout, config)))
    for rank in ranks:
        assert rank["together"] == rank["alone"] == ranks[0]["together"]
        for request, results in rank["together"].items():
            expected = alone["together"][request]
            assert [token for token, _ in results] == [token for token, _ in expected], request
            assert [value for _, value in results] == pytest.approx([value for _, value in expected], abs=1e-4)
        assert rank["held"] < 0.85 * alone["held"]
