from django.apps import AppConfig


class RolloutConfig(AppConfig):
    name = "controlplane.rollout"
    label = "rollout"
