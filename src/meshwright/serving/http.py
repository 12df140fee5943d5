"""The HTTP API: OpenAI's completions and chat completions, llama.cpp's endpoints, health and metrics. Free of torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from meshwright import __version__
from meshwright.errors import UserError
from meshwright.serving.engine_client import EngineClient, Refusal, Ticket
from meshwright.serving.gate import BodyReader, Gate, HttpSettings
from meshwright.serving.metrics import ServingMetrics
from meshwright.serving.openapi import describe_api
from meshwright.serving.prompts import Prompts
from meshwright.serving.protocol import bodies
from meshwright.serving.protocol.bodies import Body, option_error, parse_body
from meshwright.serving.protocol.errors import ApiError, contain_panics, refusal_error, to_api_error
from meshwright.serving.protocol.jobs import GENERATION, build_job
from meshwright.serving.streaming import ClientLeft, EventStream, JobRunner

LARGE_BODY = 8192  # bytes; larger ones are parsed and tokenized beside the event loop
CLIENT_CLOSED_REQUEST = 499  # nginx's status of a request whose client left; nobody reads it
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

_Body = TypeVar("_Body", bound=Body)
_Result = TypeVar("_Result")


def create_app(client: EngineClient, prompts: Prompts, settings: HttpSettings) -> FastAPI:
    """Create the FastAPI application of the server. client: engine that runs the requests. prompts: tokenizer and chat
    template."""
    app = FastAPI(title="Meshwright", version=__version__, docs_url=None, redoc_url=None)
    api = _Api(client, prompts, settings)
    posts: dict[str, tuple[type[Body], Callable[..., Awaitable[object]]]] = {
        **{path: (body, api.generate) for path, (body, _) in GENERATION.items()},
        "/tokenize": (bodies.TokenizeBody, partial(api.parse, use=api.tokenize)),
        "/detokenize": (bodies.DetokenizeBody, partial(api.parse, use=api.detokenize)),
        "/apply-template": (bodies.ConversationBody, partial(api.parse, use=api.apply_template)),
    }
    gets: dict[str, Callable[[Request], object]] = {
        "/v1/models": lambda _: {"object": "list", "data": [api.show_model(settings.model)]},
        "/v1/models/{model}": lambda request: api.show_model(request.path_params["model"]),
        "/props": lambda _: api.show_properties(),
        "/tokenizer_info": lambda _: api.show_tokenizer(),
        "/health": lambda _: api.report_state("ready", "draining"),
        "/ready": lambda _: api.report_state("ready"),
        "/metrics": lambda _: Response(api.metrics.page(), media_type=PROMETHEUS),
    }
    for path, (body, post) in posts.items():
        app.add_route(path, _answer(partial(post, model=body)), methods=["POST"])
    for path, get in gets.items():
        app.add_route(path.replace("{model}", "{model:path}"), _answer(get), methods=["GET"])
    document = describe_api({path: body for path, (body, _) in posts.items()}, list(gets))
    app.openapi = lambda: document  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_middleware(Gate, api_keys=settings.api_keys, refuse=api.refuse_unread)
    app.state.settings, app.state.refuse_connection = settings, api.refuse_connection
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["GET", "POST"],
            allow_headers=["*"], expose_headers=["x-request-id", "retry-after", "retry-after-ms"],
        )  # fmt: skip
    return app


class _Api:
    """Handlers of all HTTP endpoints."""

    def __init__(self, client: EngineClient, prompts: Prompts, settings: HttpSettings) -> None:
        self._client, self._prompts, self._settings = client, prompts, settings
        self.metrics = ServingMetrics(client, settings.model)
        self._runner = JobRunner(client, self.metrics, settings)
        self._bodies = BodyReader(settings)
        self._created = int(time.time())

    def refuse_unread(self, path: str, large: bool) -> ApiError | None:
        """Return the error response for a POST to `path` whose body has not been read: while no request is accepted at
        all or, if the body is `large`, while a request without a place in the line would be refused; else None."""
        closed = self._client.state in ("starting", "draining", "failed")
        return self._refuse(path, Ticket()) if closed or large else None

    def _refuse(self, path: str, ticket: Ticket) -> ApiError | None:
        """Return the error response for a POST to `path` if its request would not be queued, however short it is; None
        for paths that generate no text."""
        if path not in GENERATION or (refusal := self._client.admit((), ticket)) is None:
            return None
        self.metrics.refuse(refusal.reason)
        return refusal_error(refusal)

    def refuse_connection(self) -> Response:
        """Return the HTTP response (429) for a new connection beyond the limit on connections."""
        refusal = self._client.admit((), Ticket())
        self.metrics.refuse("connections")
        wait = 1.0 if refusal is None else refusal.retry_after_seconds
        return refusal_error(Refusal("connections", wait)).to_response()

    async def generate(self, request: Request, model: type[bodies.GenerationBody]) -> Response | dict[str, Any]:
        """Handle a POST that generates text: parse the body as a `model`, run its choices, and return the whole
        response or an event stream."""
        name = request.state.request_id

        job = await self.parse(request, model, lambda body: build_job(body, self._prompts, self._settings.model, name))
        job = replace(job, ticket=request.state.ticket)
        return EventStream(self._runner, job) if job.stream else await self._runner.collect(job, request.receive)

    async def parse(self, request: Request, model: type[_Body], use: Callable[[_Body], _Result]) -> _Result:
        """Read the body of `request`, validate it as a `model`, and return `use(body)`; large bodies and conversations
        are parsed in a thread, so that the event loop is not blocked. Raises ApiError."""

        def parse(data: bytes) -> _Result:
            body = parse_body(model, data)
            self._check_model(getattr(body, "model", None) or self._settings.model)
            try:
                with contain_panics():
                    return use(body)
            except UserError as error:
                raise option_error(error, model) from None

        async with self._bodies.read(request) as data:
            request.state.ticket = self._bodies.identify(request, data)
            if (error := self._refuse(request.scope["path"], request.state.ticket)) is not None:
                raise error
            slow = len(data) > LARGE_BODY or "messages" in model.model_fields
            return await asyncio.to_thread(parse, data) if slow else parse(data)

    def _check_model(self, name: str) -> None:
        """Raise ApiError (404) if `name`, the `model` of a request, is not the served model."""
        if name != self._settings.model:
            message = f"the model {name[:100]!r} is not served here; the one there is: {self._settings.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def tokenize(self, body: bodies.TokenizeBody) -> dict[str, Any]:
        """Handle `/tokenize`: return a JSON object with the token IDs of the body's `prompt`, `content` or `messages`;
        it has the fields of both vLLM and llama.cpp."""
        prompts = self._prompts
        if body.messages is not None:
            tokens = prompts.encode_chat([message.to_message() for message in body.messages])
        elif body.prompt is not None:
            tokens = prompts.encode(body.prompt, body.add_special_tokens, empty=True)
        else:
            tokens = prompts.encode(body.content or "", body.add_special, empty=True)
        texts = [prompts.token_text(token) for token in tokens] if body.with_pieces or body.return_token_strs else []
        pieces = [{"id": token, "piece": text} for token, text in zip(tokens, texts, strict=False)]
        return {
            "count": len(tokens),
            "max_model_len": prompts.max_length,
            "tokens": pieces if body.with_pieces else tokens,
            **({"token_strs": texts} if body.return_token_strs else {}),
        }

    def detokenize(self, body: bodies.DetokenizeBody) -> dict[str, str]:
        """Handle `/detokenize`: return the text of token IDs, as `prompt` (vLLM) and again as `content` (llama.cpp)."""
        text = self._prompts.decode(self._prompts.check(body.tokens, empty=True))
        return {"prompt": text, "content": text}

    def apply_template(self, body: bodies.ConversationBody) -> dict[str, str]:
        """Handle `/apply-template`: return {"prompt": text of the conversation in the model's chat template}."""
        return {"prompt": self._prompts.render_chat(body.conversation())}

    def show_model(self, name: str) -> dict[str, Any]:
        """Return the JSON object that describes the served model in `/v1/models`. Raises ApiError (404) for another
        `name`."""
        self._check_model(name)
        about = {"created": self._created, "owned_by": "meshwright", "max_model_len": self._prompts.max_length}
        return {"id": name, "object": "model", **about}

    def show_tokenizer(self) -> dict[str, Any]:
        """Handle `/tokenizer_info`: return special tokens and chat template as JSON, in the form that lm-eval reads."""
        prompts = self._prompts
        start = None if prompts.start is None else prompts.token_text(prompts.start)
        end = next((prompts.token_text(token) for token in sorted(prompts.ends)), None)
        return {"bos_token": start, "eos_token": end, "pad_token": end, "chat_template": prompts.chat_template}

    def show_properties(self) -> dict[str, Any]:
        """Handle `/props`: return facts about model and engine as JSON, under llama.cpp's names."""
        return {
            **self.show_tokenizer(),
            "default_generation_settings": {"n_ctx": self._prompts.max_length}, "model_alias": self._settings.model,
            "modalities": {"vision": False, "audio": False}, "build_info": f"meshwright {__version__}",
            "state": self._client.state, "engine": dict(self._client.properties),
        }  # fmt: skip

    def report_state(self, *good: str) -> dict[str, str]:
        """Return the engine's state as JSON if it is one of `good` ("ready", "draining"); else raise ApiError (503).
        Handles `/health` and `/ready`."""
        state = self._client.state
        if state not in good:
            raise refusal_error(Refusal(state, 1.0))
        return {"status": "ok", "state": state}


def _answer(endpoint: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
    """Wrap an endpoint, which returns a response or a JSON value, as a handler that always returns a response;
    exceptions become error responses in OpenAI's JSON form."""

    async def answer(request: Request) -> Response:
        try:
            value = endpoint(request)
            value = await value if isawaitable(value) else value
        except (ClientLeft, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return to_api_error(error).to_response()
        return value if isinstance(value, Response) else Response(to_json(value), media_type="application/json")

    return answer


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Return the error response for an unknown path (404) or a method that the path does not have (405)."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return ApiError(error.status_code, message, code="not_found", headers=error.headers).to_response()
