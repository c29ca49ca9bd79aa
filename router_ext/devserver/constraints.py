"""From a request's grammar to what its generation is bound to: the part of TGI's validation that is about grammars.

Its router checks a schema and makes a regex of it, in time and memory without a limit; its shard compiles the regex.
What kills or freezes the two is recognised here before it does the same to this machine: a schema that refers to
itself overflows TGI's stack, one whose references double gives a regex that its shard never finishes.
Source: ``router/src/validation.rs`` of TGI.
"""

from __future__ import annotations

from typing import Any

import orjson

from router_ext.devserver.constraint import Constraint, Effect, Hazard, ServerDies
from router_ext.devserver.generation import invalid
from router_ext.guard.inline import SchemaRefused, inline

MAX_DEPTH = 250
"""Of an inlined schema that is still compiled; a request's body has at most 128 levels of JSON."""


def check_schema(schema: Any) -> None:
    """What is tested before a schema is compiled.

    Raises:
        GenerationFailed: it is no schema, or has no properties.
    """
    import jsonschema_rs

    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as error:
        raise invalid(f"grammar is not valid: {error.message}") from None
    if not isinstance(schema, dict) or "properties" not in schema:
        raise invalid("grammar is not valid: Grammar must have a 'properties' field")


def inlined(schema: dict[str, Any]) -> dict[str, Any] | None:
    """The schema without references, None if it is too large for any compiler.

    Raises:
        ServerDies: it refers to itself.
    """
    try:
        return inline(schema, max_depth=MAX_DEPTH)
    except RecursionError:
        raise ServerDies("a schema with too deep a chain of references overflows the stack") from None
    except SchemaRefused as error:
        if error.is_cost:
            return None
        raise ServerDies(f"{error}, which overflows the stack") from None


def compiled(kind: str, value: Any) -> Constraint | None:
    """What a ``grammar`` binds to, None for an empty regex.

    Args:
        kind: ``json``, ``json_object``, ``json_schema``, ``regex``.

    Raises:
        GenerationFailed: as TGI refuses it.
        ServerDies: a schema that TGI's process does not survive.
    """
    if kind == "regex":
        return Constraint(value) if value else None
    schema = schema_of(kind, value)
    check_schema(schema)
    if inlined(schema) is None:
        return Constraint(hazard=Hazard(Effect.FREEZE))
    return Constraint(regex_of(schema))


def schema_of(kind: str, value: Any) -> Any:
    """The schema in a ``grammar`` that is no regex."""
    return value["schema"] if kind == "json_schema" else value


def regex_of(schema: dict[str, Any]) -> str:
    """The regex of a checked schema.

    Raises:
        GenerationFailed: there is none.
    """
    from outlines_core.fsm.outlines_core_rs import build_regex_from_schema

    try:
        return str(build_regex_from_schema(orjson.dumps(schema).decode()))
    except ValueError as error:
        raise invalid(f"cannot compile regex from schema: {error}") from None
