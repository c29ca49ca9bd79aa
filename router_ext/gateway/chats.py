"""Bodies of ``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

from typing import Any

import orjson

from router_ext.errors import FairlaneError, GrammarRefused, RequestRefused
from router_ext.gateway.bodies import Body
from router_ext.gateway.friendly import friendly_chat, friendly_completion
from router_ext.gateway.generation import Dialect, GenerationRequest, ModelLimits, PassThrough, ToolUse
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
from router_ext.gateway.values import check_grammar_value, check_inputs, check_parameters, is_greedy
from router_ext.guard.grammar import parameters_key
from router_ext.guard.inline import SchemaRefused, inline

CHAT_PATH = "/v1/chat/completions"

MAX_INLINED_NODES = 2_000
"""Of one function's parameters with definitions in place of references. No backend compiles more in bearable time."""

MAX_INLINED_BYTES = 65_536
"""Of all parameters that come with definitions. References are followed on the event loop: 12 ms at most."""

_CHAT_NAMES = {
    "repetition_penalty": "presence_penalty",
    "max_new_tokens": "max_tokens",
    "top_n_tokens": "top_logprobs",
}
"""What a chat calls TGI's parameters."""

CHAT_FIELDS: Fields = {
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
    "guideline": ("str", True),
}

COMPLETION_FIELDS: Fields = {
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


def _sampling_of(data: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's temperature: 0 is greedy, everything else (absent too) samples."""
    temperature = data.get("temperature")
    if temperature is not None and to_f32(temperature) == 0.0:
        return {"do_sample": False}
    p: dict[str, Any] = {"do_sample": True}
    if temperature is not None:
        p["temperature"] = temperature
    return p


def decode_chat(body: Body, limits: ModelLimits) -> GenerationRequest:
    """The request of a ``/v1/chat/completions`` body.

    Raises:
        RequestRefused: anything TGI would refuse before it has counted the prompt's tokens.
    """
    return chat_request(friendly_chat(body.data), limits, Dialect.CHAT)


def chat_request(data: dict[str, Any], limits: ModelLimits, dialect: Dialect) -> GenerationRequest:
    """The request of a chat body in TGI's form."""
    check_fields(data, CHAT_FIELDS)
    if "messages" not in data:
        refuse_shape("missing field `messages`", param="messages")
    has_image = check_messages(data["messages"])
    if "max_tokens" in data and "max_completion_tokens" in data:
        refuse_shape("duplicate field `max_tokens`", param="max_tokens")
    include_usage = _check_stream_options(data)
    names = check_tools(data["tools"]) if "tools" in data else []
    mode, function = tool_choice_of(data.get("tool_choice"))
    response_format = data.get("response_format")
    if response_format is not None:
        check_grammar(response_format, "response_format")
        if names:
            raise _tool_error("Grammar and tools are mutually exclusive", "response_format")
    if names and mode == "function" and function not in names:
        raise _tool_error(f"Tool with name {function} not found", "tool_choice")
    tools = None
    if names and mode != "none":
        data = {**data, "tools": _inlined(data["tools"])}
        tools = ToolUse(tools=data["tools"], mode=mode, name=function)

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
    check_parameters({**p, "max_new_tokens": max_tokens}, limits, _CHAT_NAMES)
    check_grammar_value(response_format, "response_format")

    reason = None
    if response_format is not None:
        reason = "response_format"
    elif tools is not None:
        reason = "tools"
    elif has_image:
        reason = "image"
    is_stream = data.get("stream", False)
    chat = _whole(data, is_stream)
    return GenerationRequest(
        dialect=dialect,
        is_stream=is_stream,
        model=data.get("model"),
        chat_body={name: data[name] for name in ("messages", "guideline") if name in data},
        chat=chat,
        max_new_tokens=max_tokens,
        parameters=p,
        stop=stop,
        seed=data.get("seed"),
        is_greedy=is_greedy(p),
        wants_logprobs=bool(data.get("logprobs")),
        include_usage=include_usage,
        grammar=response_format,
        tools=tools,
        passthrough=None if reason is None else PassThrough(path=CHAT_PATH, data=chat, reason=reason),
    )


def _inlined(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools with definitions in place of references, which inside a tool point nowhere for TGI.

    Raises:
        GrammarRefused: a reference leads back to itself, or there is, or would be, too much of it.
    """
    keys = [parameters_key(tool["function"]) for tool in tools]
    given = [tool["function"].get(key) for tool, key in zip(tools, keys, strict=True)]
    places = [place for place, parameters in enumerate(given) if isinstance(parameters, dict) and _has_defs(parameters)]
    if not places:
        return tools
    size = sum(len(orjson.dumps(given[place])) for place in places)
    if size > MAX_INLINED_BYTES:
        problem = f"functions with definitions have {size} bytes of parameters, at most {MAX_INLINED_BYTES} are taken"
        raise _too_costly(problem, "tools")
    out = list(tools)
    for place in places:
        param = f"tools[{place}].function.{keys[place]}"
        try:
            found = inline(given[place], max_nodes=MAX_INLINED_NODES)
        except SchemaRefused as error:
            if error.is_cost:
                raise _too_costly(str(error), param) from None
            raise GrammarRefused(f"Input validation error: grammar is not valid: {error}", param=param) from None
        out[place] = {**out[place], "function": {**out[place]["function"], keys[place]: found}}
    return out


def _has_defs(schema: dict[str, Any]) -> bool:
    return "$defs" in schema or "definitions" in schema


def _too_costly(problem: str, param: str) -> GrammarRefused:
    return GrammarRefused(
        f"Input validation error: grammar is too expensive: {problem}", code="grammar_too_expensive", param=param
    )


def _whole(data: dict[str, Any], is_stream: bool) -> dict[str, Any]:
    """The body for a backend: the client's name for the model would be taken for an adapter there, and a stream tells
    its tokens only in the usage chunk (``passthrough.StreamRelay`` drops it again if the client did not ask)."""
    whole = dict(data)
    if "model" in whole:
        whole["model"] = "tgi"
    if is_stream:
        whole["stream_options"] = {"include_usage": True}
    return whole


def pass_chat(request: GenerationRequest, reason: str) -> PassThrough:
    """Pass a plain chat through after all (``bos.ChatPrompt.text`` is None)."""
    assert request.chat is not None
    return PassThrough(path=CHAT_PATH, data=request.chat, reason=reason)


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


def decode_completion(body: Body, limits: ModelLimits) -> GenerationRequest:
    """The request of a ``/v1/completions`` body; each of its prompts is a generation of its own.

    Raises:
        RequestRefused: anything TGI would refuse before it has counted the prompts' tokens.
    """
    data = friendly_completion(body.data)
    check_fields(data, COMPLETION_FIELDS)
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
