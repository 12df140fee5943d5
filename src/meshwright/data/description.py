"""Description of training samples as text, with document boundaries and masked targets (`meshwright data show`)."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.packing.packed import NO_TARGET
from meshwright.data.packing.packed_examples import PackedExamples
from meshwright.data.packing.token_marks import AUTHORS, TRAINED_BIT, UNDESIRABLE_BIT, author_of, iterate_runs
from meshwright.data.prepared import PreparedData

_LOOK_AHEAD = 2_000  # samples searched for one with a document boundary


def describe_samples(data: PreparedData, count: int) -> list[dict[str, Any]]:
    """Return the first `count` samples of the training order as JSON objects. If none of them contains a document
    boundary, the last one is replaced by the next sample that contains one. data: prepared data of a recipe.

    Keys of an object: `sample`: its index in the training split. `documents`: [{start, stop, text}], token range
    [start, stop) and decoded text, special tokens by name. `masked_targets`: positions whose next token is not a target
    of the loss. `target_tokens`: number of the other positions. For data packed from records (chat, instruction or
    preference data) also `padding`, the number of tokens after the last document, and in each document `parts`: [{text,
    trained, author, special}], the document cut wherever one of these changes: whether tokens are trained on; the role
    of their turn ("template" between turns); whether they are special tokens. Documents of unpaired data have a
    `label`, "desirable" or "undesirable". A sample of records is a row of S + 1 tokens.
    """
    split = data.split("train")
    order = data.make_sample_order().sample(np.arange(min(split.sequences, max(count, _LOOK_AHEAD))))
    samples = order[:count]
    if count and not any(len(starts) > 1 for starts in split.read_batch(samples).document_starts()):
        samples[-1] = next(
            (sample for sample in order if len(split.read_batch([sample]).document_starts()[0]) > 1), samples[-1]
        )
    batch = split.read_batch(samples)
    rows = []
    for sample, tokens, targets, starts in zip(
        samples.tolist(), batch.tokens, batch.targets, batch.document_starts(), strict=True
    ):
        masked = np.flatnonzero(targets == NO_TARGET).tolist()
        row = {"sample": sample, "masked_targets": masked, "target_tokens": len(tokens) - len(masked)}
        if isinstance(split, PackedExamples):
            documents = [_describe_example(data, *document) for document in split.read_marked_documents(sample)]
            ends = list(accumulate((document.pop("length") for document in documents), initial=0))
            row["padding"] = split.sequence + 1 - ends[-1]
        else:
            ends = [*starts.tolist(), len(tokens)]
            documents = [{"text": data.tokenizer.decode(tokens[start:stop])} for start, stop in pairwise(ends)]
        places = [{"start": start, "stop": stop} for start, stop in pairwise(ends)]
        row["documents"] = [place | document for place, document in zip(places, documents, strict=True)]
        rows.append(row)
    return rows


def describe_marks(data: PreparedData) -> dict[str, Any]:
    """Return turns, tokens and trained tokens by role of all training examples (see `token_marks.count_marks`); an
    empty dict for plain text.
    """
    split = data.split("train")
    return split.count_marks() if isinstance(split, PackedExamples) else {}


def _describe_example(data: PreparedData, tokens: NDArray[Any], marks: NDArray[np.uint8]) -> dict[str, Any]:
    """Return an example as a JSON object: `length` in tokens, `text`, `parts`, and `label` if it has one, as in
    `describe_samples`. data: prepared data, whose tokenizer decodes. tokens, marks: token ids and their marks (see
    `token_marks`), [length] both.
    """
    special = np.isin(tokens, data.tokenizer.special_ids)
    parts = [
        {
            "text": data.tokenizer.decode(tokens[begin:end]),
            "trained": bool(marks[begin] & TRAINED_BIT),
            "author": AUTHORS[author_of(int(marks[begin]))],
            "special": bool(special[begin]),
        }
        for begin, end in iterate_runs((marks & ~np.uint8(UNDESIRABLE_BIT)) << 1 | special.view(np.uint8))
    ]
    label = {}
    if data.recipe.records == "unpaired":
        label = {"label": "undesirable" if (marks & UNDESIRABLE_BIT).any() else "desirable"}
    return {"length": len(tokens), "text": data.tokenizer.decode(tokens), "parts": parts, **label}
