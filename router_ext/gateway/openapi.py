"""The OpenAPI 3.1 document of the data plane, made of the tables that request bodies are checked with.

It says what this router takes, which is more than TGI does (``friendly``): null for any optional field, one stop
string for a list. Shapes stand here; that a value fits the model, or the caller's rights, only an answer can tell.
Answers are described by what is always in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from router_ext import __version__
from router_ext.gateway.agents import AGENT_HEADER, COST_HEADER, INTERACTION_HEADER, MAX_ID_CHARACTERS
from router_ext.gateway.auth import TIER_HEADER
from router_ext.gateway.bodies import SAGEMAKER_PATH
from router_ext.gateway.chats import CHAT_FIELDS, COMPLETION_FIELDS
from router_ext.gateway.native import PARAMETER_FIELDS
from router_ext.gateway.responses import NEEDS_MEMORY, RESPONSE_FIELDS
from router_ext.gateway.shapes import RANGES, Fields

Schema = dict[str, Any]

DOCUMENT_PATH = "/api-doc/openapi.json"
"""Where TGI serves its own."""

_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}


@cache
def document() -> dict[str, Any]:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fairlane router",
            "version": __version__,
            "summary": "TGI's and OpenAI's API in front of a pool of TGI servers.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


# --- paths -------------------------------------------------------------------------------------------------------


def _paths() -> dict[str, Any]:
    chat = _one_or_stream("ChatAnswer")
    health = {
        "200": {"description": "Ready."},
        "503": _json("ErrorNative", "No configuration, no backend, or draining."),
    }
    text = {"text/plain": {"schema": _STRING}}
    return {
        "/": {
            "post": _generation("compat", "CompatRequest", _one_or_stream("GeneratedList", "Generated")),
            "get": _operation("health_root", "As /health.", health),
        },
        "/generate": {"post": _generation("generate", "GenerateRequest", _content("Generated"))},
        "/generate_stream": {"post": _generation("generate_stream", "GenerateRequest", _events())},
        "/v1/chat/completions": {"post": _generation("chat", "ChatRequest", chat, is_openai=True)},
        "/v1/completions": {
            "post": _generation("completions", "CompletionRequest", _one_or_stream("CompletionAnswer"), is_openai=True)
        },
        "/v1/responses": {
            "post": _generation("responses", "ResponsesRequest", _one_or_stream("ResponseAnswer"), is_openai=True)
        },
        SAGEMAKER_PATH: {"post": _generation("invocations", "SagemakerRequest", _one_or_stream("SagemakerAnswer"))},
        "/tokenize": {"post": _question("tokenize", "TokenizeRequest", "Tokens")},
        "/chat_tokenize": {"post": _question("chat_tokenize", "ChatRequest", "ChatTokens")},
        "/info": {
            "get": _operation("info", "What the pool's largest backend says of itself.", _keyed("Info"), keyed=True)
        },
        "/v1/models": {
            "get": _operation(
                "models", "Pools by the names a request may use.", _keyed("Models", openai=True), keyed=True
            )
        },
        "/v1/usage": {
            "get": _operation(
                "usage",
                "Usage of the caller's own tenant, as the control plane's report of the same parameters.",
                {
                    **_keyed("Usage", openai=True),
                    "400": _json("ErrorOpenai", "A parameter that the report does not take."),
                    "404": _json("ErrorOpenai", "Another tenant's, or a router without a control plane."),
                    "429": _json("ErrorOpenai", "More reports than a key may ask for in a minute."),
                },
                keyed=True,
            ),
        },
        "/v1/requests/{id}": {
            "parameters": [{"name": "id", "in": "path", "required": True, "schema": _STRING}],
            "get": _operation(
                "explain",
                "What became of a request of the caller's own tenant.",
                {**_keyed("Explained", openai=True), "404": _json("ErrorOpenai", "Unknown, another's, or too old.")},
                keyed=True,
            ),
        },
        "/health": {"get": _operation("health", "A configuration, a usable backend, not draining.", health)},
        "/ping": {"get": _operation("ping", "As /health.", health)},
        "/livez": {
            "get": _operation("livez", "The process answers.", {"200": {"description": "Alive.", "content": text}})
        },
        "/readyz": {
            "get": _operation(
                "readyz",
                "As /health, with the reason.",
                {str(status): {"description": "State.", "content": text} for status in (200, 503)},
            )
        },
        "/metrics": {
            "get": _operation(
                "metrics",
                "Prometheus metrics that name no tenant.",
                {"200": {"description": "Text exposition.", "content": text}},
            )
        },
        DOCUMENT_PATH: {
            "get": _operation(
                "openapi",
                "This document.",
                {
                    "200": {
                        "description": "OpenAPI 3.1.",
                        "content": {"application/json": {"schema": {"type": "object"}}},
                    }
                },
            )
        },
    }


def _operation(name: str, summary: str, responses: Mapping[str, Any], *, keyed: bool = False) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        **({"security": [{"bearer": []}, {"header": []}]} if keyed else {}),
        "responses": dict(responses),
    }


def _generation(name: str, body: str, content: dict[str, Any], *, is_openai: bool = False) -> dict[str, Any]:
    shape = "Error" if name == "invocations" else "ErrorOpenai" if is_openai else "ErrorNative"
    operation = _operation(name, "Generate text.", _responses(content, shape, _GENERATION), keyed=True)
    operation["parameters"] = _request_headers()
    operation["requestBody"] = _body(body)
    return operation


def _question(name: str, body: str, answer: str) -> dict[str, Any]:
    responses = _responses(_content(answer), "ErrorNative", _GENERATION)
    operation = _operation(name, "Ask a backend's tokenizer.", responses, keyed=True)
    operation["requestBody"] = _body(body)
    return operation


def _keyed(answer: str, *, openai: bool = False) -> dict[str, Any]:
    shape = "ErrorOpenai" if openai else "ErrorNative"
    return _responses(_content(answer), shape, {401: _GENERATION[401], 403: _GENERATION[403], 503: _GENERATION[503]})


_GENERATION = {
    400: "Not what can be served (OpenAI's paths; elsewhere for bodies that are not JSON).",
    401: "No key, or a bad one.",
    403: "A tier or a model this key may not use, a suspended tenant, or stopped by an operator.",
    404: "No such model.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    422: "Not what can be served (TGI's paths).",
    429: "Over a limit or a quota, or there are too many before it.",
    502: "The backend failed, and nothing had been shown.",
    503: "No backend, no configuration, draining, or the books are full.",
}


def _responses(content: dict[str, Any], error: str, statuses: Mapping[int, str]) -> dict[str, Any]:
    out: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status, text in statuses.items():
        out[str(status)] = _json(error, text)
        if status == 408:  # written by the server, before there is a dialect
            out["408"] = {"description": text, "content": {"text/plain": {"schema": _STRING}}}
        if status in (429, 503):
            # A quota that is used up has no hint: waiting does not help (``x-should-retry: false``).
            out[str(status)]["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}
    return out


def _json(schema: str, text: str) -> dict[str, Any]:
    return {"description": text, "content": _content(schema)}


def _content(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(schema)}}


def _events() -> dict[str, Any]:
    """A stream; the schema is of one event, as tools read it."""
    event = {"type": "object", "properties": {"data": _STRING, "event": _STRING}, "required": ["data"]}
    return {"text/event-stream": {"schema": event}}


def _one_or_stream(*schemas: str) -> dict[str, Any]:
    first, *more = map(_ref, schemas)
    return {"application/json": {"schema": {"anyOf": [first, *more]} if more else first}, **_events()}


def _body(schema: str) -> dict[str, Any]:
    return {"required": True, "content": _content(schema)}


def _ref(schema: str) -> Schema:
    return {"$ref": f"#/components/schemas/{schema}"}


def _request_headers() -> list[dict[str, Any]]:
    short = {"type": "string", "maxLength": MAX_ID_CHARACTERS}
    headers: list[tuple[bytes, Schema, str]] = [
        (b"x-request-id", _STRING, "Comes back, and stands in the books."),
        (TIER_HEADER, _STRING, "The tier, for keys that may choose."),
        (AGENT_HEADER, short, "Calls with the same id form one agent."),
        (INTERACTION_HEADER, short, "Calls with the same id form one dialogue."),
        (COST_HEADER, _STRING, "The agent's whole cost in KV token-time, a number above 0; ignored without its id."),
    ]
    return [
        {"name": name.decode(), "in": "header", "required": False, "description": text, "schema": schema}
        for name, schema, text in headers
    ]


# --- bodies ------------------------------------------------------------------------------------------------------


def _schemas() -> dict[str, Schema]:
    stop = {"anyOf": [_STRING, {"type": "array", "items": _STRING}, {"type": "null"}]}
    parameters = {**_properties(PARAMETER_FIELDS), "stop": stop, "grammar": _optional(_ref("Grammar"))}
    native = {"inputs": _STRING, "parameters": _optional(_ref("GenerateParameters"))}
    stream = {"stream": _optional({"type": "boolean"})}
    function = _object({"type": {"const": "function"}, "name": _STRING}, required=["type", "name"])
    return {
        "GenerateParameters": {"type": "object", "properties": parameters},
        "GenerateRequest": _object(native, required=["inputs"]),
        "CompatRequest": _object({**native, **stream}, required=["inputs"]),
        "TokenizeRequest": _object(native, required=["inputs"]),
        "ChatRequest": _object(_chat_properties(stop), required=["messages"]),
        "CompletionRequest": _object(
            {
                **_properties(COMPLETION_FIELDS),
                "prompt": {"anyOf": [_STRING, {"type": "array", "items": _STRING, "minItems": 1}]},
                "suffix": {"type": "null"},
                "stop": stop,
            },
            required=["prompt"],
        ),
        "ResponsesRequest": _object(
            {
                **_properties(RESPONSE_FIELDS),
                "input": {"anyOf": [_STRING, {"type": "array", "items": {"type": "object"}}]},
                "background": _optional({"enum": [False]}),
                "truncation": _optional({"enum": ["disabled"]}),
                "tools": _optional({"type": "array", "items": function}),
                **{key: {"type": "null"} for key in NEEDS_MEMORY},
            },
            required=["input"],
        ),
        "SagemakerRequest": {"anyOf": [_ref(name) for name in ("CompatRequest", "ChatRequest", "CompletionRequest")]},
        "Message": _message(),
        "Tool": _object(
            {"type": _STRING, "function": _object({"name": _STRING}, required=["name"])}, required=["type", "function"]
        ),
        "Grammar": _grammar(),
        **_answers(),
    }


def _chat_properties(stop: Schema) -> dict[str, Schema]:
    return {
        **_properties(CHAT_FIELDS),
        "stop": stop,
        "logit_bias": _optional(
            {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "object", "maxProperties": 0}]}
        ),
        "messages": {"type": "array", "items": _ref("Message")},
        "tools": _optional({"type": "array", "items": _ref("Tool")}),
        "tool_choice": _optional(
            {
                "anyOf": [
                    _STRING,
                    _object({"name": _STRING}, required=["name"]),
                    _object({"function": _object({"name": _STRING}, required=["name"])}, required=["function"]),
                ]
            }
        ),
        "response_format": _optional(
            {
                "anyOf": [
                    _ref("Grammar"),
                    _object({"type": {"enum": ["text", "json_object"]}}, required=["type"]),
                    _object(
                        {"type": {"const": "json_schema"}, "json_schema": _object({"schema": {}}, required=["schema"])},
                        required=["type", "json_schema"],
                    ),
                ]
            }
        ),
        "stream_options": _optional(_object({"include_usage": _optional({"type": "boolean"})})),
    }


def _message() -> Schema:
    chunk = {
        "anyOf": [
            _object({"type": {"const": "text"}, "text": _STRING}, required=["type", "text"]),
            _object(
                {"type": {"const": "image_url"}, "image_url": _object({"url": _STRING}, required=["url"])},
                required=["type", "image_url"],
            ),
        ]
    }
    call = _object(
        {"id": _STRING, "type": _STRING, "function": _object({"name": _STRING}, required=["name"])},
        required=["id", "type", "function"],
    )
    content = {"content": {"anyOf": [_STRING, {"type": "array", "items": chunk}]}}
    calls = {"tool_calls": {"type": "array", "items": call}}
    return {
        "type": "object",
        "properties": {"role": _STRING, "name": _optional(_STRING)},
        "required": ["role"],
        "anyOf": [
            {"properties": content, "required": ["content"]},
            {"properties": calls, "required": ["tool_calls"]},
        ],
    }


def _grammar() -> Schema:
    return {
        "anyOf": [
            _object({"type": {"const": "regex"}, "value": _STRING}, required=["type", "value"]),
            _object(
                {
                    "type": {"enum": ["json", "json_object"]},
                    "value": {"anyOf": [_STRING, _object({"properties": {}}, required=["properties"])]},
                },
                required=["type", "value"],
            ),
            _object(
                {
                    "type": {"const": "json_schema"},
                    "value": _object(
                        {
                            "name": _optional(_STRING),
                            "schema": {"anyOf": [_STRING, _object({"properties": {}}, required=["properties"])]},
                        },
                        required=["schema"],
                    ),
                },
                required=["type", "value"],
            ),
        ]
    }


def _properties(fields: Fields) -> dict[str, Schema]:
    """A table of fields as schemas; null is taken for each of them."""
    return {name: _optional(_of_kind(kind)) for name, (kind, _) in fields.items()}


def _of_kind(kind: str) -> Schema:
    if kind in RANGES:
        low, high = RANGES[kind]
        return {"type": "integer", "minimum": low, "maximum": high}
    match kind:
        case "f32":
            return {"type": "number"}
        case "bool":
            return {"type": "boolean"}
        case "str":
            return _STRING
        case "strings":
            return {"type": "array", "items": _STRING}
        case "f32s":
            return {"type": "array", "items": {"type": "number"}}
        case "list":
            return {"type": "array"}
        case "map":
            return {"type": "object"}
    return {}


def _optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(properties: Mapping[str, Schema], *, required: Iterable[str] = ()) -> Schema:
    return {"type": "object", "properties": dict(properties), **({"required": list(required)} if required else {})}


# --- answers -----------------------------------------------------------------------------------------------------


def _answers() -> dict[str, Schema]:
    usage = _object(
        dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT),
        required=("prompt_tokens", "completion_tokens", "total_tokens"),
    )
    generated = _object(
        {"generated_text": _STRING, "details": _optional({"type": "object"})}, required=("generated_text",)
    )
    token = _object({"id": _COUNT, "text": _STRING, "start": _COUNT, "stop": _COUNT}, required=("id", "text"))

    def choices(kind: str) -> Schema:
        answer = {
            "object": {"const": kind},
            "created": _COUNT,
            "model": _STRING,
            "choices": {"type": "array", "minItems": 1},
            "usage": usage,
        }
        return _object(answer, required=answer)

    response = {
        "id": _STRING,
        "object": {"const": "response"},
        "status": {"enum": ["completed", "incomplete", "failed"]},
        "model": _STRING,
        "output": {"type": "array"},
    }
    openai_error = {"message": _STRING, "type": _STRING, "param": _optional(_STRING), "code": _optional(_STRING)}
    return {
        "Generated": generated,
        "GeneratedList": {"type": "array", "items": _ref("Generated"), "minItems": 1},
        "ChatAnswer": choices("chat.completion"),
        "CompletionAnswer": choices("text_completion"),
        "ResponseAnswer": _object(response, required=response),
        "SagemakerAnswer": {
            "anyOf": [_ref(name) for name in ("Generated", "GeneratedList", "ChatAnswer", "CompletionAnswer")]
        },
        "Tokens": {"type": "array", "items": token},
        "ChatTokens": _object(
            {"tokenize_response": _ref("Tokens"), "templated_text": _STRING},
            required=("tokenize_response", "templated_text"),
        ),
        "Info": _object(
            {"model_id": _STRING, "max_input_tokens": _COUNT, "max_total_tokens": _COUNT},
            required=("model_id", "max_input_tokens", "max_total_tokens"),
        ),
        "Models": _object({"object": {"const": "list"}, "data": {"type": "array"}}, required=("object", "data")),
        "Usage": _object(
            {"from_day": _STRING, "to_day": _STRING, "requests": {"type": "integer"}, "rows": {"type": "array"}},
            required=("from_day", "to_day", "requests", "rows"),
        ),
        "Explained": _object(
            {"id": _STRING, "requests": {"type": "array", "minItems": 1}}, required=("id", "requests")
        ),
        "ErrorNative": _object({"error": _STRING, "error_type": _STRING}, required=("error", "error_type")),
        "ErrorOpenai": _object({"error": _object(openai_error, required=openai_error)}, required=("error",)),
        "Error": {"anyOf": [_ref("ErrorNative"), _ref("ErrorOpenai")]},
    }
