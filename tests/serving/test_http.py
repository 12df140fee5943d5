"""The HTTP API over a real connection: OpenAI's client, streams, refusals, clients that leave or do not read."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from bench.shared.fake_engine import FakeEngine, ServedApp, make_prompts, wait_until
from meshwright.data.records.examples import ExampleEncoder
from meshwright.data.tokenizers.detokenizer import IncrementalDetokenizer
from meshwright.errors import RankLost
from meshwright.serving.gate import HttpSettings
from meshwright.serving.http import HttpApp
from meshwright.serving.metrics import ServingMetrics
from meshwright.serving.prompts import Prompts
from meshwright.serving.protocol.bodies import Body, CompletionBody, DetokenizeBody, parse_body
from meshwright.serving.protocol.errors import ApiError
from meshwright.serving.protocol.jobs import build_job
from meshwright.serving.replica import OutputCallback
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import TokenResult
from meshwright.serving.streaming import JobRunner
from meshwright.serving.waiting_line import Refusal

KEY = "a-key-for-tests"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return make_prompts(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def served(prompts: Prompts) -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine(prompts)
    settings = HttpSettings(
        "m",
        api_keys=["another", KEY],
        cors_origins=["https://page.example"],
        body_bytes=100_000,
        all_body_bytes=150_000,
        body_seconds=0.3,
        stream_bytes=2_000,
        drain_seconds=1.0,
    )
    with ServedApp(HttpApp(engine, prompts, settings)) as app:
        yield engine, app.url


@pytest.fixture
def engine(served: tuple[FakeEngine, str], prompts: Prompts) -> Iterator[FakeEngine]:
    """The engine in its initial state, idle before and after the test."""
    fresh = FakeEngine(prompts)
    vars(served[0]).update(vars(fresh))
    yield served[0]
    wait_until(lambda: not served[0].running)


@pytest.fixture
def http(served: tuple[FakeEngine, str], engine: FakeEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[1], headers={"authorization": f"Bearer {KEY}"}, timeout=10) as client:
        yield client


@pytest.fixture
def client(served: tuple[FakeEngine, str], engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key=KEY, max_retries=0, timeout=10) as made:
        yield made


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of a stream's events; the last one must be [DONE]."""
    *lines, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(line) for line in lines]


def address(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def head(size: int) -> bytes:
    """The head of a request with a body of `size` bytes."""
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", f"Content-Length: {size}"]
    return "\r\n".join([*lines, "", ""]).encode()


# --- answers


def test_openai_completion_equals_its_stream(client: openai.OpenAI):
    whole = client.completions.create(model="m", prompt="hello", max_tokens=50)
    assert whole.choices[0].text == "The quick brown fox"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.total_tokens == whole.usage.prompt_tokens + 10
    parts = list(
        client.completions.create(
            model="m", prompt="hello", max_tokens=50, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(part.choices[0].text for part in parts[:-1]) == whole.choices[0].text
    assert parts[-2].choices[0].finish_reason == "stop"
    assert [part.usage for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].usage == whole.usage and parts[-1].choices == []


def test_openai_chat_equals_its_stream(client: openai.OpenAI):
    whole = client.chat.completions.create(model="m", messages=HELLO, logprobs=True, top_logprobs=2, n=2)
    assert [choice.message.content for choice in whole.choices] == ["The quick brown fox"] * 2
    content = whole.choices[1].logprobs.content
    assert bytes(byte for token in content[:-1] for byte in token.bytes) == b"The quick brown fox"
    assert all(len(token.top_logprobs) == 2 for token in content)
    parts = list(client.chat.completions.create(model="m", messages=HELLO, logprobs=True, top_logprobs=2, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "The quick brown fox"
    streamed = [token for part in parts if part.choices[0].logprobs for token in part.choices[0].logprobs.content]
    assert streamed == content


def test_several_prompts_and_choices_are_numbered_in_order(http: httpx.Client, engine: FakeEngine):
    body = {"prompt": [[5, 6], [7, 8, 9]], "n": 2, "max_tokens": 3, "return_token_ids": True}
    whole = http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [request.tokens for request in engine.requests] == [(5, 6), (5, 6), (7, 8, 9), (7, 8, 9)]
    assert [request.choice for request in engine.requests] == [0, 1, 0, 1]
    assert len({request.id for request in engine.requests}) == 4
    assert {request.sampling.seed for request in engine.requests} == {whole["seed"]}
    assert whole["usage"]["prompt_tokens"] == 5 and whole["usage"]["completion_tokens"] == 12
    assert all(choice["token_ids"] == engine.tokens[:3] for choice in whole["choices"])
    streamed = events(http.post("/v1/completions", json={**body, "stream": True}))
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in streamed if event["choices"][0]["index"] == choice["index"]]
        assert "".join(event["text"] for event in mine) == choice["text"]
        assert [token for event in mine for token in event["token_ids"]] == choice["token_ids"]


def test_echo_scores_prompt_for_lm_eval(http: httpx.Client):
    """The fields that lm-eval's local-completions sends and reads."""
    body = {"model": "m", "prompt": [[5, 6, 7]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    (choice,) = http.post("/v1/completions", json={**body, "echo": True}).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None and logprobs["token_logprobs"][1:3] == [-1.006, -1.007]
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(logprobs["text_offset"]) == 4
    assert all(token in top for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True))
    none = http.post("/v1/completions", json={**body, "echo": True, "max_tokens": 0}).json()
    assert none["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:3]
    assert none["usage"]["completion_tokens"] == 0


def test_continuous_usage_counts_up_to_total(http: httpx.Client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hello", "max_tokens": 5, "stream": True, "stream_options": options}
    counts = [event["usage"]["completion_tokens"] for event in events(http.post("/v1/completions", json=body))]
    assert counts == [1, 2, 3, 4, 5, 5]


def test_stop_string_ends_the_answer_and_the_request(http: httpx.Client, engine: FakeEngine):
    engine.step_seconds = 0.001
    body = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True, "stop": ["nope", "k br"]}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The quic", "stop", "k br")
    (choice,) = http.post("/v1/completions", json={**body, "include_stop_str_in_output": True}).json()["choices"]
    assert choice["text"] == "The quick br"
    assert not engine.running


def test_options_reach_the_engine_and_null_is_the_default(http: httpx.Client, engine: FakeEngine, prompts: Prompts):
    assert http.post("/v1/completions", json={"prompt": "x", "n": None, "stop": None, "logit_bias": None}).is_success
    sampling = engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.stop_tokens) == (1, 1, 16, prompts.ends)
    options = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "seed": -7, "min_tokens": 2, "max_tokens": 9,
    }  # fmt: skip
    more = {"logit_bias": {"5": 1}, "stop_token_ids": [8], "ignore_eos": True, "priority": 3, "cache_salt": "s"}
    answer = http.post("/v1/completions", json={"prompt": "x", "unknown": 1, "timeout": 50, **options, **more}).json()
    request = engine.requests[-1]
    assert {name: getattr(request.sampling, name) for name in options} == options
    assert request.sampling.logit_bias == {5: 1.0} and request.sampling.stop_tokens == {8}
    assert (request.priority, request.cache_salt, answer["seed"]) == (3, "s", -7)
    assert request.deadline is not None


def test_prompt_is_truncated_and_scored_as_vllm_does(http: httpx.Client, engine: FakeEngine):
    body = {"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 3, "prompt_logprobs": 1, "max_tokens": 1, "logprobs": 2}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert engine.requests[-1].tokens == (6, 7, 8)
    none, *scored = choice["prompt_logprobs"]
    assert none is None and [list(logprobs) for logprobs in scored] == [["7", "0"], ["8", "0"]]
    assert scored[0]["7"]["logprob"] == -1.007 and scored[0]["0"]["rank"] == 1
    assert len(choice["logprobs"]["tokens"]) == 1
    body = {**body, "return_tokens_as_token_ids": True, "echo": True, "truncate_prompt_tokens": -1}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"]["tokens"][:4] == ["token_id:5", "token_id:6", "token_id:7", "token_id:8"]


def test_llama_cpp_stream_concatenates_to_its_completion(http: httpx.Client):
    body = {"prompt": "hello", "n_predict": 20, "stop": ["brown"], "return_tokens": True, "n_probs": 1}
    whole = http.post("/completion", json=body).json()
    assert (whole["content"], whole["stop_type"], whole["stopping_word"]) == ("The quick ", "word", "brown")
    assert whole["tokens_predicted"] == len(whole["tokens"]) == len(whole["completion_probabilities"])
    text = http.post("/completion", json={**body, "stream": True}).text
    streamed = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    assert "".join(event["content"] for event in streamed) == whole["content"]
    assert [event["stop"] for event in streamed] == [False] * (len(streamed) - 1) + [True]


def test_tokens_and_text_convert_in_both_directions(http: httpx.Client, prompts: Prompts):
    tokens = prompts.encode("naïve fox", add_start=False)
    assert http.post("/tokenize", json={"content": "naïve fox"}).json()["tokens"] == tokens
    assert http.post("/tokenize", json={"prompt": "naïve fox"}).json()["tokens"] == [prompts.start, *tokens]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["content"] == "naïve fox"
    rendered = http.post("/apply-template", json={"messages": HELLO}).json()["prompt"]
    assert rendered == "<|endoftext|>### Instruction:\nhello\n\n### Response:\n"
    asked = http.post("/tokenize", json={"messages": HELLO, "return_token_strs": True}).json()
    assert "".join(asked["token_strs"]) == rendered and asked["count"] == len(asked["tokens"])


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_rendered_conversation_has_the_tokens_of_the_chat(http: httpx.Client, engine: FakeEngine, path: str):
    assert http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1}).is_success
    prompt = http.post("/apply-template", json={"messages": HELLO}).json()["prompt"]
    for change in ({"parse_special": True}, {}):
        assert http.post(path, json={"prompt": prompt, "max_tokens": 1, "n_predict": 1, **change}).is_success
    chat, parsed, plain = (request.tokens for request in engine.requests)
    assert parsed == chat and len(plain) > len(chat)
    for name in ("prompt", "content"):
        body = {name: prompt, "parse_special": True}
        assert http.post("/tokenize", json=body).json()["tokens"] == list(chat)
    refused = http.post("/v1/chat/completions", json={"messages": HELLO, "parse_special": True})
    assert refused.json()["error"]["param"] == "parse_special"


def test_header_of_the_next_turn_is_left_out_where_asked(http: httpx.Client, engine: FakeEngine):
    body = {"messages": HELLO, "add_generation_prompt": False}
    assert http.post("/apply-template", json=body).json()["prompt"] == "<|endoftext|>### Instruction:\nhello\n\n"
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).is_success
    assert list(engine.requests[-1].tokens) == tokens
    assert len(http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]) > len(tokens)


def test_logit_bias_is_also_a_list_of_pairs(http: httpx.Client, engine: FakeEngine):
    body = {"prompt": "x", "n_predict": 1, "logit_bias": [[5, 1.5], [6, False], [7, -2], [8, 0]]}
    assert http.post("/completion", json=body).is_success
    assert engine.requests[-1].sampling.logit_bias == {5: 1.5, 6: -100.0, 7: -2.0, 8: 0.0}
    for wrong in ([["text", 1]], [[5]], [[5, 101]], [[5, True]], [5], [[-1, 1]]):
        answer = http.post("/completion", json={**body, "logit_bias": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias"), wrong


def test_model_and_engine_are_described(http: httpx.Client, client: openai.OpenAI, prompts: Prompts):
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"
    assert http.get("/tokenizer_info").json()["eos_token"] == "<|endoftext|>"
    properties = http.get("/props").json()
    assert properties["engine"] == {"layout": "dp1", "instruction_set": "none"}
    assert properties["default_generation_settings"]["n_ctx"] == prompts.max_length


# --- refusals


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 20, "n": 100}, "n"),
        ({"prompt": ["a"] * 577}, "n"),  # more than the engine runs and queues: no retry could succeed
        ({"prompt": [1, 10**6]}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 512}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop": "x" * 129}, "stop"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"seed": 2**63}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"timeout": 0}, "timeout"),
        ({"suffix": "end"}, "suffix"),
        ({"guided_json": {}}, "guided_json"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
    ids=str,
)
def test_wrong_or_unsupported_field_is_named(http: httpx.Client, change: dict[str, Any], param: str):
    answer = http.post("/v1/completions", json={"prompt": "hello", **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"]


@pytest.mark.parametrize(
    ("path", "body", "message", "code"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         'messages[0].content[0] is an image ("type": "image_url"): only text is supported', None),
        ("completions", {"prompt": "a", "stop": ["x"] * 33}, "stop: should have at most 32 items, not 33", None),
        ("completions", {"prompt": "a", "stop": 5}, "stop: should be a valid string, or should be a valid list", None),
        ("completions", {"prompt": [[1, -2]]}, "prompt: [0][1] should be greater than or equal to 0", None),
        ("completions", {"prompt": ["a"] * 1025}, "prompt: should have at most 1024 items, not 1025", None),
        ("completions", {"prompt": [[]]}, "prompt: [0] should have at least 1 item, not 0", None),
        ("completions", {"prompt": {}}, "prompt: should be a valid string, or should be a valid list", None),
        ("completions", {"prompt": "a " * 9000},
         "the prompt has 18,000 characters, more than the maximum length of 512 tokens can hold",
         "context_length_exceeded"),
    ],
)  # fmt: skip
def test_error_says_only_what_is_wrong(http: httpx.Client, path: str, body: dict[str, Any], message: str, code: str):
    answer = http.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["message"], error["code"]) == (400, message, code)


def test_tokens_of_all_prompts_and_choices_are_limited(tmp_path: Path):
    body = CompletionBody.model_validate({"prompt": [[5] * 20_000] * 8, "n": 128})
    with pytest.raises(ApiError, match="at most 16,777,216") as caught:
        build_job(body, make_prompts(tmp_path, max_length=2**20), "m", "id")
    assert caught.value.param == "n"


def test_length_is_named_as_the_body_names_it(http: httpx.Client):
    error = http.post("/completion", json={"prompt": "a", "n_predict": 512}).json()["error"]
    assert error["param"] == "n_predict" and error["message"].endswith("n_predict is 512")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x", "tool_calls": [1]}]}, "messages[1].tool_calls[0]"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0]"),
        ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "weather"}}]}, "tools"),  # not in its template
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"echo": True}, "echo"),
    ],
    ids=str,
)
def test_wrong_chat_field_is_named(http: httpx.Client, change: dict[str, Any], param: str):
    answer = http.post("/v1/chat/completions", json={"messages": HELLO, **change})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TOOL_TEMPLATE = (  # as Qwen's, shortened
    "{%- if tools %}{{ '<tools>' }}{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}{{ '</tools>' }}{%- endif %}"
    "{%- for m in messages %}{{ '<' + m.role + '>' }}"
    "{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{%- endif %}{{ m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}{{ call.id + call.function.name }}"
    "{%- for key, value in call.function.arguments.items() %}{{ key + '=' + value }}{%- endfor %}{%- endfor %}"
    "{%- if m.role == 'tool' %}{{ '@' + m.tool_call_id + (m.name or '') }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<assistant>' }}{{ '</think>' if enable_thinking is false }}{%- endif %}"
)


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_tools_calls_and_results_of_a_request_are_rendered_as_transformers_does(
    http: httpx.Client, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, variables: dict[str, Any], choice: str
):
    assert prompts._chat is not None
    template = replace(prompts._chat.template, source=TOOL_TEMPLATE)
    monkeypatch.setattr(prompts, "_chat", ExampleEncoder(prompts._chat.tokenizer, template))
    arguments = {"city": "Oslo"}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}
    messages: list[dict[str, Any]] = [
        *HELLO,
        {"role": "assistant", "content": None, "reasoning_content": "Ask.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": [{"type": "text", "text": "sun"}]},
    ]
    body = {"messages": messages, "tools": [WEATHER], "tool_choice": choice, "chat_template_kwargs": variables}
    shown = http.post("/apply-template", json=body).json()["prompt"]
    read = json.loads(json.dumps(messages))
    read[1]["tool_calls"][0]["function"]["arguments"] = arguments
    read[2]["content"] = "sun"
    theirs = PreTrainedTokenizerFast(tokenizer_object=prompts.tokenizer, chat_template=TOOL_TEMPLATE)
    wanted = {"tokenize": False, "add_generation_prompt": True, **variables}
    assert shown == theirs.apply_chat_template(read, tools=[WEATHER], **wanted)
    assert "<think>Ask.</think>c1weathercity=Oslo<tool>sun@c1weather<assistant>" in shown
    assert shown.endswith("</think>") == bool(variables)
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert prompts.decode(tokens) == shown
    answer = http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    lost = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    monkeypatch.setattr(prompts, "_chat", ExampleEncoder(prompts._chat.tokenizer, replace(template, source="x")))
    error = http.post("/v1/chat/completions", json={"messages": lost, "max_tokens": 1}).json()["error"]
    assert error["param"] == "messages" and "leaves out the function weather" in error["message"]


def test_neutral_request_fields_are_accepted(http: httpx.Client):
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "suffix": None, "user": "u"}
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "n": 1, "best_of": 1, "metadata": {"a": "b"}, **neutral}
    assert http.post("/v1/chat/completions", json=body).is_success
    assert http.post("/apply-template", json=body).json()["prompt"].count("hello") == 1


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[", b"[]", b"null", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', b'"x"',
        b"[" * 50_000, b'{"prompt": ' + b"[" * 90 + b"]" * 90 + b"}", b'{"seed": ' + b"1" * 5000 + b"}",
        b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": "x", "temperature": Infinity}',
    ],
    ids=lambda body: body[:24].decode(errors="replace"),
)  # fmt: skip
def test_body_without_json_object_is_answered_with_400(http: httpx.Client, body: bytes):
    answer = http.post("/v1/completions", content=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_invalid_tokens_and_unknown_models_are_refused(http: httpx.Client, client: openai.OpenAI):
    for tokens, reason in (([1, 10**6], "is not in the model's vocabulary"), ([-1], "[0] should be"), ([2**70], "[0]")):
        answer = http.post("/v1/completions", json={"prompt": tokens})
        assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not served here"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="the maximum length is 512 tokens") as caught:
        client.completions.create(model="m", prompt="hello " * 400)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("model", "name"), [(DetokenizeBody, "tokens"), (CompletionBody, "prompt")])
def test_invalid_list_is_refused_at_first_wrong_value(model: type[Body], name: str):
    """Errors for each of millions of values would take gigabytes."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate({name: [-1] * 1000})
    assert caught.value.error_count() <= 4  # one for each type that the field may have


def test_unknown_path_or_method_returns_error_object(http: httpx.Client):
    for answer, status in ((http.get("/nope"), 404), (http.get("/v1/completions"), 405), (http.put("/health"), 405)):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert http.head("/health").is_success and http.put("/health").headers["allow"] == "GET, HEAD"


def test_only_the_keys_of_the_file_are_admitted(http: httpx.Client):
    for header in ("", KEY, f"Bearer {KEY}x", "Bearer", f"Basic {KEY}"):
        answer = http.get("/v1/models", headers={"authorization": header})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    for key in (KEY, "another"):
        assert http.get("/v1/models", headers={"authorization": f"bearer {key}"}).is_success
    for path in ("/health", "/ready", "/metrics"):
        assert http.get(path, headers={"authorization": ""}).is_success


def test_request_id_is_honoured_and_returned(http: httpx.Client):
    answer = http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "cmpl-mine-1"
    others = [http.get("/nope", headers={"x-request-id": "a b" * 99}).headers["x-request-id"] for _ in range(2)]
    assert len({*others, "a b" * 99}) == 3


def test_cross_origin_pages_are_refused(http: httpx.Client):
    for origin, allowed in (("https://page.example", "https://page.example"), ("https://evil.example", None)):
        answer = http.get("/health", headers={"origin": origin})
        assert answer.headers.get("access-control-allow-origin") == allowed


def test_full_queue_returns_429_with_retry_after(client: openai.OpenAI, http: httpx.Client, engine: FakeEngine):
    engine.refusal = Refusal("tokens", 2.34)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="m", prompt="x", stream=True)
    assert caught.value.code == "queue_tokens"
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.response.headers["retry-after-ms"] == "2340"
    assert 'requests_refused_total{model_name="m",reason="tokens"}' in http.get("/metrics").text
    assert engine.requests == []


def test_openai_client_waits_at_most_a_minute_at_a_time(
    client: openai.OpenAI, http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """It ignores a longer `Retry-After` and spends its retries within seconds; other clients get the whole wait."""
    engine.refusal, waits = Refusal("requests", 95.0), list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        engine.refusal = Refusal("requests", 35.0) if len(waits) == 1 else None

    answer = http.post("/v1/completions", json={"prompt": "x"})
    assert answer.headers["retry-after"] == "95" and answer.json()["error"]["message"].endswith("retry after 95 s")
    with pytest.raises(openai.RateLimitError, match="retry after 60 s, and again until 95 s have passed"):
        client.completions.create(model="m", prompt="x")
    monkeypatch.setattr("openai._base_client.time", SimpleNamespace(**vars(time) | {"sleep": sleep}))
    assert client.with_options(max_retries=2).completions.create(model="m", prompt="x").choices
    assert waits == [60.0, 35.0]


def test_retry_is_recognised_by_key_path_and_body(http: httpx.Client, engine: FakeEngine):
    engine.refusal = Refusal("requests", 1.0)
    body = {"prompt": "x" * 36}
    for path, change, headers in (
        ("/v1/completions", {}, {}),
        ("/v1/completions", {}, {"x-request-id": "other", "x-stainless-retry-count": "0"}),
        ("/v1/completions", {"prompt": "other"}, {"x-stainless-retry-count": "1"}),
        ("/completion", {}, {}),
        ("/v1/completions", {}, {"authorization": "Bearer another"}),
    ):
        assert http.post(path, json=body | change, headers=headers).status_code == 429
    tickets = engine.tickets
    assert tickets[0].key == tickets[1].key and len({ticket.key for ticket in tickets}) == 4
    assert [ticket.first_attempt for ticket in tickets] == [False, True, False, False, False]
    assert tickets[0].tokens == 12
    assert "meshwright:refused_places_outstanding{" in http.get("/metrics").text


@pytest.mark.parametrize("state", ["starting", "recovering", "draining", "failed"])
def test_health_and_readiness_follow_the_engine(http: httpx.Client, engine: FakeEngine, state: Any):
    engine.state = state
    assert http.get("/ready").status_code == 503
    assert http.get("/health").status_code == (200 if state == "draining" else 503)
    answer = http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == (200 if state == "recovering" else 503)
    assert answer.is_success or answer.headers["retry-after"] == "1"


def test_body_beyond_its_limits_is_refused(http: httpx.Client, served: tuple[FakeEngine, str]):
    assert http.post("/v1/completions", content=b" " * 100_001).status_code == 413
    parts = iter([b" " * 60_000, b" " * 60_000])
    assert http.post("/v1/completions", content=parts).status_code == 413
    with socket.create_connection(address(served[1])) as first, socket.create_connection(address(served[1])) as second:
        for one in (first, second):
            one.sendall(head(90_000) + b" " * 80_000)
        heads = [one.recv(1000) for one in (first, second)]
    answers = {head.split(b"\r\n")[0] for head in heads}
    assert all((b"\r\nretry-after: 1\r\n" in head) == (b" 429 " in head) for head in heads)
    assert answers == {b"HTTP/1.1 408 Request Timeout", b"HTTP/1.1 429 Too Many Requests"}
    assert http.post("/v1/completions", json={"prompt": "x"}).is_success


def test_compressed_body_is_refused_by_the_name_of_its_header(http: httpx.Client):
    """Names of content codings are case-insensitive (RFC 9110, section 8.4.1)."""
    headers = {"content-encoding": "GZip", "content-type": "application/json"}
    answer = http.post("/v1/completions", content=gzip.compress(b'{"prompt": "x"}'), headers=headers)
    assert answer.status_code == 415
    error = answer.json()["error"]
    assert error["code"] == "content_encoding" and "Content-Encoding 'gzip'" in error["message"]
    for coding in ("identity", "Identity", ""):
        assert http.post("/v1/completions", json={"prompt": "x"}, headers={"content-encoding": coding}).is_success


# --- streams and clients


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("step_seconds", [0.01, None])
def test_client_disconnect_cancels_its_requests(
    served: tuple[FakeEngine, str], engine: FakeEngine, stream: bool, step_seconds: float | None
):
    engine.step_seconds = step_seconds
    body = json.dumps({"prompt": "x", "n": 3, "max_tokens": 500, "ignore_eos": True, "stream": stream}).encode()
    with socket.create_connection(address(served[1])) as connection:
        connection.sendall(head(len(body)) + body)
        wait_until(lambda: len(engine.running) == 3)
    assert wait_until(lambda: not engine.running) < 3


def test_stalled_client_is_disconnected(served: tuple[FakeEngine, str], engine: FakeEngine):
    """More events than sockets and buffer hold: the requests end early, and the connection breaks off."""
    large = {"messages": HELLO, "n": 8, "logprobs": True, "top_logprobs": 20, "ignore_eos": True, "stream": True}
    body = json.dumps({**large, "max_completion_tokens": 400}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address(served[1]))
        connection.sendall(head(len(body)).replace(b"completions", b"chat/completions") + body)
        wait_until(lambda: len(engine.requests) == 8)
        wait_until(lambda: not engine.running, 20)
        received = b""
        try:
            while part := connection.recv(1 << 16):
                received += part
        except ConnectionResetError:
            pass
    assert b"[DONE]" not in received and b'"finish_reason":"length"' not in received
    assert received.count(b"data: ") < 8 * 400


def test_lost_request_ends_its_stream_with_an_error(client: openai.OpenAI, engine: FakeEngine):
    engine.error = RankLost("rank 1 was killed")
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="m", prompt="x")
    assert caught.value.status_code == 503
    with pytest.raises(openai.APIError, match="the engine lost this request"):
        list(client.completions.create(model="m", prompt="x", stream=True))


def test_unexpected_error_is_a_500_and_logs_no_text(
    client: openai.OpenAI, engine: FakeEngine, caplog: pytest.LogCaptureFixture
):
    engine.error = ValueError("a secret prompt")
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="m", prompt="x")
    assert caught.value.status_code == 500 and "secret" not in str(caught.value)
    with pytest.raises(openai.APIError):
        list(client.completions.create(model="m", prompt="x", stream=True))
    assert "unexpected ValueError" in caplog.text and "secret" not in caplog.text


class PanicException(BaseException):
    """What a panic of a Rust library looks like."""


@pytest.mark.parametrize("part", ["encode", "detokenizer", "get_token_text"])
@pytest.mark.parametrize("stream", [True, False])
def test_tokenizer_panic_is_error_of_one_request(
    http: httpx.Client, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, part: str, stream: bool
):
    def panic(*_: object) -> None:
        raise PanicException("a secret prompt")

    owner, method = (IncrementalDetokenizer, "push") if part == "detokenizer" else (prompts, part)
    with monkeypatch.context() as patched:
        patched.setattr(owner, method, panic)
        answer = http.post("/v1/completions", json={"prompt": "x", "stream": stream, "logprobs": 1})
    assert answer.status_code == (200 if stream and part != "encode" else 500)
    assert '"code":"internal_error"' in answer.text and "secret" not in answer.text
    assert http.post("/v1/completions", json={"prompt": "x", "stream": stream}).is_success


@pytest.mark.parametrize("step_seconds", [0.02, None])
@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
def test_timeout_is_an_error_at_the_deadline(
    http: httpx.Client, engine: FakeEngine, path: str, step_seconds: float | None
):
    """Never a success with the text so far: also with some text, and if the deadline passes before the submission."""
    engine.step_seconds = step_seconds
    later = 0.1 if step_seconds is None else 0.5  # a busy machine may delay the first step
    for timeout in (later, 1e-6):
        body = {"prompt": "x", "timeout": timeout, "max_tokens": 400, "n_predict": 400, "ignore_eos": True}
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout"), answer.text
        *sent, last, _ = http.post(path, json={**body, "stream": True}).text.rstrip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        assert "cancelled" not in "".join(sent) and bool(sent) == (step_seconds is not None and timeout == later)
    assert not engine.running


def test_concurrent_streams_get_their_own_text(http: httpx.Client, engine: FakeEngine):
    engine.step_seconds = 0.001
    texts: dict[int, str] = {}

    def read(number: int) -> None:
        body = {"prompt": "x", "max_tokens": 1 + number, "stream": True, "return_token_ids": True}
        streamed = events(http.post("/v1/completions", json=body))
        texts[number] = "".join(event["choices"][0]["text"] for event in streamed)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts[11] == "The quick brown fox"
    assert all(texts[11].startswith(texts[number]) for number in range(12)) and len(set(texts.values())) >= 9


def test_metrics_count_tokens_and_ends(http: httpx.Client, engine: FakeEngine):
    def read(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"meshwright:{name}"))

    names = ("prompt_tokens_total", "generation_tokens_total", 'request_success_total{finished_reason="length"')
    counts = (
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
    )
    before = [read(name) for name in (*names, *counts)]
    body = {"prompt": [1, 2, 3], "n": 2, "max_tokens": 4, "echo": True, "logprobs": 0}  # echoed tokens do not count
    assert http.post("/v1/completions", json=body).is_success
    after = [read(name) for name in (*names, *counts)]
    assert [late - early for late, early in zip(after, before, strict=True)] == [6, 8, 2, 2, 6, 2]
    assert read("kv_cache_usage_perc") == 0 and read('kv_blocks{engine="0",model_name="m",state="cached"}') == 10


def test_metrics_divide_the_time_to_first_token_at_the_admission(http: httpx.Client, engine: FakeEngine):
    def read() -> dict[str, float]:
        lines = (line.rpartition(" ") for line in http.get("/metrics").text.splitlines())
        return {name.partition("{")[0]: float(value) for name, _, value in lines if name.startswith("meshwright:")}

    engine.step_seconds, engine.prefill_seconds = 0.05, 0.02
    before = read()
    assert http.post("/v1/completions", json={"prompt": "x", "n": 2, "max_tokens": 3}).is_success
    change = {name: value - before.get(name, 0) for name, value in read().items()}
    queue, prefill = "meshwright:request_queue_time_seconds", "meshwright:request_prefill_time_seconds"
    assert change[f"{queue}_count"] == change[f"{prefill}_count"] == 2
    assert change[f"{prefill}_sum"] == pytest.approx(0.04)
    assert change[f"{queue}_sum"] == pytest.approx(change["meshwright:time_to_first_token_seconds_sum"] - 0.04)


def test_non_finite_logits_are_error_of_their_request(
    http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    async def fail(request: Request) -> AsyncIterator[Output]:
        yield Output(request.id, [], "error")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "_generate", fail)
        answer = http.post("/v1/completions", json={"model": "m", "prompt": "The"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "invalid_logits")
    paths = http.get("/openapi.json").json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/completion"):
        described = paths[path]["post"]["responses"]["500"]
        assert "invalid_logits" in described["description"]
        assert described["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
    assert http.post("/v1/completions", json={"model": "m", "prompt": "The"}).status_code == 200


class ManualEngine(FakeEngine):
    """Gives outputs only when the test calls a request's callback."""

    callbacks: dict[str, OutputCallback]

    def submit(self, request: Request, on_output: OutputCallback) -> None:
        self.callbacks[request.id] = on_output

    def cancel(self, request_id: str) -> None:
        self.callbacks.pop(request_id, None)


def test_choice_that_ends_at_a_stop_string_is_cancelled_while_others_go_on(prompts: Prompts):
    engine = ManualEngine(prompts)
    engine.callbacks = {}
    body = parse_body(CompletionBody, b'{"prompt": ["a", "b"], "stop": "quick", "max_tokens": 50}')

    async def run() -> None:
        job = build_job(body, prompts, "m", "id")
        running = JobRunner(engine, ServingMetrics(engine, "m"), HttpSettings("m")).start(job, lambda *_: None)
        first, second = (choice.request.id for choice in job.choices)
        tokens = iter(prompts.encode("The quick brown", add_start=False))
        while first in engine.callbacks:
            engine.callbacks[first](Output(first, [TokenResult(next(tokens))]))
        assert not running.done() and list(engine.callbacks) == [second]
        engine.callbacks[second](Output(second, [TokenResult(next(tokens))], "length"))
        await running
        assert [choice.finish_reason for choice in job.choices] == ["stop", "length"] and not engine.callbacks

    asyncio.run(run())
