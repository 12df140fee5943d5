"""Report on a tokenizer over a corpus: bytes per token by source, token frequencies, round trip."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import decoders

from meshwright.data.cleaning.corpus import SPLITS
from meshwright.data.packing.packed import PackedTokens
from meshwright.data.prepared import PreparedData
from meshwright.data.tokenizers.kinds import BYTES, list_byte_characters
from meshwright.data.tokenizers.special_tokens import find_unknown_token
from meshwright.data.tokenizers.tokenizer import TextTokenizer
from meshwright.recipe import DataRecipe

_CHECKED = 200  # validation documents that are decoded and compared
_SHOWN = 20
_BYTE_OF = {character: byte for byte, character in enumerate(list_byte_characters())}
_AT_LEAST = (1, 10, 100, 1000, 10_000)


def measure_tokenizer(recipe: DataRecipe, data: PreparedData) -> dict[str, Any]:
    """Measure the tokenizer of prepared data on their text; return JSON. Start and end tokens of documents are not
    counted, tokens of a chat template are. recipe: the `[data]` table from which `data` was prepared.

    `sources`: documents, bytes, tokens and bytes_per_token of each data source, over both splits. `used`: number of
    tokens of the vocabulary that occur in the text. `unused`: number of tokens, without special tokens, that do not
    occur; `unused_tokens`: {id, text} of the first unused tokens. `occur_at_least`: {n: number of tokens that occur n
    times or more}. `most_frequent`, `longest` (most bytes, among tokens that occur): lists of {id, text, count}.
    `unknown`: id, text and count of the token for unknown text, or None. `round_trip`: how many of the first validation
    documents are the same after encoding and decoding.
    """
    tokenizer = data.tokenizer
    sources = _count_sources(data)
    counts = _count_tokens(data)
    names = list_readable_tokens(tokenizer)
    tokens, size = int(counts.sum()), sum(source["bytes"] for source in sources)
    order = np.argsort(-counts, kind="stable")
    occur = order[counts[order] > 0]
    special = {tokenizer.tokenizer.token_to_id(token) for token in tokenizer.special}
    unused = [number for number in np.flatnonzero(counts == 0).tolist() if number not in special and number in names]
    lengths = {number: 1 if names[number] in BYTES else len(names[number].encode()) for number in occur.tolist()}
    longest = sorted(lengths, key=lambda number: (-lengths[number], number))
    name = find_unknown_token(tokenizer.tokenizer)
    unknown = tokenizer.tokenizer.token_to_id(name) if name else None

    def describe_token(number: int) -> dict[str, Any]:
        """Return {id, text: readable text, count} of the token with the id `number`."""
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
        "most_frequent": [describe_token(number) for number in occur[:_SHOWN].tolist()],
        "longest": [describe_token(number) for number in longest[:_SHOWN]],
        "unknown": None if unknown is None or unknown == tokenizer.end else describe_token(unknown),
        "round_trip": _check_round_trip(data),
        "directory": str(data.tokenizer_directory),
    }


def describe_tokens(tokenizer: TextTokenizer, text: str) -> dict[str, Any]:
    """Tokenize `text` with `tokenizer`; returns a JSON object: `text`, `tokens` [{id, text}], the `decoded` text, and
    `exact`, True if the decoded text equals `text`.
    """
    names = list_readable_tokens(tokenizer)
    (numbers,) = tokenizer.encode([text])
    decoded = tokenizer.decode(numbers)
    return {
        "text": text,
        "tokens": [{"id": number, "text": names[number]} for number in numbers.tolist()],
        "decoded": decoded,
        "exact": decoded == text,
    }


def list_readable_tokens(tokenizer: TextTokenizer) -> dict[int, str]:
    """Return {token id: readable text} for all tokens of `tokenizer`; bytes that are no complete character are written
    as `<0xE4>`."""
    vocabulary = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    if not isinstance(tokenizer.tokenizer.decoder, decoders.ByteLevel):
        return {number: token for token, number in vocabulary.items()}
    added = tokenizer.tokenizer.get_added_tokens_decoder()
    return {number: token if number in added else _decode_byte_token(token) for token, number in vocabulary.items()}


def _decode_byte_token(token: str) -> str:
    """Decode a token of a byte-level tokenizer to readable text; bytes that are no complete character are written as
    `<0xE4>`.
    """
    if any(character not in _BYTE_OF for character in token):
        return token
    text = bytes(_BYTE_OF[character] for character in token).decode("utf-8", "surrogateescape")
    return "".join(BYTES[ord(one) - 0xDC00] if "\udc80" <= one <= "\udcff" else one for one in text)


def _count_tokens(data: PreparedData) -> NDArray[np.int64]:
    """Count the occurrences of each token id in both splits of `data`, without the start and end tokens of texts, int64
    [vocabulary].
    """
    counts = np.zeros(data.vocabulary, dtype=np.int64)
    for name in SPLITS:
        split = data.split(name)
        for part in split.iterate_tokens():
            counts += np.bincount(part, minlength=data.vocabulary)
        if isinstance(split, PackedTokens):
            counts[data.tokenizer.start] -= split.documents
            counts[data.tokenizer.end] -= split.documents
    return counts


def _count_sources(data: PreparedData) -> list[dict[str, Any]]:
    """Return [{source, documents, bytes, tokens, bytes_per_token}], one entry per data source, over both splits. Start
    and end tokens of texts are not counted.
    """
    found = []
    shards = [data.group_shards(name) for name in SPLITS]
    framing = 2 if isinstance(data.split("train"), PackedTokens) else 0
    for source, *by_split in zip(data.sources, *shards, strict=True):
        mine = list(chain.from_iterable(by_split))
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


def _check_round_trip(data: PreparedData) -> dict[str, Any]:
    """Encode and decode the first validation documents of `data`. Returns {"documents": number checked, at most 200;
    "exact": number that come back unchanged; "first_difference": {"text", "decoded"}, each with the 20 characters
    before and after the first difference, or None}."""
    exact = documents = 0
    first: dict[str, str] | None = None
    for text in islice(data.iterate_documents("validation"), _CHECKED):
        back = data.tokenizer.decode(data.tokenizer.encode([text])[0])
        documents += 1
        exact += text == back
        if text != back and first is None:
            at = next((at for at, (one, other) in enumerate(zip(text, back, strict=False)) if one != other), len(back))
            first = {"text": text[max(0, at - 20) : at + 20], "decoded": back[max(0, at - 20) : at + 20]}
    return {"documents": documents, "exact": exact, "first_difference": first}
