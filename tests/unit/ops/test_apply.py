"""Files of ``fairlane apply``: what is wrong is named with its place, and a plan touches only what it may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router_ext.cli import main
from router_ext.errors import SettingsError
from router_ext.ops.apply.deeds import operations, portions
from router_ext.ops.apply.document import Document, read_document
from router_ext.ops.apply.kinds import KINDS, check
from router_ext.ops.apply.plan import Deed, Step, make_plan

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
        ("", "t.yaml: holds no mapping of tiers, groups, pools, backends, price_lists, tenants"),
        ("tenant: []", "t.yaml:1: tenant: unknown; one of managed_by, tiers, groups, pools, backends"),
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
        ("keys:\n- {tenant: a}", "t.yaml:2: keys[0].name: is missing"),
        ("keys:\n- {tenant: a, name: b}\n- {tenant: a, name: b}", "t.yaml:3: keys[1].name: 'a/b' stands in line 2"),
        ("keys:\n- {tenant: a, name: b, expires_at: soon}", "an instant such as 2026-01-31T12:00:00Z"),
        ("members:\n- {email: a}", "members[0].email: 'a' is not accepted: an email address"),
        ("members:\n- {email: A@b.c}\n- {email: a@b.c}", "'a@b.c' stands in line 2 already"),
        ("members:\n- {email: a@b.c, role: boss}", "members[0].role: 'boss' is not accepted: one of owner"),
        ("backends:\n- {pool: a, name: b, url: 'ftp://x'}", "backends[0].url: 'ftp://x' is not accepted: http:// or"),
        ("price_lists:\n- {name: a, prices: [{valid_from: 2026-13-01}]}", "'2026-13-01' is not accepted: a day such"),
        ("price_lists:\n- name: a\n  prices:\n  - {prompt_micro: 1}", "t.yaml:4: price_lists[0].prices[0].valid_from: "
         "is missing"),
        ("price_lists:\n- {name: a, prices: [{prompt_micro: -1}]}", "a whole number from 0 to 1,000,000,000,000"),
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


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (None, [], "cannot read"),
        (b"\xff", [], "cannot read"),
        (b"a: [", [], "is no YAML"),
        (b"- 1", [], "holds no mapping"),
        (b"tenants: []", [], "FAIRLANE_TOKEN"),
        (b"tenants: []", ["--keys-out", "missing/keys"], "--keys-out"),
        (b"tenants: []", ["--url", "ftp://x"], "FAIRLANE_URL"),
    ],
)
def test_whatever_goes_wrong_is_said_as_json(
    text: bytes | None,
    options: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FAIRLANE_TOKEN", "FAIRLANE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FAIRLANE_URL", "http://127.0.0.1:1")
    if text is not None:
        (tmp_path / "tenants.yaml").write_bytes(text)
    status = main(["apply", "-f", "tenants.yaml", "--json", *options])
    out = capsys.readouterr()
    report = json.loads(out.out)
    assert status == 1
    assert [report[name] for name in ("created", "updated", "deleted", "unchanged")] == [[], [], [], []]
    assert len(report["errors"]) == 1
    assert said in report["errors"][0]["message"]
    assert said in out.err


def test_anchors_and_merges_are_followed() -> None:
    text = "tenants:\n- &a {slug: a, name: A, weight: 0}\n- {<<: *a, slug: b, weight: 1}\n"
    document = checked(text)
    assert document.content["tenants"][1] == {"slug": "b", "name": "A", "weight": 1}
    assert [str(p).partition(": ")[2] for p in document.problems] == [
        "tenants[0].weight: 0 is not accepted: a number from 0.001 to 10,000"
    ]


def rows(**given: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {kind.name: given.get(kind.name, []) for kind in KINDS}


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


def test_days_and_instants_need_no_quotes() -> None:
    document = checked(
        "keys: [{tenant: a, name: b, expires_at: 2027-01-01T01:00:00+01:00}]\n"
        "price_assignments: [{tenant: a, valid_from: 2026-02-01, price_list: null}]\n"
    )
    assert document.problems == []
    assert document.content["keys"][0]["expires_at"] == "2027-01-01T01:00:00+01:00"
    assert document.content["price_assignments"][0]["valid_from"] == "2026-02-01"


def key(name: str, managed_by: str = "fairlane-apply", **fields: Any) -> dict[str, Any]:
    given = {"id": f"key_{name}", "tenant": "ten_x", "tenant_slug": "x", "name": name, "revoked_at": None, "version": 1}
    return {**given, "managed_by": managed_by, "expires_at": "2027-01-01T00:00:00Z", "tiers": [], **fields}


def test_of_keys_with_one_name_ours_counts_and_two_of_ours_are_told() -> None:
    text = "keys: [{tenant: x, name: a, expires_at: 2027-01-01T02:00:00+02:00}]"
    assert planned(text, keys=[key("a", ""), key("a")])[0] == [(Deed.KEEP, "keys/x/a")]
    steps, document = planned(text, adopts=True, keys=[key("a"), key("a")])
    assert [str(p) for p in document.problems] == ["t.yaml:1: keys[0].name: there are 2 of 'x/a'"]
    assert steps == []


def test_what_is_given_once_is_not_changed() -> None:
    row = {"id": "prl_1", "name": "a", "currency": "EUR", "timezone": "UTC", "prices": [], "version": 1}
    given = [{**row, "managed_by": "fairlane-apply"}]
    text = "price_lists: [{name: a, currency: USD, prices: []}]"
    _, document = planned(text, price_lists=given)
    assert [str(p) for p in document.problems] == [
        "t.yaml:1: price_lists[0].currency: 'USD' is not 'EUR', and it never changes"
    ]


def test_the_order_of_prices_means_nothing() -> None:
    prices = [
        {"model": "", "valid_from": "2026-01-01", "prompt_micro": 1, "output_micro": 2},
        {"model": "m", "valid_from": "2026-01-01", "prompt_micro": 3, "output_micro": 4},
    ]
    row = {"id": "prl_1", "name": "a", "currency": "EUR", "timezone": "UTC", "prices": prices, "version": 1}
    text = """
price_lists:
- name: a
  prices:
  - {model: m, valid_from: 2026-01-01, prompt_micro: 3, output_micro: 4}
  - {valid_from: 2026-01-01, prompt_micro: 1, output_micro: 2}
"""
    given = [{**row, "managed_by": "fairlane-apply"}]
    assert planned(text, price_lists=given)[0] == [(Deed.KEEP, "price_lists/a")]


def step_for(text: str, **given: list[dict[str, Any]]) -> Step:
    (step,) = make_plan(checked(text), rows(**given), adopts=False)
    return step


def test_what_is_sent_names_the_version_that_was_read() -> None:
    active = step_for("tenants: []", tenants=[tenant("x", version=4)])
    assert [(o["method"], o["path"], o["if_match"]) for o in operations(active)] == [
        ("POST", "/tenants/ten_x/suspend", '"4"'), ("DELETE", "/tenants/ten_x", '"5"')
    ]  # fmt: skip
    suspended = step_for("tenants: []", tenants=[tenant("x", state="suspended")])
    assert [o["method"] for o in operations(suspended)] == ["DELETE"]
    assert operations(step_for("keys: []", keys=[key("a")])) == [
        {"method": "POST", "path": "/keys/key_a/revoke", "if_match": '"1"'}
    ]
    (patched,) = operations(step_for("tenants: [{slug: x, weight: 2}]", tenants=[tenant("x", version=7)]))
    assert patched == {"method": "PATCH", "path": "/tenants/ten_x", "body": {"weight": 2}, "if_match": '"7"'}


def test_somebody_who_is_only_invited_is_invited_anew() -> None:
    invited = {
        "id": "inv_1", "email": "a@b.c", "role": "viewer", "tenant_slug": None, "invited_by": "x", "accepted_at": None,
        "revoked_at": None, "expires_at": "2999-01-01T00:00:00Z", "managed_by": "fairlane-apply",
    }  # fmt: skip
    same = step_for("members: [{email: A@B.c, role: viewer, name: Ann, is_active: true}]", members=[invited])
    assert same.deed is Deed.KEEP
    (sent,) = operations(step_for("members: [{email: a@b.c, role: operator}]", members=[invited]))
    assert (sent["method"], sent["path"]) == ("POST", "/invitations")
    assert sent["body"] == {"email": "a@b.c", "role": "operator", "tenant": None, "managed_by": "fairlane-apply"}
    (sent,) = operations(step_for("members: [{email: n@b.c, role: viewer, name: N}]"))
    assert sent["body"] == {"email": "n@b.c", "role": "viewer", "managed_by": "fairlane-apply"}
    (sent,) = operations(step_for("members: []", members=[invited]))
    assert sent == {"method": "POST", "path": "/invitations/inv_1/revoke"}
    account = {"id": "usr_1", "email": "a@b.c", "role": "viewer", "version": 2, "managed_by": "fairlane-apply"}
    (sent,) = operations(step_for("members: [{email: a@b.c, role: operator}]", members=[account]))
    assert sent == {"method": "PATCH", "path": "/members/usr_1", "body": {"role": "operator"}, "if_match": '"2"'}


def test_steps_go_together_in_their_order_and_none_is_torn_apart() -> None:
    steps = make_plan(checked("tenants: []"), rows(tenants=[tenant(f"t{n}") for n in range(301)]), adopts=False)
    cut = list(portions(steps))
    assert [len(each) for each in cut] == [100, 100, 100, 1]
    assert [step for each in cut for step in each] == steps
