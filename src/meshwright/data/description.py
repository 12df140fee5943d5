"""Description of training samples as text, with document boundaries and masked targets (`meshwright data show`)."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.packing.packed import NO_TARGET
from meshwright.data.packing.packed_examples import PackedExamples
from meshwright.data.packing.token_flags import AUTHORS, TRAINED_BIT, UNDESIRABLE_BIT, extract_role_index, iterate_runs
from meshwright.data.prepared import PreparedData

_LOOK_AHEAD = 2_000  # samples searched for one with a document boundary


def describe_samples(data: PreparedData, count: int) -> list[dict[str, Any]]:
    """Describe the first `count` samples (packed rows) of the training order; return one JSON object for each. If none
    of these samples contains a document boundary, the last sample is replaced by the next sample with a boundary. data:
    prepared data of a recipe.

    Keys: `sample`: index in the training split. `documents`: [{start, stop, text}], token range [start, stop) and
    decoded text, special tokens by name. `masked_targets`: positions whose next token is not a target of the loss.
    `target_tokens`: number of positions whose next token is a target.

    For records (chat, instruction or preference data) also `padding`, the number of tokens after the last document, and
    in each document `parts`, [{text, trained, author, special}]: runs of tokens with equal properties. `trained`: the
    tokens are targets of the loss. `author`: role of their turn, "template" between turns. `special`: the tokens are
    special tokens. Documents of unpaired data have a `label`, "desirable" or "undesirable".
    """
    split = data.split("train")
    order = data.make_sample_order().sample(np.arange(min(split.sequences, max(count, _LOOK_AHEAD))))
    samples = order[:count]
    if count and not any(len(starts) > 1 for starts in split.read_batch(samples).list_document_starts()):
        samples[-1] = next(
            (sample for sample in order if len(split.read_batch([sample]).list_document_starts()[0]) > 1), samples[-1]
        )
    batch = split.read_batch(samples)
    rows = []
    for sample, tokens, targets, starts in zip(
        samples.tolist(), batch.tokens, batch.targets, batch.list_document_starts(), strict=True
    ):
        masked = np.flatnonzero(targets == NO_TARGET).tolist()
        row = {"sample": sample, "masked_targets": masked, "target_tokens": len(tokens) - len(masked)}
        if isinstance(split, PackedExamples):
            documents = [_describe_example(data, *document) for document in split.read_flagged_documents(sample)]
            ends = list(accumulate((document.pop("length") for document in documents), initial=0))
            row["padding"] = split.sequence + 1 - ends[-1]
        else:
            ends = [*starts.tolist(), len(tokens)]
            documents = [{"text": data.tokenizer.decode(tokens[start:stop])} for start, stop in pairwise(ends)]
        places = [{"start": start, "stop": stop} for start, stop in pairwise(ends)]
        row["documents"] = [place | document for place, document in zip(places, documents, strict=True)]
        rows.append(row)
    return rows


def count_tokens_by_role(data: PreparedData) -> dict[str, Any]:
    """Count turns, tokens and trained tokens by role (user, assistant ...) in all training examples of `data`; return
    JSON with the keys "spans", "turns", "tokens" and "trained_tokens" (see `token_flags.count_by_role`), an empty dict
    for plain text."""
    split = data.split("train")
    return split.count_by_role() if isinstance(split, PackedExamples) else {}


def _describe_example(data: PreparedData, tokens: NDArray[Any], flags: NDArray[np.uint8]) -> dict[str, Any]:
    """Return one document of a training example as a JSON object: `length` in tokens, `text`, `parts` (runs of tokens
    with equal flags) and, for unpaired data, `label` ("desirable" or "undesirable").

    data: prepared data, whose tokenizer decodes. tokens: token ids [length]. flags: uint8 [length], which mark loss
    targets and store the role of each token's turn (`token_flags`).
    """
    special = np.isin(tokens, data.tokenizer.special_ids)
    parts = [
        {
            "text": data.tokenizer.decode(tokens[begin:end]),
            "trained": bool(flags[begin] & TRAINED_BIT),
            "author": AUTHORS[extract_role_index(int(flags[begin]))],
            "special": bool(special[begin]),
        }
        for begin, end in iterate_runs((flags & ~np.uint8(UNDESIRABLE_BIT)) << 1 | special.view(np.uint8))
    ]
    label = {}
    if data.recipe.records == "unpaired":
        label = {"label": "undesirable" if (flags & UNDESIRABLE_BIT).any() else "desirable"}
    return {"length": len(tokens), "text": data.tokenizer.decode(tokens), "parts": parts, **label}
