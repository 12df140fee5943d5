"""User modules: every layout computes what plain torch computes on one device, with the predicted traffic and memory,
and an interrupted run ends where an undisturbed one does."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint import checkpointer, find_newest, verify_checkpoint
from meshwright.comm import backend
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.monitoring.report import write_report
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.parallel.module.table import describe_module
from meshwright.training.module import fit, load
from meshwright.training.module.recipe import make_module_recipe
from meshwright.training.module.run import ModuleRun
from meshwright.training.module.values import UntrainedTensors
from tests.emulation.streams import StreamRanks
from tests.monitoring.test_profile import Trace, read
from tests.training import module_cases as cases

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def plain():
    found = {}

    def of(name: str):
        if name not in found:
            found[name] = cases.plain(name)
        return found[name]

    return of


def assert_same(name: str, outcomes, expected) -> None:
    losses, norms, parameters = expected
    for outcome in outcomes:
        assert outcome["losses"] == pytest.approx(losses, rel=1e-12), name
        assert outcome["norms"] == pytest.approx(norms, rel=1e-11), name
    found = cases.assembled(outcomes, parameters)
    scale = max(value.abs().max().item() for value in parameters.values())
    for key, value in parameters.items():
        assert (found[key] - value).abs().max().item() <= 1e-12 * scale, (name, key)


LAYOUTS = ["dp2", "dp2 zero1", "dp2 zero2 mb2", "dp2 zero3", "dp2 zero3 mb4"]
LARGE = ("compiled", "bert", "t5")  # trained on two layouts, as each step takes long


@pytest.mark.parametrize("name", cases.MODULES)
def test_every_layout_matches_plain_torch(name, two, plain):
    for layout in LAYOUTS[1::3] if name in LARGE else LAYOUTS:
        outcomes = two.run(cases.train_on_ranks, name, layout)
        assert_same(f"{name} {layout}", outcomes, plain(name))
        for outcome in outcomes:
            assert outcome["sent"] == outcome["predicted_sent"], layout
            assert outcome["memory"] == outcome["predicted_memory"], layout


def test_four_ranks_in_two_groups_match_plain_torch(four, plain):
    for layout in ("dp4 zero3", "dp4 zero3 hs2 mb2", "dp4 zero1 hs2"):
        outcomes = four.run(cases.train_on_ranks, "tied", layout)
        assert_same(layout, outcomes, plain("tied"))
        assert all(outcome["sent"] == outcome["predicted_sent"] for outcome in outcomes), layout


def test_reused_and_directly_accessed_units_stay_gathered(two):
    outcomes = two.run(cases.train_on_ranks, "outside", "dp2 zero3")
    assert outcomes[0]["units"] == tuple(f"layers.{number}" for number in range(4))
    assert outcomes[0]["held"] == {"layers.0", "layers.1", "layers.2"} == outcomes[1]["held"]


def test_evaluation_may_use_units_outside_the_loss(two):
    for found, whole, held in two.run(cases.evaluated_elsewhere):
        assert found == pytest.approx(whole, rel=1e-12) and held == {"layers.2"}


def test_fsdp_units_are_list_items_or_large_modules():
    assert describe_module(cases.Tied()).table.units == ("(rest)", *(f"blocks.{number}" for number in range(4)))
    assert describe_module(cases.convolution()).table.units == ("(rest)", "0", "4")
    assert describe_module(cases.Recurrent()).table.units == ("(rest)", "lstm")


def test_script_may_choose_the_units():
    assert describe_module(cases.Tied(), lambda name, module: name == "blocks.1").table.units == ("(rest)", "blocks.1")


# --- interrupted runs


def state_of(outcomes):
    """Return all slices of all ranks by (kind, name, start)."""
    return {tuple(piece[:4]): piece[4] for outcome in outcomes for piece in outcome["pieces"]}


def assert_equal_states(outcomes, expected) -> None:
    found, wanted = state_of(outcomes), state_of(expected)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


@pytest.fixture(scope="module")
def undisturbed(two, tmp_path_factory):
    place = tmp_path_factory.mktemp("undisturbed")
    return place, two.run(cases.run, str(place), "dp2 zero3")


def test_killed_run_resumes_bit_for_bit(two, undisturbed, tmp_path):
    two.run(cases.run, str(tmp_path), "dp2 zero3", 5)  # after the checkpoint of step 4
    assert find_newest(tmp_path / "checkpoints").step == 4
    outcomes = two.run(cases.run, str(tmp_path), "dp2 zero3")
    assert_equal_states(outcomes, undisturbed[1])
    lines = [[json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
             for place in (tmp_path, undisturbed[0])]  # fmt: skip
    losses = [[(line["step"], line["loss"]) for line in found if "loss" in line] for found in lines]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_run_resumes_on_another_layout_with_next_samples(two, undisturbed, tmp_path):
    """Dropout is drawn per micro-batch, whose samples are the same here; sums are in another order."""
    two.run(cases.run, str(tmp_path), "dp2 zero3", 5)
    (outcome,) = [cases.run(str(tmp_path), "dp1 mb2")]
    whole = state_of([outcome])
    for (kind, name, start, stop), value in state_of(undisturbed[1]).items():
        other = next(
            part[start - low : stop - low]
            for (what, of, low, high), part in whole.items()
            if (what, of) == (kind, name) and low <= start and stop <= high
        )
        if "running" not in name and value.is_floating_point():
            assert torch.allclose(other, value, rtol=1e-3, atol=1e-5), (kind, name)


def test_checkpoint_contains_whole_module(two, undisturbed):
    place, outcomes = undisturbed
    checkpoint = find_newest(place / "checkpoints")
    verify_checkpoint(checkpoint.path)
    module = load(cases.Noisy(), place)
    assert module.layers[0][1].num_batches_tracked == 6
    accuracy = (
        sum(int(module.eval()(x[None]).argmax() == y) for x, y in ((x, y) for x, y in list.__iter__(cases.NOISY[:10])))
        / 10
    )
    result = outcomes[0]["result"]
    assert abs(result["validation_accuracy"] - accuracy) <= 0.11  # its samples are random
    assert result["predicted"]["sent_bytes_per_step"] == result["measured"]["sent_bytes_per_step"]
    assert result["predicted"]["state_bytes"] == result["measured"]["state_bytes"]


def test_module_report_counts_samples(undisturbed):
    page = write_report(undisturbed[0]).read_text()
    assert "samples per second (median)" in page and "tokens" not in page.partition("<h2>Recipe")[0]


def test_running_statistics_are_the_mean_over_the_ranks(two, undisturbed):
    buffers = [
        {piece[1]: piece[4] for piece in outcome["pieces"] if "running" in piece[1]} for outcome in undisturbed[1]
    ]
    assert buffers[0] and not buffers[1]  # rank 0 writes them
    assert two.run(cases.statistics_of_one_step) == [True, True]


# --- profile, metrics and trackers


def test_fit_writes_profile_and_tracks_figures(two, undisturbed, tmp_path):
    outcomes = two.run(cases.profiled_and_tracked, str(tmp_path))
    assert_equal_states(outcomes, undisturbed[1])  # no result changes
    [directory] = (tmp_path / "profile").iterdir()
    trace = Trace(read(directory / "all-ranks.json.gz"))
    assert list(trace.processes.values()) == ["rank 0", "rank 1"]
    for rank in (0, 1):
        assert [event["name"] for event in trace.steps(rank)] == ["F0", "B0", "F0", "B0"]
        outer = [name for name, kind, _ in trace.of(f"rank {rank}: steps") if kind == "step"]
        assert outer == ["step 3", "step 4"]
        calls = {event["name"] for event in trace.calls(rank)}
        assert calls >= {"data.targets", "data.parameters", "data.gradients", "module.buffers", "step.verdict"}

    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in metrics if "loss" in line]
    assert [line["step"] for line in steps if line.get("profiled")] == [3, 4]
    assert all(line["samples_per_second"] == pytest.approx(cases.BATCH / line["seconds"]) for line in steps)
    result = outcomes[0]["result"]
    measured = [line["samples_per_second"] for line in steps if not line.get("profiled")]
    assert result["samples_per_second"] == statistics.median(measured)
    for known in (*steps, result):
        assert not known.keys() & {"tokens_per_second", "mfu", "flops_per_token", "flops_convention"}
    validated = [line for line in steps if "validation_loss" in line]
    assert [line["step"] for line in validated] == [2, 3, 4, 6]  # every third, and those saved
    assert all(0 <= line["validation_accuracy"] <= 1 for line in validated)
    assert result["validation_accuracy"] == validated[-1]["validation_accuracy"]

    tracked = [json.loads(line) for line in (tmp_path / "tracked.jsonl").read_text().splitlines()]
    assert tracked[0]["recipe"]["layout"] == "dp2 zero3 fp32" and tracked[0]["recipe"]["train.batch"] == cases.BATCH
    assert not any(key.startswith(("model.", "data.")) for key in tracked[0]["recipe"])
    assert tracked[-1] == {"status": "finished"}
    figures = [(line["step"], line["values"]) for line in tracked[1:-1]]
    for line in steps:
        (values,) = [values for step, values in figures if step == line["step"] and "loss" in values]
        for key in ("loss", "samples_per_second", "validation_loss", "validation_accuracy"):
            assert values.get(key) == line.get(key)
    assert figures[-1][1]["checkpoint"].endswith("step-000006")


# --- mistakes


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"track": {"to": ["tensorbord"]}}, 'unknown tracker "tensorbord"; did you mean "tensorboard"'),
        ({"train": {"profile": "2", "profile_ranks": [1]}}, "there is no rank 1"),
        ({"train": {"cuda_graphs": True}}, "train.cuda_graphs is for built-in models"),
        ({"train": {"tensor_overlap": "chunks"}}, "train.tensor_overlap is for built-in models"),
        ({"measures": {"loss": len}}, "give the measure another name"),
    ],
)
def test_mistakes_are_refused_before_ranks_start(tables, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = {"steps": 2, "batch": 2, "learning_rate": 0.01} | tables.get("train", {})
    wanted = {"layout": "dp1", "train": train, "track": tables.get("track", {})}
    with pytest.raises(UserError, match=said):
        fit(cases.Noisy, cases._classes, cases.NOISY, recipe=wanted, measures=tables.get("measures"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 6, "batch": 5}, "train.batch = 5 samples is not a multiple of dp x mb = 2"),
        ({"stepz": 6}, "train.stepz"),
    ],
)
def test_mistake_is_one_line(change, said):
    with pytest.raises(UserError, match=said):
        found = cases.recipe("dp2", **change)
        cases.refuse_for_module(found.parsed_layout, found.train.batch)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2", "dp2 ac:full"])
def test_features_of_built_in_models_are_refused_for_user_modules(layout):
    with pytest.raises(UserError, match="your own module"):
        cases.refuse_for_module(cases.Layout.parse(layout), 8)


def test_another_module_or_other_data_are_refused(two, undisturbed, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(undisturbed[0], place)
    for case, said in (("wider", "holds another module: head.bias"), ("fewer samples", "the data had 21 samples")):
        with pytest.raises(UserError, match=said):
            two.run(cases.refused, str(place), case)
    with pytest.raises(UserError, match="rank 1 built another module than rank 0"):
        two.run(cases.refused, str(tmp_path / "new"), "by rank")
    with pytest.raises(UserError, match="must be a floating-point scalar tensor"):
        two.run(cases.refused, str(tmp_path / "loss"), "loss of many")


# --- precision


def test_half_precision_keeps_masters_and_scales_the_loss(two, tmp_path):
    for layout in ("dp2 zero3 bf16", "dp2 zero1 fp16"):
        outcome = two.run(cases.run, str(tmp_path / layout), layout)[0]
        states = outcome["result"]["measured"]["state_bytes"]
        assert states == outcome["result"]["predicted"]["state_bytes"] and states["masters"] > 0
        lines = [json.loads(line) for line in (tmp_path / layout / "metrics.jsonl").read_text().splitlines()]
        assert all(("loss_scale" in line) == ("fp16" in layout) for line in lines if "loss" in line)


class Counting(torch.nn.Module):
    """Module whose forwards count in a buffer and, if it has one, in a frozen parameter."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(4))
        self.average = torch.nn.Parameter(torch.zeros(2), requires_grad=False) if frozen else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in (self.seen, self.average):
            if each is not None:
                each.detach().add_(1)
        return self.layer(x)


class LateThread:
    """Thread that begins to `run` when it is first asked whether it has ended, as late as is possible."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def join(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run()

    def is_alive(self) -> bool:
        self.join()
        return False


def count_forwards(directory: Path, frozen: bool) -> tuple[list[dict[str, list[float]]], float]:
    """Train a `Counting` with a checkpoint after each of three steps. Return what each checkpoint holds of the numbers
    of forwards; the simulated time for which the stream waited between saves and the forwards that follow."""
    stream: Any = backend.current_stream(torch.device("cpu"))
    tables = {"run": {"directory": str(directory)}, "checkpoint": {"every": 1, "keep": 3}}
    data = [(torch.ones(3) * number, torch.ones(2)) for number in range(4)]
    build, loss = partial(Counting, frozen), lambda net, pair: (net(pair[0]) - pair[1]).square().mean()
    spec = cases.module_spec("lstm", build=build, data=data, loss=loss)
    train = {"steps": 3, "batch": 2, "learning_rate": 0.1}
    recipe, waited = make_module_recipe({"layout": "fp32", "train": train, **tables}), [0.0]
    with closing(Mesh.create(recipe.parsed_layout)) as mesh:
        run = ModuleRun(recipe, mesh, RunDirectory(directory), spec, show_progress=False)
        save = run._save

        def timed(validation_loss: float | None) -> None:
            before = stream.device
            save(validation_loss)
            waited.append(stream.device - before)

        late = mock.patch.object(checkpointer, "start_thread", lambda write, *_: LateThread(write))
        with late, mock.patch.object(run, "_save", timed):
            run.run()
    files = sorted(directory.glob("checkpoints/step-*/model.safetensors"))
    held = [{name: each.unique().tolist() for name, each in load_file(file).items()} for file in files]
    return [{name: each[name] for name in each if "layer" not in name} for each in held], sum(waited)


def test_only_buffers_that_a_checkpoint_holds_are_cloned_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    module, clone, cloned = Counting(frozen=True), torch.Tensor.clone, list[int]()
    module.register_buffer("derived", torch.ones(5))
    monkeypatch.setattr(backend, "current_stream", lambda device: object())
    monkeypatch.setattr(torch.Tensor, "clone", lambda each: cloned.append(each.numel()) or clone(each))
    slices = UntrainedTensors(module, Mesh.single()).slices({"seen", "average"}, owned=True)
    assert {each.name for each in slices} == {"seen", "average"} and cloned == [module.seen.numel()]


@pytest.mark.parametrize("frozen", [False, True])
def test_checkpoints_hold_what_later_forwards_of_a_module_change(frozen: bool, tmp_path: Path):
    """Forwards begin during the copies of a save, unless these are of frozen parameters."""
    with StreamRanks(1) as ranks:
        ((held, waited),) = ranks.run(count_forwards, tmp_path, frozen)
    names = ("average", "seen") if frozen else ("seen",)
    assert held == [{name: [step] for name in names} for step in (1, 2, 3)]
    assert (waited > 0) == frozen
