"""A report of a simulation: one HTML file without any other, and its pictures as SVG files of their own.

    Study (recordings, result) --> overview, service, lead, counters, ttft, ... --> Figure
                                                                                                |
        Figure --> drawings (panels, strips) --> SVG: in the page (page), in a file (figures) <-'

Same study, same bytes, but for the speed of the simulation. Everything drawn is also said: in the description of each
picture, and in a table below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from router_ext.sim.loads import values_by_policy
from router_ext.sim.report.curves import over_load
from router_ext.sim.report.fairness import counters, lead, service
from router_ext.sim.report.figures import Figure, picture
from router_ext.sim.report.glossary import MEASURES
from router_ext.sim.report.latency import ttft
from router_ext.sim.report.load import kv, queues, running
from router_ext.sim.report.page import page
from router_ext.sim.report.strips import overview
from router_ext.sim.report.study import Study

__all__ = ["MEASURES", "Study", "write", "write_load"]

_FIGURES: tuple[Callable[[Study], Figure], ...] = (overview, service, lead, counters, ttft, queues, kv, running)

_MOST_BYTES = 60_000
"""Of one picture: a repository that embeds a dozen of them stays small."""


def write_load(directory: Path, result: Mapping[str, Any], metric: str, unit: str) -> Path:
    """Write ``load.svg``: a metric of every policy over the load.

    Args:
        result: as of ``sim.loads.over_load``. unit: of its rates.

    Raises:
        OSError: the directory cannot be written.
    """
    path = directory / "load.svg"
    rates = [load["rate"] for load in result["rates"]]
    figure = over_load(MEASURES[metric], unit, rates, values_by_policy(result, metric))
    path.write_text(picture(figure, max_bytes=_MOST_BYTES), encoding="utf-8")
    return path


def write(directory: Path, study: Study) -> Path:
    """Write ``report.html`` and a picture per figure, ``NAME.svg``; files of those names are replaced.

    Returns:
        The page's path.

    Raises:
        OSError: the directory cannot be made or written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    figures = [figure for make in _FIGURES if (figure := make(study)).drawings]
    for figure in figures:
        (directory / f"{figure.name}.svg").write_text(picture(figure, max_bytes=_MOST_BYTES), encoding="utf-8")
    path = directory / "report.html"
    path.write_text(page(study, figures), encoding="utf-8")
    return path
