"""The encoder equals BERT of transformers, on single and packed documents, loaded and saved."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model.documents import Documents
from meshwright.model.encoder import Encoder
from meshwright.model.huggingface import load_encoder, load_huggingface
from meshwright.model.initialise import initialise
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_huggingface, config_from_path, config_to_huggingface
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import PRESETS, preset
from meshwright.spec.refuse import refuse

ODD: dict[str, Any] = {
    "vocab_size": 499, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 5, "num_attention_heads": 6,
    "max_position_embeddings": 64, "type_vocab_size": 3, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "id2label": {0: "no", 1: "maybe", 2: "yes"},
}  # fmt: skip
HEADS = {"BertForMaskedLM": "masked", "BertForSequenceClassification": "classes", "BertModel": "none"}
VARIANTS: dict[str, dict[str, Any]] = {
    "odd": {},
    "tanh gelu": {"hidden_act": "gelu_new"},
    "relu, coarse epsilon": {"hidden_act": "relu", "layer_norm_eps": 1e-3},
    "one token type, no padding": {"type_vocab_size": 1, "pad_token_id": None},
    "one head of 48": {"num_attention_heads": 1, "num_hidden_layers": 1},
}


def their_model(architecture: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """A random model of transformers; norms and biases are not at their neutral initial values."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**ODD, **settings})
    config._attn_implementation = "eager"
    model = getattr(transformers, architecture)(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.3))
    return model


def batch(rows: int = 3, sequence: int = 40, types: int = 3) -> dict[str, torch.Tensor]:
    """Tokens (without padding IDs), an attention mask that hides some on both sides, and segment IDs."""
    make = torch.Generator().manual_seed(1)
    mask = torch.ones(rows, sequence, dtype=torch.int64)
    mask[0, 25:] = 0
    mask[1, :7] = 0
    return {
        "input_ids": torch.randint(1, 499, (rows, sequence), generator=make),
        "attention_mask": mask,
        "token_type_ids": torch.randint(0, types, (rows, sequence), generator=make),
    }


def ours_on(model: Encoder, inputs: dict[str, torch.Tensor], what: str = "logits") -> torch.Tensor:
    options = {"attention_mask_BS": inputs["attention_mask"], "token_types_BS": inputs["token_type_ids"]}
    result: torch.Tensor = getattr(model, what)(inputs["input_ids"], **options)
    return result


def outputs_of(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of transformers: hidden states and pooler, or logits; states of masked tokens are undefined."""
    found = model(**inputs)
    if "logits" not in found:
        return [found.last_hidden_state, found.pooler_output]
    return [found.logits]


def ours_of(model: Encoder, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    if model.config.head != "none":
        return [ours_on(model, inputs)]
    hidden = ours_on(model, inputs, "hidden")
    return [hidden, model.pooled(hidden)]


def compare(mine: list[torch.Tensor], theirs: list[torch.Tensor], seen: torch.Tensor, tolerance: float) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert b.std() > 0.1  # not a comparison of zeros
        if a.dim() == 3:
            a, b = a[seen > 0], b[seen > 0]
        torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("architecture", HEADS)
def test_encoder_outputs_match_transformers_in_both_directions(
    architecture: str, variant: dict[str, Any], tmp_path: Path
):
    theirs = their_model(architecture, **variant)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, config = load_encoder(tmp_path / "theirs", dtype=torch.float64)
    assert config.head == HEADS[architecture]
    save_huggingface(ours, tmp_path / "ours")
    back, report = getattr(transformers, architecture).from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert config_from_path(tmp_path / "ours") == config
    inputs = batch(types=config.token_types)
    with torch.no_grad():
        want = outputs_of(theirs, inputs)
        compare(ours_of(ours, inputs), want, inputs["attention_mask"], 1e-10)
        compare(outputs_of(back.eval().double(), inputs), want, inputs["attention_mask"], 1e-10)


def test_float32_is_close(tmp_path: Path):
    theirs = their_model("BertForMaskedLM", torch.float32)
    theirs.save_pretrained(tmp_path)
    ours, _ = load_encoder(tmp_path)
    inputs = batch()
    with torch.no_grad():
        compare([ours_on(ours, inputs)], outputs_of(theirs, inputs), inputs["attention_mask"], 1e-4)


def test_bert_base_sized_encoder_matches_transformers(tmp_path: Path):
    """Two layers, all 512 positions, full vocabulary."""
    base = dataclasses.replace(preset("bert-base-uncased"), layers=2)
    model = Encoder(base)
    initialise(model, parameter_table(base), seed=0)
    save_huggingface(model, tmp_path)
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path).eval()
    tokens = torch.randint(1, base.vocabulary, (1, 512), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = theirs(tokens).logits
        assert want.std() > 0.1
        torch.testing.assert_close(model.logits(tokens), want, atol=1e-4, rtol=0)


def masked(tokens: torch.Tensor) -> torch.Tensor:
    """Targets at every seventh place."""
    targets = torch.full_like(tokens, -100)
    targets.flatten()[::7] = tokens.flatten()[::7]
    return targets


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_loss_and_gradients_match_transformers(architecture: str, tmp_path: Path):
    theirs = their_model(architecture)
    theirs.save_pretrained(tmp_path)
    ours, config = load_encoder(tmp_path, dtype=torch.float64)
    inputs = batch()
    targets = masked(inputs["input_ids"]) if config.head == "masked" else torch.tensor([2, -100, 0])
    targets = targets.where(inputs["attention_mask"] > 0, -100) if config.head == "masked" else targets
    loss = ours(
        inputs["input_ids"], targets, attention_mask_BS=inputs["attention_mask"],
        token_types_BS=inputs["token_type_ids"],
    )  # fmt: skip
    loss.backward()
    want = theirs(**inputs, labels=targets).loss * (targets != -100).sum()
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-10, atol=0)
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    for entry in parameter_table(config).entries:
        gradient = mine[entry.tensor].grad[entry.offset : entry.offset + entry.model_shape[0]]
        torch.testing.assert_close(gradient, other[entry.name].grad, rtol=1e-9, atol=1e-11, msg=entry.name)


def small(head: str = "masked", **changes: Any) -> ModelConfig:
    labels = ("no", "maybe", "yes") if head == "classes" else ()
    return dataclasses.replace(preset("bert-tiny"), layers=3, vocabulary=499, head=head, labels=labels, **changes)


def build(config: ModelConfig, dtype: torch.dtype = torch.float64, **options: Any) -> Encoder:
    model = Encoder(config, dtype=dtype, **options)
    initialise(model, parameter_table(config), seed=1)
    with torch.no_grad():
        make = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=make).to(dtype))
    return model


def gradients(model: Encoder, *inputs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(*inputs).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


PACKED = torch.tensor([[0] * 9 + [1] * 11, [0] * 20, [0, 1] + [2] * 18])
PARTS = [(0, 0, 9), (0, 9, 20), (1, 0, 20), (2, 0, 1), (2, 1, 2), (2, 2, 20)]


@pytest.mark.parametrize("head", ["masked", "classes"])
def test_packed_documents_match_separate_documents(head: str):
    model, documents = build(small(head)), Documents.from_ids(PACKED)
    tokens = batch(sequence=20)["input_ids"]
    targets = masked(tokens) if head == "masked" else torch.tensor([0, 1, 2, -100, 1, 0])
    logits = model.logits(tokens, documents)
    alone = torch.zeros((), dtype=torch.float64)
    for number, (row, start, stop) in enumerate(PARTS):
        part = tokens[row : row + 1, start:stop]
        whole = logits[row, start:stop] if head == "masked" else logits[number]
        torch.testing.assert_close(whole, model.logits(part)[0], rtol=0, atol=1e-12)
        here = targets[row : row + 1, start:stop] if head == "masked" else targets[number : number + 1]
        alone = alone + model(part, here)
    torch.testing.assert_close(model(tokens, targets, documents), alone, rtol=1e-12, atol=0)
    together = gradients(model, tokens, targets, documents)
    names = [name for name, _ in model.named_parameters()]
    for name, separate in zip(names, torch.autograd.grad(alone, list(model.parameters())), strict=True):
        torch.testing.assert_close(together[name], separate, rtol=1e-10, atol=1e-12, msg=name)


def test_packed_documents_may_end_in_padding():
    model, documents = build(small()), Documents.from_ids(PACKED)
    inputs = batch(sequence=20, types=2)
    mask = torch.ones(3, 20, dtype=torch.int64)
    mask[0, 17:] = mask[2, 19:] = 0
    logits = model.logits(inputs["input_ids"], documents, attention_mask_BS=mask)
    for row, start, stop in ((0, 0, 9), (0, 9, 17), (1, 0, 20), (2, 2, 19)):
        alone = model.logits(inputs["input_ids"][row : row + 1, start:stop])
        torch.testing.assert_close(logits[row, start:stop], alone[0], rtol=0, atol=1e-12)


def test_every_unpadded_token_influences_every_other_one():
    model = build(small())
    inputs = batch(types=2)
    before = ours_on(model, inputs)
    for row, place in ((2, 0), (2, 39), (0, 30), (1, 0)):
        changed = dict(inputs, input_ids=inputs["input_ids"].clone())
        changed["input_ids"][row, place] = 1 + changed["input_ids"][row, place] % 498
        differs = (ours_on(model, changed) != before).any(dim=-1)
        seen = inputs["attention_mask"][row] > 0
        assert not differs[torch.arange(3) != row].any()
        assert differs[row][seen].all() == bool(seen[place])
        assert differs[row][seen].any() == bool(seen[place])


def test_fully_padded_sequence_does_not_affect_other_sequences():
    model, inputs = build(small("classes")), batch(types=2)
    inputs["attention_mask"][1] = 0
    logits = ours_on(model, inputs)
    assert logits.isfinite().all()
    found = torch.autograd.grad(logits.sum(), list(model.parameters()))
    assert all(value.isfinite().all() for value in found)
    alone = {name: values[2:] for name, values in inputs.items()}
    torch.testing.assert_close(logits[2:], ours_on(model, alone), rtol=0, atol=1e-12)


def test_batch_without_masked_token_has_zero_loss_and_gradient():
    model = build(small())
    tokens = batch()["input_ids"]
    found = gradients(model, tokens, torch.full_like(tokens, -100))
    assert model(tokens, torch.full_like(tokens, -100)).item() == 0
    assert not any(value.any() for value in found.values())


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit(recompute: str):
    tokens = batch(sequence=20)["input_ids"]
    inputs = tokens, masked(tokens), Documents.from_ids(PACKED)
    want, mine = (
        gradients(build(small()), *inputs),
        gradients(build(small(), recompute=ActivationCheckpointing(recompute)), *inputs),
    )
    assert all(torch.equal(mine[name], want[name]) for name in want)


def test_bfloat16_follows_float64():
    tokens = batch()["input_ids"]
    want = gradients(build(small()), tokens, masked(tokens))
    rough = build(small(), torch.bfloat16)
    mine = gradients(rough, tokens, masked(tokens))
    assert rough(tokens, masked(tokens)).dtype == torch.float32
    size = torch.cat([value.flatten() for value in want.values()]).square().mean().sqrt()
    for name, value in want.items():  # the exact gradient of a key bias is zero
        difference = (mine[name].double() - value).norm()
        assert difference < 0.05 * max(value.norm(), size * value.numel() ** 0.5), name


@pytest.mark.parametrize("head", ["masked", "classes", "none"])
def test_parameters_have_the_names_and_shapes_of_the_table(head: str):
    config = small(head)
    assert {tensor.name: tensor.shape for tensor in parameter_table(config).tensors} == {
        name: tuple(parameter.shape) for name, parameter in Encoder(config, device="meta").named_parameters()
    }


# --- published sizes

POOLER = {768: 768 * 768 + 768, 1024: 1024 * 1024 + 1024}


def numel(name: str, **changes: Any) -> int:
    return parameter_table(dataclasses.replace(preset(name), **changes)).numel


def test_parameter_counts_match_published_ones():
    """Published counts include a pooler and a next-sentence head; BertModel has no head. Turc et al. 2019 round to
    millions."""
    for name, whole, bare in (
        ("bert-base-uncased", 110_106_428, 109_482_240), ("bert-base-cased", 108_932_934, 108_310_272),
        ("bert-large-uncased", 336_226_108, 335_141_888),
    ):  # fmt: skip
        hidden = preset(name).hidden
        assert numel(name, head="none") == bare
        assert numel(name) + POOLER[hidden] + 2 * hidden + 2 == whole
        assert numel(name, head="classes", labels=("a", "b")) == bare + 2 * hidden + 2
    for name, millions in (("bert-tiny", 4.4), ("bert-mini", 11.3), ("bert-small", 29.1), ("bert-medium", 41.7)):
        hidden = preset(name).hidden
        assert round((numel(name) + hidden * hidden + hidden + 2 * hidden + 2) / 1e6, 1) == millions


@pytest.mark.parametrize("head", HEADS.values())
@pytest.mark.parametrize("name", [name for name, found in PRESETS.items() if found.config.encoder])
def test_a_preset_is_the_model_that_transformers_builds(name: str, head: str):
    config = dataclasses.replace(preset(name), head=head, labels=("a", "b", "c") if head == "classes" else ())
    written = config_to_huggingface(config)
    with torch.device("meta"):
        (architecture,) = written["architectures"]
        theirs = getattr(transformers, architecture)(transformers.BertConfig.from_dict(written))
    prefix = "bert." if architecture == "BertModel" else ""
    shapes = {prefix + name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    assert {entry.name: entry.shape for entry in parameter_table(config).entries} == shapes
    assert config_from_huggingface(written) == config


# --- files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_huggingface(build(small(), torch.float32), tmp_path)
    return tmp_path


def rewrite(directory: Path, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(change(tensors), directory / "model.safetensors")


def of_the_hub(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Files with the names of 2018 and the further heads of BERT's own files."""
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.seq_relationship.weight"], old["cls.seq_relationship.bias"] = torch.ones(2, 128), torch.ones(2)
    old["bert.pooler.dense.weight"], old["bert.pooler.dense.bias"] = torch.ones(128, 128), torch.ones(128)
    old["qa_outputs.weight"], old["qa_outputs.bias"] = torch.ones(2, 128), torch.ones(2)  # of BertForQuestionAnswering
    old["bert.embeddings.position_ids"] = torch.arange(512)[None]
    return old


def test_bert_files_with_2018_names_and_other_heads_load(saved: Path):
    tokens = batch()["input_ids"]
    want = load_encoder(saved)[0].logits(tokens)
    rewrite(saved, of_the_hub)
    assert torch.equal(load_encoder(saved)[0].logits(tokens), want)
    data = json.loads((saved / "config.json").read_text())
    del data["architectures"]  # as in the first files
    (saved / "config.json").write_text(json.dumps(data))
    assert torch.equal(load_encoder(saved)[0].logits(tokens), want)
    model, _ = load_encoder(saved, head="none")
    assert bool((model.pooler.weight == 1).all()), "the pooler in the files"


def test_new_head_is_seeded_and_other_weights_are_loaded(saved: Path):
    tokens = batch()["input_ids"]
    first, config = load_encoder(saved, head="classes", labels=("no", "yes"), seed=3)
    assert config.labels == ("no", "yes") and first.logits(tokens).shape == (3, 2)
    assert torch.equal(first.hidden(tokens), load_encoder(saved)[0].hidden(tokens))
    again, other = (load_encoder(saved, head="classes", labels=("no", "yes"), seed=seed)[0] for seed in (3, 4))
    assert torch.equal(first.classifier.weight, again.classifier.weight)
    assert not torch.equal(first.classifier.weight, other.classifier.weight)
    save_huggingface(first, saved / "classifier")
    kept, _ = load_encoder(saved / "classifier")
    assert torch.equal(kept.logits(tokens), first.logits(tokens))
    wider, _ = load_encoder(saved / "classifier", head="classes", labels=("no", "maybe", "yes"))
    assert torch.equal(wider.pooler.weight, first.pooler.weight) and wider.logits(tokens).shape == (3, 3)


NAME = "bert.encoder.layer.1.attention.output.LayerNorm.weight"
MISTAKES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "missing": (lambda t: {k: v for k, v in t.items() if k != NAME}, {}, rf"{NAME} \[128\] is missing"),
    "left over": (lambda t: {**t, "bert.encoder.layer.3.x": torch.ones(1)}, {}, "bert.encoder.layer.3.x has no place"),
    "a head that lacks a tensor": (
        lambda t: {k: v for k, v in t.items() if k != "cls.predictions.bias"}, {},
        r"cls.predictions.bias \[499\] is missing",
    ),
    "a body that lacks a tensor": (
        lambda t: {k: v for k, v in t.items() if k != NAME}, {"head": "none"}, rf"{NAME} \[128\] is missing"
    ),
    "unknown head": (lambda t: t, {"head": "clases"}, 'unknown head "clases"; did you mean "classes"'),
    "a decoder's head": (lambda t: t, {"head": "next"}, 'unknown head "next"'),
    "labels without a head": (lambda t: t, {"labels": ("a", "b")}, 'labels need head="classes"'),
    "labels of another head": (lambda t: t, {"head": "masked", "labels": ("a", "b")}, 'labels need head="classes"'),
    "one class": (lambda t: t, {"head": "classes", "labels": ("a",)}, "at least 2 classes, not 1"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "options", "words"), MISTAKES.values(), ids=MISTAKES)
def test_user_error_is_one_line(change: Any, options: dict[str, Any], words: str, saved: Path):
    rewrite(saved, change)
    with pytest.raises(UserError, match=words) as caught:
        load_encoder(saved, **options)
    assert "\n" not in str(caught.value)


def test_each_loader_names_loader_for_other_architecture(saved: Path, tmp_path: Path):
    with pytest.raises(UserError, match="bert is an encoder, which predicts no next token"):
        load_huggingface(saved)
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text(json.dumps(config_to_huggingface(preset("gpt2-tiny"))))
    save_file({"x": torch.ones(1)}, tmp_path / "gpt" / "model.safetensors")
    with pytest.raises(UserError, match="gpt2 is a decoder; `load_huggingface` reads it"):
        load_encoder(tmp_path / "gpt")
    with pytest.raises(UserError, match="family gpt2 is a decoder"):
        Encoder(preset("gpt2-tiny"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_decoder": True}, 'unsupported "is_decoder" = True'),
        ({"position_embedding_type": "relative_key"}, "'relative_key'; bert supports only 'absolute'"),
        ({"tie_word_embeddings": False}, "tied is always True in family bert"),
        ({"architectures": ["BertForQuestionAnswering"]}, "head of BertForQuestionAnswering is not computed here"),
        ({"architectures": "BertModel"}, "must be a list of names"),
        ({"problem_type": "regression"}, "supports only 'single_label_classification'"),
        ({"hidden_size": 50}, '"hidden_size" 50 is not a multiple of "num_attention_heads" 6'),
        ({"type_vocab_size": 0}, '"type_vocab_size" must be a whole number above 0, not 0'),
        (
            {"architectures": ["BertForSequenceClassification"], "id2label": {"1": "a", "2": "b"}},
            '"id2label" must name',
        ),
        ({"hidden_act": "mish"}, "'mish' is not supported"),
    ],
)
def test_unsupported_encoder_features_are_refused_by_name(changes: dict[str, Any], words: str):
    known = {key: value for key, value in ODD.items() if key != "id2label"}
    with pytest.raises(UserError, match=words):
        config_from_huggingface({**known, "model_type": "bert", **changes}, "config.json")


def test_parts_of_an_encoder_are_no_decoders():
    with pytest.raises(UserError, match="family gpt2 is a decoder: leave token_types out"):
        dataclasses.replace(preset("gpt2-tiny"), token_types=2)
    with pytest.raises(UserError, match="family gpt2 is a decoder: leave head 'masked' out"):
        dataclasses.replace(preset("gpt2-tiny"), head="masked")
    with pytest.raises(UserError, match="token_types must be at least 1 in family bert"):
        dataclasses.replace(preset("bert-tiny"), token_types=0)


@pytest.mark.parametrize("layout", ["tp2", "cp2", "pp2 mb2", "dp2 tp2 zero1"])
def test_encoder_layouts_other_than_replicas_are_refused(layout: str):
    with pytest.raises(UserError, match="bert is an encoder, which runs on dp with any zero; leave"):
        refuse(Layout.parse(layout), preset("bert-tiny"), 8, 512, planning=True)
    refuse(Layout.parse("dp4 zero3 mb2 ac:full"), preset("bert-tiny"), 8, 512, planning=True)


def test_sequences_longer_than_positions_are_refused():
    model = build(small(max_positions=16))
    with pytest.raises(UserError, match="sequences of 20 tokens are longer than the model's 16 positions"):
        model.logits(batch(sequence=20)["input_ids"])


def test_encoder_without_head_names_its_available_outputs():
    tokens = batch()["input_ids"]
    with pytest.raises(UserError, match='with head "none" has no logits; use `hidden` or `pooled`'):
        build(small("none")).logits(tokens)
    with pytest.raises(UserError, match='with head "masked" has no pooler'):
        model = build(small())
        model.pooled(model.hidden(tokens))


def test_loss_is_independent_of_chunking(monkeypatch: pytest.MonkeyPatch):
    """With a vocabulary bias, several chunks and recomputed logits."""
    from meshwright.model import loss
    from meshwright.model.axis_operations import SINGLE_DEVICE
    from meshwright.spec import chunks

    make = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=make, dtype=torch.float64).requires_grad_() for shape in ((70, 8), (33, 8), (33,))
    )
    targets = torch.randint(0, 33, (70,), generator=make)
    want = F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum")
    expected = torch.autograd.grad(0.37 * want, (hidden, weight, bias))
    for smallest, keep in ((512, True), (16, True), (16, False)):
        monkeypatch.setattr(chunks, "MIN_CHUNK_TOKENS", smallest)
        monkeypatch.setitem(chunks.CHUNK_LOGITS, "cpu", 1)
        mine = loss.linear_cross_entropy(hidden, targets, loss.OutputHead(weight, SINGLE_DEVICE.tensor, bias), keep)
        torch.testing.assert_close(mine, want, rtol=1e-12, atol=0)
        for a, b in zip(torch.autograd.grad(0.37 * mine, (hidden, weight, bias)), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
