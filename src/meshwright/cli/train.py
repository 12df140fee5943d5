"""`meshwright train`: train a recipe, on ranks that it starts on this machine or as one that torchrun or SLURM
started."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import json_option, overrides_argument, result_printer, trust_option
from meshwright.errors import RankLost, Terminated
from meshwright.terminal import print_message


@plumbing.command(
    "train",
    "meshwright train recipes/quickstart.toml",
    'meshwright train recipes/quickstart.toml train.steps=200 "layout=dp2 zero3"',
    "torchrun --nproc-per-node 2 -m meshwright train recipes/quickstart.toml",
)
@click.argument("recipe")
@overrides_argument
@click.option("--restarts", default=0, type=click.IntRange(min=0), help="Maximum restarts after a rank was lost.")
@click.option(
    "--no-probe", is_flag=True,
    help="Skip the one-time hardware measurement; step time and process memory are then predicted only from stored "
    "profiles.",
)  # fmt: skip
@trust_option
@json_option
def command(recipe: str, overrides: tuple[str, ...], restarts: int, no_probe: bool, trust: bool, as_json: bool) -> None:
    """Train RECIPE, or resume from its newest complete checkpoint.

    Missing data are prepared first. KEY=VALUE overrides one field of the recipe. SIGTERM and Ctrl-C finish the current
    step, save and stop, with exit code 143 or 130; the same command then resumes. A second signal stops immediately.

    \f
    overrides: KEY=VALUE for fields of the recipe. restarts: maximum number of restarts after a lost rank. no_probe:
    skip the hardware measurement. trust: True to allow the recipe to import and run Python code that it names. as_json:
    print JSON.
    """
    from meshwright.launcher.rendezvous import is_started_by_others
    from meshwright.training.api import reports_result, train

    with result_printer(as_json) as answer:
        try:
            result = train(recipe, overrides, restarts=restarts, probe=not no_probe, trust=trust)
        except (Terminated, KeyboardInterrupt) as stopped:
            if reports_result():
                raise
            sys.exit(Terminated.exit_code if isinstance(stopped, Terminated) else 130)  # rank 0 prints it for all
        except RankLost:
            if not is_started_by_others():
                print_message(f"to resume: {shlex.join(['meshwright', *sys.argv[1:]])}")
            raise
        if reports_result():
            answer(result.to_json_dict(), _format_result(result.document))


def _format_result(result: Mapping[str, Any]) -> str:
    """Format the result of a training run (the document of `train --json`) as text for the terminal."""
    lines = [f"done: step {result['step']}"]
    if result["loss"] is not None:
        lines[0] += f", loss {result['loss']:.4f}"
    if result["validation_loss"] is not None:
        lines[0] += f", validation loss {result['validation_loss']:.4f}"
    if result["tokens_per_second"]:
        lines.append(
            f"{result['tokens_per_second']:,.0f} tokens/s, MFU {result['mfu']:.1%} of "
            f"{result['peak_flops_per_device'] / 1e9:,.0f} GFLOP/s per process (model FLOPs, causal attention)"
        )
    if result["skipped_steps"]:
        lines.append(f"{result['skipped_steps']} steps were skipped: loss or gradient not finite")
    lines.append(f"checkpoint: {result['checkpoint']}")
    if result["best_checkpoint"] not in (None, result["checkpoint"]):
        lines.append(f"best by validation loss: {result['best_checkpoint']}")
    return "\n".join(lines)
