"""Preference training raises the margin of unseen chosen responses, equally on every layout, and resumes with the
original reference."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load, load_file
from transformers import LlamaForCausalLM

from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.data import prepare
from meshwright.model.documents import Documents
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.parallel.flat_buffers import Columns, TensorSlice
from meshwright.spec.parameters import parameter_table
from meshwright.training.model_config import resolve_model_config
from meshwright.training.reference import FILE, compute_weights_checksum
from tests.adapters.adapter_cases import small, write_base
from tests.conftest import exhaustive
from tests.training import training_cases as cases

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}>{% endif %}{% endfor %}"
)
WORDS = ["river", "stone", "cloud", "apple", "tiger", "lemon", "music", "paper", "green", "night"]
FIGURES = ("reward_margin", "reward_accuracy", "chosen_reward", "rejected_reward")
KEYS = (*FIGURES, *(f"validation_{name}" for name in FIGURES))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of two words: the chosen response repeats them in order, the rejected one does not."""
    home, draw = tmp_path_factory.mktemp("preference"), random.Random(0)
    lines = []
    for _ in range(160):
        first, second = draw.sample(WORDS, 2)
        rejected = draw.choice(["no", "I will not", f"{second} {first}", f"{draw.choice(WORDS)}"])
        lines.append({"prompt": f"{first} {second}", "chosen": f"{first}, {second}", "rejected": rejected})
    (home / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (home / "short.jinja").write_text(TEMPLATE)
    return home


def changes(home: Path, **more: Any) -> dict[str, Any]:
    return {
        "model_layers": 2, "train_validate_every": 2, "train_steps": 4, "train_batch": 8, "train_warmup": 0,
        "train_validation_sequences": 5, "train_schedule": "constant", "checkpoint_every": 2,
        "data": {
            "source": str(home / "pairs.jsonl"), "records": "preference", "template": str(home / "short.jinja"),
            "tokenizer": "bytes", "sequence": 96, "cache": str(home / "cache"), "validation_fraction": 0.15,
        },
    } | more  # fmt: skip


def run(ranks: LocalRanks | None, home: Path, name: str, layout: str, crash_after: int = 0, **more: Any) -> Any:
    return cases.run(ranks, home / name, layout, crash_after, **changes(home, **more))


def rewards(place: Path) -> list[list[float | None]]:
    return [[line.get(key) for key in KEYS] for line in cases.metrics(place) if "loss" in line]


@pytest.fixture(scope="module")
def alone(home: Path) -> Path:
    (outcome,) = run(None, home, "alone", "dp1 fp32")
    assert outcome["error"] == ""
    return home / "alone"


def test_training_raises_the_margin_of_held_out_pairs(home: Path):
    place = home / "long"
    (outcome,) = run(None, home, "long", "dp1 fp32", train_steps=40, train_validate_every=20, checkpoint_every=0)
    lines = [line for line in cases.metrics(place) if "loss" in line]
    assert outcome["error"] == "" and lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[0]["reward_margin"] == pytest.approx(0, abs=1e-5), "the policy is the reference still"
    middle, end = (line for line in lines if "validation_reward_margin" in line)
    assert 0.1 < middle["validation_reward_margin"] < end["validation_reward_margin"]
    assert end["validation_reward_accuracy"] > 0.9 and end["validation_loss"] < 0.5 * math.log(2)
    result = outcome["result"]
    for prefix in ("", "validation_"):
        chosen, rejected = result[f"{prefix}chosen_reward"], result[f"{prefix}rejected_reward"]
        assert result[f"{prefix}reward_margin"] == pytest.approx(chosen - rejected)
    assert result["validation_reward_margin"] == end["validation_reward_margin"]


@pytest.fixture(scope="module")
def labelled(home: Path) -> dict[str, Any]:
    """The same responses one by one, with labels, as KTO reads them."""
    lines = [json.loads(line) for line in (home / "pairs.jsonl").read_text().splitlines()]
    singles = [
        {"prompt": line["prompt"], "completion": line[key], "label": key == "chosen"}
        for line in lines
        for key in ("chosen", "rejected")
    ]
    (home / "labels.jsonl").write_text("".join(json.dumps(single) + "\n" for single in singles))
    return changes(home)["data"] | {"source": str(home / "labels.jsonl"), "records": "unpaired"}


def test_kto_raises_the_margin_of_held_out_responses_and_resumes(home: Path, labelled: dict[str, Any]):
    steps = {"train_validate_every": 20, "checkpoint_every": 20, "data": labelled}
    (outcome,) = run(None, home, "kto", "dp1 fp32", train_steps=40, **steps)
    assert outcome["error"] == ""
    lines = [line for line in cases.metrics(home / "kto") if "loss" in line]
    assert lines[0]["loss"] == pytest.approx(0.5, abs=1e-5) and lines[0]["kl"] == pytest.approx(0, abs=1e-4)
    end = lines[-1]
    assert end["validation_reward_margin"] > 1 and end["validation_reward_accuracy"] > 0.6
    assert end["validation_loss"] < 0.45 and max(line["kl"] for line in lines) > 0.1
    shutil.copytree(home / "kto" / "run", home / "kto resumed" / "run")
    shutil.rmtree(home / "kto resumed" / "run" / "checkpoints" / "step-000040")
    (again,) = run(None, home, "kto resumed", "dp1 fp32", train_steps=40, **steps)
    assert again["error"] == "" and cases.trace(home / "kto resumed") == cases.trace(home / "kto")


@pytest.mark.parametrize("layout", ["dp2 zero3 mb2", "pp2:zb-h1 mb4", *exhaustive("tp2", "cp2")])
def test_layouts_match_steps_and_kl_of_one_device_in_kto(two: LocalRanks, home: Path, labelled: Any, layout: str):
    if not (home / "kto alone").exists():
        run(None, home, "kto alone", "dp1 fp32", data=labelled)
    place = f"kto-{layout.replace(' ', '-').replace(':', '-')}"
    outcomes = run(two, home, place, f"{layout} fp32", data=labelled)
    assert all(outcome["error"] == "" for outcome in outcomes), outcomes[0]["error"]
    cases.assert_same_steps(home / place, home / "kto alone")
    found, expected = (
        [line["kl"] for line in cases.metrics(home / name) if "loss" in line] for name in (place, "kto alone")
    )
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5) and max(expected) > 1e-3


def test_kl_estimate_is_the_mean_over_responses_of_other_examples(home: Path, labelled: dict[str, Any]):
    """Of the step after a checkpoint, by transformers in float64 with its weights, document by document."""
    singles = (home / "labels.jsonl").read_text().splitlines()
    mostly = [
        line for number, line in enumerate(singles) if '"label": true' in line or number < 40
    ]  # so that it is > 0
    (home / "mostly desirable.jsonl").write_text("\n".join(mostly))
    source = {"source": str(home / "mostly desirable.jsonl")}
    more = {"train_steps": 21, "train_validate_every": 0, "checkpoint_every": 20, "data": labelled | source}
    (outcome,) = run(None, home, "kto estimate", "dp1 fp32", **more)
    assert outcome["error"] == ""
    place = home / "kto estimate" / "run"
    policy = LlamaForCausalLM.from_pretrained(place / "checkpoints" / "step-000020", dtype=torch.float64)
    wanted = cases.recipe(home / "kto estimate", "dp1 fp32", **changes(home, **more))
    data = prepare(wanted.data, wanted.run.seed)
    rows, known = data.split("train"), load_file(place / "reference.safetensors")["train mismatched"]
    bounds, ratios = np.cumsum([0, *rows.examples_by_row]), []
    for row in data.make_sample_order().sample(20 * 8 + np.arange(8)).tolist():
        batch = rows.mismatched.read_batch([row])
        for number in range(int(rows.examples_by_row[row])):
            here = batch.document_ids[0] == number
            tokens, targets = (torch.from_numpy(part[:, here]) for part in (batch.tokens, batch.targets))
            with torch.no_grad():
                logits = policy(tokens).logits[0].double()
            nats = -torch.nn.functional.cross_entropy(logits, targets[0], ignore_index=-100, reduction="sum")
            ratios.append(float(nats) - known[bounds[row] + number])
    (line,) = (line for line in cases.metrics(place.parent) if line.get("step") == 21 and "loss" in line)
    expected = max(0.0, sum(ratios) / len(ratios))
    assert len(ratios) >= 8 and line["kl"] == pytest.approx(expected, rel=1e-4) and expected > 1e-3


SOME = ("tp2", "cp2")
MORE = ("dp2 zero3 mb2", "pp2:zb-h1 mb4")
"""Layouts that run always in test_layouts_match_steps_and_kl_of_one_device_in_kto."""


@pytest.mark.parametrize("layout", [*SOME, *exhaustive(*MORE)])
def test_layouts_match_steps_and_rewards_of_one_device(two: LocalRanks, home: Path, alone: Path, layout: str):
    place = layout.replace(" ", "-").replace(":", "-")
    outcomes = run(two, home, place, f"{layout} fp32")
    assert all(outcome["error"] == "" for outcome in outcomes), outcomes[0]["error"]
    cases.assert_same_steps(home / place, alone)
    found, expected = rewards(home / place), rewards(alone)
    found[0][1] = expected[0][1] = None  # margins are 0 up to rounding
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == [None if value is None else pytest.approx(value, rel=1e-4, abs=1e-4) for value in theirs]
    mine, other = (load_file(where / "run" / "reference.safetensors") for where in (home / place, alone))
    for split in ("train", "validation"):
        np.testing.assert_allclose(mine[split], other[split], rtol=1e-5)


def test_reference_log_probabilities_match_isolated_responses(home: Path, alone: Path):
    """Unpacked, without padding, on a model with the initial values."""
    wanted = cases.recipe(alone, "dp1 fp32", **changes(home))
    data = prepare(wanted.data, wanted.run.seed)
    config = resolve_model_config(wanted, data)
    model = Transformer(config, dtype=torch.float64)
    initialise(model, parameter_table(config), wanted.run.seed)
    found = load_file(alone / "run" / "reference.safetensors")
    several = set()
    for split, values in found.items():
        rows, place = data.split(split), 0
        for row in range(rows.rows):
            batch = rows.read_batch([row], padded=True)
            pairs = int(rows.examples_by_row[row])
            several.add(pairs)
            for number in range(2 * pairs):
                here = batch.document_ids[0] == number
                tokens, targets = torch.from_numpy(batch.tokens[:, here]), torch.from_numpy(batch.targets[:, here])
                with torch.no_grad():
                    alone_nats = float(model(tokens, targets, Documents()))
                assert values[place] == pytest.approx(-alone_nats, rel=1e-5)
                place += 1
        assert place == len(values)
    assert {1, 2} <= several, "rows have different numbers of pairs"


@pytest.mark.parametrize("layout", ["dp1", "dp2 zero2", *exhaustive("cp2")])
def test_run_resumes_with_its_original_reference(two: LocalRanks, home: Path, alone: Path, layout: str):
    """Bit for bit on the same layout, within rounding on another one."""
    place = home / f"resumed-{layout.replace(' ', '-')}"
    run(None, home, place.name, "dp1 fp32", crash_after=3)
    file = place / "run" / "reference.safetensors"
    written = file.stat().st_mtime_ns, file.read_bytes()
    outcomes = run(None if layout == "dp1" else two, home, place.name, f"{layout} fp32")
    assert all(outcome["error"] == "" for outcome in outcomes), outcomes[0]["error"]
    assert (file.stat().st_mtime_ns, file.read_bytes()) == written
    if layout == "dp1":
        assert cases.trace(place) == cases.trace(alone) and rewards(place) == rewards(alone)
    else:
        cases.assert_same_steps(place, alone)


def test_reference_is_computed_without_validation_pairs_too(two: LocalRanks, home: Path):
    data = changes(home)["data"] | {"validation_fraction": 0.0}
    outcomes = run(two, home, "none held out", "dp2 fp32", train_steps=1, train_validate_every=0, data=data)
    assert all(outcome["error"] == "" for outcome in outcomes), outcomes[0]["error"]
    found = load_file(home / "none held out" / "run" / "reference.safetensors")
    assert len(found["train"]) > 200 and found["train"].all() and len(found["validation"]) == 0


def broken_off(home: Path, alone: Path, name: str) -> Path:
    """A run of four steps, two of which are saved; it starts like `alone`."""
    place = home / name
    shutil.copytree(alone / "run", place / "run")
    shutil.rmtree(place / "run" / "checkpoints" / "step-000004")
    return place / "run" / "reference.safetensors"


def test_invalid_reference_file_is_refused_by_name(two: LocalRanks, home: Path, alone: Path):
    file = broken_off(home, alone, "wrong")
    whole = file.read_bytes()

    def error(ranks: LocalRanks | None = None, layout: str = "dp1") -> str:
        outcomes = run(ranks, home, "wrong", f"{layout} fp32")
        assert len({outcome["error"] for outcome in outcomes}) == 1
        return outcomes[0]["error"]

    file.unlink()
    for ranks, layout in ((None, "dp1"), (two, "dp2")):
        said = error(ranks, layout)
        assert said.startswith(
            f"UserError: {file} is missing: it holds the log-probabilities under the initial weights"
        )
        assert said.endswith("restore the file, or start a new run with another run.name") and "\n" not in said
    file.write_bytes(whole[: len(whole) // 2])
    assert error().startswith(f"UserError: {file} is damaged: ")
    file.write_bytes(whole[:-3] + b"abc")
    assert error().startswith(f"UserError: {file} is damaged: its values do not match its sha256")
    run(None, home, "other seed", "dp1 fp32", crash_after=1, run={"directory": str(home / "other seed/run"), "seed": 6})
    shutil.copy(home / "other seed/run/reference.safetensors", file)
    assert error().startswith(f"UserError: {file} belongs to another run: ")
    file.write_bytes(whole)
    assert error() == ""


def test_new_run_reuses_only_reference_of_earlier_start(home: Path):
    place, seed = home / "starts", {"run": {"directory": str(home / "starts/run"), "seed": 5, "device": "cpu"}}
    file = place / "run" / "reference.safetensors"

    def values(content: bytes) -> dict[str, bytes]:
        return {name: found.tobytes() for name, found in load(content).items()}

    def said(**more: Any) -> str:
        shutil.rmtree(place / "run" / "checkpoints", ignore_errors=True)
        (outcome,) = run(None, home, "starts", "dp1 fp32", crash_after=1, **seed | more)
        assert outcome["error"] == ""
        return next(line for line in outcome["said"] if line.startswith("reference: log-probabilities"))

    assert "loaded from" not in said()
    whole = file.read_bytes()
    assert ", loaded from " in said()
    file.with_name(".reference.safetensors.new").write_bytes(whole[:100])  # killed while it wrote
    file.write_bytes(whole[:100])
    assert "loaded from" not in said() and values(file.read_bytes()) == values(whole)
    other = {"run": seed["run"] | {"seed": 6}}
    assert "loaded from" not in said(**other) and values(file.read_bytes()) != values(whole), "other weights"
    other = {"data": changes(home)["data"] | {"pack": False}}
    assert "loaded from" not in said() and "loaded from" not in said(**other), "the same pairs in other rows"
    assert sorted(load(file.read_bytes())["train"]) == pytest.approx(sorted(load(whole)["train"]), rel=1e-5)
    other = {"model_norm_epsilon": 0.5}
    assert "loaded from" not in said() and "loaded from" not in said(**other), "the same weights in another model"


def test_weight_checksum_covers_every_element_on_any_layout():
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 8, generator=generator)

    def pieces(values: torch.Tensor) -> list[TensorSlice]:
        return [TensorSlice("master", "w", 0, 48, values.reshape(-1))]

    def checksum(owned: list[TensorSlice]) -> str:
        return compute_weights_checksum(owned, Mesh.single())

    expected = checksum(pieces(whole))
    flat = whole.reshape(-1)
    parts = [
        TensorSlice("master", "w", start, start + 12, flat[start : start + 12].clone()) for start in (36, 0, 24, 12)
    ]
    assert checksum(parts) == expected, "ZeRO"
    halves = [
        TensorSlice("master", "w", 0, 24, whole[:, at : at + 4].reshape(-1), Columns(at, at + 4, 8)) for at in (0, 4)
    ]
    assert checksum(halves) == expected, "row parallel"
    for index in range(48):
        changed = flat.clone()
        changed[index] += 1e-6
        assert checksum(pieces(changed)) != expected
    swapped = flat.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert checksum(pieces(swapped)) != expected
    assert checksum([TensorSlice("master", "v", 0, 48, flat)]) != expected


def test_stored_checksum_is_equal_on_every_layout(home: Path, alone: Path):
    from safetensors import safe_open

    places = [layout.replace(" ", "-").replace(":", "-") for layout in (*SOME, *MORE)]
    found = set()
    for name in ("alone", *places, *(f"kto-{place}" for place in places)):
        if (file := home / name / "run" / "reference.safetensors").exists():
            with safe_open(file, framework="numpy") as opened:
                found.add(opened.metadata()["weights"])
    assert len(found) == 1


def test_reference_of_an_adapter_is_the_base_model_with_the_adapter_off(home: Path):
    write_base(home / "base", dataclasses.replace(small(), max_positions=96), torch.float32)
    adapter = {"kind": "dora", "rank": 2, "targets": ["q_proj", "up_proj"]}
    more = {"model": {"from": str(home / "base")}, "adapter": adapter, "train_learning_rate": 0.1}
    settings = {key: value for key, value in changes(home).items() if key != "model_layers"} | more
    cases.run_without_error(None, home / "adapter", "dp1 fp32", 2, **settings)
    reference = home / "adapter/run" / FILE
    before = load_file(reference)
    reference.unlink()  # computed again from the base, though the adapter has been trained
    (resumed,) = cases.run_without_error(None, home / "adapter", "dp1 fp32", **settings)
    assert any("computed in" in line for line in resumed["said"])
    assert all(np.array_equal(value, before[key]) for key, value in load_file(reference).items())
    lines = [line for line in cases.metrics(home / "adapter") if "loss" in line]
    assert lines[0]["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert abs(lines[-1]["reward_margin"]) > 1e-3
    # A run that starts from the trained adapter has the same reference, and is ahead of it from the first step on.
    start = {"adapter": adapter | {"from": str(home / "adapter/run/checkpoints/step-000004")}, "train_steps": 2}
    cases.run_without_error(None, home / "continued", "dp1 fp32", **settings | start)
    assert all(np.array_equal(value, before[key]) for key, value in load_file(home / "continued/run" / FILE).items())
    assert abs(next(line for line in cases.metrics(home / "continued") if "loss" in line)["reward_margin"]) > 1e-3
