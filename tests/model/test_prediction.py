"""Multi-token prediction: the module of transformers, the loss by its definition, and what the value excludes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.modeling_layers import MtpModel

from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model.documents import Documents, MicroBatch
from meshwright.model.huggingface import load_huggingface
from meshwright.model.prediction import shift_by_one
from meshwright.spec.config_json import config_to_huggingface
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.spec.refuse import refuse
from tests.model.test_experts import build, config_of, in_transformers, tokens_of

DOCUMENTS = Documents.from_ids(torch.tensor([[0] * 9 + [1] * 11, [0] * 20, [0] * 3 + [1] + [2] * 16]))


def predicting(**changes: Any) -> Any:
    return config_of("deepseek_v3", prediction_layers=1, **changes)


def later_states(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Output of the module's last norm."""
    zeros = torch.zeros(len(tokens), dtype=torch.long)
    found = list[torch.Tensor]()
    hook = model.prediction.norm.register_forward_hook(lambda module, given, output: found.append(output))
    model(tokens, tokens + zeros[:, None])
    hook.remove()
    return found[0].detach()


def test_module_computes_that_of_transformers(tmp_path: Path, wide: Callable[[], Any], monkeypatch: pytest.MonkeyPatch):
    # Its number is that of the published model there.
    layer = [r"model\.layers\.5.*"]
    monkeypatch.setattr(transformers.DeepseekV3PreTrainedModel, "_keys_to_ignore_on_load_unexpected", layer)
    model = build(predicting())
    save_huggingface(model, tmp_path)
    tokens, _ = tokens_of()
    with wide(), torch.no_grad():
        main = in_transformers(tmp_path)
        module = MtpModel.from_pretrained(main).double()
        states = main.model(tokens).last_hidden_state
        positions = torch.arange(tokens.shape[1])[None].expand(len(tokens), -1)
        want = [
            module.forward_layer(
                0, states[row : row + 1, :-1], positions[:1, 1:], None, input_ids=tokens[row : row + 1, 1:]
            )
            for row in range(len(tokens))
        ]
    torch.testing.assert_close(later_states(model, tokens)[:, :-1], torch.cat(want), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "several"])
def test_gradient_adds_loss_of_token_after_next_and_value_does_not(documents: Documents | None):
    config = predicting(router_loss=0.0)
    model, plain = build(config), build(config)
    tokens, targets = tokens_of()
    loss = model(tokens, targets, documents)
    loss.backward()
    plain.prediction = None
    want = plain(tokens, targets, documents)
    assert torch.equal(loss.detach(), want.detach())
    want.backward()
    difference = model.layers[0].attention.qkv.weight.grad - plain.layers[0].attention.qkv.weight.grad

    other = build(config)
    states = list[torch.Tensor]()
    other.prediction.norm.register_forward_hook(lambda module, given, output: states.append(output))
    other(tokens, targets, documents)
    after = torch.full_like(targets, -100)
    starts = torch.zeros_like(tokens) if documents is None else documents.starts_BS
    for row in range(3):
        for place in range(19):
            if starts[row, place] == starts[row, place + 1]:
                after[row, place] = targets[row, place + 1]
    later = F.cross_entropy((states[0] @ other.head_weight.T).flatten(0, 1), after.flatten(), reduction="sum")
    (0.3 * later).backward()
    torch.testing.assert_close(difference, other.layers[0].attention.qkv.weight.grad, rtol=1e-9, atol=1e-11)


def test_next_tokens_and_targets_stay_within_their_document():
    tokens, targets = torch.arange(12).view(2, 6), torch.arange(1, 13).view(2, 6)
    documents = Documents.from_ids(torch.tensor([[0, 0, 1, 1, 1, 1], [0] * 6]))
    following, after = shift_by_one(MicroBatch(tokens, targets, documents))
    assert following[:, :-1].tolist() == tokens[:, 1:].tolist()
    assert after.tolist() == [[2, -100, 4, 5, 6, -100], [8, 9, 10, 11, 12, -100]]


def test_directory_holds_module_as_one_more_layer_and_serves_without_it(tmp_path: Path):
    config = predicting()
    model = build(config, torch.float32)
    save_huggingface(model, tmp_path)
    assert config_to_huggingface(config)["num_nextn_predict_layers"] == 1
    names = {entry.name for entry in parameter_table(config).entries}
    published = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "input_layernorm", "self_attn.kv_b_proj")
    assert {f"model.layers.5.{part}.weight" for part in published} <= names
    again, read = load_huggingface(tmp_path)
    assert read.prediction_layers == 0
    tokens, _ = tokens_of()
    with torch.no_grad():
        assert torch.equal(again.logits(tokens), model.logits(tokens))


def test_what_multi_token_prediction_cannot_do_is_refused_by_name():
    with pytest.raises(UserError, match="prediction_layers is 0, or 1 in family deepseek_v3"):
        config_of("deepseek_v2", prediction_layers=1)
    with pytest.raises(UserError, match="prediction_layers is 0, or 1 in family deepseek_v3"):
        config_of("deepseek_v3", prediction_layers=2)
    config = dataclasses.replace(preset("deepseek-v3-tiny"), prediction_layers=1)
    with pytest.raises(UserError, match="cp2 splits sequences, whose next tokens multi-token prediction needs"):
        refuse(Layout.parse("cp2"), config, batch=2)


def test_module_of_published_model_has_published_size():
    """11.5 billion, without the embedding and the head that it shares (DeepSeek-V3, README_WEIGHTS.md)."""
    with_module = dataclasses.replace(preset("deepseek-v3"), prediction_layers=1)
    more = parameter_table(with_module).numel - parameter_table(preset("deepseek-v3")).numel
    assert more / 1e9 == pytest.approx(11.5, abs=0.15)
