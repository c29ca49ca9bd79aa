from django.apps import AppConfig


class TiersConfig(AppConfig):
    name = "controlplane.tiers"
    label = "tiers"
