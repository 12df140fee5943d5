"""From a request body to requests for the engine and the form of the response. Free of torch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.serving.choices import Choice, StopRule
from meshwright.serving.prompts import Prompts
from meshwright.serving.protocol.answers import AnswerForm, ChatForm, CompletionForm, Envelope, Report
from meshwright.serving.protocol.bodies import ChatBody, CompletionBody, to_messages
from meshwright.serving.protocol.errors import ApiError
from meshwright.serving.protocol.fields import MOST_SEQUENCES, GenerationBody, StreamOptions
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling

COMPLETION_TOKENS = 16  # `max_tokens` of a completion that does not say it, as in OpenAI's API
_numbers = itertools.count()  # makes the IDs of requests unique, whatever the client calls them


@dataclass(frozen=True, slots=True)
class Job:
    """HTTP request for text, ready for the engine.

    Attributes:
        choices: Choices of the response, each with its request.
        form: Form of the response.
        stream: Send the response as server-sent events.
        timeout: Seconds until the request is given up; None: never.
    """

    choices: Sequence[Choice]
    form: AnswerForm
    stream: bool
    timeout: float | None

    @property
    def requests(self) -> list[Request]:
        """Requests for the engine, in the order of the choices."""
        return [choice.request for choice in self.choices]


def build_completion(body: CompletionBody, prompts: Prompts, model: str, name: str) -> Job:
    """Build the job of a `/v1/completions` body. model: its name in the response. name: of the request. Raises
    ApiError, UserError."""
    if len(body.prompt) * body.choices > MOST_SEQUENCES:
        raise ApiError(400, f"prompt: {len(body.prompt)} prompts x n should be at most {MOST_SEQUENCES}", param="n")
    texts = [given if isinstance(given, str) else None for given in body.prompt]
    tokens = [
        prompts.encode(given, body.add_special_tokens is not False) if isinstance(given, str) else prompts.check(given)
        for given in body.prompt
    ]
    longest = max(map(len, tokens))
    room = prompts.max_length - longest
    max_tokens = min(COMPLETION_TOKENS, max(room, 0)) if body.max_tokens is None else body.max_tokens
    check_length(longest, max_tokens, prompts)
    sampling = body.sample(prompts.ends, max_tokens, body.logprobs, bool(body.echo))
    echoes: list[str | None] = [None] * len(tokens)
    if body.echo:
        echoes = [prompts.decode(ids) if text is None else text for text, ids in zip(texts, tokens, strict=True)]
    envelope = Envelope(f"cmpl-{name}", int(time.time()), model, sampling.seed)
    form = CompletionForm(envelope, _report(body, body.logprobs is not None), prompts)
    return _build_job(body, form, envelope, prompts, [*zip(tokens, echoes, strict=True)], sampling)


def build_chat(body: ChatBody, prompts: Prompts, model: str, name: str) -> Job:
    """Build the job of a `/v1/chat/completions` body; parameters and errors as in `build_completion`."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs: true", param="top_logprobs")
    tokens = prompts.encode_chat(to_messages(body.messages))
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    max_tokens = max(prompts.max_length - len(tokens), 0) if wanted is None else wanted
    check_length(len(tokens), max_tokens, prompts)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = body.sample(prompts.chat_ends, max_tokens, logprobs, False)
    envelope = Envelope(f"chatcmpl-{name}", int(time.time()), model, sampling.seed)
    form = ChatForm(envelope, _report(body, bool(body.logprobs)), prompts)
    return _build_job(body, form, envelope, prompts, [(tokens, None)], sampling)


def check_length(prompt: int, max_tokens: int, prompts: Prompts) -> None:
    """Raise ApiError unless a prompt of so many tokens and `max_tokens` more fit the model's length."""
    if prompt + max_tokens > prompts.max_length:
        raise ApiError(
            400,
            f"the model takes {prompts.max_length} tokens, and the prompt has {prompt} and max_tokens is {max_tokens}",
            param="max_tokens" if prompt <= prompts.max_length else "prompt",
            code="context_length_exceeded",
        )


def make_request_id(name: str) -> str:
    """Return an ID for the engine that no other request of this process has."""
    return f"{name}:{next(_numbers)}"


def _report(body: GenerationBody, logprobs: bool) -> Report:
    """Return what the response reports beside text."""
    options = body.stream_options or StreamOptions.model_construct()
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: needs stream: true", param="stream_options")
    continuous = bool(options.continuous_usage_stats)
    return Report(logprobs, bool(body.return_token_ids), bool(options.include_usage) or continuous, continuous)


def _build_job(
    body: GenerationBody,
    form: AnswerForm,
    envelope: Envelope,
    prompts: Prompts,
    inputs: Sequence[tuple[list[int], str | None]],
    sampling: Sampling,
) -> Job:
    """Build the job with `n` choices for each of the `inputs`: token IDs, and the text to echo."""
    stop = StopRule(body.stop, bool(body.include_stop_str_in_output))
    sampling.check_vocabulary(prompts.vocabulary)
    deadline = None if body.timeout is None else time.time() + body.timeout
    choices: list[Choice] = []
    for tokens, echo in inputs:
        for number in range(body.choices):
            request = Request(
                make_request_id(envelope.id),
                tuple(tokens),
                sampling,
                choice=number,
                priority=body.priority or 0,
                deadline=deadline,
                cache_salt=body.cache_salt or "",
            )
            choices.append(Choice(len(choices), request, prompts, stop, echo))
    return Job(choices, form, bool(body.stream), body.timeout)
