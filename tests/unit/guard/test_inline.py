"""References of schemas: followed, counted, never endless."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router_ext.guard.examples import HAZARDS
from router_ext.guard.inline import SchemaRefused, inline

A = {"type": "integer"}


def wrap(schema: dict[str, Any], **defs: Any) -> dict[str, Any]:
    return {"properties": {"a": schema}, "$defs": defs} if defs else {"properties": {"a": schema}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (wrap({"$ref": "#/$defs/x"}, x=A), wrap(A)),
        (wrap({"$ref": "#/$defs/x"}, x={"$ref": "#/$defs/y"}, y=A), wrap(A)),
        (wrap({"$ref": "#/$defs/x~1y%20z~0"}, **{"x/y z~": A}), wrap(A)),
        (wrap({"anyOf": [{"$ref": "#/$defs/x"}]}, x=A), wrap({"anyOf": [A]})),
        (wrap({"type": "array", "items": {"$ref": "#/$defs/x"}}, x=A), wrap({"type": "array", "items": A})),
        ({"properties": {"a": A, "b": {"$ref": "#/properties/a"}}}, {"properties": {"a": A, "b": A}}),
        ({"properties": {"b": {"$ref": "#/anyOf/0"}}, "anyOf": [A]}, {"properties": {"b": A}, "anyOf": [A]}),
        # What stands before `$ref` wins in the compiler, what stands behind it loses.
        (wrap({"$ref": "#/$defs/x", "const": 3}, x=A), wrap({"const": 3})),
        (wrap({"$ref": "#/$defs/x", "type": "string"}, x=A), wrap(A)),
        # Data that looks like a reference is data.
        (wrap({"enum": [{"$ref": "#"}]}), wrap({"enum": [{"$ref": "#"}]})),
        ({"properties": {"$ref": A}}, {"properties": {"$ref": A}}),
        ({"properties": {"$defs": A}}, {"properties": {"$defs": A}}),
        # What points nowhere stays for the compiler to name.
        (wrap({"$ref": "#/nope"}, x=A), wrap({"$ref": "#/nope"}, x=A)),
        (wrap({"$ref": "https://example.org/x"}), wrap({"$ref": "https://example.org/x"})),
    ],
)
def test_references_become_what_they_point_to(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = json.dumps(schema)
    assert inline(schema) == expected
    assert json.dumps(schema) == before, "the client's schema was changed"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#"}}},
        wrap({"$ref": "#/$defs/x"}, x={"properties": {"b": {"$ref": "#/$defs/x"}}}),
        wrap({"$ref": "#/$defs/x"}, x={"items": {"$ref": "#/$defs/y"}}, y={"anyOf": [{"$ref": "#/%24defs/x"}]}),
        wrap({"$ref": "#/properties/a"}),
    ],
)
def test_a_circle_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaRefused, match="refers to itself") as refused:
        inline(schema)
    assert not refused.value.is_cost


def test_a_circle_that_nobody_enters_is_none() -> None:
    schema = wrap(A, x={"properties": {"b": {"$ref": "#/$defs/x"}}})
    assert inline(schema) == wrap(A)


def test_doubling_definitions_are_counted_before_they_are_made() -> None:
    with pytest.raises(SchemaRefused, match="more than 20000 nodes") as refused:
        inline(HAZARDS["22 doubling definitions"]["value"])
    assert refused.value.is_cost


def test_a_schema_is_counted_with_its_data() -> None:
    with pytest.raises(SchemaRefused, match="more than 100 nodes"):
        inline(wrap({"enum": list(range(100))}), max_nodes=100)
    with pytest.raises(SchemaRefused, match="more than 10 deep"):
        inline(wrap({"const": json.loads("[" * 20 + "]" * 20)}), max_depth=10)


def test_depth_counts_through_references() -> None:
    deep: dict[str, Any] = A
    for _ in range(10):
        deep = {"items": deep}
    halves = wrap({"items": {"items": {"$ref": "#/$defs/x"}}}, x=deep)
    assert inline(halves, max_depth=16)
    with pytest.raises(SchemaRefused, match="deep"):
        inline(halves, max_depth=13)
    twice = {"properties": {"flat": {"$ref": "#/$defs/x"}, "a": halves["properties"]["a"]}, "$defs": {"x": deep}}
    with pytest.raises(SchemaRefused, match="deep"):
        inline(twice, max_depth=13)
