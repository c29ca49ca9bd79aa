"""Snapshots as bytes: decoding that leaves the event loop room, digest check, and the copy on disk."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from router_ext.errors import SnapshotRefused
from router_ext.wire.controlplane import (
    ConfigSnapshot,
    GroupRecord,
    KeyRecord,
    OwnCancellation,
    PoolRecord,
    TenantRecord,
    TierRecord,
    snapshot_digest,
)
from router_ext.wire.decoding import NotDecoded
from router_ext.wire.seal import is_sealed

MAX_SNAPSHOT_BYTES = 256 << 20
LARGE_BYTES = 1 << 20
"""A whole snapshot of more is kept from the garbage collector."""
_CHUNK = 64
"""Records decoded between two chances for the event loop: about 0.1 ms, against 360 ms for 100,000 keys at once."""
_PIECE_BYTES = 16 << 10
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{64})"\}\s*\Z')

_T = TypeVar("_T")


class _Shell(msgspec.Struct, kw_only=True):
    """The snapshot with its long lists left undecoded."""

    revision: int
    published_at_us: int
    pools: list[PoolRecord]
    tiers: list[TierRecord]
    tenants: list[msgspec.Raw]
    keys: list[msgspec.Raw]
    groups: list[msgspec.Raw] = []
    cancelled: list[str] = []
    own_cancelled: list[OwnCancellation] = []
    digest: str = ""


def decode_snapshot(body: bytes) -> ConfigSnapshot:
    """Decode and verify a snapshot. Meant for a worker thread: it gives the interpreter away between small pieces.

    Raises:
        SnapshotRefused: not a snapshot, or its digest does not fit its content.
    """
    try:
        snapshot = _decode_in_pieces(body) or _decode_at_once(body)
    except NotDecoded as error:
        raise SnapshotRefused(f"not a snapshot: {error}") from error
    if not _is_digest_right(body, snapshot):
        raise SnapshotRefused(f"revision {snapshot.revision}: digest {snapshot.digest[:12]!r} does not fit the content")
    return snapshot


def _decode_in_pieces(body: bytes) -> ConfigSnapshot | None:
    """Decode a snapshot as it is published, never more than a piece at a time; None if it is not of that form.

    The long lists are cut between two records: where a record's first field follows the end of another. No string of
    JSON can contain such a place, since its quote would have to end the string and a name cannot follow; and were the
    place one inside a record, neither piece would be JSON, and ``_decode_at_once`` has the last word.
    """
    begin = body.find(b'],"tenants":[{"tenant":"')
    middle = body.find(b'],"keys":[{"key":"', begin)
    end = body.rfind(b'],"groups":[')
    if not 0 < begin < middle < end:
        return None
    try:
        shell = msgspec.json.decode(body[:begin] + b'],"tenants":[],"keys":[' + body[end:], type=_Shell)
        tenants = _decode_records(body, begin + len(b'],"tenants":['), middle, b'},{"tenant":"', TenantRecord)
        keys = _decode_records(body, middle + len(b'],"keys":['), end, b'},{"key":"', KeyRecord)
        return _filled(shell, tenants, keys)
    except NotDecoded:
        return None


def _decode_records(body: bytes, begin: int, end: int, border: bytes, record: type[_T]) -> list[_T]:
    """The records in ``body[begin:end]``, which is a list without its brackets."""
    decoder = msgspec.json.Decoder(list[record])  # type: ignore[valid-type]  # a type by value
    decoded: list[_T] = []
    while begin < end:
        cut = body.find(border, begin + _PIECE_BYTES, end)
        stop = end if cut < 0 else cut + 1
        decoded.extend(decoder.decode(b"[" + body[begin:stop] + b"]"))
        begin = stop + 1
        time.sleep(0)  # gives the interpreter lock away
    return decoded


def _decode_at_once(body: bytes) -> ConfigSnapshot:
    """Decode any JSON of a snapshot; finding its records holds the interpreter, 15 ms for 30 MB."""
    shell = msgspec.json.decode(body, type=_Shell)
    tenants = _decode_all(shell.tenants, TenantRecord)
    return _filled(shell, tenants, _decode_all(shell.keys, KeyRecord))


def _filled(shell: _Shell, tenants: list[TenantRecord], keys: list[KeyRecord]) -> ConfigSnapshot:
    return ConfigSnapshot(
        revision=shell.revision,
        published_at_us=shell.published_at_us,
        pools=shell.pools,
        tiers=shell.tiers,
        tenants=tenants,
        keys=keys,
        groups=_decode_all(shell.groups, GroupRecord),
        cancelled=shell.cancelled,
        own_cancelled=shell.own_cancelled,
        digest=shell.digest,
    )


def _decode_all(raws: list[msgspec.Raw], record: type[_T]) -> list[_T]:
    decoder = msgspec.json.Decoder(record)
    decoded: list[_T] = []
    for begin in range(0, len(raws), _CHUNK):
        decoded.extend(decoder.decode(raw) for raw in raws[begin : begin + _CHUNK])
        time.sleep(0)  # gives the interpreter lock away
    return decoded


def _is_digest_right(body: bytes, snapshot: ConfigSnapshot) -> bool:
    if is_sealed(body, snapshot.digest, seal=_DIGEST, blank=b'"digest":""}'):
        return True
    return bool(snapshot.digest) and snapshot_digest(snapshot) == snapshot.digest


def let_go(box: list[Any], parts: Callable[[Any], list[list[Any]]]) -> None:
    """Free the one object in ``box`` with everything that only it holds, in small pieces, giving the interpreter away.

    For a worker thread: at once, 100,000 keys would stop everybody for a tenth of a second.

    Args:
        box: holds the last reference, and is emptied. parts: lists, made for this, of what there is very much of.
    """
    held = parts(box.pop())
    for objects in held:
        while objects:
            del objects[-_CHUNK:]
            time.sleep(0)


def remove_parts(directory: Path) -> None:
    """Remove what writers that were killed left half written."""
    for part in directory.glob(".*.part"):
        part.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` so that after any crash it holds either the old or the new bytes whole. Mode 0600. Blocks."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")  # no writer shares it
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
