from django.apps import AppConfig


class TenantsConfig(AppConfig):
    name = "controlplane.tenants"
    label = "tenants"

    def ready(self) -> None:
        from controlplane.accounts.actions import close_people
        from controlplane.tenants.actions import on_tenant_deleted

        on_tenant_deleted(close_people)
