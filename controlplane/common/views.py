"""Health: alive says only that the process answers, ready that it can work."""

from __future__ import annotations

import functools

from django.db import DatabaseError, connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from psycopg_pool import PoolTimeout


@functools.cache
def _migrations_of_program() -> frozenset[tuple[str, str]]:
    """What this program's files hold; they do not change while it runs."""
    return frozenset(MigrationLoader(None).disk_migrations)


def livez(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"status": "ok"})


@never_cache
def readyz(request: HttpRequest) -> JsonResponse:
    """Database reachable and no migration pending, else 503 with the reason."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        pending = sorted(_migrations_of_program() - MigrationRecorder(connection).applied_migrations().keys())
    except (DatabaseError, PoolTimeout):
        return JsonResponse({"status": "unavailable", "reason": "database unreachable"}, status=503)
    if pending:
        names = [f"{app}.{name}" for app, name in pending]
        return JsonResponse({"status": "unavailable", "reason": "migrations pending", "pending": names}, status=503)
    return JsonResponse({"status": "ok"})
