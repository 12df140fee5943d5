"""The `meshwright` command: imports and runs the file of a command, and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import click

from meshwright import __version__
from meshwright.cli.plumbing import CONTEXT, Group, format_usage_error
from meshwright.errors import MeshwrightError, ModelWarning, Terminated, UserError, make_out_of_memory_message
from meshwright.terminal import escape_control_characters, print_message, wrap_message
from meshwright.threads import prepare_process

# Every command with its line in --help; `meshwright.cli.NAME` holds it as `command`.
COMMANDS = {
    "data": "Prepare a recipe's data, show samples, report on cleaning and on the tokenizer.",
    "schedule": "Check, time and draw a pipeline schedule.",
    "collective": "Check, time, draw and run a collective operation, or choose its algorithm.",
    "plan": "Predict the time and memory of training, and find the best layout.",
    "explain": "Recompute a published figure of distributed training, step by step.",
    "probe": "Measure this machine, compare its ranks, and write its cluster file.",
    "verify": "Check that a layout computes what one device computes.",
    "train": "Train a recipe, or resume its run.",
    "tune": "Search the hyper-parameters of a recipe.",
    "run": "Run a script on several ranks of this machine, such as one that trains its own module.",
    "launch": "Print a script that trains a recipe on several hosts, for torchrun or SLURM.",
    "adapter": "Merge a LoRA adapter into its base model, remove it, or extract one from two checkpoints.",
    "evaluate": "Measure loss, perplexity and bits per byte of a checkpoint on held-out text.",
    "generate": "Continue a prompt with a checkpoint.",
    "serve": "Serve a checkpoint over HTTP by OpenAI's API.",
    "inspect": "Show the tensors of a checkpoint or model directory, and which rank would hold them.",
    "report": "Write a page about a run: loss curve, throughput, recipe, samples.",
}


LONGEST_LINE = 2000  # maximum characters of an error line


class _Interrupted(Exception):
    """Error: Ctrl-C was pressed inside a command. The text is the message to print. It replaces KeyboardInterrupt, for
    which click would print an empty line.
    """


class Commands(Group):
    """Top-level click group: it lists all commands, but imports only the module of the command that runs."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of all commands, for --help and suggestions. context: click's context, unused."""
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import and return the click command called `name`; None if there is none. context: click's context,
        unused."""
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"meshwright.cli.{name}").command
        return command

    def invoke(self, context: click.Context) -> Any:
        """Run the command that the command line (in click's `context`) names. A KeyboardInterrupt is replaced by
        `_Interrupted`, since click would print an empty line for it."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt as error:  # click would answer it with an empty line
            raise _Interrupted(str(error)) from None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for --help to click's `formatter`, from the table `COMMANDS`, without importing
        the commands. context: click's context."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command("meshwright", cls=Commands, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="meshwright", message="%(prog)s %(version)s")
def meshwright() -> None:
    """Plan, verify, train and serve language models on any number of devices.

    One recipe describes the model, the data and the layout. `meshwright COMMAND --help` shows examples of each command.
    """


def run() -> NoReturn:
    """Run the command line of this process and end the process with its exit code. Ranks that torchrun, Kubernetes or
    SLURM started skip Python's finalization, during which running threads of torch.distributed sometimes abort the
    process. Ranks of Meshwright's launcher do the same.
    """
    code = main()
    if "torch" in sys.modules:
        from meshwright.launcher.rendezvous import is_started_by_others

        if is_started_by_others():
            with suppress(OSError):  # the reader has exited
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: sys.argv without the program's name) and return the exit code. Errors
    for the user are printed as one line; internal errors keep their traceback."""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        for argument in given:
            _refuse_undecodable(argument)
        prepare_process()  # before any command loads torch
        with _print_model_warnings():
            code = meshwright.main(given, prog_name="meshwright", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.UsageError as error:
        return _print_error(format_usage_error(error), 2)
    except click.ClickException as error:
        return _print_error(error.format_message(), 2)
    except Terminated as error:
        return _print_error(str(error), error.exit_code, kind="")
    except MeshwrightError as error:
        return _print_error(str(error), error.exit_code)
    except (_Interrupted, KeyboardInterrupt, click.Abort) as error:
        if sys.stderr.isatty():
            click.echo(err=True)  # newline after ^C
        return _print_error(str(error) or "interrupted", 130, kind="")
    except (MemoryError, RuntimeError) as error:
        if (reason := make_out_of_memory_message(error)) is None:
            raise
        return _print_error(reason, 2)
    except BrokenPipeError:  # the reader of standard output has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _refuse_undecodable(argument: str) -> None:
    """Raise `UserError` if a command-line argument has bytes that are not UTF-8, which Python represents by lone
    surrogates. Recipes, manifests, results and pages store paths as UTF-8 text.
    """
    try:
        os.fspath(argument).encode()
    except UnicodeEncodeError as error:
        byte = argument[error.start].encode(
            errors="surrogateescape" if "\udc80" <= argument[error.start] <= "\udcff" else "replace"
        )
        raise UserError(
            f"argument {argument!a}: byte 0x{byte.hex()} of it is not UTF-8; rename the file or directory, or write "
            "the argument in UTF-8"
        ) from None


@contextmanager
def _print_model_warnings() -> Iterator[None]:
    """Context manager in which each distinct `ModelWarning` is printed once, as one line on standard error; other
    warnings are shown as Python does."""
    printed: set[str] = set()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_line(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            """Print a `ModelWarning` as one line, unless it was printed before, and other warnings as Python does;
            replaces `warnings.showwarning`, whose arguments it has (place: file and line)."""
            if not issubclass(category, ModelWarning):
                show(message, category, *place, **more)
            elif (text := " ".join(str(message).split())) not in printed:
                printed.add(text)
                print_message(f"meshwright: warning: {text}")

        warnings.simplefilter("always", ModelWarning)
        warnings.showwarning = show_line
        yield


def _print_error(reason: str, code: int, kind: str = "error: ") -> int:
    """Print `reason` as one line on standard error, with the prefix `kind`, and return the exit code `code`."""
    line = escape_control_characters(" ".join(reason.split()))  # it may quote an untrusted file
    line = line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."
    click.echo(wrap_message(f"meshwright: {kind}{line}"), err=True)
    return code
