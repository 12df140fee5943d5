"""Temporary tensors of both ends of a model: the loss in forward and backward, and the backward of look-up tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.memory.tensors import Saved, Temporary
from meshwright.spec.chunks import loss_chunks
from meshwright.spec.policy import SLICE_LOGITS


def loss_snapshots(
    at: MicroBatch, saved: Sequence[Saved], compiled: bool, again: bool
) -> list[tuple[str, list[Temporary]]]:
    """Return (snapshot name, tensors) of the loss: at the logits of its last chunk, and when the head's weight
    gradient is added.

    saved: saved activations of the stage; compiled: the loss is compiled; again: in the backward, since the
    forward saved no gradient.
    """
    config, x = at.config, at.itemsize
    states = (
        [Temporary("activations", "output of the last layer", at.rows * at.slice * config.hidden * x)]
        if config.encoder
        else []
    )
    if config.head not in ("next", "masked"):
        return [("", states)]
    width = min(at.vocabulary, config.vocabulary)
    chunks = loss_chunks(at.predictions, width, at.device)
    longest, hidden = max(chunks, default=0), at.predictions * config.hidden * x
    weight, several = width * config.hidden, len(chunks) > 1
    both = [*states, Temporary("logits", "chunk", longest * width * x)]
    if not again:
        both += [Temporary("activations", each.name, each.bytes) for each in saved if _of_norm_or_known(each)]
        both.append(Temporary("activations", "head.input", hidden))
    frozen = config.adapter is not None
    forms = (again and not frozen) or any(each.name == "head.weight.gradient" for each in saved)
    if forms or again or (frozen and any(each.name == "head.hidden.gradient" for each in saved)):
        both.append(Temporary("activations", "head.hidden.gradient", hidden))
    summed = Temporary("activations", "head.weight.gradient", weight * (at.wide if several else x))
    at_once = longest if at.device != "cpu" else min(longest, max(1, SLICE_LOGITS // width))
    wide = Temporary("workspace", "upcast logits", 2 * at_once * width * at.wide)
    fused = [] if compiled else [wide]
    so_far = summed._replace(bytes=weight * (at.wide if len(chunks) > 2 else x))  # of all but the last chunk
    found = [(".statistics", [*both, *fused, *([so_far] if forms and several else [])])]
    if forms:
        parts = (x if several else 0) + (x if several and x < at.wide else 0)
        found.append((".gradient", [*both, summed, Temporary("workspace", "gradient of a chunk", weight * parts)]))
    return found


def _of_norm_or_known(saved: Saved) -> bool:
    """Return True if an activation is saved by the final norm or transform, or is called "head.known"."""
    return saved.name.startswith(("final_norm.", "transform")) or saved.name == "head.known"


def loss_backward(at: MicroBatch, saved: Sequence[Saved]) -> Iterator[Temporary]:
    """Yield the gradients of the head's input and weight, and their copies, that the loss's backward allocates."""
    config, x = at.config, at.itemsize
    hidden = at.predictions * config.hidden
    both = x if x == at.wide else x + at.wide
    yield Temporary("activations", "gradient of the head's input", hidden * both)
    if config.adapter is not None:  # the head is frozen
        if not any(each.name == "head.hidden.gradient" for each in saved):
            yield Temporary("activations", "gradient of the head's input, unscaled", hidden * x)
        return
    width = at.vocabulary
    weight = next((each for each in saved if each.name == "head.weight.gradient"), None)
    yield Temporary("gradients", "head weight gradient", width * config.hidden * x)
    if weight is not None and weight.dtype != at.dtype and at.device == "cpu":  # elsewhere number by number
        yield Temporary("workspace", "upcast head weight gradient", weight.bytes)
    if weight is None:  # computed now
        yield Temporary("gradients", "head weight gradient, unscaled", width * config.hidden * x)
        yield Temporary("activations", "gradient of the head's input, unscaled", hidden * x)


def table_backward(at: MicroBatch, unit: str) -> Iterator[Temporary]:
    """Yield the temporaries of the backward of a lookup table, unit "embedding" or so, which sums in float32."""
    config, x = at.config, at.itemsize
    tables = {"positions": config.max_positions, "token_types": config.token_types}
    rows: int = tables.get(unit) or at.vocabulary
    yield Temporary("activations", "gradient of the rows", at.all_tokens * config.hidden * x)
    if x < at.wide:
        yield Temporary("workspace", "upcast gradient of the rows", at.all_tokens * config.hidden * at.wide)
        yield Temporary("gradients", f"{unit} gradient", rows * config.hidden * x)
    yield Temporary("gradients", f"{unit} upcast gradient", rows * config.hidden * at.wide)
