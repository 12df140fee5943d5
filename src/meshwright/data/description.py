"""What a batch looks like: rows of the training order as text, with document boundaries and masked targets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.packing.packed import NO_TARGET
from meshwright.data.packing.packed_examples import PackedExamples
from meshwright.data.prepared import PreparedData

_LOOK_AHEAD = 2_000  # rows among which one with a document boundary is looked for


def describe_rows(data: PreparedData, count: int) -> list[dict[str, Any]]:
    """`count` rows that training reads, as JSON: the first ones, the last of them one in which a document begins.

    Each: `sample`, its number in the training split; `documents`: `{start, stop, text}`, the range of its tokens and
    what they spell, special tokens by name; `masked_targets`: the places whose next token is not predicted;
    `target_tokens`: how many are. Of records also `padding`, the tokens behind the last document, and of each document
    `parts`: `{text, trained}`, stretches that are targets or not.
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
        row: dict[str, Any] = {
            "sample": int(sample),
            "documents": [
                {"start": start, "stop": stop, "text": data.tokenizer.decode(tokens[start:stop])}
                for start, stop in pairwise([*starts.tolist(), len(tokens)])
            ],
            "masked_targets": masked,
            "target_tokens": len(tokens) - len(masked),
        }
        if isinstance(split, PackedExamples):
            _mark_trained(row, data, tokens, targets)
        rows.append(row)
    return rows


def _mark_trained(row: dict[str, Any], data: PreparedData, tokens: NDArray[Any], targets: NDArray[Any]) -> None:
    """Add to a row of records what in each document is trained on, and set its padding apart."""
    trained = np.append(False, targets[:-1] != NO_TARGET)  # whether a token is the target of the one before it
    row["padding"] = 0
    last = row["documents"][-1]
    if targets[-1] == NO_TARGET and not trained[last["start"] : last["stop"]].any():  # every example has a target
        row["padding"] = last["stop"] - last["start"]
        row["documents"].pop()
    for document in row["documents"]:
        start, stop = document["start"], document["stop"]
        turns = np.flatnonzero(np.diff(trained[start:stop])) + 1 + start
        document["parts"] = [
            {"text": data.tokenizer.decode(tokens[begin:end]), "trained": bool(trained[begin])}
            for begin, end in pairwise([start, *turns.tolist(), stop])
        ]
