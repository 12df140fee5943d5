"""Self-Instruct and Evol-Instruct with a scripted model: prompts, discarded tasks, reasons."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.synthesis.chat_client import ChatClient
from meshwright.synthesis.endpoint import Endpoint, Sampling
from meshwright.synthesis.evol_instruct import METHODS, evol_instruct
from meshwright.synthesis.rouge import compute_rouge_l, split_words
from meshwright.synthesis.self_instruct import find_unsuitable_reason, self_instruct
from tests.data.served import completion, served

NOUNS = [
    "river",
    "stone",
    "letter",
    "garden",
    "engine",
    "violin",
    "market",
    "shadow",
    "winter",
    "island",
    "bridge",
    "planet",
]
VERBS = [
    "describe",
    "compare",
    "list",
    "explain",
    "summarise",
    "invent",
    "rename",
    "praise",
    "question",
    "measure",
    "sort",
    "defend",
]
SEEDS = [
    ("s:1", {"instruction": f"{v.capitalize()} one {n} of your choice", "output": "x"})
    for v, n in zip(VERBS, NOUNS, strict=True)
]


def make_client(url: str, path: Path, concurrency: int = 4) -> ChatClient:
    return ChatClient(Endpoint(url, "m", backoff=0.001, tries=2), path, concurrency)


def new_task(random_: random.Random) -> str:
    chosen = [random_.choice(VERBS), random_.choice(NOUNS), random_.choice(VERBS), random_.choice(NOUNS)]
    return f"{chosen[0].capitalize()} the {chosen[1]} and then {chosen[2]} any {chosen[3]} nearby"


def self_instruct_model(body: dict, number: int):
    """Scripted answers to the four prompts of Self-Instruct."""
    prompt = body["messages"][-1]["content"]
    random_ = random.Random(f"{prompt} {body['seed']}")
    if prompt.startswith("Here are"):
        first = int(re.search(r"numbered on from (\d+)", prompt)[1])
        return "\n".join(f"{first + n}. {new_task(random_)}" for n in range(8))
    if "yes or no" in prompt:
        return "Yes." if "violin" in prompt else "no"
    if "Label:" in prompt:
        return "Label: loud\nInput: a drum\nLabel: quiet\nInput: a leaf"
    return "Input: none\nOutput: An answer\nof two lines."


def made(tmp_path: Path, model=self_instruct_model, count: int = 12, **options):
    with served(model) as server, make_client(server.url, tmp_path / "j") as client:
        return self_instruct(SEEDS, client, count, **options), server


def test_prompt_contains_eight_tasks_with_two_generated(tmp_path: Path):
    _, server = made(tmp_path, count=100)
    prompts = [request["messages"][0]["content"] for request in server.requests]
    prompts = [prompt for prompt in prompts if prompt.startswith("Here are")]
    people = {record["instruction"] for _, record in SEEDS}
    own = Counter()
    for prompt in prompts:
        shown = re.findall(r"^\d+\. (.*)$", prompt, re.MULTILINE)
        assert len(shown) == len(set(shown)) == 8
        own[sum(task not in people for task in shown)] += 1
    assert set(own) == {0, 2} and own[0] == 8 and own[2] >= 8  # the first round has no generated tasks
    assert len(set(prompts)) == len(prompts)


def test_new_tasks_are_dissimilar_to_seeds_and_each_other(tmp_path: Path):
    outcome, _ = made(tmp_path, count=60)
    tasks = list(dict.fromkeys(record["instruction"] for record in outcome.records))
    assert len(tasks) == 60 and outcome.dropped["like another task"] > 0
    pool = [record["instruction"] for _, record in SEEDS]
    for task in tasks:
        assert max(compute_rouge_l(split_words(task), split_words(other)) for other in pool) < 0.7
        pool.append(task)


def test_task_similarity_threshold_is_seven_tenths(tmp_path: Path):
    seed = "one two three four five six seven eight nine ten"
    seven, six = "one two three four five six seven a b c", "one two three four five six d e f g"

    def model(body: dict, number: int) -> str:
        return f"2. {seven}\n3. {six}" if body["messages"][0]["content"].startswith("Here are") else "Output: x"

    with served(model) as server, make_client(server.url, tmp_path / "j") as client:
        outcome = self_instruct([("s", {"instruction": seed})], client, 1)
        rounds = [body for body in server.requests if body["messages"][0]["content"].startswith("Here are")]
    assert outcome.dropped["like another task"] >= 1 and outcome.dropped["task without an example"] == 1
    asked = [
        body["messages"][0]["content"] for body in server.requests if "yes or no" in body["messages"][0]["content"]
    ]
    assert len(asked) == 1 and asked[0].endswith(six)
    # A single seed task gives equal prompts; each request has a different seed.
    assert len(rounds) == 8 and len({body["seed"] for body in rounds}) == 8


def test_instances_are_input_first_or_label_first_for_classification(tmp_path: Path):
    outcome, _ = made(tmp_path, count=40)
    kinds = {True: set(), False: set()}
    for record in outcome.records:
        kinds[record["origin"]["classification"]].add((record["input"], record["output"]))
        assert record["origin"]["classification"] == ("violin" in record["instruction"])
        assert set(record) == {"instruction", "input", "output", "origin"}
    assert kinds == {True: {("a drum", "loud"), ("a leaf", "quiet")}, False: {("", "An answer\nof two lines.")}}


def test_self_instruct_depends_on_seed_not_concurrency(tmp_path: Path):
    def run(name: str, seed: int, concurrency: int) -> list:
        with served(self_instruct_model) as server, make_client(server.url, tmp_path / name, concurrency) as client:
            return self_instruct(SEEDS, client, 20, Sampling(seed=seed)).records

    assert run("a", 1, 1) == run("b", 1, 8) != run("c", 2, 8)


def test_repetitive_model_ends_run_early(tmp_path: Path):
    outcome, _ = made(tmp_path, lambda body, n: "9. Describe one river of your choice\n10. Sing a song of four lines")
    assert {record["instruction"] for record in outcome.records} <= {"Sing a song of four lines"}
    assert outcome.rounds == 6 and outcome.dropped["like another task"] == 6 * 16 - 1
    outcome, _ = made(tmp_path / "..", lambda body, n: "I would rather not.")
    assert outcome.records == [] and outcome.dropped["answer without tasks"] == 5 * 8


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("Describe a river", "too short"),
        ("Describe a river now", None),
        ("word " * 151, "too long"),
        ("word " * 150, None),
        ("Describe what the picture shows", "needs more than text"),
        ("Please go to the shop today", "needs more than text"),
        ("Describe a photograph and mapping in words", None),
        ("Write a program that adds numbers", "begins with: write a program"),
        ("- Describe a river in words", "begins with a punctuation mark"),
        ("Übersetze diesen Satz ins Englische", None),
    ],
)
def test_instructions_are_filtered_by_the_papers_rules(task: str, reason: str | None):
    assert find_unsuitable_reason(task) == reason


@pytest.mark.parametrize(
    ("answer", "kept", "reason"),
    [
        ("Input: a\nOutput: b", [("a", "b")], None),
        ("**Input:** a\n**Output:** b", [("a", "b")], None),
        ("Input: a\nOutput: b\n\nInput: c\nOutput: d\n", [("a", "b"), ("c", "d")], None),
        ("Input: a\nOutput:", [], "empty output"),
        ("Input: a\nOutput: a", [], "output repeats the input"),
        ("Input: a\nOutput: as follows:", [], "ends with a colon"),
        ("Input: a\nOutput: b\nInput: a\nOutput: c", [], "one input, several outputs"),
        ("Input: a\nOutput: b\nInput: a\nOutput: b", [("a", "b")], None),
        ("nothing of the kind", [], "task without an example"),
    ],
)
def test_instances_are_filtered_by_the_papers_rules(tmp_path: Path, answer: str, kept: list, reason: str | None):
    def model(body: dict, number: int):
        prompt = body["messages"][-1]["content"]
        return (
            self_instruct_model(body, number)
            if prompt.startswith("Here are")
            else "no"
            if "yes or no" in prompt
            else answer
        )

    outcome, _ = made(tmp_path, model, count=1)
    assert [(record["input"], record["output"]) for record in outcome.records] == kept
    assert outcome.dropped[reason] == (reason is not None)


def test_truncated_answers_are_not_used(tmp_path: Path):
    def model(body: dict, number: int):
        prompt = body["messages"][-1]["content"]
        if prompt.startswith("Here are"):
            return completion("9. Name three rivers of Asia\n10. Say which of these stones is the", "length")
        return completion("Input: x\nOutput: y\nInput: z\nOutput: w and", "length") if "Output" in prompt else "no"

    outcome, _ = made(tmp_path, model, count=2)
    assert [(r["instruction"], r["input"], r["output"]) for r in outcome.records] == [
        ("Name three rivers of Asia", "x", "y")
    ]


def test_seed_file_without_tasks_is_refused(tmp_path: Path):
    with served(self_instruct_model) as server, make_client(server.url, tmp_path / "j") as client:
        for run in (lambda: self_instruct([("s", {"instruction": " "})], client, 1), lambda: evol_instruct([], client)):
            with pytest.raises(UserError, match="the file has none"):
                run()


# --- Evol-Instruct


def task_of(prompt: str) -> str:
    return re.search(r"<task>\n(.*)\n</task>", prompt, re.DOTALL)[1]


def evolving(body: dict, number: int):
    """Scripted model whose evolutions are all new and whose responses are all usable."""
    prompt = body["messages"][-1]["content"]
    if prompt.startswith(("Rewrite the task", "Write a new task")):
        return f"{task_of(prompt)} + {body['seed'] % 1000}"
    return "Different." if prompt.startswith("Do these two") else f"Response to {prompt}"


def evolved(tmp_path: Path, model=evolving, count: int = 30, **options):
    with served(model) as server, make_client(server.url, tmp_path / "j") as client:
        return (
            *evol_instruct([(f"s:{n}", {"instruction": f"task {n}"}) for n in range(count)], client, **options),
            server,
        )


def test_each_round_evolves_and_answers_the_last_instructions(tmp_path: Path):
    records, summary, _ = evolved(tmp_path, rounds=3)
    assert summary["records"] == len(records) == 90 and summary["dropped"] == {}
    for record in records:
        assert record["output"] == f"Response to {record['instruction']}"
        assert record["instruction"].count("+") == record["origin"]["round"] == len(record["origin"]["path"])
    last = {record["instruction"]: record for record in records if record["origin"]["round"] == 3}
    earlier = {record["instruction"] for record in records if record["origin"]["round"] == 2}
    assert all(task.rpartition(" + ")[0] in earlier for task in last)


def test_six_methods_are_chosen_uniformly_with_distinct_prompts(tmp_path: Path):
    _, summary, server = evolved(tmp_path, rounds=4, count=60)
    counts = summary["by_method"]
    assert set(counts) == set(METHODS) and len(METHODS) == 6
    # 240 draws: 40 each, standard deviation 5.8
    assert all(abs(count - 40) < 5 * 5.8 for count in counts.values())
    prompts = {re.sub(r"<task>.*", "", r["messages"][0]["content"], flags=re.DOTALL) for r in server.requests[:60]}
    assert len(prompts) == 6


@pytest.mark.parametrize(
    ("task", "judgement", "response", "reason"),
    [
        ("new", "Same.", "fine", "nothing new"),
        ("new", "different", "Sorry, I cannot do that.", "response is sorry"),
        ("new", "different", "I am sorry to say " + "word " * 80, None),
        ("new", "different", "?! ... --", "response says nothing"),
        ("new", "different", "It is what it is.", "response says nothing"),
        ("new", "different", "Paris", None),
        ("Rewritten prompt: new", "different", "fine", "repeats the evolving prompt"),
        ("It says </task> new", "different", "fine", "repeats the evolving prompt"),
        ("<task>\nnew\n</task>", "different", "fine", None),
        ("  ", "different", "fine", "empty task"),
        (completion("new but cut", "length"), "different", "fine", "cut off"),
        ("new", "different", completion("cut", "length"), "response cut off"),
        ((400, {}, b"no"), "different", "fine", "request refused"),
    ],
)
def test_failed_evolutions_are_dropped_by_the_papers_rules(tmp_path: Path, task, judgement, response, reason):
    def model(body: dict, number: int):
        prompt = body["messages"][-1]["content"]
        if "task 1\n" in prompt or prompt == "well":  # one that succeeds
            return "well"
        if prompt.startswith(("Rewrite the task", "Write a new task")):
            return task
        return judgement if prompt.startswith("Do these two") else response

    records, summary, _ = evolved(tmp_path, model, count=2, rounds=1)
    others = [record for record in records if record["instruction"] != "well"]
    assert len(others) == (reason is None) and summary["dropped"].get(reason, 0) == (reason is not None)
    assert [record["instruction"] for record in others] == (["new"] if reason is None else [])


def test_failed_evolution_is_retried_from_last_instruction(tmp_path: Path):
    def model(body: dict, number: int):
        prompt = body["messages"][-1]["content"]
        if prompt.startswith("Do these two"):
            return (
                "same"
                if "task 0" in prompt and "+" not in prompt.partition("Second:")[0] and not tried
                else "different"
            )
        if prompt.startswith(("Rewrite", "Write a new")) and "task 0\n" in prompt:
            tried.append(1) if len(asked) else None
            asked.append(prompt)
        return evolving(body, number)

    tried: list[int] = []
    asked: list[str] = []
    records, summary, _ = evolved(tmp_path, model, count=1, rounds=2)
    assert [task_of(prompt) for prompt in asked] == ["task 0", "task 0"]
    assert [record["origin"]["round"] for record in records] == [2] and summary["dropped"] == {"nothing new": 1}


def test_evolution_depends_on_seed(tmp_path: Path):
    runs = {}
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        (tmp_path / name).mkdir()
        runs[name] = evolved(tmp_path / name, count=10, rounds=2, sampling=Sampling(seed=seed))[0]
    assert runs["a"] == runs["b"] != runs["c"]
