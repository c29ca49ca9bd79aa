"""``lcf``: least counter first, which is ``vtc`` without the lift. For tests and simulations only.

Rule: as ``vtc``, but the counter of a tenant that becomes backlogged stays as it is.

Guarantee: none. Two tenants that have always been backlogged are served as under ``vtc``.

Cost: as ``vtc``.

Failure mode: a tenant that was idle comes back with the counter of long ago and takes the whole pool until it has
caught up with what the others received meanwhile, hundreds of ``U'`` if it was away for long. That is what the lift is
for, and what the laws about it must notice.

Source: the baseline of this name in Sheng et al., Fairness in Serving Large Language Models (OSDI 2024).
"""

from __future__ import annotations

from typing import ClassVar

from router_ext.core.fairness.vtc import Vtc
from router_ext.core.queues import Tenant


class Lcf(Vtc):
    """See the module."""

    is_bounded: ClassVar[bool] = False

    def backlogged(self, tenant: Tenant) -> None:
        """Enter, without lift."""
        self._counters.enter(tenant)
