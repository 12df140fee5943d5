"""Renders chat templates in a Jinja sandbox, compatible with transformers; runs as the subprocess for untrusted ones.

This file imports nothing of Meshwright: the process starts in a tenth of a second and holds nothing but the template.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
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
        super().__init__(reason)
        self.line = line


class LimitReached(Exception):
    """Error: a template took more time or memory, or wrote more text, than any chat template needs."""


class Renderer:
    """Chat template that is compiled and rendered in this process by a Jinja sandbox, as `transformers` does.

    source: Jinja source. named: special tokens by the variable that stands for them in templates, such as {"bos_token":
    "<s>"}.
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
        self, messages: Sequence[Mapping[str, Any]], prompt: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Render a conversation; returns the text with the private-use characters `BEGIN` and `END` around each {%
        generation %} block.

        messages: the template's variables for each message (`role`, `content` ...). prompt: append the header of the
        assistant's next turn. tools: JSON schemas of functions; if there are none, the template's variable is None.
        Raises `TemplateError` if the template refuses the messages or fails, `LimitReached` if the text is too long.
        """
        from jinja2 import TemplateError as JinjaError

        try:
            text: str = self._template.render(
                messages=messages, tools=tools or None, documents=None, add_generation_prompt=prompt, **self._named
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
        raise JinjaError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(format: str) -> str:
        return datetime.datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def serve_requests() -> None:
    """Main loop of the subprocess: read requests from standard input, one JSON object per line, and write one answer
    per line, until the input ends.

    A request is {"source", "named"}, the template, which comes first, or {"messages", "prompt", "tools"}, a
    conversation. An answer has one of "text", "error", "limit" and "not_a_template". The kernel ends the process when a
    request exceeds 10 seconds (`RENDER_SECONDS`) of processor time.
    """
    create_environment()  # imports Jinja before memory is limited
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(
        resource.RLIMIT_AS, (MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES), hard)
    )
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles interrupts from the terminal
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    renderer: Renderer | None = None
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, RENDER_SECONDS)
        stop = False
        try:
            request = json.loads(line)
            if "source" in request:
                renderer, answer = Renderer(request["source"], request["named"]), {"text": ""}
            else:
                assert renderer is not None
                answer = {"text": renderer.render_marked(request["messages"], request["prompt"], request["tools"])}
            data = json.dumps(answer).encode()
        except NotATemplate as error:
            data = json.dumps({"not_a_template": str(error)[:1000], "line": error.line}).encode()
        except TemplateError as error:
            data = json.dumps({"error": str(error)[:1000]}).encode()
        except LimitReached as error:
            data = json.dumps({"limit": str(error)}).encode()
        except MemoryError:
            data, stop = json.dumps({"limit": f"needs more than {MEMORY_BYTES >> 30} GiB of memory"}).encode(), True
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(data + b"\n")
        answers.flush()
        if stop:
            return


if __name__ == "__main__":
    serve_requests()
