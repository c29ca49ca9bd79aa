"""Credentials that the control plane issues: random, shown once, kept as an HMAC under the pepper."""

from __future__ import annotations

import re
import secrets
import string
import zlib

from django.conf import settings

from router_ext.wire.controlplane import key_digest

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
    """Hex digest under the current pepper; what the database holds in place of the secret."""
    return key_digest(text, settings.KEY_PEPPER)


def one_time_password() -> str:
    """Four groups of five characters without look-alikes: 98 bits."""
    letters = "abcdefghjkmnpqrstuvwxyz23456789"
    return "-".join("".join(secrets.choice(letters) for _ in range(5)) for _ in range(4))
