"""Annotations of records: the speech acts of prompt and response, and refusals (should the prompt be refused, does the
response refuse).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.data.records.exchanges import ANNOTATION, Exchange, Record
from meshwright.errors import UserError
from meshwright.names import unknown

# The six classes of illocutionary acts of Bach and Harnish, Linguistic Communication and Speech Acts (1979), chapters
# 3 and 6, under the names of Searle, A Taxonomy of Illocutionary Acts (1975; Expression and Meaning, 1979, chapter 1),
# and for the sixth, which Searle counts among the declarations, of Austin, How to Do Things with Words (1962),
# lecture XII.
ACTS: dict[str, str] = {
    "assertive": "says that something is so: states, describes, explains, reports, predicts, concludes",
    "directive": "tries to get the other to do something: asks, requests, orders, advises, invites",
    "commissive": "binds the speaker to do something: promises, offers, accepts, agrees to help",
    "expressive": "shows a feeling about something: thanks, apologises, congratulates, regrets, greets",
    "declaration": "makes something so by saying it: names, appoints, resigns, opens, closes, grants",
    "verdictive": "gives a judgement on evidence or by a measure: grades, diagnoses, rates, rules, assesses",
}
ALSO_KNOWN = {  # other names in the literature
    "representative": "assertive",
    "constative": "assertive",
    "acknowledgment": "expressive",
    "declarative": "declaration",
    "effective": "declaration",
}
SIDES = ("prompt", "response")
SHOULD_REFUSE, REFUSES = "should-refuse", "refuses"
# The labels as annotation tools show them.
LABELS = (*(f"{side}:{act}" for side in SIDES for act in ACTS), SHOULD_REFUSE, REFUSES)


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Character range of a record's prompt or response that performs a speech act.

    side: "prompt" or "response". start, end: range [start, end) in characters. act: name of the speech act, such as
    "directive".
    """

    side: str
    start: int
    end: int
    act: str


@dataclass(frozen=True, slots=True)
class Annotation:
    """Labels of one data record (prompt and response): its speech acts, such as "directive", and refusals. A field that
    nobody has judged is None; a text judged to have no speech act has an empty tuple.

    prompt, response: names of the speech acts of the prompt and of the response, in the order of the module's table
    `ACTS`. should_refuse: True if the prompt should be refused. refuses: True if the response refuses. spans: character
    ranges that perform a speech act. by: author of the labels ("doccano", "prodigy", "model NAME"). tool: other JSON
    fields of the annotation tool, stored for the next export.
    """

    prompt: tuple[str, ...] | None = None
    response: tuple[str, ...] | None = None
    should_refuse: bool | None = None
    refuses: bool | None = None
    spans: tuple[Span, ...] | None = None
    by: str | None = None
    tool: Mapping[str, Any] = field(default_factory=dict)

    @property
    def judged(self) -> bool:
        """True if the acts of prompt or response, or a refusal, have been labelled (are not None); spans alone do not
        count.
        """
        return any(value is not None for value in (self.prompt, self.response, self.should_refuse, self.refuses))

    @property
    def by_model(self) -> bool:
        """True if the labels were set by a model and no person has reviewed them."""
        return (self.by or "").startswith("model ")

    def list_labels(self) -> tuple[str, ...]:
        """Return the names of the labels that are set, such as "prompt:directive" or "refuses", in a fixed order
        (`LABELS`, the names of all labels).
        """
        held = {f"{side}:{act}" for side in SIDES for act in getattr(self, side) or ()}
        held |= {SHOULD_REFUSE} if self.should_refuse else set()
        held |= {REFUSES} if self.refuses else set()
        return tuple(label for label in LABELS if label in held)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of all fields that are not None, the form in which records store annotations."""
        fields = {**dataclasses.asdict(self), "tool": dict(self.tool) or None}
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in fields.items()
            if value is not None
        }


def parse_label_set(labels: set[str], where: str) -> dict[str, Any]:
    """Convert the set of labels that an annotator chose for a record to fields of `Annotation`: {"prompt", "response",
    "should_refuse", "refuses"}. A label that the annotator did not choose counts as judged absent.

    labels: names such as "prompt:directive" or "refuses". where: position of the record, for the `UserError` for an
    unknown label.
    """
    for label in sorted(labels):
        if label not in LABELS:
            raise UserError(f"{where}: {unknown('label', label, LABELS)}")
    return {
        **{side: tuple(act for act in ACTS if f"{side}:{act}" in labels) for side in SIDES},
        "should_refuse": SHOULD_REFUSE in labels,
        "refuses": REFUSES in labels,
    }


def parse_annotation(record: Mapping[str, Any], sides: Exchange, where: str) -> Annotation:
    """Parse the annotation (speech-act labels, refusals, labelled spans) that a data record stores as JSON. If the
    record has none, all fields of the result are None.

    sides: the record's prompt and response, against whose lengths the spans are checked. where: position of the record,
    such as "a.jsonl:17", for the `UserError` for an invalid annotation.
    """
    stored = record.get(ANNOTATION)
    if stored is None:
        return Annotation()
    where = f'{where}: "{ANNOTATION}"'
    if not isinstance(stored, dict):
        raise UserError(f'{where} is not an object, as in {{"response": ["assertive"], "refuses": false}}')
    known = {each.name for each in dataclasses.fields(Annotation)}
    for key in stored:
        if key not in known:
            raise UserError(f"{where}: {unknown('key', key, sorted(known))}")
    for key, kind, name in (("spans", list, "a list"), ("by", str, "a string"), ("tool", dict, "an object")):
        if not isinstance(stored.get(key), (kind, type(None))):
            raise UserError(f'{where}: "{key}" is not {name}')
    return Annotation(
        prompt=_parse_acts(stored, "prompt", where),
        response=_parse_acts(stored, "response", where),
        should_refuse=_parse_flag(stored, "should_refuse", where),
        refuses=_parse_flag(stored, "refuses", where),
        spans=None if stored.get("spans") is None else parse_spans(stored["spans"], sides, where),
        by=stored.get("by"),
        tool=stored.get("tool") or {},
    )


def replace_annotation(record: Mapping[str, Any], annotation: Annotation) -> Record:
    """Return a copy of the record whose annotation is replaced by `annotation`, or removed if `annotation` is empty."""
    plain = {key: value for key, value in record.items() if key != ANNOTATION}
    fields = annotation.to_json()
    return {**plain, ANNOTATION: fields} if fields else plain


def parse_spans(items: Any, sides: Exchange, where: str) -> tuple[Span, ...]:
    """Parse a JSON list of spans (character ranges with a speech act); return them sorted.

    items: the list. sides: prompt and response of the record, against whose lengths the spans are checked. where:
    position of the record, for the `UserError` for a span that is not within the prompt or response.
    """
    spans = []
    for number, one in enumerate(items, 1):
        here = f"{where}: span {number}"
        if not (isinstance(one, dict) and one.get("side") in SIDES):
            raise UserError(f'{here} has no "side", which is prompt or response')
        start, end = one.get("start"), one.get("end")
        length = len(getattr(sides, one["side"]))
        if type(start) is not int or type(end) is not int or not 0 <= start < end <= length:
            raise UserError(f"{here} is {start} to {end}, not inside the {one['side']} of {length} characters")
        spans.append(Span(one["side"], start, end, resolve_act(one.get("act"), here)))
    return tuple(sorted(spans))


def resolve_act(word: Any, where: str) -> str:
    """Return the canonical name of a speech act, such as "assertive". word: that name or a synonym such as
    "representative", in upper or lower case. where: file and line of the word, for the error message. Raises
    `UserError` for an unknown name."""
    name = word.strip().lower() if isinstance(word, str) else word
    name = ALSO_KNOWN.get(name, name) if isinstance(name, str) else name
    if name not in ACTS:
        raise UserError(f"{where}: {unknown('speech act', str(word), tuple(ACTS))}")
    return str(name)


def _parse_acts(stored: Mapping[str, Any], side: str, where: str) -> tuple[str, ...] | None:
    """Parse the speech acts of the prompt or of the response in a JSON annotation; return their names, None if not
    judged.

    stored: the annotation. side: "prompt" or "response". where: position of the record, for the `UserError`.
    """
    value = stored.get(side)
    if value is None:
        return None
    if not isinstance(value, list):
        raise UserError(f'{where}: "{side}" is not a list of speech acts')
    named = {resolve_act(act, f'{where}: "{side}"') for act in value}
    return tuple(act for act in ACTS if act in named)


def _parse_flag(stored: Mapping[str, Any], key: str, where: str) -> bool | None:
    """Parse the boolean under `key` in the JSON annotation `stored`; return None if it is missing. where: position of
    the record, for the `UserError`."""
    value = stored.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f'{where}: "{key}" is {value!r}, neither true nor false')
    return value
