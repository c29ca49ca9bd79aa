"""Buttons that stop something at once, and those that let it go on; all go back to the page they are on."""

from __future__ import annotations

from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponseBase
from django.urls import reverse
from django.views.decorators.http import require_POST

from controlplane.console.frame import act, actor_of, of_tenants, signed_in
from controlplane.fleet import brakes
from controlplane.tenants import actions as tenant_actions


def _reason(request: HttpRequest) -> str:
    return request.POST.get("reason", "")


@require_POST
@signed_in
def drain_backend(request: HttpRequest, pool_id: str, backend_id: str) -> HttpResponseBase:
    def change() -> str:
        row = brakes.drain_backend(actor=actor_of(request), backend_id=backend_id, reason=_reason(request))
        return f"Backend {row.name} is being drained; the page says when nothing runs there."

    return act(request, change, reverse("console:backend", args=[pool_id, backend_id]))


@require_POST
@signed_in
def uncordon_backend(request: HttpRequest, pool_id: str, backend_id: str) -> HttpResponseBase:
    def change() -> str:
        row = brakes.uncordon_backend(actor=actor_of(request), backend_id=backend_id, reason=_reason(request))
        return f"Backend {row.name} takes work again within two seconds."

    return act(request, change, reverse("console:backend", args=[pool_id, backend_id]))


@require_POST
@signed_in
def stop_tenant(request: HttpRequest, tenant_id: str) -> HttpResponseBase:
    def change() -> str:
        tenant = tenant_actions.stop_tenant(actor=actor_of(request), tenant_id=tenant_id, reason=_reason(request))
        return f"Tenant {tenant.name} is stopped: what it runs ends within two seconds."

    return act(request, change, reverse("console:tenant", args=[tenant_id]))


@require_POST
@signed_in
def resume_tenant(request: HttpRequest, tenant_id: str) -> HttpResponseBase:
    def change() -> str:
        tenant = tenant_actions.resume_tenant(actor=actor_of(request), tenant_id=tenant_id, reason=_reason(request))
        return f"Tenant {tenant.name} is active again."

    return act(request, change, reverse("console:tenant", args=[tenant_id]))


@require_POST
@signed_in
def stop_grammars(request: HttpRequest, pool_id: str) -> HttpResponseBase:
    def change() -> str:
        pool = brakes.stop_grammars(actor=actor_of(request), pool_id=pool_id, reason=_reason(request))
        return f"Pool {pool.name} takes no grammars; requests that have one end within two seconds."

    return act(request, change, reverse("console:pool", args=[pool_id]))


@require_POST
@signed_in
def allow_grammars(request: HttpRequest, pool_id: str) -> HttpResponseBase:
    def change() -> str:
        pool = brakes.allow_grammars(actor=actor_of(request), pool_id=pool_id, reason=_reason(request))
        return f"Pool {pool.name} takes grammars again."

    return act(request, change, reverse("console:pool", args=[pool_id]))


@require_POST
@of_tenants
def cancel_request(request: HttpRequest) -> HttpResponseBase:
    wanted = request.POST.get("id", "").strip()

    def change() -> str:
        brakes.cancel_request(actor=actor_of(request), request_id=wanted, reason=_reason(request))
        return f"Request {wanted} is cancelled: routers end it within two seconds, if it runs or waits."

    return act(request, change, f"{reverse('console:requests')}?{urlencode({'id': wanted[: brakes.MAX_ID]})}")
