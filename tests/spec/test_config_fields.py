"""No config.json field is silently ignored: it is read, known to have no effect, rejected, or warned about."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from meshwright.errors import ModelWarning, UserError
from meshwright.spec.config_fields import get_field_table
from meshwright.spec.config_json import config_from_huggingface, config_to_huggingface, read_fields
from meshwright.spec.families import FAMILIES
from meshwright.spec.presets import PRESETS
from tests.spec.test_config import GPT2, LLAMA


class Recorded(Mapping[str, Any]):
    """A configuration that records which fields are looked up."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data, self.seen = data, set[str]()

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def items(self) -> Any:
        return self.data.items()


def configuration(family: str, **changes: Any) -> dict[str, Any]:
    """The default configuration of a family, as transformers writes it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    data = {**CONFIG_MAPPING[family]().to_dict(), "architectures": None}
    if family == "dots1":
        data |= {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
    if family == "glm4_moe":
        data |= {"head_dim": 128}
    if family == "deepseek_v2":
        data |= {"num_experts_per_tok": 6}
    return {**data, **changes}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_transformers_config_field_is_in_table(family: str):
    table = get_field_table(family)
    known = table.read | table.ignored | set(table.neutral)
    assert set(configuration(family)) <= known, "decide for each new field if it changes the computation"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config_from_huggingface(configuration(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_field_table_lists_exactly_the_fields_read(family: str):
    looked_at = set[str]()
    for changes in ({}, {"layer_types": None}, {"use_sliding_window": True, "sliding_window": 16, "layer_types": None}):
        if changes and not changes.keys() <= get_field_table(family).read:
            continue
        recorded = Recorded(configuration(family, **changes))
        read_fields(recorded, "config.json")
        looked_at |= recorded.seen
    table = get_field_table(family)
    assert looked_at - {"quantization_config", "compression_config"} <= table.read | table.ignored
    assert table.read - looked_at == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_is_in_one_class(family: str):
    table = get_field_table(family)
    assert not table.read & table.ignored and not set(table.neutral) & (table.read | table.ignored)


def test_presets_and_written_configurations_hold_known_fields_only():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for preset in PRESETS.values():
            if not preset.config.planning_only:
                assert config_from_huggingface(config_to_huggingface(preset.config)) == preset.config


@pytest.mark.parametrize(
    ("base", "field", "neutral", "other"),
    [
        (LLAMA, "attention_multiplier", 8**-0.5, 0.0078125),
        (LLAMA, "query_pre_attn_scalar", 8, 224),
        (LLAMA, "logits_scaling", 1.0, 8.0),
        (LLAMA, "logit_scale", 1, 0.0625),
        (LLAMA, "residual_multiplier", 1.0, 0.22),
        (LLAMA, "embedding_multiplier", 1.0, 12.0),
        (LLAMA, "attn_logit_softcapping", None, 50.0),
        (LLAMA, "final_logit_softcapping", None, 30.0),
        (LLAMA, "partial_rotary_factor", 1.0, 0.5),
        (LLAMA, "rotary_pct", 1.0, 0.25),
        (LLAMA, "clip_qkv", None, 8.0),
        (LLAMA, "use_qk_norm", False, True),
        (LLAMA, "layer_types", ["full_attention"] * 5, ["sliding_attention"] * 5),
        (LLAMA, "no_rope_layers", [1] * 5, [1, 1, 1, 0, 1]),
        (LLAMA, "attention_chunk_size", None, 8192),
        (LLAMA, "use_sliding_window", False, True),
        (LLAMA, "num_local_experts", 0, 8),
        (LLAMA, "parallel_attn", False, True),
        ({**LLAMA, "model_type": "mistral"}, "attention_bias", False, True),
        ({**LLAMA, "model_type": "mistral"}, "mlp_bias", False, True),
        ({**LLAMA, "model_type": "qwen2"}, "attention_bias", True, False),
        ({**LLAMA, "model_type": "qwen3"}, "use_qk_norm", True, False),
        (GPT2, "scale_attn_by_inverse_layer_idx", False, True),
        (GPT2, "attention_bias", False, True),
    ],
)
def test_computation_changing_field_is_accepted_only_at_neutral_value(
    base: dict[str, Any], field: str, neutral: object, other: object
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config_from_huggingface({**base, field: neutral}) == config_from_huggingface(base)
    with pytest.raises(UserError) as error:
        config_from_huggingface({**base, field: other}, "some/config.json")
    text = str(error.value)
    assert text.startswith(f'some/config.json: unsupported "{field}" = ') and " supports only " in text


@pytest.mark.parametrize("kind", ["default", None])
def test_unknown_plain_rope_key_is_refused(kind: str | None):
    with pytest.raises(UserError, match='unknown key "mrope_section" for RoPE scaling "default"'):
        config_from_huggingface({**LLAMA, "rope_scaling": {"rope_type": kind, "mrope_section": [16, 24, 24]}})


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (LLAMA, "_num_labels", 2), (LLAMA, "max_sequence_length", 2048), (LLAMA, "problem_type", "regression"),
        (GPT2, "n_special", 0), (GPT2, "predict_special_tokens", True),
    ],
)  # fmt: skip
def test_published_config_fields_without_effect_raise_no_warning(base, field: str, value: object):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config_from_huggingface({**base, field: value}) == config_from_huggingface(base)


def test_unknown_fields_are_named_in_one_warning():
    data = {**LLAMA, "temperature_of_scores": 2.0, "extra_norm": True, "said_nothing": None}
    with pytest.warns(ModelWarning) as found:
        config_from_huggingface(data, "some/config.json")
    (line,) = (str(each.message) for each in found)
    assert line.startswith('some/config.json: unknown llama fields ignored: "temperature_of_scores", "extra_norm"')


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}},
            "is never run; treated as LlamaForCausalLM",
        ),
        ({"architectures": ["OwnForCausalLM"]}, "names OwnForCausalLM; treated as LlamaForCausalLM"),
        ({"architectures": 5}, "names 5; treated as LlamaForCausalLM"),
    ],
)
def test_custom_modeling_code_is_warned_about(changes: dict[str, Any], said: str):
    with pytest.warns(ModelWarning, match=said):
        config_from_huggingface({**LLAMA, **changes})
