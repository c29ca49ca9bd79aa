"""Shapes of JSON request bodies: types and ranges checked as TGI's JSON layer does, with its words.

TGI deserialises the whole body before it validates anything, so a wrong type anywhere is refused before a wrong value.
Messages follow serde's form without the position, which only a parser of the text knows.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NoReturn

from router_ext.errors import RequestRefused

RANGES = {
    "u32": (0, (1 << 32) - 1),
    "u64": (0, (1 << 64) - 1),
    "usize": (0, (1 << 64) - 1),
    "i32": (-(1 << 31), (1 << 31) - 1),
}

_EXPECTED = {"bool": "a boolean", "str": "a string", "strings": "a sequence", "list": "a sequence"}

Fields = Mapping[str, tuple[str, bool]]
"""Field name to (kind, may be null). Kinds: u32, u64, usize, i32, f32, bool, str, strings, f32s, list, map, any."""


def refuse_shape(problem: str, path: str = "", *, param: str | None = None) -> NoReturn:
    """Refuse a body whose JSON does not have the expected shape. ``path`` is where; ``param`` if only that is known."""
    where = f"{path}: " if path else ""
    raise RequestRefused(
        f"Failed to deserialize the JSON body into the target type: {where}{problem}",
        code="invalid_parameter",
        param=param or path or None,
    )


def describe(value: Any) -> str:
    """A value as serde names it in "invalid type"."""
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int():
            return f"integer `{value}`"
        case float():
            return f"floating point `{value}`"
        case str():
            return f'string "{value if len(value) <= 40 else value[:40] + "…"}"'
        case list():
            return "sequence"
        case _:
            return "map"


def to_f32(value: float) -> float:
    """TGI holds numbers as 32-bit floats, so 0.99999999999 is 1 and 1e-50 is 0."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return rounded


def check_value(value: Any, kind: str, path: str) -> None:
    """Refuse ``value`` unless it is of ``kind``; null is of none but ``any``."""
    if kind == "any":
        return
    if kind in RANGES:
        if isinstance(value, bool) or not isinstance(value, int):
            refuse_shape(f"invalid type: {describe(value)}, expected {kind}", path)
        low, high = RANGES[kind]
        if not low <= value <= high:
            refuse_shape(f"invalid value: integer `{value}`, expected {kind}", path)
    elif kind == "f32":
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse_shape(f"invalid type: {describe(value)}, expected f32", path)
    elif kind == "bool":
        if not isinstance(value, bool):
            refuse_shape(f"invalid type: {describe(value)}, expected a boolean", path)
    elif kind == "str":
        if not isinstance(value, str):
            refuse_shape(f"invalid type: {describe(value)}, expected a string", path)
    elif kind == "map":
        if not isinstance(value, dict):
            refuse_shape(f"invalid type: {describe(value)}, expected a map", path)
    elif not isinstance(value, list):
        refuse_shape(f"invalid type: {describe(value)}, expected a sequence", path)
    elif kind != "list":
        item_kind = "str" if kind == "strings" else "f32"
        for place, item in enumerate(value):
            check_value(item, item_kind, f"{path}[{place}]")


def check_fields(data: Mapping[str, Any], fields: Fields, prefix: str = "") -> None:
    """Check every known field that is present, in the body's own order (the first fault is the one reported)."""
    for name, value in data.items():
        known = fields.get(name)
        if known is None:
            continue
        kind, nullable = known
        if value is None and nullable:
            continue
        check_value(value, kind, prefix + name)


def check_messages(messages: Any) -> bool:
    """Shape of a chat's ``messages``.

    Returns:
        True if any content holds an image.
    """
    check_value(messages, "list", "messages")
    has_image = False
    for place, message in enumerate(messages):
        path = f"messages[{place}]"
        if not isinstance(message, dict):
            refuse_shape(f"invalid type: {describe(message)}, expected struct Message", path)
        if "role" not in message:
            refuse_shape("missing field `role`", path)
        check_value(message["role"], "str", f"{path}.role")
        if message.get("name") is not None:
            check_value(message["name"], "str", f"{path}.name")
        content = message.get("content")
        if isinstance(content, str):
            continue
        if isinstance(content, list) and all(map(_is_chunk, content)):
            has_image = has_image or any(chunk["type"] == "image_url" for chunk in content)
        elif not (isinstance(message.get("tool_calls"), list) and all(map(_is_tool_call, message["tool_calls"]))):
            refuse_shape("data did not match any variant of untagged enum MessageBody", path)
    return has_image


def _is_chunk(chunk: Any) -> bool:
    match chunk:
        case {"type": "text", "text": str()} | {"type": "image_url", "image_url": {"url": str()}}:
            return True
    return False


def _is_tool_call(call: Any) -> bool:
    match call:
        case {"id": str(), "type": str(), "function": {"name": str()}}:
            return True
    return False


def check_grammar(grammar: Any, path: str) -> None:
    """Shape of a ``grammar`` or ``response_format`` object."""
    if not isinstance(grammar, dict):
        refuse_shape(f"invalid type: {describe(grammar)}, expected internally tagged enum GrammarType", path)
    if "type" not in grammar:
        refuse_shape("missing field `type`", path)
    kind = grammar["type"]
    if kind not in ("json", "json_object", "regex", "json_schema"):
        if not isinstance(kind, str):
            refuse_shape(f"invalid type: {describe(kind)}, expected variant identifier", f"{path}.type")
        refuse_shape(
            f"unknown variant `{kind[:40]}`, expected one of `json`, `json_object`, `regex`, `json_schema`",
            f"{path}.type",
        )
    if "value" not in grammar:
        refuse_shape("missing field `value`", path)
    value = grammar["value"]
    if kind == "regex":
        check_value(value, "str", f"{path}.value")
    elif kind == "json_schema":
        if not isinstance(value, dict):
            refuse_shape(f"invalid type: {describe(value)}, expected struct JsonSchemaConfig", f"{path}.value")
        if value.get("name") is not None:
            check_value(value["name"], "str", f"{path}.value.name")
        if "schema" not in value:
            refuse_shape("missing field `schema`", f"{path}.value")


def check_tools(tools: Any) -> list[str]:
    """Shape of ``tools``; returns the functions' names."""
    check_value(tools, "list", "tools")
    names: list[str] = []
    for place, tool in enumerate(tools):
        path = f"tools[{place}]"
        if not isinstance(tool, dict):
            refuse_shape(f"invalid type: {describe(tool)}, expected struct Tool", path)
        for field in ("type", "function"):
            if field not in tool:
                refuse_shape(f"missing field `{field}`", path)
        check_value(tool["type"], "str", f"{path}.type")
        function = tool["function"]
        if not isinstance(function, dict):
            refuse_shape(f"invalid type: {describe(function)}, expected struct FunctionDefinition", f"{path}.function")
        if "name" not in function:
            refuse_shape("missing field `name`", f"{path}.function")
        check_value(function["name"], "str", f"{path}.function.name")
        names.append(function["name"])
    return names


def tool_choice_of(choice: Any) -> tuple[str, str | None]:
    """``tool_choice`` as (mode, function name): auto, none, required, or function."""
    match choice:
        case None | "auto":
            return "auto", None
        case "none" | "required":
            return choice, None
        case str():
            return "function", choice
        case {"type": "function", "function": {"name": str() as name}} | {"name": str() as name}:
            return "function", name
        case {"function": {"name": str() as name}}:
            return "function", name
    refuse_shape("data did not match any variant of untagged enum ToolChoice", "tool_choice")
