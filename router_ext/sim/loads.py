"""One suite at several loads: what every policy makes of each.

{"suite", "seeds", "rates": [{"rate", "results": as of one load}, ...]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router_ext.sim.results import labels


def over_load(rates: Sequence[float], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The results of one suite and the same seeds, one per rate, as one."""
    return {
        "suite": results[0]["suite"],
        "seeds": results[0]["seeds"],
        "rates": [{"rate": rate, "results": each["results"]} for rate, each in zip(rates, results, strict=True)],
    }


def values_by_policy(result: Mapping[str, Any], metric: str) -> dict[str, list[float | None]]:
    """A metric by policy (and predictor, if there are several), one value per rate."""
    loads = result["rates"]
    return {
        label: [load["results"][index]["metrics"][metric] for load in loads]
        for index, label in enumerate(labels(loads[0]["results"]))
    }
