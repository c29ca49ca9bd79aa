"""Identity comes from the key alone."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

import msgspec
import pytest

from router_ext.errors import NotAuthenticated
from router_ext.gateway import auth
from router_ext.gateway.auth import KeyRing, TenantDisabled, TierNotAllowed, presented_key
from router_ext.wire.controlplane import (
    ConfigSnapshot,
    KeyRecord,
    MovedKey,
    TenantRecord,
    TierRecord,
    generate_key,
    key_digest,
)

PEPPERS = {1: secrets.token_bytes(32), 2: secrets.token_bytes(32)}
NOW = 1_800_000_000_000_000


def known(*, tenant: dict[str, Any] | None = None, version: int = 1, **fields: Any) -> tuple[ConfigSnapshot, str]:
    """A snapshot with one key, and the key."""
    text, public_id = generate_key()
    record = KeyRecord(
        key="key_1",
        public_id=public_id,
        digest=key_digest(text, PEPPERS[version]),
        pepper_version=version,
        tenant="ten_1",
        default_pool="main",
        **fields,
    )
    values = {"tiers": ["standard", "interactive"], "default_tier": "standard", **(tenant or {})}
    snapshot = ConfigSnapshot(
        revision=1,
        published_at_us=0,
        pools=[],
        tiers=[TierRecord(name="standard", rank=2), TierRecord(name="interactive", rank=1)],
        tenants=[TenantRecord(tenant="ten_1", name="one", **values)],
        keys=[record],
    )
    return snapshot, text


def ring(*, peppers: dict[int, bytes] = PEPPERS, **fields: Any) -> tuple[KeyRing, str]:
    snapshot, text = known(**fields)
    return KeyRing(snapshot, peppers), text


def bearer(text: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + text.encode())]


def test_a_good_key_says_who_asks() -> None:
    keys, text = ring()
    identity = keys.authenticate(bearer(text), now_us=NOW)
    assert (identity.tenant, identity.key, identity.default_pool, identity.tier(None)) == (
        "ten_1",
        "key_1",
        "main",
        "standard",
    )


@pytest.mark.parametrize("version", [1, 2])
def test_each_key_is_checked_under_its_own_pepper(version: int) -> None:
    keys, text = ring(version=version)
    assert keys.authenticate(bearer(text), now_us=NOW).tenant == "ten_1"


def test_a_key_under_a_pepper_the_router_lacks_is_a_bad_key() -> None:
    keys, text = ring(version=2, peppers={1: PEPPERS[1]})
    with pytest.raises(NotAuthenticated):
        keys.authenticate(bearer(text), now_us=NOW)


def test_a_key_that_comes_is_moved_to_the_newest_pepper_until_a_snapshot_has_it() -> None:
    snapshot, text = known(version=1)
    keys = KeyRing(snapshot, PEPPERS)
    public_id = text.split("_")[1]
    with pytest.raises(NotAuthenticated):
        keys.authenticate(bearer(generate_key()[0]), now_us=NOW)
    assert keys.moves == {}
    for _ in range(2):
        keys.authenticate(bearer(text), now_us=NOW)
    assert keys.moves == {public_id: MovedKey(key="key_1", pepper_version=2, digest=key_digest(text, PEPPERS[2]))}
    # Kept by the next ring, as long as its key is known under the older one.
    same = KeyRing(snapshot, PEPPERS, keys)
    assert same.moves == keys.moves
    moved = msgspec.structs.replace(snapshot.keys[0], digest=key_digest(text, PEPPERS[2]), pepper_version=2)
    after = KeyRing(msgspec.structs.replace(snapshot, keys=[moved]), PEPPERS, same)
    assert after.authenticate(bearer(text), now_us=NOW).tenant == "ten_1"
    assert after.moves == {}
    gone = KeyRing(msgspec.structs.replace(snapshot, keys=[]), PEPPERS, same)
    assert gone.moves == {}


@pytest.mark.parametrize("fields", [{"expires_at_us": NOW}, {"tenant": {"state": "suspended"}}])
def test_a_key_that_opens_nothing_is_not_moved(fields: dict[str, Any]) -> None:
    keys, text = ring(**fields)
    with pytest.raises((NotAuthenticated, TenantDisabled)):
        keys.authenticate(bearer(text), now_us=NOW)
    assert keys.moves == {}


def test_keys_whose_pepper_is_not_here_are_counted() -> None:
    assert ring(version=2)[0].without_pepper == {}
    assert ring(version=2, peppers={1: PEPPERS[1]})[0].without_pepper == {2: 1}


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([], None),
        ([(b"authorization", b"Bearer abc")], "abc"),
        ([(b"authorization", b"bearer  abc ")], "abc"),
        ([(b"authorization", b"Basic abc")], None),
        ([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")], None),
        ([(b"x-api-key", b"abc")], "abc"),
        ([(b"x-api-key", b"a"), (b"x-api-key", b"b")], None),
        ([(b"authorization", b"Bearer abc"), (b"x-api-key", b"other")], "abc"),
        ([(b"authorization", b""), (b"x-api-key", b"other")], None),
        ([(b"authorization", b"Bearer \xff")], None),
    ],
)
def test_what_counts_as_a_key(headers: list[tuple[bytes, bytes]], found: str | None) -> None:
    assert presented_key(headers) == found


def test_expiry_is_told_to_the_owner_only() -> None:
    keys, text = ring(expires_at_us=NOW)
    with pytest.raises(NotAuthenticated) as late:
        keys.authenticate(bearer(text), now_us=NOW)
    with pytest.raises(NotAuthenticated) as wrong:
        keys.authenticate(bearer(generate_key()[0]), now_us=NOW)
    assert (late.value.code, wrong.value.code) == ("expired_api_key", "invalid_api_key")
    assert late.value.message == wrong.value.message
    assert keys.authenticate(bearer(text), now_us=NOW - 1).tenant == "ten_1"


def test_a_suspended_tenant_is_told_so_to_its_keys_only() -> None:
    keys, text = ring(tenant={"state": "suspended"})
    with pytest.raises(TenantDisabled):
        keys.authenticate(bearer(text), now_us=NOW)
    with pytest.raises(NotAuthenticated):
        keys.authenticate(bearer(generate_key()[0]), now_us=NOW)


@pytest.mark.parametrize(
    ("fields", "wanted", "tier"),
    [
        ({}, None, "standard"),
        ({}, "interactive", "standard"),
        ({"may_choose_tier": True}, "interactive", "interactive"),
        ({"may_choose_tier": True, "tiers": ["interactive"]}, None, "interactive"),
        ({"default_tier": "interactive"}, None, "interactive"),
        # A key never gets more than its tenant has.
        ({"tiers": ["gold"], "default_tier": "gold"}, None, "standard"),
    ],
)
def test_tiers(fields: dict[str, Any], wanted: str | None, tier: str) -> None:
    keys, text = ring(**fields)
    assert keys.authenticate(bearer(text), now_us=NOW).tier(wanted) == tier


def test_a_tier_outside_the_key_is_refused() -> None:
    keys, text = ring(may_choose_tier=True, tiers=["standard"])
    identity = keys.authenticate(bearer(text), now_us=NOW)
    with pytest.raises(TierNotAllowed):
        identity.tier("interactive")


def published(*tenants: TenantRecord, keys: list[KeyRecord]) -> ConfigSnapshot:
    tiers = [TierRecord(name="standard", rank=1)]
    return ConfigSnapshot(revision=1, published_at_us=0, pools=[], tiers=tiers, tenants=list(tenants), keys=keys)


def two_keys() -> tuple[list[str], list[KeyRecord], list[TenantRecord]]:
    texts, records = [], []
    for number in range(2):
        text, public_id = generate_key()
        texts.append(text)
        digest = key_digest(text, PEPPERS[1])
        named = {"key": f"key_{number}", "tenant": f"ten_{number}", "default_pool": "main"}
        records.append(KeyRecord(public_id=public_id, digest=digest, pepper_version=1, **named))
    tenants = [TenantRecord(tenant=f"ten_{n}", name="n", tiers=["standard"], default_tier="standard") for n in range(2)]
    return texts, records, tenants


def test_a_ring_takes_over_what_has_not_changed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, records, tenants = two_keys()
    first = KeyRing(published(*tenants, keys=records), PEPPERS)
    known = [first.authenticate(bearer(text), now_us=NOW) for text in texts]
    made: list[str] = []
    entry = auth._entry
    monkeypatch.setattr(auth, "_entry", lambda record, tenant: made.append(record.key) or entry(record, tenant))
    renamed = msgspec.structs.replace(tenants[1], name="other")
    second = KeyRing(published(tenants[0], renamed, keys=records), PEPPERS, first)
    assert made == ["key_1"]
    assert second.authenticate(bearer(texts[0]), now_us=NOW) is known[0]
    assert second.authenticate(bearer(texts[1]), now_us=NOW).tenant_name == "other"
    suspended = msgspec.structs.replace(tenants[0], state="suspended")
    third = KeyRing(published(suspended, renamed, keys=records[:1]), PEPPERS, second)
    with pytest.raises(TenantDisabled):
        third.authenticate(bearer(texts[0]), now_us=NOW)
    with pytest.raises(NotAuthenticated):
        third.authenticate(bearer(texts[1]), now_us=NOW)
    assert second.authenticate(bearer(texts[1]), now_us=NOW).tenant_name == "other", "what is in use stays as it is"


def test_every_key_costs_the_same_work_whatever_is_wrong_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: one digest of the text that came, one comparison of whole digests."""
    work: list[str] = []
    digest, compare = auth.key_digest, auth.hmac.compare_digest

    def counted_digest(text: str, pepper: bytes) -> str:
        work.append("digest")
        return digest(text, pepper)

    def counted_compare(one: str, other: str) -> bool:
        work.append(f"compare {len(one)} {len(other)}")
        return compare(one, other)

    # One that is to be moved costs its holder another digest, once.
    good, text = ring(peppers={1: PEPPERS[1]})
    foreign, foreign_text = ring(version=2, peppers={1: PEPPERS[1]})
    cases = {
        "good": (good, text),
        "wrong secret": (good, text[:-1] + ("a" if text[-1] != "a" else "b")),
        "unknown id": (good, generate_key()[0]),
        "no key at all": (good, "x"),
        "another product's": (good, "sk-" + "a" * 40),
        "expired": ring(expires_at_us=NOW - 1),
        "suspended": ring(tenant={"state": "suspended"}),
        "of a pepper that is not here": (foreign, foreign_text),
    }
    monkeypatch.setattr(auth, "key_digest", counted_digest)
    monkeypatch.setattr(auth.hmac, "compare_digest", counted_compare)
    found = {}
    for name, (keys, presented) in cases.items():
        work.clear()
        with contextlib.suppress(NotAuthenticated, TenantDisabled):
            keys.authenticate(bearer(presented), now_us=NOW)
        found[name] = list(work)
    assert set(map(tuple, found.values())) == {("digest", "compare 64 64")}, found
