"""What hangs on which version of the pepper, and use cases that leave an old one behind.

A digest cannot be made anew without its secret. So second factors, which are encrypted, move when asked to; API tokens,
router credentials and invitations when they are shown here; tenant keys by what routers report; what is left of an old
version holds until it is renewed or retired.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.db import DatabaseError
from django.db.models import Count, F, QuerySet

from controlplane.accounts import totp
from controlplane.accounts.models import Invitation, OperatorToken, User
from controlplane.audit.actions import record
from controlplane.common.actor import Actor, Scope, system_actor
from controlplane.common.clock import utc_now
from controlplane.common.errors import Conflict
from controlplane.common.use_case import mark_config_changed, use_case
from controlplane.fleet.models import Router
from controlplane.keys.models import ApiKey
from router_ext.wire.controlplane import MovedKey

KINDS = ("keys", "tokens", "routers", "invitations", "second_factors", "recovery_codes")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def _live() -> dict[str, QuerySet[Any]]:
    """Rows whose digest opens something, by kind."""
    return {
        "keys": ApiKey.objects.filter(revoked_at=None),
        "tokens": OperatorToken.objects.filter(revoked_at=None),
        "routers": Router.objects.filter(revoked_at=None),
        "invitations": Invitation.objects.filter(accepted_at=None, revoked_at=None, expires_at__gt=utc_now()),
    }


def _codes_version(digest: str) -> int:
    return int(digest.partition(":")[0])


def in_use() -> dict[int, dict[str, int]]:
    """How many of each kind hang on each version, versions that are here or in use; seven queries."""
    found: dict[int, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
    for version in settings.KEY_PEPPERS:
        found[version]["keys"] += 0
    for kind, rows in _live().items():
        # Without an order, or each row would be a group of its own.
        counted = rows.order_by().values_list("pepper_version").annotate(n=Count("pk"))
        for version, n in counted:
            found[version][kind] = n
    people = User.objects.filter(totp_secret__isnull=False).values_list("totp_secret", "recovery_digests")
    for blob, digests in people:
        found[totp.version_of(blob or b"")]["second_factors"] += 1
        for version, n in Counter(map(_codes_version, digests)).items():
            found[version]["recovery_codes"] += n
    return dict(sorted(found.items()))


def missing() -> dict[int, dict[str, int]]:
    """What hangs on peppers that are not here."""
    return {v: counts for v, counts in in_use().items() if v not in settings.KEY_PEPPERS and any(counts.values())}


def peppers_are_here(app_configs: Any = None, databases: Any = None, **_: Any) -> list[CheckMessage]:
    """Before migrations: an error where a pepper was taken away on which something hangs still."""
    try:
        lost = missing() if databases else {}
    except DatabaseError:
        return []  # no such tables: there is nothing yet
    hint = (
        "Put the pepper back into FAIRLANE_KEY_PEPPER[_FILE], or give up what is left under it:"
        " manage.py rotate_pepper --retire VERSION (docs/control_plane.md, Peppers)."
    )
    text = "Pepper version {} is not here, but there are {} under it."
    return [Error(text.format(v, told(counts)), hint=hint, id="fairlane.E001") for v, counts in lost.items()]


def told(counts: Mapping[str, int]) -> str:
    """Such as ``12 keys, 1 tokens``; "" for nothing."""
    return ", ".join(f"{n:,} {kind.replace('_', ' ')}" for kind, n in counts.items() if n)


@use_case(scope=Scope.MEMBERS)
def reseal(*, actor: Actor) -> int:
    """Encrypt second factors anew under the pepper of new ones; returns how many. One whose pepper is gone stays."""
    now = settings.KEY_PEPPER_VERSION
    n = 0
    for user in User.objects.select_for_update().filter(totp_secret__isnull=False).order_by("id"):
        secret = totp.opened(user.totp_secret or b"", user.id)
        if secret is not None and totp.version_of(user.totp_secret or b"") != now:
            user.totp_secret = totp.sealed(secret, user.id)
            user.save(update_fields=["totp_secret"])
            n += 1
    if n:
        after = {"second_factors": n}
        record(actor=actor, action="pepper.resealed", object_type="pepper", object_id=str(now), after=after)
    return n


def take_moved(router: Router, moved: Sequence[MovedKey]) -> int:
    """Take digests under the pepper of new ones that a router made of keys it was shown; returns how many.

    The control plane never sees such a key, so it takes the router's word, as it does for whom a request was: a router
    has the peppers and sees every key it serves. Digests under another version, of unknown or moved keys are left.
    """
    now = settings.KEY_PEPPER_VERSION
    told = {each.key: each.digest for each in moved if each.pepper_version == now and _DIGEST.fullmatch(each.digest)}
    rows = ApiKey.objects.filter(pk__in=told, revoked_at=None).exclude(pepper_version=now)
    if not told or not rows.exists():
        return 0
    return _move(actor=system_actor(f"router {router.name}"), told=told)


@use_case()
def _move(*, actor: Actor, told: Mapping[str, str]) -> int:
    now = settings.KEY_PEPPER_VERSION
    taken = set(ApiKey.objects.filter(digest__in=told.values()).values_list("digest", flat=True))
    rows = ApiKey.objects.select_for_update().filter(pk__in=told, revoked_at=None).exclude(pepper_version=now)
    changed = []
    for key in rows.order_by("id"):
        if told[key.id] in taken:
            continue
        taken.add(told[key.id])
        key.digest, key.pepper_version = told[key.id], now
        changed.append(key)
    ApiKey.objects.bulk_update(changed, ["digest", "pepper_version"], batch_size=500)
    if changed:
        after = {"keys": [key.public_id for key in changed]}
        record(actor=actor, action="pepper.keys_moved", object_type="pepper", object_id=str(now), after=after)
        mark_config_changed(f"{len(changed)} keys moved to pepper {now}")
    return len(changed)


@use_case(scope=Scope.MEMBERS)
def retire(*, actor: Actor, version: int) -> dict[str, int]:
    """Give up whatever hangs on a version: keys, tokens, invitations and routers are revoked, codes for lost devices
    forgotten, second factors that could not be encrypted anew reset. Returns how many of each.

    Raises:
        Conflict: it is the version of new digests.
    """
    if version == settings.KEY_PEPPER_VERSION:
        raise Conflict(f"new digests are made under pepper {version}; only an older one can be retired")
    reseal(actor=actor)
    instant, given_up, public_ids = utc_now(), dict.fromkeys(KINDS, 0), []
    for kind, rows in _live().items():
        of_version = rows.filter(pepper_version=version)
        if kind == "keys":
            public_ids = list(of_version.order_by("id").values_list("public_id", flat=True))
        changes: dict[str, Any] = {"revoked_at": instant}
        if kind in ("keys", "routers"):
            changes |= {"updated_at": instant, "version": F("version") + 1}
        given_up[kind] = of_version.update(**changes)
    for user in User.objects.select_for_update().filter(totp_secret__isnull=False).order_by("id"):
        kept = [each for each in user.recovery_digests if _codes_version(each) != version]
        given_up["recovery_codes"] += len(user.recovery_digests) - len(kept)
        user.recovery_digests = kept
        if totp.version_of(user.totp_secret or b"") == version:
            given_up["second_factors"] += 1
            user.totp_secret, user.totp_step, user.recovery_digests = None, 0, []
            user.version += 1
        user.save(update_fields=["totp_secret", "totp_step", "recovery_digests", "version"])
    if any(given_up.values()):
        after = {**given_up, "keys_revoked": public_ids}
        record(actor=actor, action="pepper.retired", object_type="pepper", object_id=str(version), after=after)
    if public_ids:
        mark_config_changed(f"keys under pepper {version} revoked")
    return given_up
