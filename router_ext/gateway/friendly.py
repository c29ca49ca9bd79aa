"""What trips users of a TGI server, put into the form that TGI takes and that means what they meant.

OpenAI's clients send nulls, a single stop string, neutral values and OpenAI's own ``response_format``; TGI refuses
most of it, and reads a presence penalty of 0 as a repetition penalty of 2. A body is rewritten here before anything
is checked, so the checks that follow, and a backend that gets the body whole, see TGI's form. A new dict is returned
and only the levels that change are copied. ``docs/compatibility.md`` lists every case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router_ext.gateway.shapes import to_f32

_STRING = r'"([^"\\\x00-\x1f\x7f]|\\["\\/bfnrt])*"'
_SCALAR = rf"({_STRING}|-?(0|[1-9][0-9]*)(\.[0-9]+)?|true|false|null)"


def _object_of(value: str) -> str:
    member = f"{_STRING}: ?{value}"
    return rf"\{{({member}(, ?{member})*)?\}}"


def _list_of(value: str) -> str:
    return rf"\[({value}(, ?{value})*)?\]"


JSON_OBJECT = _object_of(f"({_SCALAR}|{_object_of(_SCALAR)}|{_list_of(_SCALAR)})")
"""Regex of a JSON object whose values are scalars, or objects or lists of scalars.

A regex cannot nest without end, and each level doubles what a backend compiles: this one has 87 states (0.8 s of its
CPU on a vocabulary of 49,152), one more level of lists and objects 213.
"""


def friendly_native(data: Mapping[str, Any]) -> dict[str, Any]:
    """A body of TGI's own paths."""
    out = {name: value for name, value in data.items() if value is not None or name == "inputs"}
    parameters = out.get("parameters")
    if isinstance(parameters, dict):
        p = {name: value for name, value in parameters.items() if value is not None}
        for field in ("top_p", "typical_p"):
            _drop(p, field, 1.0)
        _list_stops(p)
        out["parameters"] = p
    return out


def friendly_completion(data: Mapping[str, Any]) -> dict[str, Any]:
    """A body of ``/v1/completions``."""
    out = {name: value for name, value in data.items() if value is not None or name == "prompt"}
    _drop(out, "top_p", 1.0)
    _list_stops(out)
    return out


def friendly_chat(data: Mapping[str, Any]) -> dict[str, Any]:
    """A body of ``/v1/chat/completions``."""
    out = {name: value for name, value in data.items() if value is not None or name == "messages"}
    _drop(out, "top_p", 1.0)
    _drop(out, "presence_penalty", 0.0)
    _list_stops(out)
    if out.get("logit_bias") == {}:
        del out["logit_bias"]
    options = out.get("stream_options")
    if isinstance(options, dict):
        out["stream_options"] = {name: value for name, value in options.items() if value is not None}
    if "max_tokens" in out and out.get("max_completion_tokens") == out["max_tokens"]:
        del out["max_completion_tokens"]
    tools = out.get("tools")
    if tools == []:
        del out["tools"]
    elif isinstance(tools, list):
        out["tools"] = [_with_parameters(tool) for tool in tools]
    if "response_format" in out:
        response_format = _response_format(out.pop("response_format"))
        if response_format is not None:
            out["response_format"] = response_format
    return out


def _drop(fields: dict[str, Any], name: str, neutral: float) -> None:
    """Leave a field out whose value changes nothing."""
    value = fields.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and to_f32(value) == neutral:
        del fields[name]


def _list_stops(fields: dict[str, Any]) -> None:
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]


def _with_parameters(tool: Any) -> Any:
    """OpenAI's functions may go without parameters."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or any(function.get(name) is not None for name in ("parameters", "arguments")):
        return tool
    kept = {name: value for name, value in function.items() if value is not None}
    return {**tool, "function": {**kept, "parameters": {"type": "object", "properties": {}}}}


def _response_format(given: Any) -> Any:
    """TGI's form of OpenAI's; None for plain text."""
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_object"} if given.get("value") is None:
            return {"type": "regex", "value": JSON_OBJECT}
        case {"type": "json_schema", "json_schema": {"schema": schema} as config} if given.get("value") is None:
            value = {"schema": schema}
            if config.get("name") is not None:
                value = {"name": config["name"], **value}
            return {"type": "json_schema", "value": value}
    return given
