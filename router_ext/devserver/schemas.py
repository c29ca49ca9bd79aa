"""Shapes of TGI's request bodies, as ``lib.rs``, ``vertex.rs`` and ``sagemaker.rs`` of its router declare them."""

from __future__ import annotations

from typing import Any

from router_ext.devserver.json_reader import BodyError, Reader
from router_ext.devserver.serde import (
    I32,
    U32,
    U64,
    USIZE,
    Member,
    anything,
    boolean,
    f32,
    option,
    sequence,
    string,
    struct,
    tagged,
    untagged,
)


def _json_grammar(r: Reader) -> Any:
    """A schema as an object, or as the JSON text of one."""
    start = r.at
    value = anything(r)
    if isinstance(value, str):
        try:
            value = anything(Reader(value.encode()))
        except BodyError as e:
            raise BodyError(e.message, start, is_syntax=False) from e
    return value


GRAMMAR = tagged(
    "GrammarType",
    {
        "json": _json_grammar,
        "json_object": _json_grammar,
        "regex": string,
        "json_schema": struct("JsonSchemaConfig", {"name": Member(option(string), None), "schema": Member(anything)}),
    },
)

_PARAMETERS: dict[str, Member] = {
    "best_of": Member(option(USIZE), None),
    "temperature": Member(option(f32), None),
    "repetition_penalty": Member(option(f32), None),
    "frequency_penalty": Member(option(f32), None),
    "top_k": Member(option(I32), None),
    "top_p": Member(option(f32), None),
    "typical_p": Member(option(f32), None),
    "do_sample": Member(boolean, False),
    "max_new_tokens": Member(option(U32), None),
    "return_full_text": Member(option(boolean), None),
    "stop": Member(sequence(string), list),
    "truncate": Member(option(USIZE), None),
    "watermark": Member(boolean, False),
    "details": Member(boolean, False),
    "decoder_input_details": Member(boolean, False),
    "seed": Member(option(U64), None),
    "top_n_tokens": Member(option(U32), None),
    "grammar": Member(option(GRAMMAR), None),
    "adapter_id": Member(option(string), None),
}


def default_parameters(*, do_sample: bool = True) -> dict[str, Any]:
    """What TGI assumes without a ``parameters`` object; note that sampling is then on."""
    found = {k: m.default() if callable(m.default) else m.default for k, m in _PARAMETERS.items()}
    return {**found, "do_sample": do_sample}


PARAMETERS = struct("GenerateParameters", _PARAMETERS)
_GENERATE = {"inputs": Member(string), "parameters": Member(PARAMETERS, default_parameters)}
GENERATE = struct("GenerateRequest", _GENERATE)
COMPAT = struct("CompatGenerateRequest", {**_GENERATE, "stream": Member(boolean, False)})

_FUNCTION = struct(
    "FunctionDefinition",
    {"description": Member(option(string), None), "name": Member(string), "arguments": Member(anything)},
    {"parameters": "arguments"},
)
_TOOL = struct("Tool", {"type": Member(string), "function": Member(_FUNCTION)})
_TOOL_CALL = struct("ToolCall", {"id": Member(string), "type": Member(string), "function": Member(_FUNCTION)})
_URL = struct("Url", {"url": Member(string)})
_CHUNK_FIELDS = struct(
    "MessageChunk",
    {"type": Member(string), "text": Member(option(string), None), "image_url": Member(option(_URL), None)},
)


def _chunk(r: Reader) -> str:
    """One part of a message, as the text it becomes."""
    found = _CHUNK_FIELDS(r)
    match found["type"]:
        case "text" if found["text"] is not None:
            return str(found["text"])
        case "image_url" if found["image_url"] is not None:
            return f"![]({found['image_url']['url']})"
    raise r.shape("unknown variant")


_CONTENT = untagged("MessageContent", string, lambda r: "".join(sequence(_chunk)(r)))
_BODY = untagged(
    "MessageBody",
    struct("Content", {"content": Member(_CONTENT)}),
    struct("Tool", {"tool_calls": Member(sequence(_TOOL_CALL))}),
)
_HEAD = struct("Message", {"role": Member(string), "name": Member(option(string), None)})


def message(r: Reader) -> dict[str, Any]:
    """One chat message: its role and name, and either content or tool calls."""
    r.peek()
    start = r.at
    head = _HEAD(r)
    end = r.at
    try:
        body = _BODY(Reader(r.body, start))
    except BodyError as e:
        raise BodyError(e.message, end, is_syntax=False) from e
    return {**head, **body}


def _tool_choice_object(r: Reader) -> str:
    named = struct("FunctionName", {"name": Member(string)})
    found = struct("ToolChoice", {"function": Member(named)})(r)
    return str(found["function"]["name"])


def tool_choice(r: Reader) -> tuple[str, str | None]:
    """``(mode, name)``: mode is auto, none, required or function."""
    value = option(untagged("ToolTypeDeserializer", string, lambda r: (_tool_choice_object(r),)))(r)
    if isinstance(value, tuple):
        return "function", value[0]
    if value in ("auto", None):
        return "auto", None
    if value in ("none", "required"):
        return value, None
    return "function", value


CHAT = struct(
    "ChatRequest",
    {
        "model": Member(option(string), None),
        "messages": Member(sequence(message)),
        "frequency_penalty": Member(option(f32), None),
        "logit_bias": Member(option(sequence(f32)), None),
        "logprobs": Member(option(boolean), None),
        "top_logprobs": Member(option(U32), None),
        "max_tokens": Member(option(U32), None),
        "n": Member(option(U32), None),
        "presence_penalty": Member(option(f32), None),
        "stop": Member(option(sequence(string)), None),
        "stream": Member(boolean, False),
        "seed": Member(option(U64), None),
        "temperature": Member(option(f32), None),
        "top_p": Member(option(f32), None),
        "tools": Member(option(sequence(_TOOL)), None),
        "tool_prompt": Member(option(string), None),
        "tool_choice": Member(tool_choice, lambda: ("auto", None)),
        "response_format": Member(option(GRAMMAR), None),
        "guideline": Member(option(string), None),
        "stream_options": Member(struct("StreamOptions", {"include_usage": Member(boolean, False)}), dict),
    },
    {"max_completion_tokens": "max_tokens"},
)


def _prompts(r: Reader) -> list[str]:
    texts: list[str] = sequence(string)(r)
    if not texts:
        raise BodyError("\0Empty array detected. Do not use an empty array for the prompt.", None, is_syntax=False)
    return texts


COMPLETION = struct(
    "CompletionRequest",
    {
        "model": Member(option(string), None),
        "prompt": Member(untagged("PromptDeserializer", lambda r: [string(r)], _prompts)),
        "max_tokens": Member(option(U32), None),
        "temperature": Member(option(f32), None),
        "top_p": Member(option(f32), None),
        "stream": Member(boolean, False),
        "seed": Member(option(U64), None),
        "suffix": Member(option(string), None),
        "repetition_penalty": Member(option(f32), None),
        "frequency_penalty": Member(option(f32), None),
        "stop": Member(option(sequence(string)), None),
    },
)


def _variant(name: str, schema: Any) -> Any:
    return lambda r: (name, schema(r))


_SAGEMAKER = untagged(
    "SagemakerRequest", _variant("generate", COMPAT), _variant("chat", CHAT), _variant("completion", COMPLETION)
)


def sagemaker(r: Reader) -> tuple[str, dict[str, Any]]:
    """``(generate | chat | completion, body)``."""
    found: tuple[str, dict[str, Any]] = _SAGEMAKER(r)
    return found


_VERTEX_PARAMETERS = struct(
    "VertexParameters", {"max_new_tokens": Member(option(U32), None), "seed": Member(option(U64), None)}
)
VERTEX = struct(
    "VertexRequest",
    {
        "instances": Member(
            sequence(
                untagged(
                    "VertexInstance",
                    _variant("chat", CHAT),
                    _variant(
                        "generate",
                        struct(
                            "GenerateVertexInstance",
                            {"inputs": Member(string), "parameters": Member(option(_VERTEX_PARAMETERS), None)},
                        ),
                    ),
                )
            )
        )
    },
)
