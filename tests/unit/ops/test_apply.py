"""Files of ``fairlane apply``: what is wrong is named with its place, and a plan touches only what it may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router_ext.errors import SettingsError
from router_ext.ops.apply.document import Document, read_document
from router_ext.ops.apply.kinds import KINDS, check
from router_ext.ops.apply.plan import Deed, make_plan

GOOD = """
tiers:
  - {name: interactive, rank: 0, ttft_target_s: 2}
groups:
  - {name: research, weight: 2.5}
pools:
  - {name: org/model, policy: fifo, aliases: [m], scheduling: {gamma: 0.5}}
tenants:
  - slug: chatbot
    name: Chatbot
    tiers: [interactive]
    default_tier: interactive
    limits: {concurrent: 3, tokens_per_day: null}
"""


def checked(text: str) -> Document:
    document = read_document(Path("t.yaml"), text)
    check(document)
    return document


def test_a_good_file_has_no_problems() -> None:
    assert checked(GOOD).problems == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "t.yaml: holds no mapping of tiers, groups, pools, tenants"),
        ("tenant: []", "t.yaml:1: tenant: unknown; one of managed_by, tiers, groups, pools, tenants"),
        ("tiers: 3", "t.yaml:1: tiers: 3 is not accepted: a list"),
        ("managed_by: A B", "t.yaml:1: managed_by: 'A B' is not accepted: 1 to 63 of a-z, 0-9 and -"),
        ("groups:\n- {name: a}\n- name: b\n  weight: 0", "t.yaml:4: groups[1].weight: 0 is not accepted: "
         "a number from 0.001 to 10,000"),
        ("groups:\n- {name: a, weight: .nan}", "groups[0].weight: nan is not accepted"),
        ("groups:\n- {name: a, weight: yes}", "groups[0].weight: True is not accepted"),
        ("groups:\n- {name: a}\n- {name: a}", "t.yaml:3: groups[1].name: 'a' stands in line 2 already"),
        ("groups:\n- weight: 1", "t.yaml:2: groups[0].name: is missing"),
        ("groups:\n- x", "groups[0]: 'x' is not accepted: a mapping of name, weight"),
        ("groups: [{name: a, weight: 1, weight: 2}]", "groups[0].weight: stands here a second time"),
        ("tiers:\n- {name: a, ttft_target_s: 0}", "a number above 0 up to 3,600, or null"),
        ("tiers:\n- {name: a, rank: 1.5}", "a whole number from 0 to 10,000"),
        ("pools:\n- {name: a, policy: lottery}", "pools[0].policy: 'lottery' is not accepted: one of "),
        ("pools:\n- {name: a, scheduling: {gamma: 7}}", "pools[0].scheduling.gamma: "),
        ("pools:\n- {name: a, scheduling: {bursts: 7}}", "pools[0].scheduling.bursts: unknown; one of "),
        ("tenants:\n- slug: a\n  limits:\n    concurrent: -1", "t.yaml:4: tenants[0].limits.concurrent: -1 is not "
         "accepted: a whole number from 0 to 1,000,000,000,000,000, or null"),
        ("tenants:\n- {slug: a, tiers: []}", "tenants[0].tiers: [] is not accepted: a list of at least 1 name"),
        ("tenants:\n- {slug: a, tiers: [x, x]}", "each name once"),
        ("tenants:\n- {slug: a, color: red}", "tenants[0].color: unknown; one of slug, name, weight"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_line_path_value_and_what_is_accepted(text: str, said: str) -> None:
    assert any(said in str(problem) for problem in checked(text).problems), list(map(str, checked(text).problems))


def test_all_problems_of_a_file_are_told_at_once() -> None:
    assert len(checked("tiers: [{name: a, rank: x}, {nam: b}]\ntenants: [{slug: ' '}]").problems) == 4


def test_what_is_no_yaml_is_refused_with_its_line() -> None:
    with pytest.raises(SettingsError, match=r"t\.yaml is no YAML.*line 2"):
        read_document(Path("t.yaml"), "a: [\n}")
    with pytest.raises(SettingsError, match="is no YAML"):
        read_document(Path("t.yaml"), "a: !!python/object/apply:os.system ['true']")


def test_anchors_and_merges_are_followed() -> None:
    text = "tenants:\n- &a {slug: a, name: A, weight: 0}\n- {<<: *a, slug: b, weight: 1}\n"
    document = checked(text)
    assert document.content["tenants"][1] == {"slug": "b", "name": "A", "weight": 1}
    assert [str(p).partition(": ")[2] for p in document.problems] == [
        "tenants[0].weight: 0 is not accepted: a number from 0.001 to 10,000"
    ]


def rows(**given: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {kind.path: given.get(kind.path, []) for kind in KINDS}


def tenant(slug: str, managed_by: str = "fairlane-apply", **fields: Any) -> dict[str, Any]:
    given = {
        "id": f"ten_{slug}", "slug": slug, "name": slug, "weight": 1.0, "state": "active", "tiers": ["a", "b"],
        "default_tier": "a", "group": None, "limits": {"concurrent": None, "tokens_per_day": 5}, "version": 1,
    }  # fmt: skip
    return {**given, "managed_by": managed_by, **fields}


def planned(text: str, adopts: bool = False, **given: list[dict[str, Any]]) -> tuple[list[tuple[str, str]], Document]:
    document = checked(text)
    assert document.problems == []
    steps = make_plan(document, rows(**given), adopts=adopts)
    return [(step.deed.value, step.name) for step in steps], document


def test_only_what_the_file_states_is_compared() -> None:
    text = "tenants: [{slug: x, tiers: [b, a], limits: {tokens_per_day: 5}}, {slug: y, weight: 2}, {slug: z}]"
    given = [tenant("x"), tenant("y"), tenant("z", weight=7.0)]
    assert planned(text, tenants=given)[0] == [
        (Deed.KEEP, "tenants/x"), (Deed.UPDATE, "tenants/y"), (Deed.KEEP, "tenants/z")
    ]  # fmt: skip


def test_what_nobody_or_somebody_else_manages_is_not_touched() -> None:
    given = [tenant("mine"), tenant("free", ""), tenant("theirs", "terraform")]
    steps, document = planned("tenants: []", tenants=given)
    assert steps == [(Deed.DELETE, "tenants/mine")]
    text = "tenants:\n- {slug: free, weight: 2}\n- {slug: theirs, weight: 2}"
    steps, document = planned(text, tenants=given)
    assert [str(p) for p in document.problems] == [
        "t.yaml:2: tenants[0].slug: 'free' is there, and nobody manages it (--adopt takes it over)",
        "t.yaml:3: tenants[1].slug: 'theirs' is managed by 'terraform'",
    ]
    _, document = planned(text, adopts=True, tenants=given)
    assert len(document.problems) == 1


def test_a_kind_that_the_file_does_not_name_is_left_alone() -> None:
    assert planned("groups: []", tenants=[tenant("x")])[0] == []


def test_a_new_object_needs_its_fields_and_an_old_one_does_not() -> None:
    _, document = planned("tenants:\n- {slug: x}\n- {slug: y}", tenants=[tenant("y")])
    assert [p.path for p in document.problems] == [f"tenants[0].{n}" for n in ("name", "tiers", "default_tier")]


def test_what_is_named_by_others_is_made_first_and_deleted_last() -> None:
    tier = {"id": "t", "name": "old", "rank": 1, "managed_by": "fairlane-apply", "version": 1}
    steps, _ = planned(GOOD, tiers=[tier], tenants=[tenant("old")])
    assert [name for _, name in steps] == [
        "tiers/interactive", "groups/research", "pools/org/model", "tenants/chatbot", "tenants/old", "tiers/old"
    ]  # fmt: skip
