"""`meshwright run`: start a user's script as several ranks on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import json_option, result_printer
from meshwright.emulation.api import MAX_RANKS
from meshwright.terminal import print_message


@plumbing.command(
    "run",
    "meshwright run --ranks 2 examples/bert_classifier.py",
    'meshwright run --ranks 4 --restarts 2 train.py "layout=dp4 zero3"',
    "meshwright run --emulate 4 --show --break 2:5 train.py",
    "meshwright run --emulate 4 --check examples/exercises/data_parallel.py",
    'meshwright run --emulate 8 examples/layouts.py LICENSE "dp2 tp2 pp2"',
)
@click.option("--ranks", default=1, type=click.IntRange(min=1), help="Number of local processes.")
@click.option("--emulate", type=click.IntRange(1, MAX_RANKS), help="Number of ranks emulated by threads.")
@click.option("--break", "stop", metavar="RANK[:CALL]", help="Emulated: debug a rank before its n-th communication.")
@click.option("--show", is_flag=True, help="Emulated: print communications, and at the end the tensors of each rank.")
@click.option("--check", is_flag=True, help="Emulated: compare an exercise's distributed() with its one_device().")
@click.option("--directory", help="Run directory.  [default: runs/SCRIPT's name]")
@click.option("--restarts", default=0, type=click.IntRange(min=0), help="Maximum restarts after a rank was lost.")
@json_option
@click.argument("script")
@click.argument("arguments", nargs=-1, metavar="[ARGUMENT]...", type=click.UNPROCESSED)
def command(
    ranks: int, emulate: int | None, stop: str | None, show: bool, check: bool, directory: str | None, restarts: int,
    as_json: bool, script: str, arguments: tuple[str, ...],
) -> None:  # fmt: skip
    """Run SCRIPT with its arguments on several ranks, each a process that calls meshwright.fit.

    Arguments after SCRIPT are passed to the script. SIGTERM and Ctrl-C finish the current step, save and stop, with
    exit code 143 or 130; the same command then resumes. Standard output is the script's own; with --json it carries the
    result of the last fit, and what the script prints goes to standard error. torchrun and SLURM start the same script.

    With --emulate N, N threads of this process take the place of the N processes that torchrun would start, on the CPU.
    The script may use plain torch.distributed or meshwright.train. Only one rank runs at a time, until it waits for
    another, so that the order of events depends on the script alone. A deadlock is reported immediately, breakpoint()
    opens the debugger of one rank.

    \f
    ranks: number of processes to start on this machine. emulate: number of ranks to emulate by threads; None: start
    processes. directory: run directory, None for runs/ and the script's name. restarts: maximum number of restarts
    after a lost rank. arguments: passed to the script. as_json: print JSON.

    For emulated ranks only: stop: where to open the debugger, the argument of --break. show: print each communication
    call. check: the script defines distributed() and one_device(); call both and compare their results.
    """
    from meshwright.errors import UserError
    from meshwright.launcher.launcher import RankFault
    from meshwright.training.script import run_script

    path = Path(script)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UserError(f"script {path} {what}")
    if emulate is None and (stop is not None or show or check):
        raise UserError("--break, --show and --check need --emulate N")
    if emulate is not None:
        if ranks != 1 or restarts or directory:
            raise UserError("--emulate runs in this process: no --ranks, --restarts or --directory")
        _run_emulated(path, list(arguments), emulate, (stop, show, check), as_json)
        return
    where = Path(directory) if directory else Path("runs") / path.stem
    with result_printer(as_json) as answer:
        try:
            result = run_script(path, list(arguments), ranks, where, restarts=restarts, redirect_stdout=as_json)
        except RankFault as fault:  # an exception of the script, with its traceback
            print_message(str(fault))
            raise click.exceptions.Exit(1) from None
        answer(result)


def _run_emulated(
    path: Path, arguments: list[str], ranks: int, options: tuple[str | None, bool, bool], as_json: bool
) -> None:
    """Run a script on emulated ranks (threads of this process) and print the report; exit with the script's code if it
    fails.

    path, arguments: the script and its arguments. ranks: number of ranks. options: (breakpoint, show, check), the
    fields of `ScriptOptions`. as_json: print JSON.
    """
    from meshwright.emulation.script import ScriptOptions, run_emulated_script

    with result_printer(as_json) as answer:
        report = run_emulated_script(path, arguments, ranks, ScriptOptions(*options))
        answer(report.to_json_dict(options[1]), report.summary())
    if report.failure:
        print_message(report.failure)
    if report.exit_code:
        raise click.exceptions.Exit(report.exit_code)


command.allow_interspersed_args = False
