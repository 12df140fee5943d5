"""Masks over personal data and secrets: e-mail addresses, telephone numbers, keys, IP addresses."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence

# Quantifiers are bounded and lookbehinds have a fixed width: no text makes these patterns slow.
_EMAIL = re.compile(
    r"(?<![\w.%+-])[A-Za-z0-9_%+-]{1,64}(?:\.[A-Za-z0-9_%+-]{1,64}){0,8}"
    r"@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9])"
)
# Patterns begin with a consumed character and look behind after it, so that the search skips to few candidates.
# International: E.164, "+" and 8 to 15 digits. North American: with its separators. Bare digits are left alone.
_PHONES = (
    re.compile(r"\+(?<![\w.+-]\+)[1-9]\d{0,2}(?:[ .()/-]{0,2}\d){7,14}(?![\w-]|\.\d)"),
    re.compile(r"\((?<![\w.+-]\()[2-9]\d{2}\) ?[2-9]\d{2}[ .-]\d{4}(?![\w-]|\.\d)"),
    re.compile(
        r"[2-9](?<![\w.+][2-9])(?<!\d-[2-9])\d{2}"
        r"(?:-[2-9]\d{2}-|\.[2-9]\d{2}\.| [2-9]\d{2}[ -])\d{4}(?![\w-]|\.\d)"
    ),
    re.compile(r"1[ .-](?<![\w.+-]1[ .-])[2-9]\d{2}[ .-][2-9]\d{2}[ .-]\d{4}(?![\w-]|\.\d)"),
)
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
_IPV4 = re.compile(r"\d(?<![\w.]\d)(?<!==\d)\d{0,2}\.(?:\d{1,3}\.){2}\d{1,3}(?!\w|\.\d)")
_PERHAPS_IPV6 = re.compile(r":[0-9A-Fa-f]{0,4}:")
_IPV6 = re.compile(r"[0-9A-Fa-f:](?<![\w:.][0-9A-Fa-f:])[0-9A-Fa-f:]{1,3}[0-9A-Fa-f:]{0,35}(?![\w:.])")


def _mask_emails(text: str) -> tuple[str, int]:
    """Replace e-mail addresses by "<email>"; returns (masked text, number of addresses replaced)."""
    return _EMAIL.subn("<email>", text) if "@" in text else (text, 0)


def _mask_phones(text: str) -> tuple[str, int]:
    """Replace telephone numbers by "<phone>"; returns (masked text, number of telephone numbers replaced)."""
    count = 0
    for form in _PHONES:
        text, found = form.subn("<phone>", text)
        count += found
    return text, count


def _mask_keys(text: str) -> tuple[str, int]:
    """Replace private keys, access keys and tokens by "<key>"; returns (masked text, number of keys replaced)."""
    count = 0
    if "PRIVATE KEY" in text:
        text, found = _PRIVATE_KEY.subn("<key>", text)
        count += found
    for literal, form in _KEYS:
        if literal in text:
            text, found = form.subn("<key>", text)
            count += found
    if "ecret" in text or "SECRET" in text:
        text, found = _NAMED_SECRET.subn(lambda match: match[0].replace(match[1], "<key>"), text)
        count += found
    return text, count


def _mask_addresses(text: str) -> tuple[str, int]:
    """Replace public IPv4 and IPv6 addresses by "<ip>"; returns (masked text, number of addresses replaced)."""
    count = 0

    def mask_address(match: re.Match[str]) -> str:
        """Return "<ip>" for a match that is a public address and count it, else the match unchanged."""
        nonlocal count
        try:
            is_public = ipaddress.ip_address(match[0]).is_global
        except ValueError:
            return match[0]
        is_public = is_public and match[0].count(":") != 2  # a::b is a name in C++
        count += is_public  # private, local and example addresses identify nobody
        return "<ip>" if is_public else match[0]

    text = _IPV4.sub(mask_address, text)
    return _IPV6.sub(mask_address, text) if _PERHAPS_IPV6.search(text) else text, count


MASKS: dict[str, Callable[[str], tuple[str, int]]] = {
    "key": _mask_keys,
    "email": _mask_emails,
    "phone": _mask_phones,
    "ip": _mask_addresses,
}


def mask_personal_data(text: str, kinds: Sequence[str]) -> tuple[str, dict[str, int]]:
    """Replace personal data in a text by `<email>`, `<phone>`, `<key>` or `<ip>`; returns (masked text, {kind: number
    replaced}). kinds: those to replace, of "email", "phone", "key" and "ip".
    """
    counts = {}
    for kind, masked in MASKS.items():
        if kind in kinds:
            text, counts[kind] = masked(text)
    return text, counts
