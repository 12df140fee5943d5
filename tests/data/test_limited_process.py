"""Subprocesses with limits: a request beyond them ends the process, and the next one starts a new process."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.data.limited_process import HandlerFailed, LimitedProcess

PROGRAM = """
import os, time
def make_handler():
    state = {}
    def handle(request):
        if "first" in request:
            state.update(request, served=0)
            return {}
        state["served"] += 1
        match request["do"]:
            case "loop":
                while True:
                    pass
            case "allocate":
                return {"length": len(bytearray(1 << 30))}
            case "exit":
                os._exit(7)
            case "fail":
                raise KeyError("shape")
            case "print":
                print("loading a model ...", flush=True)
                os.system("echo from a program")
        return {"first": state["first"], "served": state["served"]}
    return handle
"""


@pytest.mark.parametrize(
    "do, limit",
    [
        ("loop", "takes more than 1 s of CPU time"),
        ("allocate", "needs more than 0.5 GiB of memory"),
        ("exit", "ended the process that handles it (exit code 7)"),
    ],
)
def test_request_beyond_a_limit_ends_its_process_alone(tmp_path: Path, do: str, limit: str):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = LimitedProcess(str(program), {"first": "x"}, 1, 1 << 29)
    assert [process.ask({"do": "answer"}) for _ in range(2)][1] == {"first": "x", "served": 2}
    assert process.ask({"do": do}) == {"limit": limit}
    assert process.ask({"do": "answer"}) == {"first": "x", "served": 1}  # a new process, which got the first request


def make_process(tmp_path: Path) -> LimitedProcess:
    program = tmp_path / "program.py"
    program.write_text("print('imported')\n" + PROGRAM)
    return LimitedProcess(str(program), {"first": "x"}, 10, 1 << 29)


def test_printed_text_of_the_program_is_not_an_answer(tmp_path: Path):
    process = make_process(tmp_path)
    assert [process.ask({"do": "print"})["served"] for _ in range(2)] == [1, 2]


def test_exception_of_the_handler_is_raised_with_its_type(tmp_path: Path):
    process = make_process(tmp_path)
    with pytest.raises(HandlerFailed, match=r"^KeyError: 'shape'$"):
        process.ask({"do": "fail"})
    assert process.ask({"do": "answer"}) == {"first": "x", "served": 1}
