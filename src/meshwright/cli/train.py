"""`meshwright train`: starts the ranks of a recipe on this machine, or joins in when torchrun or SLURM started it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import answering, json_option, overrides_argument, trust_option
from meshwright.errors import Terminated, ignore_model_warnings
from meshwright.terminal import print_message


@plumbing.command(
    "train",
    "meshwright train recipes/quickstart.toml",
    'meshwright train recipes/quickstart.toml train.steps=200 "layout=dp2 zero3"',
    "torchrun --nproc-per-node 2 -m meshwright train recipes/quickstart.toml",
)
@click.argument("recipe")
@overrides_argument
@click.option("--restarts", default=0, type=click.IntRange(min=0), help="Start again so often after a rank was lost.")
@click.option(
    "--no-probe", is_flag=True,
    help="Skip the one-time hardware measurement; step time and process memory are then predicted only from stored "
    "profiles.",
)  # fmt: skip
@trust_option
@json_option
def command(recipe: str, overrides: tuple[str, ...], restarts: int, no_probe: bool, trust: bool, as_json: bool) -> None:
    """Train RECIPE, or go on from its newest whole checkpoint.

    Missing data are prepared first. KEY=VALUE overrides one field of the recipe. SIGTERM and Ctrl-C end the step under
    way, save and stop, with exit code 143 or 130; the same command then goes on. A second one does not wait for that.
    """
    with answering(as_json) as answer:
        result = train(recipe, overrides, restarts=restarts, probe=not no_probe, trust=trust)
        if result is not None:
            answer(result, _text(result))


def train(
    recipe_path: str | Path, overrides: tuple[str, ...] = (), *, restarts: int = 0, probe: bool = True,
    trust: bool = False,
) -> dict[str, Any] | None:  # fmt: skip
    """What the command does, as one call; probe: as `launch_recipe` has it. None on ranks other than 0 of somebody
    else's launcher. trust: code that the recipe names may run."""
    from meshwright.launcher.rendezvous import join_if_started_by_others, place
    from meshwright.recipe import load_recipe
    from meshwright.training.start import launch_recipe

    recipe = load_recipe(recipe_path, overrides, trust=trust)
    started = place(recipe.run.rendezvous) if join_if_started_by_others() else None
    if started is not None and started.rank > 0:
        ignore_model_warnings()
    if recipe.layout == "auto":
        from meshwright.launcher.rank_threads import share_this_host
        from meshwright.training.automatic import chosen_layout

        say = print_message if started is None or started.rank == 0 else _say_nothing
        measure = probe and (started is None or share_this_host(started))
        layout = chosen_layout(recipe, None if started is None else started.ranks, say, probe=measure)
        recipe = load_recipe(recipe_path, (*overrides, f"layout={layout}"), trust=trust)
    if started is not None:
        from meshwright.training.worker import join

        first = started.rank == 0
        try:
            result = join(recipe, probe=probe)
        except (Terminated, KeyboardInterrupt) as stopped:
            if first:
                raise
            sys.exit(Terminated.exit_code if isinstance(stopped, Terminated) else 130)  # rank 0 says it for all
        return result if first else None
    return launch_recipe(recipe, restarts=restarts, probe=probe)


def _say_nothing(line: str) -> None:
    """Rank 0 says it."""


def _text(result: dict[str, Any]) -> str:
    lines = [f"done: step {result['step']}"]
    if result["loss"] is not None:
        lines[0] += f", loss {result['loss']:.4f}"
    if result["validation_loss"] is not None:
        lines[0] += f", validation loss {result['validation_loss']:.4f}"
    if result["tokens_per_second"]:
        lines.append(
            f"{result['tokens_per_second']:,.0f} tokens/s, MFU {result['mfu']:.1%} of "
            f"{result['peak_flops_per_device'] / 1e9:,.0f} GFLOP/s a process (model FLOPs, causal attention)"
        )
    if result["skipped_steps"]:
        lines.append(f"{result['skipped_steps']} steps were skipped: loss or gradient not finite")
    lines.append(f"checkpoint: {result['checkpoint']}")
    if result["best_checkpoint"] not in (None, result["checkpoint"]):
        lines.append(f"best by validation loss: {result['best_checkpoint']}")
    return "\n".join(lines)
