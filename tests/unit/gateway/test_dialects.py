"""Bodies of every dialect become the same kind of request."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_ext.errors import (
    BodyTooLarge,
    FairlaneError,
    LimitExceeded,
    NoBackend,
    NotAuthenticated,
    QuotaExceeded,
    RequestRefused,
    UnsupportedMediaType,
)
from router_ext.gateway.chats import pass_chat
from router_ext.gateway.dialects import (
    Lengths,
    decode_request,
    dialect_of,
    error_response,
    fit_lengths,
    read_body,
    refusal_of,
)
from router_ext.gateway.generation import Dialect, GenerationRequest, ModelLimits
from router_ext.wire.tgi import decode_error

LIMITS = ModelLimits(model_id="m", max_input_tokens=200, max_total_tokens=300)
JSON = "application/json"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def decode(path: str, body: Any, limits: ModelLimits = LIMITS) -> GenerationRequest:
    return decode_request(path, JSON, json.dumps(body).encode(), limits)


def native(**parameters: Any) -> GenerationRequest:
    return decode("/generate", {"inputs": "Hi", "parameters": parameters})


def chat(**fields: Any) -> GenerationRequest:
    return decode("/v1/chat/completions", {**CHAT, **fields})


def test_the_client_librarys_body_full_of_nulls_is_taken() -> None:
    request = decode(
        "/",
        {
            "inputs": "Hi",
            "stream": False,
            "parameters": {
                "do_sample": False,
                "max_new_tokens": 20,
                "repetition_penalty": None,
                "frequency_penalty": None,
                "return_full_text": False,
                "stop": [],
                "seed": None,
                "temperature": None,
                "top_k": None,
                "top_p": None,
                "truncate": None,
                "typical_p": None,
                "best_of": None,
                "watermark": False,
                "details": True,
                "decoder_input_details": False,
                "top_n_tokens": None,
                "grammar": None,
            },
        },
    )
    assert request.parameters == {"do_sample": False}
    assert (request.max_new_tokens, request.wants_details, request.is_stream) == (20, True, False)
    assert request.passthrough is None


def test_the_client_librarys_chat_body_full_of_nulls_is_taken() -> None:
    nulls = ("frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_tokens", "n", "presence_penalty")
    more = ("seed", "temperature", "top_p", "tools", "tool_prompt", "tool_choice", "stop", "repetition_penalty")
    request = chat(model="tgi", stream=False, **dict.fromkeys((*nulls, *more)))
    assert request.parameters == {"do_sample": True}
    assert request.passthrough is None


@pytest.mark.parametrize(
    ("body", "is_greedy"),
    [
        ({"inputs": "Hi"}, False),
        ({"inputs": "Hi", "parameters": {}}, True),
        ({"inputs": "Hi", "parameters": {"temperature": 1.0}}, True),
        ({"inputs": "Hi", "parameters": {"temperature": 0.5}}, False),
        ({"inputs": "Hi", "parameters": {"top_k": 3}}, False),
        ({"inputs": "Hi", "parameters": {"do_sample": True}}, False),
        ({"inputs": "Hi", "parameters": {"repetition_penalty": 2}}, True),
    ],
)
def test_who_samples_on_tgis_paths(body: dict[str, Any], is_greedy: bool) -> None:
    assert decode("/generate", body).is_greedy is is_greedy


def test_absent_parameters_mean_sampling_and_an_empty_object_does_not() -> None:
    assert decode("/generate", {"inputs": "Hi"}).parameters == {"do_sample": True}
    assert decode("/generate", {"inputs": "Hi", "parameters": {}}).parameters == {"do_sample": False}


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        ({}, {"do_sample": True}),
        ({"temperature": 0}, {"do_sample": False}),
        ({"temperature": 0.7}, {"do_sample": True, "temperature": 0.7}),
        ({"presence_penalty": 0}, {"do_sample": True}),
        ({"presence_penalty": 0.5}, {"do_sample": True, "repetition_penalty": 2.5}),
        ({"presence_penalty": -0.5, "temperature": 0.0}, {"do_sample": False, "repetition_penalty": 1.5}),
        ({"top_logprobs": 2, "logprobs": True}, {"do_sample": True, "top_n_tokens": 2}),
        ({"n": 3, "logit_bias": [1], "user": "x", "stop": ["a"]}, {"do_sample": True, "stop": ["a"]}),
    ],
)
def test_how_a_chats_fields_map(fields: dict[str, Any], parameters: dict[str, Any]) -> None:
    request = chat(**fields)
    assert request.parameters == parameters
    assert request.chat_body == CHAT
    assert request.prompts == ()


def test_a_chat_says_how_much_under_two_names() -> None:
    assert chat(max_tokens=3).max_new_tokens == chat(max_completion_tokens=3).max_new_tokens == 3


@pytest.mark.parametrize(
    ("path", "stream", "dialect", "is_stream"),
    [
        ("/", None, Dialect.COMPAT, False),
        ("/", False, Dialect.COMPAT, False),
        ("/", True, Dialect.COMPAT, True),
        ("/generate", True, Dialect.GENERATE, False),
        ("/generate_stream", False, Dialect.GENERATE_STREAM, True),
    ],
)
def test_the_root_path_alone_chooses_by_stream(
    path: str, stream: bool | None, dialect: Dialect, is_stream: bool
) -> None:
    body: dict[str, Any] = {"inputs": "Hi"}
    if stream is not None:
        body["stream"] = stream
    request = decode(path, body)
    assert (request.dialect, request.is_stream) == (dialect, is_stream)


@pytest.mark.parametrize(
    ("path", "tag", "asked", "full"),
    [
        ("/", None, None, True),
        ("/", "text-generation", None, True),
        ("/", "image-text-to-text", None, False),
        ("/", None, False, False),
        ("/generate", None, None, False),
        ("/generate", None, True, True),
    ],
)
def test_who_gets_the_prompt_back(path: str, tag: str | None, asked: bool | None, full: bool) -> None:
    limits = ModelLimits(model_id="m", max_input_tokens=9, max_total_tokens=10, model_pipeline_tag=tag)
    body = {"inputs": "Hi", "parameters": {"return_full_text": asked}}
    assert decode(path, body, limits).return_full_text is full


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (native(grammar={"type": "regex", "value": "a"}), "grammar"),
        (native(best_of=2, do_sample=True), "best_of"),
        (native(decoder_input_details=True), "decoder_input_details"),
        (native(best_of=1), None),
        (chat(tools=[TOOL]), "tools"),
        (chat(tools=[TOOL], tool_choice="required"), "tools"),
        (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}), "tools"),
        (chat(tools=[TOOL], tool_choice="none"), None),
        (chat(tools=[]), None),
        (chat(response_format={"type": "json_object", "value": SCHEMA}), "response_format"),
        (
            chat(
                messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]
            ),
            "image",
        ),
    ],
)
def test_what_is_passed_through_whole(request_: GenerationRequest, reason: str | None) -> None:
    assert (request_.passthrough.reason if request_.passthrough else None) == reason


def test_a_passed_body_is_the_clients_but_for_the_model_and_usage() -> None:
    body = {**CHAT, "model": "my-alias", "tools": [TOOL], "stream": True, "user": "u"}
    request = decode("/v1/chat/completions", body)
    assert request.passthrough is not None
    assert json.loads(request.passthrough.body) == {
        **body,
        "model": "tgi",
        "stream_options": {"include_usage": True},
    }
    unchanged = chat(tools=[TOOL]).passthrough
    assert unchanged is not None
    assert json.loads(unchanged.body) == {**CHAT, "tools": [TOOL]}
    whole = pass_chat(chat(model="x", stop="a"), "bos")
    assert json.loads(whole.body) == {**CHAT, "model": "tgi", "stop": ["a"]}


def test_several_prompts_are_several_generations() -> None:
    request = decode("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3, "temperature": 0})
    assert request.prompts == ("a", "b")
    assert request.passthrough is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"inputs": "Hi", "parameters": {"temperature": 0.0, "stop": 3}}, "invalid type: integer `3`"),
        ({"inputs": "Hi", "parameters": {"temperature": 0.0, "top_p": 1}}, "`temperature`"),
        ({"inputs": "", "parameters": {"truncate": 0}}, "`inputs` cannot be empty"),
        ({"inputs": "", "parameters": {"top_k": 0}}, "`top_k`"),
        ({"inputs": "Hi", "parameters": {"top_p": 1.5}}, "`top_p`"),
        ({"inputs": "Hi", "parameters": {"temperature": 1e-60}}, "`temperature`"),
        ({"inputs": "Hi", "parameters": {"do_sample": 1}}, "invalid type: integer `1`, expected a boolean"),
        ({"inputs": "Hi", "parameters": {"stop": ["a", 1]}}, "stop[1]: invalid type: integer `1`, expected a string"),
        ({"inputs": "Hi", "parameters": {"max_new_tokens": 1 << 32}}, "expected u32"),
        ({"inputs": "Hi", "parameters": {"max_new_tokens": True}}, "boolean `true`, expected u32"),
        ({"inputs": "Hi", "parameters": []}, "invalid type: sequence, expected struct GenerateParameters"),
        ({"inputs": "Hi", "parameters": {"grammar": {"type": "regex"}}}, "missing field `value`"),
    ],
)
def test_the_first_fault_is_the_one_told(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefused) as refusal:
        decode("/generate", body)
    assert message in refusal.value.message


@pytest.mark.parametrize(
    "messages",
    [
        "Hi",
        [1],
        [{"content": "Hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "audio"}]}],
        [{"role": 1, "content": "Hi"}],
        [{"role": "assistant", "tool_calls": [{"id": "0"}]}],
    ],
)
def test_messages_of_a_wrong_shape_are_refused(messages: Any) -> None:
    with pytest.raises(RequestRefused):
        chat(messages=messages)


def test_a_tool_call_in_the_history_is_plain_chat() -> None:
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    assert chat(messages=messages).passthrough is None


# --- lengths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_new_tokens", "prompt_tokens", "lengths"),
    [
        (10, 5, Lengths(5, 10)),
        (None, 5, Lengths(5, 295)),
        (100, 200, Lengths(200, 100)),
        (None, 200, Lengths(200, 100)),
    ],
)
def test_lengths_that_fit(max_new_tokens: int | None, prompt_tokens: int, lengths: Lengths) -> None:
    assert fit_lengths(native(max_new_tokens=max_new_tokens), prompt_tokens, LIMITS) == lengths


@pytest.mark.parametrize(
    ("max_new_tokens", "prompt_tokens"), [(101, 200), (1, 201), (None, 201), (None, 300), (None, 9_000), (296, 5)]
)
def test_lengths_that_never_fit_are_refused_with_both_numbers(max_new_tokens: int | None, prompt_tokens: int) -> None:
    with pytest.raises(RequestRefused) as refusal:
        fit_lengths(native(max_new_tokens=max_new_tokens), prompt_tokens, LIMITS)
    assert refusal.value.code == "context_length_exceeded"
    assert str(prompt_tokens) in refusal.value.message
    assert str(300) in refusal.value.message or str(200) in refusal.value.message


def test_a_wish_beyond_one_piece_is_bounded_not_refused() -> None:
    """TGI counts at most 1024 new tokens; what is wanted beyond ends in ``length`` at the model's limit."""
    limits = ModelLimits(model_id="m", max_input_tokens=2_000, max_total_tokens=2_048)
    assert fit_lengths(native(max_new_tokens=100_000), 48, limits) == Lengths(48, 2_000)


def test_truncation_comes_before_the_count() -> None:
    assert fit_lengths(native(truncate=7, max_new_tokens=10), 9_000, LIMITS) == Lengths(7, 10)


# --- errors ------------------------------------------------------------------------------------------------------


def test_size_and_type_are_looked_at_before_the_body() -> None:
    with pytest.raises(BodyTooLarge):
        read_body("/generate", None, b"x" * 11, max_bytes=10)
    for content_type in (None, "", "text/plain", "application/jsonp"):
        with pytest.raises(UnsupportedMediaType):
            read_body("/generate", content_type, b"{")
    assert read_body("/generate", "Application/JSON; charset=utf-8", b"{}").data == {}
    assert read_body("/generate", "application/vnd.x+json", b"{}").data == {}


@pytest.mark.parametrize(
    ("error", "native_status", "openai_status", "kind", "code"),
    [
        (NotAuthenticated("Invalid API key"), 401, 401, "authentication", "invalid_api_key"),
        (RequestRefused("x"), 422, 400, "validation", "invalid_parameter"),
        (BodyTooLarge("x"), 413, 413, "validation", "request_too_large"),
        (LimitExceeded("x", retry_after_s=7.0), 429, 429, "overloaded", "rate_limit_exceeded"),
        (NoBackend("x"), 503, 503, "overloaded", "no_backend_available"),
    ],
)
def test_a_condition_has_its_status_in_every_dialect(
    error: FairlaneError, native_status: int, openai_status: int, kind: str, code: str
) -> None:
    status, headers, body = error_response(error, Dialect.GENERATE, extra=[(b"x-request-id", b"r")])
    assert (status, json.loads(body)) == (native_status, {"error": error.message, "error_type": kind})
    assert dict(headers)[b"x-request-id"] == b"r"
    assert (b"retry-after" in dict(headers)) is (status in (429, 503))
    assert (b"www-authenticate" in dict(headers)) is (status == 401)
    status, _, body = error_response(error, Dialect.CHAT)
    assert (status, json.loads(body)["error"]["code"]) == (openai_status, code)


def test_a_used_up_quota_is_not_to_be_tried_again() -> None:
    headers = dict(error_response(QuotaExceeded("x", retry_after_s=86_000.0), Dialect.CHAT)[1])
    assert headers[b"x-should-retry"] == b"false"
    assert headers[b"retry-after"] == b"120"


def test_a_backends_failure_does_not_leak() -> None:
    body = (
        b'{"error":"Request failed during generation: Server error: 10.0.0.7:3000 refused","error_type":"generation"}'
    )
    error = refusal_of(decode_error(424, body))
    assert error.status_openai == 502
    assert "10.0.0.7" not in error.message


def test_a_backends_verdict_on_the_request_is_told() -> None:
    body = b'{"error":"Template error: no template","error_type":"template_error"}'
    status, _, answer = error_response(refusal_of(decode_error(422, body)), Dialect.GENERATE)
    assert (status, json.loads(answer)) == (422, json.loads(body))


@pytest.mark.parametrize(
    ("path", "dialect"),
    [("/v1/models", Dialect.CHAT), ("/tokenize", Dialect.GENERATE), ("/v1/completions", Dialect.COMPLETIONS)],
)
def test_errors_of_other_paths_have_a_dialect_too(path: str, dialect: Dialect) -> None:
    assert dialect_of(path) is dialect


words = st.text("ab{é ", max_size=4)
scalars = st.none() | st.booleans() | st.integers(-10, 1 << 66) | st.floats(-1e40, 1e40) | words
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
NAMES = [
    *("inputs", "parameters", "stream", "messages", "prompt", "model", "stop", "tools", "tool_choice", "n"),
    *("temperature", "top_p", "response_format", "stream_options", "max_tokens", "seed", "suffix", "logprobs"),
    *("input", "instructions", "text", "include", "metadata", "truncation", "max_output_tokens", "background"),
    *("presence_penalty", "logit_bias", "max_completion_tokens", "guideline", "top_logprobs"),
]
PARAMETERS = ["best_of", "temperature", "top_k", "stop", "truncate", "grammar", "seed", "details", "top_n_tokens"]


@given(
    path=st.sampled_from(
        [
            "/",
            "/generate",
            "/generate_stream",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
            "/invocations",
        ]
    ),
    body=st.dictionaries(st.sampled_from(NAMES), json_values, max_size=6),
    parameters=st.dictionaries(st.sampled_from(PARAMETERS), json_values, max_size=4),
)
def test_any_object_is_decoded_or_refused(path: str, body: dict[str, Any], parameters: dict[str, Any]) -> None:
    """Nothing but a refusal ever comes out of a body, whatever it holds."""
    sound: dict[str, Any] = {"inputs": "Hi", "prompt": "Hi", "input": "Hi", **CHAT}
    for candidate in (body, {**sound, **body}, {**sound, "parameters": parameters}):
        with contextlib.suppress(RequestRefused):
            request = decode(path, candidate)
            assert request.prompts or request.chat_body


item_values = st.sampled_from(
    [None, 1, "x", [], {}, [{"type": "input_text", "text": "x"}], [{"type": "input_text"}], [3]]
)
items = st.dictionaries(
    st.sampled_from(["type", "role", "content", "call_id", "name", "arguments", "output"]),
    item_values | st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "user"]),
)
odd_tools = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["function", 1]), "name": item_values, "parameters": item_values}
)


@given(
    input_=st.lists(items | scalars, max_size=3), tools=st.lists(odd_tools | scalars, max_size=2), choice=json_values
)
def test_any_input_of_a_response_is_decoded_or_refused(input_: Any, tools: Any, choice: Any) -> None:
    for more in ({}, {"tools": tools}, {"tool_choice": choice}, {"text": {"format": choice}}, {"text": choice}):
        with contextlib.suppress(RequestRefused):
            assert decode("/v1/responses", {"input": input_, **more}).chat_body


@given(body=st.binary(max_size=60))
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    with contextlib.suppress(RequestRefused):
        decode_request("/generate", JSON, body, LIMITS)


# --- grammars and tools ------------------------------------------------------------------------------------------


def with_definitions(parameters: dict[str, Any], *, count: int = 1) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(count)]


def test_a_request_says_what_its_answer_is_forced_into() -> None:
    grammar = {"type": "json", "value": SCHEMA}
    assert native(grammar=grammar).grammar == grammar
    plain = chat()
    assert (plain.grammar, plain.tools) == (None, None)
    assert chat(response_format=grammar).grammar == grammar
    tools = chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}).tools
    assert tools is not None
    assert (tools.tools, tools.mode, tools.name) == ([TOOL], "function", "f")
    assert chat(tools=[TOOL], tool_choice="none").tools is None


@pytest.mark.parametrize(
    ("request_", "place"),
    [
        (native(grammar={"type": "json", "value": SCHEMA}), ("parameters", "grammar", "value")),
        (
            native(grammar={"type": "json_schema", "value": {"schema": SCHEMA}}),
            ("parameters", "grammar", "value", "schema"),
        ),
        (chat(response_format={"type": "json_object", "value": json.dumps(SCHEMA)}), ("response_format", "value")),
        (
            chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}),
            ("response_format", "value", "schema"),
        ),
    ],
)
def test_a_passed_body_is_built_late_with_another_schema(request_: GenerationRequest, place: tuple[str, ...]) -> None:
    other = {"properties": {"b": {"type": "integer"}}}
    assert request_.passthrough is not None
    body = json.loads(request_.passthrough.with_schema(other).body)
    before = json.loads(request_.passthrough.body)
    *path, last = place
    changed, kept = body, before
    for name in path:
        changed, kept = changed[name], kept[name]
    assert changed[last] == other
    kept[last] = other
    assert body == before


def test_a_passed_body_is_built_late_with_other_functions() -> None:
    passed = chat(tools=[TOOL, {"type": "function", "function": {"name": "g", "parameters": SCHEMA}}]).passthrough
    assert passed is not None
    other = {"name": "g", "parameters": {"properties": {}}}
    tools = json.loads(passed.with_functions([other, {"name": "no_tool"}]).body)["tools"]
    assert tools == [TOOL, {"type": "function", "function": other}]


@pytest.mark.parametrize(
    ("parameters", "count", "code", "problem"),
    [
        (
            {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}}}},
            1,
            "grammar_invalid",
            "refers to itself",
        ),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/d0"}},
                "$defs": {
                    **{f"d{n}": {"properties": {k: {"$ref": f"#/$defs/d{n + 1}"} for k in "ab"}} for n in range(22)},
                    "d22": {"type": "string"},
                },
            },
            1,
            "grammar_too_expensive",
            "2000 nodes",
        ),
        (
            {"properties": {f"a{n}": {"type": "integer"} for n in range(500)}, "$defs": {}},
            9,
            "grammar_too_expensive",
            "bytes of parameters",
        ),
    ],
)
def test_definitions_in_a_function_that_are_endless_or_too_many(
    parameters: dict[str, Any], count: int, code: str, problem: str
) -> None:
    with pytest.raises(RequestRefused, match=problem) as refusal:
        chat(tools=with_definitions(parameters, count=count))
    assert refusal.value.code == code
    assert refusal.value.param is not None
    assert refusal.value.param.startswith("tools")


@pytest.mark.parametrize("depth", [127, 128, 5_000])
def test_a_body_nested_deeper_than_tgi_reads_is_refused(depth: int) -> None:
    levels = depth - 1  # the body itself is one
    raw = b'{"inputs":"Hi","more":' + b"[" * levels + b"]" * levels + b"}"
    if depth <= 127:
        assert decode_request("/generate", JSON, raw, LIMITS).prompts == ("Hi",)
    else:
        with pytest.raises(RequestRefused, match="JSON"):
            decode_request("/generate", JSON, raw, LIMITS)


def test_brackets_in_a_text_are_no_nesting() -> None:
    assert decode("/generate", {"inputs": "[{" * 500}).prompts == ("[{" * 500,)


# --- responses ---------------------------------------------------------------------------------------------------


def response(**fields: Any) -> GenerationRequest:
    return decode("/v1/responses", {"input": "Hi", **fields})


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
SECOND = {"type": "function", "name": "g", "description": "d", "parameters": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "chat_"),
    [
        ({}, {}),
        ({"instructions": "Be brief."}, {"messages": [{"role": "system", "content": "Be brief."}, *CHAT["messages"]]}),
        ({"max_output_tokens": 7, "temperature": 0, "top_p": 1}, {"max_tokens": 7, "temperature": 0}),
        ({"stream": True, "model": "m"}, {"stream": True, "model": "m"}),
        ({"top_logprobs": 2, "include": ["message.output_text.logprobs"]}, {"top_logprobs": 2, "logprobs": True}),
        ({"tools": [FUNCTION]}, {"tools": [TOOL], "tool_choice": "auto"}),
        ({"tools": [FUNCTION], "tool_choice": "required"}, {"tools": [TOOL], "tool_choice": "required"}),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}},
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        (
            {
                "tools": [FUNCTION, SECOND],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "f"}],
                },
            },
            {"tools": [TOOL], "tool_choice": "required"},
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
            {"response_format": {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}},
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]},
        ),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "a"}]},
                ]
            },
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                            {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
                        ],
                    },
                    {"role": "tool", "tool_call_id": "1", "content": "a"},
                ]
            },
        ),
    ],
)
def test_a_response_is_asked_as_the_chat_it_stands_for(fields: dict[str, Any], chat_: dict[str, Any]) -> None:
    found, meant = response(**fields), chat(**chat_)
    assert found.dialect is Dialect.RESPONSES
    assert msgspec.structs.replace(found, dialect=Dialect.CHAT, echo={}) == meant


def test_a_response_repeats_its_request() -> None:
    echo = response(metadata={"a": "b"}, tools=[FUNCTION], temperature=0.5, store=True, user="u", instructions="i").echo
    assert (echo["metadata"], echo["tools"], echo["temperature"], echo["user"]) == ({"a": "b"}, [FUNCTION], 0.5, "u")
    assert (echo["instructions"], echo["store"], echo["text"]) == ("i", False, {"format": {"type": "text"}})
