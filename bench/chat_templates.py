"""Chat templates of other projects, rendered here and by `transformers`, and which text is trained on.

    python bench/chat_templates.py FOLDER...

FOLDER: folders with .jinja files, such as those of TRL, axolotl, vLLM or llama.cpp (none are kept in this repository).
Each template renders a battery of conversations: plain, with a system message, several turns, tool calls and results,
reasoning, special tokens spelled in messages, white space around texts. A rendering must equal that of `transformers`,
and what `transformers` refuses must be refused. Of a template that marks the assistant's text with {% generation %} the
trained spans must equal those marks. Of the others each assistant turn must be one span that has its whole text, no
text of another message, and the template's end-of-turn token, if it has one. Writes
`bench/results/chat_templates.json`.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from transformers.utils.chat_template_utils import render_jinja_template

from common import write_result
from meshwright.data.records.chat_template import ChatTemplate
from meshwright.data.records.messages import Message
from meshwright.data.records.template_rendering import TemplateError
from meshwright.errors import UserError

SPECIAL = re.compile(
    r"<\|[\w./-]+\|>|<｜[^<>｜]{1,40}｜>|</?s>|<[be]os>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|\[/?INST\]|\[gMASK\]|<sop>|<extra_id_\d>"
)
CALL = {
    "type": "function",
    "id": "abcdefghi",
    "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ASK, TELL = {"role": "user", "content": "What is a fox?"}, {"role": "assistant", "content": "An animal, with a tail."}
MORE, LAST = {"role": "user", "content": 'And "red"?\nSay.'}, {"role": "assistant", "content": "Some are.\n\nNot all."}
SYSTEM = {"role": "system", "content": "You know foxes."}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([ASK, TELL], None),
    "two turns": ([ASK, TELL, MORE, LAST], None),
    "system, two turns": ([SYSTEM, ASK, TELL, MORE, LAST], None),
    "white space": (
        [{"role": "user", "content": "  Q?\n\n"}, {"role": "assistant", "content": "\n A. \n"}, MORE, LAST], None,
    ),
    "special tokens in text": ([ASK, {"role": "assistant", "content": "It is <|im_end|> or </s>."}, MORE, LAST], None),
    "tool call": (
        [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]},
         {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "Sunny skies."}, LAST],
        [TOOL],
    ),
    "reasoning": (
        [ASK, {**TELL, "reasoning_content": "Recall zoology."}, MORE, {**LAST, "reasoning_content": "Colours vary."}],
        None,
    ),
    "thinking in text": (
        [ASK, {"role": "assistant", "content": "<think>\nRecall it.\n</think>\n\nAn animal."}, MORE, LAST], None,
    ),
}  # fmt: skip


def to_message(turn: dict[str, Any]) -> Message:
    fields = {key: value for key, value in turn.items() if key not in ("role", "content")}
    return Message(turn["role"], turn["content"], fields=fields)


def check(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """Return the result for one template and conversation, "" for a good one."""
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    special = frozenset({*SPECIAL.findall(source), *named.values()})
    template = ChatTemplate(source, named, special, "the template")
    ours = [to_message(turn) for turn in messages]
    given = [message.to_template_variables() for message in ours]
    if template._takes_parts:
        given = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in given]
    try:
        theirs, marks = render_jinja_template(
            [given], tools=tools, chat_template=source, return_assistant_tokens_mask=template.marks_responses, **named
        )
    except Exception:  # whatever a template raises
        theirs = None
    try:
        rendered = template.render(ours, tools=tools or ())
    except (TemplateError, UserError):
        return "refused by both" if theirs is None else "refused here only"
    if theirs is None:
        return "refused by transformers only"
    if rendered != theirs[0]:
        return "another text"
    try:
        found = template.render_with_spans(ours, tools=tools or ())
    except TemplateError as error:
        return f"no spans: {re.sub(r'message [0-9]+', 'message N', str(error))[:100]}"
    if template.marks_responses:
        begins_ends = [tuple(each) for each in marks[0] if each[0] < each[1]]
        return "" if found.responses == begins_ends else "spans differ from marks"
    turns = [turn for turn in messages if turn["role"] == "assistant"]
    if len(found.responses) != len(turns):
        return f"{len(found.responses)} spans for {len(turns)} turns"
    for turn, (begin, end) in zip(turns, found.responses, strict=True):
        span = found.text[begin:end]
        text = re.sub(r"(?s)<think>.*</think>", "", turn["content"]).strip()
        if text not in span or (turn.get("tool_calls") and "Oslo" not in span):
            return "a span lacks its text"
        if any(other["content"].strip() in span for other in messages if other not in turns):
            return "a span has text of another message"
        after = template._special_pattern.match(found.text, end)
        own = template._special_pattern.search(span)
        begins_turns = after is not None and after[0] in re.findall(r"<\|[a-z]+\|>", found.text[:60])
        if own is None and after is not None and not begins_turns:
            return "a span lacks the end token"
    return ""


def main() -> None:
    paths = sorted({path for folder in sys.argv[1:] for path in Path(folder).rglob("*.jinja")})
    results, tally, seen = {}, Counter[str](), set()
    began = time.perf_counter()
    for path in paths:
        source = path.read_text()
        if source in seen or "messages" not in source:
            continue
        seen.add(source)
        found = {}
        for name, (messages, tools) in CONVERSATIONS.items():
            try:
                found[name] = check(source, messages, tools)
            except UserError as error:
                found[name] = f"not a template here: {error}"[:120]
            tally[found[name] or "good"] += 1
        results[f"{path.parent.parent.name}/{path.name}"] = {key: value for key, value in found.items() if value}
    print(f"{len(results)} templates, {time.perf_counter() - began:.0f} s")
    for text, count in tally.most_common():
        print(f"{count:5} {text}")
    write_result(
        "chat_templates",
        {"templates": len(results), "tally": dict(tally.most_common()), "not_good": results},
        quiet=True,
    )


if __name__ == "__main__":
    main()
