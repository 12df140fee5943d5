"""`meshwright probe`: measure this machine and write the cluster file that `plan` reads."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import device_option, json_option, output_option, result_printer, write_file
from meshwright.errors import UserError


@plumbing.command(
    "probe",
    "meshwright probe",
    "meshwright probe --ranks 4 --output cluster.toml",
    "torchrun --nnodes 2 --nproc-per-node 8 ... -m meshwright probe",
)
@click.option("--ranks", type=click.IntRange(min=1), help="Processes.  [default: one per GPU, 2 without GPUs]")
@device_option
@output_option(
    "--output", help="Cluster file to write.  [default: ~/.config/meshwright/cluster.toml, the one that `this` names]"
)
@click.option(
    "--directory", type=click.Path(path_type=Path), metavar="D", default=Path(), show_default="this one",
    help="Directory for checkpoints, whose disk is measured.",
)  # fmt: skip
@json_option
def command(ranks: int | None, device: str, output: Path | None, directory: Path, as_json: bool) -> None:
    """Measure this machine's speed, and write the results to its cluster file, which `plan` and `train` read.

    Measures matrix products, memory, copies, collectives, disk and start-up, in a minute or two. A rank or node that is
    slower than the others is reported. Started by torchrun or SLURM, it measures all hosts together.

    \f
    ranks: processes, None for one per GPU, or 2 without GPUs. device: "auto", "cpu" or "cuda". output: cluster file to
    write, None for this machine's default file. directory: a directory on the disk whose speed is measured. as_json:
    print JSON.
    """
    with result_printer(as_json) as answer:
        from meshwright.launcher.rendezvous import is_started_by_others, read_rendezvous_info
        from meshwright.planner.hardware.cluster import this_machine
        from meshwright.probe import report
        from meshwright.probe.ranks import probe, probe_on_rank

        path = this_machine() if output is None else output
        if not directory.is_dir():
            raise UserError(f"--directory: there is no directory {directory}")
        joining = is_started_by_others()
        first = not joining or read_rendezvous_info().rank == 0
        if first:
            _check_writable(path, make=output is None)
        if joining and ranks is not None:
            raise UserError("--ranks: torchrun or SLURM has started the ranks; leave it out")
        found = probe_on_rank(device, directory) if joining else probe(ranks, device, directory)
        if not first:  # rank 0 prints the result
            return
        tables = report.make_cluster_tables(found, found["kind"])
        write_file(path, report.format_cluster_file(tables, _format_file_header(found["seconds"])))
        answer(report.make_document(found, tables, str(path)), report.format_summary(found, str(path)))


def _check_writable(path: Path, make: bool) -> None:
    """Raise `UserError` if the cluster file `path` cannot be written. Called before the measurement, which takes long.
    make: create its directory if missing.
    """
    try:
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {path.parent}: {error.strerror}; name a file with --output") from None
    if not path.parent.is_dir():
        raise UserError(f"--output: there is no directory {path.parent}")
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a directory")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix="."):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _format_file_header(seconds: float) -> list[str]:
    """Return the comment lines at the top of a cluster file. seconds: duration of the measurement."""
    import datetime

    import torch

    from meshwright import __version__

    now = datetime.datetime.now(datetime.UTC)
    return [
        f"Written by `meshwright probe` {__version__} on {now:%Y-%m-%d} in {seconds:.0f} s, torch {torch.__version__}.",
        "GB: 10^9 bytes, one direction, per device; peaks: 10^12 operations a second, the best product measured.",
    ]
