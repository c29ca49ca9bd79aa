from django.apps import AppConfig


class TrainingConfig(AppConfig):
    name = "controlplane.training"
    label = "training"
