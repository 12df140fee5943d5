"""Renders chat templates in a Jinja sandbox, compatible with transformers; runs as the subprocess for untrusted ones.

This file imports nothing of Meshwright: the process starts in a tenth of a second and holds nothing but the template.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

BEGIN, END = "\U0010fff0", "\U0010fff1"  # private-use characters around the text that a template marks as generated
RENDER_SECONDS = 10  # of CPU time for one conversation; usually 0.0001
MEMORY_BYTES = 2 << 30  # address space of the process
OUTPUT_CHARACTERS = 1 << 22  # plus OUTPUT_FACTOR for each character of the messages
OUTPUT_FACTOR = 16


class TemplateError(Exception):
    """Error: the template refuses a conversation (calls `raise_exception`), or fails while rendering it."""


class NotATemplate(Exception):
    """Error: the text is not a valid Jinja template. reason: Jinja's message. line: number of the faulty line, if
    known.
    """

    def __init__(self, reason: str, line: int | None = None) -> None:
        """Create the error; arguments: see the class."""
        super().__init__(reason)
        self.line = line


class LimitReached(Exception):
    """Error: a template took more time or memory, or wrote more text, than any chat template needs."""


class Renderer:
    """Chat template that is compiled and rendered in this process by a Jinja sandbox, as `transformers` does.

    source: Jinja source. named: {variable of templates: special token}, such as {"bos_token": "<s>"}.
    """

    def __init__(self, source: str, named: Mapping[str, str]) -> None:
        """Compile the template. Raises `NotATemplate` if `source` does not compile."""
        from jinja2 import TemplateError as JinjaError

        self._named = dict(named)
        try:
            self._template = create_environment().from_string(source)
        except JinjaError as error:
            raise NotATemplate(str(error), getattr(error, "lineno", None)) from None
        except (RecursionError, SyntaxError, ValueError, ArithmeticError) as error:  # raised by Jinja's generated code
            raise NotATemplate(f"{type(error).__name__}: {error}") from None

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], prompt: bool, tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """Render a conversation; return the text with the private-use characters `BEGIN` and `END` around each {%
        generation %} block.

        messages: dicts of template variables (`role`, `content` ...). prompt: append the header of the assistant's next
        turn. tools: JSON schemas of functions; if there are none, the template's variable is None. variables: further
        variables. Raises `TemplateError` if the template refuses the messages or fails, `LimitReached` if the text is
        too long.
        """
        from jinja2 import TemplateError as JinjaError

        try:
            given = {"documents": None, **self._named, **(variables or {})}
            text: str = self._template.render(
                {**given, "messages": messages, "tools": tools or None, "add_generation_prompt": prompt}
            )
        except (
            JinjaError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise TemplateError(f"cannot render it: {error}") from None
        most = OUTPUT_CHARACTERS + OUTPUT_FACTOR * len(json.dumps(messages))
        if len(text) > most:
            raise LimitReached(f"writes {len(text):,} characters, more than the limit of {most:,}")
        return text


def create_environment() -> Any:
    """Create a sandboxed Jinja environment with the extensions and functions that `transformers` gives to chat
    templates (its `_compile_jinja_template`).
    """
    from jinja2 import TemplateError as JinjaError
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Jinja extension {% generation %} ... {% endgeneration %}, with which templates mark the text that the
        assistant generates.
        """

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            """Parse the block at the position of Jinja's `parser` to a node that calls `_mark` on the block's content;
            return the node.
            """
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            """Return the rendered content of the block, given by `caller()`, between the private-use characters `BEGIN`
            and `END`.
            """
            return f"{BEGIN}{caller()}{END}"

    def raise_exception(message: str) -> None:
        """Raise `TemplateError` with `message`; the function `raise_exception` of templates."""
        raise JinjaError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        """Serialize a value to JSON; the filter `tojson` of templates, which, unlike Jinja's, does not escape HTML."""
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(format: str) -> str:
        """Format the present time; the function `strftime_now` of templates."""
        return datetime.datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def make_handler() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that answers the requests of `RenderProcess` in its subprocess. The first request is the
    template, {"source", "named"}. Each further request is a conversation, {"messages", "prompt", "tools", "variables"}.
    An answer has one of the keys "text", "error", "limit" and "not_a_template".
    """
    create_environment()  # imports Jinja before memory is limited
    renderers: list[Renderer] = []

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        """Compile the template of a request, or render its conversation."""
        try:
            if "source" in request:
                renderers[:] = [Renderer(request["source"], request["named"])]
                return {"text": ""}
            return {"text": renderers[0].render_marked(**request)}
        except NotATemplate as error:
            return {"not_a_template": str(error)[:1000], "line": error.line}
        except TemplateError as error:
            return {"error": str(error)[:1000]}
        except LimitReached as error:
            return {"limit": str(error)}

    return handle
