"""What a request forces its answer into, in the one form that the guard judges: a regex, or a JSON schema.

    Grammar.of_field({"type": "json", "value": {...}})     # `grammar` of /generate, `response_format` of a chat
    Grammar.of_tools(tools, "auto", None)                  # the schema TGI makes of a chat's tools

Source: ``router/src/{lib,validation,infer/tool_grammar}.rs`` of TGI.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from router_ext.errors import GrammarRefused

DIGEST_BYTES = 16


class Kind(enum.StrEnum):
    """What the text of a grammar is."""

    REGEX = "regex"
    SCHEMA = "schema"
    TOOLS = "tools"


@dataclass(frozen=True, slots=True)
class Grammar:
    """``text``: the regex, or JSON: the schema, the list of functions. ``digest``: hex, of both fields."""

    kind: Kind
    text: str
    digest: str

    @classmethod
    def regex(cls, text: str) -> Grammar:
        return cls(Kind.REGEX, text, _digest(Kind.REGEX, text.encode("utf-8", "surrogatepass")))

    @classmethod
    def schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """The order of keys is the order of the fields in the answer, so it is part of the digest.

        Raises:
            GrammarRefused: nested deeper than JSON can be written (254 levels).
        """
        return cls._of_json(Kind.SCHEMA, schema)

    @classmethod
    def _of_json(cls, kind: Kind, value: Any) -> Grammar:
        try:
            data = orjson.dumps(value)
        except TypeError:
            raise GrammarRefused(
                "Input validation error: the grammar is nested too deeply", code="grammar_too_expensive"
            ) from None
        return cls(kind, data.decode(), _digest(kind, data))

    @classmethod
    def of_field(cls, field: Mapping[str, Any]) -> Grammar | None:
        """Of a checked ``grammar`` or ``response_format`` object; None where TGI sees none (an empty regex)."""
        value = field["value"]
        if field["type"] == "regex":
            return cls.regex(value) if value else None
        if field["type"] == "json_schema":
            value = value["schema"]
        return cls.schema(orjson.loads(value) if isinstance(value, str) else value)

    @classmethod
    def of_tools(cls, tools: Sequence[Mapping[str, Any]], mode: str, name: str | None) -> Grammar | None:
        """Of a chat's checked tools; None where TGI forces nothing.

        Args:
            mode: ``auto``, ``required``, ``function`` (then ``name`` is the one), ``none``.
        """
        functions = functions_of(tools, mode, name)
        return cls._of_json(Kind.TOOLS, functions) if functions else None


_NO_TOOL = {"name": "no_tool", "parameters": {"type": "object"}}
"""What TGI adds where the model may choose none."""


def functions_of(tools: Iterable[Mapping[str, Any]], mode: str, name: str | None) -> list[Mapping[str, Any]]:
    """The functions the answer may call."""
    functions = [tool["function"] for tool in tools]
    if mode == "none" or not functions:
        return []
    if mode == "function":
        return [function for function in functions if function["name"] == name][:1]
    return [*functions, _NO_TOOL] if mode == "auto" else functions


def tool_schema(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema TGI makes of functions: of each only properties and required are kept, with ``_name`` before them."""
    return {
        "$functions": {function["name"]: _function_schema(function) for function in functions},
        "properties": {"function": {"anyOf": [{"$ref": f"#/$functions/{f['name']}"} for f in functions]}},
    }


def parameters_key(function: Mapping[str, Any]) -> str:
    """Under which of the names TGI takes a function's arguments stand."""
    return "parameters" if "parameters" in function else "arguments"


def _function_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {"_name": {"type": "string", "const": function["name"]}}
    required: list[Any] = ["_name"]
    arguments = function.get(parameters_key(function))
    if isinstance(arguments, dict):
        own = arguments.get("properties")
        if isinstance(own, dict):
            properties.update(own)
        needed = arguments.get("required")
        if isinstance(needed, list):
            required += needed
    return {"description": function.get("description") or "", "properties": properties, "required": required}


def _digest(kind: Kind, data: bytes) -> str:
    return blake2b(kind.encode() + b"\0" + data, digest_size=DIGEST_BYTES).hexdigest()
