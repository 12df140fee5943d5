"""The operators of a transformer in order: of a layer, the embedding, and the head with its loss; read from the table
`operators.toml`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

from meshwright.planner.cost.adapters import adapt_operators
from meshwright.planner.cost.dimensions import Dimensions, list_properties
from meshwright.planner.cost.micro_batch import MicroBatch, layer_kind
from meshwright.planner.cost.operators import Operator, Row, SavedTensor
from meshwright.planner.cost.tables import parse_item, parse_tensor, select
from meshwright.spec.stages import Stage
from meshwright.toml import read_packaged_toml


def layer_operators(batch: MicroBatch, layer: int, input_gradient: bool = False) -> tuple[Operator, ...]:
    """Return the operators of the transformer layer with index `layer` in forward order. Names of saved tensors are
    relative to the layer.

    input_gradient: True if the gradient of the layer's input is computed even if all earlier parameters are frozen, as
    in every pipeline stage but the first.
    """
    kind = layer_kind(batch.config, layer)
    key = "layer", layer if layer in batch.routed else kind, input_gradient
    return _cached(batch, key, layer=layer, kind=kind, arrives=input_gradient or not kind.begins)


def embedding_operators(batch: MicroBatch) -> tuple[Operator, ...]:
    """Return the operators of the embedding: lookups in the tables of tokens, positions and token types, then the norm,
    as far as the model has them."""
    return _cached(batch, ("embedding",), arrives=False)


def head_operators(batch: MicroBatch, keeps_gradient: bool) -> tuple[Operator, ...]:
    """Return the operators after the last layer: final norm, language-model head (product with the vocabulary matrix)
    and loss. For an encoder, return the operators of its head.

    keeps_gradient: True if the forward already computes and saves the gradients of the head's input and weight; False
    if the backward computes the logits a second time."""
    flags = frozenset({"keeps_gradient"} if keeps_gradient else ())
    return _cached(batch, ("encoder_head" if batch.config.encoder else "head", flags), flags)


def stage_operators(batch: MicroBatch, stage: Stage) -> list[Operator]:
    """Return the operators of a pipeline stage in forward order: embedding, layers and head, as far as it has them."""
    first = embedding_operators(batch) if stage.first else ()
    last = head_operators(batch, True) if stage.last else ()
    layers = (operator for layer in stage.layers for operator in layer_operators(batch, layer, not stage.first))
    return [*first, *layers, *last]


def _cached(
    batch: MicroBatch, key: tuple[Any, ...], flags: Collection[str] = (), layer: int = 0, **adapted: Any
) -> tuple[Operator, ...]:
    """Return the operators of one section of `operators.toml`, such as "layer", including an adapter's operators if the
    model has an adapter. Results are cached in `batch.operators`.

    key: key of the cache entry; its first item is the section's name. flags: names of properties that hold in addition,
    such as "keeps_gradient". layer: index of the layer. adapted: further arguments of `adapt_operators`."""
    if key not in batch.operators:
        found = read_operators(batch, key[0], flags, layer)
        batch.operators[key] = tuple(
            found if batch.config.adapter is None else adapt_operators(batch, found, **adapted)
        )
    operators: tuple[Operator, ...] = batch.operators[key]
    return operators


def read_operators(batch: MicroBatch, section: str, flags: Collection[str] = (), layer: int = 0) -> Iterator[Operator]:
    """Yield the operators of one section (list of operators, such as "layer") of `operators.toml`, without adapters.

    flags: names of properties (yes-or-no facts, such as "gated") that hold in addition to those of the layer;
    conditions in the table test them. layer: index of the layer, which decides the sizes."""
    kind = layer_kind(batch.config, layer)
    dimensions = Dimensions(batch, kind, batch.load(layer)._asdict() if kind.mixed else {})
    for row in _list_rows(section, list_properties(batch, kind).union(flags), "", ()):
        yield Operator(row, batch, dimensions)


# --- rows of the table

Let = tuple[tuple[str, str], ...]
"""(dimension, size that takes its place)."""


def _list_rows(section: str, true: frozenset[str], prefix: str, let: Let) -> Iterator[Row]:
    """Yield the rows of a section of `operators.toml`. A section is a list of rows; each row describes one operator, or
    names another section (`use`), whose rows are then yielded in its place.

    true: names of the properties that hold, such as "gated"; rows whose condition does not hold are left out. prefix:
    text put before operator names that begin with ".", such as "attention" before ".qkv". let: (dimension, replacement)
    pairs; a dimension is the name of a size, such as "width"."""
    for row in _read_rows(section, true & _list_words(section), prefix, let):
        if "use" in row:
            yield from _list_rows(row["use"], true.union(row.get("flags", ())), row["name"], row["let"])
        else:
            yield row


@cache
def _read_rows(section: str, true: frozenset[str], prefix: str, let: Let) -> list[Row]:
    """Return the rows of one section of `operators.toml`, without the rows of other sections that it names. A row
    describes one operator. Names have their prefix, sizes their replaced dimensions, and the row's tensors, collectives
    and kernels are parsed.

    true: names of the properties that hold, such as "gated". prefix: text put before names that begin with ".". let:
    (dimension, replacement) pairs; a dimension is the name of a size, such as "width"."""
    table, found = read_packaged_toml("planner/cost/operators.toml"), []

    def name(text: str) -> str:
        """Return a name in full."""
        return prefix + text if text.startswith(".") or not text else text

    def tensor(text: str) -> SavedTensor:
        """Return a tensor whose shape is not computed yet."""
        found = parse_tensor(parse_item(text))
        return SavedTensor(name(found.name), tuple(map(size, found.shape)), found.kind)

    def size(text: str) -> str:
        """Return a size with replaced dimensions."""
        return re.sub(r"\w+", lambda word: own.get(word[0], word[0]), text)

    for row in select(table[section], true, table["groups"]):
        within, own = true.union(row.get("flags", ())), dict(let) | row.get("let", {})
        row |= {"name": name(row.get("name", "")), "let": tuple(own.items())}
        row |= {key: size(row[key]) for key in ("elements", "count") if key in row}
        row |= {key: tuple(map(tensor, row.get(key, ()))) for key in ("saved", "kept")}
        row |= {key: tuple(map(size, row[key])) for key in ("parameters",) if key in row}
        row["called"] = name(row.get("called", [row["name"]])[0])
        if "linear" in row:
            row["linear"] = tuple(size(each.replace("*", " ")) for each in row["linear"].split())
        kernels = select(table["kernels"][row["kernels"]], within, {}) if "kernels" in row else []
        row["kernels"] = [
            each | {key: size(each[key]) for key in ("flops", "bytes") if key in each}
            | {"name": name(each.get("name", row["called"])), "shape": tuple(each.get("shape", "").split())}
            for each in kernels
        ]  # fmt: skip
        row["calls"] = [
            each | {"sites": [(at.format(name(site)), size(sent)) for at, sent in map(parse_item, each["sites"])]}
            for kind, _, site in (text.partition(" ") for text in row.get("calls", ()))
            for each in select(table["calls"][kind], within, {})
        ]  # fmt: skip
        found.append(row)
    return found


@cache
def _list_words(section: str) -> frozenset[str]:
    """Return all words in a section of `operators.toml` and in the groups, collectives and kernels to which it refers.
    They include every property (such as "gated") that a condition of the section tests."""
    table = read_packaged_toml("planner/cost/operators.toml")
    words = set(re.findall(r"\w+", str(table[section])))
    others = [table[kind][name] for kind in ("groups", "calls", "kernels") for name in words & table[kind].keys()]
    return frozenset(words.union(re.findall(r"\w+", str(others))))
