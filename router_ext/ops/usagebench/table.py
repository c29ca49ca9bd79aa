"""The result of ``fairlane bench usage`` for people: each figure beside its bar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

BARS: Mapping[str, tuple[str, float, bool]] = {
    "ingest_events_per_s": ("events booked per second", 50_000, True),
    "worst_page_s": ("slowest page, s", 1.0, False),
    "worst_page_queries": ("most queries of a page", 12, False),
    "report_api_ms": ("slowest report by REST, ms", 500.0, False),
    "export_peak_mib": ("memory of exports, MiB", 50.0, False),
    "config_apply_s": ("a change on every router, s", 2.0, False),
}
"""What is asked for by name: words, bar, and whether at least so much is wanted."""


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Figures, then what they are made of."""
    details = result["details"]
    yield f"{'':32}{'measured':>12}{'bar':>10}"
    for name, (words, bar, is_least) in BARS.items():
        if name in result:
            value = result[name]
            is_reached = value >= bar if is_least else value <= bar
            sign = ">=" if is_least else "<="
            yield f"{words:32}{_number(value):>12}{f'{sign} {bar:,.10g}':>10}{'' if is_reached else '  NOT REACHED'}"
    ingest = details["ingest"]
    yield (
        f"booked by {ingest['sessions']} sessions; bare COPY of the same rows by one: "
        f"{ingest['copy_events_per_s']:,.0f} events/s"
    )
    yield ", ".join(f"{n:,} {table}" for table, n in details["rows"].items())
    if "pages" in result:
        yield ""
        yield f"{'page':32}{'ms':>12}{'queries':>10}"
        for name, page in sorted(result["pages"].items(), key=lambda each: -each[1]["s"]):
            yield f"{name:32}{page['s'] * 1_000:>12,.1f}{page['queries']:>10}"
        for name, reason in details["unmeasured"].items():
            yield f"{name:32}not measured: {reason}"
    if "reports" in details:
        yield ""
        yield f"{'report by':44}{'ms':>12}"
        for name, milliseconds in details["reports"].items():
            yield f"{name:44}{milliseconds:>12,.1f}"
    if "exports" in details:
        yield ""
        yield f"{'export':32}{'MiB':>12}{'s':>10}{'memory, MiB':>13}"
        for export in details["exports"]:
            yield f"{export['name']:32}{export['mib']:>12,.1f}{export['s']:>10,.1f}{export['peak_mib']:>13,.1f}"
    if "config" in details:
        config = details["config"]
        yield ""
        yield (
            f"a changed weight: answered after {config['answered']:.2f} s, on every router after "
            f"{config['median']:.2f} s (medians); all of it on new routers after {config['first']:.1f} s"
        )


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
