from django.apps import AppConfig


class KeysConfig(AppConfig):
    name = "controlplane.keys"
    label = "keys"
