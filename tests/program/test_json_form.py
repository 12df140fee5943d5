"""JSON form of programs: round trips are exact, and every error is named by key and entry."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.program import collective, pipeline
from meshwright.program.json_form import format_json, from_json_dict, to_json_dict


def exchange() -> collective.CollectiveProgram:
    program = collective.Builder("all-reduce", "exchange", 2, chunks=2, root=1, scratch=1)
    with program.round():
        program.transfer([0, 1], [1, 0], chunk=[0, 1], reduce=True)
    with program.round():
        program.copy([0, 1], source=0, into=2)
    with program.round():
        program.signal([0, 1], [1, 0])
    return program.build()


def two_stages() -> pipeline.PipelineProgram:
    program = pipeline.Builder("small", 2, 4, (pipeline.place_cyclically(2), (1, 0)))
    for rank in program.ranks:
        for micro_batch in range(4):
            rank.forward(micro_batch, replica=micro_batch // 2)
        with rank.overlap():
            rank.input_gradient(3, replica=1)
            rank.add(pipeline.Kind.WEIGHT_GRADIENT, 3, replica=1, component=pipeline.Component.MLP)
    return program.build()


@pytest.mark.parametrize("program", [exchange(), two_stages()], ids=["collective", "pipeline"])
def test_a_program_is_equal_after_a_trip_through_json(program: Any) -> None:
    assert from_json_dict(json.loads(json.dumps(to_json_dict(program)))) == program
    assert from_json_dict(json.loads(format_json(program))) == program


def test_json_columns_name_step_kinds() -> None:
    steps: Any = to_json_dict(two_stages())["steps"]
    assert steps["kind"][:6] == ["forward"] * 4 + ["input-gradient", "weight-gradient"]
    assert steps["component"][5] == "mlp"


def change(path: str, value: object) -> Callable[[Any], None]:
    def apply(table: Any) -> None:
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
        for key in parents:
            table = table[key]
        if value is None:
            del table[last]
        else:
            table[last] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("dialect", "collectiv", 'p: "dialect" should be "collective" or "pipeline", not "collectiv"'),
        ("dialect", ["collective"], 'p: "dialect" should be "collective" or "pipeline", not ["collective"]'),
        ("format", 2, 'p: "format" should be 1, not 2'),
        ("rnks", 2, 'p: unknown key "rnks"; did you mean "ranks"?'),
        ("ranks", None, 'p: "ranks" is missing'),
        ("ranks", True, 'p: "ranks" should be an integer, not true'),
        ("ranks", 1e9, 'p: "ranks" should be an integer, not 1000000000.0'),
        ("ranks", 10**12, 'p: "ranks" should be an integer, not 1000000000000'),
        ("ranks", 1, "p: root is 1; ranks are 0 to 0"),
        ("algorithm", "a # b", 'p: "algorithm" should be a name on one line without "#"'),
        ("operation", "all-gathr", 'p: unknown operation "all-gathr"; did you mean "all-gather"?'),
        ("steps", [], 'p: "steps" should be a JSON object, not []'),
        ("steps.peer", None, 'p: "steps": "peer" should be a list with one entry a step, not null'),
        ("steps.peer", [1], 'p: "steps": "peer" has 1 entries and "rank" has 10'),
        ("steps.pear", [1], 'p: "steps": unknown key "pear"; did you mean "peer"?'),
        ("steps.kind.2", "snd", 'p: "steps": "kind", entry 2: unknown kind "snd"; did you mean "send"?'),
        ("steps.kind.2", 1, 'p: "steps": "kind", entry 2: unknown kind "1"'),
        ("steps.slot.1", 0.5, 'p: "steps": "slot", entry 1 should be an integer, not 0.5'),
        ("steps.slot.1", True, 'p: "steps": "slot", entry 1 should be an integer, not true'),
        ("steps.slot.1", 2**70, 'p: "steps": "slot", entry 1 should be an integer'),
        ("steps.rank.1", 2, 'p: "steps": "rank", entry 1 is 2; it should be 0 to 1'),
        ("steps.group.2", -1, 'p: "steps": "group", entry 2 is lower'),
    ],
)
def test_a_mistake_in_a_collective_is_named(path: str, value: object, message: str) -> None:
    table = copy.deepcopy(to_json_dict(exchange()))
    change(path, value)(table)
    with pytest.raises(UserError) as caught:
        from_json_dict(table, "p")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("placement", [], 'p: "placement" should be one list of ranks for each replica, one entry a stage, not []'),
        ("placement.0.1", 5, 'p: "placement": stage 1 of replica 0 is on rank 5; ranks are 0 to 1'),
        ("placement.0", [0], 'p: "placement": rank 1 holds 0 of the 1 stages of replica 0'),
        ("micro_batches", 0, 'p: "micro_batches" is 0; it must be at least 1'),
        ("steps.stage.1", 2, 'p: "steps": "stage", entry 1 is 2; it should be 0 to 1'),
        ("steps.replica.1", -1, 'p: "steps": "replica", entry 1 is -1; it should be 0 to 1'),
        ("steps.micro_batch.1", 4, 'p: "steps": "micro_batch", entry 1 is 4; it should be 0 to 3'),
        ("steps.component.1", "mpl", 'p: "steps": "component", entry 1: unknown component "mpl"; did you mean "mlp"?'),
        ("steps.group.1", 9, 'p: "steps": "group", entry 2 is lower'),
    ],
)
def test_a_mistake_in_a_pipeline_is_named(path: str, value: object, message: str) -> None:
    table = copy.deepcopy(to_json_dict(two_stages()))
    change(path, value)(table)
    with pytest.raises(UserError) as caught:
        from_json_dict(table, "p")
    assert str(caught.value).startswith(message)


def test_non_object_json_is_refused() -> None:
    for value in (None, 3, "text", [1]):
        with pytest.raises(UserError, match="should be a JSON object"):
            from_json_dict(value)


def test_a_program_without_steps_is_a_program() -> None:
    empty = collective.Builder("all-reduce", "none", 1, chunks=1).build()
    assert from_json_dict(to_json_dict(empty)) == empty
    assert np.array_equal(from_json_dict(to_json_dict(empty)).steps.rank, [])
