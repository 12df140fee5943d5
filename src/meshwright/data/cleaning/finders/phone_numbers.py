"""Finder of telephone numbers: international ones, the national forms of some countries, and others after words like
"Tel."."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.data.cleaning.finders.scripts import LATIN

# Calling code: digits of a national number (fixed line, mobile, free of charge), from libphonenumber 9.0.43. The
# library's matcher is not used: it needs a region, which web pages do not name, finds fewer numbers and takes several
# times as long (bench/personal_data.py).
_PLANS = """
1:10 7:10 20:8-10 27:5-9 30:10-12 31:7-11 32:8-9 33:9 34:9 36:8-9 39:6-12 40:6-9 41:9 43:4-13 44:7-10 45:8 46:6-9
47:8 48:7-10 49:5-13 51:8-9 52:10 53:6-10 54:10-11 55:9-11 56:9-11 57:8-11 58:10 60:8-10 61:7-10 62:7-13 63:6-13
64:8-10 65:8-11 66:8-13 81:8-13 82:5-13 84:8-10 86:7-12 90:10-13 91:8-13 92:8-11 93:9 94:9 95:6-10 98:6-10 211:9
212:9 213:8-9 216:8 218:9 220:7-9 221:9 222:8 223:8 224:8-9 225:10 226:8 227:8 228:8 229:10 230:7-10 231:7-9 232:8
233:8-9 234:10-12 235:8 236:8 237:8-9 238:7 239:7 240:9 241:7-8 242:9 243:7-10 244:9 245:9 246:7 247:5 248:7 249:9
250:8-9 251:9 252:6-9 253:8 254:7-10 255:9 256:9 257:8 258:8-9 260:9 261:9 262:9 263:7-9 264:8-9 265:7-9 266:8
267:7-10 268:8 269:7 290:4-5 291:7 297:7 298:6 299:6 350:8 351:9 352:4-11 353:7-10 354:7-9 355:7-9 356:8 357:8
358:5-10 359:6-12 370:8 371:8 372:7-10 373:8 374:8 375:6-11 376:6-9 377:8-9 378:8-10 380:9-10 381:6-12 382:8-9
383:8-12 385:7-9 386:6-8 387:8-9 389:8 420:9 421:6-9 423:7-9 500:5 501:7-11 502:8-11 503:7-11 504:8-11 505:8
506:8-10 507:7-11 508:6-9 509:8 590:9 591:8-9 592:7 593:8-11 594:9 595:7-11 596:9 597:6-7 598:6-12 599:7-8 670:7-8
672:6 673:7 674:7 675:7-8 676:5-7 677:5-7 678:5-7 679:7-11 680:7 681:6-9 682:5 683:4-7 685:5-10 686:5-8 687:6
688:5-7 689:8-9 690:4-7 691:7 692:7 800:8 850:8-10 852:8-9 853:7-8 855:8-10 856:8-10 870:9-12 880:6-10 881:9-10
882:7-12 886:8-9 960:7-10 961:7-8 962:8-9 963:8-9 964:8-10 965:7-8 966:9-10 967:7-9 968:7-9 970:8-10 971:5-12
972:7-12 973:8 974:7-11 975:7-8 976:8-10 977:8-11 992:9 993:8 994:9 995:9 996:9-10 998:9
"""
_LENGTHS = {
    code: range(int(least), int(most or least) + 1) for code, least, most in re.findall(r"(\d+):(\d+)-?(\d*)", _PLANS)
}
_SEPARATOR = r"[ \u00a0.()/\u2010\u2011\u2013-]"
_RUN = re.compile(rf"\d(?:{_SEPARATOR}{{0,3}}\d){{6,}}")  # all digits and separators in a row: numbers are parts of it
_OPENING = re.compile(r"\+?\(?$")
_GROUP = re.compile(r"\+?\(?\d+")
_INTERNATIONAL = re.compile(rf"\+\(?[1-9](?:{_SEPARATOR}{{0,2}}\d){{6,16}}")
_AREA = r"(?!.11)[2-9]\d\d"
# Parentheses around an area code, or groups of certain lengths between hyphens or dots, are forms of telephone numbers
# alone. Between spaces there can be any numbers: 256 512 1024.
_NATIONAL = re.compile(
    rf"(?:1[ .-])?(?:\({_AREA}\) ?[2-9]\d\d[ .-]|{_AREA}(?:-[2-9]\d\d-|\.[2-9]\d\d\.| [2-9]\d\d-))"
    r"\d{4}"  # North America
    r"|\(0\d{1,4}\) ?\d{3,4}[ -]?\d{3,4}"  # United Kingdom, Australia
    r"|\(\d\d\) ?9?\d{4}-\d{4}"  # Brazil
    r"|8 ?\(\d{3}\) ?\d{3}-\d\d-\d\d"  # Russia
    r"|0\d{1,2}-\d{4}-\d{4}"  # Japan, Korea
)
_AFTER_WORD = re.compile(rf"\(?\d(?:{_SEPARATOR}{{0,3}}\d){{6,14}}")
_BEFORE = re.compile(rf"[{LATIN}_.+#]\(?$|\d[-–/]$|=-$|[A-Za-z]-$")
_AFTER = re.compile(
    r"(?!x\d)[A-Za-z0-9_]|-[A-Za-z0-9]|[.:]\d|\*"
    r"|\s?(?:(?:[kmµnc]m|[mnµ]s|kg|px|[kKMG]?Hz|dpi|[KMGT]i?B|EUR|USD|GBP)(?![A-Za-z])|[€$£%])"
)
_WORDS = re.compile(
    rf"(?<![{LATIN}_])(?i:"
    r"phones?|telephones?|tel|ph(?=[.:])|mob|mobiles?|cell|cellphone|fax|telefax|call|dial|ring|sms|whatsapp|contact|hotline|"
    r"helpline|switchboard|direct line|toll[ -]free|freephone|landline|voicemail|gsm|"  # in many languages
    r"telefon\w{0,4}|telefoon\w{0,8}|mobil\w{0,8}|handy|rufnummer|durchwahl|wähle\w?|bel|tlf|"  # German, Dutch, Nordic
    r"puh|puhelin|cep|telepon|telp|sđt|đt|điện thoại|"  # Finnish, Turkish, Indonesian, Vietnamese
    r"tél|téléphone|portable|appele[zr]|numéro vert|tfno|teléfono|telefone|móvil|celular|cellulare|cel|llame|llámanos|"
    r"ligue|chiam\w{1,4}|"  # French, Spanish, Portuguese, Italian
    rf"тел|телефон\w?|звоните|моб|факс|τηλ|τηλέφωνο)(?![{LATIN}])"
    r"|電話|电话|手机|手機|携帯|热线|전화|연락처|휴대폰|هاتف|جوال|نقال|تلفن|טלפון|נייד|फ़ोन|फोन|โทร"
)
_OTHER_NUMBERS = re.compile(
    rf"(?<![{LATIN}])(?i:isbn(?:-1[03])?|issn|isni|orcid|doi|upc|ean|gtin|imei|iban|vat|ssn|cas|sku|p/n|pn|s/n|zip|ids?|"
    r"order|invoice|part|serial|model|product|item|lot|batch|catalog(?:ue)?|ticket|case|docket|bugs?|issue|patent|policy|"
    r"accession|file|cards?|account|acct|ref|reference|tracking|article|pages?|pp|ports?|version|date)"
    rf"(?![{LATIN}])[^\w\n]{{0,3}}(?:(?i:no|number|nr|num|code|id)[^\w\n]{{0,3}})?$"
)
_SIZES = {str(odd << power) for odd in (1, 3) for power in range(6, 14)}  # widths of layers: 512, 768, 3072
_CONTEXT = 40  # characters before a number that are searched for words
_FILLERS = 3  # words between "call" and the number, as in "call our office at"
_SENTENCE_END = re.compile(r"\w{4}[.!?]\s")  # rather than an abbreviation
_DATE = re.compile(
    r"(?:19|20)\d\d[-./]?(?:0[1-9]|1[0-2])[-./]?[0-3]\d(?!\d)|\d{1,2}[-./]\d{1,2}[-./](?:19|20)\d\d(?!\d)"
)
_DIGITS = re.compile(r"\d+")
_LIST = re.compile(r"\s{0,2}(?:[,;/|]|or|and|und|oder|ou|et|o|y|e)?\s{0,2}")


def find_phone_numbers(text: str) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of the telephone numbers in `text`.

    International numbers ("+", a calling code, as many digits as its numbering plan has) and the national forms of some
    countries, such as (415) 555-2671, 415-555-2671 or 8 (495) 123-45-67, are found everywhere. Other groups of 7 to 13
    digits are found only after a word such as "Tel." or "call". A number after "ISBN", "order no." and the like is
    skipped.
    """
    last = 0  # where the number before ends
    for run in _RUN.finditer(text):
        start, stop = run.span()
        opening = _OPENING.search(text, max(0, start - 2), start)
        start = opening.start() if opening else start
        is_first = True  # words stand before the first group only: the others need no search for them
        while group := _GROUP.search(text, max(start, last), stop):
            begin = group.start()
            end = _match_number(text, begin, last, is_first)
            if end is None and text[begin] == "(":  # around the whole number, or before it
                begin += 1
                end = _match_number(text, begin, last, is_first)
            is_first = end is not None
            start = group.end()
            if end is not None:
                yield begin, end
                last = end


def _match_number(text: str, start: int, last: int, is_first: bool) -> int | None:
    """Return the end index of the telephone number that begins at index `start` of `text`; None if there is none.

    last: end index of the previous telephone number; 0: none. is_first: True if no other digits come between the
    previous telephone number and index `start`.
    """
    before = text[max(last, start - _CONTEXT) : start].rpartition("\n")[2]
    if _BEFORE.search(before):
        return None
    if text[start] == "+":
        return _confirm_by_following_text(text, _match_international(text, start))
    if match := _NATIONAL.match(text, start):
        end = None if _SIZES.issuperset(_DIGITS.findall(match[0])) else match.end()
    elif is_first and (_announces_number(before) or (last > 0 and _LIST.fullmatch(text, last, start))):
        end = _match_after_word(text, start)
    else:
        return None
    return None if _OTHER_NUMBERS.search(before) else _confirm_by_following_text(text, end)


def _confirm_by_following_text(text: str, end: int | None) -> int | None:
    """Check the text after a number that may be a telephone number. Return `end`, the end index of the number in
    `text`; None if the text after it shows that it is no telephone number, or if `end` is None."""
    return None if end is None or _AFTER.match(text, end) else end


def _list_group_ends(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Return (end index, number of digits since `start`) of each group of digits in `text[start:end]`, the last group
    first; a group that continues after `end` is left out."""
    ends, digits = [], 0
    for group in _DIGITS.finditer(text[start:end]):
        digits += len(group[0])
        ends.append((start + group.end(), digits))
    return [(end, digits) for end, digits in reversed(ends) if not text[end : end + 1].isdecimal()]


def _match_international(text: str, start: int) -> int | None:
    """Return the end index of the international number that begins with the "+" at index `start` of `text`; None if it
    has no valid calling code, or not as many digits as the numbering plan."""
    match = _INTERNATIONAL.match(text, start)
    if match is None:
        return None
    number = re.sub(r"\D", "", match[0])
    code = next((number[:length] for length in (1, 2, 3) if number[:length] in _LENGTHS), "")
    for end, digits in _list_group_ends(text, start, match.end()) if code else []:
        written = text[start:end]
        trunk = "(0)" in written  # +44 (0)20: not dialled from abroad
        amount = re.fullmatch(r"\+\d{1,3}(?: \d{3})* 000|\+\d{4,}\.\d+", written)
        if digits - len(code) - trunk in _LENGTHS[code] and not amount:
            return end
    return None


def _announces_number(before: str) -> bool:
    """Return True if the text before a number announces a telephone number: it has a word such as "Tel.", and after
    this word only a few other words and no sentence end. before: this text, from the beginning of the line.
    """
    announcement = max((match.span() for match in _WORDS.finditer(before)), default=None)
    if announcement is None or _SENTENCE_END.search(before, announcement[0]):
        return False
    between = before[announcement[1] :]
    return _DIGITS.search(between) is None and len(re.findall(r"\w+", between)) <= _FILLERS


def _match_after_word(text: str, start: int) -> int | None:
    """Return the end index of the telephone number that begins at index `start` of `text`, after a word such as "Tel.";
    None if the text there does not have the form of a telephone number."""
    match = _AFTER_WORD.match(text, start)
    most = 15 if text.startswith("00", start) else 13
    for end, digits in _list_group_ends(text, start, match.end()) if match else []:
        if 7 <= digits <= most:
            return end if _is_grouped_as_phone(text[start:end]) else None
    return None


def _is_grouped_as_phone(written: str) -> bool:
    """Return True if the digits of `written` are grouped as in telephone numbers, and not as in dates, amounts, years,
    sizes or IP addresses."""
    groups = _DIGITS.findall(written)
    if len(groups) == 1:
        return len(groups[0]) >= 8 and _DATE.fullmatch(written) is None
    if _DATE.match(written):
        return False
    threes = all(len(group) == 3 for group in groups[1:])
    if threes and (groups[-1] == "000" or (len(groups) > 3 and len(groups[0]) == 3 and groups[0][0] not in "018")):
        return False
    years = all(re.fullmatch(r"(?:1[5-9]|20)\d\d", group) for group in groups)
    quad = re.fullmatch(r"\d+(?:\.\d+){3}", written)
    return not years and not quad and sum(len(group) == 1 for group in groups) <= 2
