"""Engines on several ranks answer as one process does, and each request as if it were alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.comm.local import LocalRanks
from meshwright.kernels.library import load_kernels
from meshwright.spec.config_json import config_from_path
from meshwright.spec.refuse import serving_layout
from tests.serving import offline_cases as cases
from tests.serving.small_models import small_config, write_model

# Windows and grouped heads; learned positions, biases and a tied head; experts with a shared one; experts without.
MODELS = ["mistral-tiny", "gpt2-tiny", "qwen2-moe-tiny", "mixtral-tiny"]


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"experts": 4} if request.param in ("qwen2-moe-tiny", "mixtral-tiny") else {"tied": True}
    return write_model(tmp_path_factory.mktemp("model"), small_config(request.param, **changes))


@pytest.mark.parametrize("layout", ["tp2 pp2", "tp4", "tp4 ep4", "tp4 ep2", "pp2 dp2"])
def test_ranks_answer_as_one_process(four: LocalRanks, directory: Path, layout: str):
    config = config_from_path(directory)
    if "ep" in layout and (not config.experts or load_kernels() is None):
        pytest.skip("experts need an expert model and kernels")
    alone = cases.run(str(directory), "dp1")
    ranks = four.run(cases.run, str(directory), str(serving_layout(layout, config)))
    for rank in ranks:
        assert rank["together"] == rank["alone"] == ranks[0]["together"]
        for name, results in rank["together"].items():
            expected = alone["together"][name]
            assert [token for token, _ in results] == [token for token, _ in expected], name
            assert [value for _, value in results] == pytest.approx([value for _, value in expected], abs=1e-4)
        assert rank["held"] < 0.85 * alone["held"]
