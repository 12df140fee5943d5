"""The HTTP API: OpenAI's completions and chat completions, llama.cpp's endpoints, health and metrics. Free of torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from meshwright import __version__
from meshwright.errors import UserError
from meshwright.serving.engine_client import EngineClient, Refusal
from meshwright.serving.gate import BodyLimits, BodyReader, Gate, error_response
from meshwright.serving.metrics import ServingMetrics
from meshwright.serving.openapi import describe_api, operation
from meshwright.serving.prompts import Prompts
from meshwright.serving.protocol.bodies import (
    ApplyTemplateBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    to_messages,
)
from meshwright.serving.protocol.errors import ApiError, refusal_error, to_api_error
from meshwright.serving.protocol.fields import Body, option_error, parse_body
from meshwright.serving.protocol.jobs import Job, build_chat, build_completion
from meshwright.serving.protocol.llama_cpp import LlamaBody, build_llama
from meshwright.serving.streaming import ClientLeft, JobRunner, StreamLimits

LARGE_BODY = 8192  # bytes; larger ones are parsed and tokenized beside the event loop
CLIENT_CLOSED_REQUEST = 499  # nginx's status of a request whose client left; nobody reads it

_B = TypeVar("_B", bound=Body)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of the HTTP API.

    Attributes:
        model: Name of the served model.
        api_keys: Keys of which a request must name one; empty: none is needed.
        cors_origins: Origins whose pages may call the API, `"*"` for all; empty: CORS is off.
        bodies: Limits on the bodies of requests.
        streams: Limits on clients that read slowly.
    """

    model: str
    api_keys: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    bodies: BodyLimits = field(default_factory=BodyLimits)
    streams: StreamLimits = field(default_factory=StreamLimits)


def create_app(client: EngineClient, prompts: Prompts, settings: HttpSettings) -> FastAPI:
    """Create the application that answers HTTP requests through `client`."""
    app = FastAPI(title="Meshwright", version=__version__, docs_url=None, redoc_url=None)
    api = _Api(client, prompts, settings)
    for path, body, endpoint, tells in (
        ("/v1/completions", CompletionBody, api.complete, "Continue prompts"),
        ("/v1/chat/completions", ChatBody, api.chat, "Answer a conversation"),
        ("/completion", LlamaBody, api.complete_llama, "Continue a prompt, as llama.cpp's server"),
        ("/tokenize", TokenizeBody, api.tokenize, "Text or conversation to token IDs"),
        ("/detokenize", DetokenizeBody, api.detokenize, "Token IDs to text"),
        ("/apply-template", ApplyTemplateBody, api.apply_template, "Conversation to the text of its prompt"),
    ):
        app.add_api_route(path, _answer(endpoint), methods=["POST"], **operation(tells, body))
    for path, endpoint, tells in (
        ("/v1/models", api.list_models, "The served model"),
        ("/v1/models/{model:path}", api.show_model, "The served model by name"),
        ("/props", api.show_properties, "Facts about model and engine"),
        ("/health", api.report_health, "Whether the engine works"),
        ("/ready", api.report_ready, "Whether requests are taken now"),
        ("/metrics", api.report_metrics, "Metrics in Prometheus' text format"),
    ):
        app.add_api_route(path, _answer(endpoint), methods=["GET"], **operation(tells, path=path))
    app.openapi = lambda: describe_api(app)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_middleware(Gate, api_keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "retry-after-ms"],
        )
    return app


class _Api:
    """Endpoints of the application."""

    def __init__(self, client: EngineClient, prompts: Prompts, settings: HttpSettings) -> None:
        self._client, self._prompts, self._settings = client, prompts, settings
        self._metrics = ServingMetrics(client, settings.model)
        self._runner = JobRunner(client, self._metrics, settings.streams)
        self._bodies = BodyReader(settings.bodies)
        self._created = int(time.time())

    async def complete(self, request: Request) -> Response:
        """Answer `/v1/completions`."""
        return await self._generate(request, CompletionBody, build_completion)

    async def chat(self, request: Request) -> Response:
        """Answer `/v1/chat/completions`."""
        return await self._generate(request, ChatBody, build_chat)

    async def complete_llama(self, request: Request) -> Response:
        """Answer `/completion`."""
        return await self._generate(request, LlamaBody, build_llama)

    async def _generate(
        self, request: Request, model: type[_B], build: Callable[[_B, Prompts, str, str], Job]
    ) -> Response:
        """Build the job of a body, run it, and answer."""
        if (refusal := self._find_refusal()) is not None:  # before the work of tokenizing
            self._metrics.refuse(refusal.reason)
            raise refusal_error(refusal)
        job = await self._parse(
            request, model, lambda body: build(body, self._prompts, self._settings.model, request.state.request_id)
        )
        if job.stream:
            return self._runner.stream(job)
        return Response(await self._runner.collect(job, request.receive), media_type="application/json")

    def _find_refusal(self) -> Refusal | None:
        """Return a refusal if the state of the engine lets no request in, whatever its size."""
        state = self._client.state
        return Refusal(state, 1.0) if state in ("starting", "draining", "failed") else None

    async def _parse(self, request: Request, model: type[_B], use: Callable[[_B], _Result]) -> _Result:
        """Read and parse the body, and return what `use` makes of it, beside the event loop where that may take long.
        Raises ApiError."""
        data = await self._bodies.read(request)

        def parse() -> _Result:
            body = parse_body(model, data)
            name = getattr(body, "model", None)
            if name not in (None, "", self._settings.model):
                self._refuse_model(name)
            try:
                return use(body)
            except UserError as error:
                raise option_error(error, model) from None

        try:
            slow = len(data) > LARGE_BODY or "messages" in model.model_fields
            return await asyncio.to_thread(parse) if slow else parse()
        finally:
            self._bodies.release(len(data))

    def _refuse_model(self, name: object) -> None:
        """Raise the ApiError of a model that is not served."""
        raise ApiError(
            404,
            f"the model {str(name)[:100]!r} is not served here; the one there is: {self._settings.model!r}",
            param="model",
            code="model_not_found",
        )

    async def tokenize(self, request: Request) -> Response:
        """Answer `/tokenize`, in vLLM's and llama.cpp's form at once."""
        return _json(await self._parse(request, TokenizeBody, self._tokenize))

    def _tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """Return the tokens of the one text that a body holds."""
        prompts, given = self._prompts, [body.prompt, body.content, body.messages]
        if sum(one is not None for one in given) != 1:
            raise ApiError(400, "give one of prompt, content and messages", param="prompt")
        if body.messages is not None:
            tokens = prompts.encode_chat(to_messages(body.messages))
        else:
            start = body.add_special_tokens is not False if body.content is None else bool(body.add_special)
            text = body.content if body.prompt is None else body.prompt
            tokens = prompts.encode(text or "", start, empty=True)
        told: dict[str, Any] = {"count": len(tokens), "max_model_len": prompts.max_length, "tokens": tokens}
        if body.with_pieces:
            told["tokens"] = [{"id": token, "piece": prompts.token_text(token)} for token in tokens]
        if body.return_token_strs:
            told["token_strs"] = [prompts.token_text(token) for token in tokens]
        return told

    async def detokenize(self, request: Request) -> Response:
        """Answer `/detokenize`, under vLLM's name `prompt` and llama.cpp's `content`."""
        text = await self._parse(
            request, DetokenizeBody, lambda body: self._prompts.decode(self._prompts.check(body.tokens, empty=True))
        )
        return _json({"prompt": text, "content": text})

    async def apply_template(self, request: Request) -> Response:
        """Answer `/apply-template`."""
        text = await self._parse(
            request, ApplyTemplateBody, lambda body: self._prompts.render_chat(to_messages(body.messages))
        )
        return _json({"prompt": text})

    async def list_models(self, request: Request) -> Response:
        """Answer `/v1/models`."""
        return _json({"object": "list", "data": [self._model()]})

    async def show_model(self, request: Request) -> Response:
        """Answer `/v1/models/NAME`."""
        if request.path_params["model"] != self._settings.model:
            self._refuse_model(request.path_params["model"])
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        """Return the entry of the served model."""
        return {
            "id": self._settings.model,
            "object": "model",
            "created": self._created,
            "owned_by": "meshwright",
            "max_model_len": self._prompts.max_length,
        }

    async def show_properties(self, request: Request) -> Response:
        """Answer `/props`."""
        prompts = self._prompts
        start = None if prompts.start is None else prompts.token_text(prompts.start)
        return _json(
            {
                "default_generation_settings": {"n_ctx": prompts.max_length},
                "model_alias": self._settings.model,
                "chat_template": prompts.chat_template,
                "bos_token": start,
                "eos_token": next((prompts.token_text(token) for token in sorted(prompts.ends)), None),
                "modalities": {"vision": False, "audio": False},
                "build_info": f"meshwright {__version__}",
                "state": self._client.state,
                "engine": dict(self._client.properties),
            }
        )

    async def report_health(self, request: Request) -> Response:
        """Answer `/health`: 200 while the engine computes, else 503."""
        return self._report_state("ready", "draining")

    async def report_ready(self, request: Request) -> Response:
        """Answer `/ready`: 200 while requests are taken, else 503."""
        return self._report_state("ready")

    def _report_state(self, *good: str) -> Response:
        """Return the state, or raise its ApiError unless it is among `good`."""
        if self._client.state not in good:
            raise refusal_error(Refusal(self._client.state, 1.0))
        return _json({"status": "ok", "state": self._client.state})

    async def report_metrics(self, request: Request) -> Response:
        """Answer `/metrics`."""
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _answer(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Wrap an endpoint so that every error becomes a response in OpenAI's shape."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (ClientLeft, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return error_response(to_api_error(error))

    return answer


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer an unknown path (404) or method (405)."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return error_response(ApiError(error.status_code, message, code="not_found", headers=error.headers))


def _json(value: Any) -> Response:
    """Return a JSON response."""
    return Response(to_json(value), media_type="application/json")
