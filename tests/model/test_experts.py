"""Mixtures of experts against transformers in float64: dropless dispatch, load balancing as published."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama4.modeling_llama4 import Llama4Router

from bench.shared.flop_counting import OURS
from bench.shared.key_value_cache import KeyValueCache
from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.documents import Documents
from meshwright.model.experts import Router
from meshwright.model.grouped_product import grouped_product
from meshwright.model.huggingface import load_huggingface
from meshwright.model.initialise import extract_entry, initialise
from meshwright.model.transformer import Transformer
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_huggingface, config_to_huggingface
from meshwright.spec.flops import forward_flops_per_token
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.spec.refuse import refuse
from tests.conftest import exhaustive
from tests.model.transformers_names import entry_in_transformers

ODD: dict[str, Any] = {
    "vocab_size": 499, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 40, "initializer_range": 0.15, "num_experts_per_tok": 3,
}  # fmt: skip
WIDTH = {"moe_intermediate_size": 11}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 9, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 4, "original_max_position_embeddings": 10, "mscale": 0.7, "mscale_all_dim": 1.3,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "sliding_window": 7},
    "qwen2_moe": {
        "model_type": "qwen2_moe", **WIDTH, "num_experts": 5, "shared_expert_intermediate_size": 13,
        "mlp_only_layers": [1],
    },
    "qwen2_moe, every second layer": {
        "model_type": "qwen2_moe", **WIDTH, "num_experts": 5, "shared_expert_intermediate_size": 13,
        "decoder_sparse_step": 2, "norm_topk_prob": True,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **WIDTH, "num_experts": 5, "mlp_only_layers": [2], "head_dim": 10},
    "qwen3_moe, one expert": {
        "model_type": "qwen3_moe", **WIDTH, "num_experts": 1, "num_experts_per_tok": 1, "norm_topk_prob": True,
    },
    "dots1": {
        "model_type": "dots1", **WIDTH, "n_routed_experts": 5, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "sliding_window": None,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2", **WIDTH, **LATENT, "rope_scaling": YARN, "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-4,
    },
    "deepseek_v2, as Lite": {
        "model_type": "deepseek_v2", **WIDTH, **LATENT, "q_lora_rank": None, "topk_method": "greedy",
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", **WIDTH, **LATENT, "rope_scaling": YARN, "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-4,
    },
    "deepseek_v3, halves rotated": {
        "model_type": "deepseek_v3", **WIDTH, **LATENT, "rope_interleave": False, "v_head_dim": 12, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": False,
    },
}  # fmt: skip


def config_of(name: str, **changes: Any) -> ModelConfig:
    return dataclasses.replace(config_from_huggingface({**ODD, **CASES[name]}), **changes)


def build(config: ModelConfig, dtype: torch.dtype = torch.float64, **options: Any) -> Transformer:
    model = Transformer(config, dtype=dtype, **options)
    initialise(model, parameter_table(config), seed=1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(dtype))
    return model


def tokens_of(rows: int = 3, sequence: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 499, (rows, sequence + 1), generator=torch.Generator().manual_seed(3))
    targets = tokens[:, 1:].clone()
    targets[0, 8] = -100
    return tokens[:, :-1], targets


def in_transformers(directory: Path) -> transformers.PreTrainedModel:
    """The model loaded by transformers, whose grouped products need widths that are multiples of 16 bytes."""
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, output_loading_info=True, experts_implementation="eager"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return theirs


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_match_transformers(name: str, tmp_path: Path, wide: Callable[[], Any]):
    config = config_of(name, router_loss=0.0)
    model = build(config)
    save_huggingface(model, tmp_path)
    tokens, targets = tokens_of()
    with wide():
        theirs = in_transformers(tmp_path)
        logits = theirs(tokens).logits
    torch.testing.assert_close(model.logits(tokens), logits, rtol=1e-10, atol=1e-10)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    model(tokens, targets).backward()
    expected = {name: values.grad for name, values in theirs.named_parameters()}
    for entry in parameter_table(config).entries:
        mine = extract_entry(model.get_parameter(entry.tensor).grad, entry)
        if entry.balances:
            continue
        want = entry_in_transformers(expected, entry.name)
        torch.testing.assert_close(mine, want, rtol=1e-9, atol=1e-10, msg=entry.name)


@pytest.mark.parametrize("name", CASES)
def test_model_directory_and_config_round_trip_unchanged(name: str, tmp_path: Path):
    config = config_of(name)
    assert config_from_huggingface(config_to_huggingface(config)) == config
    model = build(config, torch.float32)
    save_huggingface(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "theirs")
    again, read = load_huggingface(tmp_path / "theirs")
    assert (read.experts, read.dense_layers, read.router_loss) == (
        config.experts, config.dense_layers, config.router_loss,
    )  # fmt: skip
    for tensor, values in model.state_dict().items():
        assert torch.equal(values, again.state_dict()[tensor]), tensor


@pytest.mark.parametrize("name", CASES)
def test_document_masks_and_kv_cache_leave_logits_unchanged(name: str):
    model = build(config_of(name))
    tokens, _ = tokens_of()
    with torch.no_grad():
        cache = KeyValueCache(model.config, rows=3, capacity=2)
        parts = [model.logits(part, cache=cache) for part in tokens.split([1, 7, 1, 11], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model.logits(tokens), rtol=0, atol=1e-12)
        packed = model.logits(tokens, Documents.from_ids(torch.tensor([[0] * 9 + [1] * 11] * 3)))
        torch.testing.assert_close(packed[:, 9:], model.logits(tokens[:, 9:]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "dots1"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_changes_no_bit(name: str, recompute: str):
    tokens, targets = tokens_of()
    gradients = []
    for kind in ("none", recompute):
        model = build(config_of(name), axes=AxisOperations(recompute=ActivationCheckpointing(kind)))
        model(tokens, targets).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*gradients, strict=True))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "dots1"])
def test_an_expert_without_tokens_has_gradients_of_zero(name: str):
    model = build(config_of(name, router_loss=0.0))
    last = model.layers[4].mlp
    with torch.no_grad():
        if last.router.bias is None:
            last.router.weight.zero_()  # equal scores: any three experts, but always the same
        else:
            last.router.bias.copy_(torch.tensor([9.0, 9.0, 9.0, 0.0, 0.0]))
    tokens, targets = tokens_of()
    model(tokens, targets).backward()
    for weight in (last.experts.up.weight, last.experts.down.weight):
        norms = weight.grad.view(5, -1).norm(dim=1)
        assert (norms > 0).tolist().count(True) == 3
        assert norms.isfinite().all()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_reported_loss_excludes_router_loss():
    model = build(config_of("mixtral", router_loss=0.5))
    tokens, targets = tokens_of()
    with torch.no_grad():
        evaluated = model(tokens, targets)
    assert float(model(tokens, targets).detach()) == float(evaluated)


@pytest.mark.parametrize("name", ["mixtral", "dots1"])
def test_load_balancing_is_per_sequence(name: str):
    """The gradient of a sequence does not depend on the other sequences of the batch."""
    model = build(config_of(name, **({"router_loss": 0.5} if name == "mixtral" else {})))
    tokens, targets = tokens_of()
    together = torch.autograd.grad(model(tokens, targets), list(model.parameters()))
    alone = torch.autograd.grad(sum(model(*row) for row in zip(tokens.split(1), targets.split(1), strict=True)),
                                list(model.parameters()))  # fmt: skip
    for mine, want in zip(together, alone, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-9, atol=1e-10)


def test_router_bias_affects_only_choice_with_excess_load_gradient():
    config = config_of("dots1")
    router = Router(config, dtype=torch.float64)
    x_TH = torch.randn(40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        router.weight.normal_(generator=torch.Generator().manual_seed(2))
        assert router.bias is not None
        router.bias.copy_(torch.tensor([0.0, 0.0, 10.0, 0.0, -10.0]))
    scores_TE = router.scores(x_TH)
    weights_TK, chosen_TK = router.choose(scores_TE)
    assert (chosen_TK == 2).any(dim=1).all() and not (chosen_TK == 4).any()
    picked_TK = scores_TE.gather(1, chosen_TK)
    torch.testing.assert_close(weights_TK, 2.5 * picked_TK / picked_TK.sum(dim=1, keepdim=True))
    loss = router.balance_loss(scores_TE, chosen_TK, torch.tensor([17, 0]))
    assert float(loss.detach()) == 0
    load_E = torch.bincount(chosen_TK.flatten(), minlength=5)
    assert torch.equal(torch.autograd.grad(loss, router.bias)[0], load_E - 40 * 3 / 5)


def test_llama4_ranks_experts_by_logits_whose_sigmoids_are_equal():
    config = preset("llama4-tiny")
    router, x_TH = Router(config), torch.randn(50, config.hidden, generator=torch.Generator().manual_seed(1))
    sizes = {"hidden_size": config.hidden, "num_local_experts": config.experts}
    theirs = Llama4Router(transformers.Llama4TextConfig(**sizes, num_experts_per_tok=config.experts_per_token))
    with torch.no_grad():
        router.weight.normal_(std=0.02, generator=torch.Generator().manual_seed(2)).mul_(1000)
        theirs.weight.copy_(router.weight)
        weights_TK, chosen_TK = router.choose(router.scores(x_TH))
        scores_TE, logits_TE = theirs(x_TH)
    assert (logits_TE.sigmoid() == 1).sum(dim=1).gt(1).any()
    assert torch.equal(torch.zeros_like(scores_TE).scatter(1, chosen_TK, weights_TK), scores_TE)


@pytest.mark.parametrize("ends", [[3, 3, 10, 12], [0, 0, 0, 12], [12, 12, 12, 12]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_grouped_products_are_the_products_of_the_groups(ends: list[int], dtype: torch.dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 7, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(4, 5, 7, generator=generator).to(dtype).requires_grad_()
    d = torch.randn(12, 5, generator=generator).to(dtype)
    bias = torch.randn(4, 3, generator=generator).to(dtype).requires_grad_()  # of outputs 1 to 3
    starts = [0, *ends[:-1]]
    padded = torch.nn.functional.pad(bias, (1, 1))
    want = torch.cat([x[a:b] @ weight[e].T + padded[e] for e, (a, b) in enumerate(zip(starts, ends, strict=True))])
    arguments = x, weight, torch.tensor(ends, dtype=torch.int32), bias, 1
    got = grouped_product(*arguments)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(got, want, **tolerance)
    for mine, theirs in zip(
        torch.autograd.grad(got, (x, weight, bias), d), torch.autograd.grad(want, (x, weight, bias), d), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **tolerance)
    torch.library.opcheck(
        torch.ops.meshwright.grouped_product.default,
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("name", CASES)
def test_flops_count_only_experts_of_each_token(name: str):
    config = config_of(name, sliding_window=None)
    model = build(config)
    x_BSH = torch.randn(2, 20, config.hidden, dtype=torch.float64)
    counted = 0
    for block in model.layers:
        with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=OURS) as counter:
            block.mlp(x_BSH)
        counted += counter.get_total_flops()
    flops = forward_flops_per_token(config, 20)
    assert counted == 40 * sum(value for operation, value in flops.items() if operation.startswith("mlp."))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("mixtral-tiny", "aot_eager"),
        *exhaustive(("dots1-tiny", "aot_eager"), ("mixtral-tiny", "inductor")),
    ],
)
def test_compiled_blocks_match_eager_blocks(name: str, backend: str):
    config = dataclasses.replace(preset(name), layers=2)
    tokens, targets = tokens_of(rows=2, sequence=16)
    gradients = []
    for compiled in (False, True):
        model = build(config, torch.float32)
        if compiled:
            model.compile_blocks(fullgraph=True, backend=backend)
        model(tokens, targets).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for mine, want in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("mixtral", {"experts_per_token": 6}, "experts_per_token 6 is more than the model's 5 experts"),
        ("mixtral", {"experts": 0}, "experts must be at least 1 in family mixtral"),
        ("mixtral", {"expert_intermediate": 12}, "family mixtral has one width"),
        ("mixtral", {"dense_layers": (1,)}, "dense_layers is always"),
        ("mixtral", {"router": "sigmoid"}, "router is always 'softmax'"),
        ("qwen2_moe", {"shared_intermediate": 0}, "shared_intermediate must be at least 1"),
        ("qwen3_moe", {"dense_layers": (5,)}, "dense_layers must be numbers of layers from 0 to 4"),
        ("qwen3_moe", {"dense_layers": (0, 1, 2, 3, 4)}, "leaves no layer to the experts"),
        ("dots1", {"dense_layers": (1,)}, "has its dense_layers at the beginning"),
        ("dots1", {"shared_intermediate": 12}, "must be a multiple of expert_intermediate 11"),
        ("dots1", {"router_loss": 0.1}, "router_loss is always 0.0"),
    ],
)
def test_impossible_expert_configurations_are_refused_with_reason(name: str, changes: dict[str, Any], why: str):
    with pytest.raises(UserError, match=why):
        config_of(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("dots1", {"n_group": 2}, "experts 5 must be a multiple of expert_groups 2"),
        ("qwen2_moe", {"mlp_only_layers": 3}, "must be a list of layer numbers"),
        ("dots1", {"n_routed_experts": None}, "n_routed_experts"),
    ],
)
def test_a_configuration_that_would_not_be_computed_is_refused(name: str, changes: dict[str, Any], why: str):
    with pytest.raises(UserError, match=why):
        config_from_huggingface({**ODD, **CASES[name], **changes})


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("tp2", "tp2 does not divide the model's expert width 11"),
        ("dp2 ep2", "ep2 does not divide the model's 5 experts; 1 or 5 would"),
    ],
)
def test_a_layout_that_cannot_split_the_experts_is_refused(layout: str, why: str):
    with pytest.raises(UserError, match=why):
        refuse(Layout.parse(layout), config_of("qwen3_moe", dense_layers=()), batch=8, planning=True)


def test_a_dense_family_has_no_experts():
    with pytest.raises(UserError, match="family llama has no experts: leave experts_per_token out"):
        dataclasses.replace(preset("llama-tiny"), experts_per_token=2)
