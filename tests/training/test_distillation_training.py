"""Distillation runs match one device on every layout, resume with their projections, and refuse other teachers."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from meshwright.adapters.merging import write_adapter
from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.data import prepare
from meshwright.data.files import hash_file
from meshwright.data.tokenizers.tokenizer import find_tokenizer
from meshwright.errors import RankLost, UserError
from meshwright.launcher.launcher import launch
from meshwright.launcher.recipe_checks import check_recipe, check_teacher_tokenizer
from meshwright.layout import Layout
from meshwright.model.documents import Documents, MicroBatch
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.recipe import Recipe
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.spec.teacher import make_teacher_work
from meshwright.training import teacher_cache_writer
from meshwright.training.distillation import Distillation
from meshwright.training.distillation_loss import DistillationLoss
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.model_config import resolve_model_config
from meshwright.training.on_policy import Sampler, _DenseCache, find_prompts
from meshwright.training.precision import Arithmetic
from meshwright.training.task import RunStart
from meshwright.training.teacher_cache import MANIFEST, TeacherCache, hash_teacher
from meshwright.training.teacher_cache_writer import compute_shards, write_teacher_cache
from tests.adapters.adapter_cases import adapted, small, write_base
from tests.conftest import exhaustive
from tests.training import training_cases as cases

TOLERANCE = 2e-5
"""Difference of log-probabilities in fp32 between a layout that splits sums and one device."""
METRICS = ("hard_loss", "divergence", "hidden_loss")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with the vocabulary of the byte tokenizer and another width and depth than the student."""
    home = tmp_path_factory.mktemp("distillation")
    config = dataclasses.replace(small(layers=4), vocabulary=257, max_positions=64, hidden=48, intermediate=36)
    write_base(home / "teacher", config, torch.float32)
    (home / "text.py").write_text(Path(cases.SOURCES[0]).read_text()[:10_000])
    return home


def changes(home: Path, distill: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the changes of a recipe that distils the teacher in `home` into a model of two layers."""
    return {
        "model_layers": 2, "train_steps": 4, "train_warmup": 0, "train_validate_every": 2, "checkpoint_every": 2,
        "data": {"source": str(home / "text.py"), "tokenizer": "bytes", "sequence": 32, "cache": str(home / "cache")},
        "distill": {"teacher": str(home / "teacher"), "loss": "jsd", "temperature": 2.0} | distill,
    } | more  # fmt: skip


def figures(place: Path) -> list[list[float | None]]:
    return [
        [line.get(prefix + name) for name in METRICS for prefix in ("", "validation_")]
        for line in cases.metrics(place)
        if "loss" in line
    ]


def run(ranks: LocalRanks | None, home: Path, name: str, layout: str, distill: dict[str, Any], **more: Any) -> Any:
    return cases.run_without_error(ranks, home / name, f"{layout} fp32", **changes(home, distill, **more))


HIDDEN = {"hidden": True, "layer_map": [[0, 1], [1, 3]]}
CACHED = {"top_k": 16}
SAMPLED = {"on_policy": 1.0, "on_policy_prompt": 24}


def write_cache(home: Path) -> dict[str, Any]:
    recipe = cases.recipe(home / "alone", "dp1", **changes(home, CACHED))
    return write_teacher_cache(recipe, prepare(recipe.data, recipe.run.seed), lambda line: None)


@pytest.mark.parametrize(
    "layout, name, distill",
    [
        ("dp2 zero3 mb2", "hidden", HIDDEN),
        *exhaustive(("tp2", "cached", CACHED)),  # tp2: test_padding_of_the_teachers_vocabulary_changes_nothing
        ("cp2", "cached", CACHED),
        ("pp2 mb2", "cached", CACHED),
        ("dp2 zero3", "sampled", SAMPLED),
        ("tp2:nosp", "sampled", SAMPLED),
    ],
)
def test_layouts_match_steps_and_metrics_of_one_device(
    two: LocalRanks, home: Path, layout: str, name: str, distill: dict[str, Any]
):
    steps = {"train_steps": 4 if name == "hidden" else 2}
    if not (home / name).exists():
        if name == "cached":
            write_cache(home)
        run(None, home, name, "dp1", distill, **steps)
    place = f"{name} {layout}".replace(":", "-")
    result = run(two, home, place, layout, distill, **steps)[0]["result"]
    if name != "sampled":  # sampling sends more
        assert result["measured"]["sent_bytes_per_step"] == result["predicted"]["sent_bytes_per_step"]
    cases.assert_same_steps(home / place, home / name)
    for ours, theirs in zip(figures(home / place), figures(home / name), strict=True):
        assert ours == [None if value is None else pytest.approx(value, rel=1e-4) for value in theirs]
    line = cases.metrics(home / name)[0]
    weight = 0.5 * line["hard_loss"] + 0.5 * 4 * line["divergence"] + line.get("hidden_loss", 0.0)
    assert line["loss"] == pytest.approx(weight, rel=1e-5)
    assert ("hidden_loss" in line) == (name == "hidden")


def test_run_resumes_on_another_layout_with_its_projections(two: LocalRanks, home: Path):
    if not (home / "hidden").exists():
        run(None, home, "hidden", "dp1", HIDDEN)
    cases.run(two, home / "resumed", "dp2 zero2 fp32", 2, **changes(home, HIDDEN))
    run(two, home, "resumed", "tp2", HIDDEN)
    cases.assert_same_steps(home / "resumed", home / "hidden")
    checkpoint = home / "resumed/run/checkpoints/step-000004"
    names = load_file(checkpoint / "model.safetensors").keys()
    assert not any("distill" in name or "projection" in name for name in names)
    assert LlamaForCausalLM.from_pretrained(checkpoint).config.num_hidden_layers == 2
    held = "".join(path.read_text() for path in (checkpoint / "training").glob("*.json"))
    assert "distillation.projections.1.weight" in held and '"exp_avg"' in held
    state = json.loads((checkpoint / "training/state.json").read_text())
    assert len(state["teacher"]) == 16


def test_adapter_from_a_directory_learns_hidden_states(two: LocalRanks, home: Path):
    """The adapter starts from the directory's values, the projections from the seed, on every layout."""
    student = dataclasses.replace(small(layers=2), vocabulary=257, max_positions=64, intermediate=36)
    base = write_base(home / "student", student, torch.float32)
    model, values = adapted(student, base, targets=("q_proj", "down_proj"), base=str(home / "student"))
    write_adapter(home / "first", model.config, values)
    adapter = {"kind": "lora", "rank": 3, "alpha": 5.0, "targets": ["q_proj", "down_proj"], "from": str(home / "first")}
    more = {"model": {"from": str(home / "student")}, "model_layers": None, "adapter": adapter}
    run(None, home, "adapted", "dp1", HIDDEN, **more)
    cases.run(two, home / "adapted again", "dp2 zero3 fp32", 2, **changes(home, HIDDEN, **more))
    run(two, home, "adapted again", "tp2", HIDDEN, **more)
    cases.assert_same_steps(home / "adapted again", home / "adapted")
    checkpoint = home / "adapted again/run/checkpoints/step-000004"
    tensors = load_file(checkpoint / "adapter_model.safetensors")
    assert tensors.keys() == values.keys()
    first, none = cases.metrics(home / "adapted")[0], home / "without from"
    run(None, home, none.name, "dp1", HIDDEN, **(more | {"adapter": {**adapter, "from": None}}))
    assert first["hidden_loss"] > 0 and first["hard_loss"] != cases.metrics(none)[0]["hard_loss"]
    distance = torch.cat([(tensors[name] - values[name]).flatten() for name in values]).norm()
    assert 0 < distance < 0.5 * torch.cat([value.flatten() for value in values.values()]).norm()


def test_changed_teacher_is_refused_on_resume(home: Path):
    other = home / "other teacher"
    shutil.copytree(home / "teacher", other)
    distill = {"teacher": str(other)}
    cases.run(None, home / "changed", "dp1 fp32", 2, **changes(home, distill))
    config = dataclasses.replace(small(layers=4), vocabulary=257, max_positions=64, hidden=48, intermediate=36)
    shutil.rmtree(other)
    write_base(other, config, torch.bfloat16)
    (outcome,) = cases.run(None, home / "changed", "dp1 fp32", **changes(home, distill))
    assert "distill.teacher has changed since this run began" in outcome["error"]


def test_cache_holds_what_transformers_computes_and_continues(home: Path):
    document = write_cache(home)
    recipe = cases.recipe(home / "alone", "dp1", **changes(home, CACHED))
    data = prepare(recipe.data, recipe.run.seed)
    cache = TeacherCache(recipe, data)
    cache.open()
    batch = data.split("train").read_batch([3])
    ids, values = cache.read("train", np.array([3]))
    stop = next(
        (number for number, same in enumerate(batch.document_ids[0] == batch.document_ids[0, 0]) if not same), 32
    )
    with torch.no_grad():
        model = LlamaForCausalLM.from_pretrained(home / "teacher", dtype=torch.float64)
        logits = model(torch.from_numpy(batch.tokens[:, :stop]).long()).logits[0]
    expected = torch.log_softmax(logits / 2.0, dim=-1)
    best = expected.topk(16)
    np.testing.assert_array_equal(ids[0, :stop], best.indices)
    np.testing.assert_allclose(values[0, :stop, :-1], best.values, atol=1e-4)
    np.testing.assert_allclose(np.exp(values[0]).sum(-1), 1.0, atol=1e-5)
    # A file that is missing, cut or damaged is computed again, the others are kept.
    names = sorted(path for path in cache.directory.glob("train-00000-*.npy"))
    names[0].write_bytes(names[0].read_bytes()[:-9])
    with pytest.raises(UserError, match=r"is damaged \(train-00000-ids.npy\)"):
        TeacherCache(recipe, data).open()
    raw = bytearray(names[1].read_bytes())
    raw[-1] ^= 64
    names[1].write_bytes(raw)
    again = write_cache(home)
    assert 0 < again["computed"] <= 256 and again["computed"] < max(again["sequences"], 257)
    assert again | {"computed": 0} == document | {"computed": 0} and write_cache(home)["computed"] == 0
    (cache.directory / MANIFEST).unlink()
    assert write_cache(home)["computed"] == 0


def compute_on_rank(recipe: Recipe, layout: str) -> None:
    """Compute the missing files of a teacher's cache on this rank of a layout. A rank calls it."""
    mesh = Mesh.create(Layout.parse(layout))
    cache = TeacherCache(recipe, prepare(recipe.data, recipe.run.seed))
    cache.directory.mkdir(parents=True, exist_ok=True)
    compute_shards(cache, recipe, mesh, cache.find_missing_shards(), lambda line: None)
    mesh.close()


@pytest.mark.parametrize(
    "layout, experts, exact",
    [
        ("dp2 zero3 mb2", False, True),
        ("pp2:interleaved:2 mb4", False, True),
        ("tp2", False, False),
        ("cp2", False, False),
        ("dp2 ep2", True, True),
    ],
)
def test_cache_of_a_layout_is_that_of_one_device(two: LocalRanks, home: Path, layout: str, experts: bool, exact: bool):
    if experts:
        config = dataclasses.replace(small("mixtral-8x7b-v0.1"), vocabulary=257, max_positions=64, experts=4)
        write_base(home / "mixture", config, torch.float32)
        given = CACHED | {"teacher": str(home / "mixture")}
    else:  # the head's last slice is short, and has padding
        given = CACHED | {"teacher": str(make_padded_teacher(home, 320))}
    (home / "short.py").write_text((home / "text.py").read_text()[:18_000])
    made = changes(home, given)
    data = made["data"] | {"source": str(home / "short.py"), "sequence": 64}  # several micro-batches in a file
    recipe = cases.recipe(home / "alone", "dp1", **made | {"data": data})
    data = prepare(recipe.data, recipe.run.seed)
    write_teacher_cache(recipe, data, lambda line: None)
    cache = TeacherCache(recipe, data)
    names = sorted(path.name for path in cache.directory.glob("*.npy"))
    expected = {name: np.load(cache.directory / name) for name in names}
    shutil.rmtree(cache.directory)
    two.run(compute_on_rank, recipe, layout)
    assert sorted(path.name for path in cache.directory.iterdir()) == names
    found = {name: np.load(cache.directory / name) for name in names}
    for ids, values in zip(names[::2], names[1::2], strict=True):
        if exact:
            np.testing.assert_array_equal(found[values], expected[values])
        else:
            np.testing.assert_allclose(found[values], expected[values], rtol=0, atol=TOLERANCE)
        gaps = -np.diff(expected[values][..., :-1], axis=-1, prepend=np.inf)
        tied = np.minimum(gaps, np.append(gaps[..., 1:], np.zeros_like(gaps[..., :1]), axis=-1)) < TOLERANCE
        assert tied.mean() < 0.1 and ((found[ids] == expected[ids]) | (tied & (not exact))).all()


def fail_to_write(recipe: Recipe, layout: str, failing: str, rank: int) -> str:
    """Return the message with which a rank ends that computes the cache while one rank's disk is full at the method
    `failing` of the cache. Each rank calls it."""
    mesh = Mesh.create(Layout.parse(layout))
    cache = TeacherCache(recipe, prepare(recipe.data, recipe.run.seed))
    cache.directory.mkdir(parents=True, exist_ok=True)
    if mesh.rank == rank:
        setattr(cache, failing, mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(UserError) as caught:
        compute_shards(cache, recipe, mesh, cache.find_missing_shards(), lambda line: None)
    mesh.close()
    return str(caught.value)


@pytest.mark.parametrize(("failing", "rank"), [("create_files", 0), ("map_unfinished", 1), ("finish_files", 0)])
def test_full_disk_of_a_rank_is_one_line_on_every_rank(two: LocalRanks, home: Path, failing: str, rank: int):
    recipe = cases.recipe(home / "full", "dp1", **changes(home, CACHED | {"temperature": 3.0}))
    first, second = two.run(fail_to_write, recipe, "dp2", failing, rank)
    assert first == second and first.startswith("data.cache: ") and first.endswith("no space left on device")
    assert "\n" not in first


def test_killed_ranks_of_a_cache_say_that_finished_files_are_kept(home: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = cases.recipe(home / "killed", "dp1", **changes(home, CACHED | {"temperature": 4.0}))
    dies = (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setattr(teacher_cache_writer, "launch", lambda spec: launch(dataclasses.replace(spec, command=dies)))
    with pytest.raises(RankLost, match="SIGKILL.*; finished files of the cache are kept: the same command continues"):
        write_teacher_cache(recipe, prepare(recipe.data, recipe.run.seed), layout=Layout.parse("dp2"))


def test_cache_of_one_device_is_computed_with_the_threads_of_the_recipe(home: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = cases.recipe(home / "threads", "dp1", **changes(home, CACHED | {"temperature": 5.0}, run_threads=2))
    used, before = list[int](), torch.get_num_threads()

    def compute(*given: Any) -> None:
        used.append(torch.get_num_threads())
        compute_shards(*given)

    monkeypatch.setattr(teacher_cache_writer, "compute_shards", compute)
    write_teacher_cache(recipe, prepare(recipe.data, recipe.run.seed))
    assert before != 2 and used == [2] and torch.get_num_threads() == before


def test_file_of_a_cache_is_compared_with_its_checksum_at_its_first_read(home: Path, monkeypatch: pytest.MonkeyPatch):
    directory = Path(write_cache(home)["directory"])
    recipe = cases.recipe(home / "alone", "dp1", **changes(home, CACHED))
    data = prepare(recipe.data, recipe.run.seed)
    hashed: list[str] = []
    monkeypatch.setattr("meshwright.data.files.hash_file", lambda path: hashed.append(path.name) or hash_file(path))  # type: ignore[func-returns-value]
    cache = TeacherCache(recipe, data)
    cache.open()
    assert hashed == []
    for row in (3, 4, 3):
        cache.read("train", np.array([row]))
    assert sorted(hashed) == ["train-00000-ids.npy", "train-00000-log-probabilities.npy"]
    monkeypatch.undo()
    path = directory / "train-00000-log-probabilities.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 64]))
    (outcome,) = cases.run(None, home / "damaged contents", "dp1 fp32", **changes(home, CACHED))
    path.write_bytes(whole)
    assert f"distill.top_k: {path} is damaged" in outcome["error"] and "\n" not in outcome["error"]


def test_missing_and_stale_caches_are_refused_in_one_line(home: Path):
    write_cache(home)
    for distill, differs in (({"top_k": 8}, "top_k"), (CACHED | {"temperature": 1.0}, "temperature")):
        (outcome,) = cases.run(None, home / f"stale {differs}", "dp1 fp32", **changes(home, distill))
        assert (
            "the teacher's logits are not cached" in outcome["error"]
            and f"stale: another {differs}" in outcome["error"]
        )
        assert "\n" not in outcome["error"] and "meshwright data teacher" in outcome["error"]


def test_cache_of_weighted_sources_is_read_by_recipes_with_the_same_sequences_only(home: Path):
    text = (home / "text.py").read_text()
    for number, name in enumerate(("first", "first", "second", "second")):
        (home / name).mkdir(exist_ok=True)
        (home / name / f"{number}.py").write_text(text[2_500 * number : 2_500 * (number + 1)])
    caches = {}
    for weights in ([None, None], [3, 1], [1, 1]):
        sources = [{"path": str(home / name)} | ({} if weight is None else {"weight": weight})
                   for name, weight in zip(("first", "second"), weights, strict=True)]  # fmt: skip
        change = changes(home, CACHED)
        data = {key: value for key, value in change["data"].items() if key != "source"} | {"sources": sources}
        recipe = cases.recipe(home / "weighted", "dp1", **change | {"data": data})
        prepared = prepare(recipe.data, recipe.run.seed)
        cache = TeacherCache(recipe, prepared)
        if weights != [1, 1]:
            with pytest.raises(UserError, match="not cached"):
                cache.open()
            write_teacher_cache(recipe, prepared, lambda line: None)
        cache.open()
        caches[str(weights)] = cache
    plain, weighted, other = caches.values()
    assert weighted.directory == other.directory != plain.directory
    last = weighted.data.split("train").sequences - 1  # of the second source
    batch = weighted.data.split("train").read_batch([last])
    stop = int(np.argmax(batch.document_ids[0] > 0)) or len(batch.tokens[0])
    with torch.no_grad():
        model = LlamaForCausalLM.from_pretrained(home / "teacher")
        best = model(torch.from_numpy(batch.tokens[:, :stop])).logits[0].topk(CACHED["top_k"]).indices
    np.testing.assert_array_equal(weighted.read("train", np.array([last]))[0][0, :stop], best)


@pytest.mark.parametrize(
    "layout, distill, message",
    [
        ("dp1", {"teacher": "missing"}, "distill.teacher: .*missing"),
        ("dp1", {"hidden": True, "layer_map": [[0, 4]]}, "names layer 4 of the teacher, whose layers are 0 to 3"),
        ("dp1", {"hidden": True, "layer_map": [[2, 0]]}, "names layer 2 of the model, whose layers are 0 to 1"),
        ("pp2 mb2", {"hidden": True}, "distill.hidden compares layers that pipeline ranks do not hold together"),
        ("tp2", {"on_policy": 0.5}, "distill.on_policy samples on dp with any zero"),
        ("cp2", {"on_policy": 0.5}, "distill.on_policy samples on dp with any zero"),
        ("dp1", {"on_policy": 0.5, "on_policy_prompt": 32}, "on_policy_prompt 32 leaves nothing"),
        ("dp1", {"top_k": 257}, "top_k 257 is not below"),
        ("pp2 mb2", {"layout": "zero3 tp1"}, "runs on dp, zero, hs, tp and cp alone"),
    ],
)
def test_impossible_teachers_are_refused_in_one_line(home: Path, layout: str, distill: dict[str, Any], message: str):
    recipe = cases.recipe(home / "refused", layout, **changes(home, distill))
    with pytest.raises(UserError, match=message) as caught:
        check_recipe(recipe)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "distill, message",
    [
        ({"teacher": None, "loss": "jsd"}, "loss is set without teacher"),
        ({"beta": 0.3, "loss": "forward_kl"}, 'beta belongs to loss "jsd"'),
        ({"layer_map": [[0, 0]]}, "layer_map is set without hidden"),
        ({"temprature": 2.0}, "temperature"),
        ({"top_k": 4, "hidden": True}, "hidden needs a running teacher"),
        ({"hidden": True, "layer_map": [[0, 0], [0, 1]]}, "twice"),
    ],
)
def test_contradictory_keys_are_refused_by_name(home: Path, distill: dict[str, Any], message: str):
    given = changes(home, distill)
    given["distill"] = {key: value for key, value in given["distill"].items() if value is not None and key != "x"}
    if "teacher" in distill:
        del given["distill"]["temperature"]
    with pytest.raises(UserError, match=message):
        cases.recipe(home / "refused", "dp1", **given)


def test_teacher_of_another_vocabulary_or_tokenizer_is_refused(home: Path):
    config = dataclasses.replace(small(), max_positions=64)
    write_base(home / "wider", config, torch.float32)
    recipe = cases.recipe(home / "refused", "dp1", **changes(home, {"teacher": str(home / "wider")}))
    data = prepare(recipe.data, recipe.run.seed)
    with pytest.raises(UserError, match="has a vocabulary of 499 token IDs and the model one of 257"):
        check_teacher_tokenizer(recipe, data)
    named = home / "named"
    shutil.copytree(home / "teacher", named)
    for path in data.tokenizer_directory.iterdir():
        shutil.copy(path, named)
    recipe = cases.recipe(home / "refused", "dp1", **changes(home, {"teacher": str(named)}))
    check_teacher_tokenizer(recipe, data)
    other = json.loads((named / "tokenizer.json").read_text())
    vocabulary = other["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (named / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="another tokenizer than the data: token 'a' is 98 there and 97 here"):
        check_teacher_tokenizer(recipe, data)


def make_padded_teacher(home: Path, rows: int) -> Path:
    """Return a teacher with a tokenizer whose embedding and output head have `rows` rows, of which the tokenizer knows
    257."""
    place = home / f"padded to {rows}"
    if not place.exists():
        shutil.copytree(home / "teacher", place)
        recipe = cases.recipe(home / "refused", "dp1", **changes(home, {}))
        for path in prepare(recipe.data, recipe.run.seed).tokenizer_directory.iterdir():
            shutil.copy(path, place)
        tensors = load_file(place / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            more = torch.full((rows - 257, tensors[name].shape[1]), 3.0)
            tensors[name] = torch.cat([tensors[name], more])
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    return place


def test_padding_of_the_teachers_vocabulary_changes_nothing(two: LocalRanks, home: Path):
    small, padded = ({"teacher": str(make_padded_teacher(home, rows))} for rows in (257, 320))
    run(None, home, "no padding", "dp1", small, train_steps=2)
    run(two, home, "padding tp2", "tp2", padded, train_steps=2)
    cases.assert_same_steps(home / "padding tp2", home / "no padding")
    for ours, theirs in zip(figures(home / "padding tp2"), figures(home / "no padding"), strict=True):
        assert ours == [None if value is None else pytest.approx(value, rel=1e-4) for value in theirs]
    cached = []
    for distill in (small, padded):
        recipe = cases.recipe(home / "alone", "dp1", **changes(home, CACHED | distill))
        data = prepare(recipe.data, recipe.run.seed)
        write_teacher_cache(recipe, data, lambda line: None)
        cache = TeacherCache(recipe, data)
        cache.open()
        cached.append(cache.read("validation", np.arange(4)))
    for of_small, of_padded in zip(*cached, strict=True):
        np.testing.assert_array_equal(of_small, of_padded)


def test_padding_of_the_students_vocabulary_is_not_compared(two: LocalRanks, home: Path):
    distill = {"teacher": str(make_padded_teacher(home, 257))}
    run(None, home, "wider", "dp1", distill, train_steps=2, model_vocabulary=272)
    run(two, home, "wider tp2", "tp2", distill, train_steps=2, model_vocabulary=272)
    cases.assert_same_steps(home / "wider tp2", home / "wider")
    lines: list[str] = []
    task, _, model = make_task(home, distill, lines, model_vocabulary=272)
    assert "teacher: 257 token IDs, the model 272; the first 257 are compared" in lines
    ((tokens, targets, _),) = given = task.load_step(0)
    task.forward_backward(given, 1)
    teacher = LlamaForCausalLM.from_pretrained(home / "teacher", dtype=torch.float64)
    mask = Documents.from_ids(task.tokens.read_batch(task.samples_of_step(0)).document_ids).starts_BS
    total = 0.0
    for row, labels in enumerate(targets):
        starts = torch.zeros(32, dtype=torch.int64) if mask is None else mask[row]
        for start in starts.unique().tolist():
            at = starts == start
            with torch.no_grad():
                p, q = ((each(tokens[row][None, at]).logits[0, :, :257] / 2.0).softmax(-1) for each in (teacher, model))
            m = 0.5 * (p + q)
            both = 0.5 * (p * (p / m).log() + q * (q / m).log()).sum(-1)
            total += float((both * (labels[at] >= 0)).sum())
    # The norms of transformers are in float32.
    assert float(task.objective.metric_sums[1]) == pytest.approx(total, rel=1e-6)


def identify(recipe: Recipe, layout: str, held: str) -> tuple[int, str]:
    """Return how often this rank hashed the teacher's files, and the checksum of a teacher held on a layout by
    `distill.layout`. A rank calls it."""
    text = recipe.distill.model_copy(update={"layout": held})
    recipe = recipe.model_copy(update={"distill": text, "layout": layout})
    mesh, count = Mesh.create(Layout.parse(layout)), 0
    data = prepare(recipe.data, recipe.run.seed)
    config = resolve_model_config(recipe, data)
    parallel = SimpleNamespace(parameter_dtype=torch.float32)
    policy: Any = SimpleNamespace(mesh=mesh, config=config, layout=mesh.layout, data=data, parallel=parallel)

    def counted(directory: str) -> str:
        nonlocal count
        count += 1
        return hash_teacher(directory)

    with mock.patch("meshwright.training.distillation.hash_teacher", counted):
        objective = Distillation(recipe, DistillationLoss())
        objective.prepare(policy, RunStart(Path(), Agreement(mesh), None, lambda line: None))
    mesh.close()
    return count, objective.state()["teacher"]


def test_checksum_of_a_teacher_does_not_depend_on_its_layout_and_one_rank_hashes_files(two: LocalRanks, home: Path):
    recipe = cases.recipe(home / "alone", "dp1", **changes(home, {}))
    cases_ = [("dp2", "zero3"), ("dp2", "same"), ("tp2", "same"), ("tp2", "zero3 tp1"), ("tp2", "replicated tp1"),
              ("pp2 mb2", "same")]  # fmt: skip
    found = {sha256 for layout, held in cases_ for (_, sha256) in two.run(identify, recipe, layout, held)}
    assert len(found) == 1
    write_cache(home)
    cached = cases.recipe(home / "alone", "dp1", **changes(home, CACHED))
    (first, known), (second, received) = two.run(identify, cached, "dp2", "same")
    assert (first, second) == (1, 0) and known == received


def test_on_policy_step_trains_on_samples_of_the_current_student(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Replays the first step by transformers: same uniform numbers, whole prefixes instead of a cache."""
    distill = {"on_policy": 1.0, "on_policy_prompt": 20, "on_policy_temperature": 0.8}
    task, recipe, model = make_task(home, distill)
    monkeypatch.setattr("meshwright.training.on_policy.CHUNK", 56)  # of prompts of different lengths, up to 20
    rows = task.samples_of_step(0)
    ((tokens, targets, documents),) = task.load_step(0)
    batch = task.tokens.read_batch(rows)
    assert documents.starts_BS is None and documents.teacher is not None
    drawn = 0
    for row, number in enumerate(rows.tolist()):
        uniform = np.random.default_rng([recipe.run.seed, 0, 2, number]).random(32)
        same = batch.document_ids[row, :20] == batch.document_ids[row, 19]
        text, ended = batch.tokens[row, :20][same].tolist(), False
        assert targets[row, : len(text) - 1].eq(-100).all()
        while len(text) <= 32:
            with torch.no_grad():
                logits = model(torch.tensor([text])).logits[0, -1]
            sums = torch.softmax(logits / 0.8, dim=0).cumsum(0)
            text.append(0 if ended else int((sums <= uniform[len(text) - 1] * sums[-1]).sum()))
            assert int(targets[row, len(text) - 2]) == (-100 if ended else text[-1])
            ended, drawn = ended or text[-1] == 256, drawn + 1
        assert tokens[row].tolist() == text[:-1]
    assert drawn > 50


def test_sequences_without_targets_are_not_continued(home: Path):
    task, recipe, _ = make_task(home, {})
    tokens_BS, targets_BS, documents = task.load_step(0)[0]
    targets_BS[1] = -100
    (units,) = task.parallel.prefetchers.values()
    sampler = Sampler(task.model, units, task.mesh, ends=(256,), temperature=1.0, seed=recipe.run.seed)
    prompts = find_prompts(MicroBatch(tokens_BS, targets_BS, documents), None)
    tokens, targets, _ = sampler.sample(
        MicroBatch(tokens_BS, targets_BS, documents), prompts, 0, np.arange(len(tokens_BS))
    )
    assert torch.equal(tokens[1], tokens_BS[1]) and targets[1].eq(-100).all() and not targets[0].eq(-100).all()


def test_step_without_prompts_to_continue_computes_nothing_and_filled_sequences_lengthen_no_prompt(home: Path):
    task, recipe, _ = make_task(home, {})
    tokens_BS, targets_BS, documents = task.load_step(0)[0]
    targets_BS[1] = -100
    targets_BS[0, :5], targets_BS[2:, :5] = -100, -100
    (units,) = task.parallel.prefetchers.values()
    sampler = Sampler(task.model, units, task.mesh, ends=(), temperature=1.0, seed=recipe.run.seed)

    def sample(chosen: list[int]) -> tuple[Any, list[int]]:
        """Return the micro-batch sampled from some sequences, and the tokens of each computed part of a sequence."""
        given = MicroBatch(tokens_BS[chosen], targets_BS[chosen], documents)
        with mock.patch.object(sampler, "_compute_hidden", wraps=sampler._compute_hidden) as compute:
            found = sampler.sample(given, find_prompts(given, None), 0, np.array(chosen))
        return found, [call.args[0].shape[1] for call in compute.call_args_list]

    (_, _, _), widths = sample([0, 1, 2])
    assert widths[0] == 6 and set(widths[1:]) == {1} and len(widths) == 1 + 32 - 6
    (tokens, targets, _), widths = sample([1])
    assert widths == [] and torch.equal(tokens, tokens_BS[[1]]) and targets.eq(-100).all()


def test_samples_do_not_depend_on_the_micro_batches_sampled_together(home: Path, monkeypatch: pytest.MonkeyPatch):
    task, _, _ = make_task(home, {"on_policy": 1.0, "on_policy_prompt": 20})
    rows = task.samples_of_step(0)
    micro_batches = [
        MicroBatch(tokens[None], targets[None], Documents())
        for tokens, targets in zip(*task.load_step(0)[0][:2], strict=True)
    ]
    parts = [rows[index : index + 1] for index in range(4)]
    made: list[list[torch.Tensor]] = []
    for positions, groups in ((1, 4), (3 * 32, 2), (65_536, 1)):
        monkeypatch.setattr("meshwright.training.distillation.GROUP", positions)
        with mock.patch.object(Sampler, "sample", autospec=True, side_effect=Sampler.sample) as sample:
            found = task.objective._sample(task, micro_batches, parts, 0)
        assert sample.call_count == groups and [len(each[0]) for each in found] == [1] * 4
        made.append([torch.cat([each[index] for each in found]) for index in (0, 1)])
    assert (made[0][1] >= 0).sum() > 20
    for other in made[1:]:
        assert torch.equal(other[0], made[0][0]) and torch.equal(other[1], made[0][1])


@pytest.mark.parametrize("damage", ["archive", "dtype", "cut", "manifest"])
def test_damaged_cache_is_refused_in_one_line_and_written_again(home: Path, damage: str):
    document = write_cache(home)
    recipe = cases.recipe(home / "alone", "dp1", **changes(home, CACHED))
    directory = Path(document["directory"])
    path = next(directory.glob("train-*-ids.npy"))
    if damage == "archive":
        path.write_bytes(b"PK\x03\x04" + path.read_bytes()[4:])
    elif damage == "dtype":
        np.save(path, np.load(path).view(np.int16))  # of the same size
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-4])
    else:
        (directory / MANIFEST).write_text(json.dumps({"identity": json.loads((directory / MANIFEST).read_text())
                                                      ["identity"], "files": ["a"]}))  # fmt: skip
    with pytest.raises(UserError, match="damaged|not cached") as caught:
        TeacherCache(recipe, prepare(recipe.data, recipe.run.seed)).open()
    assert "\n" not in str(caught.value)
    write_cache(home)
    TeacherCache(recipe, prepare(recipe.data, recipe.run.seed)).open()


def test_teacher_layers_are_counted_by_those_of_the_student(home: Path):
    """A student from a directory names no layers itself; layers of the teacher that serve twice are held once."""
    for given, held in ((HIDDEN, 2), ({"hidden": True}, 2), ({"hidden": True, "layer_map": [[0, 1], [1, 1]]}, 1)):
        recipe = cases.recipe(home / "alone", "dp1", **changes(home, given))
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"layers": None})})
        work = make_teacher_work(recipe, small())
        assert work is not None and work.projected == held


@pytest.mark.parametrize("name", ["llama4-tiny", "gpt-oss-tiny"])
def test_logits_of_sampling_are_those_of_whole_sequences(name: str):
    config = dataclasses.replace(preset(name), sliding_window=5, initializer_range=0.3)
    model = Transformer(config, dtype=torch.float64).requires_grad_(False)
    initialise(model, parameter_table(config), seed=0)
    tokens, cache = torch.randint(2048, (2, 13), generator=torch.Generator().manual_seed(1)), _DenseCache(config, 2, 13)
    parts = []
    for first, stop in ((0, 6), (6, 7), (7, 9), *((place, place + 1) for place in range(9, 13))):
        places, part = torch.arange(first, stop).expand(2, -1), tokens[:, first:stop]
        cache.select(places)
        parts.append(model.output_logits(model.hidden(part, cache=cache, positions=places)))
    torch.testing.assert_close(torch.cat(parts, dim=1), model.logits(tokens), rtol=0, atol=1e-10)


def make_task(home: Path, distill: dict[str, Any], lines: list[str] | None = None, **more: Any) -> Any:
    """Return a task in float64 with its teacher, its recipe and the student of its initial values in transformers.
    lines: list to which logged lines are added."""
    recipe = cases.recipe(home / "task", "dp1", **changes(home, distill, train_batch=4, **more))
    data = prepare(recipe.data, recipe.run.seed)
    config, mesh = resolve_model_config(recipe, data), Mesh.single()
    task = LanguageModelTask(recipe, Layout(), config, data, mesh, arithmetic=Arithmetic(torch.float64, torch.float64))
    task.prepare(RunStart(home, Agreement(mesh), None, (lines if lines is not None else []).append))
    save_huggingface(task.model, home / "student", tokenizer_from=home / "teacher")
    return task, recipe, LlamaForCausalLM.from_pretrained(home / "student", dtype=torch.float64)


def test_student_of_a_trained_model_gets_closer_to_it_than_by_the_text_alone(shared_data: Path, tmp_path: Path):
    """Two layers of stories260k's width, three seeds; KL(teacher, student) on validation text by transformers."""
    source = shared_data / "stories260k"
    teacher = LlamaForCausalLM.from_pretrained(source, dtype=torch.float64)
    text = tmp_path / "text.txt"
    text.write_text((shared_data / "tinyshakespeare.txt").read_text()[:60_000])
    data = {"source": str(text), "tokenizer": str(source), "sequence": 64, "validation_fraction": 0.0}
    model = {"hidden": 64, "heads": 8, "kv_heads": 4, "intermediate": 172, "layers": 2, "family": "llama", "tied": True}
    more = {"train_steps": 15, "train_warmup": 0, "train_learning_rate": 1e-2, "checkpoint_every": 0}
    divergence: dict[str, list[float]] = {"alone": [], "distilled": []}
    for seed in range(3):
        for name, found in divergence.items():
            place = tmp_path / f"{name} {seed}"
            distill = {"teacher": str(source), "mixing": 0.0} if name == "distilled" else {}
            cases.run_without_error(
                None, place, "dp1 fp32", run_seed=seed, model=model, distill=distill,
                data=data | {"cache": str(tmp_path / "cache")}, **more,
            )  # fmt: skip
            student = LlamaForCausalLM.from_pretrained(place / "run/checkpoints/step-000015", dtype=torch.float64)
            tokens = torch.tensor([held_out(shared_data, source)])
            with torch.no_grad():
                log_p, log_q = (each(tokens).logits[0].log_softmax(-1) for each in (teacher, student))
            found.append(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))
    assert all(ours < 0.95 * theirs for ours, theirs in zip(*reversed(divergence.values()), strict=True)), divergence


def held_out(shared_data: Path, source: Path) -> list[int]:
    """Return tokens of text that no student saw."""
    files = find_tokenizer(str(source))
    assert files is not None
    text = (shared_data / "tinyshakespeare.txt").read_text()[70_000:71_500]
    return [1, *files.load().encode([text])[0].tolist()][:400]
