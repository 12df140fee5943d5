"""Conversion of a request body to a job: requests for the engine, and the formatter of the response. Free of torch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.serving.choices import Choice, StopRule
from meshwright.serving.prompts import Prompts
from meshwright.serving.protocol.answers import ChatFormatter, CompletionFormatter, LlamaFormatter
from meshwright.serving.protocol.bodies import ChatBody, CompletionBody, GenerationBody, LlamaBody
from meshwright.serving.protocol.errors import ApiError
from meshwright.serving.protocol.parameters import MAX_SEQUENCES
from meshwright.serving.request import Request
from meshwright.serving.waiting_line import Ticket

MAX_TOKENS = 2**24  # of all prompts x n of one HTTP request

Formatter = CompletionFormatter | LlamaFormatter
GENERATION: dict[str, tuple[type[GenerationBody], type[Formatter]]] = {
    "/v1/completions": (CompletionBody, CompletionFormatter),
    "/v1/chat/completions": (ChatBody, ChatFormatter),
    "/completion": (LlamaBody, LlamaFormatter),
}
"""Body and formatter of the responses of each endpoint that generates text, by its path."""
_numbers = itertools.count()  # makes request IDs unique, as clients may repeat theirs


@dataclass(slots=True)
class Job:
    """One HTTP request that generates text, parsed and ready to run.

    Attributes:
        choices: Choices (answers) of the response, each with its request to the engine.
        formatter: Formatter of the response.
        stream: True to send the response as server-sent events.
        ticket: Identity of the request, by which it keeps its place in the waiting line if it is refused.
    """

    choices: Sequence[Choice]
    formatter: Formatter
    stream: bool
    ticket: Ticket = field(default_factory=Ticket)


def build_job(body: GenerationBody, prompts: Prompts, model: str, name: str) -> Job:
    """Build the job (requests to the engine, and formatter of the response) of a parsed HTTP request: tokenize the
    prompts of `body`, and create `n` choices for each prompt. prompts: tokenizer. model: model name in the response.
    name: ID of the HTTP request. Raises ApiError if there are too many prompts or tokens, and UserError for an invalid
    prompt or sampling option."""
    inputs = body.encode(prompts)
    if len(inputs) * body.n > MAX_SEQUENCES:
        raise ApiError(400, f"n: {len(inputs)} prompts x n should be at most {MAX_SEQUENCES}", param="n")
    longest = max(len(tokens) for tokens, _ in inputs)
    room = max(prompts.max_length - longest, 0)
    max_tokens = min(body.default_tokens or room, room) if body.max_tokens is None else body.max_tokens
    if longest + max_tokens > prompts.max_length:
        option = type(body).model_fields["max_tokens"].alias or "max_tokens"
        text = f"the maximum length is {prompts.max_length} tokens: the prompt has {longest}, {option} is {max_tokens}"
        wrong = option if longest <= prompts.max_length else "prompt"
        raise ApiError(400, text, param=wrong, code="context_length_exceeded")
    if sum(len(tokens) for tokens, _ in inputs) * body.n > MAX_TOKENS:
        raise ApiError(400, f"n: the tokens of all prompts x n should be at most {MAX_TOKENS:,}", param="n")
    ends = prompts.chat_ends if isinstance(body, ChatBody) else prompts.ends
    sampling = body.to_sampling(ends, max_tokens, score_prompt=inputs[0][1] is not None)
    sampling.check_vocabulary(prompts.vocabulary)
    stop = StopRule.parse(body.stop, body.include_stop_str_in_output)
    deadline = None if body.timeout is None else time.time() + body.timeout
    choices: list[Choice] = []
    for (tokens, echo), number in itertools.product(inputs, range(body.n)):
        request = Request(
            f"{name}:{next(_numbers)}", tuple(tokens), sampling, choice=number, priority=body.priority,
            deadline=deadline, cache_salt=body.cache_salt,
        )  # fmt: skip
        choices.append(Choice(len(choices), request, prompts, stop, echo))
    names = {"id": name, "model": model, "seed": sampling.seed}
    formatter = dict(GENERATION.values())[type(body)](body, prompts, names)
    return Job(choices, formatter, body.stream)
