"""The few gauges of TGI's ``/metrics`` a router looks at, out of some 90 kB of Prometheus text.

TGI writes a metric only once it has had a value, so an absent gauge is None, never zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiGauges:
    """What TGI says of its queue and batch. Units: requests and tokens; None where TGI has written nothing."""

    queue_size: int | None = None
    batch_current_size: int | None = None
    batch_current_max_tokens: int | None = None
    request_count: int | None = None
    request_success: int | None = None


_NAMES = {
    b"tgi_queue_size": "queue_size",
    b"tgi_batch_current_size": "batch_current_size",
    b"tgi_batch_current_max_tokens": "batch_current_max_tokens",
    b"tgi_request_count": "request_count",
    b"tgi_request_success": "request_success",
}


def parse_gauges(text: bytes) -> TgiGauges:
    """Read the text exposition format; series with labels are summed, values that are no number are left out.

    Cost: one search of the page per name, some 0.1 ms together; a look at every line would stall streams for 5 ms.
    """
    values: dict[str, float] = {}
    page = b"\n" + text
    for metric, name in _NAMES.items():
        mark = b"\n" + metric
        place = page.find(mark)
        while place >= 0:
            begin = place + len(mark)
            end = page.find(b"\n", begin)
            line = page[begin : end if end >= 0 else len(page)]
            if line[:1] == b"{":
                line = line[line.rfind(b"}") + 1 :]
            if line[:1] == b" ":
                fields = line.split()
                try:
                    value = float(fields[0]) if fields else math.nan
                except ValueError:
                    value = math.nan
                if math.isfinite(total := values.get(name, 0.0) + value):
                    values[name] = total
            place = page.find(mark, begin)
    return TgiGauges(**{name: round(value) for name, value in values.items()})
