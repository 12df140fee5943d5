"""Tables of published training runs, one metric of a run per row, with the inputs of the planner.

`bench/data/published_runs.csv` has the columns of the table that `bench/plan_accuracy.py` takes, and two more: the
engine whose kernels are priced, and whether its blocks were compiled. `bench/data/unseen_runs.csv` has two more: the
part of its sources, "development", "test", "fresh", "fresh-2", "fresh-3", "fresh-4", "test-2" or "test-3", to which
they were assigned before any of their runs was priced (the fresh parts and the last were recorded one after the other;
all but "test-2" and "test-3" give bounds), and devices per node where they are not 8. A source in no part, "inferred",
has a network that is known only from its own step times, so that these are evidence of nothing. `flash_attention` is
"yes", "no", or a kernel such as "flash-1" where the authors name it. Engines of "test" and "fresh-2" were once those
that names suggest; since their errors were studied, they are those that authors describe. Those of "test-2" and
"test-3" are what authors say in the notes.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.cost.engines import ENGINES, AttentionKernel, Engine
from meshwright.planner.hardware.cluster import Cluster, cluster
from meshwright.spec.config import ModelConfig
from meshwright.spec.families import FAMILIES
from meshwright.spec.flops import training_flops_per_token
from meshwright.spec.presets import PRESETS, preset

PUBLISHED, UNSEEN = (Path(__file__).parent / "data" / f"{name}_runs.csv" for name in ("published", "unseen"))

DEVICES = {
    "V100-16GB": "v100",
    "A100-40GB": "a100-40",
    "A100-80GB": "a100-80",
    "A800-80GB": "a800",
    "H100-80GB": "h100-sxm",
    "H100-96GB-500W": "h100-96",
    "H800-80GB": "h800",
    "GH200-96GB": "gh200-quad",
    "H200-141GB": "h200",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "MI300X-192GB": "mi300x",
    "MI355X-288GB": "mi355x",
}
RACK = 64  # devices of a scale-up domain of 72 that jobs of power-of-two size use
SOURCES = (  # engine of a source's runs, unless a column names it
    ("llm-foundry", "llm-foundry"),
    ("Megatron-LM SC21", "megatron"),
    ("Reducing Activation Recomputation Table 5", "megatron"),
    ("Zero Bubble", "zero-bubble"),
)
# Not 1F1B-I: two of its 24 stages for 22 layers have no layer, which the notation cannot express.
SCHEDULES = {"ZB-1p": "zb-h1", "ZB-2p": "zb-h2", "1F1B": "1f1b"}
TIMES = ("step_time", "throughput_tokens_per_s_per_gpu", "samples_per_gpu_per_s", "hardware_tflops_per_gpu")
MEMORY = "peak_memory_per_gpu"
# Model families without preset; the others are GPTs.
ARCHITECTURES = {
    "Nemotron": {"family": "nemotron", "activation": "relu2"},
    "Grok": {"family": "mixtral", "activation": "gelu", "tied": True, "experts": 8, "experts_per_token": 2},
    "TinyLlama": {"family": "llama", "activation": "silu"},
    "llama-34b": {"family": "llama", "activation": "silu"},
    "Llama-1.34B": {"family": "llama", "activation": "silu", "tied": True},
    "Llama-3.57B": {"family": "llama", "activation": "silu", "tied": True},
    "Sheared-LLaMA": {"family": "llama", "activation": "silu"},
    "Llama-8": {"family": "llama", "activation": "silu"},
    "Yi-34B": {"family": "llama", "activation": "silu"},
    "Baichuan2": {"family": "llama", "activation": "silu"},
    "InternLM": {"family": "llama", "activation": "silu", "qkv_bias": True, "output_bias": True},
    "ChatGLM3": {"family": "qwen2", "activation": "silu"},
    "Qwen-7B": {"family": "qwen2", "activation": "silu"},
    "OLMoE": {"family": "mixtral", "activation": "silu", "experts": 64, "experts_per_token": 8},
    "OLMo": {"family": "olmo2", "activation": "silu"},
    "AuroraGPT": {"family": "llama", "activation": "silu"},
    "KempnerForge": {"family": "llama", "activation": "silu"},
    "BLOOM": {"family": "bloom", "activation": "gelu_tanh", "tied": True},
    "GPT-NeoX": {"family": "gpt2", "activation": "gelu_tanh"},
    "xai-grok": {"family": "mixtral", "activation": "gelu", "tied": True, "experts": 8, "experts_per_token": 2},
    "VocabGPT": {"family": "gpt2", "activation": "gelu_tanh"},
    "OELLM-32B": {"family": "qwen3", "activation": "silu", "head_dim": 128},
    "Gipfelsturm": {"family": "llama", "activation": "silu"},
    "": {"family": "gpt2", "activation": "gelu_tanh", "tied": True},
}


@dataclass(frozen=True)
class Run:
    """A measured run, and the layouts that it may have had: the authors took the best where they name none. `seconds`
    of a step; `memory`: the peak of the fullest rank (GiB), of a row that says that instead."""

    source: str
    name: str
    config: ModelConfig
    layouts: tuple[Layout, ...]
    cluster: Cluster
    engine: Engine
    sequence: int
    batch: int
    seconds: float
    memory: float = 0.0

    @property
    def rate(self) -> float:
        """Model FLOP/s of a device."""
        flops = training_flops_per_token(self.config, self.sequence) * self.sequence * self.batch
        return flops / self.seconds / self.cluster.devices


def runs(path: Path, metrics: Iterable[str] = TIMES, half: str | None = None) -> Iterator[Run | tuple[str, str]]:
    """Yield every run of the file, or of one half of its sources, with one of these metrics; for a row that the planner
    cannot price, (source, reason)."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            named = next((engine for prefix, engine in SOURCES if prefix in row["source"]), None)
            engine = row.get("engine") or named
            if row["metric"] not in metrics or engine is None or row.get("half") != half:
                continue
            try:
                yield run(row, ENGINES[engine])
            except (UserError, KeyError, ValueError) as error:
                yield row["source"], f"{row['model']}: {error}"


def sources(path: Path, half: str) -> set[str]:
    """Return the names of the sources of one part of a table."""
    with path.open(newline="") as file:
        return {row["source"] for row in csv.DictReader(file) if row["half"] == half}


def run(row: dict[str, str], engine: Engine) -> Run:
    sequence, batch = int(row["seq"]), int(row["global_batch"])
    config = config_of(row)
    if row["flash_attention"] == "no":
        engine = replace(engine, attention="scores", hopper_attention=None)
    elif row["flash_attention"] == "yes" and engine.attention == "scores":
        engine = replace(engine, attention="flash-2")
    elif row["flash_attention"].startswith("flash-"):  # where the authors chose another kernel than the engine's
        engine = replace(engine, attention=cast(AttentionKernel, row["flash_attention"]), hopper_attention=None)
    for mode, size in (("DEFAULT", 4), ("PURE", 2)):  # bytes per element of reduced gradients
        if mode in row["precision"]:
            engine = replace(engine, gradient_bytes=size)
    if row.get("compile") == "yes":
        engine = engine.compiled()
    found = Run(
        row["source"], row["model"], config, tuple(layouts(row, batch)), cluster_of(row), engine, sequence, batch, 0.0
    )
    if row["metric"] == MEMORY:
        return replace(found, memory=float(row["value"]))
    return replace(found, seconds=seconds_of(row, config, sequence, batch))


def config_of(row: dict[str, str]) -> ModelConfig:
    if row["model"] in PRESETS:
        return replace(preset(row["model"]), layers=int(row["layers"]))
    fields = next(fields for name, fields in ARCHITECTURES.items() if row["model"].startswith(name))
    heads, hidden, width = int(row["heads"]), int(row["hidden"]), int(row["ffn"])
    mixture = {"expert_intermediate": width, "router_loss": 0.01} if "experts" in fields else {}
    return ModelConfig(
        **{
            **FAMILIES[str(fields["family"])].fixed,
            "vocabulary": int(row["vocab"] or 50304),
            "hidden": hidden,
            "layers": int(row["layers"]),
            "heads": heads,
            "kv_heads": int(row["kv_heads"]),
            "head_dim": hidden // heads,
            "intermediate": width,
            "max_positions": int(row["seq"]),
            "norm_epsilon": 1e-5,
            **fields,
            **mixture,
        }  # type: ignore[arg-type]
    )


def cluster_of(row: dict[str, str]) -> Cluster:
    """With the links that the table says, in nodes of 8, of as many devices as the table says, or racks."""
    device, gpus = DEVICES[row["gpu_type"]], int(row["gpus"])
    table: dict[str, object] = {"device": device, "devices": gpus, "devices_per_node": int(row.get("per_node") or 8)}
    if device == "gh200-quad":
        table["devices_per_node"] = 4
    if device.startswith("gb"):
        table["devices_per_node"] = min(gpus, RACK)
    for which, column in (("inside", "intra_node_bw"), ("across", "inter_node_bw")):
        table[f"{which}_gb_per_second"] = float(row[column])
    return cluster(table)


def seconds_of(row: dict[str, str], config: ModelConfig, sequence: int, batch: int) -> float:
    value, gpus = float(row["value"]), int(row["gpus"])
    if row["metric"] == "step_time":
        return value
    if row["metric"] == "throughput_tokens_per_s_per_gpu":
        return batch * sequence / gpus / value
    if row["metric"] == "samples_per_gpu_per_s":
        return batch / gpus / value
    # Narayanan et al. 2021, eq. 3
    h, layers, vocabulary = config.hidden, config.layers, config.vocabulary
    flops = 96 * batch * sequence * layers * h**2 * (1 + sequence / 6 / h + vocabulary / 16 / layers / h)
    return flops / gpus / value / 1e12


def layouts(row: dict[str, str], batch: int) -> Iterator[Layout]:
    dp, tp, pp = int(row["dp"]), int(row["tp"]), int(row["pp"])
    parts = [f"dp{dp}"]
    if "FULL_SHARD" in row["zero_or_fsdp"] or "HSDP" in row["zero_or_fsdp"]:
        parts += ["zero3", *(f"hs{size}" for size in re.findall(r"HSDP_(\d+)", row["zero_or_fsdp"]))]
    elif row["zero_or_fsdp"].startswith("zero"):
        parts += row["zero_or_fsdp"].split()
    if tp > 1:
        parts.append(f"tp{tp}" + ("" if row["sp"] == "yes" else ":nosp"))
    if row["cp"] not in ("", "1"):
        parts.append(f"cp{row['cp']}")
    if int(row["ep"] or 1) > 1:
        parts.append(f"ep{row['ep']}" + (f":etp{tp}" if tp > 1 and row["model"].startswith("Grok") else ""))
    if row["recompute"] in ("selective", "full"):
        parts.append(f"ac:{row['recompute']}")
    elif row["recompute"] not in ("none", "", "n/a"):
        raise UserError(f'no layout has "ac:{row["recompute"]}": only some blocks are recomputed')
    if "fp8" in row["precision"].lower():
        parts.append("fp8")
    schedules: Iterable[str] = ("1f1b",)
    if pp > 1:
        vpp = row["vpp"]
        if named := re.fullmatch(r"schedule=(.*)", vpp):
            schedules = (SCHEDULES[named[1]],)
        elif vpp.startswith("interleaved"):
            depth = int(row["layers"]) // pp
            schedules = tuple(f"interleaved:{v}" for v in range(2, depth + 1) if depth % v == 0) or ("1f1b",)
        elif int(vpp or 1) > 1:
            schedules = (f"interleaved:{vpp}",)
    sizes = (int(row["micro_batch"]),) if row["micro_batch"].isdigit() else (1, 2, 4, 8)
    for size in sizes:
        for schedule in schedules:
            if batch % (dp * size) == 0:
                stages = [f"pp{pp}:{schedule}"] if pp > 1 else []
                yield Layout.parse(" ".join([*parts, *stages, f"mb{batch // dp // size}"]))
