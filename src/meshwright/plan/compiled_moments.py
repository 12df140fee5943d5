"""What compiled blocks hold for a moment, in a forward and in a backward, beside what is kept of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from meshwright.plan.compiled_blocks import GRADIENT, INPUT, INPUT_GRADIENT, RESULT
from meshwright.plan.compiled_encoder import block_of
from meshwright.plan.kernels import Held, highest
from meshwright.plan.saved_blocks import Local
from meshwright.plan.temporaries import Extra

COLLECTED = ".weight gradients"
"""When the compiled backward is over: it gives all weight gradients of the block at once."""


def forward_extras(at: Local, layer: int, x: int) -> Iterator[Extra]:
    """Of the forward when it holds the most; what it keeps is among it."""
    held = forward_held(at, at.config.layer_window(layer), x)
    yield from extras_of(held, f"layers.{layer}")


def backward_extras(
    at: Local, layer: int, x: int, arrived: frozenset[str] = frozenset()
) -> Iterator[tuple[str, list[Extra]]]:
    """The moments of the backward by name, beside what the forward kept. arrived: of its input and the gradient of its
    output, what came from another stage: the pipeline holds it until the stage's backward is over."""
    unit = f"layers.{layer}"
    held = _backward(at, at.config.layer_window(layer), x, arrived)
    for name, each in held:
        yield name, list(extras_of(each, unit))


def passing_bytes(at: Local, layer: int, x: int) -> int:
    """What a layer holds at most beside what is kept of it, its weight gradients left out: rows do not change them."""
    window = at.config.layer_window(layer)
    found = []
    for held in (forward_held(at, window, x), *(each for _, each in _backward(at, window, x))):
        found.append(held.bytes - sum(each.bytes for each in held.buffers.values() if each.category == "gradients"))
    return max(found)


def extras_of(held: Held, unit: str) -> Iterator[Extra]:
    for name, each in held.buffers.items():
        yield Extra(each.category, f"{unit}.{name}", each.bytes)
    yield from held.inside
    if held.gone:
        yield Extra("activations", f"{unit}: used already", -held.gone)


@lru_cache(maxsize=64)
def forward_held(at: Local, window: int | None, x: int) -> Held:
    block = block_of(at, window, x)
    return highest(list(block.forward()), {}, {*block.kept(), RESULT})


@lru_cache(maxsize=64)
def _backward(at: Local, window: int | None, x: int, arrived: frozenset[str] = frozenset()) -> list[tuple[str, Held]]:
    """The highest moment and the last one; where the forward runs again, its highest too."""
    block = block_of(at, window, x)
    found = []
    kernels = list(block.backward())
    kept = {name: block.bytes(name) for name in block.kept()}
    given = {INPUT: block.bytes(INPUT), GRADIENT: block.bytes(GRADIENT)}
    weights = {made.name for kernel in kernels for made in kernel.makes if made.category == "gradients"}
    gradient = Extra("activations", GRADIENT, given[GRADIENT])
    for name in arrived:
        del given[name]
    if block.again == "full":
        again = forward_held(at, window, x)
        found.append((".forward again", Held(again.name, again.buffers, 0, (*again.inside, gradient))))
        made_again = tuple(Extra("activations", name, size) for name, size in kept.items())
    else:
        made_again = ()
    held = highest(kernels, given | kept, {*weights, INPUT_GRADIENT})
    name = f".{held.name}"
    found.append((name, Held(held.name, held.buffers, held.gone, (*held.inside, gradient, *made_again))))
    last = {made.name: made for kernel in kernels for made in kernel.makes if made.name in {*weights, INPUT_GRADIENT}}
    gone = 0 if block.again == "full" else sum(kept.values())
    stays = (gradient,) if GRADIENT in arrived else ()
    found.append((COLLECTED, Held(COLLECTED, last, gone + given.get(INPUT, 0), stays)))
    return found
