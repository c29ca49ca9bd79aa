"""Grammars by the compilers TGI uses, in this process: only those that end."""

from __future__ import annotations

import orjson
import pytest

from router_ext.guard.automaton import prove
from router_ext.guard.examples import COMMON, HAZARDS, TOOLS
from router_ext.guard.grammar import Grammar
from router_ext.guard.messages import Job, Proof


def proof_of(grammar: Grammar | None) -> Proof:
    assert grammar is not None
    return prove(Job(grammar.digest, grammar.kind, grammar.text, 60.0, 0))


@pytest.mark.parametrize(
    ("regex", "states"),
    [("a", 2), ("abc|def", 6), ("[a-z]{20}", 21), (r"\d{3}-\d{4}", 9), ("(a|b)*", 1)],
)
def test_states_of_a_regex(regex: str, states: int) -> None:
    assert proof_of(Grammar.regex(regex)).states == states


@pytest.mark.parametrize(
    ("name", "problem", "is_cost"),
    [
        ("schema that refers to itself", "the schema refers to itself: # > #", False),
        ("22 doubling definitions", "the schema has more than 20000 nodes once its references are followed", True),
        ("nested 40 deep", "the schema is nested more than 64 deep", True),
        ("reference to nothing", "cannot compile regex from schema: Invalid reference path: nope", False),
        (
            "unknown type",
            "grammar is not valid: \"nope\" is not valid under any of the schemas listed in the 'anyOf' keyword",
            False,
        ),
        ("regex: unbalanced", "the compiler fails with InvalidSyntax", False),
        (
            "regex: look-ahead",
            "The vocabulary does not allow us to build a sequence that matches the input",
            False,
        ),
        ("regex: back reference", "Group references are not implemented", False),
        (
            "regex: impossible class",
            "The vocabulary does not allow us to build a sequence that matches the input",
            False,
        ),
        ("regex: 500 brackets", "the grammar is nested too deeply to be compiled", True),
    ],
)
def test_what_a_compiler_refuses_is_told_in_its_words(name: str, problem: str, is_cost: bool) -> None:
    proof = proof_of(Grammar.of_field(HAZARDS[name]))
    assert (proof.problem, proof.is_cost, proof.states) == (problem, is_cost, 0)


@pytest.mark.parametrize(
    ("name", "states"), [("regex: [a-z]{2000}", 2001), (r"regex: [\s\S]{300}", 1201), ("40 required fields", 712)]
)
def test_dear_grammars_are_known_by_their_states(name: str, states: int) -> None:
    proof = proof_of(Grammar.of_field(HAZARDS[name]))
    assert proof.problem is None
    assert proof.states == states


def test_a_long_regex_is_not_parsed() -> None:
    proof = proof_of(Grammar.regex("a" * 70_000))
    assert proof.is_cost
    assert proof.regex_bytes == 70_000
    assert "70000 bytes, at most 65536" in (proof.problem or "")


def test_the_backend_gets_a_schema_without_references() -> None:
    proof = proof_of(Grammar.of_field(COMMON["shared definition"]))
    assert proof.problem is None
    assert "$ref" not in orjson.loads(proof.inlined or "")["properties"]["from"]
    assert proof_of(Grammar.of_field(COMMON["point"])).inlined is None


def test_tools_refer_to_their_own_definitions() -> None:
    proof = proof_of(Grammar.of_tools(TOOLS["shared definition"], "auto", None))
    assert proof.problem is None
    (move, no_tool) = orjson.loads(proof.inlined or "")
    assert move["parameters"]["properties"]["to"]["properties"].keys() == {"x", "y"}
    assert no_tool["name"] == "no_tool"


def test_what_forces_nothing_is_no_grammar() -> None:
    assert Grammar.of_field({"type": "regex", "value": ""}) is None
    assert Grammar.of_tools(TOOLS["weather"], "none", None) is None
    assert Grammar.of_tools([], "auto", None) is None


def test_a_digest_tells_grammars_apart() -> None:
    a, b = {"type": "string"}, {"type": "integer"}
    found = {
        Grammar.schema({"properties": {"a": a, "b": b}}).digest,
        Grammar.schema({"properties": {"b": b, "a": a}}).digest,  # fields come in this order
        Grammar.regex('{"properties":{}}').digest,
        Grammar.schema({"properties": {}}).digest,
    }
    assert len(found) == 4
    field = {"type": "json_schema", "value": {"name": "x", "schema": {"properties": {}}}}
    assert Grammar.of_field(field) == Grammar.schema({"properties": {}})
    assert Grammar.of_field({"type": "json", "value": '{"properties": {}}'}) == Grammar.schema({"properties": {}})
