"""Time-based one-time codes (RFC 6238): SHA-1, six digits, steps of 30 s, as every authenticator app has them.

Secrets are kept encrypted (AES-256-GCM, bound to their account) under a key derived from a pepper, which comes from a
secret file: neither the database nor ``SECRET_KEY`` alone gives a code. Two bytes before them say under which version.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from urllib.parse import quote, urlencode

import qrcode
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings
from qrcode.image.svg import SvgPathFillImage

STEP_S = 30
DIGITS = 6
SECRET_BYTES = 20
_NONCE_BYTES = 12
_VERSION_BYTES = 2


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def counter(now: float | None = None) -> int:
    """Number of the present step."""
    return int((time.time() if now is None else now) // STEP_S)


def code(secret: bytes, step: int) -> str:
    """The code of one step (RFC 4226, section 5.3)."""
    digest = hmac.new(secret, step.to_bytes(8, "big"), hashlib.sha1).digest()
    offset = digest[-1] & 15
    number = int.from_bytes(digest[offset : offset + 4], "big") & 0x7FFF_FFFF
    return f"{number % 10**DIGITS:0{DIGITS}d}"


def matching_step(secret: bytes, given: str, *, after: int, now: float | None = None) -> int | None:
    """The step whose code was given: the present one or a neighbour, for clocks that differ, and later than ``after``,
    so that no code is taken twice. None if there is none; the time it takes tells nothing."""
    present = counter(now)
    found = None
    for step in (present - 1, present, present + 1):
        if hmac.compare_digest(code(secret, step).encode(), given.encode()) and step > after:
            found = step
    return found


def _cipher(pepper: bytes) -> AESGCM:
    derived = HKDF(hashes.SHA256(), length=32, salt=None, info=b"fairlane second factor").derive(pepper)
    return AESGCM(derived)


def sealed(secret: bytes, account: str) -> bytes:
    """The secret as it is kept: version of the pepper, nonce, what is encrypted."""
    version, nonce = settings.KEY_PEPPER_VERSION, secrets.token_bytes(_NONCE_BYTES)
    text = _cipher(settings.KEY_PEPPERS[version]).encrypt(nonce, secret, account.encode())
    return int.to_bytes(version, _VERSION_BYTES, "big") + nonce + text


def version_of(blob: bytes | memoryview) -> int:
    """Of the pepper that a secret is sealed under."""
    return int.from_bytes(blob[:_VERSION_BYTES], "big")


def opened(blob: bytes | memoryview, account: str) -> bytes | None:
    """The secret; None where its pepper is not there any more, or the blob another account's."""
    pepper = settings.KEY_PEPPERS.get(version_of(blob))
    nonce, text = blob[_VERSION_BYTES:][:_NONCE_BYTES], blob[_VERSION_BYTES + _NONCE_BYTES :]
    if pepper is None or len(nonce) < _NONCE_BYTES:
        return None
    try:
        return _cipher(pepper).decrypt(bytes(nonce), bytes(text), account.encode())
    except InvalidTag:
        return None


def as_text(secret: bytes) -> str:
    """For typing it in, in groups of four."""
    text = base64.b32encode(secret).decode().rstrip("=")
    return " ".join(text[i : i + 4] for i in range(0, len(text), 4))


def picture(secret: bytes, email: str) -> str:
    """The QR code to enrol by, as an SVG drawn here: the secret goes to nobody else."""
    text = base64.b32encode(secret).decode().rstrip("=")
    address = f"otpauth://totp/{quote(f'Fairlane:{email}')}?" + urlencode({"secret": text, "issuer": "Fairlane"})
    return str(qrcode.make(address, image_factory=SvgPathFillImage, box_size=12).to_string(encoding="unicode"))
