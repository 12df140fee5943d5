"""The OpenAPI document lists all fields that are read, and requests generated from it cause no server error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from bench.shared.fake_engine import FakeEngine, make_prompts
from meshwright.serving.gate import HttpSettings
from meshwright.serving.http import HttpApp
from meshwright.serving.protocol import bodies
from meshwright.serving.protocol.bodies import parse_body
from meshwright.serving.protocol.errors import ApiError
from meshwright.serving.protocol.parameters import UNSUPPORTED

MODELS = {
    "/v1/completions": bodies.CompletionBody,
    "/v1/chat/completions": bodies.ChatBody,
    "/completion": bodies.LlamaBody,
    "/tokenize": bodies.TokenizeBody,
    "/detokenize": bodies.DetokenizeBody,
    "/apply-template": bodies.ConversationBody,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    prompts = make_prompts(tmp_path_factory.mktemp("tokenizer"))
    return TestClient(HttpApp(FakeEngine(prompts), prompts, HttpSettings("m")))


@pytest.fixture(scope="module")
def schema(client: TestClient) -> Any:
    """The OpenAPI document as schemathesis parses it."""
    import schemathesis  # most of a second, which processes that run other files of tests save

    return schemathesis.openapi.from_asgi("/openapi.json", client.app)


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize("path", MODELS)
def test_requests_generated_from_document_cause_no_server_error(schema: Any, path: str, mode: str):
    """bench/ runs more of them, and schemathesis' whole engine."""
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

    checks = [not_a_server_error, response_schema_conformance, status_code_conformance]

    @given(schema[path]["POST"].as_strategy(generation_mode=GenerationMode[mode]))
    @settings(max_examples=4, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
    def call(case: Any) -> None:
        case.call_and_validate(checks=checks)

    call()


@pytest.mark.parametrize("path", MODELS)
def test_document_lists_all_fields_that_are_read(client: TestClient, path: str):
    document = client.get("/openapi.json").json()
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    described = document["components"]["schemas"][content["$ref"].rpartition("/")[2]]["properties"]
    model = MODELS[path]
    assert set(described) == {field.alias or name for name, field in model.model_fields.items()}
    assert described.get("model", {"enum": ["m", None]}) == {"enum": ["m", None]}  # requests made from it are answered


def test_document_lists_429_for_all_but_health_checks(client: TestClient):
    """Health checks are answered under any load."""
    paths = client.get("/openapi.json").json()["paths"]
    without = {
        path for path, operations in paths.items() for each in operations.values() if "429" not in each["responses"]
    }
    assert without == {"/health", "/ready", "/metrics"}


NEEDED = {
    "prompt": {"prompt": "x"},
    "messages": {"messages": [{"role": "user", "content": "x"}]},
    "tokens": {"tokens": [1]},
}
SMALLEST = {path: next(NEEDED[name] for name in NEEDED if name in model.model_fields) for path, model in MODELS.items()}


@pytest.mark.parametrize("path", MODELS)
def test_unsupported_field_is_refused_by_name(path: str):
    model = MODELS[path]
    names = set(UNSUPPORTED) - set(model.model_fields)
    assert len(names) > 60
    for name in names:
        with pytest.raises(ApiError) as caught:
            parse_body(model, json.dumps({**SMALLEST[path], name: {"ask": "for something"}}).encode())
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
        for neutral in (None, *UNSUPPORTED[name]):
            parse_body(model, json.dumps({**SMALLEST[path], name: neutral}).encode())


@pytest.mark.parametrize(
    ("path", "change"),
    [
        *(("/tokenize", {name: value}) for name, value in (("tools", [{}]), ("chat_template", "x"))),
        *(
            ("/completion", {name: value})
            for name, value in {
                "repeat_last_n": 64, "min_keep": 5, "t_max_predict_ms": 100, "post_sampling_probs": True,
                "response_fields": ["content"], "top_n_sigma": 1.0, "n_keep": 8, "cache_prompt": False,
                "guided_json": {}, "tools": [{}],
            }.items()
        ),
        *(
            ("/v1/completions", {name: value})
            for name, value in {
                "logprob_token_ids": [1], "thinking_token_budget": 9, "truncation_side": "right", "structural_tag": "x",
                "include_reasoning": False, "detokenize": False, "guided_whitespace_pattern": " ",
                "repetition_detection": {"max": 3},
            }.items()
        ),
        ("/v1/chat/completions", {"echo": True}),
        ("/detokenize", {"skip_special_tokens": False}),
    ],
    ids=str,
)  # fmt: skip
def test_unsupported_field_is_refused_on_every_endpoint(client: TestClient, path: str, change: dict[str, Any]):
    answer = client.post(path, json=SMALLEST[path] | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(change)))


plain = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=5)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
names = sorted({name for model in MODELS.values() for name in model.model_fields} | set(UNSUPPORTED))


@given(
    path=st.sampled_from(sorted(MODELS)),
    body=st.dictionaries(st.sampled_from(names), values, max_size=5),
    text=st.text(max_size=5),
)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_any_json_object_is_answered_or_refused(client: TestClient, path: str, body: dict[str, Any], text: str):
    good: dict[str, Any] = {"prompt": text, "tokens": [1], "messages": [{"role": "user", "content": text}]}
    raw = json.dumps({**good, **body}).encode()
    answer = client.post(path, content=raw)
    assert answer.status_code in (200, 400, 404, 408), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@given(st.binary(max_size=60), st.integers(0, 60))
@settings(max_examples=50, suppress_health_check=list(HealthCheck))
def test_any_bytes_are_answered_or_refused(client: TestClient, spoiled: bytes, at: int):
    body = b'{"prompt": "some text", "n": 2, "stop": ["a", "b"], "logit_bias": {"1": 2.5}}'
    answer = client.post("/v1/completions", content=body[:at] + spoiled + body[at:])
    assert answer.status_code in (200, 400, 404)
