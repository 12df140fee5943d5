"""Read and write the ``config.json`` keys of an encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError
from meshwright.limits import shorten_repr
from meshwright.spec.families import Family

if TYPE_CHECKING:
    from meshwright.spec.config import ModelConfig
    from meshwright.spec.config_reader import Reader


def read_encoder(read: Reader, family: Family, vocabulary: int) -> dict[str, Any]:
    """Read the ModelConfig fields that only an encoder has (token types, head, labels, padding token); return {field:
    value}. The first of ``architectures`` determines the head (default: masked language modeling). Raises ``UserError``
    for an unknown head.

    read: typed access to the ``config.json``. family: the encoder's family. vocabulary: number of token ids."""
    architectures = read.data.get("architectures") or [family.architecture]
    known = ", ".join(family.heads)
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise UserError(f'{read.where}: "architectures" must be a list of names, not {shorten_repr(architectures)}')
    if architectures[0] not in family.heads:
        raise UserError(f"{read.where}: the head of {architectures[0]} is not computed here (computed: {known})")
    head = family.heads[architectures[0]]
    padding = read.tokens("pad_token_id", vocabulary)
    return {
        "token_types": read.integer("token_types", ("type_vocab_size",)),
        "head": head,
        "labels": _read_labels(read) if head == "classes" else (),
        "pad_token": padding[0] if padding else None,
    }


def _read_labels(read: Reader) -> tuple[str, ...]:
    """Return the names of the classes in ``id2label`` or, without that key, ``LABEL_0``, ``LABEL_1``, ... for
    ``num_labels`` classes (default 2). read: typed access to the ``config.json``."""
    _, names = read.get(("id2label",))
    if names is None:
        return tuple(f"LABEL_{number}" for number in range(read.integer("labels", ("num_labels",), 2)))
    try:
        return tuple(str(names[str(number)]) for number in range(len(names)))
    except (KeyError, TypeError):
        message = f'"id2label" must name the classes from "0" on, not {shorten_repr(names)}'
        raise UserError(f"{read.where}: {message}") from None


def write_encoder(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the ``config.json`` keys and values that only an encoder of the family `family` has; the inverse of
    `read_encoder`."""
    (architecture,) = (name for name, head in family.heads.items() if head == config.head)
    written: dict[str, Any] = {
        "architectures": [architecture],
        "type_vocab_size": config.token_types,
        "pad_token_id": config.pad_token,
        "position_embedding_type": "absolute",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    if config.labels:
        names = {str(number): label for number, label in enumerate(config.labels)}
        written |= {"id2label": names, "label2id": {label: number for number, label in enumerate(config.labels)}}
    return written
