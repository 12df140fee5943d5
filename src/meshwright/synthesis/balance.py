"""How a labelled data set is balanced over the six speech acts, where it refuses, and what would balance it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from meshwright.data.records.exchanges import Record, exchange
from meshwright.errors import UserError
from meshwright.synthesis.speech_acts import ACTS, SIDES, Annotation, act_named, annotation_of

ALL = "all"  # the group of every record


def balance(
    records: Iterable[tuple[str, str, Record]], target: Mapping[str, Fraction], by: str | None = None
) -> dict[str, Any]:
    """The report on (group, where, record) triples, as JSON.

    target: the share of each act that is aimed at; they sum to 1. by: a key of the records whose values are groups too.
    `groups`, of which "all" is the first: for each `records`, those `labelled` and by a model's guess alone
    (`guessed`); for each side its `acts` (count, share and how many to `add`), `labels` (all counts together),
    `entropy` in bits, `effective` number of acts, `missing` acts; `refusals`.

    Entropy H is Shannon's over the shares; the effective number 2^H is how many equally frequent acts would have it
    (Jost, Entropy and diversity, Oikos 113, 2006). A record with two acts on a side counts for both.
    """
    groups: dict[str, list[Annotation]] = {ALL: []}
    named: set[str] = set()
    for group, where, record in records:
        said = annotation_of(record, exchange(record, where), where)
        named.add(group)
        for name in (ALL, group, *([] if by is None else [f"{by}={_value(record, by)}"])):
            groups.setdefault(name, []).append(said)
    if len(named) == 1:  # which is all
        groups.pop(*named)
    return {
        "target": {act: float(share) for act, share in target.items()},
        "groups": {name: _group(said, target) for name, said in groups.items()},
    }


def parse_target(text: str | None) -> dict[str, Fraction]:
    """The share of each act that "assertive=3,directive=2" asks for, in proportion; None: all alike. `UserError`."""
    if text is None:
        return dict.fromkeys(ACTS, Fraction(1, len(ACTS)))
    weights = dict.fromkeys(ACTS, Fraction(0))
    for part in text.split(","):
        name, equals, value = part.partition("=")
        act = act_named(name, "--target")
        try:
            weight = Fraction(value.strip()) if equals else Fraction(1)
        except (ValueError, ZeroDivisionError):
            raise UserError(f'--target: the weight of {act} is "{value}", not a number, as in {act}=2') from None
        if weight < 0:
            raise UserError(f"--target: the weight of {act} is below 0")
        weights[act] = weight
    total = sum(weights.values())
    if not total:
        raise UserError("--target: every weight is 0")
    return {act: weight / total for act, weight in weights.items()}


def additions(counts: Mapping[str, int], target: Mapping[str, Fraction]) -> dict[str, int]:
    """How many of each act to add, so that shares are the target's and nothing is taken away: the fewest, rounded up.

    The act that is furthest above its share sets the size of the whole. Acts with a target of 0 get none.
    """
    size = max((Fraction(counts[act]) / share for act, share in target.items() if share), default=Fraction(0))
    return {act: max(0, math.ceil(size * share) - counts[act]) if share else 0 for act, share in target.items()}


def _value(record: Mapping[str, Any], key: str) -> str:
    """What stands under a key, "a.b" for the b inside a; "none" where nothing does."""
    value: Any = record
    for name in [key] if key in record else key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return "none" if value is None else str(value)[:60]


def _group(said: list[Annotation], target: Mapping[str, Fraction]) -> dict[str, Any]:
    judged = [one for one in said if one.judged]
    return {
        "records": len(said),
        "labelled": len(judged),
        "guessed": sum(one.by_model for one in judged),
        **{side: _side([getattr(one, side) or () for one in judged], target) for side in SIDES},
        "refusals": _refusals(judged),
    }


def _side(acts: list[tuple[str, ...]], target: Mapping[str, Fraction]) -> dict[str, Any]:
    counts = {act: sum(act in held for held in acts) for act in ACTS}
    total = sum(counts.values())
    shares = {act: count / total if total else 0.0 for act, count in counts.items()}
    entropy = -sum(share * math.log2(share) for share in shares.values() if share) + 0.0
    add = additions(counts, target)
    return {
        "acts": {act: {"count": counts[act], "share": shares[act], "add": add[act]} for act in ACTS},
        "labels": total,
        "none": sum(not held for held in acts),
        "entropy": entropy,
        "effective": 2**entropy if total else 0.0,
        "missing": [act for act, count in counts.items() if not count],
    }


def _refusals(said: list[Annotation]) -> dict[str, int]:
    """Prompts by whether they should be refused, responses by whether they refuse; what is not judged is in neither.

    `answered`: should be refused, and is not; `refused_harmless`: should not be, and is.
    """
    pairs = [(one.should_refuse, one.refuses) for one in said]
    return {
        "should_refuse": sum(should is True for should, _ in pairs),
        "refused": pairs.count((True, True)),
        "answered": pairs.count((True, False)),
        "harmless": sum(should is False for should, _ in pairs),
        "refused_harmless": pairs.count((False, True)),
        "answered_harmless": pairs.count((False, False)),
        "not_judged": sum(should is None or refuses is None for should, refuses in pairs),
    }
