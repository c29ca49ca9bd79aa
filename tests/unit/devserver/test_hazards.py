"""What a grammar does under ``--sim-hazards``, by table and by rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from router_ext.devserver import toy
from router_ext.devserver.codec import Codec
from router_ext.devserver.constraint import Constraint, Effect, Hazard, ServerDies
from router_ext.devserver.constraints import compiled
from router_ext.devserver.generation import GenerationFailed
from router_ext.devserver.hazards import TABLE, TOOLS_TABLE, Hazards, counted_states, optional_fields
from router_ext.guard.examples import HAZARDS, TOOLS, record, regex_grammar
from router_ext.guard.grammar import functions_of, tool_schema

DOCS = Path(__file__).parents[3] / "docs" / "model-server.md"
REFUSED = {"nested 40 deep", "reference to nothing", "unknown type"}


@pytest.fixture(scope="module")
def hazards() -> Hazards:
    return Hazards(Codec(toy.tokenizer()))


def effect_of(hazards: Hazards, field: dict[str, Any]) -> Hazard:
    try:
        constraint = hazards(field["type"], field["value"])
    except ServerDies as died:
        return Hazard(Effect.DIE, message=str(died))
    assert isinstance(constraint, Constraint)
    assert constraint.hazard is not None
    assert constraint.regex == ""
    return constraint.hazard


def test_every_shipped_hazard_has_an_effect_or_is_refused() -> None:
    assert TABLE.keys() | REFUSED == HAZARDS.keys()


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_known_grammar_has_its_effect(hazards: Hazards, name: str) -> None:
    assert effect_of(hazards, HAZARDS[name]) == TABLE[name]


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("name", sorted(TOOLS_TABLE))
def test_known_tools_have_their_effect(hazards: Hazards, name: str, mode: str) -> None:
    schema = tool_schema(functions_of(TOOLS[name], mode, None))
    assert effect_of(hazards, {"type": "json", "value": schema}) == TOOLS_TABLE[name]
    assert effect_of(hazards, {"type": "json", "value": tool_schema(functions_of(TOOLS[name][1:], mode, None))}).stall_s


@pytest.mark.parametrize("name", ["reference to nothing", "unknown type"])
def test_what_tgi_refuses_is_refused(hazards: Hazards, name: str) -> None:
    messages = []
    for constrain in (hazards, compiled):
        with pytest.raises(GenerationFailed) as caught:
            constrain("json", HAZARDS[name]["value"])
        messages.append(caught.value.message)
    assert messages[0] == messages[1]


def words(hazard: Hazard) -> str:
    match hazard.effect:
        case Effect.STALL:
            return f"stall of {hazard.stall_s:g} s"
        case Effect.FAIL if hazard.message:
            return f"424 for its prefill batch, `Server error: {hazard.message}`"
        case Effect.FAIL:
            return "424 for its prefill batch, with an empty message"
        case Effect.DIE:
            return "the process ends"
        case Effect.FREEZE:
            return "frozen"


def test_the_documentation_shows_the_table() -> None:
    shown = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", DOCS.read_text("utf-8").split("| grammar |")[1], re.M))
    assert {k: v for k, v in shown.items() if k != "---"} == {
        name: words(hazard) for name, hazard in (TABLE | TOOLS_TABLE).items()
    }


@pytest.mark.parametrize(
    ("field", "effect"),
    [
        ({"type": "json", "value": {"properties": {"x": {"$ref": "#/properties/x"}}}}, Effect.DIE),
        ({"type": "json", "value": record({}, **{f"g{i}": {"type": "integer"} for i in range(12)})}, Effect.FREEZE),
        (regex_grammar("(b"), Effect.FAIL),
        (regex_grammar("b{2,1}"), Effect.FAIL),
        (regex_grammar("b" * 10), Effect.STALL),
        (regex_grammar("((((b{90}){90}){90}){90}){90}"), Effect.FREEZE),
    ],
)
def test_unknown_grammars_follow_the_rule(hazards: Hazards, field: dict[str, Any], effect: Effect) -> None:
    assert effect_of(hazards, field).effect is effect


def test_a_stall_is_the_stated_one(hazards: Hazards) -> None:
    size = Codec(toy.tokenizer()).size
    assert effect_of(hazards, regex_grammar("x{300}")).stall_s == pytest.approx(0.15 + 1e-7 * 300 * size)
    eight = {"type": "json", "value": record({}, **{f"f{i}": {"type": "null"} for i in range(8)})}
    assert effect_of(hazards, eight).stall_s == pytest.approx(3.7, abs=1)


@pytest.mark.parametrize(
    ("regex", "states"),
    [
        ("", 0),
        ("abc", 3),
        ("a|bc", 3),
        (r"[a-z]{2000}", 2000),
        (r"[\s\S]{300}", 300),
        (r"[]\]a]{3}\{x\}", 6),
        (".{0,500}", 500),
        ("((a|b|c|d){1,40}(x|y){1,40}){1,6}", (4 * 40 + 2 * 40) * 6),
        ("(?:ab)*(?P<n>c)?", 3),
        ("a{,3}", 5),
        ("a{3,}b", 4),
    ],
)
def test_states_are_counted(regex: str, states: int) -> None:
    assert counted_states(regex) == states


@pytest.mark.parametrize("regex", ["(", ")", "(a))", "((a)"])
def test_brackets_that_do_not_match_are_not_counted(regex: str) -> None:
    with pytest.raises(ValueError, match="brackets"):
        counted_states(regex)


def test_optional_fields_are_those_of_the_largest_object() -> None:
    inner = record({"a": {}}, b={}, c={}, d={})
    assert optional_fields(record({"x": inner}, y={"items": inner})) == 3


def test_a_chat_with_tools_calls_the_first_one(hazards: Hazards) -> None:
    tools = [{"function": {"name": name, "parameters": {"type": "object"}}} for name in ("one", "two")]
    constraint = hazards("json", tool_schema(functions_of(tools, "auto", None)))
    assert constraint is not None
    assert Codec(toy.tokenizer()).generated_text(constraint.script) == '{"function":{"_name":"one"}}'
