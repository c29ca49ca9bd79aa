"""Typed identifiers. Public ids carry a prefix (``ten_``, ``key_``, ``bke_``, ``req_``, ``rtr_``)."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
TenantId = NewType("TenantId", str)
KeyId = NewType("KeyId", str)
TierName = NewType("TierName", str)
BackendId = NewType("BackendId", str)
RouterId = NewType("RouterId", str)
