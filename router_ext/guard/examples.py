"""Grammars as people write them: what the guard must let through fast, and what it must not.

``COMMON`` are the field's everyday ones (extraction, classification, tool calls, identifiers); ``HAZARDS`` each take a
TGI down, freeze it, stall it for seconds, or fail the requests in one batch with them. ``fairlane bench grammars``
judges them all, the hazards bench sends them.
"""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string"}
_INTEGER = {"type": "integer"}
_NUMBER = {"type": "number"}
_FLAG = {"type": "boolean"}


def record(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """An object schema: its required fields, then its optional ones."""
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def one_of(*words: str) -> dict[str, Any]:
    """One of some words."""
    return {"type": "string", "enum": list(words)}


def many(item: dict[str, Any], **limits: int) -> dict[str, Any]:
    """A list."""
    return {"type": "array", "items": item, **limits}


def json_grammar(schema: dict[str, Any]) -> dict[str, Any]:
    """``grammar`` of a generate request."""
    return {"type": "json", "value": schema}


def regex_grammar(text: str) -> dict[str, Any]:
    """Likewise, of a regex."""
    return {"type": "regex", "value": text}


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """One tool of a chat."""
    return {"type": "function", "function": {"name": name, "description": f"Calls {name}.", "parameters": parameters}}


_ADDRESS = record({"street": _TEXT, "city": _TEXT, "postcode": {"type": "string", "pattern": "[0-9]{5}"}})
_POINT = record({"x": _NUMBER, "y": _NUMBER})

COMMON: dict[str, dict[str, Any]] = {
    "yes or no": json_grammar(record({"answer": one_of("yes", "no")})),
    "sentiment": json_grammar(record({"sentiment": one_of("positive", "neutral", "negative")})),
    "sentiment with score": json_grammar(record({"label": one_of("positive", "negative"), "score": _NUMBER})),
    "one of 12 classes": json_grammar(record({"class": one_of(*(f"class_{i}" for i in range(12)))})),
    "labels": json_grammar(record({"labels": many(one_of("bug", "feature", "question", "docs"))})),
    "summary": json_grammar(record({"summary": _TEXT})),
    "question and answer": json_grammar(record({"question": _TEXT, "answer": _TEXT})),
    "reasoned answer": json_grammar(record({"reasoning": _TEXT, "answer": _TEXT, "confidence": _NUMBER})),
    "person": json_grammar(record({"name": _TEXT, "age": _INTEGER})),
    "person, optional contacts": json_grammar(record({"name": _TEXT, "age": _INTEGER}, email=_TEXT, phone=_TEXT)),
    "address": json_grammar(_ADDRESS),
    "person with address": json_grammar(record({"name": _TEXT, "address": _ADDRESS})),
    "invoice head": json_grammar(
        record({"number": _TEXT, "date": {"type": "string", "format": "date"}, "total": _NUMBER})
    ),
    "invoice lines": json_grammar(
        record({"lines": many(record({"item": _TEXT, "quantity": _INTEGER, "price": _NUMBER}))})
    ),
    "list of keywords": json_grammar(record({"keywords": many(_TEXT)})),
    "three keywords": json_grammar(record({"keywords": many(_TEXT, minItems=3, maxItems=3)})),
    "entities": json_grammar(record({"entities": many(record({"text": _TEXT, "kind": one_of("person", "place")}))})),
    "point": json_grammar(_POINT),
    "polygon": json_grammar(record({"points": many(_POINT)})),
    "flags": json_grammar(record({"is_spam": _FLAG, "is_toxic": _FLAG, "is_english": _FLAG})),
    "nullable field": json_grammar(record({"name": _TEXT, "end": {"anyOf": [{"type": "null"}, _INTEGER]}})),
    "shared definition": json_grammar(
        {**record({"from": {"$ref": "#/$defs/place"}, "to": {"$ref": "#/$defs/place"}}), "$defs": {"place": _POINT}}
    ),
    "identifier": json_grammar(record({"id": {"type": "string", "format": "uuid"}})),
    "regex: integer": regex_grammar(r"-?[0-9]{1,9}"),
    "regex: date": regex_grammar(r"[0-9]{4}-(0[1-9]|1[0-2])-([0-2][0-9]|3[01])"),
    "regex: choice": regex_grammar(r"(yes|no|maybe)"),
    "regex: e-mail": regex_grammar(r"[a-z0-9._+-]{1,32}@[a-z0-9-]{1,32}\.[a-z]{2,8}"),
    "regex: IPv4": regex_grammar(r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"),
    "regex: telephone": regex_grammar(r"\+?[0-9]{1,3}[ -]?([0-9]{2,4}[ -]?){2,3}[0-9]{2,4}"),
    "regex: three lines": regex_grammar(r"(- [^\n]{1,60}\n){3}"),
}

TOOLS: dict[str, list[dict[str, Any]]] = {
    "weather": [
        tool("get_weather", record({"city": _TEXT, "unit": one_of("celsius", "fahrenheit")})),
    ],
    "search and open": [
        tool("search", record({"query": _TEXT}, limit=_INTEGER)),
        tool("open", record({"url": _TEXT})),
    ],
    "no arguments": [tool("now", {"type": "object", "properties": {}})],
    "shared definition": [
        tool("move", {**record({"to": {"$ref": "#/$defs/p"}}), "$defs": {"p": _POINT}}),
    ],
    "20 tools of 3 fields": [tool(f"tool_{i}", record({"a": _TEXT, "b": _INTEGER, "c": _FLAG})) for i in range(20)],
}


def _doubling(levels: int) -> dict[str, Any]:
    """A kilobyte whose references, once followed, are two to the power of ``levels`` strings."""
    names = [f"d{i}" for i in range(levels)]
    below = [{"$ref": f"#/$defs/{name}"} for name in names[1:]] + [_TEXT]
    definitions = {name: record({"x": ref, "y": ref}) for name, ref in zip(names, below, strict=True)}
    return {**record({"a": {"$ref": "#/$defs/d0"}}), "$defs": definitions}


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = _TEXT
    for _ in range(levels):
        schema = record({"a": schema})
    return schema


def _fields(count: int) -> dict[str, Any]:
    return {f"f{i}": _TEXT for i in range(count)}


HAZARDS: dict[str, dict[str, Any]] = {
    "schema that refers to itself": json_grammar({"properties": {"a": {"$ref": "#"}}}),
    "12 optional fields": json_grammar(record({}, **_fields(12))),
    "40 required fields": json_grammar(record(_fields(40))),
    "string of at most 200": json_grammar(record({"a": {"type": "string", "maxLength": 200}})),
    "22 doubling definitions": json_grammar(_doubling(22)),
    "nested 40 deep": json_grammar(_nested(40)),
    "reference to nothing": json_grammar({"properties": {"a": {"$ref": "#/nope"}}}),
    "unknown type": json_grammar({"properties": {"a": {"type": "nope"}}}),
    "regex: unbalanced": regex_grammar("("),
    "regex: look-ahead": regex_grammar("(?=a)b"),
    "regex: back reference": regex_grammar(r"(a)\1"),
    "regex: impossible class": regex_grammar(r"[^\s\S]"),
    "regex: [a-z]{2000}": regex_grammar("[a-z]{2000}"),
    r"regex: [\s\S]{300}": regex_grammar(r"[\s\S]{300}"),
    "regex: .{0,500}": regex_grammar(".{0,500}"),
    "regex: nested repeats": regex_grammar("((a|b|c|d){1,40}(x|y){1,40}){1,6}"),
    "regex: 3,000 characters": regex_grammar("a" * 3000),
    "regex: 500 brackets": regex_grammar("(" * 500 + "a" + ")" * 500),
}
