"""`meshwright plan`: predict step time and memory of a layout, or search for the best layout."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import (
    FiniteRange,
    format_json_document,
    json_option,
    list_given_options,
    output_option,
    refuse_overrides,
    result_printer,
    split_overrides,
    write_file,
)
from meshwright.errors import UserError
from meshwright.limits import get_limit

if TYPE_CHECKING:
    from meshwright.launcher.host_memory import HostMemory
    from meshwright.planner.api import Plan


@plumbing.command(
    "plan",
    "meshwright plan llama-3-8b --cluster 64xh100-sxm --sequence 8192 --batch 512",
    "meshwright plan llama-3-8b --cluster 8xh100-sxm --sequence 8192 --batch 64 --layout 'zero1 tp8 mb64' --explain",
    "meshwright plan mixtral-8x7b-v0.1 --cluster 16x8xa100-80 --sequence 4096 --batch 1024 --html plan.html",
    "meshwright plan recipes/quickstart.toml --cluster this",
    'meshwright plan recipes/quickstart.toml "layout=dp2 zero1" train.batch=32 --cluster this',
    "meshwright plan llama-2-7b adapter.kind=lora adapter.base=nf4 --cluster 1xrtx4090 --sequence 2048 --batch 8",
    "meshwright plan --jobs rows.jsonl > answers.jsonl",
    'meshwright plan llama-3.1-8b --serve --layout "tp2" --dtype bf16 --memory 48GiB --max-length 8192',
    "meshwright plan --calibrate runs/first runs/second",
)
@click.argument("names", nargs=-1, metavar="[MODEL] [KEY=VALUE]...")
@click.option("--cluster", metavar="C", help="Devices (64xh100-sxm), a cluster file, or this.")
@click.option("--sequence", type=click.IntRange(min=1), help="Tokens in a sequence; a recipe contains it.")
@click.option("--batch", type=click.IntRange(min=1), help="Sequences per step over all devices; a recipe contains it.")
@click.option("--layout", metavar="L", help="Predict this layout instead of searching.")
@click.option("--top", type=click.IntRange(min=1, max=100), default=5, help="Number of layouts to show.")
@click.option("--engine", default="meshwright", help="Framework whose kernels and buffers are modelled.")
@click.option("--compile", "compiled", is_flag=True, help="Blocks run under torch.compile.")
@click.option("--optimizer", default=None, help="adamw, adam, sgd or momentum.  [default: adamw]")
@click.option("--precision", help="If the layout names none: fp32, tf32, bf16, fp16 or fp8.")
@click.option("--documents", type=FiniteRange(min=1), default=1.0, help="Mean number of documents per sequence.")
@click.option("--reserve", default="0", metavar="R", help='Device memory to keep free: "0.1" (a fraction) or "8GiB".')
@click.option("--explain", "explained", is_flag=True, help="Show the time of each operation of a micro-batch.")
@click.option("--ledger", "every_tensor", is_flag=True, help="Show every tensor of the fullest rank (--json: all).")
@output_option("--html", help="Write a page with pictures.")
@click.option("--jobs", metavar="F", help="Answer each request of a JSON Lines file; - reads standard input.")
@click.option("--serve", "serves", is_flag=True, help="Predict a server: memory by item, KV blocks, concurrency.")
@click.option("--memory", metavar="M", help='With --serve: a fraction, "0.9", or a size, "12GiB", of all ranks.')
@click.option("--dtype", help="With --serve: dtype of parameters and KV cache, fp32 or bf16.  [default: fp32]")
@click.option("--device", metavar="auto|cpu|cuda", help="With --serve: device.  [default: auto]")
@click.option("--max-length", type=click.IntRange(min=1), help="With --serve: maximum tokens of a sequence.")
@click.option("--list", "lists", is_flag=True, help="Print the names of presets and devices.")
@click.option("--calibrate", is_flag=True, help="Calibrate the cluster file by finished runs, given in place of MODEL.")
@json_option
def command(
    names: tuple[str, ...], cluster: str | None, sequence: int | None, batch: int | None, layout: str | None, top: int,
    engine: str, compiled: bool, optimizer: str | None, precision: str | None, documents: float, reserve: str,
    explained: bool, every_tensor: bool, html: Path | None, jobs: str | None, serves: bool, memory: str | None,
    dtype: str | None, device: str | None, max_length: int | None, lists: bool, calibrate: bool, as_json: bool,
) -> None:  # fmt: skip
    """Predict time and memory of training MODEL on a cluster: of one layout, or of the fastest layouts that fit.

    MODEL is a preset, a Hugging Face directory, a config.json or a recipe; KEY=VALUE overrides one field of a recipe.
    For any other kind of MODEL, adapter.KEY=VALUE plans the training of a LoRA adapter on it. Memory is that of the
    rank with the highest peak ("fullest"). Each time has a lower and an upper bound, between which most published runs
    lie (docs/plan.md: "Bounds"; docs/plan-accuracy.md). With --serve, predict the memory of a server instead.

    \f
    names: MODEL, then overrides; if `calibrate`, run directories. cluster: device count and kind, a cluster file, or
    "this". sequence: tokens. batch: sequences per step over all devices. layout: the layout to predict, None to search.
    top: number of layouts to show. engine: framework whose kernels and buffers are assumed. compiled: True if blocks
    run under torch.compile. optimizer: name of the optimizer, None for the recipe's optimizer or the default.
    precision: number format, such as "bf16", if the layout names none. documents: average number of documents packed
    into a sequence; attention does not cross their boundaries. reserve: memory of a device to keep free, as a fraction
    or a size. explained: add the time of each operation. every_tensor: add the memory of each tensor. html: page to
    write. jobs: JSON Lines file of requests, "-" for standard input. serves: predict a server with `memory`, `dtype`,
    `device` and `max_length` (tokens). lists: print the names of presets and devices. calibrate: compare finished runs
    with their predictions, and write factors that correct later predictions to the cluster file. as_json: print JSON.
    """
    if lists:
        _print_names(as_json)
        return
    if calibrate:
        if list_given_options().keys() - {"names", "cluster", "calibrate", "as_json"}:
            raise UserError("--calibrate: takes the directories of runs, --cluster and --json, nothing else")
        _run_calibrate(names, cluster, as_json)
        return
    if serves:
        allowed = {"names", "serves", "layout", "memory", "dtype", "device", "max_length", "as_json"}
        if others := [option for name, option in list_given_options().items() if name not in allowed]:
            raise UserError(f"--serve: cannot be combined with {others[0]}")
        _run_serve(names, layout, (device, memory), dtype, max_length, as_json)
        return
    of_server = {"--memory": memory, "--dtype": dtype, "--device": device, "--max-length": max_length}
    for option, value in of_server.items():
        if value is not None:
            raise UserError(f"{option}: is an option of a server; add --serve")
    if jobs is not None:
        if list_given_options().keys() - {"jobs", "as_json"}:
            raise UserError("--jobs: each line has its own model, cluster and options; leave out all others")
        _run_jobs(jobs)
        return
    model, overrides = split_overrides(names)
    adapter = [one for one in overrides if one.startswith("adapter.") and not (model or "").endswith(".toml")]
    refuse_overrides([one for one in overrides if one not in adapter], model)
    if model is None:
        raise UserError("MODEL is missing: a preset such as llama-3-8b, a directory, a config.json or a recipe")
    from meshwright.planner.api import plan
    from meshwright.planner.models import find_recipe, model_of

    recipe = find_recipe(model, overrides)
    if recipe is None:
        model_of(model)  # a wrong model is reported before missing options
    if cluster is None:
        raise UserError("--cluster is missing: devices such as 64xh100-sxm, a cluster file, or this")
    for name, value in (("sequence", sequence), ("batch", batch)):
        if value is None and recipe is None:
            raise UserError(f"--{name} is missing: {_WANTED[name]}")
    parsed = _parse_layout(layout)
    with result_printer(as_json) as answer:
        found = plan(
            model if recipe is None else recipe, cluster, parsed, sequence=sequence, batch=batch, engine=engine,
            compile=compiled or None, optimizer=optimizer, precision=precision, documents=documents, top=top,
            reserve=reserve, **({"adapter": adapter} if adapter else {}),
        )  # fmt: skip
        document = found.to_json_dict(ledger=every_tensor, operations=explained)
        lines = [] if as_json else _format_plan(found, model, every_tensor, explained)
        if html:
            from meshwright.planner.show.page import plan_page

            write_file(html, plan_page(found, model))
            document["files"] = {"page": str(html)}
            lines.append(f"page: {html}")
        answer(document, "\n\n".join(lines))
    found.check_fits()


def _format_plan(found: Plan, model: str, every_tensor: bool, explained: bool) -> list[str]:
    """Format a plan as paragraphs of text, as wide as the terminal. found: the plan. model: name as the user wrote it.
    every_tensor: add the memory of all tensors. explained: add the time of each operation."""
    from meshwright.planner.show.text import (
        WIDE,
        estimate_text,
        explain_text,
        headline,
        ledger_text,
        nearest_text,
        recipe_text,
        search_text,
        usage_text,
    )

    best, width = found.best if found.estimates else None, shutil.get_terminal_size((WIDE, 24)).columns
    lines = [headline(found.problem, model)]
    if found.search is not None:
        lines.append(search_text(found.search, width))
    if found.recipe_estimate is not None:
        lines.append(recipe_text(found.recipe_estimate, best))
    if found.nearest is not None:
        lines.append(nearest_text(found.nearest, width))
    if best is None:
        return lines
    lines.append(estimate_text(best, width))
    if best.fits:
        lines.append(usage_text(found.estimates, width))
    if every_tensor:
        lines.append(ledger_text(best.memory, width))
    if explained:
        lines.append(explain_text(best.layout, found.busiest_rank, found.operations, width))
    return lines


def _run_calibrate(runs: tuple[str, ...], where: str | None, as_json: bool) -> None:
    """Run `plan --calibrate`: compute corrections of the predicted step time (measured / predicted) and peak memory
    ((measured - predicted) / predicted) from finished runs, write them into the cluster file, and print them.

    runs: run directories. where: path of the cluster file; None or "this" for this machine's cluster file. as_json:
    print JSON.
    """
    from meshwright.planner.calibrate import cluster_file_with, read_run
    from meshwright.planner.hardware.cluster import this_machine
    from meshwright.planner.show.text import calibrated_text

    if not runs:
        raise UserError("--calibrate: give the directories of finished runs, such as runs/first")
    this = where is None or where.strip().lower() == "this"
    path = this_machine() if this else Path(str(where)).expanduser()
    if not this and not path.exists() and path.suffix != ".toml":
        raise UserError(f"--calibrate: the calibration is written to a cluster file; --cluster {where} is not one")
    with result_printer(as_json) as answer:
        figures = [read_run(run) for run in {Path(run).resolve(): run for run in runs}.values()]
        text, found = cluster_file_with(path, figures)
        write_file(path, text)
        document = {
            "cluster_file": str(path), "calibration": found.table(), "runs": [each.document() for each in figures],
        }  # fmt: skip
        answer(document, calibrated_text(figures, found, str(path)))


def _print_names(as_json: bool) -> None:
    """Run `plan --list`: print the names of presets and devices. as_json: print JSON."""
    from meshwright.planner.hardware.devices import DEVICES
    from meshwright.spec.presets import PRESETS

    known = {"models": [*PRESETS], "devices": [device.name for device in DEVICES]}
    lines = (
        fill(f"{title}: {', '.join(names)}", 80, subsequent_indent="  ", break_on_hyphens=False)
        for title, names in known.items()
    )
    with result_printer(as_json) as answer:
        answer(known, "\n".join(lines))


_WANTED = {
    "sequence": "tokens in a sequence, such as 4096",
    "batch": "sequences per step over all devices, such as 512",
}


def _parse_layout(text: str | None) -> Any:
    """Parse the text of the option --layout into a `Layout`; None (option not given) stays None. Raises `UserError`
    that names the option."""
    from meshwright.layout import Layout

    if text is None:
        return None
    try:
        return Layout.parse(text)
    except UserError as error:
        raise UserError(f"--layout: {error}") from None


def _run_serve(
    names: tuple[str, ...], layout: str | None, machine: tuple[str | None, str | None], dtype: str | None,
    max_length: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Run `plan --serve`: print the memory that a server of MODEL takes, by item, and the number of sequences that fit.

    names: [MODEL]. layout, dtype: texts of these options. machine: (text of --device, text of --memory). max_length:
    maximum number of tokens of a prompt with its answer. Options that were not given are None. as_json: print JSON.
    """
    from meshwright.planner.models import model_of
    from meshwright.planner.serving.ledger import ServingSizes, bill_text, parse_dtype
    from meshwright.serving.memory import DEFAULT_FRACTION, plan_memory
    from meshwright.spec.block_tables import BLOCK_TOKENS
    from meshwright.spec.refuse import serving_layout
    from meshwright.threads import choose_threads

    if len(names) != 1:
        raise UserError("--serve: takes one MODEL: a preset such as llama-3-8b, a directory or a config.json")
    with result_printer(as_json) as answer:
        config = model_of(names[0])
        parsed = serving_layout(layout or "", config)
        device, memory = machine
        gpus = _find_gpus(device or "auto", parsed.world_size, memory)
        memory = str(DEFAULT_FRACTION) if gpus and memory is None else memory
        threads = choose_threads(parsed.world_size)  # as `serve` does on this machine
        sizes = ServingSizes(dtype=parse_dtype(dtype), threads=threads)
        ledger = plan_memory(config, parsed, sizes, memory, max_length, hosts=gpus or None)
        document = ledger.to_json_dict()
        ranks = parsed.world_size
        lines = [
            f"{names[0]}, layout {document['layout']}, {ledger.sizes.dtype}: "
            f"{ranks} rank{'s' if ranks > 1 else ''}{' on a GPU each' if gpus else ''}, bytes of all of them",
            *bill_text(ledger),
            f"{document['kv_blocks']:,} KV blocks of {BLOCK_TOKENS} tokens, "
            f"{document['kv_bytes_per_token'] / 1024:,.1f} KiB a token: "
            f"{document['concurrency']['sequences']:,.1f} sequences of {ledger.sizes.max_length:,} tokens",
        ]
        answer(document, "\n".join(lines))


def _find_gpus(device: str, ranks: int, memory: str | None) -> list[HostMemory]:
    """Return the memory of each rank's GPU, [ranks]; an empty list if the ranks run on CPUs.

    device: "auto", "cpu" or "cuda". memory: text of the option --memory, a fraction or a size; None: not given. With
    "cuda" and a size, GPUs of that size are assumed, even if this machine has none. Raises `UserError`.
    """
    from meshwright.launcher.device import choose_rank_devices
    from meshwright.launcher.host_memory import GPU, HostMemory
    from meshwright.serving.memory import parse_memory

    unknown = HostMemory(2**80, 2**80, GPU)  # so large that any fraction exceeds every size
    if device == "cuda" and memory is not None and (size := parse_memory(memory, unknown)) < 2**60:
        return [HostMemory(size, size, GPU)] * ranks
    return choose_rank_devices(device, ranks)


def _run_jobs(path: str) -> None:
    """Run `plan --jobs`: read requests from the JSON Lines file `path` ("-": standard input), predict time and memory
    for each, and print one JSON object per line, in the same order. A request that fails is answered by {"error":
    message}."""
    from meshwright.planner.jobs import answer

    for line in _read_lines(path):
        text = format_json_document(answer(line))
        print(text.encode("utf-8", "replace").decode(), flush=True)  # a request may contain a lone surrogate


def _read_lines(path: str) -> Iterator[str]:
    """Yield the non-empty lines of the file `path` ("-": standard input). Raises `UserError` if it cannot be read or a
    line is too long."""
    try:
        with sys.stdin if path == "-" else Path(path).open(encoding="utf-8") as file:
            longest = get_limit("config_bytes")
            for number, line in enumerate(iter(lambda: file.readline(longest + 1), ""), 1):
                if len(line) > longest:
                    raise UserError(f"--jobs {path}: line {number} has more than {longest:,} characters")
                if line.strip():
                    yield line
    except FileNotFoundError:
        raise UserError(f"--jobs {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--jobs {path}: cannot be read: {error}") from None
