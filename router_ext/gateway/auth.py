"""Who is asking: identity from the key alone, judged against the snapshot in memory.

A key is found by its public id, and believed by the HMAC of its whole text under the router's pepper, in constant
time, also when the public id is unknown. Unknown, malformed, revoked and wrong keys get one and the same answer; an
expired key differs in its code only, and only once its secret has matched.
"""

from __future__ import annotations

import hmac
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from router_ext.core.ids import KeyId, TenantId, TierName
from router_ext.errors import NotAllowed, NotAuthenticated
from router_ext.wire.controlplane import ConfigSnapshot, KeyRecord, MovedKey, TenantRecord, key_digest, parse_key

BAD_KEY = "Invalid or missing API key."
TIER_HEADER = b"x-fairlane-tier"
_NO_DIGEST = "0" * 64
_MAX_MOVES = 1_000
_BATCH = 64
"""Keys entered between two chances for the event loop: about 0.3 ms."""


class TenantDisabled(NotAllowed):
    """The key is good, its tenant is suspended."""

    code = "tenant_disabled"


def tenant_disabled() -> TenantDisabled:
    """The one text, whenever it is found out."""
    return TenantDisabled("This tenant is suspended.")


class TierNotAllowed(NotAllowed):
    """The key may choose among tiers, but not this one."""

    code = "tier_not_allowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A caller: what a good key says and nothing else does."""

    tenant: TenantId
    tenant_name: str
    key: KeyId
    public_id: str
    default_pool: str
    tiers: tuple[TierName, ...]
    default_tier: TierName
    may_choose_tier: bool

    def tier(self, wanted: str | None) -> TierName:
        """The tier of a request.

        Args:
            wanted: value of ``x-fairlane-tier``; without the right to choose it has no effect.

        Raises:
            TierNotAllowed: the key may choose, but not this tier.
        """
        if wanted is None or not self.may_choose_tier or wanted == self.default_tier:
            return self.default_tier
        if wanted not in self.tiers:
            raise TierNotAllowed(f"This key may not use tier {wanted!r}.", param="x-fairlane-tier")
        return TierName(wanted)


@dataclass(frozen=True, slots=True)
class _Entry:
    record: KeyRecord
    owner: TenantRecord
    digest: str
    pepper_version: int
    expires_at_us: int | None
    is_active: bool
    identity: Identity


class KeyRing:
    """The keys of one snapshot; a new snapshot makes a new ring, and nothing of one changes but ``moves``.

    Entries whose key and tenant are the very records of ``before`` are taken over from it. Meant to be made in a
    worker thread: it gives the interpreter away between small pieces.

    Cost: one HMAC of 64 bytes and two look-ups, about 3 us.

    Attributes:
        without_pepper: keys by version of the pepper, of versions that are not here: they are refused.
        moves: by public id, digests under the newest pepper of keys that came and are known under an older one; at
            most 1,000, until a snapshot has them.
    """

    def __init__(self, snapshot: ConfigSnapshot, peppers: Mapping[int, bytes], before: KeyRing | None = None) -> None:
        self._peppers = dict(peppers)
        # An unknown key is hashed like a known one.
        self._newest = max(peppers)
        self._any_pepper = peppers[self._newest]
        self.without_pepper: Counter[int] = Counter()
        tenants = {tenant.tenant: tenant for tenant in snapshot.tenants}
        known = {} if before is None else before._entries
        self._entries: dict[str, _Entry] = {}
        num_new = 0
        for record in snapshot.keys:
            owner = tenants.get(record.tenant)
            if owner is None:
                continue
            entry = known.get(record.public_id)
            if entry is None or entry.record is not record or entry.owner is not owner:
                entry = _entry(record, owner)
                num_new += 1
                if num_new % _BATCH == 0:
                    time.sleep(0)
            self._entries[record.public_id] = entry
            if record.pepper_version not in self._peppers:
                self.without_pepper[record.pepper_version] += 1
        self.moves: dict[str, MovedKey] = {}
        for public_id, move in ({} if before is None else dict(before.moves)).items():
            if public_id in self._entries and self._entries[public_id].pepper_version != move.pepper_version:
                self.moves[public_id] = move

    def entries(self) -> list[Any]:
        """What the ring is made of, to be let go of in small pieces."""
        return list(self._entries.values())

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]], *, now_us: int) -> Identity:
        """Identity behind ``Authorization: Bearer`` or ``X-API-Key``.

        Raises:
            NotAuthenticated: one text for every bad key.
            TenantDisabled: a good key of a suspended tenant.
        """
        text = presented_key(headers)
        public_id = parse_key(text) if text else None
        entry = self._entries.get(public_id) if public_id is not None else None
        pepper = None if entry is None else self._peppers.get(entry.pepper_version)
        if text is None:
            raise NotAuthenticated(BAD_KEY)
        if pepper is None:
            # Nobody's key, but it takes as long to find out.
            entry, pepper = None, self._any_pepper
        digest = key_digest(text, pepper)
        if not hmac.compare_digest(digest, _NO_DIGEST if entry is None else entry.digest) or entry is None:
            raise NotAuthenticated(BAD_KEY)
        if entry.expires_at_us is not None and entry.expires_at_us <= now_us:
            raise NotAuthenticated(BAD_KEY, code="expired_api_key")
        if not entry.is_active:
            raise tenant_disabled()
        if entry.pepper_version < self._newest and len(self.moves) < _MAX_MOVES:
            self._move(entry, text)
        return entry.identity

    def _move(self, entry: _Entry, text: str) -> None:
        if entry.record.public_id not in self.moves:
            self.moves[entry.record.public_id] = MovedKey(
                key=entry.record.key, pepper_version=self._newest, digest=key_digest(text, self._any_pepper)
            )


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The key a request carries; ``Authorization`` goes before ``X-API-Key``, and two of one kind are none."""
    bearer: list[bytes] = []
    other: list[bytes] = []
    for name, value in headers:
        if name == b"authorization":
            bearer.append(value)
        elif name == b"x-api-key":
            other.append(value)
    if bearer:
        scheme, _, value = bearer[0].partition(b" ")
        found = value.strip() if len(bearer) == 1 and scheme.lower() == b"bearer" else b""
    elif len(other) == 1:
        found = other[0].strip()
    else:
        return None
    try:
        return found.decode("ascii") or None
    except UnicodeDecodeError:
        return None


def _entry(record: KeyRecord, tenant: TenantRecord) -> _Entry:
    allowed = [tier for tier in tenant.tiers if not record.tiers or tier in record.tiers] or list(tenant.tiers)
    default = record.default_tier or tenant.default_tier
    if default not in allowed and allowed:
        default = tenant.default_tier if tenant.default_tier in allowed else allowed[0]
    return _Entry(
        record=record,
        owner=tenant,
        digest=record.digest,
        pepper_version=record.pepper_version,
        expires_at_us=record.expires_at_us,
        is_active=tenant.state == "active",
        identity=Identity(
            tenant=TenantId(record.tenant),
            tenant_name=tenant.name,
            key=KeyId(record.key),
            public_id=record.public_id,
            default_pool=record.default_pool,
            tiers=tuple(map(TierName, allowed)),
            default_tier=TierName(default),
            may_choose_tier=record.may_choose_tier,
        ),
    )
