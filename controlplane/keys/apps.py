from django.apps import AppConfig
from django.core.checks import Tags, register


class KeysConfig(AppConfig):
    name = "controlplane.keys"
    label = "keys"

    def ready(self) -> None:
        from controlplane.fleet.actions import on_pool_deleted
        from controlplane.fleet.routers import on_moved_keys
        from controlplane.keys.actions import let_go_of_pool, let_go_of_tier, revoke_all
        from controlplane.keys.peppers import peppers_are_here, take_moved
        from controlplane.tenants.actions import on_tenant_deleted
        from controlplane.tiers.actions import on_tier_deleted

        on_tenant_deleted(revoke_all)
        on_pool_deleted(let_go_of_pool)
        on_tier_deleted(let_go_of_tier)
        on_moved_keys(take_moved)
        register(peppers_are_here, Tags.database)
