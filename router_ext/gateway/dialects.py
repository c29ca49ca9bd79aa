"""Request bodies of every dialect, decoded and validated in TGI's order with TGI's words.

    body = read_body(path, content_type, raw, max_bytes=2_000_000)   # JSON layer: 413, 415, malformed, not an object
    pool = pools[body.model]
    request = decode_body(body, pool.limits)                         # shapes, then values
    lengths = fit_lengths(request, prompt_tokens, pool.limits)       # once the prompt is measured

``decode_request`` does the first two at once. Everything is refused by raising ``router_ext.errors``; the answer to
the client is made by ``error_response(error, dialect_of(path))``. For a chat, ``request.chat_body`` goes to
``/chat_tokenize`` and ``bos.chat_prompt`` makes the prompt of its answer.

Source: ``router/src/{lib,validation,chat,server}.rs`` of TGI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from router_ext.errors import BodyTooLarge, FairlaneError, RequestRefused, UnsupportedMediaType
from router_ext.gateway.generation import Dialect, GenerationRequest, ModelLimits, PassThrough
from router_ext.gateway.refusals import error_payload, error_response, refusal_of, stream_error
from router_ext.gateway.shapes import (
    Fields,
    check_fields,
    check_grammar,
    check_messages,
    check_tools,
    check_value,
    describe,
    refuse_shape,
    to_f32,
    tool_choice_of,
)
from router_ext.gateway.values import (
    Lengths,
    check_grammar_value,
    check_inputs,
    check_parameters,
    check_truncate,
    fit_lengths,
    is_greedy,
    refuse_value,
)

__all__ = [
    "Body",
    "Lengths",
    "decode_body",
    "decode_request",
    "decode_tokenize",
    "dialect_of",
    "error_payload",
    "error_response",
    "fit_lengths",
    "read_body",
    "refusal_of",
    "stream_error",
]

DEFAULT_MAX_BYTES = 2_000_000
"""TGI's ``--payload-limit``."""

_DIALECTS = {
    "/": Dialect.COMPAT,
    "/generate": Dialect.GENERATE,
    "/generate_stream": Dialect.GENERATE_STREAM,
    "/v1/chat/completions": Dialect.CHAT,
    "/v1/completions": Dialect.COMPLETIONS,
}

_PARAMETER_FIELDS: Fields = {
    "best_of": ("usize", True),
    "temperature": ("f32", True),
    "repetition_penalty": ("f32", True),
    "frequency_penalty": ("f32", True),
    "top_k": ("i32", True),
    "top_p": ("f32", True),
    "typical_p": ("f32", True),
    "do_sample": ("bool", False),
    "max_new_tokens": ("u32", True),
    "return_full_text": ("bool", True),
    "stop": ("strings", False),
    "truncate": ("usize", True),
    "watermark": ("bool", False),
    "details": ("bool", False),
    "decoder_input_details": ("bool", False),
    "seed": ("u64", True),
    "top_n_tokens": ("u32", True),
    "adapter_id": ("str", True),
}

_CHAT_FIELDS: Fields = {
    "model": ("str", True),
    "frequency_penalty": ("f32", True),
    "logit_bias": ("f32s", True),
    "logprobs": ("bool", True),
    "top_logprobs": ("u32", True),
    "max_tokens": ("u32", True),
    "max_completion_tokens": ("u32", True),
    "n": ("u32", True),
    "presence_penalty": ("f32", True),
    "stop": ("strings", True),
    "stream": ("bool", False),
    "seed": ("u64", True),
    "temperature": ("f32", True),
    "top_p": ("f32", True),
    "tool_prompt": ("str", True),
}

_COMPLETION_FIELDS: Fields = {
    "model": ("str", True),
    "max_tokens": ("u32", True),
    "temperature": ("f32", True),
    "top_p": ("f32", True),
    "stream": ("bool", False),
    "seed": ("u64", True),
    "suffix": ("str", True),
    "repetition_penalty": ("f32", True),
    "frequency_penalty": ("f32", True),
    "stop": ("strings", True),
}


@dataclass(frozen=True, slots=True)
class Body:
    """A body that is a JSON object. ``model`` is what the client names, before any type check of its own."""

    dialect: Dialect
    path: str
    data: dict[str, Any]
    raw: bytes

    @property
    def model(self) -> str | None:
        """Only OpenAI's bodies name a model."""
        model = self.data.get("model") if self.dialect.is_openai else None
        return model if isinstance(model, str) else None


def dialect_of(path: str) -> Dialect:
    """Dialect of a path, for errors too: every unknown path under ``/v1/`` speaks OpenAI's."""
    known = _DIALECTS.get(path)
    if known is not None:
        return known
    return Dialect.CHAT if path.startswith("/v1/") else Dialect.GENERATE


# --- JSON layer --------------------------------------------------------------------------------------------------


def read_body(path: str, content_type: str | None, body: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Body:
    """Size, content type, JSON, an object.

    Raises:
        BodyTooLarge, UnsupportedMediaType, RequestRefused.
    """
    if len(body) > max_bytes:
        raise BodyTooLarge(f"Failed to buffer the request body: length limit exceeded ({max_bytes} bytes)")
    if not _is_json_type(content_type):
        raise UnsupportedMediaType("Expected request with `Content-Type: application/json`")
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"Failed to parse the request body as JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        refuse_shape(f"invalid type: {describe(data)}, expected struct GenerateRequest")
    return Body(dialect_of(path), path, data, body)


def _is_json_type(content_type: str | None) -> bool:
    """``application/json`` or ``application/*+json``, parameters ignored."""
    kind = (content_type or "").split(";", 1)[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def decode_request(
    path: str, content_type: str | None, body: bytes, limits: ModelLimits, *, max_bytes: int = DEFAULT_MAX_BYTES
) -> GenerationRequest:
    """``read_body`` and ``decode_body`` in one call."""
    return decode_body(read_body(path, content_type, body, max_bytes=max_bytes), limits)


def decode_body(body: Body, limits: ModelLimits) -> GenerationRequest:
    """The request a body asks for.

    Raises:
        RequestRefused: anything TGI would refuse before it has counted the prompt's tokens.
    """
    match body.dialect:
        case Dialect.CHAT:
            return _decode_chat(body, limits)
        case Dialect.COMPLETIONS:
            return _decode_completion(body, limits)
        case _:
            return _decode_native(body, limits)


def decode_tokenize(body: Body) -> str:
    """``inputs`` of a ``/tokenize`` body, which has the shape of a generate body; it may be empty."""
    _check_native_shape(body)
    inputs: str = body.data["inputs"]
    return inputs


# --- TGI's own paths ---------------------------------------------------------------------------------------------

_SENT = ("temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "typical_p")


def _check_native_shape(body: Body) -> dict[str, Any]:
    """Shapes of a generate body; returns its parameters, TGI's defaults when there are none."""
    data = body.data
    if "inputs" in data:
        check_value(data["inputs"], "str", "inputs")
    p: dict[str, Any] = data.get("parameters", _NO_PARAMETERS)
    if p is not _NO_PARAMETERS:
        if not isinstance(p, dict):
            refuse_shape(f"invalid type: {describe(p)}, expected struct GenerateParameters", "parameters")
        check_fields(p, _PARAMETER_FIELDS, "parameters.")
        if p.get("grammar") is not None:
            check_grammar(p["grammar"], "parameters.grammar")
    if body.dialect is Dialect.COMPAT and "stream" in data:
        check_value(data["stream"], "bool", "stream")
    if "inputs" not in data:
        refuse_shape("missing field `inputs`", param="inputs")
    return p


_NO_PARAMETERS: dict[str, Any] = {"do_sample": True}
"""What TGI takes when a body has no ``parameters`` at all: sampling. An empty object means greedy."""


def _decode_native(body: Body, limits: ModelLimits) -> GenerationRequest:
    p = _check_native_shape(body)
    data, dialect = body.data, body.dialect
    is_stream = dialect is Dialect.GENERATE_STREAM or (dialect is Dialect.COMPAT and data.get("stream") is True)
    best_of = p.get("best_of")
    if is_stream and best_of is not None and best_of != 1:
        raise refuse_value("`best_of` != 1 is not supported when streaming tokens", "best_of")
    if is_stream and p.get("decoder_input_details"):
        raise refuse_value(
            "`decoder_input_details` == true is not supported when streaming tokens", "decoder_input_details"
        )
    check_parameters(p, limits, {})
    inputs: str = data["inputs"]
    check_inputs(inputs, "inputs")
    check_truncate(p.get("truncate"), limits)
    grammar = p.get("grammar")
    check_grammar_value(grammar)

    reason = None
    if grammar is not None:
        reason = "grammar"
    elif best_of is not None and best_of > 1:
        reason = "best_of"
    elif p.get("decoder_input_details"):
        reason = "decoder_input_details"

    stop = tuple(p.get("stop") or ())
    parameters: dict[str, Any] = {"do_sample": bool(p.get("do_sample", False))}
    parameters.update((field, p[field]) for field in _SENT if p.get(field) is not None)
    for field in ("truncate", "top_n_tokens", "adapter_id"):
        if p.get(field) is not None:
            parameters[field] = p[field]
    if stop:
        parameters["stop"] = list(stop)
    if p.get("watermark"):
        parameters["watermark"] = True
    full_text = p.get("return_full_text")
    if full_text is None:
        full_text = dialect is Dialect.COMPAT and limits.model_pipeline_tag in (None, "text-generation")
    return GenerationRequest(
        dialect=dialect,
        is_stream=is_stream,
        prompts=(inputs,),
        max_new_tokens=p.get("max_new_tokens"),
        parameters=parameters,
        stop=stop,
        seed=p.get("seed"),
        is_greedy=is_greedy(p),
        num_sequences=max(best_of or 1, 1),
        return_full_text=full_text,
        wants_details=bool(p.get("details") or p.get("decoder_input_details")),
        passthrough=None if reason is None else _pass_native(body, p, reason, is_stream),
    )


def _pass_native(body: Body, p: dict[str, Any], reason: str, is_stream: bool) -> PassThrough:
    """The body as it came; details are asked for where only they tell the tokens of every sequence."""
    if p.get("details") or (reason == "grammar" and not is_stream):
        return PassThrough(path=body.path, body=body.raw, reason=reason)
    changed = {**body.data, "parameters": {**p, "details": True}}
    return PassThrough(path=body.path, body=orjson.dumps(changed), reason=reason)


# --- OpenAI's paths ----------------------------------------------------------------------------------------------


def _sampling_of(data: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's temperature: 0 is greedy, everything else (absent too) samples."""
    temperature = data.get("temperature")
    if temperature is not None and to_f32(temperature) == 0.0:
        return {"do_sample": False}
    p: dict[str, Any] = {"do_sample": True}
    if temperature is not None:
        p["temperature"] = temperature
    return p


def _decode_chat(body: Body, limits: ModelLimits) -> GenerationRequest:
    data = body.data
    check_fields(data, _CHAT_FIELDS)
    if "messages" not in data:
        refuse_shape("missing field `messages`", param="messages")
    has_image = check_messages(data["messages"])
    if "max_tokens" in data and "max_completion_tokens" in data:
        refuse_shape("duplicate field `max_tokens`", param="max_tokens")
    include_usage = _check_stream_options(data)
    tools = check_tools(data["tools"]) if data.get("tools") is not None else []
    mode, function = tool_choice_of(data.get("tool_choice"))
    response_format = data.get("response_format")
    if response_format is not None:
        check_grammar(response_format, "response_format")
        if tools:
            raise _tool_error("Grammar and tools are mutually exclusive", "response_format")
    if tools and mode == "function" and function not in tools:
        raise _tool_error(f"Tool with name {function} not found", "tool_choice")

    p = _sampling_of(data)
    max_tokens = data.get("max_tokens", data.get("max_completion_tokens"))
    presence = data.get("presence_penalty")
    if presence is not None:
        p["repetition_penalty"] = presence + 2.0
    for field in ("frequency_penalty", "top_p"):
        if data.get(field) is not None:
            p[field] = data[field]
    stop = tuple(data.get("stop") or ())
    if stop:
        p["stop"] = list(stop)
    if data.get("top_logprobs") is not None:
        p["top_n_tokens"] = data["top_logprobs"]
    names = {
        "repetition_penalty": "presence_penalty",
        "max_new_tokens": "max_tokens",
        "top_n_tokens": "top_logprobs",
    }
    check_parameters({**p, "max_new_tokens": max_tokens}, limits, names)
    check_grammar_value(response_format)

    reason = None
    if response_format is not None:
        reason = "response_format"
    elif tools and mode != "none":
        reason = "tools"
    elif has_image:
        reason = "image"
    is_stream = data.get("stream", False)
    return GenerationRequest(
        dialect=Dialect.CHAT,
        is_stream=is_stream,
        model=data.get("model"),
        chat_body={"messages": data["messages"]},
        max_new_tokens=max_tokens,
        parameters=p,
        stop=stop,
        seed=data.get("seed"),
        is_greedy=is_greedy(p),
        wants_logprobs=bool(data.get("logprobs")),
        include_usage=include_usage,
        passthrough=None if reason is None else _pass_openai(body, reason, is_stream),
    )


def _check_stream_options(data: dict[str, Any]) -> bool:
    if "stream_options" not in data:
        return False
    options = data["stream_options"]
    if not isinstance(options, dict):
        refuse_shape(f"invalid type: {describe(options)}, expected struct StreamOptions", "stream_options")
    include_usage = options.get("include_usage", False)
    check_value(include_usage, "bool", "stream_options.include_usage")
    return bool(include_usage)


def _tool_error(problem: str, param: str) -> FairlaneError:
    refusal = RequestRefused(f"Tool error: {problem}", param=param)
    refusal.native_type = "tool_error"
    return refusal


def _decode_completion(body: Body, limits: ModelLimits) -> GenerationRequest:
    data = body.data
    check_fields(data, _COMPLETION_FIELDS)
    if "prompt" not in data:
        refuse_shape("missing field `prompt`", param="prompt")
    prompt = data["prompt"]
    if isinstance(prompt, str):
        prompts: tuple[str, ...] = (prompt,)
    elif prompt == []:
        refuse_shape("Empty array detected. Do not use an empty array for the prompt.", "prompt")
    elif isinstance(prompt, list) and all(isinstance(item, str) for item in prompt):
        prompts = tuple(prompt)
    else:
        refuse_shape("data did not match any variant of untagged enum PromptDeserializer", "prompt")
    if data.get("suffix") is not None:
        raise RequestRefused("Suffix is not supported and can be achieved by preprocessing the prompt.", param="suffix")
    if len(prompts) > limits.max_client_batch_size:
        raise RequestRefused(
            f"Number of prompts exceeds the maximum allowed batch size of {limits.max_client_batch_size}",
            param="prompt",
        )
    p = _sampling_of(data)
    for field in ("repetition_penalty", "frequency_penalty", "top_p"):
        if data.get(field) is not None:
            p[field] = data[field]
    stop = tuple(data.get("stop") or ())
    if stop:
        p["stop"] = list(stop)
    check_parameters({**p, "max_new_tokens": data.get("max_tokens")}, limits, {"max_new_tokens": "max_tokens"})
    for item in prompts:
        check_inputs(item, "prompt")
    return GenerationRequest(
        dialect=Dialect.COMPLETIONS,
        is_stream=data.get("stream", False),
        model=data.get("model"),
        prompts=prompts,
        max_new_tokens=data.get("max_tokens"),
        parameters=p,
        stop=stop,
        seed=data.get("seed"),
        is_greedy=is_greedy(p),
    )


def _pass_openai(body: Body, reason: str, is_stream: bool) -> PassThrough:
    """The client's body for the backend: its own name for the model would be taken for an adapter there, and a stream
    tells its tokens only in the usage chunk (``passthrough.Relay`` drops it again if the client did not ask)."""
    changed = dict(body.data)
    if changed.get("model") is not None:
        changed["model"] = "tgi"
    if is_stream:
        changed["stream_options"] = {**changed.get("stream_options", {}), "include_usage": True}
    return PassThrough(path=body.path, body=body.raw if changed == body.data else orjson.dumps(changed), reason=reason)
