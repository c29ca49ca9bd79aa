from django.apps import AppConfig


class CommonConfig(AppConfig):
    name = "controlplane.common"
    label = "common"

    def ready(self) -> None:
        # Tasks sent from views and commands need the application that knows the broker.
        import controlplane.celery  # noqa: F401 (imported for its effect)
