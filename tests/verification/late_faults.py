"""Errors in the order of communication and computation, planted in the processes of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from meshwright.comm import collectives
from meshwright.comm.handle import Handle
from meshwright.parallel import context, pipeline, zero
from meshwright.verification.problem import Problem
from meshwright.verification.ranks import RankResult, run_rank


@contextmanager
def no_wait(site: str) -> Iterator[None]:
    """The results of the calls at a site are used without a wait."""
    wait = Handle.wait

    def skipping(handle: Handle) -> None:
        call = handle._describe
        message = call.args[0] if isinstance(call, partial) else call  # of a point-to-point transfer
        if getattr(message, "site", None) != site:
            wait(handle)

    with mock.patch.object(Handle, "wait", skipping):
        yield


@contextmanager
def changed_after_send(where: Any, name: str, change: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """The buffer that an asynchronous collective of a module reads is changed right after the call is posted."""
    post = getattr(where, name)

    def posting(output: torch.Tensor, source: torch.Tensor, *rest: Any, **options: Any) -> Any:
        handle = post(output, source, *rest, **options)
        if options.get("async_op"):
            change(source)
        return handle

    with mock.patch.object(where, name, posting):
        yield


@contextmanager
def changed_messages() -> Iterator[None]:
    """A pipeline stage overwrites the activations that it is sending."""
    transfer = pipeline.transfer

    def sending(messages: Any, axis: Any) -> list[Handle]:
        handles = transfer(messages, axis)
        for message in messages:
            if not message.is_receive:
                message.tensor.add_(1)
        return handles

    with mock.patch.object(pipeline, "transfer", sending):
        yield


@contextmanager
def one_ring_buffer() -> Iterator[None]:
    """Ring attention receives each KV block into the buffer that it sends from."""
    rotate = collectives.rotate
    kept: list[torch.Tensor] = []

    def blocks(k: torch.Tensor, v: torch.Tensor, axis: Any, site: str) -> Iterator[tuple[int, torch.Tensor]]:
        here = torch.stack([k, v])
        kept.append(here)
        for distance in range(axis.size):
            handle = Handle()
            if distance < axis.size - 1:
                handle = rotate(here, here, axis, site, async_op=True)
            yield (axis.rank - distance) % axis.size, here
            handle.wait()

    with mock.patch.object(context, "_pass_kv", blocks):
        yield


FAULTS: dict[str, tuple[str, str, Callable[[], AbstractContextManager[None]]]] = {
    "reduced gradients not waited for": ("dp2 mb2", "data.gradients", partial(no_wait, "data.gradients")),
    "reduced gradient shards not waited for": ("dp2 zero2 mb2", "data.gradients", partial(no_wait, "data.gradients")),
    "gathered parameters not waited for": ("dp2 zero3", "data.parameters", partial(no_wait, "data.parameters")),
    "sums over replicas not waited for": (
        "dp4 zero3 hs2", "data.gradients.replicas", partial(no_wait, "data.gradients.replicas")
    ),
    "partial gradients not waited for": ("tp2", "tensor.gradients", partial(no_wait, "tensor.gradients")),
    "KV block not waited for": ("cp2", "attention.ring", partial(no_wait, "attention.ring")),
    "gradients of a KV block not waited for": (
        "cp2", "attention.ring.gradients", partial(no_wait, "attention.ring.gradients")
    ),
    "activations not waited for": ("pp2 mb4", "pipeline.activations", partial(no_wait, "pipeline.activations")),
    "gradients of activations not waited for": (
        "pp2:zb-h1 mb4", "pipeline.gradients", partial(no_wait, "pipeline.gradients")
    ),
    "activations changed while they are sent": ("pp2 mb4", "pipeline.", changed_messages),
    "gradients zeroed while they are reduced": (
        "dp2 zero2 mb2", "data.gradients", partial(changed_after_send, zero, "reduce_scatter", torch.Tensor.zero_)
    ),
    "parameters changed while they are gathered": (
        "dp2 zero3", "data.parameters", partial(changed_after_send, zero, "all_gather", lambda x: x.add_(1))
    ),
    "KV blocks sent and received in one buffer": ("cp2", "attention.ring", one_ring_buffer),
}  # fmt: skip
"""Error: (layout in which it is planted, start of the site that the report names, what plants it)."""


def run_with_fault(problem: Problem, layout: str, fault: str | None) -> list[RankResult]:
    """Train on this rank as `run_rank` does, with an error of the table."""
    if fault is None:
        return run_rank(problem, layout)
    with FAULTS[fault][2]():
        return run_rank(problem, layout)
