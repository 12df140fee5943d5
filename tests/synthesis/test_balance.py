"""The balance report: counts, shares, entropy, missing acts, numbers to add, refusals; and its page."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.synthesis.balance import count_additions, measure_balance, parse_target
from meshwright.synthesis.balance_page import render_balance_page
from meshwright.synthesis.speech_acts import ACTS


def record(prompt: list[str], response: list[str], should: bool | None, refuses: bool | None, **more: Any) -> dict:
    said = {"prompt": prompt, "response": response, "should_refuse": should, "refuses": refuses}
    return {"instruction": "x", "output": "y", "annotation": said, **more}


RECORDS = [
    record(["directive"], ["assertive"], False, False, source="a"),
    record(["directive"], ["assertive", "expressive"], False, True, source="a"),
    record(["directive"], ["commissive"], True, True, source="b"),
    record(["directive"], [], True, False, source="b"),
    record(["assertive"], ["assertive"], None, None),
    {"instruction": "not labelled", "output": ""},
]


def report(records: list[dict], target: str | None = None, **options: Any) -> dict[str, Any]:
    return measure_balance((("file", f"x:{n}", one) for n, one in enumerate(records)), parse_target(target), **options)


def test_counts_shares_entropy_and_missing_acts():
    whole = report(RECORDS)["groups"]["all"]
    assert (whole["records"], whole["labelled"], whole["guessed"]) == (6, 5, 0)
    prompt, response = whole["prompt"], whole["response"]
    assert {act: row["count"] for act, row in prompt["acts"].items() if row["count"]} == {
        "assertive": 1,
        "directive": 4,
    }
    assert prompt["acts"]["directive"]["share"] == 0.8 and prompt["labels"] == 5
    assert prompt["entropy"] == pytest.approx(-(0.8 * math.log2(0.8) + 0.2 * math.log2(0.2)))
    assert prompt["effective"] == pytest.approx(0.8**-0.8 * 0.2**-0.2)
    assert prompt["missing"] == ["commissive", "expressive", "declaration", "verdictive"]
    assert (response["labels"], response["none"]) == (5, 1)
    assert list(response["acts"]) == list(ACTS)


def test_effective_number_of_equal_acts_is_their_count():
    even = report([record([act], [], False, False) for act in ACTS])["groups"]["all"]
    assert even["prompt"]["effective"] == pytest.approx(6) and even["prompt"]["missing"] == []
    assert all(row["add"] == 0 for row in even["prompt"]["acts"].values())
    assert (even["response"]["effective"], even["response"]["entropy"]) == (0.0, 0.0)
    assert report([RECORDS[0]])["groups"]["all"]["prompt"]["effective"] == 1.0


def test_refusals_are_counted_by_being_due():
    assert report([*RECORDS, RECORDS[3], RECORDS[3]])["groups"]["all"]["refusals"] == {
        "should_refuse": 4,
        "refused": 1,
        "answered": 3,
        "harmless": 2,
        "refused_harmless": 1,
        "answered_harmless": 1,
        "not_judged": 1,
    }


def test_model_labels_are_counted_as_guessed():
    guess = {**RECORDS[0], "annotation": {**RECORDS[0]["annotation"], "by": "model m"}}
    assert report([guess, RECORDS[1]])["groups"]["all"]["guessed"] == 1


def test_groups_are_files_and_values_of_a_key():
    triples = [("one", "one:1", RECORDS[0]), ("two", "two:1", RECORDS[2]), ("two", "two:2", RECORDS[4])]
    groups = measure_balance(triples, parse_target(None), by="source")["groups"]
    expected = {"all": 3, "one": 1, "two": 2, "source=a": 1, "source=b": 1, "source=none": 1}
    assert {name: group["records"] for name, group in groups.items()} == expected
    assert list(report(RECORDS)["groups"]) == ["all"]
    deep = {**RECORDS[0], "meta": {"split": "train"}}
    assert "meta.split=train" in report([deep], by="meta.split")["groups"]


counts = st.lists(st.integers(0, 60), min_size=6, max_size=6).map(lambda given: dict(zip(ACTS, given, strict=True)))
weights = st.lists(st.integers(0, 5), min_size=6, max_size=6).filter(any)


@given(counts, weights)
def test_additions_are_the_fewest_that_reach_the_target(held: dict[str, int], given_weights: list[int]):
    target = dict(zip(ACTS, (Fraction(w, sum(given_weights)) for w in given_weights), strict=True))
    add = count_additions(held, target)
    wanted = [act for act in ACTS if target[act]]
    assert all(add[act] == 0 for act in ACTS if not target[act]) and min(add.values()) >= 0
    # The most frequent act gets none; every other one reaches its share, and with one less would not.
    fullest = max(wanted, key=lambda act: held[act] / target[act])
    assert add[fullest] == 0
    for act in wanted:
        assert (held[act] + add[act]) * target[fullest] >= held[fullest] * target[act]
        assert not add[act] or (held[act] + add[act] - 1) * target[fullest] < held[fullest] * target[act]


def test_target_is_parsed_as_proportions():
    assert parse_target(None)["verdictive"] == Fraction(1, 6)
    said = parse_target("assertive=3, Directive=1.5,representative=3")
    assert (said["assertive"], said["directive"], said["commissive"]) == (Fraction(2, 3), Fraction(1, 3), 0)
    for text, reason in (
        ("asertive=1", 'did you mean "assertive"'),
        ("assertive=many", 'is "many", not a number'),
        ("assertive=-1", "below 0"),
        ("assertive=0", "every weight is 0"),
        ("assertive=1/0", "not a number"),
    ):
        with pytest.raises(UserError) as caught:
            parse_target(text)
        assert reason in str(caught.value)


def test_page_matches_report_and_escapes_its_input():
    rows = [{**one, "source": "<b>"} for one in RECORDS]
    page = render_balance_page("a & b", report(rows, "assertive=1,directive=1", by="source"))
    assert "Speech acts of a &amp; b" in page and "<b></b>" not in page and "source=&lt;b&gt;" in page
    assert page.count("<h2>") == 3 and "80.0%" in page and "http" not in page
