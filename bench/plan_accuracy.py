"""How far the planner's step times are from published runs: mean and median absolute error of every source, skill
against the null model (every run gets its source's median rate), rank correlation, bounds that hold, rows refused.

    python bench/plan_accuracy.py shared/data/measured/training_runs.csv

No constant of the planner is fitted to a run or a source here; what it is calibrated on, `plan/rates.toml` says.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model.config import ModelConfig
from meshwright.model.families import FAMILIES
from meshwright.model.refuse import refuse
from meshwright.plan.cluster import Cluster, Link
from meshwright.plan.devices import find_device
from meshwright.plan.engines import ENGINES, Engine
from meshwright.plan.flops import training_flops_per_token
from meshwright.plan.rates import constants
from meshwright.plan.step_time import StepTime, step_time

DEVICES = {"A100-40GB": "a100-40", "A100-80GB": "a100-80"}
SOURCES = (  # whose kernels a source's runs had
    ("llm-foundry", "llm-foundry"),
    ("Megatron-LM SC21", "megatron"),
    ("Reducing Activation Recomputation Table 5", "megatron"),
    ("Zero Bubble", "zero-bubble"),
    ("torchtitan", "torchtitan"),
)
# Not 1F1B-I: its 24 stages for 22 layers have two without a layer, which no layout of ours says.
SCHEDULES = {"ZB-1p": "zb-h1", "ZB-2p": "zb-h2", "1F1B": "1f1b"}
TIMES = ("step_time", "throughput_tokens_per_s_per_gpu", "samples_per_gpu_per_s", "hardware_tflops_per_gpu")


@dataclass(frozen=True)
class Run:
    """A measured run, and the layouts that it may have had: the authors took the best where they name none."""

    source: str
    name: str
    config: ModelConfig
    layouts: tuple[Layout, ...]
    cluster: Cluster
    engine: Engine
    sequence: int
    batch: int
    seconds: float

    @property
    def rate(self) -> float:
        """Model FLOP/s of a device."""
        flops = training_flops_per_token(self.config, self.sequence) * self.sequence * self.batch
        return flops / self.seconds / self.cluster.devices


def runs(path: Path) -> Iterator[Run | str]:
    """Every run of the file whose time is known; the reason for one that cannot be told to the planner."""
    with path.open() as file:
        for row in csv.DictReader(file):
            engine = next((engine for prefix, engine in SOURCES if prefix in row["source"]), None)
            if row["metric"] not in TIMES or engine is None:
                continue
            try:
                yield run(row, ENGINES[engine])
            except (UserError, KeyError, ValueError) as error:
                yield f"{row['source']}, {row['model']}: {error}"


def run(row: dict[str, str], engine: Engine) -> Run:
    sequence, batch, gpus = int(row["seq"]), int(row["global_batch"]), int(row["gpus"])
    heads, hidden = int(row["heads"]), int(row["hidden"])
    config = ModelConfig(
        **{
            **FAMILIES["gpt2"].fixed,
            "family": "gpt2",
            "vocabulary": int(row["vocab"] or 50304),
            "hidden": hidden,
            "layers": int(row["layers"]),
            "heads": heads,
            "kv_heads": heads,
            "head_dim": hidden // heads,
            "intermediate": int(row["ffn"]),
            "max_positions": sequence,
            "norm_epsilon": 1e-5,
            "activation": "gelu_tanh",
            "tied": True,
        }  # type: ignore[arg-type]
    )
    device = find_device(DEVICES[row["gpu_type"]])
    assert device is not None and device.links is not None
    inside, across = (float(row[f"{which}_node_bw"]) * 1e9 for which in ("intra", "inter"))
    cluster = Cluster(
        row["gpu_type"],
        device,
        gpus,
        8,
        Link(inside, device.links.latency),
        Link(across, device.links.across_latency),
    )
    if row["flash_attention"] == "no":
        engine = replace(engine, attention="scores", hopper_attention=None)
    seconds = time_of(row, config, sequence, batch, gpus)
    return Run(
        row["source"], row["model"], config, tuple(layouts(row, batch)), cluster, engine, sequence, batch, seconds
    )


def time_of(row: dict[str, str], config: ModelConfig, sequence: int, batch: int, gpus: int) -> float:
    value = float(row["value"])
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
    if "FULL_SHARD" in row["zero_or_fsdp"]:
        parts.append("zero3")
    if tp > 1:
        parts.append(f"tp{tp}" + ("" if row["sp"] == "yes" else ":nosp"))
    if row["recompute"] in ("selective", "full"):
        parts.append(f"ac:{row['recompute']}")
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


def predicted(one: Run) -> StepTime:
    """Of the layout that the planner finds fastest, where the run's own is not known to the last letter."""

    def priced(layout: Layout, simulate: bool) -> StepTime:
        refuse(layout, one.config, one.batch, one.sequence, one.cluster.devices, planning=True)
        return step_time(one.config, layout, one.cluster, one.sequence, one.batch, engine=one.engine, simulate=simulate)

    if len(one.layouts) == 1:
        return priced(one.layouts[0], True)
    found: list[tuple[float, Layout]] = []
    for layout in one.layouts:
        try:
            found.append((priced(layout, False).seconds, layout))
        except UserError:
            continue
    if not found:
        raise UserError(f"{one.name}: none of its layouts can be priced")
    return priced(min(found, key=lambda pair: pair[0])[1], True)


def spearman(first: list[float], second: list[float]) -> float:
    """Rank correlation."""
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(*ranks) if len(first) > 2 else float("nan")


def report(found: list[tuple[Run, StepTime]]) -> dict[str, Any]:
    """The figures of one source."""
    errors = [abs(told.seconds / one.seconds - 1) for one, told in found]
    signed = [told.seconds / one.seconds - 1 for one, told in found]
    median = statistics.median(one.rate for one, _ in found)
    null = [abs(one.rate / median - 1) for one, _ in found]
    mean = statistics.mean(errors)
    return {
        "runs": len(found),
        "mean_error": round(mean, 4),
        "median_error": round(statistics.median(errors), 4),
        "largest_error": round(max(errors), 4),
        "bias": round(statistics.mean(signed), 4),
        "null_error": round(statistics.mean(null), 4),
        "skill": round(1 - mean / statistics.mean(null), 4) if any(null) else None,
        "rank_correlation": round(
            spearman([one.rate for one, _ in found], [one.rate * one.seconds / told.seconds for one, told in found]), 4
        ),
        "bounds_hold": round(statistics.mean(told.low <= one.seconds <= told.high for one, told in found), 4),
        "median_high_to_low": round(statistics.median(told.high / told.low for _, told in found), 4),
    }


def measure(path: Path, verbose: bool = False) -> dict[str, Any]:
    """The figures of all sources, and of all runs together."""
    by_source: dict[str, list[tuple[Run, StepTime]]] = defaultdict(list)
    refused: list[str] = []
    for one in runs(path):
        if isinstance(one, str):
            refused.append(one)
            continue
        try:
            told = predicted(one)
        except UserError as error:
            refused.append(f"{one.source}, {one.name}: {error}")
            continue
        by_source[one.source].append((one, told))
        if verbose:
            parts = " ".join(f"{part} {seconds:.3g}" for part, seconds in told.breakdown.items() if seconds)
            print(
                f"{one.name:12} {one.layouts[0]!s:44} s{one.sequence:<6} measured {one.seconds:8.3f} "
                f"told {told.seconds:8.3f} {told.seconds / one.seconds - 1:+.1%}  {parts}",
                file=sys.stderr,
            )
    everything = [pair for found in by_source.values() for pair in found]
    sources = {source: report(found) for source, found in by_source.items()}
    for source, others in ((one, [each for each in by_source if each != one]) for one in by_source):
        sources[source] |= held_out(by_source[source], [by_source[each] for each in others])
    return {
        "sources": sources,
        "bounds_hold": round(statistics.mean(t.low <= o.seconds <= t.high for o, t in everything), 4),
        "held_out_bounds_hold": round(
            sum(sources[one]["held_out_bounds_hold"] * len(found) for one, found in by_source.items())
            / len(everything),
            4,
        ),
        "refused": refused,
        "share_refused": round(len(refused) / (len(refused) + len(everything)), 4),
    }


def held_out(found: list[tuple[Run, StepTime]], others: list[list[tuple[Run, StepTime]]]) -> dict[str, Any]:
    """Of a source: the bounds that the other sources alone would give, and how many of its own runs lie between them.
    They are as wide as the planner's (that is a choice, and nothing is fitted for it); around the median of the other
    sources' medians of measured times over those told."""
    band = constants()["band"]
    half = math.sqrt(band["high"] / band["low"])
    middle = statistics.median(statistics.median(one.seconds / told.seconds for one, told in runs_) for runs_ in others)
    low, high = middle / half, middle * half
    inside = statistics.mean(low <= one.seconds / told.seconds <= high for one, told in found)
    return {"held_out_bounds": [round(low, 3), round(high, 3)], "held_out_bounds_hold": round(inside, 4)}


if __name__ == "__main__":
    from bench.common import write_result

    arguments = [argument for argument in sys.argv[1:] if argument != "-v"]
    where = Path(arguments[0]) if arguments else Path(__file__).parents[2] / "shared/data/measured/training_runs.csv"
    if not where.is_file():
        sys.exit(f"no table of runs at {where}: name one")
    write_result("plan_accuracy", measure(where, verbose="-v" in sys.argv))
