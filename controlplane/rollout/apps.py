from django.apps import AppConfig

from controlplane.common.use_case import on_config_change


class RolloutConfig(AppConfig):
    name = "controlplane.rollout"
    label = "rollout"

    def ready(self) -> None:
        from controlplane.rollout.actions import publish

        on_config_change(publish)
