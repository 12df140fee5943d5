"""What a batch looks like: rows of the training order as text, with document boundaries and masked targets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.data.packed import NO_TARGET
from meshwright.data.prepared import PreparedData

_LOOK_AHEAD = 2_000  # rows among which one with a document boundary is looked for


def describe_rows(data: PreparedData, count: int) -> list[dict[str, Any]]:
    """`count` rows that training reads, as JSON: the first ones, the last of them one in which a document begins.

    Each: `sample`, its number in the training split; `documents`: `{start, stop, text}`, the range of its tokens and
    what they spell, special tokens by name; `masked_targets`: the places whose next token is not predicted;
    `target_tokens`: how many are.
    """
    split = data.split("train")
    order = data.order().sample(np.arange(min(split.sequences, max(count, _LOOK_AHEAD))))
    samples = order[:count]
    if count and not any(len(starts) > 1 for starts in split.batch(samples).starts()):
        samples[-1] = next((sample for sample in order if len(split.batch([sample]).starts()[0]) > 1), samples[-1])
    batch = split.batch(samples)
    rows = []
    for sample, tokens, targets, starts in zip(samples, batch.tokens, batch.targets, batch.starts(), strict=True):
        masked = np.flatnonzero(targets == NO_TARGET).tolist()
        rows.append(
            {
                "sample": int(sample),
                "documents": [
                    {"start": start, "stop": stop, "text": data.tokenizer.decode(tokens[start:stop])}
                    for start, stop in pairwise([*starts.tolist(), len(tokens)])
                ],
                "masked_targets": masked,
                "target_tokens": len(tokens) - len(masked),
            }
        )
    return rows
