"""A cursor that binds parameters on the server, in binary form: for statements with large ones.

Django sends parameters as text within the statement: 30 MB become 60 MB of SQL that both sides have to read, and each
text of an array is escaped twice. This cursor is of the same connection and in the same transaction.
"""

from __future__ import annotations

from typing import Any

import psycopg
from django.db import connection

EPOCH_US = 946_684_800_000_000
"""An instant in binary form is an int8: microseconds since the begin of 2000, which is this many since that of 1970."""


def bound_cursor() -> psycopg.Cursor[Any]:
    """A cursor of psycopg itself; ``%b`` sends a parameter in binary form. Wrappers that count statements miss it."""
    connection.ensure_connection()
    return psycopg.Cursor(connection.connection)
