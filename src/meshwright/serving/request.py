"""Requests to a replica's engine, and its outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from meshwright.errors import UserError
from meshwright.serving.sampling import Sampling, TokenResult

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class Request:
    """Request to the engine for one answer (choice) to one prompt.

    Attributes:
        id: Request ID, unique among the unfinished requests of an engine.
        tokens: Token IDs of the prompt; not empty.
        sampling: Sampling options.
        choice: Index of the choice among the `n` answers to the prompt; together with the seed it determines sampling.
        priority: Requests with lower values are admitted first; among equals, in order of arrival.
        deadline: UNIX time in seconds at which the HTTP server's process cancels the request; None: never. Engines
            ignore this field.
        replayed: Tokens of the answer that were sent before a rank was lost: recomputed like prompt tokens, neither
            sampled nor reported again; fewer than `sampling.max_tokens`.
        cache_salt: Text that enters the hashes of the prefix cache: only requests with equal salts share KV blocks.

    Raises:
        UserError: The prompt is empty, a token ID is negative, or `replayed` leaves nothing to generate.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    choice: int = 0
    priority: int = 0
    deadline: float | None = None
    replayed: tuple[int, ...] = ()
    cache_salt: str = ""

    def __post_init__(self) -> None:
        """Raise `UserError` if the prompt is empty, a token ID is negative, or `replayed` leaves nothing to
        generate."""
        if not self.tokens:
            raise UserError("the prompt is empty: should have at least one token")
        if min(self.tokens) < 0 or min(self.replayed, default=0) < 0:
            raise UserError(f"prompt: token ID {min(self.tokens + self.replayed)} should be 0 or more")
        if self.replayed and len(self.replayed) >= self.sampling.max_tokens:
            most = self.sampling.max_tokens
            raise UserError(f"replayed: {len(self.replayed)} tokens should be fewer than max_tokens {most}")

    @property
    def max_total_tokens(self) -> int:
        """Number of tokens of the prompt plus `max_tokens`."""
        return len(self.tokens) + self.sampling.max_tokens

    def check_vocabulary(self, size: int) -> None:
        """Raise UserError if a token ID is outside a vocabulary of `size` tokens."""
        if (highest := max(self.tokens)) >= size:
            raise UserError(f"prompt: token ID {highest} should be less than {size}, the model's vocabulary")
        self.sampling.check_vocabulary(size)

    def check_length(self, most: int) -> None:
        """Raise UserError if prompt and `max_tokens` together exceed `most` tokens."""
        if self.max_total_tokens > most:
            wanted = f"prompt of {len(self.tokens)} tokens + max_tokens {self.sampling.max_tokens}"
            raise UserError(f"{wanted}: should be at most {most} tokens together")


@dataclass(slots=True)
class Output:
    """New results of one request from one step.

    Attributes:
        request_id: ID of the request.
        results: New tokens of the answer, a stop token included.
        finish_reason: Reason why the request has ended: `"stop"` (a stop token, the last of `results`), `"length"`
            (`max_tokens`), `"cancelled"`, `"timeout"` (its deadline has passed), or `"error"` (NaN or infinite logits);
            None while it runs.
        cached_tokens: Number of prompt tokens found in the prefix cache.
        prompt_results: Log-probabilities of all prompt tokens (None for the first), if `sampling.prompt_logprobs` is
            given; only in the output with the answer's first token, else None.
        prefill_seconds: Seconds from the request's admission to the answer's first token; set only in the output with
            that token.
    """

    request_id: str
    results: list[TokenResult]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    prompt_results: list[TokenResult | None] | None = None
    prefill_seconds: float = field(default=0.0, compare=False)
