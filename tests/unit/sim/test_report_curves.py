"""Curves over the load."""

from __future__ import annotations

from xml.etree import ElementTree

from router_ext.sim.report.curves import over_load
from router_ext.sim.report.figures import picture
from router_ext.sim.report.glossary import MEASURES
from router_ext.sim.report.panels import Panel

RATES = (0.2, 0.4, 0.6)
VALUES = {"vtc": (1.0, 10.0, 100.0), "justitia": (0.5, 2.0, 4.0), "slo-fair": (None, None, None)}


def test_every_policy_stands_before_all_others() -> None:
    figure = over_load(MEASURES["completion_mean_s"], "agents/s", RATES, VALUES)
    panels = {panel.name: panel for panel in figure.drawings if isinstance(panel, Panel)}
    assert list(panels) == list(VALUES)
    own, others = panels["vtc"].lines[-1], panels["vtc"].lines[:-1]
    assert own.points == [(0.2, 1.0), (0.4, 10.0), (0.6, 100.0)]
    assert (own.name, own.label) == ("vtc", "100 s")
    assert [line.name for line in others] == ["justitia", "slo-fair"]
    assert [mark.text for mark in panels["justitia"].marks] == ["0.2: 500 ms", "0.4: 2 s", "0.6: 4 s"]
    assert panels["slo-fair"].empty == "no value"
    assert figure.table.rows[0] == ["vtc", "1 s", "10 s", "100 s"]
    ElementTree.fromstring(picture(figure, max_bytes=60_000))


def test_the_axis_is_logarithmic_where_values_are_far_apart() -> None:
    (near,) = over_load(MEASURES["violations_ratio"], "req/s", RATES, {"vtc": (0.0, 0.01, 0.02)}).drawings
    far, *_ = over_load(MEASURES["completion_mean_s"], "req/s", RATES, VALUES).drawings
    assert isinstance(near, Panel)
    assert isinstance(far, Panel)
    assert near.y.ratio(0.01) == 0.5 * near.y.ratio(0.02)
    assert far.y.ratio(1.0) - far.y.ratio(0.1) == far.y.ratio(10.0) - far.y.ratio(1.0)
