"""Continuous batching: which tokens of which sequences the next step computes.

Shapes: T tokens of a step, S sequences of a step, B blocks of the longest block table, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import TokenResult

Integers = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's state in the scheduler; other modules read `request` alone."""

    request: Request


@dataclass(slots=True, eq=False)
class StepBatch:
    """Tokens of one step as a ragged batch, and where their keys and values lie. All arrays are int32 and C-contiguous,
    and are new in each step.

    Sequence s has the tokens `starts[s]:starts[s + 1]` of the step; they have consecutive positions, the last of which
    is `context[s] - 1`. Every token attends to the positions up to its own, within the model's window.

    Attributes:
        tokens: Token IDs [T].
        positions: Position of each token in its sequence [T].
        slots: Slot of the KV cache into which a token's key and value are written [T]: block * 16 + offset.
        starts: Offset of each sequence's first token [S + 1]; starts[S] = T.
        context: Tokens of each sequence in the KV cache after this step [S].
        block_tables: Block that holds the positions 16 b to 16 b + 15 of a sequence [S, B]. Entries past its context,
            and those behind the window where all layers have one, are 0 and not to be read.
        output_rows: Indices into T of the rows whose logits are wanted, ascending [R]; may be empty.
        sequences: The scheduler's sequences [S].
        group: Pipeline group of all of them.
    """

    tokens: Integers
    positions: Integers
    slots: Integers
    starts: Integers
    context: Integers
    block_tables: Integers
    output_rows: Integers
    sequences: list[Sequence]
    group: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Figures of a scheduler between steps.

    Attributes:
        waiting: Requests not yet admitted.
        running: Admitted sequences that are not paused.
        paused: Admitted sequences that keep their blocks and wait for a safe state.
        free: KV blocks without content.
        cached: KV blocks of the prefix cache that no sequence holds; evictable.
        held: KV blocks that sequences hold; free + cached + held = blocks of the pool.
        waiting_tokens: Prompt tokens of the waiting requests.
        prompt_tokens: Prompt tokens of all sequences admitted so far.
        prefix_hit_tokens: Those of them that the prefix cache held.
        pauses: Changes from running to paused so far.
    """

    waiting: int
    running: int
    paused: int
    free: int
    cached: int
    held: int
    waiting_tokens: int
    prompt_tokens: int
    prefix_hit_tokens: int
    pauses: int


class Scheduler:
    """Continuous batching over one block pool: deterministic, so that every rank of a replica runs its own copy on the
    same calls."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if its ID is in use, or if it can never fit the pool or `max_length`."""
        raise NotImplementedError

    def cancel(self, request_id: str) -> Output | None:
        """Cancel a request and return its last output; None if it is unknown or has finished. Its blocks are free at
        once, or, if a step in progress writes to them, when that is published."""
        raise NotImplementedError

    def schedule(self, group: int = 0) -> StepBatch | None:
        """Return the next step of a group, None if none of its sequences can run. The group's previous batch must have
        been published."""
        raise NotImplementedError

    def publish(self, batch: StepBatch, results: SequenceOf[TokenResult]) -> list[Output]:
        """Record a step that has run, with the result of each output row, as `sample_batch` returns them [R]; return
        the new outputs."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """True if no request waits or runs."""
        raise NotImplementedError

    @property
    def stats(self) -> SchedulerStats:
        """Current figures."""
        raise NotImplementedError


def sample_batch(batch: StepBatch, logits_RV: npt.NDArray[np.float32]) -> list[TokenResult]:
    """Return a result for each output row: a sampled token where a sequence's last known token was computed; for other
    rows (`prompt_logprobs`), the next token of the prompt with its log-probability. Raises InvalidLogits if a row holds
    NaN or infinity. A pure function: the last stage of a pipeline sends the results to the other ranks."""
    raise NotImplementedError
