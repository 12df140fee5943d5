"""Personal data are masked, lookalikes are not, and masking time is bounded for every text."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.shared.labelled_personal_data import KINDS, PARTS, Case, Score, load_cases, score_finder
from meshwright.data.cleaning.finders.phone_numbers import find_phone_numbers
from meshwright.data.cleaning.finders.top_level_domains import TOP_LEVEL_DOMAINS
from meshwright.data.cleaning.personal_data import MASKS, find_personal_data, mask_personal_data
from meshwright.names import PERSONAL_DATA

ALL = [*MASKS]
DOCUMENTATION = Path(__file__).parents[3] / "docs" / "data.md"
FEWEST = 30  # spans of a kind of which a fraction means something
LIMITS = {"held_out": 0.95, "development": 0.98}


@pytest.fixture(scope="module")
def scores() -> dict[str, dict[str, Score]]:
    """Part -> kind -> score of the masks."""
    return {part: score_finder(load_cases(part), lambda text: find_personal_data(text, KINDS)) for part in PARTS}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", [*KINDS, "all"])
def test_precision_and_recall_on_labelled_texts(scores: dict[str, dict[str, Score]], part: str, kind: str):
    score = scores[part][kind]
    assert score.right + score.missed >= FEWEST
    assert score.precision >= LIMITS[part] and score.recall >= LIMITS[part], score


def test_documented_precision_and_recall_are_those_of_the_masks(scores: dict[str, dict[str, Score]]):
    page = DOCUMENTATION.read_text()
    labels = {"email": "e-mail addresses", "phone": "telephone numbers", "ip": "IP addresses", "all": "together"}
    for kind, label in labels.items():
        row = [label]
        for score in (scores[part][kind] for part in PARTS):
            row += [str(score.right + score.missed), f"{score.precision:.3f}", f"{score.recall:.3f}"]
        assert f"| {' | '.join(row)} |" in page


def test_labelled_texts_are_many_distinct_and_half_of_them_lookalikes():
    parts = {part: load_cases(part) for part in PARTS}
    cases: list[Case] = [case for part in parts.values() for case in part]
    assert len(cases) >= 500 and len({case.text for case in cases}) == len(cases)
    for kind in KINDS:
        lookalikes = [case for case in cases if case.about == kind and not case.spans]
        assert FEWEST <= len(lookalikes) <= 2 * sum(case.about == kind and bool(case.spans) for case in cases)


def test_kinds_of_masks_are_those_of_recipes():
    assert set(MASKS) == set(PERSONAL_DATA)


def test_top_level_domains_are_those_of_the_root_zone():
    assert len(TOP_LEVEL_DOMAINS) > 1400
    assert {"com", "de", "museum", "zip", "рф", "한국", "中国"} <= TOP_LEVEL_DOMAINS
    assert not {"png", "service", "local", "json", "html", "com.", "COM"} & TOP_LEVEL_DOMAINS


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("+49 30 123456", "+49 30 123456"),
        ("+598 2123 1234", "+598 2123 1234"),
        ("+33 1 42 68 53 00 20", "+33 1 42 68 53 00"),  # France: 9 digits
        ("+33 1 42 68 53", None),
        ("+999 123 456 789", None),  # no calling code
        ("+44 (0)20 7946 0958", "+44 (0)20 7946 0958"),
    ],
)
def test_international_numbers_have_the_digits_of_their_plan(text: str, number: str | None):
    assert [text[start:end] for start, end in find_phone_numbers(text)] == ([] if number is None else [number])


def test_spans_are_in_the_order_of_the_text():
    text = "8.8.8.8 415-555-2671 a@b.de"
    assert [span.kind for span in find_personal_data(text, ALL)] == ["ip", "phone", "email"]


PIECES = [*"@.+-:/()[]_'<E 0123456789abcx=#日ü", "a@b.de", "8.8.8.8", "tel ", "2001:", "\ud800"]


@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
def test_any_text_is_masked_at_its_spans(text: str):
    spans = find_personal_data(text, ALL)
    masked, counts = mask_personal_data(text, ALL)
    ends = [0, *(span.end for span in spans)]
    kept = [text[end:start] for end, start in zip(ends, [*(span.start for span in spans), len(text)], strict=True)]
    assert all(end <= span.start < span.end for end, span in zip(ends, spans, strict=False))
    assert masked == "".join(
        part + mask for part, mask in zip(kept, [*(f"<{s.kind}>" for s in spans), ""], strict=True)
    )
    assert sum(counts.values()) == len(spans)


def test_overlapping_personal_data_are_masked_once():
    key = "sk-" + "a1B2" * 10
    assert mask_personal_data(f"{key}@example.com", ALL)[0] == "<key>@example.com"
    assert find_personal_data("4155552671@example.com, call 8.8.8.8", ALL) == [(0, 22, "email"), (29, 36, "ip")]


@pytest.mark.parametrize(
    ("kind", "text", "masked"),
    [
        ("email", "write to Ann.Lee+news@mail.example.co.uk.", "write to <email>."),
        ("email", "<a@b.de>", "<<email>>"),
        ("phone", "call (415) 555-2671 or 415-555-2671", "call <phone> or <phone>"),
        ("phone", "+44 20 7946 0958, +4915112345678", "<phone>, <phone>"),
        ("phone", "1-800-555-0199", "<phone>"),
        ("key", "id AKIAIOSFODNN7EXAMPLE.", "id <key>."),
        ("key", 'token = "ghp_' + "a1B2" * 9 + '"', 'token = "<key>"'),
        (
            "key",
            "aws_secret_access_key = 'wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY'",
            "aws_secret_access_key = '<key>'",
        ),
        ("key", "a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE/+=\nab\n-----END RSA PRIVATE KEY-----\nb", "a\n<key>\nb"),
        ("key", "-----BEGIN PRIVATE KEY-----\nMIIE, cut off here", "<key>"),
        ("ip", "from 8.8.8.8 and 2001:4860:4860::8888", "from <ip> and <ip>"),
    ],
)
def test_personal_data_are_masked_and_counted(kind: str, text: str, masked: str):
    result, counts = mask_personal_data(text, ALL)
    assert result == masked
    assert counts == {other: masked.count(f"<{kind}>") * (other == kind) for other in MASKS}


@pytest.mark.parametrize(
    "text",
    [
        "@decorator\ndef f(x): return a @ b",
        "user@localhost x@y me@ @example.com",
        "2024-01-31 12:30:45.123456 3.14159 1234567890 0x1f 555 1234",
        "pip install torch==2.13.0.1 version 1.2.3.4.5 v8.8.8.8",
        "127.0.0.1 10.1.2.3 192.168.0.1 300.1.1.1 ::1",
        "std::vector<a::b> x ? y::z : w",
        "AKIA is a prefix, sk-learn too, and -----BEGIN CERTIFICATE----- is public",
        "ISBN 978-3-16-148410-0, 100-200-3000",
    ],
)
def test_lookalikes_of_personal_data_are_kept(text: str):
    assert mask_personal_data(text, ALL) == (text, dict.fromkeys(MASKS, 0))


def test_only_configured_kinds_are_masked():
    text = "a@b.de 8.8.8.8"
    assert mask_personal_data(text, ["email"]) == ("<email> 8.8.8.8", {"email": 1})
    assert mask_personal_data(text, []) == (text, {})


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "a",
            "a.",
            "a@",
            "a@b.c",
            "a@b.co ",
            "@b.co",
            "日.本@本.日",
            "o'",
            "1",
            "1.",
            "1-",
            "1 ",
            "0 1 2 ",
            "+1 ",
            "+49",
        ),
        *("(2", "Tel: 030 1234567 ", "415-555-2671,", "1.2.3.4 ", "8.8.8.8-", "version 1.2.3.4 ", "A1:", ":", "2001:a"),
        *("2001::", "-----BEGIN PRIVATE KEY-----", "eyJa."),
    ],
)
def test_masking_time_grows_linearly_for_adversarial_text(piece: str):
    seconds = []
    for size in (10_000, 40_000):
        text = "@ PRIVATE KEY sk- eyJ Secret tel " + piece * (size // len(piece))
        begun = time.process_time()
        mask_personal_data(text, ALL)
        seconds.append(time.process_time() - begun)
    assert seconds[1] < 8 * seconds[0] + 0.1  # quadratic time: 16 times
