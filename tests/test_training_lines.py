"""README and documentation pages show lines of training runs: here they are compared with what the console prints for
their numbers, and the numbers with the recipe on the page, without training."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from meshwright.cli.train import _format_result
from meshwright.comm.mesh import Mesh
from meshwright.monitoring.journal import Journal
from meshwright.monitoring.records import StepOutcome, StepRecord, Validation
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.recipe import Recipe, resolve_recipe
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.parameters import parameter_table
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.learning_rate import learning_rate
from tests.documented_commands import Command, File, find_difference, read_page

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", REPOSITORY / "docs" / "tutorial.md"]
STEP = re.compile(
    r"step (?P<step>\d+)/\d+  loss (?P<loss>[\d.]+)  (?P<rate>[\d,]+) tokens/s  lr [\d.e-]+  grad norm (?P<norm>\S+)  "
    r"MFU (?P<mfu>[\d.]+)%  elapsed \d+:\d\d(?P<left>  ETA \d+:\d\d)?"
)
TIMES = re.compile(r"  elapsed .*")
VALIDATION = re.compile(r"step (\d+): validation loss ([\d.]+)")
DONE = re.compile(r"done: step (\d+), loss ([\d.]+)(?:, validation loss ([\d.]+))?")
RATE = re.compile(r"([\d,]+) tokens/s, MFU ([\d.]+)% of ([\d,]+) GFLOP/s .*")


def number(text: str) -> float:
    return float(text.replace(",", ""))


def replace_train(recipe: Recipe, **values: Any) -> Recipe:
    """The recipe with other values of keys of [train]."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=values)})


def documented_runs() -> list[Any]:
    """Command, recipe and number of training tokens of each documented run that shows lines, and True if its model is a
    new one."""
    found = []
    for page in PAGES:
        files: dict[str, str] = {}
        before: dict[str, Any] = {}
        tokens = 0
        for item in read_page(page):
            if isinstance(item, File):
                files[item.name] = item.text
                continue
            for line in item.shown:
                if packed := re.match(r"packed train: ([\d,]+) tokens", line):
                    tokens = int(number(packed[1]))
            if item.words[:2] == ["meshwright", "train"] and item.shown:
                tables = tomllib.loads(files[item.words[2]])
                fresh = "from" not in tables["model"]
                if fresh:
                    before = tables
                else:  # it starts from the checkpoint of the run before, with its tokenizer
                    tables["model"] = before["model"]
                    tables["data"] |= {name: before["data"][name] for name in ("tokenizer", "vocabulary")}
                overrides = [word for word in item.words[3:] if word != "&"]
                recipe = resolve_recipe(tables | {"run": {"name": Path(item.words[2]).stem}}, overrides)
                found.append(pytest.param(item, recipe, tokens, fresh, id=f"{page.stem}-{len(found)}"))
    return found


class Console:
    """Prints what a run prints for given numbers, with the run's own journal."""

    def __init__(self, recipe: Recipe, tokens: int, place: Path) -> None:
        """tokens: number of training tokens. place: run directory."""
        self.recipe, self.mesh = recipe, Mesh.single()
        self.mesh.world_size = recipe.parsed_layout.world_size
        config = config_from_recipe(recipe.model, recipe.data.sequence, recipe.data.vocabulary)
        task: Any = SimpleNamespace(
            config=config, recipe=recipe, table=parameter_table(config), model=nn.Module(), mesh=self.mesh,
            objective=SimpleNamespace(metric_names=(), teacher_work=None),
            tokens=SimpleNamespace(tokens=tokens), data=SimpleNamespace(format_packing_lines=lambda: ()),
        )  # fmt: skip
        self.run, self.vocabulary = LanguageModelTask.describe(task), config.vocabulary
        self.directory = RunDirectory(place)
        self.directory.create()

    def begin(self, resumed_from: str | None = None, peak: float | None = None) -> Journal:
        """Print what precedes the first step, and return the journal. resumed_from: name of a checkpoint. peak: FLOP/s
        of a device."""
        layout = self.recipe.parsed_layout
        done = int(resumed_from.rpartition("-")[2]) if resumed_from else 0
        journal = Journal(self.recipe, self.mesh, self.directory, show_progress=True)
        journal.begin(replace(self.run, peak_flops=peak), f"{layout} fp32", done, resumed_from, 1)
        return journal

    def bound_peak(self, rate: float, mfu: float) -> tuple[float, float]:
        """Lowest and highest FLOP/s of a device for which the console prints `mfu`, in percent, at `rate` tokens/s."""
        assert self.run.flops_per_unit is not None
        flops = rate * self.run.flops_per_unit / self.mesh.world_size
        return 100 * flops / (mfu + 0.05), 100 * flops / (mfu - 0.05)

    def print_step(self, step: int, figures: dict[str, float], validation: float | None = None) -> None:
        """Print a step with the recipe's learning rate. figures: "loss", "rate" in tokens/s, "norm" of the gradients,
        "mfu" in percent. validation: loss of a validation after the step."""
        rate = figures["rate"]
        journal = self.begin(peak=sum(self.bound_peak(rate, figures["mfu"])) / 2)
        outcome = StepOutcome(
            figures["loss"], figures["norm"], True, False, False, rank_seconds=[1.0] * self.mesh.world_size
        )
        record = StepRecord(
            step=step, outcome=outcome, learning_rate=learning_rate(step - 1, self.recipe.train), skipped_steps=0,
            validation=None if validation is None else Validation(validation), seconds_by_part={}, waiting_seconds=0.0,
            seconds=self.run.units_per_step / rate,
        )  # fmt: skip
        with journal:
            journal.progress.begin(step - 1)
            journal.record_step(record)


@pytest.mark.parametrize(("compiled", "done", "shown"), [(True, 0, 1), (True, 30, 31), (False, 0, 0), (True, 100, 0)])
def test_compilation_is_announced_before_its_step(
    compiled: bool, done: int, shown: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _, recipe, tokens, _ = documented_runs()[0].values
    recipe = replace_train(recipe, compile=compiled, steps=100)
    prediction: Any = SimpleNamespace(format_lines=lambda: ["predicted: ..."], to_json_dict=dict)
    with Console(recipe, tokens, tmp_path).begin(f"step-{done:06}" if done else None) as journal:
        journal.begin_steps(done, prediction)
    lines = [line for line in capsys.readouterr().err.splitlines() if "compil" in line]
    announced = [f"compiling during step {shown}, which takes longer than the others (train.compile)"]
    assert lines == (announced if shown else [])


@pytest.mark.parametrize(("command", "recipe", "tokens", "fresh"), documented_runs())
def test_training_lines_are_those_of_console_and_recipe(
    command: Command, recipe: Recipe, tokens: int, fresh: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def read_printed() -> list[str]:
        """Lines printed since the last call."""
        return capsys.readouterr().err.splitlines()

    console = Console(recipe, tokens, tmp_path)
    resumed = [line.split()[2].rstrip(":") for line in command.shown if line.startswith("resumed from")]
    with console.begin(*resumed):
        printed = read_printed()
    shown = [line for line in command.shown if line.startswith(("model:", "layout:", "data:", "resumed from"))]
    assert [line for line in printed if line in shown] == shown

    peaks, losses, validations = [], {}, {}
    for line in command.shown:
        if match := STEP.fullmatch(line):
            figures = {name: number(match[name]) for name in ("loss", "rate", "norm", "mfu")}
            step = int(match["step"])
            console.print_step(step, figures)
            assert TIMES.sub("", read_printed()[-1]) == TIMES.sub("", line)
            assert bool(match["left"]) == (step < recipe.train.steps)
            peaks.append(console.bound_peak(figures["rate"], figures["mfu"]))
            losses[step] = figures["loss"]
        elif match := VALIDATION.fullmatch(line):
            step, loss = int(match[1]), float(match[2])
            console.print_step(step, dict.fromkeys(("loss", "rate", "norm", "mfu"), 1.0), loss)
            assert line in read_printed() and step % recipe.train.validate_every == 0
            validations[step] = loss
        else:
            assert not line.startswith(("step ", "done:")) or DONE.fullmatch(line), line
    if fresh and 1 in losses:
        assert losses[1] == pytest.approx(math.log(console.vocabulary), abs=0.2)  # a uniform guess

    for line in filter(DONE.fullmatch, command.shown):
        step, loss, validation = (None if text is None else float(text) for text in DONE.fullmatch(line).groups())
        assert step == recipe.train.steps
        assert (
            losses.get(step, loss) == pytest.approx(loss, abs=5.1e-4)
            and validations.get(step, validation) == validation
        )
        result = {
            "step": recipe.train.steps, "loss": loss, "validation_loss": validation, "skipped_steps": 0,
            "tokens_per_second": None, "best_checkpoint": None,
            "checkpoint": recipe.run_directory / "checkpoints" / f"step-{recipe.train.steps:06}",
        }  # fmt: skip
        for match in filter(None, map(RATE.fullmatch, command.shown)):
            rate, mfu, peak = map(number, match.groups())
            result |= {"tokens_per_second": rate, "mfu": mfu / 100, "peak_flops_per_device": 1e9 * peak}
            peaks += [console.bound_peak(rate, mfu), (1e9 * (peak - 0.5), 1e9 * (peak + 0.5))]
        ending = command.shown[command.shown.index(line) :]
        assert find_difference(ending, _format_result(result).splitlines(), exact=True) is None
    if peaks:  # throughput and MFU of all lines have the same peak
        assert max(low for low, _ in peaks) <= min(high for _, high in peaks)


def test_tutorial_derives_the_peak_from_the_first_step(tmp_path: Path):
    """Section 2 of the tutorial shows no line with the peak, as its run is killed."""
    command, recipe, tokens, _ = next(run.values for run in documented_runs() if run.id.startswith("tutorial"))
    console = Console(recipe, tokens, tmp_path)
    step = next(match for match in map(STEP.fullmatch, command.shown) if match)
    lowest, highest = console.bound_peak(number(step["rate"]), float(step["mfu"]))
    text = (REPOSITORY / "docs" / "tutorial.md").read_text()
    said = re.search(r"here (\d+) GFLOP/s per process \(a token takes ([\d.]+) MFLOPs, and ([\d,]+) × \2 MFLOP/s", text)
    assert said and said[3] == step["rate"]
    assert lowest - 0.5e9 <= 1e9 * float(said[1]) <= highest + 0.5e9
    assert float(said[2]) == pytest.approx(console.run.flops_per_unit / 1e6, abs=5e-4)
