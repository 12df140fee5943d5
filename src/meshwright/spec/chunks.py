"""Chunk sizes of the chunked loss, which bound the logits in memory, and the decision to keep the head's
gradient between forward and backward."""

from __future__ import annotations

CHUNK_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 27}
SMALLEST_CHUNK = 512  # tokens; smaller chunks would spend too much time on accumulating the weight gradient


def loss_chunks(tokens: int, vocabulary: int, device: str) -> list[int]:
    """Return the number of tokens in each chunk of the chunked loss: nearly equal sizes whose sum is `tokens`.

    `vocabulary`: the largest number of logits per token on any tp rank, so that all tp ranks cut alike; `device`: "cpu"
    or "cuda".
    """
    limit = max(SMALLEST_CHUNK, CHUNK_LOGITS.get(device, 1 << 27) // vocabulary)
    at_once = max(1, -(-tokens // max(1, -(-tokens // limit))))
    return [min(at_once, tokens - start) for start in range(0, tokens, at_once)]


def keeps_head_gradient(tokens: int, vocabulary: int, layers: int, recompute: str, at_once: bool) -> bool:
    """Return True if the last stage computes its head's gradient in the forward pass and keeps it, [V, H] per
    micro-batch in flight, so that backward need not recompute the logits: if the backward pass follows at once
    (`at_once`), or if the gradient takes less than half of the stage's saved activations (16 tensors [T, H] a layer or
    more).

    `tokens`: T, of a micro-batch on this rank; `vocabulary`: V, the logits per token on this rank; `layers`: number of
    layers in the stage; `recompute`: the layout's activation checkpointing ("none", "selective" or "full").
    """
    return at_once or (recompute != "full" and vocabulary <= 8 * tokens * layers)
