"""The file of a trained length model: one safetensors blob whose metadata say what it is.

    safetensors( tensors, metadata = {"fairlane": JSON {"schema", "version", "feature_version", "built_at_us", "digest",
                                                        "models", "settings", "metrics"}} )

``digest`` covers tensors and all other metadata, so a damaged file is found without knowing the address it came from.
Never pickle: a file can hold numbers and names only.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from router_ext.errors import ArtifactRefused
from router_ext.predict.versions import FEATURE_VERSION

SCHEMA = "fairlane.length_model"
VERSION = 1
KIND = "mixture"
MAX_BYTES = 64 << 20
MAX_HEADER_BYTES = 8 << 20
"""Names of ``MAX_MODELS`` models and figures; JSON of a whole file's size would take ten times that in memory."""
MAX_MODELS = 10_000
_FIELD = "fairlane"

Tensors = dict[str, NDArray[Any]]


class Header(msgspec.Struct, kw_only=True, frozen=True):
    """``models``: served models in the order of the tensors' rows. ``settings``: numbers that serving needs beside the
    tensors. ``metrics``: what training measured."""

    schema: str
    version: int
    feature_version: int
    built_at_us: int
    digest: str
    models: list[str]
    settings: dict[str, list[float]]
    metrics: dict[str, Any]


def pack(
    tensors: Tensors,
    *,
    models: list[str],
    settings: Mapping[str, list[float]],
    metrics: Mapping[str, Any],
    built_at_us: int,
) -> bytes:
    """Bytes of a file; the same content gives the same bytes."""
    header = Header(
        schema=SCHEMA,
        version=VERSION,
        feature_version=FEATURE_VERSION,
        built_at_us=built_at_us,
        digest="",
        models=models,
        settings=dict(settings),
        metrics=dict(metrics),
    )
    # As it is read back: what JSON rounds or cannot hold must not make the digest differ.
    header = msgspec.convert(json.loads(_encoded(header)), Header)
    header = msgspec.structs.replace(header, digest=_digest(header, tensors))
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in sorted(tensors.items())}
    return save(contiguous, metadata={_FIELD: _encoded(header)})


def unpack(data: bytes) -> tuple[Header, Tensors]:
    """Header and tensors of a file, all numbers finite.

    Raises:
        ArtifactRefused: too large, damaged, of another product, version or feature version.
    """
    header = read_header(data)
    try:
        tensors: Tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ArtifactRefused(f"not a length model: {error}") from error
    if header.digest != _digest(header, tensors):
        raise ArtifactRefused("the length model's digest does not fit its content: it is damaged")
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise ArtifactRefused(f"tensor {name[:80]!r} has numbers that are not finite")
    return header, tensors


def read_header(data: bytes) -> Header:
    """The header alone, for showing; ``unpack`` checks the digest.

    Raises:
        ArtifactRefused: as ``unpack``.
    """
    if len(data) > MAX_BYTES:
        raise ArtifactRefused(f"length model of {len(data)} bytes is over the limit of {MAX_BYTES}")
    n = int.from_bytes(data[:8], "little")
    if n > MAX_HEADER_BYTES:
        raise ArtifactRefused(f"not a length model: a header of {n} bytes")
    try:
        metadata = json.loads(data[8 : 8 + n])["__metadata__"]
        header = msgspec.json.decode(metadata[_FIELD].encode(), type=Header)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, msgspec.MsgspecError) as error:
        raise ArtifactRefused(f"not a length model: {type(error).__name__}: {str(error)[:200]}") from error
    if header.schema != SCHEMA:
        raise ArtifactRefused(f"schema {header.schema[:80]!r} is not {SCHEMA!r}")
    if header.version != VERSION:
        raise ArtifactRefused(f"length model of version {header.version} is not {VERSION}")
    if header.feature_version != FEATURE_VERSION:
        raise ArtifactRefused(f"features of version {header.feature_version}; this program makes {FEATURE_VERSION}")
    if not 1 <= len(header.models) <= MAX_MODELS or len(set(header.models)) != len(header.models):
        raise ArtifactRefused(f"{len(header.models)} served models")
    if not all(math.isfinite(x) for numbers in header.settings.values() for x in numbers):
        raise ArtifactRefused("settings that are not finite")
    return header


def _encoded(header: Header) -> str:
    return msgspec.json.encode(header, order="deterministic").decode()


def _digest(header: Header, tensors: Tensors) -> str:
    digest = hashlib.sha256(_encoded(msgspec.structs.replace(header, digest="")).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\x00{name}\x00{tensor.dtype.str}\x00{tensor.shape}\x00".encode())
        digest.update(np.ascontiguousarray(tensor).data)
    return digest.hexdigest()
