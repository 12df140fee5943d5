"""Programs in docs/programs.md are correct and as printed, and the documented errors are real."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshwright.program.check_collective import check_collective
from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.collective import CollectiveProgram
from meshwright.program.collective_text import format_collective, parse_collective
from meshwright.program.json_form import from_json_dict, to_json_dict
from meshwright.program.order import ProgramError
from meshwright.program.pipeline_text import format_pipeline, parse_pipeline

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "programs.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TEXTS = [text for language, text in BLOCKS if language == "text"]
ERROR = "meshwright: error: "


@pytest.mark.parametrize("at", [i for i, text in enumerate(TEXTS) if not text.startswith(ERROR)])
def test_documented_programs_print_verbatim_with_stated_outcome(at: int) -> None:
    check: partial[Any]
    text, after = TEXTS[at], TEXTS[at + 1] if at + 1 < len(TEXTS) else ""
    if text.startswith("collective"):
        collective = parse_collective(text)
        assert format_collective(collective) == text
        check = partial(check_collective, collective)
    else:
        pipeline = parse_pipeline(text)
        assert format_pipeline(pipeline) == text
        check = partial(check_pipeline, pipeline)
    if after.startswith(ERROR):
        with pytest.raises(ProgramError) as caught:
            check()
        assert ERROR + str(caught.value) == after.strip()
    else:
        check()


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "json"])
def test_documented_json_is_written_form_and_valid(text: str) -> None:
    program = from_json_dict(json.loads(text))
    assert to_json_dict(program) == json.loads(text)
    if isinstance(program, CollectiveProgram):
        check_collective(program)
    else:
        check_pipeline(program)


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "python"])
def test_the_python_runs(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(text, "docs/programs.md", "exec"), {})
    assert capsys.readouterr().out.startswith("36.0 ")
