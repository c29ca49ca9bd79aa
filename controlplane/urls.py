"""All addresses: health, machine endpoints of routers, REST, admin, console."""

from __future__ import annotations

from django.urls import include, path

from controlplane.common import views as health

urlpatterns = [
    path("livez", health.livez),
    path("readyz", health.readyz),
    path("", include("controlplane.console.urls")),
]
