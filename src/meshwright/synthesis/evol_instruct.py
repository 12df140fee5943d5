"""Evol-Instruct: a served model repeatedly rewrites instructions, harder or on another topic, and answers them.

Xu et al., WizardLM: Empowering Large Language Models to Follow Complex Instructions (arXiv:2304.12244), section 3.2:
five in-depth methods and one in breadth, chosen uniformly; a failed evolution is dropped, and the next round retries
from the last good instruction. The prompts are our own.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.data.records.exchanges import Record, name_records, split_exchange
from meshwright.errors import UserError
from meshwright.synthesis.chat_client import ChatClient
from meshwright.synthesis.endpoint import ChatRequest, Completion, Sampling, make_user_message

IN_DEPTH: dict[str, str] = {
    "add-constraints": "Ask for one thing more that the answer must respect: a condition, a limit or a requirement.",
    "deepening": "Where it asks about a subject, ask for more of it: further reaching and in more detail.",
    "concretizing": "Where it speaks in general terms, put particular ones in their place: names, cases, quantities.",
    "increase-reasoning-steps": "Where a few thoughts are enough to answer it, make it need several in a chain.",
    "complicate-input": (
        "Give it something to work on that is not plain prose, such as a table, code, a formula, JSON or a shell "
        "session, written out in full."
    ),
}
IN_BREADTH = "in-breadth"
METHODS = (*IN_DEPTH, IN_BREADTH)
SORRY_WORDS = 80  # a response with "sorry" in fewer words counts as a failure (Elimination Evolving, rule 2)
DEFAULT_SAMPLING = Sampling(max_tokens=2048)
_WORDS_MORE = "10 to 20"  # that a rewriting in depth may add

_DEEPEN = (
    "Rewrite the task inside the tags so that it is somewhat harder for an assistant, yet makes sense, can be "
    "understood and can be answered by people. {how} Keep all that is not prose, such as tables and "
    "code, and what the task gives to work on. Do not make it long: add {words} words, beside material. Write the new "
    "task alone, without answering it.\n\n<task>\n{task}\n</task>"
)
_BROADEN = (
    "Write a new task in the field of the one inside the tags, about something less common in it, as long and as hard. "
    "It must make sense and be answerable by people. Write the new task alone, without answering it.\n\n"
    "<task>\n{task}\n</task>"
)
_COMPARE = (
    "Do these two tasks ask for the same? They do if they have the same conditions and requirements, and go as far "
    "and as deep. Answer with same or different alone.\n\nFirst:\n{first}\n\nSecond:\n{second}"
)
# Words of the prompts, ours and the paper's, that an evolved task repeats where the model misunderstood (rule 4).
_COPIED = (
    "given prompt",
    "rewritten prompt",
    "created prompt",
    "<task>",
    "</task>",
    "inside the tags",
    "rewritten task",
)
# Function words of English (rule 3).
_STOP_WORDS = frozenset(
    """
    a about after all also am an and any are as at be because been before being but by can could did do does for
    from had has have he her here him his how i if in into is it its just me more most my no not of on only or
    other our out over she should so some such than that the their them then there these they this those to too
    under up very was we were what when where which while who why will with would you your
    """.split()  # noqa: SIM905 - a list of strings is four times as long
)


@dataclass
class _Lineage:
    """State of an instruction that is rewritten in several rounds. source: name of the original record. task: text of
    the instruction after the last successful rewriting. path: names of the rewriting methods applied so far, in order.
    """

    source: str
    task: str
    path: list[str] = field(default_factory=list)


def evol_instruct(
    seeds: Sequence[tuple[str, Record]],
    client: ChatClient,
    rounds: int = 4,
    sampling: Sampling = DEFAULT_SAMPLING,
    methods: Sequence[str] = METHODS,
    log: Callable[[str], None] = lambda line: None,
) -> tuple[list[Record], dict[str, Any]]:
    """Let a served model rewrite instructions in several rounds, harder or on another topic, and answer them
    (Evol-Instruct); return (evolved records with responses, summary as JSON). Raises `UserError` if `seeds` has no
    instruction.

    seeds: (position for errors such as "a.jsonl:17", record) of the instructions to begin with. client: client of the
    model. rounds: number of times that each instruction is rewritten (4 in the paper). sampling: settings of the
    requests. methods: names of rewriting methods; each rewriting uses one of them, drawn at random. log: receives
    progress lines.

    Records have Alpaca's keys and `origin`: {method: "evol-instruct", model, round, path: rewriting methods applied so
    far, of: name of the source record}. Summary: number of `records`, of `rounds`, of records `by_method`, and of
    `dropped` rewritings by reason.
    """
    seed = sampling.seed
    names = name_records([record for _, record in seeds])
    lines = [
        _Lineage(name, split_exchange(record, where).prompt) for name, (where, record) in zip(names, seeds, strict=True)
    ]
    lines = [line for line in lines if line.task.strip()]
    if not lines:
        raise UserError("Evol-Instruct needs instructions to start from, and the file has none")
    records: list[Record] = []
    dropped: Counter[str] = Counter()
    by_method: Counter[str] = Counter()
    for number in range(1, rounds + 1):
        chosen = [random.Random(f"{seed} {number} {place}").choice(list(methods)) for place in range(len(lines))]
        seeds_of = [random.Random(f"{seed} {number} {place} ask").getrandbits(31) for place in range(len(lines))]
        prompts = [_make_evolving_prompt(line.task, method) for line, method in zip(lines, chosen, strict=True)]
        asked = [sampling.make_request(prompt, own) for prompt, own in zip(prompts, seeds_of, strict=True)]
        tasks = [_parse_evolved(answer, dropped) for answer in client.ask(asked, f"round {number}: evolving")]
        going = [place for place, task in enumerate(tasks) if task is not None]

        compare = [
            ChatRequest(
                make_user_message(_COMPARE.format(first=lines[at].task, second=tasks[at])), max_tokens=8, seed=seed
            )
            for at in going
        ]
        judged = client.ask(compare, f"round {number}: comparing")
        same = {at for at, answer in zip(going, judged, strict=True) if answer and _is_judged_same(answer.text)}
        dropped["nothing new"] += len(same)
        going = [at for at in going if at not in same]

        answering = [sampling.make_request(str(tasks[at]), seeds_of[at]) for at in going]
        for at, answer in zip(going, client.ask(answering, f"round {number}: answering"), strict=True):
            if reason := _find_failure(answer):
                dropped[reason] += 1
                continue
            assert answer is not None
            line, task = lines[at], str(tasks[at])
            line.task, line.path = task, [*line.path, chosen[at]]
            by_method[chosen[at]] += 1
            origin = {"method": "evol-instruct", "model": client.endpoint.model, "round": number, "path": line.path}
            output = answer.text.strip()
            records.append(
                {"instruction": task, "input": "", "output": output, "origin": {**origin, "of": line.source}}
            )
        log(f"round {number} of {rounds}: {len(records):,} evolved instructions")
    counts = {reason: count for reason, count in sorted(dropped.items()) if count}
    return records, {"records": len(records), "rounds": rounds, "by_method": dict(by_method), "dropped": counts}


def _make_evolving_prompt(task: str, method: str) -> str:
    """Return the prompt that asks a model to rewrite the instruction `task`. method: name of the rewriting method, such
    as "deepening" or "in-breadth".
    """
    if method == IN_BREADTH:
        return _BROADEN.format(task=task)
    return _DEEPEN.format(how=IN_DEPTH[method], words=_WORDS_MORE, task=task)


def _parse_evolved(answer: Completion | None, dropped: Counter[str]) -> str | None:
    """Parse the rewritten instruction in the model's answer; return None if it is unusable. dropped: reason -> count,
    increased for an unusable answer."""
    if answer is None:
        dropped["request refused"] += 1
        return None
    if answer.finish_reason == "length":
        dropped["cut off"] += 1
        return None
    task = answer.text.strip().removeprefix("<task>").removesuffix("</task>").strip()
    if not task:
        dropped["empty task"] += 1
        return None
    if any(words in task.lower() for words in _COPIED):
        dropped["repeats the evolving prompt"] += 1
        return None
    return task


def _is_judged_same(text: str) -> bool:
    """Return True if `text`, the model's answer to the question whether two instructions are the same, says that they
    are."""
    return text.strip().lower().lstrip("*\"'").startswith(("same", "equal"))


def _find_failure(answer: Completion | None) -> str | None:
    """Return the reason why the model's answer to a rewritten instruction is unusable, such as "response cut off"; None
    if it is usable. answer: None if the request was refused.
    """
    if answer is None:
        return "request refused"
    if answer.finish_reason == "length":
        return "response cut off"
    found = re.findall(r"[^\W_]+", answer.text.lower().replace("'", ""))
    if "sorry" in found and len(found) < SORRY_WORDS:
        return "response is sorry"
    if all(word in _STOP_WORDS for word in found):
        return "response says nothing"
    return None
