"""From a grammar to the automaton TGI would compute with, by the very compilers it uses.

Runs in short-lived children only (``nursery``): a schema or a regex can ask for any amount of time and memory here.

    schema --inline--> schema --outlines-core--> regex --interegular--> automaton --outlines-core--> states

TGI's shard goes on from the states to an index over its vocabulary; its time grows with states x vocabulary, so the
states are all one has to know. Source: ``server/.../utils/logits_process.py`` of TGI, ``guide.py`` of outlines-core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from router_ext.guard.grammar import Kind, parameters_key, tool_schema
from router_ext.guard.inline import SchemaRefused, inline
from router_ext.guard.messages import Job, Proof

MAX_REGEX_BYTES = 65_536
"""Of a regex, given or made of a schema: parsing takes a microsecond and more for each character."""

_NO_MATCH = "The vocabulary does not allow us to build a sequence that matches the input"
"""What TGI's shard says where nothing can be generated."""


def prove(job: Job) -> Proof:
    """Judge one grammar. Unbounded in time and memory: the process has limits, not this function."""
    proof = Proof(digest=job.digest)
    try:
        regex = job.text
        if job.kind == Kind.SCHEMA:
            schema = orjson.loads(job.text)
            _check_schema(schema)
            inlined = inline(schema)
            if inlined != schema:
                proof.inlined = orjson.dumps(inlined).decode()
            regex = regex_of(inlined)
        elif job.kind == Kind.TOOLS:
            functions = orjson.loads(job.text)
            known = inline_functions(functions)
            if known != functions:
                proof.inlined = orjson.dumps(known).decode()
            schema = tool_schema(known)
            _check_schema(schema)
            regex = regex_of(inline(schema))
        proof.regex_bytes = len(regex.encode("utf-8", "surrogatepass"))
        if proof.regex_bytes > MAX_REGEX_BYTES:
            raise SchemaRefused(
                f"the grammar's regex has {proof.regex_bytes} bytes, at most {MAX_REGEX_BYTES} are compiled",
                is_cost=True,
            )
        proof.states = states_of(regex)
    except SchemaRefused as error:
        proof.problem, proof.is_cost = str(error), error.is_cost
    except RecursionError:
        proof.problem, proof.is_cost = "the grammar is nested too deeply to be compiled", True
    except MemoryError:
        proof.problem, proof.is_cost = "the grammar needs more memory to be compiled than the guard has", True
    except Exception as error:  # whatever a compiler raises for it is TGI's 424 for everybody in its batch
        proof.problem = str(error) or f"the compiler fails with {type(error).__name__}"
    return proof


def _check_schema(schema: Any) -> None:
    """What TGI's router checks before it compiles."""
    import jsonschema_rs

    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as error:
        raise SchemaRefused(f"grammar is not valid: {error.message}") from None


def inline_functions(functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Functions whose arguments have no references: TGI copies the properties alone, away from what they refer to.

    Raises:
        SchemaRefused: as ``inline``.
    """
    found = []
    for function in functions:
        key = parameters_key(function)
        arguments = function.get(key)
        found.append({**function, key: inline(arguments)} if isinstance(arguments, dict) else dict(function))
    return found


def regex_of(schema: Mapping[str, Any]) -> str:
    """The regex of an inlined schema.

    Raises:
        SchemaRefused: the compiler does not take it.
    """
    from outlines_core.fsm.outlines_core_rs import build_regex_from_schema

    try:
        return str(build_regex_from_schema(orjson.dumps(schema).decode()))
    except ValueError as error:
        raise SchemaRefused(f"cannot compile regex from schema: {error}") from None


def automaton_of(regex: str) -> Any:
    """The deterministic automaton over bytes (``BetterFSM`` of outlines-core).

    Raises:
        Exception: whatever the compilers raise for a regex they do not take, which is what TGI's shard raises.
    """
    import interegular
    from outlines_core.fsm.regex import make_byte_level_fsm, make_deterministic_fsm

    reduced = interegular.parse_pattern(regex).to_fsm().reduce()  # type: ignore[no-untyped-call]
    return make_deterministic_fsm(make_byte_level_fsm(reduced, keep_utf8=True))[0]


def states_of(regex: str) -> int:
    """States of the automaton over bytes.

    Raises:
        Exception: as ``automaton_of``, or nothing can be generated.
    """
    automaton = automaton_of(regex)
    if not any(automaton.finals.intersection(after.values()) for after in automaton.map.values()):
        raise ValueError(_NO_MATCH)
    return len(automaton.states)
