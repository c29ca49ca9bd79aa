"""Health: alive says only that the process answers, ready that it can work."""

from __future__ import annotations

from django.db import DEFAULT_DB_ALIAS, DatabaseError, connection, connections
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from psycopg_pool import PoolTimeout


def livez(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"status": "ok"})


@never_cache
def readyz(request: HttpRequest) -> JsonResponse:
    """Database reachable and no migration pending, else 503 with the reason."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        executor = MigrationExecutor(connections[DEFAULT_DB_ALIAS])
        pending = executor.migration_plan(executor.loader.graph.leaf_nodes())
    except (DatabaseError, PoolTimeout):
        return JsonResponse({"status": "unavailable", "reason": "database unreachable"}, status=503)
    if pending:
        names = [f"{migration.app_label}.{migration.name}" for migration, _ in pending]
        return JsonResponse({"status": "unavailable", "reason": "migrations pending", "pending": names}, status=503)
    return JsonResponse({"status": "ok"})
