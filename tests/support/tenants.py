"""Tenants made for one test on a router that several tests share."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from support.routers import RouterProcess

from router_ext.wire.controlplane import UsageEvent

_numbers = itertools.count(1)
_OF_KEYS = ("may_choose_tier", "expires_at_us", "default_pool")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant with a key on a running router."""

    name: str
    key: str
    router: RouterProcess

    @property
    def base(self) -> str:
        return self.router.base

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def events(self) -> list[UsageEvent]:
        """What the books say of this tenant at present."""
        return [event for event in self.router.usage() if event.tenant == f"ten_{self.name}"]

    def usage(self, count: int) -> list[UsageEvent]:
        """This tenant's events, once there are ``count`` of them; more are a failure."""
        self.router.wait(lambda: len(self.events()) >= count)
        found = self.events()
        assert len(found) == count, found
        return found


def new_tenant(running: RouterProcess, **fields: Any) -> Tenant:
    """Publish a tenant with one key; fields of ``TenantRecord``, and of ``KeyRecord``."""
    name = f"tenant{next(_numbers)}"
    of_key = {field: fields.pop(field) for field in _OF_KEYS if field in fields}
    running.setup.tenant(name, **fields)
    key = running.setup.key(name, **of_key)
    running.publish()
    return Tenant(name, key, running)
