"""Chunk sizes and related choices on which model and planner must agree: chunks of the chunked loss, which bound the
logits in memory; whether the head's gradient is kept between forward and backward; the padded number of packed
documents."""

from __future__ import annotations

CHUNK_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 27}
MIN_CHUNK_TOKENS = 512  # tokens; smaller chunks would spend too much time on accumulating the weight gradient


def split_loss_chunks(tokens: int, vocabulary: int, device: str) -> list[int]:
    """Split `tokens` tokens into chunks of nearly equal size for the chunked loss, which computes the logits of one
    chunk at a time; return the number of tokens of each chunk.

    `vocabulary`: number of logits per token on a tp rank. If tp ranks have different numbers, the largest is given, so
    that all ranks get equal chunks. `device`: "cpu" or "cuda"; chunks are larger on "cuda"."""
    limit = max(MIN_CHUNK_TOKENS, CHUNK_LOGITS.get(device, 1 << 27) // vocabulary)
    at_once = max(1, -(-tokens // max(1, -(-tokens // limit))))
    return [min(at_once, tokens - start) for start in range(0, tokens, at_once)]


def keeps_head_gradient(tokens: int, vocabulary: int, layers: int, recompute: str, at_once: bool) -> bool:
    """Return True if the last pipeline stage computes the head's weight gradient in forward and keeps it until
    backward, so that backward need not recompute the logits. The stage keeps the gradient

    - if backward follows immediately (`at_once`), or
    - if `recompute` is not "full" and the gradient, [V, H] per micro-batch in flight, is small: at most half of the
    stage's saved activations, estimated as 16 tensors [T, H] per layer.

    `tokens`: T, tokens of a micro-batch on this rank; `vocabulary`: V, logits per token on this rank; `layers`: layers
    of the stage; `recompute`: activation checkpointing ("none", "selective" or "full").
    """
    return at_once or (recompute != "full" and vocabulary <= 8 * tokens * layers)


MIN_DOCUMENTS = 16


def pad_document_count(documents: int) -> int:
    """Return the number to which the number of documents in a micro-batch is padded for variable-length attention: the
    next power of two, at least `MIN_DOCUMENTS`. (Compiled graphs have static shapes, so few distinct numbers mean few
    compilations.) documents: number of packed documents."""
    return max(MIN_DOCUMENTS, 1 << (documents - 1).bit_length())
