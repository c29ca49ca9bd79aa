"""Query parameters: an operation takes those that its OpenAPI document names, and no others."""

from __future__ import annotations

import inspect
from typing import Any

from drf_spectacular.utils import OpenApiParameter
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from controlplane.common.errors import Invalid

_known: dict[tuple[type, str], tuple[str, ...]] = {}


def known_parameters(view: Any, method: str) -> tuple[str, ...] | None:
    """Names that the operation which serves this method takes; None where none does.

    They are read where the document reads them, so that the two cannot differ: ``extend_schema`` of the handler, and
    the pages of a list.
    """
    name = getattr(view, "action", None) or method.lower()
    handler = getattr(view, name, None)
    if handler is None or method == "OPTIONS":
        return None
    found = _known.get((type(view), name))
    if found is None:
        described = getattr(handler, "kwargs", {}).get("schema")
        names: list[str] = []
        if described is not None:
            schema: Any = described() if inspect.isclass(described) else described
            schema.view, schema.method = view, method
            names = [p.name for p in schema.get_override_parameters() if p.location == OpenApiParameter.QUERY]
        if name == "list" and getattr(view, "paginator", None) is not None:
            pages = view.paginator.get_schema_operation_parameters(view)
            names += [p["name"] for p in pages if p["name"] not in names]
        found = _known[type(view), name] = tuple(names)
    return found


class KnownParameters(BasePermission):
    """Refuses parameters that the operation does not know: a misspelt filter must not be dropped silently.

    Nor may one that holds NUL, which stands in no row.
    """

    def has_permission(self, request: Request, view: Any) -> bool:
        given = request.query_params
        known = known_parameters(view, str(request.method)) if given else None
        if known is None:
            return True
        accepted = f"one of {', '.join(known)}" if known else "there are none here"
        if unknown := [name for name in given if name not in known]:
            raise Invalid({name[:60]: f"unknown parameter {name[:60]!r}; {accepted}" for name in unknown})
        if with_nul := [name for name in given if any("\0" in value for value in given.getlist(name))]:
            raise Invalid(dict.fromkeys(with_nul, "must not hold NUL"))
        return True
