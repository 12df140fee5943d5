"""Predicted communication matches the bytes that ranks send at every call site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.collectives.named import load_named_programs
from meshwright.comm.mesh import Mesh
from meshwright.data import prepare
from meshwright.recipe import load_recipe_text
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.model_config import resolve_model_config
from meshwright.training.preference import Preferences
from meshwright.training.trainer import Trainer
from tests.conftest import exhaustive
from tests.training.training_cases import recipe

ROUTED = (
    *(f"experts.{what}{way}" for what in ("dispatch", "gather", "sum", "combine") for way in ("", ".backward")),
    "experts.keys",
)
"""Call sites of expert parallelism whose bytes depend on the router: predicted for equal load of the experts."""

MODELS: dict[str, dict[str, Any]] = {
    "llama, tied": {"model_layers": 4},
    "llama": {"model_layers": 4, "model_tied": False},
    "one key-value head": {"model_kv_heads": 1, "model_layers": 4},
    "qwen3": {"model_family": "qwen3", "model_layers": 4, "model_tied": False},
    "gpt2": {"model_family": "gpt2", "model_layers": 4, "model_kv_heads": None, "model_tied": None},
    "programs": {
        "model_layers": 4,
        "collectives_all_reduce": "auto",
        "collectives_reduce_scatter": "ring",
        "collectives_all_gather": "bruck",
    },
    "qwen2_moe": {
        "model_family": "qwen2_moe",
        "model_layers": 4,
        "model_experts": 4,
        "model_experts_per_token": 2,
        "model_expert_intermediate": 24,
        "model_shared_intermediate": 32,
        "model_dense_layers": [1],
        "model_tied": None,
    },
    "mixtral": {
        "model_family": "mixtral",
        "model_layers": 4,
        "model_experts": 4,
        "model_experts_per_token": 2,
        "model_tied": None,
    },
    "olmo2": {"model_family": "olmo2", "model_layers": 4, "model_tied": False},  # norms of all heads, after sublayers
    "overlapped products": {"model_layers": 4, "train_tensor_overlap": "chunks"},
}
PREDICTS = {
    "model_family": "deepseek_v3",
    "model_layers": 4,
    "model_experts": 4,
    "model_experts_per_token": 2,
    "model_expert_intermediate": 24,
    "model_dense_layers": [0],
    "model_prediction_layers": 1,
    "model_kv_heads": None,
    "model_tied": None,
}
"""With a module of multi-token prediction, which has a second embedding, head and loss around its layer."""

PREFERENCES = (
    ("llama", "cp2 tp2 mb2", False),
    ("mixtral", "cp2 pp2 mb2 ac:full", False),
    ("llama", "dp2 zero2 pp2:zb-v mb4 bf16", False),
    ("llama, tied", "dp2 cp2:ulysses zero3", False),
    ("mixtral", "cp2 dp2 zero3 mb2 ac:selective", True),
    ("llama", "tp2:nosp dp2 zero3 mb2", True),
    ("llama", "tp2 pp2:zb-v mb4 ac:full", True),
    ("llama, tied", "cp2:ulysses pp2 mb2 zero3", True),
)
"""Model, layout, and whether responses are labelled one by one instead of in pairs."""

LAYOUTS = (
    *("dp4 mb2", "dp4 zero1 mb2", "dp4 zero2 mb2 bf16", "dp4 zero3 mb2 bf16", "dp4 zero3 hs2", "dp4 zero1 hs2"),
    *("tp4", "tp4:nosp", "tp4 ac:selective", "tp4:nosp ac:selective", "tp4 ac:full", "tp4:nosp ac:full mb2"),
    *("dp2 tp2 zero1", "dp2 tp2 zero2 mb2", "dp2 tp2 zero3 mb2 bf16 ac:full", "dp2 tp2:nosp zero3"),
    *("cp4", "cp2 tp2 bf16 mb2", "dp2 cp2 zero3 ac:full", "cp2:ulysses tp2 mb2", "dp2 cp2:ulysses ac:selective bf16"),
    *("pp4 bf16", "dp2 pp2:zb-v mb4", "tp2 pp2:interleaved:2 mb4", "tp2:nosp pp2 mb2 ac:full", "cp2 pp2 mb2"),
    *("dp2 zero1 pp2 mb4", "dp2 zero3 pp2 mb4", "dp2 zero3 pp2:zb-v mb4", "dp2 zero2 pp2:chimera mb4"),
    *("pp4:dualpipe mb8", "tp2 pp2:gpipe mb2 ac:selective", "dp2 pp2:auto mb4"),
)
ALL = [(name, layout) for layout in LAYOUTS for name in MODELS]
SOME = [([*MODELS][at % (len(MODELS) - 1)], layout) for at, layout in enumerate(LAYOUTS) if at % 2 == 0]
SOME += [("olmo2", layout) for layout in ("tp4 ac:full", "tp4:nosp ac:selective")]
OVERLAPPED = "tp4 ac:full", "tp2 pp2:gpipe mb2 ac:selective", "tp4:nosp ac:full"
SOME += [("overlapped products", layout) for layout in OVERLAPPED]
"""Every axis, every way to recompute, with models in turns."""


def recipe_text(place: Path, layout: str, model: dict[str, Any]) -> str:
    if "pp" not in layout:
        model = model | {"model_layers": 2}  # of which a mixture's second is dense
    wanted = recipe(place, layout, **{key: value for key, value in model.items() if value is not None})
    tables = wanted.to_tables()
    for key in [key for key, value in model.items() if value is None]:
        tables["model"].pop(key.removeprefix("model_"), None)
    return type(wanted).from_tables(tables).to_toml()


def two_counts(text: str, by_axis: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    """On one rank: what a step sends as recorded, and as predicted, by site or by axis."""
    wanted = load_recipe_text(text, "recipe")
    layout = wanted.parsed_layout
    programs = load_named_programs(wanted.collectives, layout)
    mesh = Mesh.create(layout, programs=programs)
    data = prepare(wanted.data, wanted.run.seed)
    config = resolve_model_config(wanted, data)
    trainer = Trainer(LanguageModelTask(wanted, layout, config, data, mesh))
    objective = trainer.task.objective
    if isinstance(objective, Preferences):
        objective.reference = objective.compute_reference(trainer.task, {}, lambda sequences: None)
    mesh.record.clear()
    trainer.step()
    recorded = mesh.record.sent_by_axis() if by_axis else mesh.record.sent_by_site()
    mesh.close()
    return recorded, trainer.task.predicted_traffic_by_axis() if by_axis else trainer.task.predicted_traffic()


@pytest.mark.parametrize("cases", [SOME, pytest.param(ALL, marks=pytest.mark.exhaustive)], ids=["some", "all"])
def test_bytes_sent_match_prediction_at_every_site(cases, four, tmp_path):
    for name, layout in cases:
        text = recipe_text(tmp_path, layout, MODELS[name])
        for rank, (recorded, predicted) in enumerate(four.run(two_counts, text)):
            assert recorded and predicted == recorded, (name, layout, rank)


def compiled_counts(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """`two_counts` with the compiler that partitions as inductor does and generates no code."""
    compile = torch.compile
    quick = lambda function, **options: compile(function, **options | {"backend": "aot_eager"})  # noqa: E731
    with mock.patch.object(torch, "compile", quick):
        return two_counts(text)


def test_bytes_sent_by_compiled_blocks_match_prediction(two, tmp_path):
    """They are recomputed as a whole, with a layer's last sum, which others leave out."""
    recomputed = "tp2 ac:full"
    sums = {}
    for compile in (False, True):
        text = recipe_text(tmp_path, recomputed, {"train_compile": compile})
        for recorded, predicted in two.run(compiled_counts, text):
            assert recorded and predicted == recorded, compile
            sums[compile] = recorded["mlp.output"]
    assert sums[True] > sums[False]


def test_bytes_sent_match_prediction_on_every_axis(four, tmp_path):
    """Also subsets of an axis: tied embeddings of a pipeline, key-value heads shared by some tp ranks."""
    for name, layout in (
        ("llama, tied", "tp2 pp2 mb4"),
        ("llama, tied", "dp2 zero3 hs2 cp2"),
        ("one key-value head", "tp4"),
        ("mixtral", "dp4 zero1 ep2"),
    ):
        text = recipe_text(tmp_path, layout, MODELS[name])
        for rank, (recorded, predicted) in enumerate(four.run(two_counts, text, True)):
            if "ep" in recorded:  # routing
                assert recorded.pop("ep") > 0 and predicted.pop("ep") > 0
                assert {"shard", "expert_shard"} <= recorded.keys()
            assert recorded and predicted == recorded, (name, layout, rank)


def test_bytes_sent_by_multi_token_prediction_match_prediction(four, tmp_path):
    for layout in ("dp2 zero3 tp2 mb2", "tp2:nosp pp2:zb-v mb4 ac:full"):
        text = recipe_text(tmp_path, layout, PREDICTS)
        for rank, (recorded, predicted) in enumerate(four.run(two_counts, text)):
            assert recorded and predicted == recorded, (layout, rank)
            assert ("prediction.embedding" in recorded) == ("pp2" not in layout or rank < 2)


@pytest.mark.parametrize("cases", [PREFERENCES[::2], *exhaustive([*PREFERENCES[1::2]])], ids=["some", "others"])
def test_bytes_sent_in_preference_training_match_prediction(cases, four, tmp_path):
    """Includes sums of a response's log-probabilities over cp ranks, reward metrics, and KTO's further forward pass."""
    lines = [{"prompt": "p" * n, "chosen": "yes " * n, "rejected": "no " * n} for n in (3, 5, 7, 9) for _ in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {
        "source": str(tmp_path / "pairs.jsonl"), "records": "preference", "template": "instruction",
        "tokenizer": "bytes", "sequence": 192, "cache": str(tmp_path / "cache"),
    }  # fmt: skip
    data["clean"] = {"exact_duplicates": False}
    labels = [
        {"prompt": each["prompt"], "completion": each["chosen"], "label": at % 2 == 0} for at, each in enumerate(lines)
    ]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(label) + "\n" for label in labels))
    unpaired = data | {"records": "unpaired", "source": str(tmp_path / "labels.jsonl")}
    for name, layout, labelled in cases:
        source = unpaired if labelled else data
        text = recipe_text(tmp_path, layout, MODELS[name] | {"data": source})
        for rank, (recorded, predicted) in enumerate(four.run(two_counts, text)):
            assert recorded and predicted == recorded, (name, layout, rank)
            assert ("loss.responses" in recorded) == ("cp2" in layout and ("pp2" not in layout or rank >= 2))
            assert ("loss.kl" in recorded) == labelled


EXPERT_LAYOUTS = (
    *("dp4 ep4", "dp4 zero1 ep2:etp2", "dp2 tp2 ep2 zero3 mb2 bf16", "dp2 tp2:nosp ep4 ac:full", "tp4 ep2:etp2"),
    *("cp2 tp2 ep2 ac:selective", "dp4 zero3 hs2 ep2", "dp2 pp2 ep2 mb2 ac:full", "tp2:nosp dp2 ep4 ac:selective"),
    *("dp4 zero2 ep2:etp2 mb2 bf16", "dp4 zero1 hs2 ep4", "tp2:nosp cp2 ep1:etp2", "dp2 pp2:zb-v mb4 zero1 ep2"),
)
EXPERT_CASES = [(name, layout) for layout in EXPERT_LAYOUTS for name in ("mixtral", "qwen2_moe")]


@pytest.mark.parametrize(
    "cases", [EXPERT_CASES[::3], pytest.param(EXPERT_CASES, marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
def test_bytes_sent_under_expert_parallelism_match_prediction(cases, four, tmp_path):
    """Routing differs between ranks; dispatch equals combine, and the sum over ranks is about that of balanced
    routing."""
    for name, layout in cases:
        total = {site: [0, 0] for site in ROUTED}
        text = recipe_text(tmp_path, layout, MODELS[name])
        for rank, (recorded, predicted) in enumerate(four.run(two_counts, text)):
            routed = {site: (recorded.pop(site, 0), predicted.pop(site, 0)) for site in ROUTED}
            assert recorded and predicted == recorded, (name, layout, rank)
            for way, back in (
                ("dispatch", "combine"),
                ("combine", "dispatch"),
                ("gather", "sum"),
                ("sum", "gather"),
            ):
                (there, times), (here, once) = routed[f"experts.{way}"], routed[f"experts.{back}.backward"]
                assert there * once == here * times, (name, layout, rank, way)
            for site, pair in routed.items():
                total[site] = [a + b for a, b in zip(total[site], pair, strict=True)]
        for sent, expected in total.values():
            assert abs(sent - expected) <= 0.2 * expected, (name, layout, total)
