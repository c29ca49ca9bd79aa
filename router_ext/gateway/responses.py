"""``/v1/responses``, stateless: a request becomes the chat it stands for.

Text, images, function tools and their results, ``text.format`` and streaming are served. What would need a memory or a
tool of the server's own is refused and named; what changes nothing here (``store``, ``user``, ``reasoning``, ...) is
ignored. The answers are written by ``encoders`` and ``passthrough``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from router_ext.errors import RequestRefused
from router_ext.gateway.bodies import Body
from router_ext.gateway.chats import chat_request
from router_ext.gateway.friendly import friendly_chat
from router_ext.gateway.generation import Dialect, GenerationRequest, ModelLimits
from router_ext.gateway.shapes import Fields, check_fields, check_value, describe, refuse_shape

RESPONSE_FIELDS: Fields = {
    "model": ("str", True),
    "instructions": ("str", True),
    "max_output_tokens": ("u32", True),
    "temperature": ("f32", True),
    "top_p": ("f32", True),
    "top_logprobs": ("u32", True),
    "stream": ("bool", True),
    "background": ("bool", True),
    "include": ("strings", True),
    "truncation": ("str", True),
    "tools": ("list", True),
    "metadata": ("map", True),
    "text": ("map", True),
}

NEEDS_MEMORY = ("previous_response_id", "conversation", "prompt", "context_management")
"""Fields that refer to what an earlier request left with the server."""

_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""What a chat's fields are called here."""

_LOGPROBS = "message.output_text.logprobs"

_ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "user", "safety_identifier", "prompt_cache_key")


def decode_response(body: Body, limits: ModelLimits) -> GenerationRequest:
    """The request of a ``/v1/responses`` body.

    Raises:
        RequestRefused: it needs what this server does not have, or TGI would refuse the chat.
    """
    data = {name: value for name, value in body.data.items() if value is not None}
    check_fields(data, RESPONSE_FIELDS)
    _check_served(data)
    include = data.get("include", ())
    tools, choice = _tools(data)
    chat = {
        "model": data.get("model"),
        "messages": _messages(data),
        "max_tokens": data.get("max_output_tokens"),
        "temperature": data.get("temperature"),
        "top_p": data.get("top_p"),
        "top_logprobs": data.get("top_logprobs"),
        "logprobs": True if _LOGPROBS in include else None,
        "stream": data.get("stream"),
        "tools": tools,
        "tool_choice": choice if tools else None,
        "response_format": _response_format(data.get("text", {}).get("format")),
    }
    try:
        request = chat_request(friendly_chat(chat), limits, Dialect.RESPONSES)
    except RequestRefused as error:
        field = (error.param or "").partition("[")[0].partition(".")[0]
        error.param = _NAMES.get(field, error.param)
        raise
    return msgspec.structs.replace(request, echo=_echo(data))


def _refuse(problem: str, param: str) -> NoReturn:
    raise RequestRefused(problem, code="unsupported_parameter", param=param)


def _check_served(data: Mapping[str, Any]) -> None:
    for name in NEEDS_MEMORY:
        if name in data:
            _refuse(
                f"`{name}` is not supported: responses are not stored; send the whole conversation as `input`.", name
            )
    if data.get("background"):
        _refuse("`background` is not supported: a response is answered on its own connection.", "background")
    if data.get("truncation", "disabled") != "disabled":
        _refuse("`truncation` other than `disabled` is not supported.", "truncation")
    if "input" not in data:
        refuse_shape("missing field `input`", param="input")


def _echo(data: Mapping[str, Any]) -> dict[str, Any]:
    """What the response object says of its request; fields without effect have the value that took effect."""
    return {
        **{name: data.get(name) for name in _ECHOED},
        "metadata": data.get("metadata", {}),
        "text": {"format": {"type": "text"}, **{n: v for n, v in data.get("text", {}).items() if v is not None}},
        "tools": data.get("tools", []),
        "tool_choice": data.get("tool_choice", "auto"),
        "top_logprobs": data.get("top_logprobs", 0),
        "parallel_tool_calls": False,
        "truncation": "disabled",
        "background": False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
    }


# --- input -------------------------------------------------------------------------------------------------------


def _messages(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if "instructions" in data:
        messages.append({"role": "system", "content": data["instructions"]})
    given = data["input"]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        refuse_shape(f"invalid type: {describe(given)}, expected a string or a sequence", "input")
    for place, item in enumerate(given):
        _add_item(messages, item, f"input[{place}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Any, path: str) -> None:
    if not isinstance(item, dict):
        refuse_shape(f"invalid type: {describe(item)}, expected an input item", path)
    match item.get("type", "message"):
        case "message":
            _need(item, "role", "content", path=path)
            check_value(item["role"], "str", f"{path}.role")
            # Templates know three roles; OpenAI's newer name of the first is not among them.
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _content(item["content"], f"{path}.content")})
        case "function_call":
            _need(item, "call_id", "name", "arguments", path=path)
            for name in ("call_id", "name", "arguments"):
                check_value(item[name], "str", f"{path}.{name}")
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if messages and "tool_calls" in messages[-1]:
                messages[-1]["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "tool_calls": [call]})
        case "function_call_output":
            _need(item, "call_id", "output", path=path)
            check_value(item["call_id"], "str", f"{path}.call_id")
            content = _content(item["output"], f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        case "reasoning":
            # Another model's thoughts, handed back with its answer: no chat template takes them.
            return
        case kind:
            _refuse(f"Input items of type {kind!r:.60} are not supported.", f"{path}.type")


def _need(item: Mapping[str, Any], *names: str, path: str) -> None:
    for name in names:
        if name not in item:
            refuse_shape(f"missing field `{name}`", path)


def _content(given: Any, path: str) -> str | list[dict[str, Any]]:
    """A message's content in a chat's form; without images it is one string."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        refuse_shape(f"invalid type: {describe(given)}, expected a string or a sequence", path)
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(given):
        match part:
            case {"type": "input_text" | "output_text", "text": str() as text} | {
                "type": "refusal",
                "refusal": str() as text,
            }:
                parts.append({"type": "text", "text": text})
            case {"type": "input_image", "image_url": str() as url}:
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case {"type": str() as kind}:
                _refuse(f"Content of type {kind!r:.60}, as it is given here, is not supported.", f"{path}[{place}]")
            case _:
                refuse_shape("missing field `type`", f"{path}[{place}]")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


# --- tools and format --------------------------------------------------------------------------------------------


def _tools(data: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """Functions in a chat's form, and its ``tool_choice``."""
    tools: list[dict[str, Any]] = []
    for place, tool in enumerate(data.get("tools", ())):
        path = f"tools[{place}]"
        match tool:
            case {"type": "function", "name": str()}:
                function = {name: tool.get(name) for name in ("name", "description", "parameters")}
                tools.append({"type": "function", "function": {n: v for n, v in function.items() if v is not None}})
            case {"type": "function"}:
                refuse_shape("missing field `name`", path)
            case {"type": str() as kind}:
                _refuse(f"Tools of type {kind!r:.60} are not supported; functions are.", f"{path}.type")
            case _:
                refuse_shape("missing field `type`", path)
    match data.get("tool_choice", "auto"):
        case "auto" | "none" | "required" as mode:
            return tools, mode
        case {"type": "function", "name": str() as name}:
            if not tools:
                _refuse("`tool_choice` names a function, and there are no `tools`.", "tool_choice")
            return tools, {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list() as allowed}:
            names = [tool.get("name") for tool in allowed if isinstance(tool, dict)]
            return [tool for tool in tools if tool["function"]["name"] in names], mode
        case _:
            _refuse(
                "This `tool_choice` is not supported: auto, none, required, a function, allowed tools.", "tool_choice"
            )


def _response_format(given: Any) -> Any:
    match given:
        case {"type": "json_schema", "schema": _}:
            config = {name: given[name] for name in ("name", "schema") if name in given}
            return {"type": "json_schema", "json_schema": config}
        case {"type": "json_schema"}:
            refuse_shape("missing field `schema`", "text.format")
        case None | {"type": "text" | "json_object"}:
            return given
        case _:
            _refuse("This format is not supported: text, json_schema, json_object.", "text.format")
