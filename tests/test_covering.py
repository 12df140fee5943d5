"""`covering` of conftest.py, which chooses the cases of a grid that run always."""

from __future__ import annotations

import pytest

from tests.conftest import covering


def list_always(cases: list[object]) -> list[str]:
    """Return the cases, texts whose letters are their features, that run without --exhaustive."""
    exhaustive = pytest.mark.exhaustive.mark
    return [case.values[0] for case in covering(cases, set) if exhaustive not in [one.mark for one in case.marks]]


def test_chosen_cases_have_every_feature_and_the_others_stay_exhaustive():
    cases: list[object] = ["ab", "abc", "d", "cd"]
    assert list_always(cases) == ["abc", "d"]
    assert [case.values[0] for case in covering(cases, set)] == cases


def test_cases_that_may_be_skipped_only_add_features():
    skipped = pytest.param("abcd", marks=pytest.mark.skipif(True, reason="no compiler"))
    assert list_always([skipped, "ab", "c"]) == ["abcd", "ab", "c"]
    assert list_always([pytest.param("abc", marks=pytest.mark.slow), "ab", "c"]) == ["ab", "c"]
