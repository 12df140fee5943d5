"""`meshwright train`: mistakes are one line before anything starts, and a run prints one document under every
launcher."""

from __future__ import annotations

import gzip
import json
import os
import socket
from pathlib import Path

import pytest

from meshwright.errors import Terminated, UserError
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.recipe import load_recipe
from meshwright.training import start as training_start
from meshwright.training import worker
from tests.forked_commands import ForkedCommand

TEXT = "".join(f"Test {n} is good if it can fail.\n\nRun {n} is good if it can go on.\n\n" for n in range(600))


@pytest.fixture
def recipe(tiny_recipe: Path, tmp_path: Path) -> Path:
    """A recipe of four steps on a short text, with all files in one directory."""
    (tmp_path / "corpus.txt").write_text(TEXT)
    text = tiny_recipe.read_text().replace('"stdlib"', f'"{tmp_path}/corpus.txt"\ncache = "{tmp_path}/cache"')
    tiny_recipe.write_text(text.replace("seed = 7", f'seed = 7\ndirectory = "{tmp_path}/run"'))
    return tiny_recipe


@pytest.fixture
def nothing_starts(monkeypatch):
    """No rank may be started."""

    def started(*_: object) -> None:
        pytest.fail("ranks were started")

    monkeypatch.setattr(training_start, "launch", started)


MISTAKES = {
    "a typo": (["train.lerning_rate=1e-3"], 'override "train.lerning_rate=1e-3"', "train.learning_rate"),
    "a value of the wrong type": (["train.steps=many"], "train.steps", "whole number"),
    "a layout that does not divide the batch": (["layout=dp3"], "batch 4 is not a multiple of dp x mb = 3", "3 or 6"),
    "micro-batches that do not": (["layout=dp2 mb4"], "batch 4 is not a multiple of dp x mb = 8", "8 would be"),
    "a layout that does not divide the ranks": (["layout=dp4 zero3 hs3"], "hs3", "dp"),
    "an axis that is not built": (["layout=dp2 offload:cpu"], "offload:cpu", ""),
    "a layout that is none": (["layout=dp2 zero7"], "zero7", "zero"),
    "no such data": (["data.source={tmp}/none.txt"], "data.source", "none.txt"),
    "an empty file": (["data.source={tmp}/empty.txt"], "{tmp}/empty.txt is empty", ""),
    "a binary file": (["data.source={tmp}/binary.txt"], "{tmp}/binary.txt", "text"),
    "a truncated file": (["data.source={tmp}/cut.jsonl.gz"], "{tmp}/cut.jsonl.gz", "cut short"),
    "too little text": (["data.source={tmp}/short.txt"], "data.source: only one short text remains", "add text"),
    "samples longer than the text": (["data.sequence=90000"], "data.sequence = 90000", "or reduce data.sequence"),
    "a tokenizer that is too large": (["model.vocabulary=100"], "model.vocabulary 100 is smaller than", "257"),
    "a tokenizer that is not there": (["data.tokenizer={tmp}/none"], "data.tokenizer", "none"),
    "heads that do not divide": (["model.hidden=18"], "model.hidden 18 must be a multiple of model.heads 4", ""),
    "a model that is not there": (["model.family=lama"], 'unknown family "lama"', 'did you mean "llama"'),
    "a run directory that is a file": (["run.directory={tmp}/corpus.txt/run"], "{tmp}/corpus.txt is a file", ""),
    "a cache that cannot be written": (["data.cache={tmp}/corpus.txt/cache"], "data.cache", ""),
    "a rendezvous that is none": (["run.rendezvous=localhost"], "run.rendezvous", "tcp://HOST:PORT"),
    "validation without data for it": (["train.validate_every=2", "data.validation_fraction=0"], "validate_every", ""),
}


NEEDS_NO_DATA = {
    "a layout that does not divide the batch": ["layout=dp3"],
    "micro-batches that do not": ["layout=dp2 mb4"],
    "an axis that is not built": ["layout=dp2 offload:cpu"],
    "heads that do not divide": ["model.hidden=18"],
    "key-value heads that do not divide": ["model.kv_heads=3"],
    "heads of an odd size": ["model.head_dim=5"],
    "a family that only the planner knows": ["model.family=bloom"],
    "fewer positions than a sequence": ["model.max_positions=16"],
    "a vocabulary that no tokenizer fits": ["model.vocabulary=100", "data.tokenizer=bpe"],
}


@pytest.mark.parametrize("started_by", ["the command", "torchrun", "a call"])
@pytest.mark.parametrize("name", NEEDS_NO_DATA)
def test_mistakes_visible_without_data_are_refused_before_preparation(
    name, started_by, recipe, tmp_path, command_line, monkeypatch
):
    # The package that others import it from comes last: modules loaded by the first two must not import the stand-in.
    modules = ("training.loop.prepare", "training.start.launch", "data.prepare")
    for place in (f"meshwright.{name}" for name in modules):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("data were prepared, or ranks started"))
    overrides = NEEDS_NO_DATA[name]
    if started_by == "a call":
        with pytest.raises(UserError):
            training_start.launch_recipe(load_recipe(recipe, overrides))
        return
    if started_by == "torchrun":
        ranks = 3 if "layout=dp3" in overrides else 2 if "layout=" in overrides[0] else 1
        for key, value in {"RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(key, str(value))
    outcome = command_line("train", recipe, *overrides)
    assert (outcome.code, outcome.output, outcome.errors.count("\n")) == (2, "", 1), outcome.errors
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_line_before_anything_starts(name, recipe, tmp_path, command_line, nothing_starts):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("Too short.")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a line"}\n' * 500)[:-20])
    overrides, where, right = MISTAKES[name]
    outcome = command_line("train", recipe, *(override.format(tmp=tmp_path) for override in overrides))
    assert outcome.code == 2 and outcome.output == ""
    line = outcome.errors.splitlines()[-1]
    assert line.startswith("meshwright: error: ")
    assert where.format(tmp=tmp_path) in line and right in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_missing_or_mistyped_recipe_is_one_error_line(recipe, tmp_path, command_line, nothing_starts):
    outcome = command_line("train", tmp_path / "none.toml")
    assert (outcome.code, outcome.errors.count("\n")) == (2, 1) and "none.toml" in outcome.errors
    recipe.write_text(recipe.read_text().replace("learning_rate", "learning_rat"))
    outcome = command_line("train", recipe)
    assert outcome.code == 2
    line = f"meshwright: error: {recipe}: train.learning_rat: unknown key; did you mean train.learning_rate?"
    assert outcome.errors == f"{line}\n"


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--layout", '; write layout=VALUE, such as "layout=dp2 zero1"'),
        ("--train.learning-rate", "; write train.learning_rate=VALUE"),
        ("--restart", "; did you mean --restarts?"),
        ("--data", ""),  # a table has no value
    ],
)
def test_recipe_key_written_as_an_option_is_shown_as_an_override(recipe, option, advice, command_line, nothing_starts):
    outcome = command_line("train", recipe, option, "1")
    line = f"train: unknown option {option}{advice} (meshwright train --help shows an example)"
    assert (outcome.code, outcome.errors) == (2, f"meshwright: error: {line}\n")


def test_help_explains_stop_and_resume(command_line):
    text = " ".join(command_line("train", "--help").output.split())
    assert "SIGTERM and Ctrl-C finish the current step, save and stop, with exit code 143 or 130" in text
    assert "torchrun --nproc-per-node 2 -m meshwright train" in text and "--restarts" in text


def test_train_prints_one_document_and_progress_on_standard_error(recipe, tmp_path, command_line, monkeypatch):
    arguments = ("layout=dp2 zero1 fp32", "run.directory=new/parent/run")
    command = ("-m", "meshwright", "train", str(recipe), *arguments, "--json")
    ended = ForkedCommand(command, tmp_path)
    output, errors = ended.communicate(timeout=200)
    assert ended.returncode == 0, errors
    answer = json.loads(output)
    assert output.count("\n") == 1 and answer["schema"] == 1
    assert {"step", "loss", "tokens_per_second", "mfu", "predicted", "measured", "checkpoint"} <= answer.keys()
    assert (answer["step"], answer["checkpoint"]) == (4, "new/parent/run/checkpoints/step-000004")
    assert answer["tokens_per_second"] > 0 and 0 < answer["mfu"] < 1 and 4 < answer["loss"] < 7
    assert {"data.gradients", "data.parameters"} <= answer["measured"]["sent_bytes_per_step"].keys()
    assert answer["measured"]["sent_bytes_per_step"] == answer["predicted"]["sent_bytes_per_step"]
    directory = tmp_path / "new/parent/run"
    for said in ("layout: dp2 zero1 fp32 on 2 cpu processes x 1 thread\n", "step 4/4  loss "):
        assert errors.count(said) == 1
    assert json.loads((directory / "result.json").read_text()) == {k: v for k, v in answer.items() if k != "schema"}
    assert "[train]\nsteps = 4\n" in (directory / "recipe.resolved.toml").read_text()
    assert len(json.loads((directory / "ranks.json").read_text())) == 2

    monkeypatch.chdir(tmp_path)
    outcome = command_line("train", recipe, *arguments)  # again: the finished run is reported
    assert outcome.code == 0
    assert outcome.output.startswith(f"done: step 4, loss {answer['loss']:.4f}\n")
    assert "checkpoint: new/parent/run/checkpoints/step-000004" in outcome.output

    monkeypatch.setattr(training_start, "launch", lambda spec: pytest.fail("ranks were started"))
    outcome = command_line("train", recipe, *arguments, "train.batch=8")  # fixed keys are checked before that
    assert (outcome.code, outcome.errors.count("\n")) == (2, 1)
    assert 'override "train.batch=8": train.batch was 4 when this run began and is 8 now' in outcome.errors
    (tmp_path / "corpus.txt").write_text(TEXT.replace("fail", "FAIL"))
    outcome = command_line("train", recipe, *arguments)
    assert outcome.code == 2
    assert f"{recipe}: the text of data.source has changed since new/parent/run/" in outcome.errors.splitlines()[-1]


def test_missing_device_is_one_error_line(recipe, command_line, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    outcome = command_line("train", recipe, "run.device=cuda")
    assert outcome.code == 2
    assert 'device "cuda": this machine has no CUDA device' in outcome.errors.splitlines()[-1]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.mark.slow
def test_externally_started_ranks_join_and_only_rank_0_prints(recipe, tmp_path):
    """torchrun, two processes started by hand with an address, the launcher with a file: the same run continues through
    all of them."""
    arguments = ["-m", "meshwright", "train", str(recipe), "layout=dp2 zero1 fp32", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    ended = ForkedCommand([*torchrun, str(free_port()), *arguments, "train.steps=2"], tmp_path, environment)
    output, said = ended.communicate(timeout=200)
    assert ended.returncode == 0, said
    assert json.loads(output)["step"] == 2  # one document, not two
    assert said.count("layout: dp2 zero1 fp32 on 2 cpu processes") == 1
    assert len(json.loads((tmp_path / "run/ranks.json").read_text())) == 2

    place = f"run.rendezvous=tcp://127.0.0.1:{free_port()}"
    by_hand = [
        ForkedCommand(
            [*arguments, "train.steps=4", place, "run.threads=2"],
            tmp_path,
            environment | {"RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    outputs, errors = zip(*(process.communicate(timeout=200) for process in by_hand), strict=True)
    assert [process.returncode for process in by_hand] == [0, 0], errors
    assert json.loads(outputs[0])["step"] == 4 and outputs[1] == ""
    assert errors[0].count("threads per rank changed from 1 to 2: ") == 1 and "threads" not in errors[1]
    assert json.loads((tmp_path / "run/checkpoints/step-000004/training/state.json").read_text())["threads"] == 2
    assert "threads = 2\n" in (tmp_path / "run/recipe.resolved.toml").read_text()

    launched = ForkedCommand([*arguments, "train.steps=5", f"run.rendezvous=file://{tmp_path}/meeting"], tmp_path)
    output, said = launched.communicate(timeout=200)
    assert launched.returncode == 0, said
    assert json.loads(output)["step"] == 5 and "resumed from step-000004" in said
    # OMP_NUM_THREADS is 1 here: the run keeps its number, and so its bits.
    assert said.count("threads: keeping 2 per rank from the checkpoint") == 1 and "threads per rank changed" not in said
    assert "on 2 cpu processes x 2 threads\n" in said
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("stopped", "code"), [(Terminated("stopped by SIGTERM"), 143), (KeyboardInterrupt("^C"), 130)])
def test_only_rank_0_of_externally_started_ranks_reports_stop(recipe, command_line, monkeypatch, capsys, stopped, code):
    def join(*_: object, **__: object) -> None:
        raise stopped

    monkeypatch.setattr(worker, "train_as_rank", join)
    for key, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    outcome = command_line("train", recipe)
    assert outcome.code == code and outcome.errors == f"meshwright: {stopped}\n"
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        command_line("train", recipe)
    assert ended.value.code == code and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("layout", ["dp2", "auto"])
def test_busy_port_is_one_error_line_before_data_are_prepared(recipe, layout, command_line, monkeypatch):
    for place in ("meshwright.data.prepare", "meshwright.training.automatic.search_fastest_layout"):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("data were prepared, or a layout searched"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        outcome = command_line("train", recipe, f"layout={layout}", f"run.rendezvous=tcp://127.0.0.1:{port}")
    assert outcome.code == 2
    assert outcome.errors == (
        f"meshwright: error: run.rendezvous: port {port}, where the ranks are to meet (tcp://127.0.0.1:{port}), is in "
        "use by another program on rank 0's host; end that program or choose a free port\n"
    )


def test_busy_port_stays_unnamed_while_the_run_directory_is_in_use(recipe, tmp_path, command_line, monkeypatch):
    """A second start of the same run, whose port the first one uses, reports the process that holds the directory."""
    monkeypatch.setattr("meshwright.data.prepare", lambda *_, **__: pytest.fail("data were prepared"))
    with socket.socket() as other, RunDirectory(tmp_path / "run"):
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        outcome = command_line("train", recipe, f"run.rendezvous={address}", f"run.directory={tmp_path}/run")
    assert outcome.code == 2 and f"{tmp_path}/run is in use by process" in outcome.errors


def test_wrong_number_of_ranks_is_one_error_line(recipe, command_line, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    outcome = command_line("train", recipe, "layout=dp2")
    assert (outcome.code, outcome.output) == (2, "")
    assert 'layout "dp2" needs 2 ranks, but 3 were started (RANK=0 WORLD_SIZE=3)' in outcome.errors
