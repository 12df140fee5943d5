"""fp16: loss scaling changes nothing but rounding; an overflow is handled on all ranks; a resumed run continues bit for
bit."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint import find_newest
from meshwright.comm.local import LocalRanks
from meshwright.errors import UserError
from meshwright.recipe import load_recipe
from meshwright.training.loss_scale import LossScale
from meshwright.training.optimizer import Optimizer
from meshwright.training.precision import set_matmul_precision
from tests.conftest import exhaustive
from tests.training import training_cases as cases


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("half")


MIXTURE = {
    "family": "qwen2_moe", "layers": 3, "hidden": 40, "heads": 4, "kv_heads": 2, "intermediate": 72, "experts": 4,
    "experts_per_token": 2, "expert_intermediate": 24, "shared_intermediate": 32, "dense_layers": [1],
}  # fmt: skip


def run(ranks: LocalRanks | None, place: Path, layout: str, crash_after: int = 0, fault: str = "", **changes):
    text = cases.recipe(place, layout, **{"train_steps": 4} | changes).to_toml()
    return (
        [cases.train(text, crash_after, fault)] if ranks is None else ranks.run(cases.train, text, crash_after, fault)
    )


def steps(place: Path) -> list[dict]:
    return [line for line in cases.metrics(place) if "learning_rate" in line]


@pytest.fixture(scope="module")
def single(home):
    """Four steps in float32 on one device."""
    (outcome,) = run(None, home / "single", "dp1 fp32", train_clip=0.5)
    assert outcome["error"] == "" and "loss_scale" not in steps(home / "single")[0]
    return steps(home / "single"), cases.whole_state([outcome])


@pytest.mark.parametrize(
    "layout",
    [
        *("dp2 zero3 ac:full", "cp2 zero2", "pp2 mb2"),
        # test_mixtures_and_hybrid_sharding_take_steps_of_one_device always has tp with ZeRO-1.
        *exhaustive("dp2", "dp2 zero1 mb2", "dp2 zero2", "tp2", "cp2:ulysses"),
    ],
)
def test_float16_steps_match_float32_up_to_rounding(two, home, single, layout):
    """Losses, norms before clipping and master weights do not contain the loss scale."""
    place = home / layout
    outcomes = run(two, place, f"{layout} fp16", train_clip=0.5)
    assert outcomes[0]["error"] == ""
    lines, state = single
    for ours, theirs in zip(steps(place), lines, strict=True):
        assert ours["loss_scale"] == 65536
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-2)
    measured, half = outcomes[0]["result"]["measured"]["state_bytes"], outcomes[0]["result"]["parameters"] * 2
    assert measured == outcomes[0]["result"]["predicted"]["state_bytes"]
    assert layout.startswith(("dp2 zero3", "tp2", "pp2")) or half <= measured["parameters"] < 1.1 * half
    for (kind, name), ours in cases.whole_state(outcomes).items():
        if kind == "exp_avg":
            error = (ours - state[kind, name]).norm() / state[kind, name].norm()
            assert error < 0.03, (name, float(error))


@pytest.fixture(scope="module")
def half_alone(home):
    """By model: four steps in float16 on one device."""
    found = {}
    for name, changes in (("llama", {}), ("mixture", {"model": MIXTURE})):
        (outcome,) = run(None, home / f"alone {name}", "dp1 fp16", train_clip=0.5, **changes)
        assert outcome["error"] == ""
        found[name] = steps(home / f"alone {name}"), cases.whole_state([outcome])
    return found


@pytest.mark.parametrize(
    ("model", "layout"),
    [("llama", "dp4 zero3 hs2 mb2"), ("mixture", "dp4 zero3 hs2 ep2"), ("mixture", "dp2 tp2 zero1 ep2:etp2"),
     *exhaustive(("llama", "dp4 zero2 hs2"), ("mixture", "dp4 zero2"))],
)  # fmt: skip
def test_mixtures_and_hybrid_sharding_take_steps_of_one_device(four, home, half_alone, model, layout):
    """Both round to float16, so that a token may be routed to another, nearly equally good expert."""
    place = home / f"{model} {layout}"
    outcomes = run(four, place, f"{layout} fp16", train_clip=0.5, **{"model": MIXTURE} if model == "mixture" else {})
    assert outcomes[0]["error"] == ""
    lines, state = half_alone[model]
    for ours, theirs in zip(steps(place), lines, strict=True):
        assert ours["loss_scale"] == theirs["loss_scale"] == 65536
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-3)
    for (kind, name), ours in cases.whole_state(outcomes).items():
        if kind == "exp_avg":
            error = (ours - state[kind, name]).norm() / state[kind, name].norm()
            assert error < (0.1 if ".mlp." in name and model == "mixture" else 0.03), (name, float(error))


def test_small_gradients_vanish_unless_the_loss_is_scaled(home):
    """A batch of many tokens, each with a small part of the loss; float32 gives the reference."""
    changes = {"train_batch": 64, "train_clip": 0.0, "model_layers": 2, "run_seed": 1}
    found = {}
    for name, precision, scale in (("none", "fp16", 1.0), ("scaled", "fp16", 65536.0), ("float32", "fp32", 1.0)):
        text = cases.recipe(home / "small", f"dp1 {precision}", train_loss_scale=scale, **changes).to_toml()
        # Gradients as the optimizer gets them, with the scale.
        with mock.patch.object(Optimizer, "_balance_experts") as balance:
            found[name] = torch.cat([gradient / scale for gradient in cases.first_gradients(text)])
        balance.assert_called_once_with(1 / scale, scale)  # loads of experts have the scale too
    there = found["float32"] != 0
    lost = {name: float((found[name][there] == 0).double().mean()) for name in ("none", "scaled")}
    assert lost["none"] > 1e-4 and lost["scaled"] < lost["none"] / 10, lost
    error = {name: float((found[name] - found["float32"]).norm() / found["float32"].norm()) for name in lost}
    assert error["scaled"] < 0.01 and error["scaled"] < error["none"], error


def test_loss_scaling_makes_float16_learn_like_float32(home):
    """AdamW is invariant to the scale of gradients, except for those that underflow to zero."""
    losses = {}
    for name, precision, scale in (("none", "fp16", 1.0), ("scaled", "fp16", 65536.0), ("float32", "fp32", 1.0)):
        changes = {"train_loss_scale": scale, "train_loss_scale_every": 1000, "train_schedule": "constant"}
        changes |= {"train_steps": 20, "train_warmup": 0, "train_clip": 0.0, "train_epsilon": 1e-20}
        place = home / f"learns {name}"
        (outcome,) = run(None, place, f"dp1 {precision}", fault="many_more_tokens_in_a_step", **changes)
        assert outcome["error"] == "" and outcome["result"]["skipped_steps"] == 0
        losses[name] = [line["loss"] * 2**20 for line in steps(place)]
    assert losses["float32"][-1] < 0.75 * losses["float32"][0]
    assert losses["scaled"] == pytest.approx(losses["float32"], rel=5e-3)
    learnt = {name: those[0] - those[-1] for name, those in losses.items()}
    assert learnt["none"] < 0.5 * learnt["float32"], learnt


@pytest.mark.parametrize(
    "layout",
    [
        *("dp2 zero1", "tp2", "cp2", "pp2 mb2"),
        *exhaustive("dp2", "dp2 zero3", "dp2 zero2", "tp2:nosp", "cp2:ulysses zero3"),
    ],
)
def test_overflow_on_one_rank_skips_step_everywhere(two, home, layout):
    place = home / f"one rank {layout}"
    outcomes = run(two, place, f"{layout} fp16", fault="infinity_on_rank_1_in_step_3", train_loss_scale=1024.0)
    for outcome in outcomes:
        assert outcome["error"] == ""
        logged = {word: [line for line in outcome["said"] if line.startswith(word)] for word in ("moved", "scale")}
        assert logged["moved"] == [f"moved {step}: {step != 3}" for step in range(1, 5)]
        assert logged["scale"] == ["scale 1024", "scale 1024", "scale 512", "scale 512"]
    assert [line["loss_scale"] for line in steps(place)] == [1024.0, 1024.0, 1024.0, 512.0]
    assert [line["step"] for line in steps(place) if line.get("skipped")] == [3]
    if layout in ("dp2", "cp2"):  # every rank has all master weights
        said = [[line for line in outcome["said"] if line.startswith("masters")] for outcome in outcomes]
        assert said[0] == said[1] and len(said[0]) == 4


def test_loss_scale_follows_torch_grad_scaler():
    """`torch.amp.GradScaler` with the published factors, over the same overflows."""
    for every, seed in ((1, 0), (3, 1), (7, 2)):
        generator = random.Random(seed)
        theirs = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=every)
        ours = LossScale(2.0**60, every)
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.25)
        for number in range(200):
            overflows = generator.random() < 0.2 if number % 50 > 10 else number % 50 < 4
            before = parameter.detach().clone()
            theirs.scale(parameter.sum()).backward()
            assert float(parameter.grad[0]) == ours.value
            if overflows:
                parameter.grad[generator.randrange(3)] = torch.inf if number % 2 else torch.nan
            theirs.step(optimizer)
            theirs.update()
            optimizer.zero_grad()
            moved = not torch.equal(parameter, before)
            ours.update(1.0, not overflows)
            assert moved is not overflows and ours.value == theirs.get_scale() >= 1.0
            assert ours.finite_steps == theirs.state_dict()["_growth_tracker"]


def test_master_weights_are_saved_in_float32(home):
    place = home / "masters"
    (outcome,) = run(None, place, "dp1 fp16")
    checkpoint = find_newest(place / "run/checkpoints")
    saved = load_file(checkpoint.path / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    kept = {
        key: value for path in checkpoint.path.glob("training/*.safetensors") for key, value in load_file(path).items()
    }
    assert {value.dtype for value in kept.values()} == {torch.float32}
    finer = [name for name, value in saved.items() if not torch.equal(value, value.half().float())]
    assert len(finer) > 0.8 * len(saved)
    masters = {name: value for (kind, name), value in cases.whole_state([outcome]).items() if kind == "master"}
    assert masters and all(
        torch.equal(saved[name].flatten().sort().values, value.sort().values) for name, value in masters.items()
    )


@pytest.mark.parametrize(
    ("processes", "layout", "model"), [("two", "dp2 zero2", {}), ("four", "dp4 zero3 hs2 ep2", {"model": MIXTURE})]
)
def test_excessive_loss_scale_is_halved_by_uncounted_skips_everywhere(request, home, processes, layout, model):
    place = home / f"search {processes}"
    changes = {"train_loss_scale": 2.0**26, "train_steps": 12, "train_maximum_skipped": 0, "run_seed": 1, **model}
    outcomes = run(request.getfixturevalue(processes), place, f"{layout} fp16", fault="keep_states", **changes)
    assert outcomes[0]["error"] == ""
    lines = steps(place)
    skipped = [line["step"] for line in lines if line.get("skipped")]
    assert 5 <= len(skipped) < 12 and skipped == [*range(1, len(skipped) + 1)]
    assert [line["loss_scale"] for line in lines] == [2.0 ** (26 - min(done, len(skipped))) for done in range(12)]
    for outcome in outcomes:  # keep_states logs on each rank the steps that changed weights
        moved = [line for line in outcome["said"] if line.startswith("moved")]
        assert moved == [f"moved {step}: {step not in skipped}" for step in range(1, 13)]
    said = next(line for line in outcomes[0]["said"] if line.startswith("step 1 skipped"))
    assert said.endswith("; the loss scale is now 3.35544e+07")
    assert outcomes[0]["result"]["skipped_steps"] == len(skipped)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"fault": "nan_parameter_from_step_3", "train_steps": 9, "train_maximum_skipped": 2, "checkpoint_every": 2},
            "3 steps in a row, the last of them step 5, had",
        ),
        (
            {"train_loss_scale": 2.0**30, "train_steps": 3},
            "every step, the last of them step 3, had",
        ),  # nothing learned
    ],
)
def test_nan_loss_or_a_run_without_an_update_fails(two, home, changes, reason):
    outcomes = run(two, home / reason, "dp2 zero3 fp16", **changes)
    assert all(f"CheckFailed: {reason}" in outcome["error"] for outcome in outcomes)


def test_loss_scale_is_restored_on_resume(two, home):
    """It is doubled after every third finite step; the run crashes in between."""
    changes = {"train_steps": 9, "train_loss_scale_every": 3, "train_loss_scale": 1024.0, "checkpoint_every": 4}
    whole, broken = home / "whole", home / "crashed"
    expected = cases.whole_state(run(two, whole, "dp2 zero1 fp16", **changes))
    run(two, broken, "dp2 zero1 fp16", crash_after=5, **changes)
    assert find_newest(broken / "run/checkpoints").state()["loss_scale"] == {"value": 2048.0, "finite_steps": 1}
    outcomes = run(two, broken, "dp2 zero1 fp16", **changes)
    assert [line["loss_scale"] for line in steps(broken)] == [1024.0] * 3 + [2048.0] * 3 + [4096.0] * 3
    assert cases.trace(broken) == cases.trace(whole)
    assert cases.same(cases.whole_state(outcomes), expected)


def test_scale_doubles_halves_and_stops_at_one():
    scale = LossScale(8.0, every=2)
    assert [scale.update(1.0, True) for _ in range(3)] == [False] * 3
    assert (scale.value, scale.finite_steps) == (16.0, 1)
    assert scale.update(1.0, False) and (scale.value, scale.finite_steps) == (8.0, 0)
    assert not scale.update(float("nan"), False) and scale.value == 4.0  # no scale can fix the loss itself
    assert scale.update(1.0, False) and scale.update(1.0, False) and scale.value == 1.0
    assert not scale.update(1.0, False) and scale.value == 1.0
    again = LossScale(8.0, every=2)
    again.restore(scale.state())
    assert again.state() == {"value": 1.0, "finite_steps": 0}
    again.restore(None)  # from a run in another precision
    assert again.value == 1.0
    sooner = LossScale(8.0, every=2)
    sooner.restore({"value": 4.0, "finite_steps": 5})  # from a run with a larger `every`
    assert not sooner.update(1.0, True) and sooner.state() == {"value": 8.0, "finite_steps": 0}
    fixed = LossScale()
    assert not fixed.update(1.0, False) and fixed.state() is None and fixed.value == 1.0


def test_mistakes_are_one_line(tiny_recipe):
    with pytest.raises(UserError, match="train.loss_scale: 1000 is not a power of two"):
        load_recipe(tiny_recipe, ["train.loss_scale=1000"])
    with pytest.raises(UserError, match="precision tf32 needs CUDA devices, and the ranks compute on cpu"):
        set_matmul_precision("tf32", torch.device("cpu"))


def test_tf32_is_enabled_for_cuda_and_restored():
    before = torch.get_float32_matmul_precision()
    try:
        set_matmul_precision("tf32", torch.device("cuda", 0))
        assert torch.get_float32_matmul_precision() == "high"
        set_matmul_precision("fp32", torch.device("cuda", 0))
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
