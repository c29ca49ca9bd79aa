"""Knobs: one line each, from which validation, forms, schema and documentation follow."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from router_ext.core.config import KNOBS, SECTIONS, ConfigError, PoolConfig, build_pool, policy_names, policy_pages
from router_ext.core.knobs import Knob, knob, knobs_of

STRUCTURE = {"name", "policy"}
"""Fields of a pool that are no knobs, beside the rows of their own (mappings)."""


def test_every_plain_field_of_a_pool_is_a_knob() -> None:
    plain = {f.name for f in dataclasses.fields(PoolConfig) if f.default is not dataclasses.MISSING}
    assert plain - STRUCTURE == set(KNOBS)


@pytest.mark.parametrize("name", KNOBS)
def test_a_knob_says_what_forms_and_documentation_need(name: str) -> None:
    stated = KNOBS[name]
    assert stated.name == name
    assert stated.section in SECTIONS
    assert set(stated.policies) <= set(policy_names())
    assert stated.label
    assert stated.label == stated.label[:1].upper() + stated.label[1:]
    assert stated.help.endswith(".")
    assert math.isfinite(stated.high) or stated.kind in ("choice", "boolean")
    assert stated.check(stated.default, "pool 'p'") == stated.default
    assert stated.check(None, "pool 'p'") == stated.default


@pytest.mark.parametrize("name", [name for name, stated in KNOBS.items() if stated.kind in ("number", "integer")])
def test_both_ends_of_a_range_are_accepted_and_nothing_beyond(name: str) -> None:
    stated = KNOBS[name]
    for value in (stated.low, stated.high):
        if value == stated.low and stated.is_low_open:
            continue
        assert getattr(build_pool(pool={name: value}, backends=[], tiers=[], tenants=[]), name) == value
    for value in (stated.low - 1, stated.high + 1, math.nan, math.inf, True, "1"):
        with pytest.raises(ConfigError, match=name):
            build_pool(pool={name: value}, backends=[], tiers=[], tenants=[])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    plain: int = 3
    word: str = knob("a", choices=("a", "b"), section="S", label="Word", help="A word.")
    switch: bool = knob(False, section="S", label="Switch", help="A switch.")
    open_: float = knob(1.0, low=0, high=2, is_low_open=True, section="S", label="Number", help="A number.")


EXAMPLE = knobs_of(Example)


def test_words_switches_and_open_ranges_are_knobs_too() -> None:
    assert list(EXAMPLE) == ["word", "switch", "open_"]
    assert [stated.kind for stated in EXAMPLE.values()] == ["choice", "boolean", "number"]
    assert Example() == Example(plain=3, word="a", switch=False, open_=1.0)
    assert EXAMPLE["word"].check("b", "x") == "b"
    assert EXAMPLE["switch"].check(True, "x") is True


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("word", "c", "x: unknown word 'c' .one of a, b."),
        ("switch", 1, "x: switch must be true or false, not 1"),
        ("open_", 0, "x: open_ 0 is out of range .above 0 to 2."),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EXAMPLE[name].check(value, "x")


def test_a_knob_belongs_to_its_field_and_does_not_change_the_statement() -> None:
    stated = Example.__dataclass_fields__["word"].metadata["knob"]
    assert isinstance(stated, Knob)
    assert (stated.name, EXAMPLE["word"].name) == ("", "word")


@pytest.mark.parametrize("name", policy_names())
def test_a_policy_says_of_itself_what_an_operator_must_know(name: str) -> None:
    page = policy_pages()[name]
    assert page.name == name
    assert page.summary.endswith(".")
    assert len(page.summary) <= 120
    for heading in ("Rule:", "Guarantee:", "Cost:", "Failure mode:", "Source:"):
        assert heading in page.text
    assert page.document == f"docs/policies/{name}.md"
