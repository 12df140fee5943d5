"""Finder of public IP addresses; context separates them from versions, section numbers and object identifiers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from meshwright.data.cleaning.finders.scripts import LATIN

# Patterns begin with a consumed character and look behind after it, so that the search skips to few candidates.
_IPV4 = re.compile(rf"[0-9](?<![{LATIN}_.][0-9])[0-9]{{0,2}}(?:\.[0-9]{{1,3}}){{3}}(?![{LATIN}_]|\.[0-9])")
# Global unicast addresses begin with 2 or 3 (2000::/3, RFC 4291, section 2.4).
_IPV6 = re.compile(rf"[23](?<![{LATIN}_:.][23])[0-9A-Fa-f]{{3}}:[0-9A-Fa-f:]{{1,35}}(?![{LATIN}_:]|\.\d)")

_CONTEXT = 48  # characters before a candidate that are searched for words
_VERSION_WORDS = (
    r"versions?|ver|v|rev|revision|release|rel|build|firmware|bios|driver|patch|kernel|update|upgrade|sdk|jdk|jre|"
    r"versión|version[ei]n?|versões|versão|versioni?|versie|wersja|wersji|верси[яию]|版本|バージョン|버전|"
    r"§+|sections?|sec|sect|secs|subsections?|clauses?|subclauses?|chapters?|chap|appendix|annex|articles?|art|"
    r"paragraphs?|para|tables?|figures?|fig|eq|equations?|rules?|steps?|requirements?|"
    r"abschnitt|kapitel|ziffer|absatz|chapitre|sección|apartado|capítulo|sezione|capitolo|seção|secção|paragraaf|"
    r"hoofdstuk|rozdział|раздел[еау]?|глав[аеы]|пункт[ае]?|п|стать[яи]|章|节|節|第|条|項|제|"
    r"oid|object identifier|::= ?\{"
)
_VERSION_BEFORE = re.compile(
    rf"(?:(?<![{LATIN}])|(?<=[a-z])(?=V)|(?<=version)|_)(?i:{_VERSION_WORDS})"
    r"[\s\"'`:=<>()\[\]_.,#№\\-]{0,6}(?:(?i:number|no|nr|num|is|was|to|of|ist|est|es)[.:\s]{1,3}[\"']?)?$"
)
_ATTACHED_BEFORE = re.compile(
    rf"[{LATIN}][-_+~]$"  # name-1.2.3.4
    r"|(?:^|[\s(;\"'])[A-Za-z][\w-]*/$"  # agent/1.2.3.4
    r"|(?<!addr)(?<!ip)(?<!host)(?<!src)(?<!dst)\s?[=<>~!]=\s?$|~>\s?$|\^$"  # package>=1.2.3.4, not ip.addr == 1.2.3.4
)
_ATTACHED_AFTER = re.compile(
    r"[-_+~](?:[A-Za-z]|\d+[A-Za-z])"
    r"|\.(?i:tar|tgz|zip|gz|bz2|xz|7z|exe|msi|deb|rpm|whl|jar|dll|so|dmg|pkg|apk|egg|nupkg|iso|img|bin|pdf|html?|txt)\b"
    r"|\.?\s{0,2}(?i:released?|alpha|beta|rc\d?|snapshot)\b"
)
_NETWORK_BEFORE = re.compile(
    rf"://(?:[^\s/@]{{0,40}}@)?$|@\[?$|(?<![{LATIN}/.-])(?:(?i:"
    r"ip|ips|ipv[46]|ip4|inet6?|addr|addrs|address|addresses|adress[en]*|dirección|direcciones|endereço|indirizzo|адреса?|"
    r"host|hosts|hostname|dns|nameservers?|resolvers?|gateway|gw|subnet|network|route|ping|traceroute|tracert|mtr|whois|"
    r"nslookup|dig|telnet|ssh|nmap|iptables|src|dst|remote|listen|bind|ban|banned|login|client_ip|remote_addr"
    rf")(?![{LATIN}/.-])|A\s)|地址|アドレス|주소"
)
_NETWORK_AFTER = re.compile(
    r"[:@]\d{1,5}(?![\d.])|/(?:[89]|[12]\d|3[0-2])(?![\d/.])|\.in-addr\.arpa| - - \[| port \d|\s+netmask "
    r"|\s?\(?(?:tcp|udp)\b"
)
# A list goes on: "1.2.3.4, 1.2.3.5 and 1.2.3.6", "1.2.3.4 -> 1.2.3.5"
_SAME_LIST = re.compile(
    r"[\s\"'`,;/\[\]()–-]{1,5}(?:(?:and|or|to|through|und|oder|bis|et|ou|y|o|e|и|до|&|->|=>|→)\s?[\"']?)?"
)
_RESOLVERS = {"8.8.8.8", "8.8.4.4", "9.9.9.9", "4.2.2.2"}  # famous, and no outline or version reaches them
# Without evidence: versions and outlines begin with a part below 20 and hardly reach 40 there; 9 % of the addresses do.
_EARLY, _LATE = 20, 40


def find_ip_addresses(text: str) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of the public IPv4 and IPv6 addresses in `text`.

    Public means global unicast. Private, local, multicast and documentation addresses (IANA's special-purpose
    registries, as in Python's `ipaddress`) identify nobody and are skipped.

    Four dotted numbers may also be a version or a section. After a word such as "version" or "section", or inside a
    name, they are no address. Next to network words, a port or a prefix length, or in a URL, they are an address.
    Without such a sign they are an address if the first number is at least 40, or at least 20 and the other numbers are
    unusual in versions.
    """
    yield from _find_ipv4(text)
    if "::" in text or text.count(":") > 6:
        yield from _find_ipv6(text)


def _find_ipv4(text: str) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of the public IPv4 addresses in `text`."""
    end, verdict = 0, False  # of the dotted quad before
    for match in _IPV4.finditer(text):
        goes_on = end > 0 and _SAME_LIST.fullmatch(text, end, match.start()) is not None
        before = text[max(end, match.start() - _CONTEXT) : match.start()].rpartition("\n")[2]
        verdict = _is_network_address(text, match, before, verdict if goes_on else None)
        end = match.end()
        if verdict and _is_public(match[0]):
            yield match.span()


def _is_network_address(text: str, match: re.Match[str], before: str, neighbour: bool | None) -> bool:
    """Return True if four dotted numbers in `text` (`match`) are an IP address, not a version or section number, judged
    by the text around them.

    before: the line's text before the match, back to the previous four dotted numbers. neighbour: result of this
    function for the previous four dotted numbers if they and the match are items of one list; else None.
    """
    if _ATTACHED_BEFORE.search(before) or _ATTACHED_AFTER.match(text, match.end()) or _VERSION_BEFORE.search(before):
        return False
    if _NETWORK_AFTER.match(text, match.end()) or _NETWORK_BEFORE.search(before):
        return True
    if neighbour is not None:
        return neighbour
    parts = [int(part) for part in match[0].split(".")]
    if parts[0] >= _LATE:
        return True
    return match[0] in _RESOLVERS or (parts[0] >= _EARLY and 0 not in parts and max(parts) >= _LATE)


def _find_ipv6(text: str) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of the public IPv6 addresses in `text`."""
    for match in _IPV6.finditer(text):
        address = match[0].removesuffix(":") if not match[0].endswith("::") else match[0]
        if address.count(":") == 2 and address.replace(":", "").isdecimal():  # a slice, [3000::2], or 2600::1
            before = text[max(0, match.start() - _CONTEXT) : match.start()].rpartition("\n")[2]
            if not _NETWORK_BEFORE.search(before):
                continue
        if _is_public(address):
            yield match.start(), match.start() + len(address)


def _is_public(address: str) -> bool:
    """Return True if `address` is a well-formed IPv4 (RFC 791) or IPv6 (RFC 4291) address and global unicast."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return parsed.is_global and not parsed.is_multicast
