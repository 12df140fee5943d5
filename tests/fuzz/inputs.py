"""Strategies of hostile and unlucky input: valid files of a format, spoiled by edits of bytes, lines and values."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

# Values where others belong. Sizes that only a limit can refuse are among them.
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, -(2**63), 10**12, 10**30, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e308,
    float("inf"), float("nan"), "", "a", "\0", "\ud800", "é" * 9, "../x", "/", "1", "true", "NaN", "x" * 300, [], [[]],
    [0], [1, 2, 3], ["a"], [None], {}, {"": 1}, {"a": {}}, {"0": "a"}, [{}], [[1, 2], [3]], "zero1", "dp2",
    "full_attention",
)  # fmt: skip
_BYTES = (
    b"", b"\0", b"\n", b"\r\n", b"\t", b" ", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b'"', b"'", b"\\", b"{",
    b"}", b"[",
    b"]", b"(", b")", b":", b",", b".", b"=", b"-", b"#", b"@", b"*", b"->", b"..", b"0", b"1", b"-1", b"9" * 30,
    b"1e400",
    b"nan", b"inf", b"null", b"true", b"[" * 200, b"{{", b"{%", b"%}", b"\\u0000", b"\\ud800", b"x" * 5000,
    "１é".encode(),
)  # fmt: skip

_place = st.integers(0, 2**16)
_edit = st.tuples(st.sampled_from(("replace", "insert", "delete", "copy", "line", "flip")), _place, _place, _place)


@st.composite
def spoiled(draw: st.DrawFn, seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """Bytes of a valid file with up to four edits, with `words` of the format among what is put in."""
    data, pieces = draw(st.sampled_from(list(seeds))), (*_BYTES, *words)
    for kind, first, second, third in draw(st.lists(_edit, max_size=4)):
        data = _edited(data, kind, first % (len(data) + 1), second, pieces[third % len(pieces)])
    return data


def _edited(data: bytes, kind: str, at: int, length: int, piece: bytes) -> bytes:
    end = min(len(data), at + length % 24)
    match kind:
        case "replace":
            return data[:at] + piece + data[end:]
        case "insert":
            return data[:at] + piece + data[at:]
        case "delete":
            return data[:at] + data[end:]
        case "copy":
            return data[:at] + data[at:end] * 2 + data[end:]
        case "line":  # two lines change places
            lines = data.split(b"\n")
            one, other = at % len(lines), length % len(lines)
            lines[one], lines[other] = lines[other], lines[one]
            return b"\n".join(lines)
        case _:
            return data[:at] + bytes([data[at] ^ (1 << length % 8)]) + data[at + 1 :] if at < len(data) else data


_change = st.tuples(st.sampled_from(("set", "remove", "add", "swap")), _place, _place)


@st.composite
def wrong_values(draw: st.DrawFn, seeds: Sequence[Any], words: Sequence[Any] = ()) -> Any:
    """A valid JSON value of which up to four parts are other values, gone, or new. `words`: keys and names of it."""
    value = copy.deepcopy(draw(st.sampled_from(list(seeds))))
    others = (*HOSTILE, *words)
    for kind, place, what in draw(st.lists(_change, max_size=4)):
        places = _places(value)
        if not places:
            return others[what % len(others)]
        holder, key = places[place % len(places)]
        match kind:
            case "set":
                holder[key] = copy.deepcopy(others[what % len(others)])
            case "remove":
                del holder[key]
            case "add" if isinstance(holder, dict):
                name = str(words[what % len(words)]) if words else f"new{what % 7}"
                holder[name] = copy.deepcopy(others[place % len(others)])
            case _:
                other_holder, other_key = places[what % len(places)]
                if not _inside(holder[key], other_holder) and not _inside(other_holder[other_key], holder):
                    holder[key], other_holder[other_key] = other_holder[other_key], holder[key]
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Where something stands in nested lists and dictionaries: what holds it, and its key there."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < 400:
        holder = waiting.pop()
        if isinstance(holder, dict | list):
            for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
                found.append((holder, key))
                waiting.append(holder[key])
    return found


def _inside(value: Any, holder: Any) -> bool:
    """Whether `holder` is `value` or lies in it."""
    return value is holder or any(inner is holder for at, key in _places(value) for inner in (at, at[key]))


def spoiled_json(seeds: Sequence[Any], words: Sequence[Any] = ()) -> st.SearchStrategy[bytes]:
    """JSON text with wrong values, or with wrong bytes."""
    texts = [json.dumps(seed).encode() for seed in seeds]
    values = wrong_values(seeds, words).map(lambda value: json.dumps(value).encode())
    return st.one_of(values, values, spoiled(texts, [json.dumps(word).encode() for word in words]))


def write_input(directory: Path, name: str, data: bytes) -> Path:
    """Write `data` to the file `name` of `directory`, whose folders are made; its path."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def decode(data: bytes) -> str:
    """`data` as text; what is not UTF-8 becomes U+FFFD."""
    return data.decode("utf-8", "replace")
