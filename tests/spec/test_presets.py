"""Every public preset has exactly the published number of parameters."""

from __future__ import annotations

import pytest

from meshwright.errors import UserError
from meshwright.spec.config_json import config_from_huggingface, config_to_huggingface
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import PRESETS, preset

PUBLISHED = {name: entry.parameters for name, entry in PRESETS.items() if entry.parameters is not None}


def test_preset_data_match_figures_of_model_pages():
    """A few published totals, so that data and table cannot be wrong together."""
    for name, parameters in {
        "gpt2": 124_439_808,
        "gpt2-xl": 1_557_611_200,
        "llama-2-7b": 6_738_415_616,
        "llama-3-8b": 8_030_261_248,
        "llama-3.1-405b": 405_853_388_800,
        "mistral-7b-v0.3": 7_248_023_552,
        "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-72b": 72_706_203_648,
        "qwen3-1.7b": 1_720_574_976,
        "mixtral-8x7b-v0.1": 46_702_792_704,
        "qwen1.5-moe-a2.7b": 14_315_784_192,
        "qwen3-30b-a3b": 30_532_122_624,
        "qwen3-235b-a22b": 235_093_634_560,
        "deepseek-v2-lite": 15_706_484_224,
        "deepseek-v2": 235_741_434_880,
        "deepseek-v3": 671_026_419_200,
        "bloom-176b": 176_247_271_424,
        "gemma-2-27b": 27_227_128_320,
        "granite-3.0-1b-a400m": 1_334_628_352,
        "gpt-oss-20b": 20_914_757_184,
        "gpt-oss-120b": 116_829_156_672,
    }.items():
        assert PUBLISHED[name] == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_table_matches_published_parameter_counts(name: str):
    assert parameter_table(preset(name)).numel == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b-v0.1", 12.9),
        ("mixtral-8x22b-v0.1", 39),
        ("qwen1.5-moe-a2.7b", 2.7),
        ("qwen2-57b-a14b", 14),
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22),
        ("dots-llm1", 14),
        ("deepseek-v2", 21),
        ("deepseek-v3", 37),
        ("llama-4-scout", 17),
        ("llama-4-maverick", 17),
    ],
)
def test_active_parameters_match_published_counts(name: str, billions: float):
    assert parameter_table(preset(name)).active_numel / 1e9 == pytest.approx(billions, rel=0.03)
    assert parameter_table(preset("llama-3-8b")).active_numel == PUBLISHED["llama-3-8b"]


@pytest.mark.parametrize(
    ("name", "billions", "error"),
    [("deepseek-v2-lite", 2.4, 0.03), ("gpt-oss-20b", 3.61, 0.001), ("gpt-oss-120b", 5.13, 0.001)],
)
def test_active_parameters_of_some_models_are_published_without_embedding(name: str, billions: float, error: float):
    config = preset(name)
    active = parameter_table(config).active_numel - config.vocabulary * config.hidden
    assert active / 1e9 == pytest.approx(billions, rel=error)


def test_gpt3_is_within_third_of_percent_of_rounded_count():
    assert parameter_table(preset("gpt3-175b")).numel == pytest.approx(175.0e9, rel=1 / 300)


def test_own_preset_names_match_their_parameter_counts():
    for name, parameters in {"llama-3m": 3e6, "llama-30m": 30e6, "llama-125m": 125e6, "llama-1b": 1.1e9}.items():
        assert parameter_table(preset(name)).numel == pytest.approx(parameters, rel=0.1)


def test_every_preset_has_source_and_writes_config_or_reason():
    for name, entry in PRESETS.items():
        assert entry.source, name
        if entry.config.planning_only is None:
            assert config_from_huggingface(config_to_huggingface(entry.config)) == entry.config
        else:
            with pytest.raises(UserError, match="can be planned but not written"):
                config_to_huggingface(entry.config)


def test_unknown_preset_error_names_the_nearest():
    with pytest.raises(UserError, match='unknown preset "qwen3-8"; did you mean "qwen3-8b"'):
        preset("qwen3-8")
    assert "qwen3-8" not in PRESETS
