"""The six speech acts as labels of a record's two sides, and refusals beside them: whether the prompt should be
refused, whether the response refuses."""

from __future__ import annotations

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
ALSO_KNOWN = {  # what else the literature calls them
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
    """A stretch of one side, `side[start:end]` in characters (code points), that performs an act."""

    side: str
    start: int
    end: int
    act: str


@dataclass(frozen=True, slots=True)
class Annotation:
    """What is said about a record. None: not judged; an empty tuple: judged, and none of them.

    prompt, response: the acts of that side, in the order of `ACTS`. by: who said it ("doccano", "prodigy", "model
    NAME"). tool: what the annotation tool wrote beside it, kept for its next turn.
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
        """Whether anything is said of the record as a whole."""
        return any(value is not None for value in (self.prompt, self.response, self.should_refuse, self.refuses))

    @property
    def by_model(self) -> bool:
        """Whether this is a served model's guess, which nobody has looked at."""
        return (self.by or "").startswith("model ")

    def labels(self) -> tuple[str, ...]:
        """The labels of `LABELS` that hold, in that order."""
        acts = {"prompt": self.prompt or (), "response": self.response or ()}
        held = {f"{side}:{act}" for side in SIDES for act in acts[side]}
        held |= {SHOULD_REFUSE} if self.should_refuse else set()
        held |= {REFUSES} if self.refuses else set()
        return tuple(label for label in LABELS if label in held)

    def as_json(self) -> dict[str, Any]:
        """What is judged, as it lies in a record."""
        spans = None if self.spans is None else [_span_json(span) for span in self.spans]
        acts = {side: value if value is None else list(value) for side, value in self._sides()}
        said = {**acts, "should_refuse": self.should_refuse, "refuses": self.refuses, "spans": spans, "by": self.by}
        kept = {key: value for key, value in said.items() if value is not None}
        return {**kept, "tool": dict(self.tool)} if self.tool else kept

    def _sides(self) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
        return ("prompt", self.prompt), ("response", self.response)


def from_labels(labels: set[str], where: str) -> dict[str, Any]:
    """The fields of an `Annotation` that a full set of `LABELS` says: what is not among them does not hold."""
    for label in sorted(labels):
        if label not in LABELS:
            raise UserError(f"{where}: {unknown('label', label, LABELS)}")
    return {
        **{side: tuple(act for act in ACTS if f"{side}:{act}" in labels) for side in SIDES},
        "should_refuse": SHOULD_REFUSE in labels,
        "refuses": REFUSES in labels,
    }


def annotation_of(record: Mapping[str, Any], sides: Exchange, where: str) -> Annotation:
    """The annotation that a record carries; an empty one where it carries none. `UserError` where it is not one."""
    said = record.get(ANNOTATION)
    if said is None:
        return Annotation()
    where = f'{where}: "{ANNOTATION}"'
    if not isinstance(said, dict):
        raise UserError(f'{where} is not an object, as in {{"response": ["assertive"], "refuses": false}}')
    known = {"prompt", "response", "should_refuse", "refuses", "spans", "by", "tool"}
    for key in said:
        if key not in known:
            raise UserError(f"{where}: {unknown('key', key, sorted(known))}")
    for key, kind, name in (("spans", list, "a list"), ("by", str, "a string"), ("tool", dict, "an object")):
        if not isinstance(said.get(key), (kind, type(None))):
            raise UserError(f'{where}: "{key}" is not {name}')
    return Annotation(
        prompt=_acts(said, "prompt", where),
        response=_acts(said, "response", where),
        should_refuse=_flag(said, "should_refuse", where),
        refuses=_flag(said, "refuses", where),
        spans=None if said.get("spans") is None else spans_of(said["spans"], sides, where),
        by=said.get("by"),
        tool=said.get("tool") or {},
    )


def annotated(record: Mapping[str, Any], annotation: Annotation) -> Record:
    """The record with this annotation in place of the one that it carried."""
    plain = {key: value for key, value in record.items() if key != ANNOTATION}
    said = annotation.as_json()
    return {**plain, ANNOTATION: said} if said else plain


def spans_of(said: Any, sides: Exchange, where: str) -> tuple[Span, ...]:
    """Spans from their JSON, each inside its side; sorted."""
    spans = []
    for number, one in enumerate(said, 1):
        here = f"{where}: span {number}"
        if not (isinstance(one, dict) and one.get("side") in SIDES):
            raise UserError(f'{here} has no "side", which is prompt or response')
        start, end = one.get("start"), one.get("end")
        length = len(getattr(sides, one["side"]))
        if type(start) is not int or type(end) is not int or not 0 <= start < end <= length:
            raise UserError(f"{here} is {start} to {end}, not inside the {one['side']} of {length} characters")
        spans.append(Span(one["side"], start, end, act_named(one.get("act"), here)))
    return tuple(sorted(spans))


def act_named(word: Any, where: str) -> str:
    """The act that a word names, by one of the names of the literature, whatever its case."""
    name = word.strip().lower() if isinstance(word, str) else word
    name = ALSO_KNOWN.get(name, name) if isinstance(name, str) else name
    if name not in ACTS:
        raise UserError(f"{where}: {unknown('speech act', str(word), tuple(ACTS))}")
    return str(name)


def _acts(said: Mapping[str, Any], side: str, where: str) -> tuple[str, ...] | None:
    value = said.get(side)
    if value is None:
        return None
    if not isinstance(value, list):
        raise UserError(f'{where}: "{side}" is not a list of speech acts')
    named = {act_named(act, f'{where}: "{side}"') for act in value}
    return tuple(act for act in ACTS if act in named)


def _flag(said: Mapping[str, Any], key: str, where: str) -> bool | None:
    value = said.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f'{where}: "{key}" is {value!r}, neither true nor false')
    return value


def _span_json(span: Span) -> dict[str, Any]:
    return {"side": span.side, "start": span.start, "end": span.end, "act": span.act}
