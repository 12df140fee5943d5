"""Finder of e-mail addresses, internationalized ones included (RFC 5321, 6531 and 5890)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.data.cleaning.finders.scripts import LATIN, SPACED, UNSPACED
from meshwright.data.cleaning.finders.top_level_domains import TOP_LEVEL_DOMAINS

_MAX_LOCAL_PART = 64  # RFC 5321, section 4.5.3.1.1
_RESERVED = {"example", "invalid", "test"}  # RFC 2606: in no root zone, but what they end reads as an address
_UNITS = {"target"}  # also a company's domain, but getty@tty1.target is a systemd unit
_LOCAL_CHARACTER = rf"[{LATIN}{SPACED}_%+-]"
# Backwards from the "@". An apostrophe is part of a name after one letter: O'Connor; b'text' is a string in Python.
_LOCAL_PART_REVERSED = re.compile(
    rf"{_LOCAL_CHARACTER}(?:{_LOCAL_CHARACTER}|\.(?={_LOCAL_CHARACTER})|'(?=[dlmoDLMO](?!{_LOCAL_CHARACTER})))*"
    rf"|[{UNSPACED}](?:[{UNSPACED}0-9_-]|\.(?=[{UNSPACED}0-9_-]))*"
)
_LABEL = rf"(?:[{LATIN}{SPACED}](?:[{LATIN}{SPACED}-]{{0,61}}[{LATIN}{SPACED}])?|[{UNSPACED}][{UNSPACED}0-9-]{{0,62}})"
_DOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL}){{1,8}}")
_ENCODED = re.compile(r"xn--[a-z0-9-]{2,59}", re.IGNORECASE)  # Punycode
_SCALE = re.compile(r"\d{1,2}x", re.IGNORECASE)  # image@2x.png: twice the resolution
_RELEASE = re.compile(r"[vV]?\d+(?:-.*)?")
_PATH = re.compile(r":(?=[\w~/.])")
_CODE = re.compile(r"\([\x00-\x7f]|[$\[{]")  # q@k.to(device), fit@model.name$coefficients
_SOURCES = {"cc", "md", "ml", "pl", "py", "rs", "sh", "so"}  # countries that are suffixes of source files, too
_LINE = re.compile(r":\d")
_PRINCIPAL = re.compile(r"[A-Za-z]/$")  # HTTP/host.example.org@EXAMPLE.ORG in Kerberos
_SERVICES = {"git", "hg", "svn", "bzr", "cvs"}  # everybody logs in to a version control server as these
_OWN_FIELDS = {"self", "cls", "this", "meta"}  # meta.data: R's Seurat
_SSH_DOMAINS = {"openssh.com", "libssh.org"}  # RFC 4251, section 6: algorithms' names are name@domain
_SSH_ALGORITHM = re.compile(r".*[\d-].*|zlib|rsa")


def find_email_addresses(text: str) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of the e-mail addresses in `text`.

    The top-level domain must exist (or be reserved by RFC 2606), which rules out file names, systemd units and
    attributes in code: `image@2x.png`, `getty@tty1.service`, `q@k.transpose`. Logins (`alice@example.org:/home`),
    fediverse handles and Message-IDs are found, too, since they identify a person; `git@example.org:path`, a login that
    everybody uses, is not.
    """
    at = text.find("@")
    while at >= 0:
        domain = _DOMAIN.match(text, at + 1)
        end = _find_domain_end(text, domain) if domain else None
        start = _find_local_start(text, at) if end is not None else None
        if start is not None and end is not None and _is_address(text, start, at, end):
            if text[start] == text[end : end + 1] == "_":  # emphasis in Markdown
                start += 1
            yield start, end
        at = text.find("@", at + 1 if end is None else end)


def _find_local_start(text: str, at: int) -> int | None:
    """Return the start index of the local part (the text before "@") of an e-mail address; None if there is none. at:
    index of the "@" in `text`."""
    before = text[max(0, at - _MAX_LOCAL_PART - 1) : at]
    match = _LOCAL_PART_REVERSED.match(before[::-1])
    if match is None or match.end() > _MAX_LOCAL_PART:
        return None
    local = match[0][::-1].lstrip("-+%.")
    return at - len(local) if local else None


def _find_domain_end(text: str, domain: re.Match[str]) -> int | None:
    """Return the index in `text` at which the domain of an e-mail address ends, directly after its top-level domain.
    Labels after that domain are skipped if they begin with an upper-case letter: they belong to the next sentence.
    Return None if no existing top-level domain is found. domain: regular-expression match of the dotted name.
    """
    end = domain.end()
    labels = domain[0].split(".")
    while len(labels) > 1:
        if text[end - 1 : end + 1] == "E<":  # ann@example.orgE<gt> in Perl's documentation
            end, labels[-1] = end - 1, labels[-1][:-1]
        length = _measure_top_level_domain(labels[-1])
        if length:
            return end - len(labels[-1]) + length
        if not labels[-1][:1].isupper():  # image@site.org.png; but a sentence may begin: a@site.org.Then
            return None
        end -= len(labels.pop()) + 1
    return None


def _measure_top_level_domain(label: str) -> int:
    """Return the length of the top-level domain at the beginning of `label`; 0 if it begins with none."""
    name = label.lower()
    if name in _UNITS:
        return 0
    if name in TOP_LEVEL_DOMAINS or name in _RESERVED or _ENCODED.fullmatch(name):
        return len(label)
    if re.match(rf"[{UNSPACED}]", label):  # the next word may follow without a space
        known = [length for length in range(2, len(label)) if name[:length] in TOP_LEVEL_DOMAINS]
        return max(known, default=len(label))
    # Neither file suffixes nor attributes are written in other scripts.
    return len(label) if len(label) > 1 and re.fullmatch(rf"[{SPACED}]+", label) else 0


def _is_address(text: str, start: int, at: int, end: int) -> bool:
    """Return True if `text[start:end]`, which looks like an e-mail address with its "@" at index `at`, is an address;
    False for package versions, systemd units, code and the like."""
    labels = text[at + 1 : end].split(".")
    if _SCALE.fullmatch(labels[0]) or labels[0] in _OWN_FIELDS:
        return False
    if sum(_RELEASE.fullmatch(label) is not None for label in labels) > 1:  # package@1.0.0.dev
        return False
    if _CODE.match(text, end) or (labels[-1] in _SOURCES and _LINE.match(text, end)):
        return False
    if text[at + 1 : end].isupper() and _PRINCIPAL.search(text[max(0, start - 2) : start]):
        return False
    if text[at + 1 : end] in _SSH_DOMAINS and _SSH_ALGORITHM.fullmatch(text, start, at):
        return False
    is_login = _PATH.match(text, end) is not None or text[max(0, start - 3) : start] == "://"
    return not (is_login and text[start:at] in _SERVICES)
