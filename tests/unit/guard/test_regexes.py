"""TGI's router makes a regex of a schema with outlines-core 0.1.14, the guard with 0.1.26: they must be the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.grammars import schemas

from router_ext.guard.automaton import regex_of
from router_ext.guard.inline import SchemaRefused, inline

RECORDED = json.loads(Path(__file__).with_name("regexes_0_1_14.json").read_text())


@pytest.mark.parametrize("name", schemas())
def test_both_versions_make_the_same_regex(name: str) -> None:
    expected = RECORDED[name]
    schema = inline(schemas()[name])
    if isinstance(expected, str):
        assert regex_of(schema) == expected
        return
    with pytest.raises(SchemaRefused) as refused:
        regex_of(schema)
    assert str(refused.value).splitlines()[0] == f"cannot compile regex from schema: {expected['error']}"


def test_all_that_was_recorded_is_compared() -> None:
    assert RECORDED.keys() == schemas().keys()
    assert sum(isinstance(regex, str) for regex in RECORDED.values()) >= 40
