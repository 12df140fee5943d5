"""What a tokenizer does to a corpus: bytes per token by source, which tokens are used and how often, what is lost."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import decoders

from meshwright.data.cleaning.survey import SPLITS
from meshwright.data.packing.packed import PackedTokens
from meshwright.data.prepared import PreparedData
from meshwright.data.tokenizers.kinds import BYTES, byte_characters
from meshwright.data.tokenizers.special_tokens import unknown_token
from meshwright.data.tokenizers.tokenizer import TextTokenizer
from meshwright.recipe import DataRecipe

_CHECKED = 200  # validation documents that are decoded and compared
_SHOWN = 20
_BYTE_OF = {character: byte for byte, character in enumerate(byte_characters())}
_AT_LEAST = (1, 10, 100, 1000, 10_000)


def tokenizer_report(recipe: DataRecipe, data: PreparedData) -> dict[str, Any]:
    """What the tokenizer of `data`, prepared from `recipe`, made of its text, as JSON. Framing tokens are not counted,
    those of the template of records are.

    `sources`: for each of the sources its documents, bytes, tokens and bytes_per_token, both splits together. `used`,
    `unused`: how many tokens of the vocabulary occur, and how many do not; `unused_tokens` names the first of these.
    `occur_at_least`: how many tokens occur so often. `most_frequent`, `longest` (of those that occur, by bytes): id,
    text, count. `unknown`: what stands for text that the tokenizer has no token for, and its count; None without such a
    token. `round_trip`: of the first documents of the validation split, those that decode to the very text.
    """
    tokenizer = data.tokenizer
    sources = _sources(data)
    counts = _counts(data)
    names = token_texts(tokenizer)
    tokens, size = int(counts.sum()), sum(source["bytes"] for source in sources)
    order = np.argsort(-counts, kind="stable")
    occur = order[counts[order] > 0]
    special = {tokenizer.tokenizer.token_to_id(token) for token in tokenizer.special}
    unused = [number for number in np.flatnonzero(counts == 0).tolist() if number not in special and number in names]
    lengths = {number: 1 if names[number] in BYTES else len(names[number].encode()) for number in occur.tolist()}
    longest = sorted(lengths, key=lambda number: (-lengths[number], number))
    name = unknown_token(tokenizer.tokenizer)
    unknown = tokenizer.tokenizer.token_to_id(name) if name else None

    def row(number: int) -> dict[str, Any]:
        return {"id": number, "text": names[number], "count": int(counts[number])}

    return {
        "tokenizer": recipe.tokenizer,
        "vocabulary": tokenizer.vocabulary,
        "special_tokens": sorted(tokenizer.special),
        "tokens": tokens,
        "bytes": size,
        "bytes_per_token": size / tokens if tokens else None,
        "sources": sources,
        "used": len(occur),
        "unused": len(unused),
        "unused_tokens": [{"id": number, "text": names[number]} for number in unused[: 5 * _SHOWN]],
        "occur_at_least": {str(least): int((counts >= least).sum()) for least in _AT_LEAST},
        "most_frequent": [row(number) for number in occur[:_SHOWN].tolist()],
        "longest": [row(number) for number in longest[:_SHOWN]],
        "unknown": None if unknown is None or unknown == tokenizer.end else row(unknown),
        "round_trip": _round_trip(data),
        "directory": str(data.tokenizer_directory),
    }


def tokens_of(tokenizer: TextTokenizer, text: str) -> dict[str, Any]:
    """What `tokenizer` makes of `text`: `tokens` [{id, text}], the `decoded` text, and whether that is `exact`."""
    names = token_texts(tokenizer)
    (numbers,) = tokenizer.encode([text])
    decoded = tokenizer.decode(numbers)
    return {
        "text": text,
        "tokens": [{"id": number, "text": names[number]} for number in numbers.tolist()],
        "decoded": decoded,
        "exact": decoded == text,
    }


def token_texts(tokenizer: TextTokenizer) -> dict[int, str]:
    """How each token reads; bytes that are no character of their own as `<0xE4>`."""
    vocabulary = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    if not isinstance(tokenizer.tokenizer.decoder, decoders.ByteLevel):
        return {number: token for token, number in vocabulary.items()}
    added = tokenizer.tokenizer.get_added_tokens_decoder()
    return {number: token if number in added else _of_bytes(token) for token, number in vocabulary.items()}


def _of_bytes(token: str) -> str:
    """The text of a byte-level token."""
    if any(character not in _BYTE_OF for character in token):
        return token
    text = bytes(_BYTE_OF[character] for character in token).decode("utf-8", "surrogateescape")
    return "".join(BYTES[ord(one) - 0xDC00] if "\udc80" <= one <= "\udcff" else one for one in text)


def _counts(data: PreparedData) -> NDArray[np.int64]:
    """How often each token stands in a text of either split, [vocabulary]."""
    counts = np.zeros(data.vocabulary, dtype=np.int64)
    for name in SPLITS:
        split = data.split(name)
        for part in split.token_batches():
            counts += np.bincount(part, minlength=data.vocabulary)
        if isinstance(split, PackedTokens):
            counts[data.tokenizer.start] -= split.documents
            counts[data.tokenizer.end] -= split.documents
    return counts


def _sources(data: PreparedData) -> list[dict[str, Any]]:
    """What became of each source: documents, bytes, tokens and bytes per token, of both splits."""
    found = []
    shards = {name: iter(data.split(name).shards) for name in SPLITS}  # which are cut where a source ends
    framing = 2 if isinstance(data.split("train"), PackedTokens) else 0
    for source, record in zip(data.sources, data.manifest["sources"], strict=True):
        mine = [shard for name in SPLITS for shard in islice(shards[name], record["shards"][name])]
        documents, size = sum(shard.documents for shard in mine), sum(shard.bytes for shard in mine)
        tokens = sum(shard.tokens for shard in mine) - framing * documents
        found.append(
            {
                "source": source.name or source.path,
                "documents": documents,
                "bytes": size,
                "tokens": tokens,
                "bytes_per_token": size / tokens if tokens else None,
            }
        )
    return found


def _round_trip(data: PreparedData) -> dict[str, Any]:
    """Of the first documents of the validation split, how many decode to the very text, and the first that does not."""
    exact = documents = 0
    first: dict[str, str] | None = None
    for text, back in islice(_decoded(data), _CHECKED):
        documents += 1
        exact += text == back
        if text != back and first is None:
            at = next((at for at, (one, other) in enumerate(zip(text, back, strict=False)) if one != other), len(back))
            first = {"text": text[max(0, at - 20) : at + 20], "decoded": back[max(0, at - 20) : at + 20]}
    return {"documents": documents, "exact": exact, "first_difference": first}


def _decoded(data: PreparedData) -> Iterator[tuple[str, str]]:
    for text in data.documents("validation"):
        yield text, data.tokenizer.decode(data.tokenizer.encode([text])[0])
