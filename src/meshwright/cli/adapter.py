"""`meshwright adapter`: merge an adapter into its base model, remove it again, or extract one from two checkpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import json_option, print_progress, result_printer

PROGRESS_SECONDS = 5.0  # between lines of progress where standard error is no terminal

base_option = click.option(
    "--base", type=click.Path(path_type=Path), help="Base model.  [default: the one that adapter_config.json names]"
)


@plumbing.command(
    "adapter",
    "meshwright adapter merge runs/lora merged",
    "meshwright adapter unmerge runs/lora merged restored",
    "meshwright adapter extract tuned base adapter --rank 16",
    group=True,
)
def command() -> None:
    """Merge a LoRA adapter into its base model, remove it from a merged model, or extract one from two checkpoints."""


@plumbing.command(
    "merge", "meshwright adapter merge runs/lora merged", "meshwright adapter merge peft-dir out --base model"
)
@click.argument("adapter")
@click.argument("output", type=click.Path(path_type=Path))
@base_option
@click.option(
    "--quantized",
    type=click.Choice(["no", "nf4", "nf4-double", "int8"]),
    help="Format of the base in training.  [default: that of the run, for a PEFT directory no]",
)
@json_option
def merge(adapter: str, output: Path, base: Path | None, quantized: str | None, as_json: bool) -> None:
    """Write the base model with ADAPTER merged into its weights to the Hugging Face directory OUTPUT.

    ADAPTER is a run directory, a checkpoint or a PEFT directory.

    \f
    output: directory to write, which must not exist. base: directory of the base model; None: the directory that the
    adapter's configuration names. quantized: "nf4", "int8" or "no", number format of the base model's weights while the
    adapter was trained; the adapter is merged into the dequantized weights. None: the format that the adapter's run
    directory states. as_json: print JSON.
    """
    from meshwright.adapters.merging import find_base, find_format, merge_adapter
    from meshwright.checkpoint import find_checkpoint

    with result_printer(as_json) as answer:
        directory = find_checkpoint(adapter)
        form = find_format(directory) if quantized is None else quantized.replace("no", "") or None
        document = merge_adapter(directory, base or find_base(directory), output, form)
        error = f"relative rounding error of the merged weights {document['rounding']:.1e}"
        if "quantization" in document:
            error += f", of the {form} base {document['quantization']:.1e}"
        answer(document, f"merged {document['layers']} layers into {output}; {error}")


@plumbing.command("unmerge", "meshwright adapter unmerge runs/lora merged restored")
@click.argument("adapter")
@click.argument("merged", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@json_option
def unmerge(adapter: str, merged: Path, output: Path, as_json: bool) -> None:
    """Remove ADAPTER from the model MERGED, into which it was merged, and write the base model to OUTPUT. The weights
    are restored up to the rounding of the merge. If the adapter was trained on a quantized base, they are the
    dequantized weights of the base.

    \f
    adapter: run directory, checkpoint or PEFT directory. merged: Hugging Face directory. output: directory to write,
    which must not exist. as_json: print JSON.
    """
    from meshwright.adapters.merging import find_format, unmerge_adapter
    from meshwright.checkpoint import find_checkpoint

    with result_printer(as_json) as answer:
        directory = find_checkpoint(adapter)
        document = unmerge_adapter(directory, merged, output, find_format(directory))
        lost = ""
        if "quantized" in document:
            error = document["quantization"]
            by = "" if error is None else f", a relative error of {error:.1e}"
            lost = f"; they are those of the dequantized {document['quantized']} base: what packing it lost is lost{by}"
        answer(document, f"removed the adapter from {document['layers']} layers: {output}{lost}")


@plumbing.command("extract", "meshwright adapter extract tuned base adapter --rank 16")
@click.argument("tuned", type=click.Path(path_type=Path))
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--rank", default=16, type=click.IntRange(min=1), show_default=True, help="Rank of the adapter.")
@json_option
def extract(tuned: Path, base: Path, output: Path, rank: int, as_json: bool) -> None:
    """Write the adapter that is closest to the difference of the checkpoints TUNED and BASE to the PEFT directory
    OUTPUT: the truncated singular value decomposition of each linear layer's difference.

    \f
    tuned, base: Hugging Face directories of two models with the same architecture. output: directory to write, which
    must not exist. rank: rank of the adapter. as_json: print JSON.
    """
    from meshwright.adapters.merging import extract_adapter
    from meshwright.checkpoint import find_checkpoint

    with result_printer(as_json) as answer:
        both = find_checkpoint(tuned), find_checkpoint(base)
        document = extract_adapter(*both, output, rank=rank, progress=_make_progress())
        left = len(document["not_extracted"])
        rest = f"; {left} tensors that differ take no adapter: {document['not_extracted'][0]} ..." if left else ""
        answer(document, f"{document['layers']} layers, {document['kept']:.2%} of their squared difference kept{rest}")


def _make_progress() -> Callable[[int, int], None]:
    """Return a function that reports (tensors done, number of all tensors) on standard error: on one line of a
    terminal, else by a line every few seconds."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        """Report the progress. done, total: numbers of tensors."""
        nonlocal last
        text = f"extracting: {done}/{total} tensors"
        print_progress(text, done == total)
        if not sys.stderr.isatty() and time.monotonic() - last > PROGRESS_SECONDS:
            last = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    return report


for each in (merge, unmerge, extract):
    command.add_command(each)
