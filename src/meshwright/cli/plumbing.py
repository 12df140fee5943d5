"""Shared code of the commands: click classes, common options, --json output, error lines."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import click
from click.core import ParameterSource

from meshwright.checkpoint.files import replace_file
from meshwright.documents import to_json_dict
from meshwright.errors import UserError
from meshwright.names import DEVICES, nearest, unknown
from meshwright.terminal import is_device, wrap_on_terminal, write_output

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


def _check_device(context: click.Context, option: click.Parameter, name: str) -> str:
    """Return the device name given as --device, "auto", "cpu" or "cuda"; raise `BadParameter` for another name. A click
    callback; context, option: as click passes them."""
    if name not in DEVICES:
        raise click.BadParameter(unknown("device", name, DEVICES))
    return name


def _check_device_without_layout(context: click.Context, option: click.Parameter, name: str) -> str:
    """Return the device name given as --device; raise `BadParameter` for an unknown name, and an error for a GPU
    together with --layout. Used in commands whose --layout always runs on CPU ranks. A click callback; context, option:
    as click passes them."""
    _check_device(context, option, name)
    _refuse_gpu_with_layout(context, option, name)
    return name


def _refuse_gpu_with_layout(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Return `value`, the value of --device or --layout, unchanged; raise an error if --layout is given and --device
    asks for a GPU. Used in commands whose --layout always runs on CPU ranks. A click callback; context, option: as
    click passes them."""
    from meshwright.launcher.device import refuse_device_of_layout

    given = {**context.params, str(option.name): value}
    refuse_device_of_layout(given.get("device", "auto"), given.get("layout"), "--")
    return value


_DEVICE: dict[str, Any] = {
    "metavar": "|".join(DEVICES),
    "default": "auto",
    "help": "Device; auto: a GPU if there is one.",
}
device_option = click.option("--device", callback=_check_device_without_layout, **_DEVICE)
device_option_of_ranks = click.option("--device", callback=_check_device, **_DEVICE)
reading_layout_option = click.option(
    "--layout",
    callback=_refuse_gpu_with_layout,
    help='Shard the model over local CPU ranks, such as "pp2" or "tp2 pp2".',
)
trust_option = click.option(
    "--trust-recipe", "trust", is_flag=True, help="Allow the recipe to run code that it names, such as a tracker class."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document to standard output.")


def command(name: str, *examples: str, group: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that turns a function into the click command `name` (with group=True a click group).

    examples: command lines to show at the end of its --help.
    """
    epilog = "\n".join(["\b", "Example:" if len(examples) == 1 else "Examples:", *(f"  {line}" for line in examples)])
    return click.command(name, cls=Group if group else Command, epilog=epilog, context_settings=CONTEXT)


class FiniteRange(click.FloatRange):
    """Type of options whose value is a finite number in a range. Unlike `click.FloatRange`, it refuses "inf" and "nan".
    (Comparisons with "nan" are always false, so that `click.FloatRange` finds it within any range.)"""

    def convert(self, value: Any, option: click.Parameter | None, context: click.Context | None) -> Any:
        """Convert `value`, the text of the option, to a float. Raises `click.BadParameter`, also for "nan" and "inf".
        option, context: as click passes them."""
        number = super().convert(value, option, context)
        if not math.isfinite(number):
            self.fail(f"{value!r}: a finite number is needed", option, context)
        return number


class Command(click.Command):
    """Click command whose usage errors always name the command, even where click itself would not."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """Parse the command-line arguments. Usage errors that click raises without a context (for an option without a
        value) get `context`, so that their message names the command.
        """
        try:
            return super().parse_args(context, arguments)
        except click.UsageError as error:
            error.ctx = error.ctx or context  # click omits it for an option without a value
            raise

    def invoke(self, context: click.Context) -> Any:
        """Run the command, unless it would overwrite a file that it reads (`UserError`). context: click's context."""
        _refuse_overwritten_inputs(context)
        return super().invoke(context)


class Group(click.Group):
    """Click group that suggests the nearest name for an unknown command."""

    command_class = Command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return (name, click command, remaining arguments) for the command-line `arguments`; raise a usage error that
        suggests the nearest name for an unknown command. context: click's context."""
        name = arguments[0]
        if not name.startswith("-") and self.get_command(context, name) is None:
            raise click.UsageError(unknown("command", name, self.list_commands(context)), context)
        return super().resolve_command(context, arguments)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for --help to click's `formatter`, each with the whole first paragraph of its
        help, which click would cut to one line. context: click's context."""
        rows = []
        for name in self.list_commands(context):
            command = self.get_command(context, name)
            assert command is not None
            rows.append((name, " ".join((command.help or "").partition("\n\n")[0].split())))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def format_usage_error(error: click.UsageError) -> str:
    """Format the error of a wrong command line as one line: what is wrong, and which --help shows correct usage."""
    reason = error.format_message().removesuffix(".")
    if isinstance(error, click.NoSuchOption):
        options = [name for parameter in error.ctx.command.params for name in parameter.opts] if error.ctx else []
        close = nearest(error.option_name, [*options, "--help"])
        reason = f"unknown option {error.option_name}"
        if key := _find_override_key(error):
            reason += f"; write {key}=VALUE" + ', such as "layout=dp2 zero1"' * (key == "layout")
        elif close:
            reason += f"; did you mean {close}?"
    elif isinstance(error, click.MissingParameter) and error.param is not None:
        reason = f"{_format_parameter_name(error.param)} is missing" + _format_help_suffix(error.param)
    elif isinstance(error, click.BadOptionUsage) and error.ctx and error.message.endswith("requires an argument."):
        option = next(option for option in error.ctx.command.params if error.option_name in option.opts)
        reason = f"{_format_parameter_name(option)} needs a value" + _format_help_suffix(option)
    elif isinstance(error, click.BadParameter) and error.param is not None:
        reason = f"{_format_parameter_name(error.param)}: {error.message.removesuffix('.')}"
    path = error.ctx.command_path if error.ctx else "meshwright"
    where = path.removeprefix("meshwright").strip()
    return f"{f'{where}: ' if where else ''}{reason} ({path} --help shows an example)"


def _find_override_key(error: click.NoSuchOption) -> str | None:
    """Return the dotted recipe key that the user wrote as an option (`--layout`, `--train.steps`) in a command that
    takes KEY=VALUE overrides; None if the unknown option is not such a key. error: click's error for the unknown
    option."""
    from meshwright.recipe.recipe import SCHEMA
    from meshwright.tables import is_table

    if error.ctx is None or all(parameter.name != "overrides" for parameter in error.ctx.command.params):
        return None
    name = error.option_name.lstrip("-").replace("-", "_")
    return name if name in SCHEMA.keys and not is_table(SCHEMA.keys[name].annotation) else None


def _format_parameter_name(parameter: click.Parameter) -> str:
    """Return a parameter as the user types it: `--option`, or the name of an argument in the usage line."""
    return max(parameter.opts, key=len) if isinstance(parameter, click.Option) else parameter.human_readable_name


def _format_help_suffix(parameter: click.Parameter) -> str:
    """Return the parameter's help text as the end of an error line (": ..."); "" if it has no help text."""
    text = (getattr(parameter, "help", None) or "").rstrip(".")
    return f": {text[:1].lower()}{text[1:]}" if text else ""


def file_option(*names: str, help: str) -> Callable[[Any], Any]:
    """Return a decorator that adds a click option whose value is the path of a file (a `Path`). names: names of the
    option, such as "--html". help: its help text.
    """
    return click.option(*names, type=click.Path(path_type=Path), metavar="F", help=help)


class OutputPath(click.Path):
    """Type of options that name a file to write, which is no other file of the command line.

    updates: names of the parameters whose file the command may replace, since it writes everything in it again."""

    def __init__(self, updates: Collection[str] = ()) -> None:
        super().__init__(path_type=Path)
        self.updates = updates


def output_option(
    *names: str, help: str, updates: Collection[str] = (), required: bool = False
) -> Callable[[Any], Any]:
    """Return a decorator that adds a click option whose value is the path of a file to write. names: names of the
    option, such as "--html". help: its help text. updates: see `OutputPath`. required: True if the command needs it."""
    return click.option(*names, type=OutputPath(updates), metavar="F", help=help, required=required)


def _refuse_overwritten_inputs(context: click.Context) -> None:
    """Raise `UserError` if an output file on the command line is also one of its input files or another output file.
    context: click's context of the parsed command line."""
    for option in context.command.params:
        path = context.params.get(str(option.name))
        if not isinstance(option.type, OutputPath) or path is None or str(path) == "-" or is_device(path):
            continue
        for other in context.command.params:
            if other is option or other.name in option.type.updates:
                continue
            if any(os.path.realpath(each) == os.path.realpath(path) for each in _list_files(context, other)):
                name, also = _format_parameter_name(option), _format_parameter_name(other)
                raise UserError(f"{name} {path}: {also} is the same file, which would be lost; name another one")


def _list_files(context: click.Context, parameter: click.Parameter) -> list[Path]:
    """Return the paths that the command line gives for an argument or option: those of existing files and of files to
    write. A text without a suffix, such as `1f1b`, is no path but a name, unless `@` precedes it as a program's file.
    context: click's context."""
    value = context.params.get(str(parameter.name))
    values = value if isinstance(value, tuple) else (value,)
    texts = [each for each in values if isinstance(each, str)]
    named = [Path(each.removeprefix("@")) for each in texts if each.startswith("@") or Path(each).suffix]
    paths = [each for each in values if isinstance(each, Path)]
    return [each for each in named + paths if isinstance(parameter.type, OutputPath) or os.path.isfile(each)]


def list_given_options() -> dict[str, str]:
    """Return the options and arguments that are present on the command line of the current command, in the order of
    their declaration: {parameter name: name of the option, such as "--layout", or of the argument}.
    """
    context = click.get_current_context()
    return {
        str(each.name): _format_parameter_name(each)
        for each in context.command.params
        if context.get_parameter_source(str(each.name)) == ParameterSource.COMMANDLINE
    }


overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


def split_overrides(arguments: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Split command-line arguments into (name of a recipe or model, KEY=VALUE overrides that follow it). The name is
    None if there is none. Raises `UserError` for a second name, before or after the overrides.
    """
    first = next((number for number, each in enumerate(arguments) if is_override(each)), len(arguments))
    named, overrides = arguments[:first], tuple(arguments[first:])
    over = next((each for each in overrides if not is_override(each)), named[1] if len(named) > 1 else None)
    if over is not None:
        raise UserError(
            f'unexpected argument "{over}": give one name, then KEY=VALUE overrides such as train.steps=100'
        )
    return named[0] if named else None, overrides


def is_override(argument: str) -> bool:
    """Return True if an argument has the form KEY=VALUE and is not the name of an existing file."""
    return re.match(r"[A-Za-z_][A-Za-z0-9_.]*\s*=", argument) is not None and not os.path.exists(argument)


def refuse_overrides(overrides: Sequence[str], name: str | None) -> None:
    """Raise `UserError` if there are KEY=VALUE overrides and `name` is not the file of a recipe (.toml): overrides can
    only change a recipe. name: the command's argument, None if it was not given."""
    if overrides and not (name or "").endswith(".toml"):
        raise UserError(f'override "{overrides[0]}" needs a recipe (.toml); got {name or "none"}')


class ResultPrinter(Protocol):
    """Type of the function, yielded by `result_printer`, that prints a command's result: as JSON with --json, else as
    text."""

    def __call__(self, document: Mapping[str, Any], text: str = "", alone: str | None = None) -> None:
        """Print the result of a command; called once. document: result as JSON, printed with --json. text: result for
        people, printed otherwise. alone: content of an output file that the user directed to standard output with `-`;
        it is printed there alone, and `text` on standard error. None: no file was directed there."""


@contextmanager
def result_printer(as_json: bool) -> Iterator[ResultPrinter]:
    """Context manager that yields a `ResultPrinter`, the function with which a command prints its result once.

    If `as_json` (option --json), standard output carries only the result as JSON; all other output inside the context,
    also of child processes, goes to standard error.
    """
    answered = False

    def answer(document: Mapping[str, Any], text: str = "", alone: str | None = None) -> None:
        """Print the result: `document` as JSON (with `as_json`) or `text`, and `alone` on standard output; see
        `ResultPrinter`."""
        nonlocal answered
        assert not answered, "a command prints one result"
        answered = True
        if as_json:
            print(format_json_document(document), file=output, flush=True)
        elif text:
            click.echo(wrap_on_terminal(text), err=alone is not None)
        if alone is not None:
            assert not as_json, "--json prints one JSON document alone"
            click.echo(alone, nl=False)

    if not as_json:
        yield answer
        return
    output: IO[str] = sys.stdout
    aside = None
    try:
        if output.fileno() == 1:  # file descriptor 1 is redirected, for child processes too
            output.flush()
            aside = os.dup(1)
            os.dup2(2, 1)
            output = os.fdopen(os.dup(aside), "w", encoding="utf-8")
    except (OSError, ValueError):  # sys.stdout is not a file
        pass
    printed, sys.stdout = sys.stdout, sys.stderr
    try:
        yield answer
    finally:
        sys.stdout = printed
        if aside is not None:
            output.close()
            printed.flush()  # text written to the old sys.stdout belongs to standard error too
            os.dup2(aside, 1)
            os.close(aside)


def print_progress(text: str, last: bool) -> None:
    """Print `text` on standard error over the previous progress text; print nothing if standard error is not a
    terminal. last: True to end the line, so that the text stays.
    """
    if sys.stderr.isatty():
        print(f"\r{text}", end="\n" if last else "", file=sys.stderr, flush=True)


def is_standard_output(path: Path | None, option: str, as_json: bool) -> bool:
    """Return True if `path` is `-`, which stands for standard output. Raises `UserError` in this case if `as_json`,
    since standard output then carries the JSON document. option: name of the option with this path, for the error."""
    if str(path) != "-":
        return False
    if as_json:
        raise UserError(f"{option} -: with --json, standard output carries one JSON document; name a file")
    return True


def write_file(path: Path, text: str) -> None:
    """Write `text` to the file, device or pipe `path` as UTF-8, to a file atomically. Raises `UserError` if that
    fails."""
    if not path.name:
        raise UserError(f"cannot write {path}: it is a directory")
    try:
        write_output(path, text.encode(), partial(replace_file, sync=False))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def write_files(*files: tuple[str, Path | None, Callable[[], str]]) -> dict[str, str]:
    """Write the output files of a command; return {kind: path} of the written files. files: (kind such as "picture",
    path or None, function that returns the text); files without a path are skipped. Raises `UserError`.
    """
    wanted = [(kind, path, make) for kind, path, make in files if path is not None]
    for _, path, make in wanted:
        write_file(path, make())
    return {kind: str(path) for kind, path, _ in wanted}


def format_json_document(document: Mapping[str, Any]) -> str:
    """Format `document`, with `"schema": 1` added, as one line of JSON; nan and inf become null."""
    return json.dumps(to_json_dict(document), allow_nan=False, ensure_ascii=False)
