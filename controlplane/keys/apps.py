from django.apps import AppConfig
from django.core.checks import Tags, register


class KeysConfig(AppConfig):
    name = "controlplane.keys"
    label = "keys"

    def ready(self) -> None:
        from controlplane.fleet.routers import on_moved_keys
        from controlplane.keys.actions import revoke_all
        from controlplane.keys.peppers import peppers_are_here, take_moved
        from controlplane.tenants.actions import on_tenant_deleted

        on_tenant_deleted(revoke_all)
        on_moved_keys(take_moved)
        register(peppers_are_here, Tags.database)
