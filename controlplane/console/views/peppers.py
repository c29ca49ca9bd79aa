"""What hangs on which version of the pepper, and the keys that their holders have to renew."""

from __future__ import annotations

from django.conf import settings
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane.console.frame import actor_of, signed_in
from controlplane.keys import peppers, queries

SHOWN = 200


@require_safe
@signed_in
def index(request: HttpRequest) -> HttpResponseBase:
    versions = [
        {
            "version": version,
            "counts": [counts[kind] for kind in peppers.KINDS],
            "is_newest": version == settings.KEY_PEPPER_VERSION,
            "is_here": version in settings.KEY_PEPPERS,
        }
        for version, counts in peppers.in_use().items()
    ]
    keys = list(queries.under_old_pepper(queries.keys(actor=actor_of(request)))[: SHOWN + 1])
    context = {
        "kinds": [kind.replace("_", " ") for kind in peppers.KINDS], "versions": versions, "keys": keys[:SHOWN],
        "has_more": len(keys) > SHOWN,
    }  # fmt: skip
    return render(request, "console/peppers.html", context)
