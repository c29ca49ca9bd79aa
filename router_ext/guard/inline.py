"""Local references of a JSON schema replaced by what they point to.

TGI's schema compiler follows ``$ref`` without end: a schema that refers to itself kills its process, one whose
definitions double gives a regex of any size, and a ``$ref`` inside a tool points nowhere, because only the tool's
properties are copied. So references are followed here, where both a cycle and the size are seen before they cost.

    inline({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "integer"}}})
    # {"properties": {"a": {"type": "integer"}}}

The walk goes where the compiler goes (outlines-core 0.1): of several keywords beside each other it uses the first of
``_BEFORE_REF``, then ``$ref``, then ``type``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

MAX_NODES = 20_000
"""Objects, lists and values of the inlined schema. TGI's own regex for so many has some hundred kilobytes."""

MAX_DEPTH = 64
"""Nesting after inlining. TGI's JSON reader takes 128 levels, its compiler recurses several calls deep for each."""

_BEFORE_REF = ("properties", "allOf", "anyOf", "oneOf", "prefixItems", "enum", "const")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_DEFINITIONS = ("$defs", "definitions")


class SchemaRefused(ValueError):
    """A schema that cannot be inlined. ``is_cost``: it is too large, not wrong."""

    def __init__(self, message: str, *, is_cost: bool = False) -> None:
        super().__init__(message)
        self.is_cost = is_cost


def inline(schema: Mapping[str, Any], *, max_nodes: int = MAX_NODES, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The schema without local references; those that point nowhere stay, for the compiler to name.

    Cost: O(nodes of the input + ``max_nodes``).

    Raises:
        SchemaRefused: a reference leads back to itself, or there would be more than ``max_nodes`` or ``max_depth``.
    """
    walk = _Walk(schema, max_nodes, max_depth)
    found = walk.schema(schema, 0)[0]
    if not walk.has_dangling:
        for name in _DEFINITIONS:
            found.pop(name, None)
    return found


class _Walk:
    def __init__(self, root: Mapping[str, Any], max_nodes: int, max_depth: int) -> None:
        self._root = root
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._open: list[str] = []
        self._done: dict[str, tuple[dict[str, Any], int, int]] = {}
        self.has_dangling = False

    def schema(self, node: Mapping[str, Any], depth: int) -> tuple[dict[str, Any], int, int]:
        """(inlined, nodes, height) of a schema object at ``depth``."""
        self._check_depth(depth)
        ref = node.get("$ref")
        if isinstance(ref, str):
            if any(key in node for key in _BEFORE_REF):
                node = {key: value for key, value in node.items() if key != "$ref"}
            else:
                target = self._resolve(ref)
                if target is not None:
                    return self._referred(ref, target, depth)
                self.has_dangling = True
        out: dict[str, Any] = {}
        nodes, height = 1, 0
        for key, value in node.items():
            if depth == 0 and key in _DEFINITIONS:
                out[key] = value
                continue
            kept, n, h = self._keyword(key, value, depth + 1)
            out[key] = kept
            nodes, height = nodes + n, max(height, h + 1)
            self._check_nodes(nodes)
        return out, nodes, height

    def _keyword(self, key: str, value: Any, depth: int) -> tuple[Any, int, int]:
        if key == "properties" and isinstance(value, dict):
            found = {name: self._sub(sub, depth + 1) for name, sub in value.items()}
            return self._joined({name: sub for name, (sub, _, _) in found.items()}, list(found.values()))
        if key in _LISTS and isinstance(value, list):
            items = [self._sub(sub, depth + 1) for sub in value]
            return self._joined([sub for sub, _, _ in items], items)
        if key in _SINGLE:
            return self._sub(value, depth)
        nodes, height = _size(value, self._max_depth - depth)
        self._check_nodes(nodes)
        self._check_depth(depth + height)
        return value, nodes, height

    def _joined(self, whole: Any, parts: list[tuple[Any, int, int]]) -> tuple[Any, int, int]:
        nodes = 1 + sum(n for _, n, _ in parts)
        self._check_nodes(nodes)
        return whole, nodes, 1 + max((h for _, _, h in parts), default=0)

    def _sub(self, value: Any, depth: int) -> tuple[Any, int, int]:
        return self.schema(value, depth) if isinstance(value, dict) else (value, 1, 0)

    def _referred(self, ref: str, target: Mapping[str, Any], depth: int) -> tuple[dict[str, Any], int, int]:
        if ref in self._open:
            raise SchemaRefused(f"the schema refers to itself: {' > '.join([*self._open, ref])[:200]}")
        found = self._done.get(ref)
        if found is None:
            self._open.append(ref)
            found = self.schema(target, depth)
            self._open.pop()
            self._done[ref] = found
        self._check_depth(depth + found[2])
        return found

    def _resolve(self, ref: str) -> Mapping[str, Any] | None:
        """What a local reference points to, None if it is none or points to nothing that is a schema."""
        if not ref.startswith("#"):
            return None
        place: Any = self._root
        for part in ref[1:].strip("/").split("/") if ref not in ("#", "#/") else ():
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict):
                place = place.get(name)
            elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
                place = place[int(name)]
            else:
                return None
        return place if isinstance(place, dict) else None

    def _check_nodes(self, nodes: int) -> None:
        if nodes > self._max_nodes:
            raise SchemaRefused(
                f"the schema has more than {self._max_nodes} nodes once its references are followed", is_cost=True
            )

    def _check_depth(self, depth: int) -> None:
        if depth > self._max_depth:
            raise SchemaRefused(f"the schema is nested more than {self._max_depth} deep", is_cost=True)


def _size(value: Any, room: int) -> tuple[int, int]:
    """Nodes and height of plain JSON; below ``room`` levels it is not looked at."""
    if room < 0:
        return 1, 0
    if isinstance(value, dict):
        parts = [_size(part, room - 1) for part in value.values()]
    elif isinstance(value, list):
        parts = [_size(part, room - 1) for part in value]
    else:
        return 1, 0
    return 1 + sum(n for n, _ in parts), 1 + max((h for _, h in parts), default=0)
