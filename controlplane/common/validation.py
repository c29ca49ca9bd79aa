"""Checks that several use cases share: fields gathered into one ``Invalid``, versions compared."""

from __future__ import annotations

import math
import re
from typing import TypeVar

from django.db import models

from controlplane.common.errors import Invalid, NotFound, VersionMismatch
from controlplane.common.models import Versioned

M = TypeVar("M", bound=models.Model)
V = TypeVar("V", bound=Versioned)

SLUG = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")


def without_nul(text: str) -> str:
    """Text to filter by: NUL stands in no row, and PostgreSQL refuses to compare with it."""
    return text.replace("\0", "")


class Checks:
    """Collects messages by field; ``done`` raises them together, so that a form shows all at once."""

    def __init__(self) -> None:
        self.fields: dict[str, list[str]] = {}

    def add(self, field: str, message: str) -> None:
        self.fields.setdefault(field, []).append(message)

    def number(self, field: str, value: float | None, low: float, high: float, *, is_low_open: bool = False) -> None:
        """A finite number within the range; None passes."""
        if value is None:
            return
        if not math.isfinite(value) or value < low or value > high or (is_low_open and value == low):
            allowed = f"above {low:,} and at most {high:,}" if is_low_open else f"from {low:,} to {high:,}"
            self.add(field, f"must be {allowed}, not {value!r}")

    def text(self, field: str, value: str, limit: int) -> str:
        """Printable, not blank, at most ``limit`` characters; returns it stripped."""
        stripped = value.strip()
        if not stripped:
            self.add(field, "must not be empty")
        elif len(stripped) > limit:
            self.add(field, f"has {len(stripped)} characters; at most {limit} are allowed")
        elif not stripped.isprintable():
            self.add(field, "contains control characters")
        return stripped

    def slug(self, field: str, value: str) -> None:
        if not SLUG.match(value):
            self.add(field, f"{value!r} is not 1 to 63 of a-z, 0-9 and -, beginning and ending with a letter or digit")

    def manager(self, managed_by: str) -> None:
        """Name of the program a row is managed by, or "" for none."""
        if managed_by:
            self.slug("managed_by", managed_by)

    def done(self) -> None:
        if self.fields:
            raise Invalid(self.fields)


MAX_REASON = 1_000


def checked_reason(reason: str, field: str = "reason") -> str:
    """Why somebody does something, for the audit log: 1 to 1,000 printable characters, white space made single.

    Raises:
        Invalid: on ``field``.
    """
    checks = Checks()
    reason = checks.text(field, " ".join(reason.split()), MAX_REASON)
    checks.done()
    return reason


def get_or_not_found(rows: models.QuerySet[M], what: str, public_id: str) -> M:
    """The row of that id, or NotFound naming it."""
    row = rows.filter(pk=public_id).first() if "\0" not in public_id else None
    if row is None:
        raise NotFound(f"no {what} {public_id!r}")
    return row


def lock_version(rows: models.QuerySet[V], what: str, public_id: str, expected_version: int | None) -> V:
    """Lock the row for update and compare its version with the one the caller has read.

    Raises:
        NotFound, VersionMismatch
    """
    row = get_or_not_found(rows.select_for_update(of=("self",)), what, public_id)
    if expected_version is not None and row.version != expected_version:
        raise VersionMismatch(f"{what} {public_id} has version {row.version}, not {expected_version}")
    return row
