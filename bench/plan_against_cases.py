"""Cases of `plan_against_runs.py`: recipes of tiny models, their data, base model, teacher and program."""

from __future__ import annotations

import dataclasses
import json
import random
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.data import prepare
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.program.pipeline_text import format_pipeline
from meshwright.recipe import Recipe
from meshwright.schedules.library import generate
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.training.teacher_cache_writer import write_teacher_cache
from meshwright.verification.problem import scale_down_config

SOURCES = [str(Path(sysconfig.get_path("stdlib"), name)) for name in ("argparse.py", "ast.py", "inspect.py")]


def family(name: str, **changes: Any) -> dict[str, Any]:
    """Return the model of a recipe, of two layers unless `changes` has others; None removes a size."""
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 128} | changes
    return {"model": {"family": name} | {key: value for key, value in sizes.items() if value is not None}}


MOE = {"experts": 4, "experts_per_token": 2, "expert_intermediate": 64}
DENSE, DEEP = family("llama"), family("llama", layers=4)
TIED = family("llama", tied=True)
SINKS = family("gpt_oss", **MOE, intermediate=None, sliding_window=16)
SOFTCAPS = family("gemma2", sliding_window=16)
LATENT = family("deepseek_v3", **MOE, kv_heads=None, dense_layers=[0])
PREDICTS = family("deepseek_v3", **MOE, kv_heads=None, dense_layers=[0], prediction_layers=1)
MIXTRAL = family("mixtral", experts=4)
PAIRS = {"data": {"source": "HOME/pairs.jsonl", "records": "preference", "sequence": 192}}
LABELS = {"data": {"source": "HOME/labels.jsonl", "records": "unpaired", "sequence": 192}}
DOCUMENTS = {"data": {"source": "HOME/documents.jsonl", "document_mask": True}}
SAVES = {"train": {"validate_every": 1}, "checkpoint": {"every": 1}}


def train(**settings: Any) -> dict[str, Any]:
    return {"train": settings}


def adapter(**settings: Any) -> dict[str, Any]:
    return {"model": {"from": "HOME/base", "load_weights": True}, "adapter": {"rank": 4} | settings}


def narrow_adapter(**settings: Any) -> dict[str, Any]:
    """Return an adapted model whose attention is narrower than its hidden states."""
    return adapter(**settings) | {"model": {"from": "HOME/teacher", "load_weights": True}}


def distill(model: dict[str, Any] = DENSE, **settings: Any) -> dict[str, Any]:
    return model | {"distill": {"teacher": "HOME/teacher"} | settings}


COMPILED = train(compile=True)
CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "pp2 mb4 fp32": (
        family("llama", layers=4, tied=True),
        family("llama", layers=5),
        DEEP | LABELS,
        family("deepseek_v3", **MOE, kv_heads=None, dense_layers=[0], prediction_layers=1, layers=4),
        distill(DEEP),
        adapter(kind="lora", base="int8"),
    ),
    **{
        f"pp2:{name} mb4 {precision}": (DEEP,)
        for name, precision in (
            ("gpipe", "bf16"),
            ("interleaved:2", "fp32"),
            ("looped-bfs:2", "fp32"),
            ("zb-h1", "bf16"),
            ("zb-v", "fp32"),
            ("v-half", "bf16"),
            ("v-min", "fp32"),
            ("interleaved-zb", "fp32"),
            ("dualpipe", "fp32"),
            ("dualpipe-v", "bf16"),
            ("chimera", "fp32"),
            ("gems", "fp32"),
            ("auto", "fp32"),
            ("@HOME/mine.txt", "fp32"),
        )
    },
    "pp2:zb-h2 mb4 fp32 ac:full": (DEEP,),
    "pp2:zb-v mb4 bf16": (SOFTCAPS | {"model": SOFTCAPS["model"] | {"layers": 4}},),
    "dp2 zero2 pp2:zb-v mb4 bf16": (DEEP,),
    "dp2 zero3 pp2:dualpipe mb4 fp32": (DEEP,),
    "dp2 zero3 pp2:zb-v mb4 fp32": (DEEP,),
    "dp2 zero2 pp2:zb-h1 mb4 fp32": (DEEP,),
    "dp2 zero1 pp2:zb-v mb4 fp32": (DEEP,),
    "tp2 pp2:zb-h1 mb2 bf16 ac:selective": (family("gpt2", kv_heads=None, layers=4),),
    "dp2 pp2:dualpipe mb4 ep2 bf16": (family("mixtral", experts=4, layers=4),),
    "cp2 pp2:interleaved:2 mb4 fp32": (family("qwen3", layers=4),),
    "dp1 fp32": (
        DENSE,
        family("gpt2", kv_heads=None),
        family("qwen2"),
        family("mistral", sliding_window=16),
        family("phi3"),
        family("granite"),
        SOFTCAPS,
        SINKS,
        PREDICTS,
        family("granitemoe", **MOE),
        family("llama4_text", **MOE),
        family("deepseek_v2", **MOE, kv_heads=None, dense_layers=[0]),
        DENSE | DOCUMENTS,
        SOFTCAPS | DOCUMENTS,
        family("qwen2_moe", **MOE, shared_intermediate=64, dense_layers=[1]),
        DENSE | train(optimizer="sgd"),
        DENSE | train(optimizer="sgd", momentum=0.9),
        DENSE | train(clip=0.0),
        DENSE | SAVES,
        DENSE | PAIRS,
        adapter(kind="lora"),
        distill(),
        distill(top_k=8),
        distill(on_policy=1.0),
    ),
    "dp1 bf16": (
        SINKS,
        LATENT,
        MIXTRAL,
        family("gemma3_text", sliding_window=16),
        family("glm4"),
        family("glm4_moe", **MOE, dense_layers=[0]),
        DENSE | LABELS,
        adapter(kind="dora"),
        adapter(kind="lora", base="nf4"),
        adapter(kind="lora") | PAIRS,
        PREDICTS,
    ),
    "mb2 bf16": (TIED, TIED | DOCUMENTS),
    "dp1 fp16": (DENSE,),
    "dp1 fp32 ac:full": (family("gpt2", kv_heads=None), PREDICTS, adapter(kind="lora")),
    "dp1 bf16 ac:full": (family("qwen3"), SOFTCAPS, SINKS, adapter(kind="rslora")),
    "dp1 fp32 ac:selective": (family("olmo2"), SOFTCAPS, adapter(kind="lora", dropout=0.1), MIXTRAL),
    "dp1 bf16 ac:selective": (family("gpt2", kv_heads=None), SINKS),
    "dp2 fp32": (DENSE, distill(layout="zero3")),
    "dp2 zero1 bf16": (
        DENSE,
        adapter(kind="lora", dropout=0.1),
        DENSE | SAVES,
        DENSE | train(optimizer="sgd", momentum=0.9),
    ),
    "dp2 zero2 mb2 fp32": (DENSE, MIXTRAL),
    "dp2 zero2 mb2 bf16": (DENSE | PAIRS,),
    "dp2 zero3 bf16": (
        family("smollm3"),
        distill(loss="jsd"),
        adapter(kind="lora", base="nf4", double_quantization=True),
        PREDICTS,
    ),
    "dp2 zero3 mb2 bf16 ac:full": (DENSE,),
    "dp4 zero3 hs2 bf16": (TIED,),
    "dp4 zero1 hs2 fp32": (DENSE,),
    "dp4 zero1 fp32": (
        DENSE | {"collectives": {"all_reduce": "auto", "reduce_scatter": "ring", "all_gather": "bruck"}},
    ),
    "tp2 fp32": (
        family("gemma3_text", sliding_window=16),
        SINKS,
        DENSE | train(tensor_overlap="chunks"),
        DENSE | PAIRS | train(objective="orpo"),
        adapter(kind="dora"),
        distill(hidden=True),
        PREDICTS,
        distill(layout="replicated"),
        distill(top_k=8),
        SOFTCAPS,
    ),
    "tp2 bf16": (family("olmo3", sliding_window=16),),
    "tp2 mb2 fp32": (TIED,),
    "tp2:nosp bf16": (DENSE, family("dots1", **MOE, dense_layers=[0], kv_heads=4)),
    "tp2:nosp fp32": (family("glm4"),),
    "tp4 fp32": (family("llama", kv_heads=1),),
    "tp2 bf16 ac:full": (DENSE | train(tensor_overlap="chunks"), adapter(kind="rslora"), SINKS),
    "tp2 fp32 ac:selective": (LATENT, adapter(kind="lora"), narrow_adapter(kind="lora")),
    "tp2 fp32 ac:full": (narrow_adapter(kind="lora"),),
    "cp2 fp32": (
        DENSE,
        SINKS,
        family("llama4_text", **MOE),
        DENSE | DOCUMENTS,
        DENSE | PAIRS | train(objective="simpo"),
    ),
    "cp2:ulysses bf16": (DENSE, DENSE | DOCUMENTS),
    "cp2 bf16 ac:selective": (DENSE,),
    "cp4 fp32 ac:full": (DENSE,),
    "tp2 cp2 zero1 fp32": (DENSE,),
    "dp2 ep2 bf16": (SINKS,),
    "dp2 ep2 zero1 bf16": (LATENT, PREDICTS),
    "dp2 ep2 zero2 mb2 fp32": (MIXTRAL,),
    "dp2 ep2 zero3 bf16": (family("qwen3_moe", **MOE),),
    "tp2 ep1:etp2 bf16": (MIXTRAL,),
}
COMPILED_CASES = {
    "dp1 fp32": (DENSE | COMPILED, SOFTCAPS | COMPILED),
    "dp1 bf16": (DENSE | PAIRS | COMPILED, SINKS | COMPILED, adapter(kind="lora") | COMPILED),
}


def make_recipe(home: Path, layout: str, tables: dict[str, Any]) -> Recipe:
    """Return the recipe of a case. home: directory of data, checkpoints and runs, "HOME" in `tables` and `layout`."""
    defaults = {
        "layout": layout,
        "run": {"directory": tempfile.mkdtemp(dir=home / "runs"), "seed": 5, "device": "cpu", "threads": 1},
        "data": {
            "source": SOURCES,
            "tokenizer": "bytes",
            "sequence": 64,
            "document_mask": False,
            "cache": str(home / "cache"),
        },
        "train": {"steps": 4, "batch": 8, "learning_rate": 1e-3, "validation_sequences": 8},
    }
    merged = defaults | {
        key: defaults.get(key, {}) | value if isinstance(value, dict) else value for key, value in tables.items()
    }
    if "records" in merged["data"]:
        merged["data"] |= {"clean": {"exact_duplicates": False}, "template": "instruction", "document_mask": True}
    return Recipe.from_tables(json.loads(json.dumps(merged).replace("HOME", str(home))), trust=True)


def write_home(home: Path) -> None:
    """Write the data, base model, teacher with its cache, and pipeline program of the cases."""
    draw = random.Random(0)
    texts = [("p" * draw.randint(3, 9), "yes " * draw.randint(3, 9), "no " * draw.randint(3, 9)) for _ in range(400)]
    pairs = [{"prompt": prompt, "chosen": yes, "rejected": no} for prompt, yes, no in texts]
    labels = [
        {"prompt": each["prompt"], "completion": each["chosen"], "label": at % 2 == 0} for at, each in enumerate(pairs)
    ]
    documents = [{"text": f"{number} " + "word " * draw.randint(1, 30)} for number in range(2000)]
    for name, lines in (("pairs", pairs), ("labels", labels), ("documents", documents)):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (home / "runs").mkdir()
    (home / "mine.txt").write_text(format_pipeline(generate("zb-h1", 2, 4)))
    sizes = {"vocabulary": 257, "max_positions": 256, "heads": 4, "kv_heads": 2, "head_dim": 16}
    base = dataclasses.replace(scale_down_config(preset("llama-3-8b"), layers=4), **sizes, hidden=64, intermediate=128)
    write_model(home / "base", base)
    write_model(home / "teacher", dataclasses.replace(base, hidden=96, intermediate=160))
    recipe = make_recipe(home, "dp1 fp32", distill(top_k=8))
    write_teacher_cache(recipe, prepare(recipe.data, recipe.run.seed), lambda line: None)


def write_model(directory: Path, config: ModelConfig) -> None:
    """Write a model with random weights to a Hugging Face directory."""
    model = Transformer(config, dtype=torch.float32)
    initialise(model, parameter_table(config), seed=3)
    save_huggingface(model, directory)


def describe(tables: dict[str, Any]) -> str:
    """Return the name of a case: its model and what differs from a plain recipe."""
    model = tables["model"]
    parts = [model.get("family", "llama"), *(["tied"] if model.get("tied") else [])]
    parts += [f"{model['layers']} layers"] if model.get("layers", 2) != 2 else []
    parts += ["multi-token prediction"] if model.get("prediction_layers") else []
    parts += [Path(tables["data"]["source"]).stem] if "data" in tables else []
    parts += ["narrow attention"] if model.get("from") == "HOME/teacher" else []
    for table in ("adapter", "distill", "train", "checkpoint", "collectives"):
        settings = {key: value for key, value in tables.get(table, {}).items() if key not in ("rank", "teacher")}
        parts += [table] if table in tables and table in ("adapter", "distill") else []
        parts += [f"{key}={value}" for key, value in settings.items()]
    return " ".join(parts)
