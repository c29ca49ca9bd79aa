"""Which values the fields of a file take: what can be told from the file alone, before anything is changed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import date, datetime
from typing import Any
from urllib.parse import urlsplit

from router_ext.core.config import KNOBS, ConfigError
from router_ext.ops.apply.document import Document, Place
from router_ext.wire.controlplane import LimitsRecord

SLUG = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
SLUG_TEXT = "1 to 63 of a-z, 0-9 and -, beginning and ending with a letter or digit"
MAX_LIMIT = 10**15
Check = Callable[[Document, Place, Any], None]


def refuse(document: Document, place: Place, value: Any, accepted: str) -> None:
    document.add(place, f"{shown(value)} is not accepted: {accepted}")


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def text(limit: int, *, may_be_empty: bool = False) -> Check:
    least = 0 if may_be_empty else 1

    def check(document: Document, place: Place, value: Any) -> None:
        if not isinstance(value, str) or not least <= len(value.strip()) <= limit or not value.isprintable():
            refuse(document, place, value, f"a text of {least} to {limit:,} printable characters")

    return check


def slug(document: Document, place: Place, value: Any) -> None:
    if not isinstance(value, str) or not SLUG.match(value):
        refuse(document, place, value, SLUG_TEXT)


def number(low: float, high: float, *, is_whole: bool = False, may_be_null: bool = False, above: bool = False) -> Check:
    """``above``: ``low`` itself is outside."""
    kinds = (int,) if is_whole else (int, float)
    words = f"a {'whole ' if is_whole else ''}number {f'above {low:,} up to' if above else f'from {low:,} to'} {high:,}"
    accepted = f"{words}, or null" if may_be_null else words

    def check(document: Document, place: Place, value: Any) -> None:
        if value is None and may_be_null:
            return
        is_number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high or (above and value == low):
            refuse(document, place, value, accepted)

    return check


def flag(document: Document, place: Place, value: Any) -> None:
    if not isinstance(value, bool):
        refuse(document, place, value, "true or false")


def one_of(*words: str) -> Check:
    def check(document: Document, place: Place, value: Any) -> None:
        if value not in words:
            refuse(document, place, value, f"one of {', '.join(words)}")

    return check


def names(limit: int, *, least: int) -> Check:
    def check(document: Document, place: Place, value: Any) -> None:
        if not isinstance(value, list) or len(value) < least:
            refuse(document, place, value, f"a list of {'names' if not least else f'at least {least} name'}")
            return
        for position, each in enumerate(value):
            text(limit)(document, (*place, position), each)
        if len({str(each) for each in value}) < len(value):
            refuse(document, place, value, "each name once")

    return check


def or_null(inner: Check) -> Check:
    return lambda document, place, value: None if value is None else inner(document, place, value)


def limits(document: Document, place: Place, value: Any) -> None:
    if not isinstance(value, dict):
        refuse(document, place, value, f"a mapping of {', '.join(LimitsRecord.__struct_fields__)}")
        return
    for name, each in value.items():
        if name not in LimitsRecord.__struct_fields__:
            document.add((*place, str(name)), f"unknown; one of {', '.join(LimitsRecord.__struct_fields__)}")
        else:
            number(0, MAX_LIMIT, is_whole=True, may_be_null=True)(document, (*place, name), each)


def scheduling(document: Document, place: Place, value: Any) -> None:
    if not isinstance(value, dict):
        refuse(document, place, value, "a mapping of knobs (`fairlane` lists them at /api/v1/policies)")
        return
    for name, each in value.items():
        if name not in KNOBS:
            document.add((*place, str(name)), f"unknown; one of {', '.join(KNOBS)}")
        elif each is not None:
            try:
                KNOBS[name].check(each, "it")
            except ConfigError as error:
                document.add((*place, name), str(error))


def url(document: Document, place: Place, value: Any) -> None:
    try:
        parts = urlsplit(value) if isinstance(value, str) else None
    except ValueError:
        parts = None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        refuse(document, place, value, "http:// or https:// with a host")


def day(document: Document, place: Place, value: Any) -> None:
    try:
        date.fromisoformat(value)
    except (TypeError, ValueError):
        refuse(document, place, value, "a day such as 2026-01-31")


def instant(document: Document, place: Place, value: Any) -> None:
    try:
        is_aware = datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        is_aware = False
    if not is_aware:
        refuse(document, place, value, "an instant such as 2026-01-31T12:00:00Z")


def email(document: Document, place: Place, value: Any) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[^@\s]+@[^@\s]+", value) or len(value) > 254:
        refuse(document, place, value, "an email address")


def mappings(fields: Mapping[str, Check], *, required: tuple[str, ...]) -> Check:
    """A list of mappings of these fields."""

    def check(document: Document, place: Place, value: Any) -> None:
        if not isinstance(value, list):
            refuse(document, place, value, f"a list of mappings of {', '.join(fields)}")
            return
        for position, each in enumerate(value):
            here = (*place, position)
            if not isinstance(each, dict):
                refuse(document, here, each, f"a mapping of {', '.join(fields)}")
                continue
            check_fields(document, here, each, fields)
            for name in required:
                if name not in each:
                    document.add((*here, name), "is missing")

    return check


def check_fields(document: Document, place: Place, given: Mapping[Any, Any], fields: Mapping[str, Check]) -> None:
    for name, value in given.items():
        if name in fields:
            fields[name](document, (*place, name), value)
        else:
            document.add((*place, str(name)), f"unknown; one of {', '.join(fields)}")
