"""The OpenAPI document of the HTTP API. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from meshwright import __version__
from meshwright.serving.gate import OPEN_PATHS
from meshwright.serving.protocol.bodies import Body, GenerationBody

_REFERENCE = "#/components/schemas/{model}"
_TEXT_OR_NULL = {"type": ["string", "null"]}
_FIELDS = {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}
_DETAILS = {"type": "object", "required": list(_FIELDS), "properties": _FIELDS}
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": _DETAILS}}
_ERRORS = {
    "401": "The API key is missing or wrong",
    "404": "The path or the model does not exist",
    "503": "The server is starting, restarting a lost rank, or shutting down",
}
_CROWDED = {"429": "The queue is full, or there are too many connections; Retry-After says when to retry"}
_BODY_ERRORS = {
    "400": "A field, named by `param`, is invalid or not supported",
    "408": "The body did not arrive in time, or the answer was not finished within `timeout`",
    "413": "The body is too large",
    "415": "The body is compressed: it has a Content-Encoding",
}
_GENERATION_ERRORS = {"500": "The model computes NaN or infinite logits: `invalid_logits`"}


def describe_api(name: str, posts: Mapping[str, type[Body]], gets: Iterable[str]) -> dict[str, Any]:
    """Return the OpenAPI document of the server. `name`: name of the served model; `posts`: {path of a POST endpoint:
    model of its JSON body}; `gets`: paths of GET endpoints."""
    paths = {path: {"get": _describe_operation(path, _ERRORS)} for path in gets}
    for path, body in posts.items():
        generates = issubclass(body, GenerationBody)
        operation = _describe_operation(path, _ERRORS | _BODY_ERRORS | (_GENERATION_ERRORS if generates else {}))
        operation["requestBody"] = {"required": True, "content": _describe_json_content(body.__name__)}
        if generates:
            operation["responses"]["200"]["content"]["text/event-stream"] = {}
        paths[path] = {"post": operation}
    _, schemas = models_json_schema([(body, "validation") for body in posts.values()], ref_template=_REFERENCE)
    for schema in schemas["$defs"].values():
        schema["properties"] |= {"model": {"enum": [name, None]}} if "model" in schema["properties"] else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Meshwright", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR, "ModelName": {"enum": [name]}},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _describe_operation(path: str, errors: dict[str, str]) -> dict[str, Any]:
    """Return the OpenAPI operation object for `path`, without a request body. `errors`: {HTTP status: description},
    without that of too many requests, which health checks never get."""
    media, kind = ("text/plain", "string") if path == "/metrics" else ("application/json", "object")
    good = {"description": "The answer", "content": {media: {"schema": {"type": kind}}}}
    error = _describe_json_content("Error")
    texts = errors | ({} if path in OPEN_PATHS else _CROWDED)
    bad = {status: {"description": text, "content": error} for status, text in texts.items()}
    operation: dict[str, Any] = {"operationId": path.strip("/"), "responses": {"200": good, **bad}}
    if "{model}" in path:
        schema = {"$ref": _REFERENCE.format(model="ModelName")}
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": schema}]
    return operation


def _describe_json_content(schema: str) -> dict[str, Any]:
    """Return the OpenAPI content object of a JSON body whose schema has the name `schema`."""
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(model=schema)}}}
