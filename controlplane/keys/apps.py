from django.apps import AppConfig


class KeysConfig(AppConfig):
    name = "controlplane.keys"
    label = "keys"

    def ready(self) -> None:
        from controlplane.keys.actions import revoke_all
        from controlplane.tenants.actions import on_tenant_deleted

        on_tenant_deleted(revoke_all)
