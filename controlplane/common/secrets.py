"""Credentials that the control plane issues: random, shown once, kept as an HMAC under a pepper.

Peppers have versions. New digests are made under ``KEY_PEPPER_VERSION``; those under another one hold as long as its
pepper is there, and are written anew when their credential is shown again.
"""

from __future__ import annotations

import hmac
import re
import secrets
import string
import zlib
from typing import TypeVar

from django.conf import settings
from django.db import models

from controlplane.common.models import Credential
from router_ext.wire.controlplane import key_digest

C = TypeVar("C", bound=Credential)

_ALPHABET = string.ascii_letters + string.digits
_LOWER = string.ascii_lowercase + string.digits
_PATTERN = re.compile(r"(fl[a-z])_([0-9a-z]{12})_[0-9A-Za-z]{40}([0-9a-f]{8})\Z")


def generate_token(prefix: str) -> tuple[str, str]:
    """A token and its public id: ``<prefix>_<public id>_<secret of 238 bits><crc32>``, as tenant keys are built."""
    public_id = "".join(secrets.choice(_LOWER) for _ in range(12))
    body = f"{prefix}_{public_id}_" + "".join(secrets.choice(_ALPHABET) for _ in range(40))
    return body + f"{zlib.crc32(body.encode()):08x}", public_id


def is_token(text: str, prefix: str) -> bool:
    """Whether ``text`` is well formed (checksum included), before any look-up."""
    match = _PATTERN.match(text)
    return match is not None and match[1] == prefix and f"{zlib.crc32(text[:-8].encode()):08x}" == match[3]


def digest(text: str) -> str:
    """Hex digest under the pepper of new ones; what the database holds in place of the secret."""
    return key_digest(text, settings.KEY_PEPPERS[settings.KEY_PEPPER_VERSION])


def digests(text: str) -> dict[int, str]:
    """Hex digests by version of the pepper, all that are there."""
    return {version: key_digest(text, pepper) for version, pepper in settings.KEY_PEPPERS.items()}


def is_digest_of(text: str, kept: str, version: int) -> bool:
    """Whether ``kept`` was made of ``text`` under this version, in constant time; False where its pepper is gone."""
    pepper = settings.KEY_PEPPERS.get(version)
    made = digest(text) if pepper is None else key_digest(text, pepper)
    return hmac.compare_digest(made, kept) and pepper is not None


def holder(rows: models.QuerySet[C], text: str, column: str = "digest") -> C | None:
    """The row of a credential, under whichever pepper; its digest is moved to the pepper of new ones.

    Args:
        column: of the digest; ``pepper_version`` stands beside it.
    """
    row = rows.filter(**{f"{column}__in": list(digests(text).values())}).first()
    if row is not None and row.pepper_version != settings.KEY_PEPPER_VERSION:
        same = type(row)._base_manager.filter(pk=row.pk, **{column: getattr(row, column)})
        same.update(**{column: digest(text), "pepper_version": settings.KEY_PEPPER_VERSION})
    return row


def one_time_password() -> str:
    """Four groups of five characters without look-alikes: 98 bits."""
    letters = "abcdefghjkmnpqrstuvwxyz23456789"
    return "-".join("".join(secrets.choice(letters) for _ in range(5)) for _ in range(4))
