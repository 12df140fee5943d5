"""`meshwright evaluate`: loss, perplexity and bits per byte of a checkpoint on held-out text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import (
    device_option,
    json_option,
    overrides_argument,
    print_progress,
    reading_layout_option,
    refuse_overrides,
    result_printer,
)
from meshwright.terminal import print_message

if TYPE_CHECKING:
    from meshwright.evaluation.api import Evaluation


@plumbing.command(
    "evaluate",
    "meshwright evaluate runs/quickstart --data recipes/quickstart.toml",
    "meshwright evaluate runs/quickstart/checkpoints/step-000300 --data book.txt",
    'meshwright evaluate runs/quickstart --data book.txt --layout "tp2 pp2"',
    "meshwright evaluate runs/quickstart --data recipes/quickstart.toml data.validation_fraction=0.1",
)
@click.argument("checkpoint")
@overrides_argument
@click.option("--data", required=True, help="A recipe (its validation split), or text: stdlib, a path, a glob.")
@click.option("--sequence", type=click.IntRange(min=1), help="Tokens of context.  [default: the recipe's or model's]")
@click.option("--xz/--no-xz", default=True, help="Also compress the same bytes with `xz -9`, for comparison.")
@device_option
@reading_layout_option
@json_option
def command(
    checkpoint: str, overrides: tuple[str, ...], data: str, sequence: int | None, xz: bool, device: str,
    layout: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Evaluate CHECKPOINT on held-out text. CHECKPOINT: a run directory (its newest complete checkpoint), a checkpoint,
    or a Hugging Face directory.

    KEY=VALUE overrides one field of the recipe that --data names.

    \f
    data: a recipe (its validation split), or text (path or glob). overrides: KEY=VALUE for that recipe. sequence:
    length in tokens of the sequences that are evaluated; None: the recipe's, or for text the model's maximum length.
    xz: also compress the text with `xz -9`, for comparison. device: "auto", "cpu" or "cuda". layout: evaluate on local
    ranks with this layout, such as "tp2 pp2", None for one process. as_json: print JSON.
    """
    from meshwright.evaluation.api import evaluate

    with result_printer(as_json) as answer:
        refuse_overrides(overrides, data)
        result = evaluate(
            checkpoint, data, overrides, sequence=sequence, layout=layout, device=device, with_xz=xz,
            progress=lambda done, total: print_progress(f"evaluating {done / total:.0%}", done == total),
            log=print_message,
        )  # fmt: skip
        answer(result.to_json_dict(), _format_result(result))


def _format_result(result: Evaluation) -> str:
    """Format the result of an evaluation as text: loss in nats per token, perplexity, bits per byte."""
    lines = [
        f"checkpoint     {result.checkpoint}",
        f"loss           {result.loss:.4f} nats per token ({result.tokens:,} tokens)",
        f"perplexity     {result.perplexity:.2f}",
    ]
    if result.bits_per_byte is None:
        lines.append(f"records        {result.documents:,}; loss over responses only")
    else:
        lines.append(
            f"bits per byte  {result.bits_per_byte:.3f} ({result.bytes:,} bytes of {result.documents:,} documents)"
        )
    if result.lossy_documents:
        lines.append(
            f"warning        {result.lossy_documents:,} of these documents differ from what their tokens decode "
            "to: the tokenizer loses text, which bits per byte do not account for"
        )
    if result.xz_bits_per_byte is not None:
        lines.append(f"xz -9          {result.xz_bits_per_byte:.3f} bits per byte on the same bytes")
    return "\n".join(lines)
