"""Deltas lead exactly where the whole does; what is damaged, torn out or from elsewhere leads nowhere."""

from __future__ import annotations

import hashlib
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_ext.errors import SnapshotRefused
from router_ext.sync import snapshot_file
from router_ext.sync.snapshot_file import decode_snapshot
from router_ext.wire import deltas
from router_ext.wire.controlplane import (
    ConfigSnapshot,
    GroupRecord,
    KeyRecord,
    OwnCancellation,
    PoolRecord,
    SnapshotDelta,
    TenantRecord,
    TierRecord,
    delta_check,
    snapshot_digest,
)
from router_ext.wire.deltas import decode_delta, decode_deltas, difference, follow, keep_same

NASTY = ['"', "\\", '},{"tenant":"', '],"keys":[{"key":"', '},{"key":"', '],"groups":[', "é\n", "]}", "plain"]
names = st.lists(st.sampled_from(NASTY), max_size=3).map("".join)


def encoded(snapshot: ConfigSnapshot) -> bytes:
    return msgspec.json.encode(snapshot, order="deterministic")


def build(revision: int, tenants: dict[int, str], keys: dict[int, int], groups: dict[int, float]) -> ConfigSnapshot:
    blank = ConfigSnapshot(
        revision=revision,
        published_at_us=revision * 1_000_000,
        pools=[PoolRecord(pool="pool_1", name="chat", scheduling={"tenants": [{"tenant": "x"}], "note": NASTY[2]})],
        tiers=[TierRecord(name="batch", rank=1 + revision % 2)],
        tenants=[
            TenantRecord(tenant=f"ten_{n}", name=name, weight=1.0 + len(name)) for n, name in sorted(tenants.items())
        ],
        keys=[
            KeyRecord(
                key=f"key_{n}",
                public_id=f"{n:012d}",
                digest=f"{n:064x}",
                pepper_version=1,
                tenant=f"ten_{owner}",
                default_pool="chat",
            )
            for n, owner in sorted(keys.items())
        ],
        groups=[GroupRecord(group=f"g{n}", weight=weight) for n, weight in sorted(groups.items())],
        cancelled=["req_1"] * (revision % 3),
        own_cancelled=[OwnCancellation(tenant="ten_1", request=f"req_{revision // 2}")],
    )
    return msgspec.structs.replace(blank, digest=snapshot_digest(blank))


def ordered(snapshot: ConfigSnapshot) -> ConfigSnapshot:
    return msgspec.structs.replace(
        snapshot,
        tenants=sorted(snapshot.tenants, key=lambda r: int(r.tenant[4:])),
        keys=sorted(snapshot.keys, key=lambda r: int(r.key[4:])),
        groups=sorted(snapshot.groups, key=lambda r: int(r.group[1:])),
    )


contents = st.tuples(
    st.dictionaries(st.integers(0, 12), names, max_size=8),
    st.dictionaries(st.integers(0, 20), st.integers(0, 12), max_size=12),
    st.dictionaries(st.integers(0, 4), st.sampled_from([1.0, 2.5]), max_size=4),
)
histories = st.lists(contents, min_size=2, max_size=5)


def history(drawn: list[tuple[dict[int, str], dict[int, int], dict[int, float]]]) -> list[ConfigSnapshot]:
    return [build(number, *content) for number, content in enumerate(drawn, start=1)]


def chain(revisions: list[ConfigSnapshot]) -> list[SnapshotDelta]:
    return [difference(encoded(a), encoded(b)) for a, b in itertools.pairwise(revisions)]


@given(histories)
def test_deltas_lead_to_the_whole(drawn: list[tuple[dict[int, str], dict[int, int], dict[int, float]]]) -> None:
    revisions = history(drawn)
    steps = chain(revisions)
    body = b'{"deltas":[' + b",".join(msgspec.json.encode(step, order="deterministic") for step in steps) + b"]}"
    received = [delta for delta, _ in decode_deltas(body)]
    after = ordered(follow(revisions[0], received))
    assert encoded(after) == encoded(revisions[-1])
    assert snapshot_digest(after) == after.digest == revisions[-1].digest


@given(histories)
def test_what_has_not_changed_stays_the_same_object(
    drawn: list[tuple[dict[int, str], dict[int, int], dict[int, float]]],
) -> None:
    first, *_, last = history(drawn)
    before = {record.key: record for record in first.keys}
    by_delta = follow(first, [difference(encoded(first), encoded(last))])
    by_whole = decode_snapshot(encoded(last))
    keep_same(by_whole, first)
    for after in (by_delta, by_whole):
        for record in after.keys:
            known = before.get(record.key)
            assert (record is known) == (record == known)
    assert by_whole == last


@given(contents)
def test_pieces_are_what_the_whole_is(
    drawn: tuple[dict[int, str], dict[int, int], dict[int, float]],
) -> None:
    snapshot = build(1, *drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_file, "_PIECE_BYTES", 1)
        assert decode_snapshot(encoded(snapshot)) == snapshot
        if snapshot.tenants and snapshot.keys:
            assert snapshot_file._decode_in_pieces(encoded(snapshot)) == snapshot


def three() -> list[ConfigSnapshot]:
    return [build(1, {1: "a", 2: "b"}, {1: 1}, {}), build(2, {1: "x", 2: "b"}, {1: 1}, {}), build(3, {1: "x"}, {}, {})]


def test_a_gap_or_another_base_leads_nowhere() -> None:
    first, second, third = three()
    steps = chain([first, second, third])
    for start, way in ((first, steps[1:]), (second, steps), (first, [steps[0], steps[0]])):
        with pytest.raises(SnapshotRefused, match="from"):
            follow(start, way)


def test_a_way_to_other_numbers_of_records_is_refused() -> None:
    first, second, _ = three()
    (step,) = chain([first, second])
    wrong = msgspec.structs.replace(step, num_keys=9)
    with pytest.raises(SnapshotRefused, match="leads to"):
        follow(first, [wrong])


def test_every_byte_of_a_delta_is_checked() -> None:
    (step,) = chain(three()[:2])
    good = msgspec.json.encode(step, order="deterministic")
    assert decode_delta(good) == step
    n_refused = 0
    for at in range(len(good)):
        damaged = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
        try:
            assert decode_delta(damaged) == step
        except SnapshotRefused:
            n_refused += 1
    assert n_refused > len(good) * 0.8  # the others are in the names of fields with default values


def test_a_check_covers_fields_of_a_newer_neighbour() -> None:
    (step,) = chain(three()[:2])
    text = msgspec.json.encode(msgspec.structs.replace(step, check=""), order="deterministic")
    newer = text[:-1] + b',"new_field":{"of":["the","next","version"]}}'
    check = hashlib.sha256(newer).hexdigest().encode()
    sealed = newer[:-1] + b',"check":"' + check + b'"}'
    assert decode_delta(sealed).tenants == step.tenants
    with pytest.raises(SnapshotRefused, match="check"):
        decode_delta(sealed.replace(b"next", b"last"))


def test_the_check_is_not_part_of_itself() -> None:
    (step,) = chain(three()[:2])
    assert delta_check(step) == delta_check(msgspec.structs.replace(step, check="other")) == step.check


def test_a_mutant_that_forgets_removals_is_noticed() -> None:
    first, second, third = three()
    steps = [msgspec.structs.replace(step, tenants_gone=[], keys_gone=[]) for step in chain([first, second, third])]
    with pytest.raises(SnapshotRefused, match="leads to"):
        follow(first, steps)


@pytest.mark.parametrize("cuts_too_much", [False, True])
def test_only_what_both_begin_and_end_with_is_left_out(monkeypatch: pytest.MonkeyPatch, cuts_too_much: bool) -> None:
    """Whole, at either end, in the middle, and nothing in common: each way leads to the other list."""
    if cuts_too_much:
        differing = deltas._differing
        monkeypatch.setattr(deltas, "_differing", lambda a, b: tuple(each[1:] for each in differing(a, b)))
    letters = [bytes([number]) for number in range(6)]
    lists = [
        [],
        letters,
        letters[:3],
        letters[3:],
        letters[:1] + letters[2:],
        [b"x", *letters],
        [*letters, b"x"],
        [b"y"],
    ]

    def leads(before: list[bytes], after: list[bytes]) -> bool:
        old, new = deltas._differing(before, after)
        return sorted([each for each in before if each not in set(old)] + list(new)) == sorted(after)

    assert all(leads(before, after) for before in lists for after in lists) is not cuts_too_much
