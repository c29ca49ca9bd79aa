"""``python -m tests.support.backed_up fill|write STOP SLUG``: a control plane's rows, and a writer that goes on.

In a process of its own, because Django's settings are read once: on the database and under the role of an embedded
stack. The writer changes its tenant and books one event in one transaction each, so that of any instant there are as
many audit entries as events of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
django.setup()

from django.db import transaction  # noqa: E402 - Django first

from controlplane.audit.actions import log_head  # noqa: E402
from controlplane.common.actor import system_actor  # noqa: E402
from controlplane.common.clock import to_us, utc_now  # noqa: E402
from controlplane.tenants.actions import update_tenant  # noqa: E402
from tests.support.control_plane import (  # noqa: E402
    book,
    make_key,
    make_pool,
    make_tenant,
    make_user,
    predicted_event,
    roll_up,
    usage_event,
)

DAY_US = 86_400_000_000


def fill() -> None:
    actor = system_actor("fill")
    pool = make_pool(actor, name="model")
    tenants = [make_tenant(actor, name=f"Tenant {n}", slug=f"filled-{n}") for n in range(5)]
    keys = [make_key(actor, tenant, pool)[0] for tenant in tenants for _ in range(3)]
    make_user(role="owner")
    now = to_us(utc_now())
    for day in range(3):
        made = predicted_event if day == 0 else usage_event
        book(
            *(
                made(
                    event=f"evt_{day}_{n:05d}",
                    tenant=keys[n % 15].tenant_id,
                    key=keys[n % 15].id,
                    output_tokens=n,
                    arrived_at_us=now - day * DAY_US - n * 1_000_000,
                )
                for n in range(400)
            )
        )
    roll_up()
    log_head()


def write(stop: Path, slug: str) -> None:
    """Once, and again until the file is there."""
    actor = system_actor("writer")
    tenant = make_tenant(actor, name=slug, slug=slug)
    n = 0
    while n == 0 or not stop.exists():
        n += 1
        with transaction.atomic():
            update_tenant(actor=actor, tenant_id=tenant.id, weight=float(n + 1))
            book(usage_event(event=f"evt_{slug}_{n:06d}", tenant=tenant.id))
        print(n, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        fill()
    else:
        write(Path(sys.argv[2]), sys.argv[3])
