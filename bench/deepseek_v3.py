"""DeepSeek-V3's training on 2,048 H800 (arXiv:2412.19437): predicted and published GPU hours.

    python bench/deepseek_v3.py

The model with its module of multi-token prediction, the layout of section 3.2 (16 pipeline ranks under DualPipe, 64
ranks of experts on 8 nodes, ZeRO-1, fp8), 14.8 trillion tokens in sequences of 4,096, and the batch of section 4.2:
3,072 sequences growing to 15,360 over the first 469 billion tokens, priced at five sizes from 4,096 on, the smallest
that fills DualPipe. No constant of the planner is fitted to this run; what the engine `hai-llm` assumes beyond the
report, `planner/cost/engines.toml` says. Context extension and post-training (124 thousand GPU hours) have no published
layout: they are added as published.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from bench.common import write_result
from meshwright.layout import Layout
from meshwright.planner.cost.engines import ENGINES, Engine
from meshwright.planner.cost.step_time import StepTime, step_time
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.memory.rank_memory import fullest_rank
from meshwright.planner.problem import Problem
from meshwright.spec.presets import preset

DEVICES, SEQUENCE, BATCH = 2048, 4096, 15360
LAYOUT = "dp128 zero1 ep64 pp16:dualpipe mb{} ac:selective fp8"
TOKENS, RAMP_TOKENS, RAMP = 14.8e12, 469e9, (4096, 6144, 9216, 12288, 15360)
PUBLISHED = {
    "thousand_gpu_hours_per_trillion": 180.0,
    "million_gpu_hours_pretraining": 2.664,
    "million_gpu_hours": 2.788,
}
REST = 0.124  # million GPU hours of context extension and post-training
CONFIG = replace(preset("deepseek-v3"), prediction_layers=1)


def step(batch: int, engine: Engine) -> StepTime:
    """Return the predicted time of a step of `batch` sequences."""
    layout = Layout.parse(LAYOUT.format(batch // 128))
    return step_time(CONFIG, layout, cluster(f"{DEVICES}xh800"), SEQUENCE, batch, engine=engine)


def hours(seconds: float, batch: int) -> float:
    """Return the thousand GPU hours of a trillion tokens. seconds: of a step of `batch` sequences."""
    return seconds * DEVICES / 3600 * 1e12 / (batch * SEQUENCE) / 1e3


def predict(engine: Engine) -> dict[str, Any]:
    """Return the predicted figures of `PUBLISHED`, each as {predicted, low, high}, and the parts of a step."""
    found = step(BATCH, engine)
    ramp = [step(batch, engine) for batch in RAMP]
    figures: dict[str, Any] = {}
    for name in ("seconds", "low", "high"):
        per_trillion = hours(getattr(found, name), BATCH)
        first = sum(hours(getattr(one, name), batch) for one, batch in zip(ramp, RAMP, strict=True)) / len(RAMP)
        pretraining = (per_trillion * (TOKENS - RAMP_TOKENS) + first * RAMP_TOKENS) / 1e15
        values = (per_trillion, pretraining, pretraining + REST)
        for what, value in zip(PUBLISHED, values, strict=True):
            entry = figures.setdefault(what, {"published": PUBLISHED[what]})
            entry["predicted" if name == "seconds" else name] = round(value, 3)
    figures["step_seconds"] = round(found.seconds, 2)
    figures["published_step_seconds"] = round(180e3 * 3600 / DEVICES * BATCH * SEQUENCE / 1e12, 2)
    figures["breakdown_seconds"] = {part: round(value, 3) for part, value in found.breakdown.items()}
    return figures


def memory(engine: Engine) -> float:
    """Return the predicted GiB of the fullest device, CUDA context and fragmentation included."""
    layout = Layout.parse(LAYOUT.format(BATCH // 128))
    problem = Problem(CONFIG, cluster(f"{DEVICES}xh800"), SEQUENCE, BATCH, engine, False, "adamw", "fp8", 1.0, False)
    return fullest_rank(problem, layout).device_bytes / 2**30


def measure() -> dict[str, Any]:
    """Return predictions of the published engine, of one with the attention kernel of an A100, and of Meshwright's."""
    published = ENGINES["hai-llm"]
    others = {
        "flash-2 in place of flash-3": replace(published, hopper_attention=None),
        "no overlap of dispatch and combine": replace(published, overlap_processors=None),
        "engine meshwright": ENGINES["meshwright"],
    }
    return {
        "layout": LAYOUT.format(BATCH // 128),
        "hai-llm": predict(published) | {"device_gib": round(memory(published), 1)},
        "others": {name: predict(engine) for name, engine in others.items()},
    }


if __name__ == "__main__":
    write_result("deepseek_v3", measure())
