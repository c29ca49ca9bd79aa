"""Bodies of revisions, in and out of the database as bytes: bound on the server, in binary form."""

from __future__ import annotations

from controlplane.common.bound import bound_cursor


def write(number: int, body: bytes) -> None:
    """Set the body of a revision that is there."""
    with bound_cursor() as cursor:
        cursor.execute("UPDATE rollout_revision SET body = %b WHERE number = %s", [body, number])


def read(number: int) -> bytes | None:
    """The body of a revision; None if there is none (any more)."""
    with bound_cursor() as cursor:
        cursor.execute("SELECT body FROM rollout_revision WHERE number = %s", [number], binary=True)
        row = cursor.fetchone()
    return None if row is None or row[0] is None else bytes(row[0])
