"""Addresses of the web console."""

from __future__ import annotations

from django.urls import URLPattern, path

from controlplane.console.views import (
    account,
    audit,
    groups,
    live,
    pools,
    predictor,
    requests,
    tenants,
    tiers,
    tokens,
    usage,
)

app_name = "console"
urlpatterns: list[URLPattern] = [
    path("", live.page, name="live"),
    path("live/fragment/", live.fragment, name="live_fragment"),
    path("sign-in/", account.sign_in, name="sign_in"),
    path("sign-out/", account.sign_out, name="sign_out"),
    path("password/", account.password, name="password"),
    path("tenants/", tenants.index, name="tenants"),
    path("tenants/new/", tenants.create, name="tenant_new"),
    path("tenants/<str:tenant_id>/", tenants.detail, name="tenant"),
    path("tenants/<str:tenant_id>/state/", tenants.set_state, name="tenant_state"),
    path("tenants/<str:tenant_id>/keys/", tenants.issue_key, name="key_new"),
    path("tenants/<str:tenant_id>/keys/<str:key_id>/revoke/", tenants.revoke_key, name="key_revoke"),
    path("groups/", groups.index, name="groups"),
    path("groups/new/", groups.create, name="group_new"),
    path("groups/<str:group_id>/", groups.detail, name="group"),
    path("groups/<str:group_id>/delete/", groups.delete, name="group_delete"),
    path("tiers/", tiers.index, name="tiers"),
    path("tiers/new/", tiers.create, name="tier_new"),
    path("tiers/<str:tier_id>/", tiers.detail, name="tier"),
    path("tiers/<str:tier_id>/delete/", tiers.delete, name="tier_delete"),
    path("pools/", pools.index, name="pools"),
    path("pools/new/", pools.create, name="pool_new"),
    path("pools/policies/", pools.policies, name="pool_policies"),
    path("pools/<str:pool_id>/", pools.detail, name="pool"),
    path("pools/<str:pool_id>/fairness/", pools.fairness, name="pool_fairness"),
    path("pools/<str:pool_id>/backends/new/", pools.add_backend, name="backend_new"),
    path("pools/<str:pool_id>/backends/<str:backend_id>/", pools.backend, name="backend"),
    path("pools/<str:pool_id>/backends/<str:backend_id>/delete/", pools.delete_backend, name="backend_delete"),
    path("requests/", requests.index, name="requests"),
    path("usage/", usage.report, name="usage"),
    path("usage.csv", usage.report_as_csv, name="usage_csv"),
    path("usage/quarantine/", usage.quarantine, name="usage_quarantine"),
    path("predictor/", predictor.index, name="predictor"),
    path("predictor/fragment/", predictor.fragment, name="predictor_fragment"),
    path("predictor/start/", predictor.start, name="predictor_start"),
    path("predictor/promote/", predictor.promote, name="predictor_promote"),
    path("predictor/roll-back/", predictor.roll_back, name="predictor_roll_back"),
    path("predictor/demote/", predictor.demote, name="predictor_demote"),
    path("predictor/jobs/<str:job_id>/cancel/", predictor.cancel, name="predictor_cancel"),
    path("audit/", audit.index, name="audit"),
    path("tokens/", tokens.index, name="tokens"),
    path("tokens/<str:token_id>/revoke/", tokens.revoke, name="token_revoke"),
]
