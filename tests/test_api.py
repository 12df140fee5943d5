"""The public functions of `meshwright`: lazy imports, documented examples, the commands' JSON, and one-line
errors."""

from __future__ import annotations

import ast
import doctest
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from tests.conftest import TINY_RECIPE, Outcome
from tests.forked_commands import ForkedCommand

TEXT = "".join(f"def answer_{number}():\n    return {number}\n" for number in range(300))
TRAINING = ("train.steps=2", "run.directory=runs/tiny", "layout=dp1 mb2")


def run_examples(function: Any) -> None:
    """Run the examples in the docstring of a function; each prints its documented output."""
    [test] = doctest.DocTestFinder(recurse=False).find(function, globs={})
    assert test.examples, f"{function.__qualname__} has no example"
    report: list[str] = []
    failed, _ = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not failed, "".join(report)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current directory, with the recipe and the text of the examples."""
    directory = tmp_path_factory.mktemp("api")
    (directory / "text.txt").write_text(TEXT)
    recipe = TINY_RECIPE.replace('"stdlib"', '"text.txt"\ncache = "cache"')
    (directory / "tiny.toml").write_text(recipe)
    before = Path.cwd()
    os.chdir(directory)
    yield directory
    os.chdir(before)


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """Run directory of the `train` example."""
    run_examples(mw.train)
    return place / "runs" / "tiny"


# --- names


def test_import_is_instant_and_loads_no_torch():
    names = sorted({*mw.__all__} - {"Generation", "fit"})  # these two are of modules that need torch
    program = f"""
import sys, time
before = time.process_time()
import meshwright as mw
assert time.process_time() - before < 0.1
assert not any(name.startswith("meshwright.") for name in sys.modules)
for name in {names!r}:
    getattr(mw, name)
assert "torch" not in sys.modules
"""
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


def test_stub_types_every_name():
    stub = ast.parse((Path(mw.__file__).parent / "__init__.pyi").read_text())
    modules = {
        alias.asname: str(node.module).removeprefix("meshwright.")
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert modules == mw._MODULES
    assert set(mw.__all__) == {*modules, "__version__"} <= set(dir(mw))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        mw.trian  # noqa: B018


# --- examples


@pytest.mark.parametrize("function", [mw.plan, mw.schedule, mw.collective, mw.explain], ids=lambda each: each.__name__)
def test_docstring_examples_run(function: Any, place: Path):
    run_examples(function)


def test_verify_example_runs_as_documented(monkeypatch: pytest.MonkeyPatch):
    from meshwright.verification import cases

    every = cases.CaseBuilder.make_default_cases
    monkeypatch.setattr(
        cases.CaseBuilder, "make_default_cases", lambda maker: every(maker)[:1]
    )  # the others take most of the time
    run_examples(mw.verify)


@pytest.mark.parametrize(
    "function", [mw.evaluate, mw.load, mw.Model.generate, mw.Model.stream], ids=lambda each: each.__name__
)
def test_examples_with_trained_model_run_as_documented(function: Any, trained: Path):
    run_examples(function)


def test_fit_example_runs_in_script(place: Path):
    program = "import meshwright as mw; from tests.test_api import run_examples; run_examples(mw.fit)"
    script = ForkedCommand(["-c", program], place)
    output, errors = script.communicate()
    assert script.returncode == 0, output + errors


# --- equality with the commands


def answer(command_line: Callable[..., Outcome], *arguments: object) -> dict[str, Any]:
    outcome = command_line(*arguments, "--json")
    assert outcome.code == 0, outcome.errors
    document: dict[str, Any] = json.loads(outcome.output)
    return document


def test_plan_of_a_layout_equals_the_command(command_line):
    options = "gpt2 --cluster 8xa100-40 --layout dp8 --sequence 1024 --batch 64 --engine megatron --explain --ledger"
    plan = mw.plan("gpt2", "8xa100-40", "dp8", sequence=1024, batch=64, engine="megatron")
    document = answer(command_line, "plan", *options.split())
    assert plan.to_json_dict(ledger=True, operations=True) == document
    assert plan.layouts == document["layouts"] and plan.search is None and plan.best.fits


def test_searched_plan_of_a_recipe_equals_the_command(command_line, place: Path):
    plan = mw.plan("tiny.toml", "2xa100-40", top=2)
    document = answer(command_line, "plan", "tiny.toml", "--cluster", "2xa100-40", "--top", 2)
    assert plan.to_json_dict() | {"search_seconds": 0} == document | {"search_seconds": 0}
    assert len(plan.layouts) == len(plan.estimates) == 2 and "recipe_layout" in document


def test_plan_without_a_fitting_layout_has_no_best():
    plan = mw.plan("llama-3-8b", "1xa100-40", sequence=2048, batch=1)
    assert plan.layouts == [] and plan.nearest is not None and not plan.nearest.least.fits
    with pytest.raises(mw.UserError, match="no layout of 1 device fits"):
        _ = plan.best


def test_schedule_equals_the_command(command_line):
    report = mw.schedule("zb-h1", 4, 8, forward=[1.0, 1.0, 1.0, 1.5], transfer=0.1)
    options = "zb-h1 --stages 4 --microbatches 8 --forward 1,1,1,1.5 --transfer 0.1"
    assert report.to_json_dict() | {"files": {}} == answer(command_line, "schedule", *options.split())


def test_collective_equals_the_command(command_line):
    report = mw.collective("all-reduce", "ring", 4, "1MiB", topology="nodes:2x2", latency=2e-6)
    options = "all-reduce ring --ranks 4 --bytes 1MiB --topology nodes:2x2 --latency 2us"
    assert report.to_json_dict() | {"files": {}} == answer(command_line, "collective", *options.split())
    assert report.timing.seconds > report.lower_bound_seconds > 0


def test_train_equals_the_command(command_line, trained: Path, monkeypatch: pytest.MonkeyPatch):
    document = json.loads((trained / "result.json").read_text())
    monkeypatch.setattr("meshwright.training.api.launch_recipe", lambda recipe, **_: document)
    result = mw.train("tiny.toml", list(TRAINING))
    assert result.to_json_dict() == answer(command_line, "train", "tiny.toml", *TRAINING)
    assert (result.step, result.run_directory) == (2, Path("runs/tiny"))
    assert isinstance(result.loss, float) and isinstance(result.mfu, float) and isinstance(result.checkpoint, Path)
    assert result.predicted["state_bytes"] == result.measured["state_bytes"] and result.tokens_per_second is not None


def test_train_accepts_file_tables_or_recipe(trained: Path, monkeypatch: pytest.MonkeyPatch):
    import tomllib

    from meshwright.recipe import load_recipe

    document, seen = json.loads((trained / "result.json").read_text()), []
    monkeypatch.setattr("meshwright.training.api.launch_recipe", lambda recipe, **_: seen.append(recipe) or document)
    overrides = {"train.steps": 2, "run.directory": trained, "run.name": "tiny", "checkpoint.every": 2}
    tables = tomllib.loads(Path("tiny.toml").read_text())
    for recipe in (Path("tiny.toml"), tables, load_recipe("tiny.toml")):
        mw.train(recipe, overrides, layout=mw.Layout(micro_batches=2))
    assert seen[0] == seen[1] == seen[2] and (seen[0].layout, seen[0].train.steps) == ("mb2", 2)
    assert tables == tomllib.loads(Path("tiny.toml").read_text())


def test_verify_equals_the_command(command_line, monkeypatch: pytest.MonkeyPatch):
    from meshwright.verification import run

    worst = {"name": "loss", "relative_error": 0.5, "layout": "dp2"}
    document = {
        "passed": False, "dtype": "float64", "tolerance": 1e-10, "worst": worst, "loss_error": 0.5,
        "gradient_norm_error": 0.0, "failure": None, "layouts": [{"layout": "dp2", "passed": True}],
        "mutations": {"planted": 2, "caught": 0, "neutral": 0, "missed": ["a", "b"], "faults": []}, "seconds": 1.0,
    }  # fmt: skip
    monkeypatch.setattr(run, "run_verification", lambda *_, **__: document)
    found = mw.verify("dp2", mutate=True)
    outcome = command_line("verify", "--layout", "dp2", "--mutate", "--json")
    assert found.to_json_dict() == json.loads(outcome.output) and outcome.code == 1
    assert found.failure == "not detected: a (and 1 more)" and found.failure in outcome.errors
    assert not found.passed and found.worst == worst and found.loss_error == 0.5


def test_evaluate_equals_the_command(command_line, trained: Path):
    found = mw.evaluate("runs/tiny", "text.txt", device="cpu", sequence=16)
    document = answer(
        command_line, "evaluate", "runs/tiny", "--data", "text.txt", "--device", "cpu", "--sequence", "16"
    )
    assert found.to_json_dict() == document
    assert found.sequence == 16 and found.xz_bits_per_byte is not None and found.checkpoint.name == "step-000002"


def test_generate_equals_the_command(command_line, trained: Path):
    model = mw.load("runs/tiny", device="cpu")
    found = model.generate("import ", max_tokens=5, temperature=0.9, seed=3)
    options = (
        "runs/tiny",
        "--prompt",
        "import ",
        *["--max-tokens", "5", "--temperature", "0.9", "--seed", "3", "--device", "cpu"],
    )
    timing = {"seconds_to_first_token": 0, "tokens_per_second": 0}
    assert found.to_json_dict() | timing == answer(command_line, "generate", *options) | timing
    assert len(found.tokens) == 5 and found.checkpoint == model.directory


def test_model_on_ranks_generates_and_streams_as_one_process(trained: Path):
    one, two = mw.load("runs/tiny", device="cpu"), mw.load("runs/tiny", "pp2")
    assert mw.load("runs/tiny", "pp1", device="cpu").layout is None and str(two.layout) == "pp2"
    stop = one.generate("def ", max_tokens=12).text[3:5]
    options = {"max_tokens": 12, "n": 2, "stop": stop, "logprobs": 0}
    for mine, other in zip(*(model.generate(["def ", "return "], **options) for model in (one, two)), strict=True):
        assert (mine.tokens, mine.text, mine.stopped) == (other.tokens, other.text, other.stopped)
        assert [answer.text for answer in mine.others] == [mine.text] == [answer.text for answer in other.others]
        assert len(other.logprobs) == len(other.tokens)
    assert one.generate("def ", **options).stopped == "stop"
    pieces = two.stream("def ", max_tokens=4)
    assert "".join(pieces) == pieces.generation.text == one.generate("def ", max_tokens=4).text
    next(iter(two.stream("def ", max_tokens=4)))  # abandoned stream: the ranks end, and nothing hangs


# --- errors


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: mw.train("tiny.toml", {"train.stesp": 2}), "train.stesp: unknown key; did you mean train.steps?"),
        (lambda: mw.train("tiny.toml", {"train.steps": "2"}), 'train.steps: should be a whole number, at least 1, not'),
        (lambda: mw.train("tiny.toml", {"train.steps": None}), "override train.steps: takes a value of TOML, not None"),
        (lambda: mw.train("tiny.toml", "train.steps=2"), "overrides: takes a mapping"),
        (lambda: mw.train("none.toml"), "none.toml"),
        (lambda: mw.train(3), "recipe: takes a file, tables or a Recipe, not 3"),
        (lambda: mw.train({"model": {}}), "recipe: "),
        (lambda: mw.train("tiny.toml", layout="dp1 zreo1"), "zreo1"),
        (lambda: mw.plan("gpt3", "8xa100-40", sequence=1, batch=1), 'unknown model "gpt3"'),
        (lambda: mw.plan(8, "8xa100-40", sequence=1, batch=1), "model: takes a preset"),
        (lambda: mw.plan("gpt2", "8xa100-40", batch=1), "sequence is missing: sequence length in tokens"),
        (lambda: mw.plan("gpt2", "8xa100-40", sequence="4", batch=1), "sequence: takes a whole number, at least 1"),
        (lambda: mw.plan("gpt2", "8xa100-40", sequence=4, batch=1, top=0), "top: takes a whole number from 1 to 100"),
        (
            lambda: mw.plan("gpt2", "8xa100-40", sequence=4, batch=1, engin="megatron"),
            'plan: unknown option "engin"; did you mean "engine"?',
        ),
        (lambda: mw.schedule("1f1c", 2, 4), 'unknown schedule "1f1c"; did you mean "1f1b"?'),
        (lambda: mw.schedule("1f1b", 2), "schedule 1f1b: micro_batches missing"),
        (lambda: mw.schedule("1f1b", 2, 4, foward=2), 'unknown option "foward"; did you mean "forward"?'),
        (lambda: mw.schedule("1f1b", 2, microbatches=4), 'option "microbatches"; did you mean "micro_batches"?'),
        (lambda: mw.schedule("1f1b", 2, 4, parts=(1, 1, 1, 1), forward=2), "leave out forward"),
        (lambda: mw.schedule("1f1b", 2, 4, memory=3), "only auto searches within a memory limit"),
        (lambda: mw.explain("zero-memroy"), 'unknown example "zero-memroy"; did you mean "zero-memory"?'),
        (lambda: mw.collective("all-redcue", "ring", 4, 16), 'did you mean "all-reduce"?'),
        (lambda: mw.collective("all-reduce", "ring", 4, "16 parsecs"), 'bytes: "16 parsecs" is not a size'),
        (lambda: mw.collective("all-reduce", "ring", 4, 16, segmnts=2), 'did you mean "segments"?'),
        (lambda: mw.verify("dp2", dtype="float46"), 'unknown dtype "float46"; did you mean "float64"?'),
        (lambda: mw.verify("dp0"), "dp0"),
        (lambda: mw.evaluate("nowhere", "text.txt"), "nowhere: no such directory"),
        (lambda: mw.evaluate("nowhere", "text.txt", layout="pp2", device="cuda"), "leave one of them out"),
        (lambda: mw.evaluate("nowhere", "text.txt", with_xzz=False), 'did you mean "with_xz"?'),
        (lambda: mw.load("nowhere"), "nowhere: no such directory"),
        (lambda: mw.load("nowhere", dtype="float8"), 'unknown dtype "float8"'),
        (lambda: mw.load("nowhere", device="gpu"), 'unknown device "gpu"'),
    ],
)  # fmt: skip
def test_mistake_is_one_line(call: Callable[[], object], said: str, place: Path):
    with pytest.raises(mw.UserError) as caught:
        call()
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_prompt_is_one_line(trained: Path):
    model = mw.load("runs/tiny", device="cpu")
    with pytest.raises(mw.UserError, match="prompt: takes a text or a list of token IDs, not int"):
        model.generate([3])  # type: ignore[list-item]
    with pytest.raises(mw.UserError, match="temperature -1: should be greater than or equal to 0"):
        model.stream("def ", temperature=-1)
