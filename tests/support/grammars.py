"""Schemas on which the two compilers inside TGI are compared: the shipped examples, and odder ones."""

from __future__ import annotations

from typing import Any

from router_ext.guard.automaton import inline_functions
from router_ext.guard.examples import COMMON, TOOLS
from router_ext.guard.grammar import functions_of, tool_schema

_ODD: dict[str, dict[str, Any]] = {
    "no properties": {"properties": {}},
    "all optional": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "null"}}},
    "required in the middle": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["b"]},
    "lengths": {"properties": {"a": {"type": "string", "minLength": 2, "maxLength": 5}}, "required": ["a"]},
    "pattern with anchors": {"properties": {"a": {"type": "string", "pattern": "^a+b$"}}, "required": ["a"]},
    "formats": {"properties": {k: {"type": "string", "format": k} for k in ("date", "time", "date-time", "uuid")}},
    "digits": {"properties": {"a": {"type": "integer", "minDigits": 1, "maxDigits": 3}}, "required": ["a"]},
    "number digits": {"properties": {"a": {"type": "number", "maxDigitsInteger": 3, "maxDigitsFraction": 2}}},
    "constant": {"properties": {"a": {"const": "x.y*"}, "b": {"const": 3}}, "required": ["a", "b"]},
    "enum of kinds": {"properties": {"a": {"enum": ["x", 1, True, None]}}, "required": ["a"]},
    "any of": {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}, "required": ["a"]},
    "one of": {"properties": {"a": {"oneOf": [{"type": "boolean"}, {"type": "null"}]}}, "required": ["a"]},
    "all of": {"properties": {"a": {"allOf": [{"type": "string"}]}}, "required": ["a"]},
    "prefix items": {"properties": {"a": {"prefixItems": [{"type": "string"}, {"type": "integer"}]}}},
    "array without items": {"properties": {"a": {"type": "array"}}, "required": ["a"]},
    "array of one or more": {"properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 1}}},
    "empty array": {"properties": {"a": {"type": "array", "items": {"type": "integer"}, "maxItems": 0}}},
    "map": {"properties": {"a": {"type": "object", "additionalProperties": {"type": "integer"}}}, "required": ["a"]},
    "any object": {"properties": {"a": {"type": "object"}}, "required": ["a"]},
    "several types": {"properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]},
    "reference beside type": {
        "properties": {"a": {"$ref": "#/$defs/x", "type": "string"}},
        "$defs": {"x": {"type": "integer"}},
    },
    "reference into properties": {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}},
    "reference of a reference": {
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"type": "boolean"}},
    },
    "unsupported": {"properties": {"a": {"id": "3"}}},
    "names to escape": {"properties": {"a.b(c)": {"type": "integer"}, 'q"t': {"type": "null"}}},
}


def schemas() -> dict[str, dict[str, Any]]:
    """Name to schema."""
    found = {name: field["value"] for name, field in COMMON.items() if field["type"] == "json"}
    found |= _ODD
    for name, tools in TOOLS.items():
        for mode in ("auto", "required"):
            found[f"tools: {name}, {mode}"] = tool_schema(inline_functions(functions_of(tools, mode, None)))
    return found
