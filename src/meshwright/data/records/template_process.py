"""Subprocess that renders untrusted chat templates under CPU-time and memory limits.

Limits inside Jinja would have to cover every operator, method and filter that can produce large values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.data.limited_process import HandlerFailed, LimitedProcess
from meshwright.data.records import template_rendering
from meshwright.data.records.template_rendering import (
    MEMORY_BYTES,
    RENDER_SECONDS,
    LimitReached,
    NotATemplate,
    TemplateError,
)


class RenderProcess(LimitedProcess):
    """Chat template from an untrusted source, rendered in a sandboxed subprocess with limits on CPU time and memory. It
    has the same methods as `Renderer`.

    source: Jinja source. named: {variable of templates: special token}, such as {"bos_token": "<s>"}.
    """

    def __init__(self, source: str, named: Mapping[str, str]) -> None:
        """Start the subprocess, which compiles the template. Raises `NotATemplate` if `source` is no valid Jinja,
        `LimitReached` if compiling it exceeds the limits.
        """
        first = {"source": source, "named": dict(named)}
        super().__init__(template_rendering.__file__, first, RENDER_SECONDS, MEMORY_BYTES)
        try:
            _get_text(self.start())
        except HandlerFailed as error:
            raise NotATemplate(str(error)) from None

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], prompt: bool, tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """Render a conversation in the subprocess; return the text with the private-use characters `BEGIN` and `END`
        around each {% generation %} block. messages: dicts of template variables (`role`, `content` ...). prompt:
        append the header of the assistant's next turn. tools: JSON schemas of functions. variables: further variables.
        Raises `TemplateError` if the template refuses the messages, `LimitReached` if a limit is exceeded."""
        request = {"messages": list(map(dict, messages)), "prompt": prompt, "tools": list(tools)}
        try:
            return _get_text(self.ask({**request, "variables": dict(variables or {})}))
        except HandlerFailed as error:
            raise TemplateError(f"cannot render it: {error}") from None


def _get_text(answer: Mapping[str, Any]) -> str:
    """Return the rendered text in `answer`, the JSON object from the subprocess. Raises `TemplateError` if the template
    refused the messages, `NotATemplate` if the template does not compile, `LimitReached` if a limit was exceeded or no
    answer came."""
    if "limit" in answer:
        raise LimitReached(answer["limit"])
    if "not_a_template" in answer:
        raise NotATemplate(answer["not_a_template"], answer["line"])
    if "error" in answer:
        raise TemplateError(answer["error"])
    return str(answer["text"])
