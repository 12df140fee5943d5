"""`meshwright run`: start a user's script as several ranks on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import json_option, result_printer
from meshwright.terminal import print_message


@plumbing.command(
    "run",
    "meshwright run --ranks 2 examples/bert_classifier.py",
    'meshwright run --ranks 4 --restarts 2 train.py "layout=dp4 zero3"',
)
@click.option("--ranks", default=1, show_default=True, type=click.IntRange(min=1), help="Processes on this machine.")
@click.option("--directory", help="Run directory; runs/ and the script's name, unless said.")
@click.option("--restarts", default=0, type=click.IntRange(min=0), help="Start again so often after a rank was lost.")
@json_option
@click.argument("script")
@click.argument("arguments", nargs=-1, metavar="[ARGUMENT]...", type=click.UNPROCESSED)
def command(
    ranks: int, directory: str | None, restarts: int, as_json: bool, script: str, arguments: tuple[str, ...]
) -> None:
    """Run SCRIPT with its arguments on several ranks, each a process that calls meshwright.training.module.fit.

    Arguments after SCRIPT are passed to the script. SIGTERM and Ctrl-C finish the current step, save and stop, with
    exit code 143 or 130; the same command then resumes. Standard output is the script's own; with --json it carries the
    result of the last fit, and what the script prints goes to standard error. torchrun and SLURM start the same script.

    \f
    ranks: processes to start on this machine. directory: run directory, None for runs/ and the script's name. restarts:
    maximum number of restarts after a lost rank. arguments: passed to the script. as_json: print JSON.
    """
    from meshwright.errors import UserError
    from meshwright.launcher.launcher import RankFault
    from meshwright.training.script import run_script

    path = Path(script)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UserError(f"script {path} {what}")
    where = Path(directory) if directory else Path("runs") / path.stem
    with result_printer(as_json) as answer:
        try:
            result = run_script(path, list(arguments), ranks, where, restarts=restarts, aside=as_json)
        except RankFault as fault:  # of the script, which is not ours: its own traceback says it all
            print_message(str(fault))
            raise click.exceptions.Exit(1) from None
        answer(result)


command.allow_interspersed_args = False
