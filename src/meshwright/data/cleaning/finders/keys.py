"""Finder of private keys, access keys and tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Quantifiers are bounded and lookbehinds have a fixed width: no text makes these patterns slow.
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z0-9]{1,16} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r"[^-]{0,20000}(?:-----END (?:[A-Z0-9]{1,16} ){0,3}PRIVATE KEY(?: BLOCK)?-----)?"
)
# (literal that every match contains, pattern of the key): most texts are searched for the literal only.
_KEYS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (literal, re.compile(rf"(?<![A-Za-z0-9_-]){form}(?![A-Za-z0-9])"))
    for literal, form in (
        ("AKIA", "AKIA[A-Z2-7]{16}"),  # Amazon: access key
        ("ASIA", "ASIA[A-Z2-7]{16}"),  # Amazon: temporary access key
        ("AIza", "AIza[A-Za-z0-9_-]{35}"),  # Google
        ("ghp_", "ghp_[A-Za-z0-9]{36}"),  # GitHub
        ("gho_", "gho_[A-Za-z0-9]{36}"),
        ("ghs_", "ghs_[A-Za-z0-9]{36}"),
        ("ghu_", "ghu_[A-Za-z0-9]{36}"),
        ("ghr_", "ghr_[A-Za-z0-9]{36}"),
        ("github_pat_", "github_pat_[A-Za-z0-9_]{22,255}"),
        ("glpat-", "glpat-[A-Za-z0-9_-]{20,64}"),  # GitLab
        ("xox", "xox[abeoprs]-[A-Za-z0-9-]{10,250}"),  # Slack
        ("_live_", "[rs]k_live_[A-Za-z0-9]{16,255}"),  # Stripe
        ("sk-", "sk-(?:[A-Za-z0-9]{1,16}-){0,3}[A-Za-z0-9_-]{32,255}"),  # OpenAI, Anthropic and others
        ("hf_", "hf_[A-Za-z0-9]{34,40}"),  # Hugging Face
        ("npm_", "npm_[A-Za-z0-9]{36}"),
        ("eyJ", r"eyJ[A-Za-z0-9_-]{10,2000}\.eyJ[A-Za-z0-9_-]{10,4000}\.[A-Za-z0-9_-]{10,1000}"),  # a signed JWT
    )
)
# Amazon's secret keys are any 40 characters: only those after a name that announces one are masked.
_NAMED_SECRET = re.compile(
    r"(?i:aws_secret_access_key|aws_secret_key|secretaccesskey)[\"']?\s{0,4}[:=]\s{0,4}[\"']?([A-Za-z0-9/+=]{40})(?![A-Za-z0-9/+=])"
)


def find_secret_keys(text: str) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of secrets in `text`: private keys, access keys and tokens. Spans may overlap."""
    if "PRIVATE KEY" in text:
        yield from (match.span() for match in _PRIVATE_KEY.finditer(text))
    for literal, form in _KEYS:
        if literal in text:
            yield from (match.span() for match in form.finditer(text))
    if "ecret" in text or "SECRET" in text:
        yield from (match.span(1) for match in _NAMED_SECRET.finditer(text))
