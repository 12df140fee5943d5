"""Stages on ranks: each unit is counted, written and reduced once; temporary memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.verification.problem import Problem, scale_down_config
from tests.parallel import stage_cases as cases
from tests.training.training_cases import recipe

TIED = dataclasses.replace(scale_down_config(preset("qwen3-0.6b")), layers=9)
GPT2 = dataclasses.replace(scale_down_config(preset("gpt2")), layers=9)
LLAMA = dataclasses.replace(scale_down_config(preset("llama-3-8b")), layers=9)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (TIED, "pp4 mb2"), (TIED, "dp2 zero1 pp2:zb-v mb2"), (GPT2, "dp2 zero3 pp2:chimera mb2"),
        (LLAMA, "pp4:gems mb2"),
    ],
)  # fmt: skip
def test_every_unit_is_on_some_stage_and_saved_once(four, config, layout):
    table = parameter_table(config)
    found = four.run(cases.names_and_holdings, Problem(config, 8), layout)
    names = {tensor.name for tensor in table.tensors}
    assert {name for rank in found for name in rank["names"]} == names, "names do not change with the stage"
    written = {entry.name: torch.zeros(entry.numel) for entry in table.entries}
    for rank in found:
        for name, start, stop in rank["owned"]:
            written[name][start:stop] += 1
    assert all(bool((count == 1).all()) for count in written.values())
    for rank in found:
        assert rank["memory"] == rank["predicted"]


def test_only_parameters_shared_by_stages_are_all_reduced(four):
    def shared(config, layout) -> list[int]:
        found = four.run(cases.names_and_holdings, Problem(config, 8), layout)
        return [rank["calls"].get(("pipeline.gradients.shared", "all_reduce"), 0) for rank in found]

    assert shared(TIED, "pp4 mb2") == [1, 0, 0, 1], "the embedding, on the first and on the last stage"
    assert shared(LLAMA, "pp4 mb2") == [0, 0, 0, 0]
    assert shared(TIED, "dp2 pp2:zb-v mb2") == [0, 0, 0, 0], "one rank has both ends"
    units = len(parameter_table(LLAMA).units)
    found = shared(LLAMA, "pp4:chimera mb2")
    assert found[0] == found[3] and found[1] == found[2] and found[0] + found[1] == units


@pytest.mark.parametrize("layout", ["dp2 zero3 pp2:gpipe mb2", "dp2 zero3 pp2:zb-v mb4", "dp2 zero3 pp2 mb2 ac:full"])
def test_zero3_frees_gathered_parameters_between_forward_and_backward(four, layout):
    for rank in four.run(cases.gathered_under_zero3, Problem(TIED, 8), layout):
        sizes = [len(there) for there in rank["within"]]
        assert 2 <= max(sizes) <= 3, "a unit, the next one of its stage, a tied embedding"
        for kind, there in zip(rank["steps"], rank["between"], strict=True):
            # The last stage starts the backward pass of a micro-batch right after its forward pass.
            assert there <= {"head", "embedding"} if kind == "forward" else there == set(), (kind, there)
        assert rank["after"] == set()
        if "gpipe" in layout:
            assert rank["between"][0] == set(), "other forwards come first"


def test_unit_copies_on_several_stages_stay_bitwise_equal(four):
    held = four.run(cases.bf16_copies, Problem(TIED, 8, "float32"), "pp4:dualpipe mb8")
    seen: dict[tuple[str, int], torch.Tensor] = {}
    twice = 0
    for pieces in held:
        for name, start, tensor in pieces:
            twice += (name, start) in seen
            assert torch.equal(seen.setdefault((name, start), tensor), tensor), name
    assert twice == len(seen), "two replicas of everything"


def test_sent_output_is_freed(four):
    """On all ranks but the last: most outputs are freed before their gradients arrive."""
    kept = four.run(cases.outputs_kept, Problem(LLAMA, 8), "pp4:gpipe mb8")
    assert [len(each) for each in kept] == [8, 8, 8, 0]
    assert not any(any(each) for each in kept), kept


def test_last_stage_saves_head_gradient_when_backward_follows(four):
    sliced = dataclasses.replace(scale_down_config(preset("llama-3-8b"), 2), layers=3)
    kept = {
        "tp2:nosp pp2:gpipe mb4 ac:full": [0, 0, 0, 0],
        "tp2:nosp pp2 mb4 ac:full": [1, 1, 1, 1],
        "tp2:nosp pp2:gpipe mb4": [4, 3, 2, 1],
    }
    for layout, each in kept.items():
        found = four.run(cases.head_gradients_kept, Problem(sliced, 8), layout)
        assert [rank for rank in found if rank] == [each] * 2, layout


def test_parameter_all_gathers_are_complete_when_updates_begin(four):
    for layout in ("dp4 zero1", "dp4 zero2"):
        for counts in four.run(cases.gathers_in_flight_after_a_step, Problem(TIED, 8), layout):
            assert counts["published"] > 0 and counts["idle"] == counts["trained"] == 0, layout


@pytest.mark.slow
def test_compiled_stages_have_gradients_of_eager_stages(four):
    """Split backward passes, two chunks on a rank, ZeRO-3 parameters, recomputation."""
    problem = Problem(dataclasses.replace(LLAMA, layers=4), 8)
    layout = "dp2 zero3 pp2:zb-v mb4 ac:selective"
    plain = four.run(cases.gradients_of_a_step, problem, layout)
    compiled = four.run(cases.gradients_of_a_step, problem, layout, "aot_eager")
    for ours, theirs in zip(compiled, plain, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one.name, one.start, one.stop) == (other.name, other.start, other.stop)
            torch.testing.assert_close(one.tensor, other.tensor, rtol=1e-10, atol=1e-14)


def test_ranks_with_different_programs_fail_before_first_step(four, tmp_path):
    for layout, expected in (("dp2 pp2 mb2", "1f1b of rank 3 differs from that of rank 0"), ("dp2 pp2:gpipe mb2", "")):
        text = recipe(tmp_path, layout, model_layers=2).to_toml()
        found = four.run(cases.trainer_of_another_program, text)
        assert all(expected in each and bool(expected) == bool(each) for each in found), found
