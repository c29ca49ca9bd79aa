"""Router and control plane one version apart: what one writes the other reads, in both directions.

``previous.contract`` is the contract of the version before. Bodies are filled in every field, so a field that changed
its type or became required is found here, whoever sends it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import msgspec.inspect as inspect
import pytest

from router_ext.sync.snapshot_file import decode_snapshot
from router_ext.wire import controlplane as now
from router_ext.wire.deltas import decode_deltas
from tests.unit.wire.previous import contract as before

SPOKEN = ["ConfigSnapshot", "UsageBatch", "UsageAck", "Heartbeat"]
NEW = ["SnapshotDelta", "SnapshotDeltas", "Totals"]


MAP = "of a map"
"""Key of what may hold any key, where one more would be read."""


def filled(kind: inspect.Type) -> Any:
    """A value of this type, with nothing left at its default that could be something else."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return cls(**{field.name: filled(field.type) for field in fields})
        case inspect.UnionType(types=types):
            return filled(next(each for each in types if not isinstance(each, inspect.NoneType)))
        case inspect.ListType(item_type=item):
            return [filled(item)]
        case inspect.DictType(value_type=value):
            return {MAP: filled(value)}
        case inspect.IntType():
            return 7
        case inspect.FloatType():
            return 1.5
        case inspect.BoolType():
            return True
        case inspect.BytesType():
            return b"bytes"
        case inspect.StrType():
            return "text"
        case inspect.AnyType():
            return {MAP: [1, "two"]}
    raise NotImplementedError(str(kind))


def body_of(module: Any, name: str) -> bytes:
    return msgspec.json.encode(filled(inspect.type_info(getattr(module, name))), order="deterministic")


def spread(value: Any) -> Any:
    """The same JSON with a field that nobody knows in every object."""
    if isinstance(value, dict):
        if MAP in value:
            return {MAP: spread(value[MAP])}
        return {"new_here": {"of": ["the", "next"]}, **{name: spread(each) for name, each in value.items()}}
    return [spread(each) for each in value] if isinstance(value, list) else value


def common(old: Any, new: Any) -> Any:
    """``new`` without what ``old`` does not have."""
    if isinstance(old, dict):
        return {name: common(each, new[name]) for name, each in old.items()}
    return [common(a, b) for a, b in zip(old, new, strict=True)] if isinstance(old, list) else new


@pytest.mark.parametrize("name", SPOKEN)
def test_what_the_version_before_writes_is_read(name: str) -> None:
    body = body_of(before, name)
    read = msgspec.json.encode(msgspec.json.decode(body, type=getattr(now, name)), order="deterministic")
    sent = msgspec.json.decode(body)
    assert common(sent, msgspec.json.decode(read)) == sent


@pytest.mark.parametrize("name", SPOKEN)
def test_what_is_written_the_version_before_reads(name: str) -> None:
    body = body_of(now, name)
    read = msgspec.json.decode(msgspec.json.encode(msgspec.json.decode(body, type=getattr(before, name))))
    assert common(read, msgspec.json.decode(body)) == read


@pytest.mark.parametrize("name", [*SPOKEN, *NEW])
def test_fields_of_the_next_version_are_ignored(name: str) -> None:
    kind = getattr(now, name)
    body = body_of(now, name)
    value = msgspec.json.decode(body, type=kind)
    grown = msgspec.json.encode(spread(msgspec.json.decode(body)))
    assert b"new_here" in grown
    assert msgspec.json.decode(grown, type=kind) == value


@pytest.mark.parametrize("name", SPOKEN)
def test_a_field_that_became_required_is_noticed(name: str) -> None:
    kind = getattr(now, name)
    stricter = msgspec.defstruct("Stricter", [("surely_new", int)], bases=(kind,), kw_only=True)
    with pytest.raises(msgspec.ValidationError, match="surely_new"):
        msgspec.json.decode(body_of(before, name), type=stricter)


def test_a_snapshot_of_the_version_before_passes_its_check() -> None:
    blank = msgspec.structs.replace(filled(inspect.type_info(before.ConfigSnapshot)), digest="")
    sent = msgspec.structs.replace(blank, digest=before.snapshot_digest(blank))
    snapshot = decode_snapshot(msgspec.json.encode(sent, order="deterministic"))
    assert (snapshot.digest, snapshot.tenants[0].tenant) == (sent.digest, "text")


def test_a_snapshot_passes_the_check_of_the_version_before() -> None:
    blank = msgspec.structs.replace(filled(inspect.type_info(now.ConfigSnapshot)), digest="")
    body = msgspec.json.encode(msgspec.structs.replace(blank, digest=now.snapshot_digest(blank)), order="deterministic")
    sent = msgspec.json.decode(body, type=before.ConfigSnapshot)
    # It hashes what it received, with the digest that comes last left empty.
    tail = b'"digest":"%s"}' % sent.digest.encode()
    assert body.endswith(tail)
    assert hashlib.sha256(body[: -len(tail)] + b'"digest":""}').hexdigest() == sent.digest


def test_deltas_of_the_next_version_are_followed() -> None:
    delta = filled(inspect.type_info(now.SnapshotDelta))
    text = msgspec.json.encode(msgspec.structs.replace(delta, check=""), order="deterministic")
    grown = text[:-1] + b',"tiers_gone":["of the next version"]}'
    sealed = grown[:-1] + b',"check":"%s"}' % hashlib.sha256(grown).hexdigest().encode()
    ((read, kept),) = decode_deltas(b'{"more":1,"deltas":[' + sealed + b"]}")
    assert (read.tenants, kept) == (delta.tenants, sealed)
