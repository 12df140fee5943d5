"""Every decoder family equals transformers in float64: logits, loss and gradients, and checkpoints both ways."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.errors import ModelWarning
from meshwright.kernels.row_order import find_half_rotation_order
from meshwright.model.documents import Documents
from meshwright.model.huggingface import load_huggingface
from meshwright.model.rope import RotaryTable, pad_pairs, rotate
from meshwright.spec.config_json import config_from_huggingface, config_to_huggingface
from meshwright.spec.families import FAMILIES
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from tests.model.transformers_names import entry_in_transformers

ODD: dict[str, Any] = {
    "vocab_size": 499, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WIDE = {**ODD, "head_dim": 10}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
PAIRS = [1.0, 1.5, 2.0]
LONGROPE = {"rope_type": "longrope", "short_factor": PAIRS, "long_factor": [2.0, 5.0, 9.0]}
FOUR_PAIRS = {"short_factor": [*PAIRS, 4.0], "long_factor": [9.0] * 4}
GEMMA = {**WIDE, "sliding_window": 7, "query_pre_attn_scalar": 3, "hidden_activation": "gelu_pytorch_tanh"}
CAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7}
TOP2 = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
SIGMOID = {
    "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 22,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 6, "q_lora_rank": 9, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "norm_topk_prob": False,
}  # fmt: skip
LLAMA4 = {
    "intermediate_size": 22, "intermediate_size_mlp": 30, "num_local_experts": 5, "attention_chunk_size": 7,
    "floor_scale": 3, "attn_scale": 0.6,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", WIDE),
    "mistral": ("mistral", {**WIDE, "sliding_window": 7}),
    "qwen2": ("qwen2", ODD),
    "qwen3": ("qwen3", WIDE),
    "gpt2": (
        "gpt2",
        {"vocab_size": 499, "n_embd": 48, "n_layer": 5, "n_head": 6, "n_positions": 64, "n_inner": 100}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "granite": (
        "granite",
        {**ODD, "attention_multiplier": 0.9, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
        | {"logits_scaling": 8.0},
    ),
    "granitemoe": (
        "granitemoe",
        {**ODD, **TOP2, "num_local_experts": 5, "intermediate_size": 22, "attention_multiplier": 0.9}
        | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0, "attention_bias": True},
    ),
    "granite, every bias": ("granite", {**ODD, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", ODD),
    "olmo2, biases": ("olmo2", {**ODD, "attention_bias": True, "num_key_value_heads": 1}),
    "olmo3": ("olmo3", {**ODD, "sliding_window": 7}),
    "olmo3, yarn in full attention": ("olmo3", {**ODD, "sliding_window": 7, "rope_scaling": YARN}),
    "smollm3": ("smollm3", {**ODD, "no_rope_layers": [1, 0, 1, 1, 0]}),
    "smollm3, windows": ("smollm3", {**ODD, "use_sliding_window": True, "sliding_window": 7}),
    "gemma2": ("gemma2", {**GEMMA, **CAPS}),
    "gemma2, no caps": ("gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {**GEMMA, "sliding_window_pattern": 3}),
    "gemma3, linear scaling, capped logits": (
        "gemma3_text",
        {
            **GEMMA,
            "final_logit_softcapping": 0.7,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_local_base_freq": 500.0,
        },
    ),
    "phi3": ("phi3", {**ODD, "original_max_position_embeddings": 64, "sliding_window": 9}),
    "phi3, long factors, partial rotation": (
        "phi3",
        {**ODD, "rope_scaling": LONGROPE, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.75},
    ),
    "phi3, short factors": (
        "phi3",
        {**ODD, "rope_scaling": {**LONGROPE, **FOUR_PAIRS}} | {"original_max_position_embeddings": 48},
    ),
    "glm4": ("glm4", {**WIDE, "head_dim": 12, "attention_bias": True}),
    "llama4": (
        "llama4_text",
        {**WIDE, **LLAMA4, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1, 1, 0], "rope_scaling": LLAMA3},
    ),
    "llama4, no norms, two experts of every layer": (
        "llama4_text",
        {**ODD, **LLAMA4, "head_dim": 12, "num_experts_per_tok": 2, "use_qk_norm": False, "attention_bias": True}
        | {"attn_temperature_tuning": False, "moe_layers": [0, 1, 2, 3, 4], "tie_word_embeddings": True},
    ),
    "mixtral": ("mixtral", {**WIDE, **TOP2, "num_local_experts": 5, "sliding_window": 7}),
    "qwen2_moe": (
        "qwen2_moe",
        {**ODD, **TOP2, "num_experts": 5, "moe_intermediate_size": 22, "shared_expert_intermediate_size": 30}
        | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**WIDE, **TOP2, "num_experts": 5, "moe_intermediate_size": 22, "norm_topk_prob": False},
    ),
    "gpt_oss": ("gpt_oss", {**WIDE, **TOP2, "num_local_experts": 5, "sliding_window": 7, "rope_scaling": YARN}),
    "gpt_oss, tight limits, no attention biases": (
        "gpt_oss",
        {**ODD, **TOP2, "head_dim": 12, "num_local_experts": 3, "sliding_window": 40, "attention_bias": False}
        | {"swiglu_limit": 0.02, "swiglu_alpha": 3.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "dots1": ("dots1", {**WIDE, **SIGMOID}),
    "deepseek_v2": ("deepseek_v2", {**ODD, **SIGMOID, **LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", {**ODD, **SIGMOID, **LATENT, "num_mtp_layers": 0}),
    "glm4_moe": ("glm4_moe", {**ODD, **SIGMOID, "head_dim": 12, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe, no biases, groups": (
        "glm4_moe",
        {**ODD, **SIGMOID, "head_dim": 12, "norm_topk_prob": False, "n_routed_experts": 6}
        | {"n_group": 3, "topk_group": 2},
    ),
    "glm4_moe, no head_dim": ("glm4_moe", {**ODD, **SIGMOID, "hidden_size": 52}),  # 52 // 6 = 8
    "glm4_moe, odd number of rotated features": ("glm4_moe", {**ODD, **SIGMOID, "hidden_size": 60}),  # 5 of 10
    "glm4, odd number of rotated features": ("glm4", {**WIDE, "head_dim": 10}),
    "glm4, no biases": ("glm4", {**WIDE, "head_dim": 12, "attention_bias": False, "tie_word_embeddings": True}),
}


# Files as they are written by hand or by other programs: transformers reads them with its class defaults.
BY_HAND: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3, trained length in the object alone": (
        "phi3",
        {**ODD, "max_position_embeddings": 8192}
        | {"rope_scaling": {**LONGROPE, **FOUR_PAIRS, "original_max_position_embeddings": 16}},
    ),
    "phi3, layer_types": ("phi3", {**ODD, "sliding_window": 7, "layer_types": ["sliding_attention"] * 5}),
    "phi3, factor below 1": (
        "phi3",
        {**ODD, "rope_scaling": {**LONGROPE, **FOUR_PAIRS, "factor": 0.5}} | {"original_max_position_embeddings": 16},
    ),
    "olmo3, rope_theta of full attention alone": ("olmo3", {**ODD, "sliding_window": 7, "rope_theta": 100.0}),
    "olmo3, rope_parameters without layer types": (
        "olmo3",
        {**ODD, "sliding_window": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "olmo3, rope_parameters of each layer type": (
        "olmo3",
        {**ODD, "sliding_window": 7, "rope_theta": 50.0}
        | {"rope_parameters": {"sliding_attention": {"rope_theta": 100.0}, "full_attention": YARN}},
    ),
    "gemma3, trained length outside of the object": (
        "gemma3_text",
        {**GEMMA, "rope_scaling": {**YARN, "rope_theta": 100.0}, "sliding_window_pattern": 3}
        | {"original_max_position_embeddings": 4},
    ),
    "smollm3, more entries than layers": ("smollm3", {**ODD, "no_rope_layers": [1, 0, 1, 1, 0, 0, 1]}),
    "glm4_moe, no key-value heads": (
        "glm4_moe",
        {**{key: value for key, value in ODD.items() if key != "num_key_value_heads"}, **SIGMOID}
        | {"num_attention_heads": 16, "head_dim": 12},
    ),
}


class Float64(TorchFunctionMode):
    """Turns every request for float32 into float64, so that what transformers computes in float32 is exact too."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


@contextlib.contextmanager
def everything_in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            yield
    finally:
        torch.set_default_dtype(before)


def their_model(family: str, settings: dict[str, Any]) -> transformers.PreTrainedModel:
    """A random float64 model of transformers; norms and biases are not at their neutral initial values."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **copy.deepcopy(settings))  # which changes them
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.05 if parameter.dim() > 1 else 0.3))
    return model


def test_every_decoder_that_runs_is_in_the_table():
    runs = {name for name, family in FAMILIES.items() if family.planning_only is None and not family.encoder}
    assert {family for family, _ in CASES.values()} == runs


@pytest.mark.parametrize(("family", "settings"), CASES.values(), ids=CASES)
def test_family_equals_transformers_in_float64(family: str, settings: dict[str, Any], tmp_path: Path):
    tokens = torch.randint(1, 499, (3, 40), generator=torch.Generator().manual_seed(1))
    # Token 0 pads: transformers gives its embedding no gradient.
    targets = torch.cat([tokens[:, 1:], torch.full((3, 1), -100)], dim=1)
    with everything_in_float64():
        theirs = their_model(family, settings)
        theirs.save_pretrained(tmp_path / "theirs")
        want = theirs(tokens).logits
        loss = torch.nn.functional.cross_entropy(want.flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
    ours, config = load_huggingface(tmp_path / "theirs", torch.float64)
    assert want.std() > 0.02, "not a comparison of zeros"
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(tokens), want, atol=1e-10, rtol=0)
    ours_loss = ours(tokens, targets)
    torch.testing.assert_close(ours_loss, loss, atol=1e-9, rtol=0)
    ours_loss.backward()
    gradients = {name: each.grad for name, each in theirs.named_parameters()}
    for tensor in parameter_table(config).tensors:
        if tensor.entries[0].balances:  # a buffer in transformers
            continue
        parts = [entry_in_transformers(gradients, entry.name) for entry in tensor.entries]
        expected = torch.cat(
            [part.T if entry.transposed else part for part, entry in zip(parts, tensor.entries, strict=True)]
        )
        found = ours.get_parameter(tensor.name).grad
        torch.testing.assert_close(found, expected, atol=1e-10 * max(1.0, float(expected.abs().max())), rtol=0)

    assert config_from_huggingface(config_to_huggingface(config)) == config
    save_huggingface(ours, tmp_path / "ours")
    with everything_in_float64():
        back, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "ours",
            output_loading_info=True,
            attn_implementation="eager",
            dtype=torch.float64,
            experts_implementation="eager",
        )
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            torch.testing.assert_close(back.eval()(tokens).logits, want, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("family", "settings"), BY_HAND.values(), ids=BY_HAND)
@pytest.mark.filterwarnings("ignore:.*unknown gemma3_text fields")
def test_files_without_usual_keys_are_read_as_transformers_reads_them(
    family: str, settings: dict[str, Any], tmp_path: Path
):
    tokens = torch.randint(1, 499, (2, 40), generator=torch.Generator().manual_seed(1))
    with everything_in_float64(), torch.no_grad():
        theirs = their_model(family, settings)
        theirs.save_pretrained(tmp_path)
        want = theirs(tokens).logits
    (tmp_path / "config.json").write_text(json.dumps({**settings, "model_type": family}))
    ours, _ = load_huggingface(tmp_path, torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(tokens), want, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", ""),
        ("language_model.model.", "language_model.lm_head.weight"),
    ],
)
def test_language_model_of_a_multimodal_directory_loads_alone(prefix: str, head: str, tmp_path: Path):
    text = {**GEMMA, "final_logit_softcapping": None, "sliding_window_pattern": 3}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    found = {
        "model.language_model." + name.partition("language_model.")[2].removeprefix("model."): value
        for name, value in tensors.items()
        if "language_model." in name
    }
    found = {name.replace("model.language_model.", prefix): value for name, value in found.items()}
    found |= {n: t for n, t in tensors.items() if "language_model." not in n}
    extra = {head: theirs.lm_head.weight.detach().clone()} if head else {}  # the embedding's, once more
    save_file(found | extra, tmp_path / "model.safetensors")
    with pytest.warns(ModelWarning, match="only the language model of this gemma3 model"):
        ours, _ = load_huggingface(tmp_path)
    tokens = torch.randint(1, 499, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(tokens), theirs(tokens).logits, atol=1e-5, rtol=0)


def test_language_model_of_a_llama4_directory_loads_alone(tmp_path: Path):
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16,
        "projector_output_dim": 16,
    }  # fmt: skip
    config = transformers.Llama4Config(text_config={**WIDE, **LLAMA4}, vision_config=vision)
    torch.manual_seed(0)
    theirs = transformers.Llama4ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    with pytest.warns(ModelWarning, match="only the language model of this llama4 model"):
        ours, read = load_huggingface(tmp_path)
    assert (read.family, read.tied) == ("llama4_text", False)
    tokens = torch.randint(1, 499, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(tokens), theirs.language_model(tokens).logits, atol=1e-6, rtol=0)


def test_a_server_chooses_longrope_factors_by_its_longest_sequence():
    config = preset("phi-4-mini")
    rotation = config.layer_rotation(0)
    assert rotation is not None
    short, long = (RotaryTable(rotation, torch.float64, length) for length in (4096, 4097))
    cpu = torch.device("cpu")
    assert torch.equal(short.get_table(9, cpu)[0], RotaryTable(rotation, torch.float64).get_table(9, cpu)[0])
    assert not torch.equal(short.get_table(9, cpu)[0], long.get_table(9, cpu)[0])
    assert torch.equal(long.get_table(9, cpu)[0], RotaryTable(rotation, torch.float64).get_table(5000, cpu)[0][:16])


def test_packed_documents_choose_longrope_factors_as_each_does_alone(tmp_path: Path):
    lengths = [12, 16, 17, 15]
    tokens = torch.randint(1, 499, (1, 60), generator=torch.Generator().manual_seed(1))
    documents = Documents.from_ids(torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None])
    with everything_in_float64(), torch.no_grad():
        settings = {"rope_scaling": {**LONGROPE, **FOUR_PAIRS}, "original_max_position_embeddings": 16}
        theirs = their_model("phi3", {**ODD, **settings})
        theirs.save_pretrained(tmp_path)
        want = torch.cat([theirs(each).logits for each in tokens.split(lengths, dim=1)], dim=1)
    ours, config = load_huggingface(tmp_path, torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(tokens, documents), want, atol=1e-10, rtol=0)

    rotation, cpu, part = config.layer_rotation(0), torch.device("cpu"), torch.tensor([*range(10, 35), 59])
    assert rotation is not None
    both = [
        RotaryTable(rotation, torch.float64).look_up(each.positions_BS(), 0, 60, cpu, each)
        for each in (documents, documents.select_tokens(part))
    ]
    for whole, of_rank in zip(*both, strict=True):  # context-parallel ranks know whole documents
        assert torch.equal(whole[:, :, part], of_rank)


@pytest.mark.parametrize("name", ["phi3-tiny", "glm4-tiny", "llama-tiny"])
def test_half_rotation_order_leaves_scores_as_they_are(name: str):
    config = preset(name)
    rotation, order = config.layer_rotation(0), find_half_rotation_order(config)
    assert rotation is not None and (order is None) == (name == "llama-tiny")
    table = RotaryTable(rotation, torch.float64).get_table(16, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 16, config.head_dim, dtype=torch.float64)
    want = rotate(q, *table, config.rotary_interleaved) @ rotate(k, *table, config.rotary_interleaved).mT
    table = pad_pairs(table, config.head_dim)
    q, k = (each if order is None else each[..., order] for each in (q, k))
    torch.testing.assert_close(rotate(q, *table) @ rotate(k, *table).mT, want)
