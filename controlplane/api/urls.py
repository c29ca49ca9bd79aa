"""``/api/v1``: the viewsets of all apps and their OpenAPI document."""

from __future__ import annotations

from django.urls import include, path, re_path
from drf_spectacular.views import SpectacularJSONAPIView, SpectacularSwaggerSplitView
from rest_framework.routers import SimpleRouter

from controlplane.accounts.api import TokenViewSet
from controlplane.accounts.members_api import InvitationViewSet, MemberViewSet
from controlplane.api.batch import BatchView
from controlplane.api.views import not_found
from controlplane.audit.api import AuditViewSet
from controlplane.fleet.api import BackendViewSet, PoliciesView, PoolViewSet, RouterViewSet
from controlplane.fleet.brakes_api import HazardViewSet, RequestBrakeViewSet, UnderWayView
from controlplane.jobs.api import BackgroundJobViewSet
from controlplane.keys.api import KeyViewSet
from controlplane.keys.peppers_api import PeppersView
from controlplane.rollout.api import RevisionViewSet
from controlplane.tenants.api import GroupViewSet, TenantViewSet
from controlplane.tiers.api import TierViewSet
from controlplane.training.api import (
    AccuracyView,
    ArtifactViewSet,
    DriftView,
    JobViewSet,
    PromotionViewSet,
    RunningView,
    SamplesView,
)
from controlplane.usage.api import (
    KeyQuotaView,
    QuarantineViewSet,
    RequestView,
    SharesView,
    TenantQuotaView,
    UsageExportView,
    UsageReportView,
)
from controlplane.usage.events_api import EventsView
from controlplane.usage.prices_api import AssignmentViewSet, PriceListViewSet, TenantPricesView
from controlplane.usage.statements_api import ReconciliationViewSet, StatementViewSet

router = SimpleRouter(trailing_slash=False)
router.register("tenants", TenantViewSet, basename="tenant")
router.register("groups", GroupViewSet, basename="group")
router.register("keys", KeyViewSet, basename="key")
router.register("tiers", TierViewSet, basename="tier")
router.register("pools", PoolViewSet, basename="pool")
router.register("backends", BackendViewSet, basename="backend")
router.register("routers", RouterViewSet, basename="router")
router.register("hazards", HazardViewSet, basename="hazard")
router.register("revisions", RevisionViewSet, basename="revision")
router.register("audit", AuditViewSet, basename="audit")
router.register("jobs", BackgroundJobViewSet, basename="job")
router.register("training-jobs", JobViewSet, basename="training-job")
router.register("artifacts", ArtifactViewSet, basename="artifact")
router.register("promotions", PromotionViewSet, basename="promotion")
router.register("price-lists", PriceListViewSet, basename="price-list")
router.register("price-assignments", AssignmentViewSet, basename="price-assignment")
router.register("members", MemberViewSet, basename="member")
router.register("invitations", InvitationViewSet, basename="invitation")
router.register("statements", StatementViewSet, basename="statement")
router.register("usage/reconciliations", ReconciliationViewSet, basename="reconciliation")
router.register("tokens", TokenViewSet, basename="token")
router.register("usage/quarantine", QuarantineViewSet, basename="quarantine")

urlpatterns = [
    path("openapi.json", SpectacularJSONAPIView.as_view(), name="openapi"),
    path("docs", SpectacularSwaggerSplitView.as_view(url_name="openapi"), name="api-docs"),
    path("peppers", PeppersView.as_view(), name="peppers"),
    path("batch", BatchView.as_view(), name="batch"),
    path("policies", PoliciesView.as_view(), name="policies"),
    path("requests", UnderWayView.as_view(), name="requests"),
    path(
        "requests/<path:request_id>/cancel",
        RequestBrakeViewSet.as_view({"post": "cancel"}),
        name="request-cancel",
    ),
    path("requests/<path:request_id>", RequestView.as_view(), name="request"),
    path("predictor/accuracy", AccuracyView.as_view(), name="predictor-accuracy"),
    path("predictor/drift", DriftView.as_view(), name="predictor-drift"),
    path("predictor/routers", RunningView.as_view(), name="predictor-routers"),
    path("predictor/samples", SamplesView.as_view(), name="predictor-samples"),
    path("tenants/<str:tenant_id>/quota", TenantQuotaView.as_view(), name="tenant-quota"),
    path("tenants/<str:tenant_id>/price-list", TenantPricesView.as_view(), name="tenant-price-list"),
    path("keys/<str:key_id>/quota", KeyQuotaView.as_view(), name="key-quota"),
    path("usage/export", UsageExportView.as_view(), name="usage-export"),
    path("usage/events", EventsView.as_view(), name="usage-events"),
    path("usage/shares", SharesView.as_view(), name="usage-shares"),
    path("usage/report", UsageReportView.as_view(), name="usage-report"),
    path("", include(router.urls)),
    re_path(r"^.*$", not_found),
]
