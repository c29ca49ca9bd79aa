"""How operations describe themselves in the OpenAPI document."""

from __future__ import annotations

import inspect

from drf_spectacular.openapi import AutoSchema


class Schema(AutoSchema):
    """An operation says what its handler says, or else its view; nothing of what base classes say of themselves."""

    def get_description(self) -> str:  # type: ignore[override]  # as the library's own class does
        handler = getattr(self.view, getattr(self.view, "action", None) or self.method.lower(), None)
        own = getattr(handler, "__doc__", None) or vars(type(self.view)).get("__doc__")
        return inspect.cleandoc(own or "")
