"""Configurations are read as their families define them; unimplemented features are rejected by name."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from meshwright import names
from meshwright.errors import ModelWarning, UserError
from meshwright.recipe import ModelRecipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.config_json import config_from_huggingface, config_from_path, config_to_huggingface
from meshwright.spec.families import FAMILIES
from meshwright.spec.presets import preset

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 499,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 499,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 64,
}
GPT_OSS: dict[str, Any] = {**LLAMA, "model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 5}


def read(base: dict[str, Any], **changes: Any) -> ModelConfig:
    return config_from_huggingface({**base, **changes})


def without(base: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in base.items() if name != key}


def test_the_families_are_the_published_names():
    runnable = {name for name, family in FAMILIES.items() if family.planning_only is None}
    encoders = {name for name, family in FAMILIES.items() if family.encoder}
    assert encoders == set(names.ENCODER_FAMILIES)
    assert runnable - encoders == set(names.FAMILIES)
    assert set(FAMILIES) - runnable == {"bloom", "nemotron"}


def test_both_spellings_of_rope_are_equivalent():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 16
    fourth = read(LLAMA, rope_theta=5e5, rope_scaling=scaling)
    fifth = read(LLAMA, rope_parameters={"rope_theta": 5e5, **scaling})
    per_layer_type = read(LLAMA, rope_parameters={"full_attention": {"rope_theta": 5e5, **scaling}})
    assert fourth == fifth == per_layer_type
    assert fourth.rope_theta == 5e5
    assert fourth.rope_scaling is not None
    assert fourth.rope_scaling.original_max_positions == 16


def test_plain_rope_in_either_spelling_is_no_scaling():
    assert read(LLAMA, rope_theta=5e5, rope_scaling=None) == read(
        LLAMA, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    )


def test_yarn_keeps_every_published_parameter():
    scaling = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "truncate": False,
    }
    config = read(LLAMA, rope_scaling=scaling)
    assert config.rope_scaling is not None
    assert config_to_huggingface(config)["rope_scaling"] == {**without(scaling, "type"), "rope_type": "yarn"}
    ratio = (0.1 * 0.8 * math.log(4) + 1) / (0.1 * 0.5 * math.log(4) + 1)
    assert config.rope_scaling.attention_scale == pytest.approx(ratio)
    plain = read(LLAMA, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert plain.rope_scaling is not None
    assert plain.rope_scaling.attention_scale == pytest.approx(0.1 * math.log(4) + 1)
    assert plain.rope_scaling.original_max_positions == 64


def test_yarn_without_a_factor_takes_the_ratio_of_lengths():
    config = read(LLAMA, rope_scaling={"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16})
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 4.0


def test_qwen2_windows_begin_at_max_window_layers():
    base = {**LLAMA, "model_type": "qwen2", "sliding_window": 16}
    assert read(base, use_sliding_window=False).sliding_window is None
    config = read(base, use_sliding_window=True, max_window_layers=3)
    assert [config.layer_window(layer) for layer in range(5)] == [None, None, None, 16, 16]
    types = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    listed = read(base, use_sliding_window=True, layer_types=types)
    assert [listed.layer_window(layer) for layer in range(5)] == [16, None, 16, None, 16]
    assert read(base, use_sliding_window=True, max_window_layers=9).sliding_window is None


def test_mistral_windows_every_layer_unless_null():
    base = {**LLAMA, "model_type": "mistral"}
    assert read(base, sliding_window=16).layer_window(4) == 16
    assert read(base, sliding_window=None).layer_window(0) is None
    assert read(base).sliding_window == 4096, "transformers' own default"


def test_embeddings_of_a_multimodal_model_are_tied_by_the_whole_configuration():
    text = {**LLAMA, "tie_word_embeddings": False}
    with pytest.warns(ModelWarning, match="only the language model"):
        assert read({"model_type": "gemma3", "text_config": text}).tied
        assert not read({"model_type": "gemma3", "text_config": text, "tie_word_embeddings": False}).tied


def test_a_base_of_windowed_layers_that_transformers_does_not_know_may_repeat_the_real_one():
    olmo3 = {**LLAMA, "model_type": "olmo3"}
    assert read(olmo3, rope_local_base_freq=500000.0) == read(olmo3)


def test_gemma2_windows_every_other_layer():
    config = preset("gemma-2-2b")
    assert [config.layer_window(layer) for layer in range(4)] == [4096, None, 4096, None]


def test_several_end_tokens_survive():
    config = read(LLAMA, eos_token_id=[7, 8, 9])
    assert (config.eos_token, config.eos_tokens) == (7, (7, 8, 9))
    assert config_to_huggingface(config)["eos_token_id"] == [7, 8, 9]


def test_gpt2_intermediate_defaults_to_four_times_hidden():
    assert read(GPT2).intermediate == 192
    assert read(GPT2, n_inner=100).intermediate == 100
    assert read(GPT2, n_inner=None).intermediate == 192


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (without(LLAMA, "model_type"), '"model_type" is missing'),
        (
            {**LLAMA, "model_type": "mamba"},
            "glm4, glm4_moe, gpt_oss, llama4_text, gpt2, bert, bloom, nemotron",
        ),
        (without(LLAMA, "hidden_size"), '"hidden_size" is missing'),
        (
            {
                **LLAMA,
                "model_type": "phi3",
                "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]},
            },
            "rope_scaling has 1 short_factors, one for each of 4 rotated pairs is needed",
        ),
        (
            {**LLAMA, "rope_scaling": {"type": "longrope", "short_factor": [1.0, "x"], "long_factor": [2.0]}},
            "\"short_factor\" must hold numbers above 0, not 'x'",
        ),
        (
            {**LLAMA, "rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": [2.0]}},
            '"short_factor" must be a list with one number for each rotated pair, not 1.0',
        ),
        (
            {**LLAMA, "model_type": "glm4", "head_dim": 8, "partial_rotary_factor": 0.1},
            "rotary_fraction 0.1 rotates 0.8 features of head_dim 8; it must",
        ),
        (
            {**LLAMA, "model_type": "glm4", "head_dim": 8, "partial_rotary_factor": 1.5},
            "rotary_fraction 1.5 rotates 12 features of head_dim 8; it must",
        ),
        ({**LLAMA, "rope_theta": 1e-200}, "rope_theta 1e-200 must be from 1e-18 to 1e+18"),
        ({**LLAMA, "rms_norm_eps": 1e300}, "norm_epsilon 1e+300 must be from 1e-18 to 1e+18"),
        ({**LLAMA, "rope_theta": float("nan")}, '"rope_theta" must be a number above 0, not nan'),
        (
            {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1e-200}},
            "rope_scaling: attention_factor 1e-200 must be from 1e-18 to 1e+18",
        ),
        (
            {**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 16}
            | {"rope_scaling": {"type": "su", "short_factor": [1e-300] * 4, "long_factor": [2.0] * 4}},
            "rope_scaling: short_factors 1e-300 must be from 1e-18 to 1e+18",
        ),
        ({**LLAMA, "model_type": "glm4", "head_dim": 9, "partial_rotary_factor": 0.5}, "head_dim 9 must be even"),
        (
            {**LLAMA, "model_type": "smollm3", "no_rope_layers": [1, 2, 1, 1, 1]},
            '"no_rope_layers" must be a list of 5 zeros and ones',
        ),
        ({**LLAMA, "model_type": "smollm3", "no_rope_layers": [1]}, '"no_rope_layers" must be a list of 5 zeros'),
        (
            {**LLAMA, "model_type": "granite", "residual_multiplier": 0},
            '"residual_multiplier" must be a number above 0',
        ),
        (
            {**LLAMA, "model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            'unsupported "attn_logit_softcapping" = 50.0; gemma3_text supports only None',
        ),
        (
            {**LLAMA, "model_type": "gemma2", "final_logit_softcapping": -1},
            '"final_logit_softcapping" must be a number',
        ),
        ({"model_type": "gemma3", "text_config": [1]}, '"text_config" must be an object, not [1]'),
        (
            {**LLAMA, "model_type": "olmo3", "rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2}}},
            "RoPE scaling in layers with a sliding window is not supported",
        ),
        (
            {**LLAMA, "model_type": "olmo3", "rope_parameters": {"full_attention": 5}},
            "some/config.json: rope_parameters: full_attention must be an object, not 5",
        ),
        (
            {**LLAMA, "model_type": "olmo3", "rope_local_base_freq": 100.0},
            'unsupported "rope_local_base_freq" = 100.0; olmo3 supports only the rope_theta of its layers with a',
        ),
        (
            {**LLAMA, "model_type": "smollm3", "sliding_window": 4, "layer_types": ["sliding_attention"] * 5},
            '"layer_types" lists sliding_attention, which "use_sliding_window" = false contradicts',
        ),
        *(
            (
                {**LLAMA, "model_type": family, "sliding_window": 4, "layer_types": ["full_attention"] * 5},
                f"{family} supports only one name for all layers, that which fits its sliding_window",
            )
            for family in ("phi3", "mistral")
        ),
        (
            {"model_type": "gemma3", "text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}},
            'some/config.json: text_config: quantized weights ("quantization_config" with "quant_method" \'gptq\'',
        ),
        ({**LLAMA, "hidden_size": "48"}, "\"hidden_size\" must be a whole number above 0, not '48'"),
        ({**LLAMA, "num_hidden_layers": 0}, '"num_hidden_layers" must be a whole number above 0, not 0'),
        ({**LLAMA, "vocab_size": True}, '"vocab_size" must be a whole number above 0, not True'),
        ({**LLAMA, "num_key_value_heads": 4}, '"num_attention_heads" 6 is not a multiple of "num_key_value_heads" 4'),
        ({**LLAMA, "hidden_size": 50}, '"hidden_size" 50 is not a multiple of "num_attention_heads" 6'),
        ({**LLAMA, "head_dim": 9}, "head_dim 9 must be even"),
        ({**LLAMA, "rms_norm_eps": "small"}, '"rms_norm_eps" must be a number above 0'),
        ({**LLAMA, "hidden_act": "mish"}, "\"hidden_act\" 'mish' is not supported"),
        ({**LLAMA, "tie_word_embeddings": "yes"}, '"tie_word_embeddings" must be true or false'),
        (
            {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}},
            'quantized weights ("quantization_config" with "quant_method" \'gptq\', "bits" 4) cannot be read; '
            'read are float8 in blocks ("quant_method": "fp8" with a "weight_block_size", as DeepSeek-V3), '
            'MXFP4 ("quant_method": "mxfp4", as gpt-oss) and unquantized weights',
        ),
        ({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, 'quantized weights ("quantization_config" with'),
        ({**LLAMA, "quantization_config": {**FP8, "fmt": "e5m2"}}, "\"fmt\" 'e5m2'"),
        ({**LLAMA, "quantization_config": {**FP8, "weight_block_size": [128, 0]}}, '"weight_block_size" [128, 0]'),
        ({**LLAMA, "quantization_config": True}, '"quantization_config" must be an object, not True'),
        ({**LLAMA, "partial_rotary_factor": 0.5}, 'unsupported "partial_rotary_factor" = 0.5; llama supports'),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 'RoPE scaling "dynamic" is not supported'),
        ({**LLAMA, "rope_scaling": {"type": "longrope"}}, 'RoPE scaling "longrope" needs "short_factor"'),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, 'RoPE scaling "linear" needs "factor"'),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0.5}}, '"factor" must be at least 1, not 0.5'),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0, "scale": 1}}, 'unknown key "scale"'),
        ({**LLAMA, "rope_scaling": {"type": "llama3", "factor": 8.0}}, 'needs "low_freq_factor"'),
        ({**LLAMA, "rope_scaling": 8}, "rope_scaling must be an object"),
        (
            {**LLAMA, "rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}},
            "rotary positions that differ between layers",
        ),
        ({**LLAMA, "model_type": "qwen3", "layer_types": ["chunked_attention"] * 5}, "layer type 'chunked_attention'"),
        ({**LLAMA, "model_type": "qwen3", "layer_types": ["full_attention"]}, '"layer_types" must be a list of 5'),
        (
            {**GPT2, "scale_attn_by_inverse_layer_idx": True},
            '"scale_attn_by_inverse_layer_idx" = True; gpt2 supports only False',
        ),
        ({**GPT2, "scale_attn_weights": False}, '"scale_attn_weights" = False; gpt2 supports only True'),
        ({**GPT2, "add_cross_attention": True}, '"add_cross_attention" = True; gpt2 supports only False'),
        ({**GPT_OSS, "swiglu_limit": 0}, '"swiglu_limit" must be a number above 0, not 0'),
        ({**GPT_OSS, "swiglu_limit": None, "swiglu_alpha": -1.0}, '"swiglu_alpha" must be a number above 0, not -1.0'),
        ({**GPT_OSS, "hidden_act": "gelu"}, "activation is always 'silu' in family gpt_oss, not 'gelu'"),
        ({**GPT_OSS, "experts_per_token": 3}, '"experts_per_token" = 3; gpt_oss supports only num_experts_per_tok'),
        ({**GPT_OSS, "norm_topk_prob": False}, '"norm_topk_prob" = False; gpt_oss supports only True'),
        (
            {**GPT_OSS, "model_type": "granitemoe", "norm_topk_prob": False},
            '"norm_topk_prob" = False; granitemoe supports only True',
        ),
        ({**GPT_OSS, "mlp_bias": True}, '"mlp_bias" = True; gpt_oss supports only False'),
        ({**GPT2, "n_head": 5}, '"n_embd" 48 is not a multiple of "n_head" 5'),
    ],
)
def test_unsupported_config_features_are_refused_by_name(config: dict[str, Any], message: str):
    with pytest.raises(UserError) as error:
        config_from_huggingface(config, where="some/config.json")
    assert message in str(error.value)
    assert str(error.value).startswith("some/config.json: ")
    assert "\n" not in str(error.value)


def test_null_for_a_number_is_the_default_of_its_family():
    gpt_oss, nothing = read(GPT_OSS), {"swiglu_limit": None, "swiglu_alpha": None}
    assert read(GPT_OSS, **nothing) == gpt_oss and (gpt_oss.swiglu_limit, gpt_oss.swiglu_alpha) == (7.0, 1.702)
    llama4 = {**LLAMA, "model_type": "llama4_text", "head_dim": 8}
    scaled = read(llama4, attn_scale=None, floor_scale=None)
    assert scaled == read(llama4) and (scaled.temperature_scale, scaled.temperature_floor) == (0.1, 8192)


def test_load_balancing_loss_of_gpt_oss_counts_only_where_its_file_switches_it_on():
    loss = {"router_aux_loss_coef": 0.9}
    assert [read(GPT_OSS, **loss, **more).router_loss for more in (
        {}, {"output_router_logits": False}, {"output_router_logits": True})] == [0.0, 0.0, 0.9]  # fmt: skip
    assert [preset(name).router_loss for name in ("gpt-oss-20b", "gpt-oss-120b", "gpt-oss-tiny")] == [0.0, 0.0, 0.02]
    assert read({**LLAMA, "model_type": "mixtral"}, **loss, output_router_logits=False).router_loss == 0.9
    for config in (preset("gpt-oss-20b"), preset("gpt-oss-tiny")):
        assert read(config_to_huggingface(config)) == config


def test_fixed_family_fields_cannot_be_changed():
    with pytest.raises(UserError, match="gated is always True in family llama"):
        dataclasses.replace(read(LLAMA), gated=False)
    with pytest.raises(UserError, match="sliding_window is always None in family llama"):
        dataclasses.replace(read(LLAMA), sliding_window=8)


@pytest.mark.parametrize(
    ("path", "hinted"),
    [("Qwen/Qwen3-8B", True), ("meta-llama/Llama-3.2-1B", True), ("here/model", False), ("a/b/c", False),
     ("no/config.json", False), ("../model", False)],
)  # fmt: skip
def test_missing_directory_named_like_a_hub_model_says_how_to_download(path, hinted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(UserError, match="no such file; a Hugging Face directory or a config.json is needed") as caught:
        config_from_path(path)
    assert (f'"hf download {path} --local-dir DIR"' in str(caught.value)) == hinted


def test_a_file_is_read_from_its_directory_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert config_from_path(tmp_path) == config_from_path(tmp_path / "config.json") == read(LLAMA)


def test_invalid_config_files_are_named(tmp_path):
    file = tmp_path / "config.json"
    (tmp_path / "checkpoints/step-000100").mkdir(parents=True)
    with pytest.raises(UserError, match="step-000300: no such file; checkpoints there: step-000100$"):
        config_from_path(tmp_path / "checkpoints/step-000300")
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        config_from_path(tmp_path)
    file.write_text('{"model_type": ')
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        config_from_path(tmp_path)
    file.write_text("[1]")
    with pytest.raises(UserError, match="must hold one JSON object, not list"):
        config_from_path(tmp_path)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not JSON: byte 0 is not UTF-8"):
        config_from_path(tmp_path)


def test_the_shipped_trained_model_is_a_llama(shared_data):
    config = config_from_path(shared_data / "stories260k")
    assert (config.family, config.layers, config.heads, config.kv_heads, config.tied) == ("llama", 5, 8, 4, True)


def recipe(**fields: Any) -> ModelRecipe:
    return ModelRecipe.model_validate(fields)


def test_a_family_with_sizes_is_a_model():
    config = config_from_recipe(recipe(family="llama", layers=2, hidden=256, heads=4), 128, 1000)
    assert (config.kv_heads, config.head_dim, config.vocabulary, config.max_positions) == (4, 64, 1000, 128)
    assert config.intermediate == 704, "8/3 of hidden, up to a multiple of 64"
    gpt2 = config_from_recipe(recipe(family="gpt2", layers=2, hidden=256, heads=4), 128, 1000)
    assert (gpt2.intermediate, gpt2.positions, gpt2.tied) == (1024, "learned", True)
    qwen3 = config_from_recipe(
        recipe(family="qwen3", layers=2, hidden=256, heads=4, head_dim=32, kv_heads=1), 128, 1000
    )
    assert (qwen3.head_dim, qwen3.kv_heads, qwen3.query_key_norm) == (32, 1, True)


def test_fields_of_the_recipe_override_the_preset():
    config = config_from_recipe(recipe(preset="llama-3-8b", layers=2, hidden=512, heads=8, kv_heads=2), 128, 1000)
    assert (config.layers, config.head_dim, config.intermediate) == (2, 64, 14336)
    assert (config.vocabulary, config.rope_theta, config.max_positions) == (1000, 500000.0, 8192)
    assert config.eos_tokens == (), "the preset's end token belongs to the preset's tokenizer"
    gpt2 = config_from_recipe(recipe(preset="gpt2", hidden=96, layers=2), 128, 1000)
    assert (gpt2.intermediate, gpt2.head_dim, gpt2.kv_heads) == (384, 8, 12)
    mistral = config_from_recipe(recipe(preset="mistral-tiny", sliding_window=32, tied=False), 128, 1000)
    assert (mistral.layer_window(0), mistral.tied) == (32, False)
    scaled = config_from_recipe(
        recipe(preset="llama-tiny", max_positions=1024, rope_scaling={"rope_type": "linear", "factor": 2}), 1024, 300
    )
    assert scaled.rope_scaling is not None
    assert (scaled.max_positions, scaled.rope_scaling.factor) == (1024, 2.0)


SIZES: dict[str, Any] = {
    "num_hidden_layers": 7,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}


@pytest.mark.parametrize("family", ["olmo2", "olmo3", "smollm3", "gemma2", "gemma3_text", "phi3", "glm4", "granite"])
def test_a_family_of_a_recipe_has_the_defaults_of_transformers(family: str):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes: dict[str, Any] = {**SIZES, "vocab_size": 300, "intermediate_size": 192, "max_position_embeddings": 64}
    theirs = CONFIG_MAPPING[family](**sizes)
    want = read({**theirs.to_dict(), "architectures": None}, bos_token_id=None, eos_token_id=None, rms_norm_eps=1e-5)
    found = config_from_recipe(recipe(family=family, layers=7, hidden=64, heads=4), 64, 300)
    if want.attention_scale is not None:  # of a head of 256 features, or 1
        want = dataclasses.replace(want, attention_scale=16**-0.5)
    assert found == want


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gemma-2-2b", 53), ("gemma-3-1b", 53), ("gemma-3-1b", 3), ("olmo-3-7b", 49), ("smollm3-3b", 71),
        ("qwen2.5-0.5b", 31), ("smollm3-tiny", 9), ("gemma3-tiny", 9),
    ],
)  # fmt: skip
def test_more_layers_continue_the_pattern_of_the_family(name: str, layers: int):
    data = config_to_huggingface(preset(name))
    types, rotates = data.pop("layer_types", None), data.pop("no_rope_layers", None)
    if name == "smollm3-tiny":
        data["no_rope_layers"] = [*(rotates[:2] * layers)[:layers]]
    if name == "gemma3-tiny":
        data["layer_types"] = [*(types[:3] * layers)[:layers]]
    want = read({**data, "num_hidden_layers": layers, "vocab_size": 300}, bos_token_id=None, eos_token_id=None)
    assert config_from_recipe(recipe(preset=name, layers=layers), 64, 300) == want


def test_one_base_of_rotary_positions_is_changed_in_all_layers():
    olmo3 = config_from_recipe(recipe(preset="olmo-3-7b", rope_theta=1e6), 64, 300)
    assert (olmo3.rope_theta, olmo3.window_rope_theta) == (1e6, 1e6)
    gemma3 = config_from_recipe(recipe(preset="gemma-3-1b", rope_theta=2e6), 64, 300)
    assert (gemma3.rope_theta, gemma3.window_rope_theta) == (2e6, 1e4), "two bases"


def test_a_directory_keeps_its_own_vocabulary(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    table = recipe(**{"from": str(tmp_path)})
    assert config_from_recipe(table, 64, 499).vocabulary == 499
    assert config_from_recipe(table, 64, 300).vocabulary == 499
    with pytest.raises(UserError, match=r"model.vocabulary 499 is smaller than the tokenizer's 500"):
        config_from_recipe(table, 64, 500)


@pytest.mark.parametrize(
    ("fields", "sequence", "message"),
    [
        ({"preset": "lama-3-8b"}, 128, 'unknown preset "lama-3-8b"; did you mean "llama-3-8b"?'),
        ({"preset": "gpt2"}, 2048, "data.sequence 2048 is longer than the model's 1024 positions"),
        ({"preset": "llama-tiny", "vocabulary": 100}, 128, "model.vocabulary 100 is smaller than the tokenizer's 1000"),
        ({"preset": "llama-tiny", "kv_heads": 3}, 128, "heads 8 must be a multiple of kv_heads 3"),
        ({"preset": "llama-tiny", "sliding_window": 3}, 128, "sliding_window is always None in family llama"),
        ({"preset": "llama-tiny", "rope_scaling": {"type": "ntk"}}, 128, 'model.rope_scaling: RoPE scaling "ntk"'),
        ({"family": "llama", "layers": 1, "hidden": 50, "heads": 4}, 128, "model.hidden 50 must be a multiple of"),
        ({"from": "/nowhere/at/all"}, 128, "/nowhere/at/all: no such file"),
    ],
)
def test_errors_in_the_model_table_are_one_line(fields: dict[str, Any], sequence: int, message: str):
    with pytest.raises(UserError) as error:
        config_from_recipe(recipe(**fields), sequence, 1000)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
