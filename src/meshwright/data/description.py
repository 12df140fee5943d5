"""Description of training samples as text, with document boundaries and masked targets (`meshwright data show`)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.packing.packed import NO_TARGET
from meshwright.data.packing.packed_examples import PackedExamples
from meshwright.data.prepared import PreparedData

_LOOK_AHEAD = 2_000  # samples searched for one with a document boundary


def describe_samples(data: PreparedData, count: int) -> list[dict[str, Any]]:
    """Return the first `count` samples of the training order as JSON objects. If none of them contains a document
    boundary, the last one is replaced by the next sample that contains one. data: prepared data of a recipe.

    Keys of an object: `sample`: its index in the training split. `documents`: [{start, stop, text}], token range
    [start, stop) and decoded text, special tokens by name. `masked_targets`: positions whose next token is not a target
    of the loss. `target_tokens`: number of the other positions. For data packed from records (chat, instruction or
    preference data) also `padding`, the number of tokens after the last document, and in each document `parts`: [{text,
    trained}], its runs of tokens that are, or are not, targets.
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
        samples, batch.tokens, batch.targets, batch.document_starts(), strict=True
    ):
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
            _mark_trained_tokens(row, data, tokens, targets)
        rows.append(row)
    return rows


def _mark_trained_tokens(row: dict[str, Any], data: PreparedData, tokens: NDArray[Any], targets: NDArray[Any]) -> None:
    """Add to each document of a described sample its `parts`: runs of tokens that are, or are not, targets of the loss.
    Also move padding from `documents` to the key `padding` (number of tokens).

    row: JSON object of the sample, as in `describe_samples`; changed in place. data: prepared data, whose tokenizer
    decodes. tokens, targets: token ids and target ids (-100: ignored by the loss) of the sample, [S] each.
    """
    trained = np.append(False, targets[:-1] != NO_TARGET)  # [S]: token i is the target of position i - 1
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
