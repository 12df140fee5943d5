"""Scripts that start a recipe's ranks on one or several hosts, by torchrun or by SLURM. Free of torch."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.errors import UserError
from meshwright.launcher.recipe_checks import check_recipe
from meshwright.launcher.rendezvous import warn_of_tensor_across_hosts
from meshwright.layout import Layout
from meshwright.recipe import load_recipe

SCRIPTS = Path(__file__).parent / "scripts"
DEVICES_PER_NODE = 8  # default, as GPU servers have
SAVE_SECONDS = 120  # that a checkpoint may take when a run is stopped


@dataclass(frozen=True, slots=True)
class LaunchScript:
    """Launch script of a recipe.

    script: text of the script. layout: such as "dp8 zero3". nodes: number of hosts that the script uses;
    devices_per_node: number of ranks on each host. warnings: lines for the user."""

    script: str
    layout: str
    nodes: int
    devices_per_node: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resources:
    """Hosts and limits of a job.

    Attributes:
        nodes, devices_per_node: Numbers of hosts and of devices on each; None: the numbers that the layout's ranks
            need.
        cpus_per_device: CPU cores of each rank; None: SLURM's default, or under torchrun an equal share of the host's
            cores.
        restarts: Maximum number of restarts after a lost rank.
        time: SLURM's time limit, such as "24:00:00"; None: not set.
        sbatch: Further options of sbatch, such as "--partition=gpu".
    """

    nodes: int | None = None
    devices_per_node: int | None = None
    cpus_per_device: int | None = None
    restarts: int = 3
    time: str | None = None
    sbatch: Sequence[str] = ()


def build_launch_script(
    kind: Literal["torchrun", "slurm"],
    recipe_path: str | Path,
    overrides: Sequence[str] = (),
    resources: Resources = Resources(),
    *,
    trust: bool = False,
) -> LaunchScript:
    """Build a launch script for torchrun or SLURM that trains a recipe with one rank for each device.

    kind: "torchrun" or "slurm". recipe_path: recipe file. overrides: new values of the recipe's settings, such as
    "train.steps=100". resources: hosts and limits of the job. trust: True to allow code that the recipe names to be
    run. The script starts the ranks in the current directory and with this Python, which every host must have.
    `UserError` if the recipe cannot run, or its layout does not fill the devices.
    """
    time, sbatch, cpus_per_device = resources.time, resources.sbatch, resources.cpus_per_device
    recipe = load_recipe(recipe_path, overrides, trust=trust)
    check_recipe(recipe)
    if kind == "torchrun" and (time is not None or sbatch):
        raise UserError(f"{'--time' if time is not None else '--sbatch'} needs --slurm: torchrun has no queue")
    layout = recipe.parsed_layout
    nodes, devices_per_node = split_over_hosts(layout, resources.nodes, resources.devices_per_node)
    hosts, ranks = _format_count(nodes, "host"), _format_count(devices_per_node, "rank")
    path = str(recipe_path)
    words = [f"./{path}" if path.startswith("-") else path, *overrides, *["--trust-recipe"][: int(trust)]]
    values = {
        "TITLE": f"{_make_shell_safe_name(recipe.run.name)}, layout {layout}: {hosts} of {ranks}",
        "DIRECTORY": shlex.quote(str(Path.cwd())),
        "PYTHON": shlex.quote(sys.executable),
        "RECIPE": " ".join(shlex.quote(word) for word in words),
        "NAME": _make_shell_safe_name(recipe.run.name),
        "LOGS": shlex.quote(str(recipe.run_directory / "torchrun")),
        "NODES": nodes,
        "DEVICES": devices_per_node,
        "RANKS": layout.world_size,
        "RESTARTS": resources.restarts,
        "SECONDS": SAVE_SECONDS,
    }
    if kind == "torchrun":
        shared = f"$(($(nproc) > {devices_per_node} ? $(nproc) / {devices_per_node} : 1))"
        values["THREADS"] = shared if cpus_per_device is None else cpus_per_device
        script = _fill_template("torchrun.sh" if nodes > 1 else "torchrun_one_host.sh", values)
    else:
        options = [f"--gpus-per-node={devices_per_node}"] if recipe.run.device != "cpu" else []
        options += [f"--cpus-per-task={cpus_per_device}"] if cpus_per_device is not None else []
        options += [f"--time={_check_time_limit(time)}"] if time is not None else []
        options += [_check_sbatch_option(option) for option in sbatch]
        values["OPTIONS"] = "".join(f"\n#SBATCH {option}" for option in options)
        values["CPUS"] = "" if cpus_per_device is None else f" --cpus-per-task={cpus_per_device}"
        script = _fill_template("slurm.sh", values)
    warning = warn_of_tensor_across_hosts(layout, devices_per_node)
    return LaunchScript(script, str(layout), nodes, devices_per_node, (warning,) if warning else ())


def split_over_hosts(layout: Layout, nodes: int | None, devices_per_node: int | None) -> tuple[int, int]:
    """Distribute the layout's ranks over hosts, one device each; return (hosts, devices per host).

    nodes, devices_per_node: required numbers of hosts and of devices per host; None: derived from the number of ranks.
    `UserError` if nodes * devices_per_node is not the number of ranks; the message suggests numbers that fit.
    """
    ranks, given = layout.world_size, (nodes, devices_per_node)
    if given == (None, None):
        devices_per_node = min(ranks, DEVICES_PER_NODE)
    nodes = nodes or ranks // (devices_per_node or 1)
    devices_per_node = devices_per_node or ranks // nodes
    if nodes * devices_per_node == ranks:
        return nodes, devices_per_node
    pairs = [(count, ranks // count) for count in range(1, ranks + 1) if ranks % count == 0]
    near = [abs(count - nodes) if given[1] is None else abs(each - devices_per_node) for count, each in pairs]
    close = sorted(pair for _, pair in sorted(zip(near, pairs, strict=True))[:3])
    have = "hosts" if given[0] is None else _format_count(nodes, "host")
    have += f" of {_format_count(devices_per_node, 'device')}" if given != (nodes, None) else ""
    raise UserError(
        f'layout "{layout}" has {_format_count(ranks, "rank")}, one for each device, and does not fill {have}; '
        f"{' or '.join(f'--nodes {count} --devices-per-node {each}' for count, each in close)} would do"
    )


def _fill_template(name: str, values: Mapping[str, object]) -> str:
    """Return the text of a script template with each @KEY@ replaced by its value. name: file name of the template.
    values: KEY -> value."""
    return re.sub("@([A-Z]+)@", lambda found: str(values[found[1]]), (SCRIPTS / name).read_text())


def _format_count(number: int, what: str) -> str:
    """Format a number with a noun: "1 host", "2 hosts". what: the noun in the singular."""
    return f"{number} {what}{'s' if number != 1 else ''}"


def _make_shell_safe_name(name: str) -> str:
    """Return `name` with every character except letters, digits and "_.-" replaced by "_", for shells and sbatch."""
    return re.sub("[^A-Za-z0-9_.-]", "_", name)


def _check_time_limit(text: str) -> str:
    """Return the SLURM time limit `text`, such as "24:00:00", unchanged; `UserError` if the text is malformed."""
    if re.fullmatch("[0-9]+(-[0-9]+)?(:[0-9]+){0,2}", text):
        return text
    raise UserError(f'--time "{text}": should be minutes, such as 90, or a time such as 24:00:00 or 2-12:00:00')


def _check_sbatch_option(text: str) -> str:
    """Return the sbatch option `text`, such as "--partition=gpu", unchanged; `UserError` if the text is malformed, or
    if it would override the number of hosts or ranks, which the layout determines."""
    if re.match(r"--(nodes|ntasks|ntasks-per-node)\b(?!-)|-[Nn]", text):
        raise UserError(f'--sbatch "{text}": the layout sets hosts and ranks; use --nodes and --devices-per-node')
    if re.fullmatch(r"-[^\r\n]+", text):
        return text
    raise UserError(f'--sbatch "{text}" is not an option of sbatch; should be such as --sbatch=--partition=gpu')
