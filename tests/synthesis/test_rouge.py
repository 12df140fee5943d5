"""ROUGE-L matches the reference implementation, and the pool matches pairwise comparison."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.synthesis.rouge import SimilarityPool, compute_rouge_l, split_words

ascii_text = st.text(st.sampled_from("abAB '-_.,1 "), max_size=30)


def test_rouge_l_matches_reference():
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=False)

    @settings(max_examples=200)
    @given(ascii_text, ascii_text)
    def agrees(first: str, second: str) -> None:
        assert compute_rouge_l(split_words(first), split_words(second)) == pytest.approx(
            scorer.score(first, second)["rougeL"].fmeasure
        )

    agrees()


@settings(max_examples=100)
@given(
    st.lists(st.text(st.sampled_from("abc "), max_size=12), max_size=5), st.text(st.sampled_from("abc "), max_size=12)
)
def test_pool_prefilter_keeps_all_similar_texts(texts: list[str], text: str):
    for threshold in (0.5, 0.7, 1.0):
        alike = any(compute_rouge_l(split_words(text), split_words(other)) >= threshold for other in texts)
        assert SimilarityPool(texts).has_similar(text, threshold) == alike


def test_scripts_without_spaces_and_other_letters_have_words():
    assert split_words("Übersetze das, bitte_schön!") == ["übersetze", "das", "bitte", "schön"]
    assert split_words("把这句话 translate") == ["把", "这", "句", "话", "translate"]
    assert compute_rouge_l(split_words("把这句话翻译成英文"), split_words("把这段话翻译成法文")) == pytest.approx(
        2 * 7 / 18
    )
