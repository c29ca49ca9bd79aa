"""Bodies of revisions, in and out of the database as bytes.

Django sends parameters as text: 30 MB become 60 MB of SQL that both sides have to read, a second of every change.
These two statements bind theirs on the server, in binary form, on the same connection and in the same transaction.
"""

from __future__ import annotations

import psycopg
from django.db import connection


def _cursor() -> psycopg.Cursor[tuple[bytes | None]]:
    connection.ensure_connection()
    # Of psycopg itself: Django's own binds on the client.
    return psycopg.Cursor(connection.connection)


def write(number: int, body: bytes) -> None:
    """Set the body of a revision that is there."""
    with _cursor() as cursor:
        cursor.execute("UPDATE rollout_revision SET body = %b WHERE number = %s", [body, number])


def read(number: int) -> bytes | None:
    """The body of a revision; None if there is none (any more)."""
    with _cursor() as cursor:
        cursor.execute("SELECT body FROM rollout_revision WHERE number = %s", [number], binary=True)
        row = cursor.fetchone()
    return None if row is None or row[0] is None else bytes(row[0])
