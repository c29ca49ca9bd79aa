"""The format of predictor artifacts: one JSON document, versioned, with a digest of its own.

    {"schema": "fairlane.predictor", "version": 1, "kind": "baseline", "built_at_us": ..., "digest": "<sha256>",
     "payload": {...}}

``digest`` covers the payload in canonical form, so a damaged file is found without knowing the address it came from.
Never pickle: a document can hold numbers and names only.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from router_ext.errors import ArtifactRefused
from router_ext.wire.decoding import NotDecoded

SCHEMA = "fairlane.predictor"
VERSION = 1
MAX_BYTES = 64 << 20
"""A baseline of 100,000 keys has about 8 MB."""


class _Envelope(msgspec.Struct, kw_only=True):
    schema: str
    version: int
    kind: str
    built_at_us: int
    digest: str
    payload: Any


def pack(payload: object, *, kind: str, built_at_us: int) -> bytes:
    """Bytes of an artifact; the same payload and instant give the same bytes."""
    plain = msgspec.to_builtins(payload)
    envelope = _Envelope(
        schema=SCHEMA, version=VERSION, kind=kind, built_at_us=built_at_us, digest=_digest(plain), payload=plain
    )
    return msgspec.json.encode(envelope, order="deterministic")


def unpack(data: bytes, *, kind: str) -> tuple[Any, int]:
    """Payload (builtins) and ``built_at_us`` of an artifact of this kind.

    Raises:
        ArtifactRefused: too large, damaged, of another product, version or kind.
    """
    if len(data) > MAX_BYTES:
        raise ArtifactRefused(f"artifact of {len(data)} bytes is over the limit of {MAX_BYTES}")
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except NotDecoded as error:
        raise ArtifactRefused(f"not a predictor artifact: {error}") from error
    if envelope.schema != SCHEMA:
        raise ArtifactRefused(f"schema {envelope.schema[:80]!r} is not {SCHEMA!r}")
    if envelope.version != VERSION:
        raise ArtifactRefused(f"artifact version {envelope.version} is not {VERSION}")
    if envelope.kind != kind:
        raise ArtifactRefused(f"artifact kind {envelope.kind[:80]!r} is not {kind!r}")
    if envelope.digest != _digest(envelope.payload):
        raise ArtifactRefused("the artifact's digest does not fit its payload: it is damaged")
    return envelope.payload, envelope.built_at_us


def _digest(payload: object) -> str:
    return hashlib.sha256(msgspec.json.encode(payload, order="deterministic")).hexdigest()
