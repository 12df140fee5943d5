"""Training end to end: the model learns, every layout learns the same, and an interrupted run ends where an undisturbed
one does, bit for bit."""

from __future__ import annotations

import copy
import gc
import json
import math
import re
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from meshwright.checkpoint import find_best, find_newest, verify_checkpoint
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.data import prepare
from meshwright.errors import CheckFailed, UserError
from meshwright.layout import Layout
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.probe import communication
from meshwright.recipe import load_recipe_text
from meshwright.spec.initial_values import INITIAL_VALUES_VERSION
from meshwright.training import loop
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.loss_scale import LossScale
from meshwright.training.preference import Preferences
from meshwright.training.preference_loss import Preference
from meshwright.training.trainer import Trainer
from tests.conftest import covering, exhaustive, list_axes
from tests.training import checkpoint_cases
from tests.training import training_cases as cases


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Directory of runs and of their shared cache."""
    return tmp_path_factory.mktemp("training")


def steps(place: Path) -> list[dict]:
    return [line for line in cases.metrics(place) if "loss" in line]


def events(place: Path, name: str) -> list[dict]:
    return [line for line in cases.metrics(place) if line.get("event") == name]


# --- learning, compared with transformers


@pytest.fixture(scope="module")
def learnt(home):
    """A run of 40 steps on real text with validation, in this process."""
    place = home / "learnt"
    changes = {"train_steps": 40, "train_warmup": 4, "train_learning_rate": 1e-2, "train_validate_every": 20}
    (outcome,) = cases.run(None, place, "dp1 fp32", **changes)
    assert outcome["error"] == ""
    return place, outcome


def transformers_loss(directory: str, batch) -> float:
    """Return the mean loss over the targets of rows with one document each, computed by `transformers`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(batch.tokens)).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten()))


def test_loss_decreases_on_real_text(learnt):
    place, outcome = learnt
    lines = steps(place)
    assert lines[0]["step"] == 1 and lines[0]["loss"] == pytest.approx(math.log(257), abs=0.4)  # a uniform guess
    assert sum(line["loss"] for line in lines[-5:]) / 5 < 3.5
    assert lines[39]["validation_loss"] < lines[19]["validation_loss"] < 3.5
    assert outcome["result"]["loss"] == lines[-1]["loss"]
    assert outcome["result"]["validation_loss"] == lines[-1]["validation_loss"]


def test_transformers_loads_checkpoint_and_finds_same_validation_loss(learnt):
    from transformers import AutoTokenizer

    place, outcome = learnt
    directory = outcome["result"]["checkpoint"]
    assert directory == str(place / "run/checkpoints/step-000040")
    recipe = cases.recipe(place, "dp1")
    data = prepare(recipe.data, recipe.run.seed)
    rows = data.split("validation").read_batch(np.arange(13))
    assert not rows.document_ids.any()  # one document per row: transformers needs no mask
    assert transformers_loss(directory, rows) == pytest.approx(outcome["result"]["validation_loss"], rel=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.decode(rows.tokens[3])
    assert text in Path(cases.SOURCES[0]).read_text() + "".join(Path(name).read_text() for name in cases.SOURCES[1:])
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == rows.tokens[3].tolist()


def test_metrics_lines_have_documented_values(learnt):
    place, _ = learnt
    line = steps(place)[-1]
    assert {
        *("step", "loss", "gradient_norm", "learning_rate", "tokens_per_second", "mfu", "memory_gib", "seconds"),
        "seconds_by_part",
    } <= line.keys()
    assert line["tokens_per_second"] == pytest.approx(8 * 48 / line["seconds"])
    assert sum(line["seconds_by_part"].values()) == pytest.approx(line["seconds"], rel=0.2, abs=0.005)
    assert list(line["seconds_by_part"]) == ["data", "forward", "backward", "reduce", "agree", "update"]
    assert line["learning_rate"] == pytest.approx(1e-3) and 0 < line["memory_gib"] < 8
    assert events(place, "save")[-1]["step"] == 40


def test_log_interval_reduces_metrics_lines(home):
    place = home / "few lines"
    cases.run(None, place, "dp1 fp32", train_steps=8, train_log_every=3, train_validate_every=5)
    assert [line["step"] for line in steps(place)] == [3, 5, 6, 8]  # always validated steps and the last one


def test_result_has_predicted_and_measured(learnt):
    _, outcome = learnt
    result = outcome["result"]
    assert {"step", "loss", "tokens_per_second", "mfu", "predicted", "measured", "checkpoint"} <= result.keys()
    assert result["predicted"]["state_bytes"] == result["measured"]["state_bytes"]
    assert result["measured"]["state_bytes"]["optimizer"] == 2 * 4 * result["parameters"]
    assert result["layout"] == "fp32" or result["layout"] == "dp1 fp32"
    json.dumps(result, allow_nan=False)


# --- the same result on every layout

LAYOUTS = [
    *("dp1 mb2", "dp1 mb8", "dp1 ac:selective", "dp1 ac:full"),
    *("dp2", "dp2 zero1", "dp2 zero2", "dp2 zero2 mb2", "dp2 zero3", "dp2 zero3 mb4 ac:full"),
    *("dp4 mb2", "dp4 zero3", "dp4 zero1 hs2", "dp4 zero3 hs2 mb2"),
]


@pytest.fixture(scope="module")
def alone(home):
    """Four steps on one device in one micro-batch."""
    place = home / "alone"
    outcomes = cases.run(None, place, "dp1 fp32", train_steps=4, train_validate_every=2)
    return place, cases.whole_state(outcomes)


@pytest.mark.parametrize("layout", covering(LAYOUTS, list_axes))
def test_every_layout_matches_steps_of_one_device(layout, alone, home, request):
    ranks = Layout.parse(layout).world_size
    place = home / layout.replace(" ", "-").replace(":", "-")
    servers = {1: lambda: None, 2: lambda: request.getfixturevalue("two"), 4: lambda: request.getfixturevalue("four")}
    outcomes = cases.run(servers[ranks](), place, f"{layout} fp32", train_steps=4, train_validate_every=2)
    assert outcomes[0]["error"] == "" and len(outcomes) == ranks
    expected, state = alone
    cases.assert_same_steps(place, expected)
    cases.assert_same_state(outcomes, state)


@pytest.mark.slow
def test_compiled_model_steps_match_eager_steps(home):
    """On a forked rank, which has the compiler loaded."""
    model = {"family": "llama", "layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 64}
    with LocalRanks(1, timeout=300.0) as ranks:
        for name, compiled in (("eager", False), ("compiled", True)):
            cases.run_without_error(ranks, home / name, "dp1 fp32", model=model, train_compile=compiled, train_steps=3)
    cases.assert_same_steps(home / "compiled", home / "eager")


# --- interrupted runs

DISTURBED = {
    "dp2 fp32": {},
    "dp2 zero1 bf16": {},
    "dp2 zero2 mb2 fp32": {"train_optimizer": "sgd", "train_momentum": 0.9, "train_learning_rate": 0.1},
    "dp2 zero3 bf16": {"checkpoint_dtype": "bfloat16", "checkpoint_background": False},
}


# The last two have AdamW, bfloat16 and saves in the background, too; the next test reads what ZeRO-1 saved.
@pytest.mark.parametrize("layout", [*[*DISTURBED][2:], *exhaustive(*[*DISTURBED][:2])])
def test_crashed_run_resumes_bit_for_bit(two, home, layout):
    changes = {"train_steps": 5, "checkpoint_every": 2, "train_validate_every": 3, **DISTURBED[layout]}
    whole, broken = home / f"whole {layout}", home / f"broken {layout}"
    expected = cases.whole_state(cases.run(two, whole, layout, **changes))
    cases.run(two, broken, layout, crash_after=3, **changes)
    assert [line["step"] for line in steps(broken)] == [1, 2, 3]
    outcomes = cases.run(two, broken, layout, **changes)
    assert "resumed from step-000002: 2 of 5 steps are done" in outcomes[0]["said"]
    assert cases.trace(broken) == cases.trace(whole)
    assert cases.same(cases.whole_state(outcomes), expected)
    for kind in ("model.safetensors", "training/rank-00001-of-00002.safetensors"):
        files = [place / "run/checkpoints/step-000005" / kind for place in (whole, broken)]
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(("ranks", "layout"), [(1, "dp1 mb2"), (2, "dp2 zero3"), (4, "dp4 zero3 hs2 mb2")])
def test_run_resumes_with_other_ranks_and_zero_stage(two, home, ranks, layout, request):
    changes = {"train_steps": 5, "checkpoint_every": 2, "train_validate_every": 3}
    whole, begun = home / "other whole", home / "other begun"
    if not whole.exists():
        cases.run(two, whole, "dp2 zero1 fp32", **changes)
        cases.run(two, begun, "dp2 zero1 fp32", crash_after=3, **changes)
    place = home / f"other {ranks}"
    shutil.copytree(begun, place)
    outcomes = cases.run(
        {1: None, 2: two}[ranks] if ranks < 4 else request.getfixturevalue("four"), place, f"{layout} fp32", **changes
    )
    assert "resumed from step-000002: 2 of 5 steps are done" in outcomes[0]["said"]
    assert cases.trace(place)[:2] == cases.trace(whole)[:2]
    cases.assert_same_steps(place, whole)


def test_stop_signal_to_one_rank_stops_all_after_save(two, home):
    whole, stopped = home / "not stopped", home / "stopped"
    expected = cases.whole_state(cases.run(two, whole, "dp2 zero2 fp32"))
    outcomes = cases.run(two, stopped, "dp2 zero2 fp32", fault="stop_in_step_4")
    line = "Terminated: stopped by SIGTERM after saving step 4; the same command resumes the run"
    assert [outcome["error"] for outcome in outcomes] == [line] * 2
    assert find_newest(stopped / "run/checkpoints").step == 4
    outcomes = cases.run(two, stopped, "dp2 zero2 fp32")
    assert cases.same(cases.whole_state(outcomes), expected) and cases.trace(stopped) == cases.trace(whole)


def test_restarted_finished_run_is_reported_and_unchanged(home, two):
    place = home / "finished"
    options = {"train_validate_every": 3, "data_document_mask": False}  # memory does not depend on coming documents
    (first,) = cases.run(None, place, "dp1 fp32", **options)
    left = {name: (place / "run" / name).read_bytes() for name in cases.LEFT}
    before = left["metrics.jsonl"]
    (again,) = cases.run(None, place, "dp1 fp32", **options)
    assert again["said"] == ["nothing to do: step-000006 has all 6 steps; increase train.steps to continue"]
    (fewer,) = cases.run(None, place, "dp1 fp32", train_steps=4, **options)
    assert fewer["said"] == [
        "nothing to do: step-000006 has all 4 steps of train.steps, and 2 more; increase train.steps to continue"
    ]
    on_two = cases.run(two, place, "dp2 fp32", **options)[0]
    assert on_two["said"] == [f"{again['said'][0]} (layout dp2 fp32 is not used: these steps ran with fp32)"]
    for later in (again, fewer, on_two):  # nothing is measured again
        assert later["result"] == first["result"]
    assert {name: (place / "run" / name).read_bytes() for name in cases.LEFT} == left

    (place / "run/result.json").unlink()  # killed before it was written: known figures are reported and stored
    (unsaid,) = cases.run(None, place, "dp1 fp32", **options)
    compared = [copy.deepcopy(each["result"]) for each in (unsaid, first)]
    for result in compared:
        for changing in ("measured", "tokens_per_second", "mfu", "peak_flops_per_device"):
            del result[changing]
        predicted = result["predicted"]
        for rank in (predicted, predicted["fullest_rank"]) if "fullest_rank" in predicted else (predicted,):
            del rank["process_memory_bytes"]  # this process has loaded other libraries in the meantime
            del rank["memory_bytes"]["process_peak"]
    assert compared[0] == compared[1]
    assert unsaid["result"]["tokens_per_second"] > 0
    assert RunDirectory(place / "run").read_result() == unsaid["result"]
    (more,) = cases.run(None, place, "dp1 fp32", train_steps=7, **options)
    assert more["result"]["step"] == 7 == RunDirectory(place / "run").read_result()["step"]
    assert [line["step"] for line in steps(place)] == [*range(1, 8)]
    assert (place / "run/metrics.jsonl").read_bytes().startswith(before)


# --- retention


def test_newest_and_best_checkpoints_are_kept(home):
    place = home / "kept"
    changes = {"train_steps": 8, "checkpoint_every": 2, "checkpoint_keep": 1, "train_validate_every": 100}
    (outcome,) = cases.run(None, place, "dp1 fp32", fault="planned_validation", **changes)
    losses = {line["step"]: line["validation_loss"] for line in steps(place) if "validation_loss" in line}
    assert losses == {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5}  # every saved step is validated
    directory = place / "run/checkpoints"
    kept = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
    assert kept == ["step-000004", "step-000008"]
    assert find_best(directory).step == 4 and find_best(directory).validation_loss == 1.0
    assert outcome["result"]["best_checkpoint"] == str(directory / "step-000004")
    assert outcome["result"]["checkpoint"] == str(directory / "step-000008")
    assert [verify_checkpoint(directory / name) for name in kept] == [[], []]


def test_memory_for_saving_is_reserved_before_first_step(home, monkeypatch):
    reserved: list[int] = []
    reserve = loop.Checkpointer.reserve

    def noted(keeper, pieces):
        reserved.append(sum(piece.tensor.numel() for piece in pieces))
        reserve(keeper, pieces)

    monkeypatch.setattr(loop.Checkpointer, "reserve", noted)
    (outcome,) = cases.run(None, home / "reserved", "dp1 fp32", train_steps=2)
    assert reserved == [3 * outcome["result"]["parameters"]]  # master weights and two moments


def test_saved_state_has_position_in_data(learnt):
    place, _ = learnt
    state = find_newest(place / "run/checkpoints").state()
    assert (state["step"], state["samples"], state["optimizer_steps"], state["skipped_steps"]) == (40, 320, 40, 0)
    assert state["initial_values"] == INITIAL_VALUES_VERSION == 2
    assert load_recipe_text(state["recipe"], "state") == cases.recipe(
        place, "dp1 fp32", train_steps=40, train_warmup=4, train_learning_rate=1e-2, train_validate_every=20,
    )  # fmt: skip


@pytest.mark.parametrize(("saved", "version"), [({}, 1), ({"initial_values": 2}, 2), ({"initial_values": 3}, 3)])
def test_resumed_run_keeps_version_of_its_initial_values(saved: dict[str, int], version: int):
    trainer = object.__new__(Trainer)
    trainer.loss_scale, nothing = LossScale(), lambda *_: None
    trainer.optimizer = SimpleNamespace(restore_step_count=nothing)
    trainer.parallel = SimpleNamespace(all_gather_parameters=nothing)
    state = {"step": 3, "skipped_steps": 0, "skipped_in_a_row": 0, "optimizer_steps": 3, "loss_scale": None}
    trainer.restore({**state, **saved})
    assert trainer.initial_values == version


# --- initial weights


@pytest.mark.parametrize("layout", ["dp1 fp32", "dp2 zero3 fp32"])
def test_run_starts_from_hugging_face_weights(home, shared_data, two, layout):
    source, place = shared_data / "stories260k", home / f"stories {layout}"
    changes = {
        "model": {"from": str(source), "load_weights": True},
        "data_tokenizer": str(source),
        "data_sequence": 64,
        "data_document_mask": False,
        "train_learning_rate": 1e-9,
        "train_steps": 2,
    }
    outcomes = cases.run(None if layout.startswith("dp1") else two, place, layout, **changes)
    assert outcomes[0]["error"] == ""
    recipe = cases.recipe(place, layout, **changes)
    data = prepare(recipe.data, recipe.run.seed)
    for number, line in enumerate(steps(place)):
        batch = data.split("train").read_batch(data.make_sample_order().sample(8 * number + np.arange(8)))
        assert transformers_loss(str(source), batch) == pytest.approx(line["loss"], rel=2e-5)
    changes["model"] = {"from": str(source)}  # its configuration without weights
    (outcome,) = cases.run(None, home / f"shape {layout}", "dp1 fp32", **changes)
    assert outcome["error"] == "" and steps(home / f"shape {layout}")[0]["loss"] == pytest.approx(6.24, abs=0.5)


# --- precision


@pytest.mark.parametrize(("faster", "precision"), [(True, "bf16"), (False, "fp32")])
def test_omitted_precision_is_resolved_reported_and_stored(home, monkeypatch, faster, precision):
    place = home / f"omitted {precision}"
    monkeypatch.setattr(communication, "is_bf16_faster", lambda device: faster)
    (outcome,) = cases.run(None, place, "dp1", train_steps=2)
    assert outcome["layout"].endswith(precision) and outcome["result"]["layout"].endswith(precision)
    assert any(line.startswith(f"layout: {outcome['layout']} on 1 cpu process x ") for line in outcome["said"])
    monkeypatch.setattr(communication, "is_bf16_faster", lambda device: not faster)  # like another machine
    (resumed,) = cases.run(None, place, "dp1", train_steps=3)
    assert resumed["layout"] == outcome["layout"]


def test_precision_follows_the_loaded_checkpoint(home):
    place = home / "two precisions"
    cases.run(None, place, "dp1 bf16", train_steps=2)
    cases.run(None, place, "dp1 fp32", train_steps=4)
    checkpoint_cases.flip_bit(place / "run/checkpoints/step-000004/training/rank-00000-of-00001.safetensors")
    (resumed,) = cases.run(None, place, "dp1", train_steps=5)
    assert resumed["error"] == "" and resumed["layout"] == "bf16"
    assert any(line.startswith("resumed from step-000002") for line in resumed["said"])
    assert [line["step"] for line in steps(place)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("schedule", "said"), [("linear", True), ("constant", False)])
def test_more_steps_on_resume_report_changed_learning_rates(home, schedule, said):
    place = home / f"longer {schedule}"
    cases.run(None, place, "dp1 fp32", train_steps=2, train_warmup=0, train_schedule=schedule)
    (longer,) = cases.run(None, place, "dp1 fp32", train_steps=3, train_warmup=0, train_schedule=schedule)
    line = "train.steps was 2 and is 3: from step 3 on the learning rate follows the linear schedule of 3 steps"
    assert (line in longer["said"]) is said
    (done,) = cases.run(None, place, "dp1 fp32", train_steps=3, train_warmup=0, train_schedule=schedule)
    assert not any("train.steps was" in line for line in done["said"])


def test_bf16_keeps_float32_masters(home, two):
    place = home / "masters"
    outcomes = cases.run(two, place, "dp2 zero1 bf16", train_steps=2)
    state = cases.whole_state(outcomes)
    assert {values.dtype for values in state.values()} == {torch.float32}
    masters = [values for (kind, _), values in state.items() if kind == "master"]
    assert any(not torch.equal(values, values.bfloat16().float()) for values in masters)
    memory = outcomes[0]["result"]["measured"]["state_bytes"]
    assert memory == outcomes[0]["result"]["predicted"]["state_bytes"] and memory["masters"] == memory["parameters"]


def test_deterministic_algorithms_are_enabled_only_during_run(home, monkeypatch):
    asked = []
    step = loop.Run._step
    monkeypatch.setattr(
        loop.Run, "_step", lambda run: (asked.append(torch.are_deterministic_algorithms_enabled()), step(run))[1]
    )
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for wanted in (True, False):
        recipe = cases.recipe(home / f"deterministic {wanted}", "dp1 fp32", train_steps=2, train_deterministic=wanted)
        directory = RunDirectory(recipe.run_directory)
        directory.create()
        loop.train(recipe, Mesh.single(), directory, show_progress=False)
    assert asked == [True, True, False, False] and not torch.are_deterministic_algorithms_enabled()


def test_discarded_run_is_garbage_collected(home):
    """A process that trains several models in turn needs the memory of one."""
    recipe = cases.recipe(home / "discarded", "mb2 ac:selective fp32", train_steps=2)
    directory = RunDirectory(recipe.run_directory)
    directory.create()
    run = loop.Run(recipe, Mesh.single(), directory, show_progress=False)
    run.run()
    trainer = run.trainer
    left = [weakref.ref(each) for each in (run, trainer, trainer.parallel, trainer.parallel.shards[0].master)]
    del run, trainer
    gc.collect()
    assert [each() for each in left] == [None] * 4


# --- skipped steps


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        *((layout, "skip_and_watch") for layout in ("dp2 zero1 bf16", "dp2 zero3 mb2 fp32")),
        *exhaustive(("dp2 fp32", "skip_and_watch")),
        ("dp2 zero1 fp32", "skip_and_watch_early_updates"),
    ],
)
def test_non_finite_gradient_on_one_rank_is_skipped_everywhere(two, home, layout, fault):
    place = home / f"skip {layout}"
    outcomes = cases.run(two, place, layout, fault=fault, train_maximum_skipped=1)  # in a row
    for outcome in outcomes:
        assert outcome["error"] == ""
        moved = [line for line in outcome["said"] if line.startswith("moved")]
        assert moved == [f"moved {step}: {step not in (2, 4)}" for step in range(1, 7)]
    lines = steps(place)
    assert [line.get("skipped", False) for line in lines] == [False, True, False, True, False, False]
    assert [line.get("skipped_steps") for line in lines] == [None, 1, None, 2, None, None]
    assert all(line["loss"] is not None for line in lines) and lines[1]["gradient_norm"] is None
    assert outcomes[0]["result"]["skipped_steps"] == 2
    assert "step 2 skipped on all ranks: loss 5." in "\n".join(outcomes[0]["said"])
    state = find_newest(place / "run/checkpoints").state()
    assert state["optimizer_steps"] == 4 and state["skipped_steps"] == 2
    assert all(values.isfinite().all() for values in cases.whole_state(outcomes).values())


def test_updates_before_the_outcome_is_known_give_the_same_weights(two, home):
    """As on GPUs, where norm clipping and the check for finite values do not wait for the host."""
    found = []
    for fault in ("", "update_early"):
        place = home / f"early {fault}"
        outcomes = cases.run(two, place, "dp2 zero1 fp32", fault=fault, train_clip=0.3)
        assert all(line["gradient_norm"] > 0.3 for line in steps(place))
        assert find_newest(place / "run/checkpoints").state()["optimizer_steps"] == 6
        found.append(cases.whole_state(outcomes))
    assert found[0].keys() == found[1].keys()
    for name, values in found[0].items():
        torch.testing.assert_close(found[1][name], values, rtol=1e-4, atol=1e-6)


def test_steps_launched_ahead_are_logged_and_saved_as_steps_finished_at_once(two, home):
    """On GPUs a step is launched before the outcome of the one before is read, if that has no validation or checkpoint
    to follow."""
    found = []
    for fault in ("update_early_and_finish_at_once", "update_early"):
        place = home / fault
        outcomes = cases.run(
            two, place, "dp2 zero1 fp32", fault=fault, train_steps=7, checkpoint_every=3, train_validate_every=4,
        )  # fmt: skip
        saved = sorted((place / "run/checkpoints").glob("step-*"))
        states = [json.loads((path / "training/state.json").read_text()) | {"recipe": None} for path in saved]
        found.append((cases.trace(place), states, cases.whole_state(outcomes)))
    (lines, states, weights), (lines_ahead, states_ahead, weights_ahead) = found
    assert lines == lines_ahead and [line[0] for line in lines] == [*range(1, 8)]
    assert states == states_ahead and [state["step"] for state in states] == [6, 7]
    assert all(torch.equal(weights[name], weights_ahead[name]) for name in weights)


@pytest.mark.parametrize(("loss", "ahead"), [("kto", False), ("dpo", True)])
def test_steps_are_not_launched_ahead_if_the_next_one_changes_a_metric(loss: str, ahead: bool):
    """KTO's KL estimate is computed when a step begins, and reported when it is finished."""
    objective = Preferences(Preference(loss), {})
    task = SimpleNamespace(objective=objective)
    assert LanguageModelTask.can_launch_ahead.fget(task) is ahead


def test_stop_is_obeyed_after_the_step_that_was_launched_ahead(two, home):
    place = home / "stop ahead"
    outcomes = cases.run(two, place, "dp2 zero1 fp32", fault="stop_in_step_4_early_updates", checkpoint_every=0)
    assert all("Terminated: stopped by SIGTERM after saving step 5" in outcome["error"] for outcome in outcomes)
    assert [line["step"] for line in steps(place)] == [1, 2, 3, 4, 5]
    assert find_newest(place / "run/checkpoints").state()["step"] == 5


def test_step_is_logged_although_the_launch_of_the_next_one_fails(home):
    place = home / "failed launch"
    (outcome,) = cases.run(None, place, "fp32", fault="launch_of_step_4_fails", checkpoint_every=0)
    assert outcome["error"] == "OSError: the data cannot be read"
    assert [line["step"] for line in steps(place)] == [1, 2, 3]
    assert all("forward" in line["seconds_by_part"] for line in steps(place))  # its own, not those of step 4
    assert outcome["said"].count("waits for copies") == 3


def test_skipped_step_that_ends_the_run_is_named_although_the_next_is_launched(two, home):
    place = home / "skip ahead"
    outcomes = cases.run(two, place, "dp2 zero1 fp32", fault="skip_and_watch_early_updates", train_maximum_skipped=0)
    assert all("CheckFailed: a step, the last of them step 2, had a loss" in outcome["error"] for outcome in outcomes)
    assert [line["step"] for line in steps(place)] == [1, 2]


@pytest.mark.parametrize("layout", ["dp2 zero3 fp32", *exhaustive("dp2 fp32")])
def test_too_many_skipped_steps_end_run_with_checkpoints_intact(two, home, layout):
    place = home / f"bad memory {layout}"
    outcomes = cases.run(
        two, place, layout, fault="nan_parameter_from_step_3", checkpoint_every=2, train_maximum_skipped=2,
        train_steps=20,
    )  # fmt: skip
    line = (
        "CheckFailed: 3 steps in a row, the last of them step 5, had a loss or gradient that is not finite "
        "(train.maximum_skipped = 2); the newest intact checkpoint is step-000004; a lower train.learning_rate or "
        "train.clip usually helps"
    )
    assert [outcome["error"] for outcome in outcomes] == [line] * 2 and CheckFailed.exit_code == 1
    assert [line["loss"] is None for line in steps(place)] == [False, False, True, True, True]
    assert [verify_checkpoint(path) for path in (place / "run/checkpoints").glob("step-*")] == [[], []]


# --- a slow rank


@pytest.mark.parametrize("layout", ["dp2 zero3 fp32", *exhaustive("dp2 zero1 fp32")])
def test_slow_rank_is_named(two, home, layout):
    place = home / f"slow {layout}"
    outcomes = cases.run(two, place, layout, fault="rank_1_sleeps", train_steps=20)
    for event, step in zip(events(place, "slow_rank"), (10, 20), strict=True):
        assert event["rank"] == 1 and event["step"] == step and event["ratio_to_median"] > 1.5
    (line,) = (line for line in outcomes[0]["said"] if line.startswith("rank 1 is slow"))  # logged once
    assert re.fullmatch(r"rank 1 is slow: in steps 1 to 10 its own work took [\d.]+ times as long as rank 0's", line)


# --- resuming with an edited recipe

FREE = {
    "train_steps": 9,
    "train_log_every": 2,
    "train_validate_every": 4,
    "train_maximum_skipped": 3,
    "checkpoint_every": 2,
    "checkpoint_keep": 5,
    "checkpoint_dtype": "bfloat16",
    "run_threads": 1,
}
FIXED = {
    "train_batch": (16, "train.batch was 8 when this run began and is 16 now"),
    "train_learning_rate": (1e-3, "train.learning_rate was 0.003 when this run began and is 0.001 now"),
    "train_optimizer": ("sgd", 'train.optimizer was "adamw" when this run began and is "sgd" now'),
    "run_seed": (6, "run.seed was 5 when this run began and is 6 now"),
    "data_sequence": (24, "data.sequence was 48 when this run began and is 24 now"),
    "model_layers": (2, "model.layers was 3 when this run began and is 2 now"),
    "model_hidden": (48, "model.hidden was 40 when this run began and is 48 now"),
}


def test_run_resumes_with_allowed_recipe_changes(home):
    place = home / "edited"
    cases.run(None, place, "dp1 fp32", train_steps=2)
    (outcome,) = cases.run(None, place, "dp1 mb2 fp32", **FREE)
    assert outcome["error"] == "" and outcome["result"]["step"] == 9


@pytest.mark.parametrize("key", FIXED)
def test_forbidden_recipe_changes_are_refused_by_name(home, key):
    place = home / "refused"
    if not place.exists():
        cases.run(None, place, "dp1 fp32", train_steps=2)
    before = (place / "run/metrics.jsonl").read_bytes()
    value, said = FIXED[key]
    model = {"model": {**cases.recipe(place, "dp1").model.model_dump(exclude_none=True), key[6:]: value}}
    changes = model if key.startswith("model_") else {key: value}
    recipe = cases.recipe(place, "dp1 fp32", train_steps=3, **changes)
    with pytest.raises(UserError, match="but it may not change: ") as caught:
        loop.train(recipe, Mesh.single(), RunDirectory(recipe.run_directory), show_progress=False)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert (place / "run/metrics.jsonl").read_bytes() == before
    assert verify_checkpoint(find_newest(place / "run/checkpoints").path) == []


def test_changed_text_is_refused(home):
    place = home / "other text"
    place.mkdir()
    source = place / "text.txt"
    source.write_text(Path(cases.SOURCES[0]).read_text())
    cases.run(None, place, "dp1 fp32", train_steps=2, data_source=str(source))
    source.write_text(source.read_text().replace("argument", "ARGUMENT", 1))
    recipe = cases.recipe(place, "dp1 fp32", train_steps=3, data_source=str(source))
    with pytest.raises(UserError, match=r"the text of data.source has changed since .*step-000002 was written \(sha"):
        loop.train(recipe, Mesh.single(), RunDirectory(recipe.run_directory), show_progress=False)


def test_refused_start_keeps_the_resolved_recipe(home):
    place = home / "recipe kept"
    cases.run(None, place, "dp1 fp32", train_steps=2)
    kept = (place / "run/recipe.resolved.toml").read_text()
    assert load_recipe_text(kept, "kept") == cases.recipe(place, "dp1 fp32", train_steps=2, run_threads=1)
    recipe = cases.recipe(place, "dp1 fp32", train_steps=2, train_batch=16)
    with pytest.raises(UserError):
        loop.train(recipe, Mesh.single(), RunDirectory(recipe.run_directory), show_progress=False)
    assert (place / "run/recipe.resolved.toml").read_text() == kept
