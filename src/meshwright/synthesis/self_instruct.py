"""Self-Instruct: a served model writes new tasks from a few examples, then input-output pairs for them, filtered.

Wang et al., Self-Instruct: Aligning Language Models with Self-Generated Instructions (arXiv:2212.10560), section 2.2;
constants missing in the paper are from its code (github.com/yizhongw/self-instruct). The prompts are our own, for
models that follow instructions; the paper's are for continuation.
"""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.data.records.exchanges import Record, find_first_request
from meshwright.errors import UserError
from meshwright.synthesis.chat_client import ChatClient
from meshwright.synthesis.endpoint import ChatRequest, Completion, Sampling, make_user_message
from meshwright.synthesis.rouge import SimilarityPool

IN_CONTEXT, GENERATED_IN_CONTEXT = 8, 2  # tasks in a prompt, of which the model's own ("Instruction Generation")
TOO_ALIKE = 0.7  # ROUGE-L with any task of the pool ("Filtering and Postprocessing")
MIN_WORDS, MAX_WORDS = 4, 150  # of an instruction; these and the words below: the code's
MAX_INSTANCES = 5  # of one task
UNSUITABLE = (  # what a language model cannot look at or do; the paper names image, picture and graph
    *("image", "images", "graph", "graphs", "picture", "pictures", "file", "files", "map", "maps"),
    *("draw", "plot", "go to"),
)
DEFAULT_SAMPLING = Sampling(temperature=0.7)
_NEW_TASKS = 8  # that a prompt asks for
_ROUND = 8  # prompts whose tasks are sampled from the same pool
_PATIENCE = 5  # rounds without a new task after which the run ends

_WRITE_TASKS = (
    "Here are {count} tasks that people have given an assistant:\n\n{tasks}\n\nWrite {more} more, numbered on from "
    "{next}, one a line. They should differ from these and from one another in topic, in form and in what is wanted; "
    "about a quarter of them should have one of a few fixed labels as the answer. Each must be complete in itself, "
    "doable with text alone, and one or two sentences long. Write the tasks only, without solving them."
)
_IS_CLASSIFICATION = (
    "Is the answer to this task always one of a small, fixed set of labels (such as yes or no, a category, a grade)? "
    "Answer with yes or no alone.\n\nTask: {task}"
)
_WRITE_INSTANCE = (
    "Task: {task}\n\nWrite {count} of what the task may be given to work on, with the answer. For each, write a line "
    "that says Input: and then the material (or none, if the task needs nothing else), then a line that says Output: "
    "and then the complete answer. Write nothing else."
)
_WRITE_LABELLED = (
    "Task: {task}\n\nThe answer is one of a few labels. For each of these labels, up to {count}, write a line that "
    "says Label: and then the label, then a line that says Input: and then material that gets this label. Write "
    "nothing else."
)


@dataclass
class SelfInstructResult:
    """Result of a Self-Instruct run.

    records: generated records with Alpaca's keys (instruction, input, output) and `origin`. dropped: reason -> number
    of discarded tasks and pairs. rounds: number of rounds (batches of requests for new tasks) that were sent.
    """

    records: list[Record] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    rounds: int = 0

    def summarize(self) -> dict[str, Any]:
        """Return {"records": number, "rounds": number, "dropped": {reason: number}}."""
        return {"records": len(self.records), "rounds": self.rounds, "dropped": dict(sorted(self.dropped.items()))}


def self_instruct(
    seeds: Sequence[tuple[str, Record]],
    client: ChatClient,
    count: int,
    sampling: Sampling = DEFAULT_SAMPLING,
    instances: int = 1,
    log: Callable[[str], None] = lambda line: None,
) -> SelfInstructResult:
    """Let a served model generate `count` new tasks (fewer if it repeats itself), each with input-output pairs
    (Self-Instruct). Raises `UserError` if `seeds` has no task.

    seeds: (position for errors such as "a.jsonl:17", record) of tasks written by people; each request shows the model
    some of these tasks. client: client of the model. sampling: settings of the requests. instances: number of pairs to
    ask for if a task has free-text answers; for a classification task, one pair for each of up to 5 labels is asked
    for. log: receives progress lines.

    Requests depend only on the arguments and earlier answers. A restarted run therefore makes the same requests, and
    the client reads their answers from its journal.
    """
    people = [find_first_request(record, where) for where, record in seeds]
    people = list(dict.fromkeys(text for text in people if text.strip()))
    if not people:
        raise UserError("Self-Instruct needs tasks to start from, and the file has none")
    outcome, pool = SelfInstructResult(), SimilarityPool(people)
    made: list[str] = []
    idle = 0
    while len(made) < count and idle < _PATIENCE:
        random_ = random.Random(f"{sampling.seed} {outcome.rounds}")
        prompts = [_make_tasks_prompt(random_, people, made) for _ in range(_ROUND)]
        requests = [
            sampling.make_request(prompt, _derive_seed(sampling.seed, outcome.rounds, number))
            for number, prompt in enumerate(prompts)
        ]
        before = len(made)
        for answer in client.ask(requests, "new tasks"):
            for task in _parse_numbered_list(answer, outcome.dropped):
                reason = find_unsuitable_reason(task) or (
                    "like another task" if pool.has_similar(task, TOO_ALIKE) else None
                )
                if reason:
                    outcome.dropped[reason] += 1
                elif len(made) < count:
                    made.append(task)
                    pool.add(task)
        idle = 0 if len(made) > before else idle + 1
        outcome.rounds += 1
        log(f"{len(made):,} of {count:,} new tasks after {outcome.rounds} rounds")
    _add_instances(outcome, made, client, sampling, instances)
    return outcome


def find_unsuitable_reason(task: str) -> str | None:
    """Return the reason why the generated instruction `task` is unsuitable, such as "begins with a punctuation mark";
    None if it is suitable. Similarity to other instructions is not checked.
    """
    length = len(task.split())
    if length < MIN_WORDS:
        return "too short"
    if length > MAX_WORDS:
        return "too long"
    if any(re.search(rf"\b{word}\b", task, re.IGNORECASE) for word in UNSUITABLE):
        return "needs more than text"
    if task.lower().startswith("write a program"):
        return "begins with: write a program"
    if task[0] in string.punctuation:
        return "begins with a punctuation mark"
    return None


def _make_tasks_prompt(random_: random.Random, people: Sequence[str], made: Sequence[str]) -> str:
    """Return the prompt that asks the model for new tasks and shows randomly drawn tasks as examples. random_:
    random-number generator. people: tasks written by people. made: tasks that the model has generated so far.
    """
    own = random_.sample(list(made), min(GENERATED_IN_CONTEXT, len(made)))
    shown = own + random_.sample(list(people), min(IN_CONTEXT - len(own), len(people)))
    random_.shuffle(shown)
    tasks = "\n".join(f"{number}. {' '.join(task.split())}" for number, task in enumerate(shown, 1))
    return _WRITE_TASKS.format(count=len(shown), tasks=tasks, more=_NEW_TASKS, next=len(shown) + 1)


def _parse_numbered_list(answer: Completion | None, dropped: Counter[str]) -> list[str]:
    """Parse the numbered list in the model's answer; return its items. If the answer was truncated, the last item is
    left out.

    answer: None if the request was refused. dropped: reason -> count, increased for each failure.
    """
    if answer is None:
        dropped["request refused"] += 1
        return []
    parts = re.split(r"^\s*(?:task\s+)?\d+\s*[.):]\s*", answer.text, flags=re.MULTILINE | re.IGNORECASE)[1:]
    tasks = [task for part in parts if (task := " ".join(part.split()).strip("*"))]
    if not tasks:
        dropped["answer without tasks"] += 1
    if answer.finish_reason == "length" and tasks:
        dropped["cut off"] += 1
        tasks.pop()
    return tasks


def _add_instances(
    outcome: SelfInstructResult,
    tasks: Sequence[str],
    client: ChatClient,
    sampling: Sampling,
    instances: int,
) -> None:
    """Ask the model for input-output pairs of each task and append them to `outcome.records`.

    tasks: instructions. client: client of the model. sampling: settings of the requests. instances: number of pairs to
    ask for if a task has free-text answers. For a classification the model writes each label before its input, so that
    labels are balanced.
    """
    kinds = client.ask(
        [
            ChatRequest(make_user_message(_IS_CLASSIFICATION.format(task=task)), max_tokens=8, seed=sampling.seed)
            for task in tasks
        ],
        "kinds",
    )
    labelled = [kind is not None and kind.text.strip().lower().startswith("yes") for kind in kinds]
    requests = []
    for number, (task, has_labels) in enumerate(zip(tasks, labelled, strict=True)):
        prompt = _WRITE_LABELLED if has_labels else _WRITE_INSTANCE
        text = prompt.format(task=task, count=MAX_INSTANCES if has_labels else instances)
        requests.append(sampling.make_request(text, _derive_seed(sampling.seed, -1, number)))
    for task, has_labels, answer in zip(tasks, labelled, client.ask(requests, "examples"), strict=True):
        pairs = _parse_pairs(answer, has_labels, outcome.dropped)
        if not pairs:
            outcome.dropped["task without an example"] += 1
        origin = {"method": "self-instruct", "model": client.endpoint.model, "classification": has_labels}
        for given, wanted in pairs[:MAX_INSTANCES]:
            outcome.records.append({"instruction": task, "input": given, "output": wanted, "origin": origin})


def _parse_pairs(answer: Completion | None, labelled: bool, dropped: Counter[str]) -> list[tuple[str, str]]:
    """Parse the input-output pairs in the model's answer; return (input, output) of the pairs that pass the filters of
    the paper and its code.

    answer: None if the request was refused. labelled: True if the task is a classification; the answer then gives each
    label (output) before its input. dropped: reason -> count, increased for each refused request and each pair or task
    that is filtered out.
    """
    if answer is None:
        dropped["request refused"] += 1
        return []
    first, second = ("label", "input") if labelled else ("input", "output")
    marks = re.split(rf"^[\s*#]*({first}|{second})\s*\d*\s*:[*\s]*", answer.text, flags=re.MULTILINE | re.IGNORECASE)
    found: list[tuple[str, str]] = []
    opened: str | None = None
    for mark, text in zip(marks[1::2], marks[2::2], strict=True):
        if mark.lower() == first:
            opened = text.strip()
        elif opened is not None:
            found.append((text.strip(), opened) if labelled else (opened, text.strip()))
            opened = None
    if answer.finish_reason == "length" and found and opened is None:
        dropped["cut off"] += 1
        found.pop()
    kept: list[tuple[str, str]] = []
    for given, wanted in found:
        given = "" if given.lower().strip(". ()<>") in ("none", "n/a", "noinput") else given
        if not wanted:
            dropped["empty output"] += 1
        elif given == wanted:
            dropped["output repeats the input"] += 1
        elif given.endswith(":") or wanted.endswith(":"):
            dropped["ends with a colon"] += 1
        elif (given, wanted) not in kept:
            kept.append((given, wanted))
    inputs = [given for given, _ in kept if given]
    if len(set(inputs)) < len(inputs):  # one input with two outputs: the task is ambiguous
        dropped["one input, several outputs"] += 1
        return []
    return kept


def _derive_seed(seed: int, *numbers: int) -> int:
    """Derive the sampling seed of one request from the run's seed and the numbers that identify the request (round,
    task ...), so that equal prompts get different answers.
    """
    return random.Random(f"{seed} {numbers}").getrandbits(31)
