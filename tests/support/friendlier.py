"""``tests/conformance/friendlier.toml``: bodies that trip a TGI, and what they mean."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router_ext.gateway.friendly import JSON_OBJECT

FILE = Path(__file__).parents[1] / "conformance" / "friendlier.toml"


@dataclass(frozen=True, slots=True)
class Example:
    """``body`` trips a TGI, ``meant`` is what it means. ``is_accepted``: TGI takes it, and means something else."""

    what: str
    path: str
    body: dict[str, Any]
    meant: dict[str, Any]
    is_accepted: bool


def cases() -> list[dict[str, Any]]:
    return list(tomllib.loads(FILE.read_text(encoding="utf-8"))["case"])


def examples() -> Iterator[Example]:
    base = tomllib.loads(FILE.read_text(encoding="utf-8"))["base"]
    for case in cases():
        for path, pair in case["examples"].items():
            body, meant = (_merged(base[path], json.loads(text)) for text in pair)
            if meant.get("response_format", {}).get("value") == "JSON_OBJECT":
                meant["response_format"]["value"] = JSON_OBJECT
            yield Example(case["what"], path, body, meant, case.get("is_accepted", False))


def _merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the fields of ``change``, one level deep."""
    out = dict(base)
    for key, value in change.items():
        deep = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = {**out[key], **value} if deep else value
    return out
