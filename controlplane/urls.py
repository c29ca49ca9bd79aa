"""All addresses: health, machine endpoints of routers, REST, console."""

from __future__ import annotations

from django.urls import include, path, re_path

from controlplane.common import views as health
from controlplane.console.views import oidc
from controlplane.fleet.views import heartbeat
from controlplane.rollout.views import snapshot
from controlplane.staff.site import make_site
from controlplane.training.views import artifact
from controlplane.usage.key_api import KeyUsageView, RouterUsageView
from controlplane.usage.views import totals, usage
from router_ext.wire.controlplane import (
    ARTIFACT_PATH,
    HEARTBEAT_PATH,
    SNAPSHOT_PATH,
    TENANT_USAGE_PATH,
    TOTALS_PATH,
    USAGE_PATH,
)

handler400 = "controlplane.console.views.problems.bad_request"
handler403 = "controlplane.console.views.problems.forbidden"
handler404 = "controlplane.console.views.problems.not_found"
handler500 = "controlplane.console.views.problems.broken"

urlpatterns = [
    path("livez", health.livez),
    path("readyz", health.readyz),
    path(SNAPSHOT_PATH.removeprefix("/"), snapshot),
    path(USAGE_PATH.removeprefix("/"), usage),
    path(TOTALS_PATH.removeprefix("/"), totals),
    path(HEARTBEAT_PATH.removeprefix("/"), heartbeat),
    re_path(f"^{ARTIFACT_PATH.removeprefix('/')}(?P<digest>[0-9a-f]{{64}})$", artifact),
    path("v1/usage", KeyUsageView.as_view()),
    path("oidc/<str:provider_id>/login/", oidc.start, name="openid_connect_login"),
    path("oidc/<str:provider_id>/callback/", oidc.back, name="openid_connect_callback"),
    path(TENANT_USAGE_PATH.removeprefix("/"), RouterUsageView.as_view()),
    path("api/v1/", include("controlplane.api.urls")),
    path("staff/", make_site().urls),
    path("", include("controlplane.console.urls")),
]
