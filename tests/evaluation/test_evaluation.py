"""Evaluation: the loss is that of `transformers` over the same text, each byte counted once."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers

import meshwright as mw
from meshwright.checkpoint import find_checkpoint
from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.cli.main import meshwright
from meshwright.comm.mesh import Mesh
from meshwright.data import prepare
from meshwright.errors import UserError
from meshwright.evaluation.evaluation import prepare_held_out, run_evaluation
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.recipe import DataRecipe, ModelRecipe, load_recipe
from meshwright.serving.engine import Engine, build_runner, build_scheduler
from meshwright.serving.offline import run_requests
from meshwright.serving.rank_starter import RankPlan
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.config_json import config_from_path
from meshwright.spec.parameters import parameter_table

SEQUENCE = 24
TEXTS = [
    "".join(f"Line {number} of document {document} – naïve?\n" for number in range(3 + 2 * document))
    for document in range(5)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A corpus of five documents."""
    place = tmp_path_factory.mktemp("evaluation")
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (place / "texts.jsonl").write_text("\n".join(lines) + "\n")
    return place


@pytest.fixture(scope="module")
def checkpoint(place) -> Path:
    """A small model with large random weights, so that its predictions are far from uniform, and the byte tokenizer."""
    data = prepare(
        DataRecipe(
            source=str(place / "texts.jsonl"), tokenizer="bytes", sequence=8, validation_fraction=0.0,
            cache=str(place / "cache"),
        )
    )  # fmt: skip
    shape = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48, "max_positions": 40}
    config = config_from_recipe(ModelRecipe(family="llama", tied=True, **shape), 40, data.vocabulary)
    model = Transformer(config)
    initialise(model, parameter_table(config), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    save_huggingface(model, place / "model", tokenizer_from=data.tokenizer_directory)
    return place / "model"


def by_hand(checkpoint: Path, documents: list[str], sequence: int) -> tuple[float, int]:
    """Nats and targets by transformers: documents framed, joined and divided into rows; each document in a row is
    computed in isolation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    end = tokenizer.eos_token_id
    stream: list[tuple[int, int]] = []  # token, document
    for number, text in enumerate(documents):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        stream += [(token, number) for token in (end, *tokens, end)]
    nats, count = 0.0, 0
    for begin in range(0, len(stream) - 1, sequence):
        row = stream[begin : begin + sequence + 1]  # the last token is only a target
        for document in {number for _, number in row}:
            part = [token for token, number in row if number == document]
            if len(part) > 1:
                with torch.no_grad():
                    logits = model(torch.tensor([part[:-1]])).logits[0]
                nats += float(torch.nn.functional.cross_entropy(logits, torch.tensor(part[1:]), reduction="sum"))
                count += len(part) - 1
    return nats, count


@pytest.mark.parametrize("sequence", [7, SEQUENCE, 40])
def test_loss_matches_transformers_document_by_document(place, checkpoint, sequence):
    result = run_evaluation(checkpoint, str(place / "texts.jsonl"), sequence=sequence)
    nats, count = by_hand(checkpoint, TEXTS, sequence)
    size = sum(len(text.encode()) for text in TEXTS)
    assert result["tokens"] == count == size + 5  # every byte, and every end
    assert result["loss"] == pytest.approx(nats / count, rel=1e-5) and result["loss"] > 5.8  # worse than uniform
    assert result["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert (result["bytes"], result["documents"], result["sequence"]) == (size, 5, sequence)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_loss_is_sum_of_log_probabilities_from_server(place, checkpoint):
    """Bit for bit: a server of other step sizes computes the same ones."""
    result = run_evaluation(checkpoint, str(place / "texts.jsonl"), sequence=SEQUENCE, with_xz=False, device="cpu")
    config = config_from_path(checkpoint)
    _, tokens = prepare_held_out(checkpoint, config, str(place / "texts.jsonl"), SEQUENCE, lambda line: None)
    sizes = ServingSizes(13, 3, SEQUENCE + 1, blocks=40, scored_rows=0)
    engine = Engine(
        build_runner(RankPlan(str(checkpoint), "dp1", sizes), Mesh.single()),
        build_scheduler(config, sizes),
    )
    echoed = []
    for batch in tokens.iterate_batches(2):
        for row, begins in enumerate(batch.list_document_starts()):
            for begin, end in itertools.pairwise([*begins.tolist(), SEQUENCE]):
                targets = [target for target in batch.targets[row, begin:end].tolist() if target >= 0]
                if targets:
                    part = (int(batch.tokens[row, begin]), *targets)
                    sampling = Sampling(max_tokens=2 * (len(part) < 9), prompt_logprobs=len(part) % 3)
                    outputs = list(run_requests(engine, [Request("x", part, sampling)]))
                    [results] = [output.prompt_results for output in outputs if output.prompt_results is not None]
                    echoed += [-result.logprob for result in results[1:]]
    assert len(echoed) == result["tokens"] and math.fsum(echoed) / len(echoed) == result["loss"]


def test_every_byte_and_document_end_is_counted_once(place, checkpoint):
    """Rows are long enough that no document is divided, so the targets are all bytes and all ends."""
    path = place / "one.txt"
    path.write_text("Twelve bytes")
    result = run_evaluation(checkpoint, str(path), sequence=40, with_xz=False)
    assert (result["tokens"], result["bytes"]) == (13, 12) and "xz_bits_per_byte" not in result


def test_text_spelling_end_token_is_charged_for_its_letters(place, checkpoint):
    path = place / "spelled.txt"
    path.write_text("a<|endoftext|>b")
    result = run_evaluation(checkpoint, str(path), sequence=40, with_xz=False)
    assert (result["tokens"], result["bytes"]) == (16, 15)


def test_held_out_text_is_never_encoded_with_end_token(place, checkpoint, tmp_path):
    """As in SentencePiece's models, whose end token is the most probable piece."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -3.0) for letter in "</s>ab ")]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "text.txt").write_text("a </s> b")
    config = config_from_path(checkpoint)
    _, tokens = prepare_held_out(tmp_path, config, str(tmp_path / "text.txt"), None, lambda line: None)
    [stream] = tokens.iterate_tokens()
    assert stream.tolist() == [1, *(tokenizer.token_to_id(letter) for letter in "a </s> b"), 1]


def test_xz_compresses_the_same_bytes(place, checkpoint):
    import lzma

    result = run_evaluation(checkpoint, str(place / "texts.jsonl"))
    packed = lzma.compress("".join(TEXTS).encode(), preset=9)
    size = sum(len(text.encode()) for text in TEXTS)
    assert result["xz_bits_per_byte"] == pytest.approx(8 * len(packed) / size)


def test_documents_lossy_in_tokenizer_are_counted_with_warning(place, checkpoint, tmp_path):
    assert run_evaluation(checkpoint, str(place / "texts.jsonl"), with_xz=False)["lossy_documents"] == 0
    lossy = tmp_path / "lossy"
    shutil.copytree(checkpoint, lossy)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "Line": 2}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("Line", "isolated")
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(lossy / "tokenizer.json"))
    (lossy / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"}))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in ("Line", "Line 1", "2")))
    assert run_evaluation(lossy, str(tmp_path / "text.jsonl"))["lossy_documents"] == 2
    output = CliRunner().invoke(meshwright, ["evaluate", str(lossy), "--data", str(tmp_path / "text.jsonl")]).stdout
    assert "warning        2 of these documents differ from what their tokens decode to" in output


def test_row_length_is_bounded_by_model_positions(place, checkpoint):
    assert run_evaluation(checkpoint, str(place / "texts.jsonl"))["sequence"] == 40
    assert run_evaluation(checkpoint, str(place / "texts.jsonl"), sequence=1000)["sequence"] == 40


def test_progress_is_reported_up_to_the_end(place, checkpoint):
    calls: list[tuple[int, int]] = []
    run_evaluation(checkpoint, str(place / "texts.jsonl"), sequence=7, progress=lambda *one: calls.append(one))
    assert calls[-1][0] == calls[-1][1] and calls == sorted(calls)


# --- recipes as data


@pytest.fixture
def recipe(place, tiny_recipe) -> Path:
    text = tiny_recipe.read_text().replace('"stdlib"', f'"{place}/texts.jsonl"\ncache = "{place}/cache"')
    tiny_recipe.write_text(text.replace("sequence = 32", "sequence = 24\nvalidation_fraction = 0.4"))
    return tiny_recipe


def test_recipe_is_evaluated_on_its_validation_split(place, checkpoint, recipe):
    result = run_evaluation(checkpoint, str(recipe))
    held_out = list(prepare(load_recipe(recipe).data).iterate_documents("validation"))
    assert 0 < len(held_out) < 5 and set(held_out) < set(TEXTS)
    nats, count = by_hand(checkpoint, held_out, SEQUENCE)
    assert (result["documents"], result["tokens"], result["sequence"]) == (len(held_out), count, SEQUENCE)
    assert result["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert result["bytes"] == sum(len(text.encode()) for text in held_out)


def test_override_changes_the_recipes_validation_split(checkpoint, recipe):
    whole = run_evaluation(checkpoint, str(recipe), overrides=["data.validation_fraction=0.8"])
    assert whole["tokens"] > run_evaluation(checkpoint, str(recipe))["tokens"]


def test_evaluation_uses_tokenizer_of_checkpoint_not_of_recipe(checkpoint, recipe):
    expected = run_evaluation(checkpoint, str(recipe))
    recipe.write_text(recipe.read_text().replace('"bytes"', '"bpe"\nvocabulary = 300'))
    assert {k: v for k, v in run_evaluation(checkpoint, str(recipe)).items() if k != "data"} == {
        k: v for k, v in expected.items() if k != "data"
    }


def test_recipe_without_validation_split_is_refused(checkpoint, recipe):
    recipe.write_text(recipe.read_text().replace("validation_fraction = 0.4", "validation_fraction = 0.0"))
    with pytest.raises(UserError, match="data.validation_fraction is 0: there is no held-out data to evaluate on"):
        run_evaluation(checkpoint, str(recipe))


# --- checkpoints that do not fit


def test_tokenizer_larger_than_model_is_refused(place, checkpoint, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    bpe = prepare(
        DataRecipe(
            source=str(place / "texts.jsonl"), tokenizer="bpe", vocabulary=280, sequence=8, validation_fraction=0.0,
            cache=str(place / "cache"),
        )
    )  # fmt: skip
    shutil.copyfile(bpe.tokenizer_directory / "tokenizer.json", other / "tokenizer.json")
    with pytest.raises(UserError, match=rf"the tokenizer has {bpe.vocabulary} tokens, the model only 257"):
        run_evaluation(other, str(place / "texts.jsonl"))


def test_checkpoint_without_tokenizer_is_refused(place, checkpoint, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    (other / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer.json"):
        run_evaluation(other, str(place / "texts.jsonl"))


def test_model_prefers_its_own_story_to_other_text(shared_data, tmp_path):
    """A story by the model itself has a low loss, a text of another kind a high one."""
    model = shared_data / "stories260k"
    story = (model / "greedy_200_tokens.txt").read_text()
    (tmp_path / "story.txt").write_text(story)
    (tmp_path / "code.txt").write_text(Path(__file__).read_text()[:400])
    own = run_evaluation(model, str(tmp_path / "story.txt"), with_xz=False)
    other = run_evaluation(model, str(tmp_path / "code.txt"), with_xz=False)
    assert own["loss"] < 1.0 and own["bits_per_byte"] < 1.0 < 3.0 < other["bits_per_byte"]


def test_evaluate_verifies_hashes_by_default(place, checkpoint, tmp_path):
    """A bit of a norm's weight is wrong: sizes are right, but the loss would differ."""
    from meshwright.checkpoint.manifest import MANIFEST, Manifest, hash_file
    from tests.training import checkpoint_cases as cases

    run = tmp_path / "run"
    step = run / "checkpoints" / "step-000001"
    shutil.copytree(checkpoint, step)
    records = {path.name: hash_file(path) for path in step.iterdir()}
    (step / MANIFEST).write_bytes(Manifest(1, None, records).to_json())
    text = str(place / "texts.jsonl")
    expected = run_evaluation(checkpoint, text, with_xz=False)
    assert run_evaluation(run, text, with_xz=False) == expected | {"checkpoint": str(step)}
    assert mw.load(str(run)).directory == step

    cases.flip_bit(step / "model.safetensors")
    for call in (lambda: run_evaluation(step, text, with_xz=False), lambda: mw.load(step)):
        with pytest.raises(UserError, match=r"step-000001 is damaged: model.safetensors was altered"):
            call()
    assert run_evaluation(run, text, with_xz=False, check_hashes=False)["loss"] != expected["loss"]
    with pytest.raises(UserError, match=r"no intact checkpoint in it \(1 damaged\)"):
        mw.load(run)


# --- what is meant by a path


def test_find_checkpoint_accepts_every_kind_of_directory(checkpoint, tmp_path):
    from meshwright.checkpoint import Checkpointer, SaveOptions
    from meshwright.comm.mesh import Mesh
    from tests.training import checkpoint_cases as cases

    config = cases.tiny("llama")
    directory = tmp_path / "run" / "checkpoints"
    keeper = Checkpointer(directory, Mesh.single(), config, SaveOptions(background=False))
    for step in (1, 2):
        keeper.save(step, cases.state_pieces(config, 0, 1), {})
    assert keeper.failed() is None
    assert find_checkpoint(checkpoint) == checkpoint
    assert find_checkpoint(tmp_path / "run") == find_checkpoint(directory) == directory / "step-000002"
    assert find_checkpoint(directory / "step-000001") == directory / "step-000001"
    with pytest.raises(UserError, match="no such directory; checkpoints there: step-000001, step-000002$"):
        find_checkpoint(directory / "step-000003")

    for file in ("model.safetensors", "training/rank-00000-of-00001.safetensors"):  # the second is not read
        cases.flip_bit(directory / "step-000002" / file)
    lines: list[str] = []
    assert find_checkpoint(tmp_path / "run", log=lines.append) == directory / "step-000001"
    assert len(lines) == 1 and "step-000002 is damaged and skipped: model.safetensors was altered" in lines[0]
    with pytest.raises(UserError, match=r"step-000002 is damaged: model.safetensors was altered between bytes 0 and"):
        find_checkpoint(directory / "step-000002")
    cases.flip_bit(directory / "step-000002/model.safetensors")  # restore it
    assert find_checkpoint(directory / "step-000002") == directory / "step-000002"

    cases.flip_bit(directory / "step-000002/config.json")
    lines = []
    assert find_checkpoint(str(tmp_path / "run"), log=lines.append) == directory / "step-000001"
    assert len(lines) == 1 and "step-000002 is damaged and skipped: config.json" in lines[0]
    with pytest.raises(UserError, match=r"step-000002 is damaged: config.json was altered"):
        find_checkpoint(directory / "step-000002")
    (directory / "step-000001/manifest.json").unlink()
    with pytest.raises(UserError, match=r"step-000001 is damaged: it has no manifest.json"):
        find_checkpoint(directory / "step-000001")
    with pytest.raises(UserError, match=r"no intact checkpoint in it \(2 damaged\); a run directory, a check"):
        find_checkpoint(tmp_path / "run")
    with pytest.raises(UserError, match=r"no checkpoint in it; a run directory"):
        find_checkpoint(tmp_path)
    with pytest.raises(UserError, match=r"nothing: no such directory; a run directory"):
        find_checkpoint(tmp_path / "nothing")
