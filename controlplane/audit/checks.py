"""``manage.py check --deploy``: whether the program's database role could tamper with the audit log."""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage, Warning
from django.db import DatabaseError, connection
from psycopg_pool import PoolTimeout

from controlplane.audit.ownership import weakness


def audit_is_owned_apart(app_configs: Any = None, **_: Any) -> list[CheckMessage]:
    """A warning where the role of ``DATABASE_URL`` is a superuser, owns the log or may change it."""
    try:
        with connection.cursor() as cursor:
            reason = weakness(cursor)
    except (DatabaseError, PoolTimeout) as error:
        reason = f"the database was not reachable ({type(error).__name__})"
    if not reason:
        return []
    hint = "Migrate as another role with FAIRLANE_DB_APPLICATION_ROLE set to this one (docs/control_plane.md, Audit)."
    return [Warning(f"The audit log is not out of the program's reach: {reason}.", hint=hint, id="fairlane.W001")]
