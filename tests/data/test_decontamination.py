"""Documents that share runs of words with an evaluation set are found, by the share of them, and others are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.data.cleaning import Cleaner
from meshwright.data.decontamination import EvaluationSets, digests
from meshwright.errors import UserError
from meshwright.recipe import CleanRecipe

QUESTION = "Which of the two long rivers that leave this lake reaches the northern sea first, and why?"
OTHER = " ".join(f"other{number}" for number in range(83))


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    lines = [{"question": QUESTION, "choices": ["the first", "eight words make an answer that still counts"], "id": 3}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_share_counts_the_words_in_shared_runs(evaluation: Path):
    sets = EvaluationSets([str(evaluation)], 13)
    assert len(QUESTION.split()) == 17
    assert sets.share(f"{OTHER} {QUESTION.upper()}") == pytest.approx(17 / 100)
    assert sets.share(OTHER) == sets.share("") == 0
    assert sets.share(" ".join(QUESTION.split()[:12])) == 0  # one word too few
    assert sets.share("Eight words make an answer that still counts!") == 1
    assert sets.share("the first the first the first") == 0  # shorter examples say nothing


def test_the_recipe_says_how_many_words_and_which_share(evaluation: Path):
    def rule(**clean: object) -> str | None:
        recipe = CleanRecipe(evaluation_sets=[str(evaluation)], **clean)  # type: ignore[arg-type]
        return Cleaner(recipe).judge(f"{OTHER} {QUESTION}").rule

    assert rule() == "contamination"
    assert rule(maximum_contamination=0.17) is None
    assert rule(maximum_contamination=0.16) == "contamination"
    beginning = " ".join(QUESTION.split()[:14])
    for count, expected in ((13, "contamination"), (14, "contamination"), (15, None)):
        recipe = CleanRecipe(evaluation_sets=[str(evaluation)], contamination_words=count)
        assert Cleaner(recipe).judge(beginning).rule == expected


def test_a_text_file_is_one_example(tmp_path: Path):
    path = tmp_path / "set.txt"
    path.write_text(f"{QUESTION}\n{OTHER}")
    assert EvaluationSets([str(path)], 13).share(QUESTION + " " + OTHER) == 1


@pytest.mark.parametrize(
    ("contents", "message"),
    [("{", r"set.jsonl:1: not JSON"), ('{"a": "too short"}', "holds no example of 8 words"), (None, "cannot be read")],
)
def test_a_set_that_is_of_no_use_is_said_in_one_line(tmp_path: Path, contents: str | None, message: str):
    path = tmp_path / "set.jsonl"
    if contents is not None:
        path.write_text(contents)
    with pytest.raises(UserError, match=message):
        EvaluationSets([str(path)], 13)


def test_the_same_bytes_read_in_another_way_are_another_set(tmp_path: Path):
    """Each line an example, or all of it one: what is prepared differs, and so must the key that it lies under."""
    line = json.dumps({"text": OTHER}) + "\n"
    for name in ("set.txt", "set.jsonl", "again.jsonl"):
        (tmp_path / name).write_text(line)
    text, lines, again = digests([str(tmp_path / name) for name in ("set.txt", "set.jsonl", "again.jsonl")])
    assert text != lines == again
