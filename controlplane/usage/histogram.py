"""The log histograms of ``router_ext.wire.log_histogram`` in SQL."""

from __future__ import annotations

from router_ext.wire.log_histogram import LOG_GAMMA

BUCKET_SQL = f"greatest(0, ceil(ln(greatest({{us}}, 1)::double precision) / {LOG_GAMMA!r}))::integer"
"""``log_histogram.bucket`` in SQL; ``{us}`` is an expression of microseconds."""
