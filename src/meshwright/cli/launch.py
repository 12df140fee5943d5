"""`meshwright launch`: print a script that starts a recipe's ranks on one or several hosts."""

from __future__ import annotations

from dataclasses import asdict

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import json_option, overrides_argument, result_printer, trust_option
from meshwright.terminal import print_message


@plumbing.command(
    "launch",
    "meshwright launch --torchrun recipes/quickstart.toml > train.sh",
    'meshwright launch --slurm recipe.toml "layout=dp2 zero1 tp8 bf16" --nodes 2 --time 24:00:00 > train.sbatch',
    "meshwright launch --slurm recipe.toml --devices-per-node 4 --sbatch=--partition=gpu > train.sbatch",
)
@click.argument("recipe")
@overrides_argument
@click.option("--torchrun", is_flag=True, help="Print a script to run on every host.")
@click.option("--slurm", is_flag=True, help="Print a script for sbatch.")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of hosts.  [default: as needed by the layout]")
@click.option("--devices-per-node", type=click.IntRange(min=1), help="Ranks per host.  [default: up to 8]")
@click.option("--restarts", default=3, type=click.IntRange(min=0), help="Maximum restarts after a rank was lost.")
@click.option("--cpus-per-device", type=click.IntRange(min=1), help="CPU cores per rank.")
@click.option("--time", help="SLURM: time limit of the job, such as 24:00:00.")
@click.option("--sbatch", multiple=True, metavar="OPTION", help="SLURM: additional sbatch option; may be repeated.")
@trust_option
@json_option
def command(
    recipe: str, overrides: tuple[str, ...], torchrun: bool, slurm: bool, nodes: int | None,
    devices_per_node: int | None, restarts: int, cpus_per_device: int | None, time: str | None,
    sbatch: tuple[str, ...], trust: bool, as_json: bool,
) -> None:  # fmt: skip
    """Print a script that trains RECIPE with one rank for each device.

    The layout determines the number of ranks. The script restarts the run from the newest complete checkpoint if a rank
    is lost, and forwards a stop signal so that ranks save. It uses this working directory and this Python.

    \f
    overrides: KEY=VALUE for fields of the recipe. torchrun, slurm: True for the one that starts the ranks.
    nodes, devices_per_node: None to derive them from the layout. restarts: maximum restarts after a lost rank.
    cpus_per_device: CPU cores of each rank. time: SLURM time limit, such as "24:00:00". sbatch: more options for
    sbatch. trust: True to allow the recipe to import and run Python code that it names. as_json: print JSON.
    """
    from meshwright.errors import UserError
    from meshwright.launcher.launch_script import Resources, build_launch_script

    with result_printer(as_json) as answer:
        if torchrun == slurm:
            raise UserError("launch: choose what starts the ranks, --torchrun or --slurm")
        resources = Resources(nodes, devices_per_node, cpus_per_device, restarts, time, sbatch)
        made = build_launch_script("slurm" if slurm else "torchrun", recipe, overrides, resources, trust=trust)
        for line in made.warnings:
            print_message(f"meshwright: warning: {line}")
        answer(asdict(made), made.script.rstrip("\n"))
