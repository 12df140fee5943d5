"""Failures of rendering that Jinja has no error for are told as those of the record or the template, not as limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.data.records import template_process
from meshwright.data.records.template_process import RenderProcess
from meshwright.data.records.template_rendering import NotATemplate, TemplateError

PROGRAM = """
def make_handler():
    def handle(request):
        if "source" in request:
            assert request["source"] != "faulty", "no such block"
            return {"text": ""}
        raise RuntimeError("dictionary changed size during iteration")
    return handle
"""


def test_exceptions_of_rendering_name_their_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(template_process.template_rendering, "__file__", str(program))
    with pytest.raises(NotATemplate, match="^AssertionError: no such block$"):
        RenderProcess("faulty", {})
    renderer = RenderProcess("{{ messages }}", {})
    for _ in range(2):
        with pytest.raises(TemplateError, match="^cannot render it: RuntimeError: dictionary changed size"):
            renderer.render_marked([{"role": "user", "content": "a"}], False)
