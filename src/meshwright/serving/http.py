"""The HTTP API: OpenAI's completions and chat completions, llama.cpp's endpoints, health and metrics. Free of torch."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable
from functools import partial
from inspect import isawaitable
from typing import Any, TypeVar

from prometheus_client import generate_latest
from pydantic_core import to_json
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from meshwright import __version__
from meshwright.data.tokenizers.library import convert_panics
from meshwright.errors import UserError
from meshwright.serving.gate import LONGEST_SECONDS, Gate, HttpSettings
from meshwright.serving.metrics import ServingMetrics
from meshwright.serving.openapi import describe_api
from meshwright.serving.prompts import Prompts
from meshwright.serving.protocol import bodies
from meshwright.serving.protocol.bodies import Body, make_option_error, parse_body
from meshwright.serving.protocol.errors import ApiError, make_refusal_error, to_api_error
from meshwright.serving.protocol.jobs import GENERATION, build_job
from meshwright.serving.replicas import Replicas
from meshwright.serving.streaming import ClientLeft, EventStream, JobRunner
from meshwright.serving.waiting_line import Refusal, Ticket

LARGE_BODY = 8192  # bytes; larger ones are parsed and tokenized in a thread
CLIENT_CLOSED_REQUEST = 499  # nginx's status of a request whose client has disconnected
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

MODEL_PATH = "/v1/models/"  # followed by the name of a model
_GOOD_ID = re.compile(r"[!-~]{1,128}")  # printable ASCII without spaces

Endpoint = Callable[..., Any]
"""Handler of a `Request`, or a coroutine function; returns a Response, or a value that becomes the JSON of one."""

_Body = TypeVar("_Body", bound=Body)
_Result = TypeVar("_Result")


class HttpApp:
    """ASGI application with all HTTP endpoints of the server. Each response carries the request's ID (`X-Request-Id`:
    the client's ID if the request has one).

    client: engine that runs the requests. prompts: tokenizer and chat template.

    Attributes:
        settings: Settings of the API.
        metrics: Metrics of the page `/metrics`.
    """

    def __init__(self, client: Replicas, prompts: Prompts, settings: HttpSettings) -> None:
        """Build the table of endpoints; arguments: see the class."""
        self.settings, self.metrics = settings, ServingMetrics(client, settings.model)
        self._client, self._prompts, self._gate = client, prompts, Gate(settings)
        self._runner = JobRunner(client, self.metrics, settings)
        self._created = int(time.time())
        posts: dict[str, tuple[type[Body], Endpoint]] = {
            **{path: (body, self._generate) for path, (body, _) in GENERATION.items()},
            "/tokenize": (bodies.TokenizeBody, partial(self._parse, use=self._tokenize)),
            "/detokenize": (bodies.DetokenizeBody, partial(self._parse, use=self._detokenize)),
            "/apply-template": (bodies.ConversationBody, partial(self._parse, use=self._apply_template)),
        }
        gets: dict[str, Endpoint] = {
            "/v1/models": lambda _: {"object": "list", "data": [self._show_model(settings.model)]},
            MODEL_PATH + "{model}": lambda request: self._show_model(request.scope["path"].removeprefix(MODEL_PATH)),
            "/props": lambda _: self._show_properties(),
            "/tokenizer_info": lambda _: self._show_tokenizer(),
            "/health": lambda _: self._report_state("ready", "draining"),
            "/ready": lambda _: self._report_state("ready"),
            "/metrics": lambda _: Response(generate_latest(self.metrics.registry), media_type=PROMETHEUS),
        }
        document = describe_api(settings.model, {path: body for path, (body, _) in posts.items()}, gets)
        gets["/openapi.json"] = lambda _: document
        self._endpoints: dict[str, tuple[str, Endpoint]] = {path: ("GET", get) for path, get in gets.items()}
        self._endpoints |= {path: ("POST", partial(post, model=body)) for path, (body, post) in posts.items()}
        self._app: ASGIApp = self._handle_request
        if settings.cors_origins:
            self._app = CORSMiddleware(
                self._handle_request, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"],
                allow_headers=["*"], expose_headers=["x-request-id", "retry-after", "retry-after-ms"],
            )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request: entry point of the ASGI application. scope, receive, send: ASGI's arguments."""
        await self._app(scope, receive, send)

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request: call its endpoint and send what the endpoint returns, as JSON unless it is a
        Response. Exceptions become error responses in OpenAI's format. scope, receive, send: ASGI's arguments."""
        request = Request(scope, receive)
        given = request.headers.get("x-request-id", "")
        name = request.state.request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        try:
            with convert_panics():
                value = self._find_endpoint(request)(request)
                value = await value if isawaitable(value) else value
            response = value if isinstance(value, Response) else Response(to_json(value), media_type="application/json")
        except (ClientLeft, ClientDisconnect):
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            response = to_api_error(error).to_response()
        response.raw_headers.append((b"x-request-id", name.encode()))
        await response(scope, receive, send)

    def _find_endpoint(self, request: Request) -> Endpoint:
        """Check the API key and route the request: return the endpoint for its path and method. Raises ApiError for a
        wrong API key (401), an unknown path (404), or a method that the path does not have (405)."""
        path: str = request.scope["path"]
        self._gate.check_key(request)
        known = MODEL_PATH + "{model}" if path.startswith(MODEL_PATH) else path
        method, endpoint = self._endpoints.get(known, ("", None))
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        if endpoint is not None and request.method in methods:
            return endpoint
        allow = {"allow": ", ".join(methods)}
        status, reason, headers = (405, "method not allowed", allow) if method else (404, "not found", None)
        message, code = f"{request.method} {path[:200]}: {reason}", reason.replace(" ", "_")
        raise ApiError(status, message, code=code, headers=headers)

    def refuse_connection(self) -> Response:
        """Return the HTTP response (429) for a new connection beyond the limit on connections."""
        refusal = self._client.admit((), Ticket()) or Refusal("", 1.0)
        self.metrics.refuse("connections")
        return make_refusal_error(refusal._replace(reason="connections"), LONGEST_SECONDS).to_response()

    async def _generate(self, request: Request, model: type[bodies.GenerationBody]) -> Response | dict[str, Any]:
        """Handle a POST `request` that generates text: parse its body as a `model` (a pydantic class), run the
        resulting requests on the engine, and return the whole response or an event stream."""
        name = request.state.request_id
        job = await self._parse(request, model, lambda body: build_job(body, self._prompts, self.settings.model, name))
        job.ticket = request.state.ticket
        return EventStream(self._runner, job) if job.stream else await self._runner.collect(job, request.receive)

    async def _parse(self, request: Request, model: type[_Body], use: Callable[[_Body], _Result]) -> _Result:
        """Read the body of `request`, validate it as a `model` (a pydantic class), and return `use(body)`.

        Large bodies and conversations are parsed in a thread, so that the event loop is not blocked. Raises ApiError
        for an invalid body, or if the engine's queue would refuse the request. The queue is checked before the body is
        parsed or, for a large body, before it is read.
        """

        def parse(data: bytearray) -> _Result:
            """Parse the JSON body `data`, check the model name in it, and return `use(body)`."""
            body = parse_body(model, data)
            self._check_model(getattr(body, "model", None) or self.settings.model)
            try:
                return use(body)
            except UserError as error:
                raise make_option_error(error, model) from None

        generates = request.scope["path"] in GENERATION
        closed = self._client.state in ("starting", "draining", "failed")
        if (self._gate.is_large(request) or closed) and generates:
            self._runner.check_queue((), self._gate.identify(request, None))
        async with self._gate.read(request) as data:
            request.state.ticket = self._gate.identify(request, data)
            if generates:
                self._runner.check_queue((), request.state.ticket)
            slow = len(data) > LARGE_BODY or "messages" in model.model_fields
            return await asyncio.to_thread(parse, data) if slow else parse(data)

    def _check_model(self, name: str) -> None:
        """Raise ApiError (404) if `name`, the `model` of a request, is not the served model."""
        if name != self.settings.model:
            message = f"the model {name[:100]!r} is not served here; the served model is {self.settings.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _tokenize(self, body: bodies.TokenizeBody) -> dict[str, Any]:
        """Handle `/tokenize`: return a JSON object with the token IDs of the body's `prompt`, `content` or `messages`;
        the object has the fields of both vLLM and llama.cpp."""
        prompts = self._prompts
        if body.messages is not None:
            tokens = prompts.encode_chat(*body.to_conversation())
        else:
            start = body.add_special if body.prompt is None else body.add_special_tokens
            text = body.prompt or body.content or ""
            tokens = prompts.encode(text, start, empty=True, parse_special=body.parse_special)
        texts = list(map(prompts.get_token_text, tokens)) if body.with_pieces or body.return_token_strs else []
        pieces = [{"id": token, "piece": text} for token, text in zip(tokens, texts, strict=False)]
        strings = {"token_strs": texts} if body.return_token_strs else {}
        shown = pieces if body.with_pieces else tokens
        return {"count": len(tokens), "max_model_len": prompts.max_length, "tokens": shown, **strings}

    def _detokenize(self, body: bodies.DetokenizeBody) -> dict[str, str]:
        """Handle `/detokenize`: return the text of the body's token IDs, as `prompt` (vLLM) and again as `content`
        (llama.cpp)."""
        text = self._prompts.decode(self._prompts.check(body.tokens, empty=True))
        return {"prompt": text, "content": text}

    def _apply_template(self, body: bodies.ConversationBody) -> dict[str, str]:
        """Handle `/apply-template`: return {"prompt": text of the body's conversation in the model's chat template}."""
        return {"prompt": self._prompts.render_chat(*body.to_conversation())}

    def _show_model(self, name: str) -> dict[str, Any]:
        """Return the JSON object that describes the served model in `/v1/models`. Raises ApiError (404) if `name` is
        another model's."""
        self._check_model(name)
        about = {"created": self._created, "owned_by": "meshwright", "max_model_len": self._prompts.max_length}
        return {"id": name, "object": "model", **about}

    def _show_tokenizer(self) -> dict[str, Any]:
        """Handle `/tokenizer_info`: return special tokens and chat template as JSON, in the form that lm-eval reads."""
        prompts = self._prompts
        start = None if prompts.start is None else prompts.get_token_text(prompts.start)
        end = next((prompts.get_token_text(token) for token in sorted(prompts.ends)), None)
        return {"bos_token": start, "eos_token": end, "pad_token": end, "chat_template": prompts.chat_template}

    def _show_properties(self) -> dict[str, Any]:
        """Handle `/props`: return facts about model and engine as JSON, under llama.cpp's names."""
        return {
            **self._show_tokenizer(),
            "default_generation_settings": {"n_ctx": self._prompts.max_length}, "model_alias": self.settings.model,
            "modalities": {"vision": False, "audio": False}, "build_info": f"meshwright {__version__}",
            "state": self._client.state, "engine": dict(self._client.properties),
        }  # fmt: skip

    def _report_state(self, *good: str) -> dict[str, str]:
        """Handle `/health` and `/ready`: return {"status": "ok", "state": engine state} if the state is one of `good`;
        raise ApiError (503) otherwise. good: "ready", and for `/health` also "draining"."""
        state = self._client.state
        if state not in good:
            raise make_refusal_error(Refusal(state, 1.0))
        return {"status": "ok", "state": state}
