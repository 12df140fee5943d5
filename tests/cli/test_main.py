"""The command line: quick, one line for a mistake, the right exit code, nothing but the document under --json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest

from meshwright import __version__
from meshwright.cli import main as cli
from meshwright.cli.plumbing import command, device_option, format_json_document, json_option, result_printer
from meshwright.errors import CheckFailed, RankLost, Terminated, UserError
from tests import processor_time


def test_help_claims_no_command_that_is_absent():
    text = cli.meshwright.help or ""
    assert not [name for name in ("plan", "serve", "tune") if name not in cli.COMMANDS and name in text.lower()]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch):
    """Add a command of the test to the commands."""

    def add(added: click.Command) -> None:
        module = type(sys)(f"meshwright.cli.{added.name}")
        module.command = added
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.COMMANDS, added.name, "A command of this test.")

    return add


def raising(error: BaseException) -> click.Command:
    @command("trial", "meshwright trial")
    def trial() -> None:
        raise error

    return trial


def test_help_lists_every_command_in_under_third_of_second():
    seconds = []
    for _ in range(5):
        begun = processor_time.of_ended_processes()
        outcome = subprocess.run(
            [sys.executable, "-m", "meshwright", "--help"], capture_output=True, text=True, check=True
        )
        seconds.append(processor_time.of_ended_processes() - begun)
    assert all(f"\n  {name} " in outcome.stdout for name in cli.COMMANDS)
    assert min(seconds) < 0.3


def test_help_imports_no_command_and_no_heavy_module():
    program = """
import sys
from meshwright.cli.main import main
assert main(["--help"]) == 0
heavy = {"torch", "numpy", "pydantic", "rich", "tokenizers", "safetensors"} & set(sys.modules)
commands = {name for name in sys.modules if name.startswith("meshwright.cli.")}
light = {"meshwright.cli.main", "meshwright.cli.plumbing"}
assert not heavy and commands == light, (heavy, commands)
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_every_command_shows_an_example(name: str, command_line):
    outcome = command_line(name, "--help")
    assert outcome.code == 0
    assert f"  meshwright {name} " in outcome.output
    assert "Example" in outcome.output


def test_help_is_shown_without_a_command(command_line):
    assert command_line().output == command_line("--help").output
    assert command_line("--version").output == f"meshwright {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["verfy"], 'unknown command "verfy"; did you mean "verify"?'),
        (["--vresion"], "unknown option --vresion; did you mean --version?"),
        (["trial", "--jsno"], "trial: unknown option --jsno; did you mean --json?"),
        (["trial", "many", "words", "-t", "text"], "trial: Got unexpected extra argument"),
        (["trial"], "trial: WORD is missing (meshwright trial --help shows an example)"),
        (["trial", "word"], "trial: --text is missing: the text to read, or a path (meshwright trial --help shows an"),
        (["trial", "word", "-t"], "trial: --text needs a value: the text to read, or a path (meshwright trial --help"),
        (["trial", "word", "--number"], "trial: --number needs a value (meshwright trial --help shows an example)"),
        (["trial", "--number", "x", "word"], "trial: --number: 'x' is not a valid integer (meshwright trial --help"),
        (["trial", "--device", "gpu", "word"], 'trial: --device: unknown device "gpu"; did you mean "cpu"? (known: '),
    ],
)
def test_wrong_command_line_is_one_line_with_exit_2(arguments: list[str], line: str, command_line, commands):
    @command("trial", "meshwright trial WORD")
    @click.argument("word")
    @click.option("--number", type=int)
    @click.option("-t", "--text", required=True, help="The text to read, or a path.")
    @device_option
    @json_option
    def trial(word: str, number: int, text: str, device: str, as_json: bool) -> None: ...

    commands(trial)
    outcome = command_line(*arguments)
    assert (outcome.code, outcome.output) == (2, "")
    assert outcome.errors.startswith(f"meshwright: error: {line}")
    assert outcome.errors.count("\n") == 1


def test_unknown_group_command_suggests_the_nearest(command_line, commands):
    @command("trial", "meshwright trial prepare", group=True)
    def trial() -> None: ...

    @trial.command("prepare")
    def prepare() -> None: ...

    commands(trial)
    assert 'trial: unknown command "prepaer"; did you mean "prepare"?' in command_line("trial", "prepaer").errors
    assert "prepare" in command_line("trial").output
    assert command_line("trial", "prepare").code == 0


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_missing_argument_is_one_line_in_every_command(name: str, command_line):
    """Each with an option that has no value: the error is one line of Meshwright in every case."""
    loaded = cli.meshwright.get_command(click.Context(cli.meshwright), name)
    inner = [[name, inside] for inside in loaded.commands] if isinstance(loaded, click.Group) else [[name]]
    for path in inner:
        command = loaded.commands[path[1]] if len(path) > 1 else loaded
        if not any(parameter.required for parameter in command.params):
            continue
        outcome = command_line(*path)
        assert (outcome.code, outcome.output, outcome.errors.count("\n")) == (2, "", 1)
        assert outcome.errors.startswith(f"meshwright: error: {' '.join(path)}: ")
        assert " is missing" in outcome.errors and "Missing" not in outcome.errors


def test_help_of_a_group_shows_whole_sentences(command_line, commands):
    @command("trial", "meshwright trial prepare", group=True)
    def trial() -> None: ...

    @trial.command("prepare")
    def prepare() -> None:
        """Read, clean, tokenize and pack the data of a recipe that is far too long for one line of any terminal;
        check what is there already, byte for byte.

        More about it.
        """

    commands(trial)
    text = " ".join(command_line("trial", "--help").output.split())
    assert "prepare Read, clean, tokenize and pack the data of a recipe that is far too long for one line" in text
    assert "what is there already, byte for byte. Example" in text


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("recipe.toml: wrong\n  on two lines"), 2, "meshwright: error: recipe.toml: wrong on two lines\n"),
        (CheckFailed("it does not hold"), 1, "meshwright: error: it does not hold\n"),
        (RankLost("rank 3 died"), 3, "meshwright: error: rank 3 died\n"),
        (Terminated("SIGTERM: saved step 7"), 143, "meshwright: SIGTERM: saved step 7\n"),
        (click.FileError("x.toml", "gone"), 2, "meshwright: error: Could not open file 'x.toml': gone\n"),
    ],
)
def test_error_is_one_line_with_its_own_exit_code(error: Exception, code: int, line: str, command_line, commands):
    commands(raising(error))
    assert command_line("trial") == (code, "", line)


def test_interrupt_ends_with_130(command_line, commands):
    commands(raising(KeyboardInterrupt()))
    assert command_line("trial") == (130, "", "meshwright: interrupted\n")
    commands(raising(KeyboardInterrupt("stopped by an interrupt after saving step 3")))
    assert command_line("trial") == (130, "", "meshwright: stopped by an interrupt after saving step 3\n")


def test_internal_error_keeps_its_traceback(command_line, commands):
    commands(raising(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError, match="ours"):
        command_line("trial")


def test_broken_pipe_ends_without_error_message():
    program = "from meshwright.cli.main import main; import sys; sys.exit(main(['--help']))"
    process = subprocess.Popen(
        [sys.executable, "-c", f"import time; time.sleep(0.5)\n{program}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.wait() == 1
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize("started", [{}, {"RANK": "0", "WORLD_SIZE": "2"}], ids=["alone", "by torchrun"])
@pytest.mark.parametrize(("argument", "code"), [("--version", 0), ("no-command", 2)])
def test_externally_started_rank_ends_without_finalization(started: dict[str, str], argument: str, code: int):
    """Python's finalization aborts a rank whose process groups still have threads."""
    program = (
        "import atexit, sys, types; atexit.register(print, 'finalized'); "
        "sys.modules['torch'] = types.ModuleType('torch'); from meshwright.cli.main import run; run()"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | started
    ended = subprocess.run(
        [sys.executable, "-c", program, argument], capture_output=True, text=True, env=environment, check=False
    )
    assert ended.returncode == code and ("finalized" in ended.stdout) == (not started)
    assert ("meshwright 0" in ended.stdout) == (code == 0) and ("no-command" in ended.stderr) == (code == 2)


def test_json_prints_exactly_one_document_on_standard_output(tmp_path: Path):
    program = """
import subprocess, sys, click
from meshwright.cli.plumbing import result_printer
with result_printer(True) as answer:
    print("from Python")
    click.echo("from click")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    answer({"loss": 2.5}, "text for people")
    print("after the answer")
print("after it all")
"""
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    document, after = outcome.stdout.splitlines()
    assert json.loads(document) == {"schema": 1, "loss": 2.5}
    assert after == "after it all"
    for line in ("from Python", "from click", "from a child", "after the answer"):
        assert f"{line}\n" in outcome.stderr


def test_without_json_the_text_is_printed(capsys: pytest.CaptureFixture[str]):
    with result_printer(False) as answer:
        answer({"loss": 2.5}, "loss 2.5")
    assert capsys.readouterr() == ("loss 2.5\n", "")


def test_failed_check_still_prints_its_result(command_line, commands):
    @command("trial", "meshwright trial")
    @json_option
    def trial(as_json: bool) -> None:
        with result_printer(as_json) as answer:
            print("progress")
            answer({"passed": False}, "failed")
            raise CheckFailed("it does not hold")

    commands(trial)
    code, output, errors = command_line("trial", "--json")
    assert (code, json.loads(output)) == (1, {"schema": 1, "passed": False})
    assert errors == "progress\nmeshwright: error: it does not hold\n"
    assert command_line("trial").output == "progress\nfailed\n"


def test_json_document_contains_only_json_types():
    document = {
        "nan": float("nan"),
        "inf": [np.inf, 1.5],
        "array": np.arange(2),
        "scalar": np.float32(0.5),
        "path": Path("a"),
    }
    text = format_json_document({**document, "nested": {3: (True, None, "ü")}})
    assert "\n" not in text
    assert json.loads(text, parse_constant=pytest.fail) == {
        "schema": 1,
        "nan": None,
        "inf": [None, 1.5],
        "array": [0, 1],
        "scalar": 0.5,
        "path": "a",
        "nested": {"3": [True, None, "ü"]},
    }
