"""``--sim-hazards``: grammars do to the model engine what they do to a TGI, and nothing is compiled.

Known grammars have their effect from ``TABLE`` (``docs/model-server.md`` shows it); any other stalls everybody by

    0.15 s + 1e-7 s x counted states x vocabulary + 3.7 s x 3.2 ** (optional fields - 8), the last from 5 fields on

and freezes the server where that exceeds five minutes. States are counted in the regex: one for each character or
class, times the upper bounds of the repeats around it. A schema that refers to itself ends the process; one whose
references give more than the compilers can take freezes it; a regex that is none fails its batch.

A grammar that has stalled is kept as a compiled one would be, and does not stall again while it is. The answer is
not bound to the grammar, save that of a chat with tools, which calls the first one without arguments.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from router_ext.devserver.codec import Codec
from router_ext.devserver.constraint import Constraint, Effect, Hazard, ServerDies
from router_ext.devserver.constraints import check_schema, inlined, regex_of, schema_of
from router_ext.guard.examples import HAZARDS, TOOLS
from router_ext.guard.grammar import Grammar, functions_of, tool_schema
from router_ext.guard.verdict import BASE_STALL_S, ENTRY_S

FROZEN_S = 300.0
"""A stall beyond this is a freeze: the recorded TGI was ended after as long."""

_NO_MATCH = "The vocabulary does not allow us to build a sequence that matches the input"

TABLE: dict[str, Hazard] = {
    "schema that refers to itself": Hazard(Effect.DIE, message="the schema refers to itself"),
    "12 optional fields": Hazard(Effect.FREEZE),
    "40 required fields": Hazard(Effect.STALL, 6.0),
    "string of at most 200": Hazard(Effect.STALL, 7.3),
    "22 doubling definitions": Hazard(Effect.FREEZE),
    "regex: unbalanced": Hazard(Effect.FAIL),
    "regex: look-ahead": Hazard(Effect.FAIL, message=_NO_MATCH),
    "regex: back reference": Hazard(Effect.FAIL, message="Group references are not implemented"),
    "regex: impossible class": Hazard(Effect.FAIL, message=_NO_MATCH),
    "regex: [a-z]{2000}": Hazard(Effect.STALL, 14.0),
    r"regex: [\s\S]{300}": Hazard(Effect.STALL, 9.0),
    "regex: .{0,500}": Hazard(Effect.STALL, 10.0),
    "regex: nested repeats": Hazard(Effect.STALL, 3.4),
    "regex: 3,000 characters": Hazard(Effect.STALL, 15.0),
    "regex: 500 brackets": Hazard(Effect.DIE, message="maximum recursion depth exceeded"),
}
"""Effects by the names of ``guard.examples.HAZARDS``; those that are missing are refused before they have any."""

TOOLS_TABLE: dict[str, Hazard] = {"20 tools of 3 fields": Hazard(Effect.STALL, 1.2)}
"""Effects by the names of ``guard.examples.TOOLS``, where counting is far off: tools share most of their automaton."""

_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_GROUP = re.compile(r"\((\?(:|=|!|<=|<!|P<\w+>))?")


class Hazards:
    """What a grammar binds a generation to, and does to the server (``validation.Constrain``)."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        grammars = {name: Grammar.of_field(HAZARDS[name]) for name in TABLE}
        self._known = {grammar.digest: TABLE[name] for name, grammar in grammars.items() if grammar is not None}
        for name, hazard in TOOLS_TABLE.items():
            for mode in ("auto", "required"):
                schema = tool_schema(functions_of(TOOLS[name], mode, None))
                self._known[Grammar.schema(schema).digest] = hazard

    def __call__(self, kind: str, value: Any) -> Constraint | None:
        """See ``constraints.compiled``."""
        if kind == "regex":
            return self._of_regex(value) if value else None
        schema = schema_of(kind, value)
        check_schema(schema)
        key = Grammar.schema(schema).digest
        hazard = self._known.get(key) or self._of_schema(schema)
        if hazard.effect is Effect.DIE:
            raise ServerDies(hazard.message)
        return Constraint(hazard=hazard, script=self._script(schema), key=key)

    def _of_regex(self, regex: str) -> Constraint:
        key = Grammar.regex(regex).digest
        hazard = self._known.get(key)
        if hazard is None:
            try:
                re.compile(regex)
                hazard = self._stall(counted_states(regex))
            except RecursionError:
                hazard = TABLE["regex: 500 brackets"]
            except (re.error, OverflowError, ValueError):
                hazard = Hazard(Effect.FAIL)
        return Constraint(hazard=hazard, key=key)

    def _of_schema(self, schema: dict[str, Any]) -> Hazard:
        plain = inlined(schema)
        if plain is None:
            return Hazard(Effect.FREEZE)
        return self._stall(counted_states(regex_of(plain)), optional_fields(plain))

    def _stall(self, states: int, optional: int = 0) -> Hazard:
        stall_s = BASE_STALL_S + ENTRY_S * states * self._codec.size
        if optional >= 5:
            stall_s += 3.7 * 3.2 ** (min(optional, 100) - 8)
        return Hazard(Effect.FREEZE) if stall_s > FROZEN_S else Hazard(Effect.STALL, stall_s)

    def _script(self, schema: dict[str, Any]) -> tuple[int, ...]:
        functions = schema.get("$functions")
        if not functions:
            return ()
        call = orjson.dumps({"function": {"_name": next(iter(functions))}}).decode()
        return tuple(self._codec.encode(call, add_special_tokens=False))


def optional_fields(schema: Any) -> int:
    """The most optional fields that one object of a schema has."""
    if isinstance(schema, list):
        return max(map(optional_fields, schema), default=0)
    if not isinstance(schema, dict):
        return 0
    fields, required = schema.get("properties"), schema.get("required")
    own = 0
    if isinstance(fields, dict):
        own = len(fields) - (len(required) if isinstance(required, list) else 0)
    return max(own, *map(optional_fields, schema.values()), 0)


def counted_states(regex: str) -> int:
    """Characters and classes of a regex, each times the upper bounds of the repeats around it. O(characters).

    Raises:
        ValueError: its brackets do not match.
    """
    sums, lasts = [0], [0]
    at = 0
    while at < len(regex):
        char = regex[at]
        if char == "(":
            found = _GROUP.match(regex, at)
            assert found is not None
            at = found.end()
            sums.append(0)
            lasts.append(0)
            continue
        if char == "{" and (found := _REPEAT.match(regex, at)):
            more = lasts[-1] * (max(int(found[2] or found[1]), 1) - 1)
            sums[-1] += more
            lasts[-1] += more
            at = found.end()
            continue
        at += 1
        if char in "|*+?^$":
            continue
        size = 1
        if char == ")":
            size = sums.pop()
            lasts.pop()
            if not sums:
                raise ValueError("brackets do not match")
        elif char == "\\":
            at += 1
        elif char == "[" and (found := _CLASS.match(regex, at - 1)):
            at = found.end()
        sums[-1] += size
        lasts[-1] = size
    if len(sums) != 1:
        raise ValueError("brackets do not match")
    return sums[0]
