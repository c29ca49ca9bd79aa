"""The log histograms of ``router_ext.wire.log_histogram`` in SQL."""

from __future__ import annotations

from router_ext.wire.log_histogram import LOG_GAMMA

BUCKET_SQL = f"greatest(0, ceil(ln(greatest({{us}}, 1)::double precision) / {LOG_GAMMA!r}))::integer"
"""``log_histogram.bucket`` in SQL; ``{us}`` is an expression of microseconds."""

QUANTILE_SQL = "min(bucket) FILTER (WHERE seen >= greatest(1, ceil({level}::float8 * total)))"
"""The bucket of ``quantile_us`` in SQL: of rows with a ``bucket``, how many are ``seen`` up to it, and ``total``."""
