from importlib import import_module

from django.apps import AppConfig


class CommonConfig(AppConfig):
    name = "controlplane.common"
    label = "common"

    def ready(self) -> None:
        # Tasks sent from views and commands need the application that knows the broker.
        import_module("controlplane.celery")
