"""Balance of a labelled data set over the six speech acts, its refusals, and the records to add."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from meshwright.data.records.exchanges import Record, split_exchange
from meshwright.errors import UserError
from meshwright.synthesis.speech_acts import ACTS, SIDES, Annotation, parse_annotation, resolve_act

ALL = "all"  # the group of every record


def measure_balance(
    records: Iterable[tuple[str, str, Record]], target: Mapping[str, Fraction], by: str | None = None
) -> dict[str, Any]:
    """Measure how evenly speech acts are distributed over labelled records; return JSON, {"target", "groups": {name:
    counts}}.

    records: (group such as a file name, position for errors such as "a.jsonl:17", record). target: {act: desired
    share}, with the sum 1. by: record key, such as "origin.method". The first group, "all", has all records. It is
    followed by the groups of `records`, if there are at least two, and by one group for each value of the key `by`
    (None: no such groups).

    Counts of a group: `records`, `labelled`, `guessed` (labelled by a model alone), `refusals`, and for "prompt" and
    "response": `acts` ({act: count, share, number to `add` to reach the target}), `labels` (sum of the counts), `none`
    (prompts or responses without an act), `entropy` in bits, `effective` number of acts, `missing` acts.

    `entropy` is Shannon's entropy H of the shares; `effective`, 2^H, is the number of equally frequent acts with the
    same entropy (Jost, Entropy and diversity, Oikos 113, 2006). A prompt or response with two acts counts for both.
    """
    groups: dict[str, list[Annotation]] = {ALL: []}
    named: set[str] = set()
    for group, where, record in records:
        annotation = parse_annotation(record, split_exchange(record, where), where)
        named.add(group)
        for name in (ALL, group, *([] if by is None else [f"{by}={_get_value(record, by)}"])):
            groups.setdefault(name, []).append(annotation)
    if len(named) == 1:  # which is all
        groups.pop(*named)
    return {
        "target": {act: float(share) for act, share in target.items()},
        "groups": {name: _measure_group(annotations, target) for name, annotations in groups.items()},
    }


def parse_target(text: str | None) -> dict[str, Fraction]:
    """Parse `text`, relative weights of speech acts such as "assertive=3,directive=2", to {act: share}, with the sum 1.
    An act without a number has weight 1, an act that is not mentioned weight 0; None gives equal shares. Raises
    `UserError` for an unknown act or an invalid weight."""
    if text is None:
        return dict.fromkeys(ACTS, Fraction(1, len(ACTS)))
    weights = dict.fromkeys(ACTS, Fraction(0))
    for part in text.split(","):
        name, equals, value = part.partition("=")
        act = resolve_act(name, "--target")
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


def count_additions(counts: Mapping[str, int], target: Mapping[str, Fraction]) -> dict[str, int]:
    """Compute how many records of each act to add, at least, so that all acts reach their target shares without removal
    of a record; return {act: number, rounded up}. counts: {act: number of records}. target: {act: desired share}, with
    the sum 1.

    The act with the highest ratio of count to target share gets no additions, and determines how many records the other
    acts get. Acts with a target of 0 get none.
    """
    size = max((Fraction(counts[act]) / share for act, share in target.items() if share), default=Fraction(0))
    return {act: max(0, math.ceil(size * share) - counts[act]) if share else 0 for act, share in target.items()}


def _get_value(record: Mapping[str, Any], key: str) -> str:
    """Return the value of a record under `key` as text of at most 60 characters; "none" if the key is missing. The key
    "a.b" is key b inside the object under a.
    """
    value: Any = record
    for name in [key] if key in record else key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return "none" if value is None else str(value)[:60]


def _measure_group(annotations: list[Annotation], target: Mapping[str, Fraction]) -> dict[str, Any]:
    """Measure how speech acts are distributed in one group of records; return its entry in `groups` of
    `measure_balance`. annotations: the records' annotations. target: {act: desired share}."""
    judged = [one for one in annotations if one.judged]
    return {
        "records": len(annotations),
        "labelled": len(judged),
        "guessed": sum(one.by_model for one in judged),
        **{side: _measure_side([getattr(one, side) or () for one in judged], target) for side in SIDES},
        "refusals": _count_refusals(judged),
    }


def _measure_side(acts: list[tuple[str, ...]], target: Mapping[str, Fraction]) -> dict[str, Any]:
    """Measure how the speech acts of a group's prompts, or of its responses, are distributed; return `acts`, `labels`,
    `none`, `entropy`, `effective` and `missing` as in `measure_balance`.

    acts: speech acts of each record's prompt or response. target: {act: desired share}.
    """
    counts = {act: sum(act in held for held in acts) for act in ACTS}
    total = sum(counts.values())
    shares = {act: count / total if total else 0.0 for act, count in counts.items()}
    entropy = -sum(share * math.log2(share) for share in shares.values() if share) + 0.0
    add = count_additions(counts, target)
    return {
        "acts": {act: {"count": counts[act], "share": shares[act], "add": add[act]} for act in ACTS},
        "labels": total,
        "none": sum(not held for held in acts),
        "entropy": entropy,
        "effective": 2**entropy if total else 0.0,
        "missing": [act for act, count in counts.items() if not count],
    }


def _count_refusals(annotations: list[Annotation]) -> dict[str, int]:
    """Count the labelled records by two judgements: should the prompt be refused, and does the response refuse. Return
    {name: number of records}. annotations: the records' annotations.

    `should_refuse`, `harmless`: the prompt should, or should not, be refused. `refused`, `answered`: the prompt should
    be refused, and the response refuses, or does not. `refused_harmless`, `answered_harmless`: the prompt should not be
    refused, and the response refuses, or does not. `not_judged`: a judgement is missing.
    """
    pairs = [(one.should_refuse, one.refuses) for one in annotations]
    return {
        "should_refuse": sum(should is True for should, _ in pairs),
        "refused": pairs.count((True, True)),
        "answered": pairs.count((True, False)),
        "harmless": sum(should is False for should, _ in pairs),
        "refused_harmless": pairs.count((False, True)),
        "answered_harmless": pairs.count((False, False)),
        "not_judged": sum(should is None or refuses is None for should, refuses in pairs),
    }
