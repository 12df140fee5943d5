"""The page docs/layouts-on-8-ranks.md, made from the figures of bench/layouts.py and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "layouts-on-8-ranks.md"

TITLES = {
    "products": "Every product of the axes",
    "schedules": "Every pipeline schedule",
    "variants": "Variants of an axis",
    "experts": "A mixture of experts",
}
INTRODUCTIONS = {
    "products": "All products of `dp`, `tp`, `cp` and `pp` that are 8, with all ZeRO levels where there is something "
    "to shard.",
    "schedules": "On two, four and eight stages; replicas shard the optimizer's state.",
    "variants": "Tensor parallelism without sequence parallelism, Ulysses instead of ring attention, hybrid sharding, "
    "micro-batches, recomputation.",
    "experts": "All products of the axes with experts split over `ep` ranks, and each expert over `etp`.",
}


def page(result: dict[str, Any]) -> str:
    """The page as Markdown."""
    tables = result["tables"]
    run = [line for lines in tables.values() for line in lines if "refused" not in line]
    worst = max((line["relative_error"] for line in run), default=0.0)
    parts = [
        "# Every layout on 8 ranks",
        f"Made by `bench/layouts.py` from `bench/results/layouts.json`: {len(run)} layouts on {result['ranks']} "
        "processes, of a dense model and of one with experts. "
        f"The largest error is {worst:.1e}; {result['tolerance']:.0e} is allowed.",
        _models(result),
        "- **error**: the largest relative error of any gradient, update, loss or norm against one device, in float64, "
        "by the measure of `meshwright verify`, on rows of several documents.\n"
        "- **sent**: bytes that a rank sends in a step, as `comm/` records them, in float32; maximum over ranks.\n"
        "- **peak**: peak memory of a rank in a step of the trainer (float32, AdamW): the growth of its resident "
        "set since before the trainer was built. **state** is the persistent memory in it: parameters, "
        "gradients, optimizer state. Maximum over ranks.\n"
        "- Recomputation, sharding and the pipeline schedule affect the peak; MiB are 2²⁰ bytes.",
    ]
    for name, lines in tables.items():
        parts += [f"## {TITLES[name]}", INTRODUCTIONS[name], _table(lines)]
        refused = [line for line in lines if "refused" in line]
        if refused:
            parts += ["Refused:", _refusals(refused)]
    return "\n\n".join(parts) + "\n"


def _models(result: dict[str, Any]) -> str:
    lines = [
        f"A step is {result['batch']} sequences of {result['sequence']} tokens. Pipelines have two micro-batches "
        "per stage, other layouts one (default of `mb`).",
        "",
        "| model | layers | hidden | parameters | peak on one device | state on one device |",
        "|---|---|---|---|---|---|",
    ]
    for name, model in result["models"].items():
        alone = model["one_device"]
        cells = [f"{name}: `{model['preset']}` scaled down", str(model["layers"]), str(model["hidden"])]
        cells += [f"{model['parameters']:,}", _mib(alone["peak_bytes"]), _mib(alone["state_bytes"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _table(lines: Iterable[dict[str, Any]]) -> str:
    rows = ["| layout | error | sent | peak | state |", "|---|---|---|---|---|"]
    for line in lines:
        if "refused" not in line:
            cells = [f"`{line['layout']}`", f"{line['relative_error']:.1e}"]
            cells += [_mib(line[key]["most"]) for key in ("sent_bytes", "peak_bytes", "state_bytes")]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _refusals(lines: Iterable[dict[str, Any]]) -> str:
    reasons: dict[str, list[str]] = {}
    for line in lines:
        reasons.setdefault(line["refused"], []).append(f"`{line['layout']}`")
    return "\n".join(f"- {', '.join(layouts)}: {reason}" for reason, layouts in reasons.items())


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
