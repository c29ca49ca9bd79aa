"""The site: owners look at rows, and nothing is written. Who must change a row does it by a use case, which is audited.

A page answers GET alone; adding, changing, deleting, signing in and passwords have no address here at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.apps import apps
from django.contrib import admin
from django.contrib.auth.views import redirect_to_login
from django.db import models
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import URLPattern, URLResolver, reverse
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role, User

SHOWN = (
    "accounts.User", "accounts.Invitation", "accounts.OperatorToken", "audit.AuditEntry", "audit.AuditHead",
    "common.BackgroundJob", "fleet.Backend", "fleet.Cancellation", "fleet.Hazard", "fleet.Pool", "fleet.Router",
    "keys.ApiKey", "rollout.Revision", "tenants.Group", "tenants.Tenant", "tiers.Tier", "training.Artifact",
    "training.Job", "training.Promotion", "usage.PriceList", "usage.QuarantinedEvent", "usage.Reconciliation",
    "usage.Statement",
)  # fmt: skip
SECRET_WORDS = ("password", "secret", "digest", "subject", "lease")
"""Parts of names of columns that are shown nowhere; nor are bytes."""
MAX_COLUMNS = 8
FOUND_BY = ("slug", "name", "email", "public_id")
"""Columns that the search of a list looks into, beside the id."""
_KEPT = {"index", "app_list", "jsi18n"}
"""The site's own addresses; besides them, those of models."""


def is_owner(request: HttpRequest) -> bool:
    user = request.user
    return isinstance(user, User) and user.is_active and user.role == Role.OWNER


def shown_fields(model: type[models.Model]) -> list[str]:
    """Columns without secrets and bytes."""
    return [
        field.name
        for field in model._meta.concrete_fields
        if not isinstance(field, models.BinaryField) and not any(word in field.name for word in SECRET_WORDS)
    ]


if TYPE_CHECKING:
    _Admin = admin.ModelAdmin[Any]
else:
    _Admin = admin.ModelAdmin


class ReadOnly(_Admin):
    """One kind of row: a list, and a page of each."""

    actions = None
    list_per_page = 50
    show_full_result_count = False
    ordering = ("-pk",)

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        columns = self.model._meta.concrete_fields
        long = {field.name for field in columns if isinstance(field, models.TextField | models.JSONField)}
        pk = self.model._meta.pk.name
        return [pk, *(name for name in shown_fields(self.model) if name != pk and name not in long)][:MAX_COLUMNS]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return list(shown_fields(self.model))

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return list(shown_fields(self.model))

    def get_search_fields(self, request: HttpRequest) -> list[str]:
        shown = shown_fields(self.model)
        return [f"={self.model._meta.pk.name}", *(name for name in FOUND_BY if name in shown)]

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Columns that are shown, by their value: a list filtered by a secret's beginning would tell the secret."""
        return lookup.removesuffix("__exact") in shown_fields(self.model)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return is_owner(request)

    def has_module_permission(self, request: HttpRequest) -> bool:
        return is_owner(request)

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """What happened to a row is in the audit log."""
        return redirect(f"{reverse('console:audit')}?{urlencode({'object_id': object_id})}")

    def get_urls(self) -> list[URLPattern]:
        names = {f"{self.opts.app_label}_{self.opts.model_name}_{what}" for what in ("changelist", "change", "history")}
        return [each for each in super().get_urls() if isinstance(each, URLPattern) and each.name in names]


class StaffSite(admin.AdminSite):
    """Owners only, signed in on the console with all that this asks of them."""

    site_title = site_header = "Fairlane: rows of the control plane"
    index_title = "Read only"
    site_url = "/"
    final_catch_all_view = False
    enable_nav_sidebar = False

    def has_permission(self, request: HttpRequest) -> bool:
        return is_owner(request)

    def admin_view(self, view: Any, cacheable: bool = False) -> Any:
        inner = super().admin_view(view, cacheable)

        @require_safe
        def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            if not request.user.is_authenticated:
                return redirect_to_login(request.get_full_path())
            if not is_owner(request):
                raise Http404(request.path)
            if "\0" in request.path or any("\0" in f"{k}{''.join(v)}" for k, v in request.GET.lists()):
                raise Http404("nothing is called by NUL, which the database refuses to compare with")
            answer: HttpResponseBase = inner(request, *args, **kwargs)
            return answer

        return guarded

    def get_urls(self) -> list[URLResolver | URLPattern]:
        return [each for each in super().get_urls() if isinstance(each, URLResolver) or each.name in _KEPT]


def make_site() -> StaffSite:
    """The site with all that it shows."""
    site = StaffSite()
    for label in SHOWN:
        site.register(apps.get_model(label), ReadOnly)
    return site
