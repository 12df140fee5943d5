"""Corrupted inputs: valid files of a format with random edits of bytes, lines, numbers and values."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import strategies as st

Inputs = Callable[[Random], bytes]  # returns one input; equal generators return equal inputs

# Replacement values, including sizes that only a limit can refuse.
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, -(2**63), 10**12, 10**30, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e308,
    float("inf"), float("nan"), "", "a", "\0", "\ud800", "é" * 9, "../x", "/", "1", "true", "NaN", "x" * 300, [], [[]],
    [0], [1, 2, 3], ["a"], [None], {}, {"": 1}, {"a": {}}, {"0": "a"}, [{}], [[1, 2], [3]], "zero1", "dp2",
    "full_attention",
)  # fmt: skip
_BYTES = (
    b"", b"\0", b"\n", b"\r\n", b"\t", b" ", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b'"', b"'", b"\\", b"{",
    b"}", b"[", b"]", b"(", b")", b":", b",", b".", b"=", b"-", b"#", b"@", b"*", b"->", b"..", b"0", b"1", b"-1",
    b"9" * 30, b"1e400", b"nan", b"inf", b"null", b"true", b"[" * 200, b"[" * 2000 + b"]" * 2000, b"{{", b"{%", b"%}",
    b"\\u0000", b"\\ud800", b"x" * 5000, "１é".encode(),
)  # fmt: skip
_NUMBERS = (
    b"0",
    b"-1",
    b"1",
    b"2",
    b"7",
    b"4096",
    b"9" * 12,
    b"9" * 30,
    b"9" * 5000,
    b"1e400",
    b"-0.0",
    b"nan",
    b"1_0",
)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_TOKEN = re.compile(rb"\w+|\s+|[^\w\s]")
_EDITS = ("replace", "insert", "delete", "copy", "line", "flip", "number", "splice", "cut", "repeat")
_CHANGES = ("set", "set", "remove", "add", "swap", "nest", "repeat")


def spoiled(seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> Inputs:
    """Return the bytes of a valid file with up to four edits; insertions include `words` of the format."""
    pieces = (*_BYTES, *words)

    def make(random: Random) -> bytes:
        data = random.choice(seeds)
        for _ in range(random.randrange(5)):
            data = _edited(data, random, random.choice(pieces), random.choice(seeds))
        return data

    return make


def _edited(data: bytes, random: Random, piece: bytes, other: bytes) -> bytes:
    """Return `data` with one edit: insert `piece` or the end of `other`, or remove, move or change a part."""
    at = random.randrange(len(data) + 1)
    end = min(len(data), at + random.randrange(24))
    match random.choice(_EDITS):
        case "replace":
            return data[:at] + piece + data[end:]
        case "insert":
            return data[:at] + piece + data[at:]
        case "delete":
            return data[:at] + data[end:]
        case "copy":
            return data[:at] + data[at:end] * 2 + data[end:]
        case "line":  # swap two lines
            lines = data.split(b"\n")
            one, two = random.randrange(len(lines)), random.randrange(len(lines))
            lines[one], lines[two] = lines[two], lines[one]
            return b"\n".join(lines)
        case "number" if found := _NUMBER.search(data, at):
            return data[: found.start()] + random.choice(_NUMBERS) + data[found.end() :]
        case "splice":
            return data[:at] + other[random.randrange(len(other) + 1) :]
        case "cut":
            return data[:at]
        case "repeat":
            return data[:at] + (data[at:end] or piece[:24]) * random.choice((3, 70, 1000)) + data[end:]
        case _:
            return (
                data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :] if at < len(data) else data
            )


def _wrong_value(random: Random, text: bytes, others: Sequence[Any], words: Sequence[Any]) -> Any:
    """Return the JSON value of `text` with up to four parts replaced, removed or added."""
    value = json.loads(text)
    for _ in range(random.randrange(5)):
        other = copy.deepcopy(random.choice(others))
        places = _places(value)
        if not places:
            return other
        holder, key = random.choice(places)
        match random.choice(_CHANGES):
            case "remove":
                del holder[key]
            case "add" if isinstance(holder, dict):
                holder[str(random.choice(words)) if words else f"new{random.randrange(7)}"] = other
            case "nest":
                for _ in range(random.choice((1, 2, 60))):
                    holder[key] = random.choice(([holder[key]], {"a": holder[key]}))
            case "repeat" if not isinstance(holder[key], dict | list):
                some, one = random.choice((2, 70, 1000)), holder[key]
                holder[key] = one[:5000] * some if isinstance(one, str) else [one] * some
            case "swap":
                other_holder, other_key = random.choice(places)
                if not _inside(holder[key], other_holder) and not _inside(other_holder[other_key], holder):
                    holder[key], other_holder[other_key] = other_holder[other_key], holder[key]
            case _:
                holder[key] = other
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Position in nested lists and dictionaries: the container, and the key in it."""
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
    """Return True if `holder` is `value` or is nested in it."""
    return value is holder or any(inner is holder for at, key in _places(value) for inner in (at, at[key]))


def spoiled_json(seeds: Sequence[Any], words: Sequence[Any] = ()) -> Inputs:
    """Return JSON text with wrong values or wrong bytes. `words`: its keys and names."""
    texts, others = [json.dumps(seed).encode() for seed in seeds], (*HOSTILE, *words)
    wrong_bytes = spoiled(texts, [json.dumps(word).encode() for word in words])

    def wrong_values(random: Random) -> bytes:
        return json.dumps(_wrong_value(random, random.choice(texts), others, words)).encode()

    return one_of(wrong_values, wrong_values, wrong_bytes)


def generated(inputs: Inputs) -> st.SearchStrategy[bytes]:
    """Return a hypothesis strategy of inputs that are made from nothing, with the words of a format: JSON values with
    its keys and strings, and sequences of its tokens. `inputs`: inputs of the format, which have these words."""
    words, tokens = {"a"}, {b"a"}
    for number in range(40):
        data = inputs(Random(number))[:20_000]
        tokens.update(_TOKEN.findall(data)[:300])
        with suppress(ValueError, RecursionError):
            words.update(key for holder, key in _places(json.loads(data)) if type(key) is str and type(holder) is dict)
    keys = st.sampled_from(sorted(words)) | st.text(max_size=5)
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | keys
    values = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=8), max_leaves=30
    )
    pieces = st.sampled_from(sorted(tokens)) | st.binary(max_size=3)
    return values.map(lambda value: json.dumps(value).encode()) | st.lists(pieces, max_size=40).map(b"".join)


def one_of(*inputs: Inputs) -> Inputs:
    """Return a function whose inputs each come from one of `inputs`."""
    return lambda random: random.choice(inputs)(random)


def write_input(directory: Path, name: str, data: bytes) -> Path:
    """Write `data` to the file `name` in `directory`, creating directories; return its path."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def decode(data: bytes) -> str:
    """Decode `data`; invalid UTF-8 becomes U+FFFD."""
    return data.decode("utf-8", "replace")
