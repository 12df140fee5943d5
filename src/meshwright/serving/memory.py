"""Memory plan of a server: number of KV blocks that fit into `--memory`, by the predicted memory ledger. Free of
torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from meshwright.collectives.quantities import GIB, parse_bytes
from meshwright.errors import UserError
from meshwright.launcher.host_memory import GPU, HostMemory
from meshwright.layout import Layout
from meshwright.limits import get_limit
from meshwright.planner.serving.ledger import KERNEL_DTYPES, ServingLedger, ServingSizes, fill_memory
from meshwright.planner.serving.runners import serving_ledger
from meshwright.spec.config import ModelConfig

DEFAULT_FRACTION = 0.9
DEFAULT_POOL = 4 * 2**30
"""Maximum number of bytes of KV blocks without `--memory`, so that by default a server does not fill a machine."""


def parse_memory(text: str, host: HostMemory) -> int:
    """Convert the value of `--memory` to bytes: a fraction ("0.9") of the memory of the machine or its cgroup (`host`),
    or a size ("12GiB").

    A fraction of more than the available memory gives the available memory, and a number of 2^20 or more without a unit
    is bytes. Raises UserError for any other text, and for a size above the available memory.
    """
    text = text.strip()
    if re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", text) and (fraction := float(text)) < 2**20:
        if not 0 < fraction <= 1:
            raise UserError(f"--memory {text}: a fraction is above 0 and at most 1, a size has a unit, such as 12GiB")
        return min(int(fraction * host.total), host.available)
    size = parse_bytes(text, "--memory (a fraction such as 0.9, or a size)")
    if size > host.available:
        available, total = (f"{each / GIB:.2f} GiB" for each in (host.available, host.total))
        raise UserError(f"--memory {text}: {available} are available now, of the {host.source}'s {total}")
    return size


def plan_memory(
    config: ModelConfig, layout: Layout, sizes: ServingSizes, memory: str | None = None, max_length: int | None = None,
    *, compiled: bool = True, hosts: Sequence[HostMemory] | None = None,
) -> ServingLedger:  # fmt: skip
    """Return the predicted memory of a server by item (a ledger), with as many KV blocks as fit.

    Args:
        config: Configuration of the model.
        layout: Layout for serving, checked by `spec.refuse.serving_layout`.
        sizes: Sizes of a step, dtype of parameters and KV cache, and threads; `max_length` and `blocks` are found here.
        memory: Value of `--memory`; None: 0.9, with at most `DEFAULT_POOL` bytes of KV blocks.
        max_length: Maximum number of tokens of a sequence; None: the model's positions, or fewer if they do not fit.
        compiled: True if compiled CPU kernels compute the steps (where they support the dtype), False if plain torch
            computes them; no effect on GPUs.
        hosts: Memory of each machine, or of each rank's GPU; None: this machine.

    Raises:
        UserError: One request of `max_length` tokens does not fit, or a number is out of range.
    """
    hosts = hosts or [HostMemory.read()]
    budgets = [parse_memory(str(DEFAULT_FRACTION) if memory is None else memory, host) for host in hosts]
    budget = sum(budgets)
    for option, number in (("--token-budget", sizes.token_budget), ("--max-sequences", sizes.max_sequences)):
        if number < 1:
            raise UserError(f"{option} {number}: should be 1 or more")
    sequences = sizes.max_sequences
    if sequences > sizes.token_budget:
        raise UserError(f"--max-sequences {sequences}: should be at most the --token-budget of {sizes.token_budget}")
    if sequences < layout.pp:
        raise UserError(f"--max-sequences {sequences}: should be at least pp{layout.pp}, a sequence per stage")
    if max_length is not None and not 1 <= max_length <= config.max_positions:
        raise UserError(f"--max-length {max_length}: should be 1 to {config.max_positions}, the model's positions")
    sizes = replace(sizes, max_length=max_length or config.max_positions)
    on_gpus = all(host.source == GPU for host in hosts)
    on_cpu = "kernels" if compiled and sizes.dtype in KERNEL_DTYPES else "torch"
    runner = "cuda" if on_gpus else on_cpu
    ledger = serving_ledger(config, layout, sizes, runner)
    # More than twice what all sequences of a step can hold would be of little use even as a prefix cache.
    most = 2 * sizes.max_sequences * ledger.blocks_of_longest
    if memory is None:
        most = min(most, max(ledger.blocks_of_longest, DEFAULT_POOL // ledger.kv_block))
    if on_gpus:  # each rank has its own, and they cannot share memory
        most = min(most, *(max(0, min(budgets) - stage.fixed) // stage.kv_block for stage in ledger.stages))
    if max_length is None:
        fits = ledger.longest_within(min(most, max(0, budget - ledger.fixed) // ledger.kv_block))
        if 0 < fits < sizes.max_length:
            ledger = serving_ledger(config, layout, replace(sizes, max_length=fits), runner)
    return fill_memory(ledger, budget, min(most, get_limit("new_tokens")))
