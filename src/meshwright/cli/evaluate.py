"""`meshwright evaluate`: loss, perplexity and bits per byte of a checkpoint on held-out text."""

from __future__ import annotations

import sys
from typing import Any

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import answering, json_option


@plumbing.command(
    "evaluate",
    "meshwright evaluate runs/quickstart --data recipes/quickstart.toml",
    "meshwright evaluate runs/quickstart/checkpoints/step-000300 --data book.txt",
)
@click.argument("checkpoint")
@click.option("--data", required=True, help="A recipe (its validation split), or text: stdlib, a path, a glob.")
@click.option("--sequence", type=click.IntRange(min=1), help="Tokens of context; the recipe's or model's unless given.")
@click.option("--xz/--no-xz", default=True, help="What `xz -9` makes of the same bytes, for comparison.")
@json_option
def command(checkpoint: str, data: str, sequence: int | None, xz: bool, as_json: bool) -> None:
    """Evaluate CHECKPOINT: a Hugging Face directory, or a run directory (its newest whole checkpoint)."""
    from meshwright.serve.checkpoints import find_checkpoint
    from meshwright.train.evaluation import evaluate

    with answering(as_json) as answer:
        terminal = sys.stderr.isatty()

        def progress(done: int, total: int) -> None:
            if terminal:
                print(
                    f"\revaluating {done / total:.0%}", end="\n" if done == total else "", file=sys.stderr, flush=True
                )

        result = evaluate(
            find_checkpoint(checkpoint),
            data,
            sequence=sequence,
            with_xz=xz,
            progress=progress,
            log=lambda line: print(line, file=sys.stderr, flush=True),
        )
        answer(result, _text(result))


def _text(result: dict[str, Any]) -> str:
    lines = [
        f"loss           {result['loss']:.4f} nats per token ({result['tokens']:,} tokens)",
        f"perplexity     {result['perplexity']:.2f}",
        f"bits per byte  {result['bits_per_byte']:.3f} "
        f"({result['bytes']:,} bytes of {result['documents']:,} documents)",
    ]
    if "xz_bits_per_byte" in result:
        lines.append(f"xz -9          {result['xz_bits_per_byte']:.3f} bits per byte on the same bytes")
    return "\n".join(lines)
