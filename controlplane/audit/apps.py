from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import Tags, register
from django.db import connections, transaction
from django.db.models.signals import post_migrate


class AuditConfig(AppConfig):
    name = "controlplane.audit"
    label = "audit"

    def ready(self) -> None:
        from controlplane.audit.checks import audit_is_owned_apart

        register(audit_is_owned_apart, Tags.security, deploy=True)
        post_migrate.connect(_separate, sender=self)


def _separate(using: str, **_: Any) -> None:
    """After all migrations: the log to its owner, all else to the program's role, if one is named."""
    from controlplane.audit.ownership import separate, set_password

    if settings.DB_APPLICATION_ROLE:
        with transaction.atomic(using), connections[using].cursor() as cursor:
            separate(cursor, application=settings.DB_APPLICATION_ROLE)
            if settings.DB_APPLICATION_PASSWORD:
                set_password(cursor, settings.DB_APPLICATION_ROLE, settings.DB_APPLICATION_PASSWORD)
