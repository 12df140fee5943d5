"""Personal data are masked, lookalikes are not, and masking time is bounded for every text."""

from __future__ import annotations

import time

import pytest

from meshwright.data.cleaning.personal_data import MASKS, mask_personal_data

ALL = [*MASKS]


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
    "piece", ["a", "a.", "a@", "1", "1.", "1-", "+1 ", "(2", "A1:", ":", "-----BEGIN PRIVATE KEY-----", "eyJa."]
)
def test_masking_time_is_bounded_for_adversarial_text(piece: str):
    text = "@ PRIVATE KEY sk- eyJ Secret " + piece * (500_000 // len(piece))
    begun = time.process_time()
    mask_personal_data(text, ALL)
    assert time.process_time() - begun < 3
