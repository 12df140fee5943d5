"""The OpenAPI document of the HTTP API. Free of torch."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from meshwright.serving.protocol import bodies, llama_cpp
from meshwright.serving.protocol.fields import Body

_REFERENCE = "#/components/schemas/{model}"
_BODIES: tuple[type[Body], ...] = (
    bodies.CompletionBody,
    bodies.ChatBody,
    bodies.TokenizeBody,
    bodies.DetokenizeBody,
    bodies.ApplyTemplateBody,
    llama_cpp.LlamaBody,
)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REASONS = {
    400: "A wrong field, or one that cannot be honoured; `param` names it",
    401: "The API key is missing or wrong",
    404: "Not there: the path, or the model",
    408: "The body did not arrive in time, or the answer was not finished within `timeout`",
    413: "The body is too large",
    429: "The queue is full; Retry-After says when to come again",
    503: "The server is starting, restarting a lost rank, or shutting down",
}
_STREAMS = (bodies.CompletionBody, bodies.ChatBody, llama_cpp.LlamaBody)


def operation(summary: str, body: type[Body] | None = None, path: str = "") -> dict[str, Any]:
    """Return the arguments of FastAPI's `add_api_route` that describe an endpoint. `body`: of its requests. `path`:
    with its parameter `model`, if it has one."""
    good: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if body in _STREAMS:
        good["text/event-stream"] = {}
    if "metrics" in summary.lower():
        good = {"text/plain": {"schema": {"type": "string"}}}
    statuses = _REASONS if body is not None else [status for status in _REASONS if status not in (408, 413, 429)]
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    told: dict[str, Any] = {
        "summary": summary,
        "response_model": None,
        "responses": {
            200: {"description": "The answer", "content": good},
            **{status: {"description": _REASONS[status], "content": error} for status in statuses},
        },
    }
    if body is not None:
        schema = {"$ref": _REFERENCE.format(model=body.__name__)}
        told["openapi_extra"] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    if "{model" in path:
        parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        told["openapi_extra"] = {"parameters": [parameter]}
    return told


def describe_api(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the schemas of all bodies; it is made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, schemas = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REFERENCE)
        document["components"] = {
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        }
        app.openapi_schema = document
    return app.openapi_schema
