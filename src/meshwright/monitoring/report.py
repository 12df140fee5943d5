"""Report of a run: one self-contained HTML page with loss, throughput, recipe, evaluation and a generated sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.collectives.quantities import format_bytes
from meshwright.draw.markup import Content, Markup, element
from meshwright.draw.page import page, paragraph, table
from meshwright.errors import UserError
from meshwright.monitoring.recipe_keys import differing_from_defaults
from meshwright.monitoring.report_charts import draw_run, work_unit
from meshwright.monitoring.run_directory import METRICS, RECIPE, RESULT


def write_report(
    run_directory: Path, *, evaluation: dict[str, Any] | None = None, sample: dict[str, Any] | None = None
) -> Path:
    """Write `report.html` into a run directory from its metrics, recipe and result; return the path of the page.

    evaluation: the document returned by `evaluate`; sample: the document of `generate` (`prompt` and `text`).
    `UserError` when nothing has been trained there or the page cannot be written.
    """
    from meshwright.monitoring.report_inputs import check_evaluation, check_sample

    run = read_run(run_directory)
    if evaluation is not None:
        check_evaluation(evaluation)
    if sample is not None:
        check_sample(sample)
    path = run_directory / "report.html"
    write_page(path, lambda: _format_page(run.name, run.lines, run.result, run.recipe, evaluation, sample))
    return path


class RunFiles(NamedTuple):
    """Content of a run directory. name: of the run; lines: step lines of metrics.jsonl; result: the result document,
    empty before the end; recipe: TOML text, empty without one."""

    name: str
    lines: list[dict[str, Any]]
    result: dict[str, Any]
    recipe: str


def read_run(run_directory: Path) -> RunFiles:
    """Read the files of a run directory. `UserError` when nothing has been trained there or a file is damaged."""
    from meshwright.monitoring.report_inputs import read_recipe, read_result, read_steps

    metrics_path, recipe_path = run_directory / METRICS, run_directory / RECIPE
    if not metrics_path.exists():
        raise UserError(f"no {METRICS} in {run_directory}: name the directory of a run that has trained")
    return RunFiles(
        run_directory.resolve().name,
        read_steps(metrics_path),
        read_result(run_directory / RESULT),
        read_recipe(recipe_path) if recipe_path.exists() else "",
    )


def write_page(path: Path, format_page: Callable[[], str]) -> None:
    """Write the HTML text that `format_page` returns. `UserError` if the file cannot be written."""
    try:
        path.write_text(format_page(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from None


def _format_page(
    name: str,
    lines: list[dict[str, Any]],
    result: dict[str, Any],
    recipe: str,
    evaluation: dict[str, Any] | None,
    sample: dict[str, Any] | None,
) -> str:
    """Return the report page as HTML. name: of the run; lines: step lines of metrics.jsonl; result: the result
    document; recipe: its TOML text; evaluation, sample: documents of `evaluate` and `generate`, None: left out."""
    parts: list[Content] = [element("h1", f"Run {name}"), _summary_table(lines, result)]
    if sample:
        text = element("pre", element("b", sample["prompt"]), sample["text"])
        parts += [element("h2", "Sample"), text]
    parts += draw_run(lines)
    if rows := _compared_rows(result):
        parts += [element("h2", "Predicted and measured"), table(("", "predicted", "measured"), rows)]
    if evaluation:
        parts += [element("h2", "Held-out files"), table((), _evaluation_rows(evaluation))]
    if recipe:
        parts += [element("h2", "Recipe"), *_recipe_parts(recipe)]
    return page(name, *parts, narrow=True)


def _recipe_parts(recipe: str) -> list[Markup]:
    """Return the section on a recipe: the keys that differ from the defaults, and the whole text folded."""
    whole = element("pre", recipe)
    if (keys := differing_from_defaults(recipe)) is None:
        return [whole]
    folded = element("details", element("summary", "All keys"), whole)
    return [paragraph("Keys that differ from the defaults:", muted=True), table((), list(keys.items())), folded]


def _summary_table(lines: list[dict[str, Any]], result: dict[str, Any]) -> Markup:
    """Return the HTML table of a run's main figures. lines: step lines of metrics.jsonl; result: the result
    document."""
    return table((), summarise(lines, result))


def summarise(lines: list[dict[str, Any]], result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows (name, text) of a run's main figures. lines: step lines of metrics.jsonl; result: the result
    document."""
    work = work_unit(lines)
    rates = sorted(line[f"{work}_per_second"] for line in lines)
    parts: dict[str, float] = {}
    for line in lines:
        for part, seconds in line.get("seconds_by_part", {}).items():
            parts[part] = parts.get(part, 0.0) + seconds
    total = sum(parts.values()) or 1.0
    validation = [line["validation_loss"] for line in lines if line.get("validation_loss") is not None]
    rows: list[tuple[str, str]] = [
        ("steps", f"{lines[-1]['step']:,}"),
        ("last training loss", _format_number(lines[-1]["loss"], ".4f")),
        *([("last validation loss", _format_number(validation[-1], ".4f"))] if validation else []),
        (f"{work} per second (median)", f"{rates[len(rates) // 2]:,.0f}"),
        ("peak memory of rank 0", format_bytes(2**30 * max(line["memory_gib"] for line in lines))),
        ("time by part", ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in parts.items())),
    ]
    if result.get("parameters"):
        rows.insert(0, ("parameters", f"{result['parameters']:,}"))
    if result.get("layout"):
        rows.insert(1, ("layout", result["layout"]))
    if result.get("mfu") and result.get("peak_flops_per_device") and result.get("flops_convention"):
        rows.append(("model FLOP utilisation", _share_of_peak(result)))
        rows.append(("FLOP convention", result["flops_convention"]))
    if result.get("skipped_steps"):
        rows.append(("skipped steps", str(result["skipped_steps"])))
    return rows


def _compared_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return table rows (name, predicted, measured), all text, for step time, memory and traffic; empty if the result
    document has no prediction."""
    predicted, measured = (result.get(which) or {} for which in ("predicted", "measured"))
    said = [
        ("seconds of a step", *map(_format_step_seconds, (predicted, measured))),
        ("of which", *(_format_parts(side.get("seconds_by_part")) for side in (predicted, measured))),
    ]
    kinds = [side.get("seconds_by_kind") or {} for side in (predicted, measured)]
    for kind in dict.fromkeys(kind for side in kinds for kind in side):
        said.append((f"seconds of a step: {kind}", *(f"{side[kind]:.4g}" if kind in side else "" for side in kinds)))
    peaks = [side.get("memory_bytes") or {} for side in (predicted, measured)]
    said.append(("process memory of rank 0", *(_format_size(side.get("process_peak")) for side in peaks)))
    said.append(("tensors of rank 0", *(_format_size(side.get("allocator_peak")) for side in peaks)))
    for title, key in (
        ("process memory of rank 0", "process_memory_bytes"),
        ("tensors of rank 0", "memory_bytes"),
        ("sent a step by rank 0", "sent_bytes_by_axis"),
    ):
        sides = [side.get(key) or {} for side in (predicted, measured)]
        for name in dict.fromkeys(name for side in sides for name in side):
            if name not in ("process_peak", "allocator_peak") and any(side.get(name) for side in sides):
                said.append((f"{title}: {name}", *(_format_size(side.get(name)) for side in sides)))
    return [(name, before or "–", after or "–") for name, before, after in said if before or after]


def _format_step_seconds(side: dict[str, Any]) -> str:
    """Return text for a step's seconds with their lower and upper bounds, empty if unknown. side: entry `predicted` or
    `measured` of the result document."""
    if side.get("step_seconds") is None:
        return ""
    low, high = side.get("step_seconds_low"), side.get("step_seconds_high")
    return f"{side['step_seconds']:.4g}" + (f" ({low:.4g} to {high:.4g})" if low and high else "")


def _format_parts(seconds: dict[str, float] | None) -> str:
    """Return text for the seconds of a step by phase, empty for None."""
    return ", ".join(f"{part} {value:.3g}" for part, value in (seconds or {}).items() if value)


def _format_size(size: float | None) -> str:
    """Return text for a number of bytes, empty for None."""
    return "" if size is None else format_bytes(size)


def _share_of_peak(result: dict[str, Any]) -> str:
    """Return text for the MFU in % and for the peak FLOP/s to which it refers. result: the result document."""
    return f"{result['mfu']:.1%} of {result['peak_flops_per_device'] / 1e9:,.0f} GFLOP/s a process"


def _evaluation_rows(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    """Return table rows (name, value), as text, of the document that `evaluate` returned for held-out files."""
    rows = [
        ("loss", f"{evaluation['loss']:.4f} nats per token"),
        ("perplexity", f"{evaluation['perplexity']:.2f}"),
        ("tokens", f"{evaluation['tokens']:,}"),
    ]
    if evaluation["bits_per_byte"] is not None:  # of records there are none
        rows.insert(2, ("bits per byte", f"{evaluation['bits_per_byte']:.3f}"))
    if evaluation.get("xz_bits_per_byte") is not None:
        rows.insert(3, ("xz -9 on the same bytes", f"{evaluation['xz_bits_per_byte']:.3f} bits per byte"))
    return rows


def _format_number(value: float | None, form: str) -> str:
    """Return a number formatted by the format spec `form`; "not finite" for None."""
    return "not finite" if value is None else format(value, form)
