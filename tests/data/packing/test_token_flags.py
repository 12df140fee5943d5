"""Token flags: counts of turns, spans and tokens against a count token by token."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.packing.token_flags import AUTHORS, TRAINED_BIT, count_by_role, encode_role, iterate_runs

ASSISTANT, USER = encode_role("assistant"), encode_role("user")


def test_authors_have_distinct_bits_besides_that_of_training():
    bits = [encode_role(author) for author in AUTHORS]
    assert len({*bits}) == len(AUTHORS) and not any(each & TRAINED_BIT for each in bits) and max(bits) < 128


def test_turns_spans_and_tokens_of_two_documents():
    first = [0, USER, USER, 0, ASSISTANT | 1, ASSISTANT | 1, ASSISTANT, ASSISTANT | 1]  # two spans in one turn
    second = [ASSISTANT | 1, 0]  # directly after the first one, in another document
    found = count_by_role(np.array(first + second, np.uint8), np.array([0, len(first)]))
    assert found == {
        "spans": 3,
        "turns": {"user": 1, "assistant": 2},
        "tokens": {"template": 3, "user": 2, "assistant": 5},
        "trained_tokens": {"assistant": 4},
    }


@given(st.lists(st.lists(st.tuples(st.integers(0, len(AUTHORS) - 1), st.booleans()), min_size=1), max_size=5))
def test_counts_equal_those_token_by_token(documents: list[list[tuple[int, bool]]]):
    spans, turns, tokens, trained = 0, Counter[str](), Counter[str](), Counter[str]()
    for document in documents:
        before, before_trained = 0, False
        for author, is_trained in document:
            tokens[AUTHORS[author]] += 1
            trained[AUTHORS[author]] += is_trained
            turns[AUTHORS[author]] += bool(author) and author != before
            spans += is_trained and not before_trained
            before, before_trained = author, is_trained
    flags = np.array([author << 1 | is_trained for each in documents for author, is_trained in each], np.uint8)
    begins = np.cumsum([0, *map(len, documents)])[:-1]
    found = count_by_role(flags, begins)
    expected = ({key: value for key, value in counts.items() if value} for counts in (turns, tokens, trained))
    assert found["spans"] == spans
    assert [found["turns"], found["tokens"], found["trained_tokens"]] == list(expected)


@given(st.lists(st.integers(0, 3)))
def test_runs_partition_the_tokens_into_equal_neighbours(flags: list[int]):
    runs = list(iterate_runs(np.array(flags, np.uint8)))
    assert [mark for begin, end in runs for mark in [flags[begin]] * (end - begin)] == flags
    assert all(flags[begin] != flags[begin - 1] for begin, _ in runs[1:])
