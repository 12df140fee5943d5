"""Into which chunks of tokens the loss is cut: how many logits exist at once, and how often ranks of tp meet in it; and
what of them waits for the backward pass."""

from __future__ import annotations

CHUNK_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 27}
SMALLEST_CHUNK = 512  # tokens; below that, adding up the weight's gradient costs more than the memory is worth


def loss_chunks(tokens: int, vocabulary: int, device: str) -> list[int]:
    """The tokens of each chunk: about equally many. `vocabulary`: the most logits of a token that any rank has, so that
    all ranks of tp cut alike; `device`: "cpu" or "cuda"."""
    limit = max(SMALLEST_CHUNK, CHUNK_LOGITS.get(device, 1 << 27) // vocabulary)
    at_once = max(1, -(-tokens // max(1, -(-tokens // limit))))
    return [min(at_once, tokens - start) for start in range(0, tokens, at_once)]


def keeps_head_gradient(tokens: int, vocabulary: int, layers: int, recompute: str, at_once: bool) -> bool:
    """Whether the last stage forms the gradient of its head in the forward pass and keeps it, [V, H] for each
    micro-batch on its way, so that its logits are not made a second time: where the backward pass follows at once, or
    where that is less than half of what its layers keep of the micro-batch (16 tensors [T, H] a layer or more).

    `tokens`: T, of a micro-batch on this rank; `vocabulary`: as for `loss_chunks`; `layers`: of the stage.
    """
    return at_once or (recompute != "full" and vocabulary <= 8 * tokens * layers)
