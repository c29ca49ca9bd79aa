"""The report of hand-made runs: what it says is what they are, and it needs nothing but itself."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.recordings import recording, study

from router_ext.sim import report
from router_ext.sim.metrics import percentile, summarize, ttfts
from router_ext.sim.recording import Requests, Samples
from router_ext.sim.report.fairness import counters, lead, service
from router_ext.sim.report.figures import Figure, picture
from router_ext.sim.report.glossary import MEASURES, Better, Measure
from router_ext.sim.report.latency import ttft
from router_ext.sim.report.load import kv, queues, running
from router_ext.sim.report.panels import PLOT_HEIGHT, Panel
from router_ext.sim.report.scales import duration
from router_ext.sim.report.strips import overview

SVG = "{http://www.w3.org/2000/svg}"
FIGURES = (service, lead, counters, ttft, queues, kv, running)


def panel_of(figure: Figure, policy: str = "slo-fair") -> Panel:
    panel = next(drawing for drawing in figure.drawings if drawing.name == policy)
    assert isinstance(panel, Panel)
    return panel


def parsed(figure: Figure) -> ElementTree.Element:
    return ElementTree.fromstring(picture(figure, max_bytes=60_000))


def texts(root: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in root.iter(f"{SVG}text")]


def inline_pictures(page: str) -> list[ElementTree.Element]:
    return [
        ElementTree.fromstring(text)
        for text in re.findall(r"<div[^>]*>(<svg class=\"chart\".*?</svg>)</div>", page, re.S)
    ]


# --- the files -----------------------------------------------------------------------------------------------------


def test_page_and_pictures_are_written(tmp_path: Path) -> None:
    runs = [recording(policy=policy, seed=seed) for policy in ("fifo", "slo-fair") for seed in (1, 2)]
    path = report.write(tmp_path / "new" / "folder", study(*runs))
    names = {each.name for each in path.parent.iterdir()}
    assert path.name == "report.html"
    assert names == {
        "report.html",
        *(f"{name}.svg" for name in ("service", "lead", "counters", "ttft", "queues", "kv", "running")),
    }
    for each in path.parent.glob("*.svg"):
        ElementTree.parse(each)


def test_every_picture_in_the_page_is_well_formed_and_described(tmp_path: Path) -> None:
    runs = [recording(policy=policy, rates=rates) for policy, rates in (("fifo", (10, 20)), ("slo-fair", (15, 15)))]
    page = report.write(tmp_path, study(*runs)).read_text()
    pictures = inline_pictures(page)
    assert len(pictures) == page.count('<svg class="chart"') >= 2 * len(FIGURES)
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    for each in pictures:
        title, about = each.find("title"), each.find("desc")
        assert title is not None
        assert about is not None
        assert title.text
        assert about.text
        assert each.attrib["aria-labelledby"].split() == [title.attrib["id"], about.attrib["id"]]


def test_nothing_is_fetched_from_anywhere(tmp_path: Path) -> None:
    report.write(tmp_path, study(recording(), recording(policy="fifo", rates=(30, 1))))
    for path in tmp_path.iterdir():
        text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|//[a-z]|@import|url\(|<link(?![^>]*data:)|\bsrc=", text), path.name


def test_same_study_same_bytes(tmp_path: Path) -> None:
    first, second = (report.write(tmp_path / name, study(recording())).read_bytes() for name in ("a", "b"))
    assert first == second


@pytest.mark.parametrize("name", ["<b>bold</b>", "quo\"te's & co", "]]>", "null\x00bell\x07", "名前" * 20, "</script>"])
def test_any_tenant_name_is_shown_as_text(tmp_path: Path, name: str) -> None:
    page = report.write(
        tmp_path, study(recording((name, "beta")), recording((name, "beta"), policy="fifo"))
    ).read_text()
    assert "<b>bold" not in page
    assert page.count("</script>") == 1
    shown = name.replace("\x00", "\ufffd").replace("\x07", "\ufffd")
    titles = {each.text for picture in inline_pictures(page) for each in picture.iter("title")}
    assert any(title is not None and title.startswith(shown) for title in titles)
    for path in tmp_path.glob("*.svg"):
        ElementTree.parse(path)


def test_ten_policies_and_27_tenants_stay_small(tmp_path: Path) -> None:
    names = tuple(f"client{index}" for index in range(27))
    runs = [
        recording(names, policy=f"policy{index}", end_s=600, num_requests=100, rates=tuple(range(1, 28)))
        for index in range(10)
    ]
    for run in runs:
        # The worst for thinning: every sample is an extreme.
        run.samples.queued = [[(7 * second * (tenant + 1)) % 97 for second in range(601)] for tenant in range(27)]
    path = report.write(tmp_path, study(*runs))
    assert path.stat().st_size < 2_000_000
    rest = panel_of(queues(study(*runs)), "policy0")
    assert [line.label for line in rest.lines if line.style == "rest" and line.label] == ["19 others"]


# --- what it says --------------------------------------------------------------------------------------------------


def test_the_bound_is_a_band_of_its_height_around_the_fair_line() -> None:
    panel = panel_of(service(study(recording(rates=(20, 20), num_requests=600))))
    (band,) = panel.areas
    assert {round(high - low, 6) for _, low, high in band.points} == {4_321.0}
    # Both want more than they get, so the fair line is where both are.
    assert band.points[-1] == pytest.approx((60.0, 2_400.0 - 2_160.5, 2_400.0 + 2_160.5))
    assert [bracket.text for bracket in panel.brackets] == ["bound 4,321"]
    assert "bound 4,321" in panel.note


def test_a_policy_without_a_bound_says_so_and_has_no_band() -> None:
    run = recording(policy="fifo", bound=None, counter_bound=None, largest_gap=None)
    figure = service(study(run))
    panel = panel_of(figure, "fifo")
    assert not panel.areas
    assert not panel.brackets
    assert panel.note.endswith("no bound promised")
    assert "no bound promised" in " ".join(texts(parsed(figure)))
    assert not panel_of(counters(study(run)), "fifo").rules


def test_service_is_per_weight() -> None:
    run = recording(rates=(10, 20))
    run.tenants[1].weight = 4.0
    lines = {line.tenant: line for line in panel_of(service(study(run))).lines if line.tenant >= 0}
    assert lines[0].points[-1] == (60.0, 1_200.0)
    assert lines[1].points[-1] == (60.0, 600.0)


def test_a_curve_is_thick_only_while_its_tenant_waits() -> None:
    run = recording()
    run.samples.queued[0] = [1] * 30 + [0] * 31
    (line,) = (line for line in panel_of(service(study(run))).lines if line.tenant == 0)
    assert [y is not None for _, y in line.strong] == [True] * 30 + [False] * 31
    assert all(y is not None for _, y in line.points)


def test_counters_are_above_the_smallest_of_those_who_wait() -> None:
    run = recording(("alpha", "beta", "gamma"))
    run.samples.queued[0] = [0] * 30 + [1] * 31
    lines = {line.name: [y for _, y in line.points] for line in panel_of(counters(study(run))).lines}
    assert lines["alpha"] == [None] * 30 + [0.0] * 31
    assert lines["beta"] == [0.0] * 30 + [100.0] * 31
    assert lines["gamma"] == [100.0] * 30 + [200.0] * 31


def test_the_counter_bound_is_drawn_at_its_value() -> None:
    figure = counters(study(recording()))
    panel = panel_of(figure)
    assert [(rule.y, rule.text) for rule in panel.rules] == [(2_345.0, "bound 2,345")]
    assert panel.note == "at most 469 ever, 20% of the bound"
    rule = next(each for each in parsed(figure).iter(f"{SVG}path") if each.attrib["class"] == "rule bound")
    height = float(re.match(r"M0 ([\d.]+)", rule.attrib["d"]).group(1))  # type: ignore[union-attr]
    assert height == pytest.approx(PLOT_HEIGHT * (1.0 - 2_345.0 / panel.y.high), abs=0.06)


def test_percentiles_are_the_means_over_seeds_and_marked() -> None:
    runs = [
        recording(seed=1, ttft_s=(0.5, 2.0), targets_s=(0.7,)),
        recording(seed=2, ttft_s=(1.5, 4.0), targets_s=(0.7,)),
    ]
    figure = ttft(study(*runs))
    panel = panel_of(figure)
    for tenant, name in enumerate(("alpha", "beta")):
        for level in (0.5, 0.95, 0.99):
            values = [percentile(ttfts(run, tenant), level) for run in runs]
            expected = sum(value for value in values if value is not None) / 2
            (mark,) = (mark for mark in panel.marks if mark.tenant == tenant and mark.y == level)
            assert mark.x == pytest.approx(expected)
            assert mark.text == f"{name}: p{level * 100:.0f} {duration(expected)}"
            assert any(row[1] == name and duration(expected) in row for row in figure.table.rows)
    assert [(rule.x, rule.text) for rule in panel.rules] == [(0.7, "target 700 ms")]
    (band,) = (area for area in panel.areas if area.tenant == 0)
    low, high, _ = next(point for point in band.points if point[2] == 0.5)
    assert high - low == pytest.approx(1.0)


def test_requests_that_never_started_are_told() -> None:
    panel = panel_of(ttft(study(recording(ttft_s=(0.5, None)))))
    assert panel.note == "20 of 40 requests not started"
    assert [key.text for key in panel.keys][2] == "beta -"


def test_the_same_tenant_has_the_same_colour_everywhere() -> None:
    names = tuple(f"t{index}" for index in range(12))
    both = study(
        recording(names, policy="fifo", rates=tuple(range(1, 13))),
        recording(names, rates=tuple(range(30, 18, -1))),
    )
    styles: dict[int, set[str]] = {}
    for make in (service, lead, counters, ttft, queues):
        for drawing in make(both).drawings:
            assert isinstance(drawing, Panel)
            for line in drawing.lines:
                if line.tenant >= 0:
                    styles.setdefault(line.tenant, set()).add(line.style)
    assert len(styles) == 12
    assert all(len(each) == 1 for each in styles.values())
    assert sorted(style for (style,) in styles.values()) == [*["rest"] * 4, *(f"s{index}" for index in range(8))]


def test_backends_have_a_curve_each() -> None:
    figure = kv(study(recording()))
    assert [(line.name, line.points[-1]) for line in panel_of(figure).lines] == [
        ("server0", (60.0, 0.5)),
        ("server1", (60.0, 0.25)),
    ]
    assert panel_of(figure).note == "mean 37.5%"
    assert figure.table.rows[1] == ["slo-fair", "server1", "25%", "25%", "25%", "25%"]
    assert panel_of(running(study(recording()))).note == "mean 6.0 over all backends"


def test_all_policies_share_the_scales() -> None:
    both = study(recording(policy="fifo", rates=(1, 90), end_s=120), recording())
    for make in FIGURES:
        panels = [drawing for drawing in make(both).drawings if isinstance(drawing, Panel)]
        assert len({(panel.x.low, panel.x.high, panel.y.low, panel.y.high) for panel in panels}) == 1, make.__name__


# --- runs with little in them --------------------------------------------------------------------------------------


def nothing_happened() -> report.Study:
    samples = Samples(
        at_s=[0.0, 1.0],
        prompt_tokens=[[0, 0]],
        output_tokens=[[0, 0]],
        counters=[[0.0, 0.0]],
        queued=[[0, 0]],
        kv_tokens=[[0, 0]],
        running=[[0, 0]],
    )
    return study(
        recording(
            ("alone",),
            end_s=1,
            samples=samples,
            requests=Requests(),
            usable_tokens=[100],
            bound=None,
            num_output=0,
            cpu_s=0.0,
            largest_gap=0.0,
            accumulated_while_waiting=None,
        )
    )


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(nothing_happened, id="nothing happened"),
        pytest.param(lambda: study(recording(("one",))), id="one tenant"),
        pytest.param(lambda: study(recording(ttft_s=(None,))), id="nothing started"),
        pytest.param(lambda: study(recording(end_s=1)), id="two samples"),
        pytest.param(lambda: study(recording(bound=0.0, counter_bound=0.0)), id="a bound of nothing"),
        pytest.param(lambda: study(recording(bound=1e12, counter_bound=1e12)), id="a bound far above everything"),
        pytest.param(lambda: study(recording(ttft_s=(0.0, 0.0))), id="no time passed"),
        pytest.param(lambda: study(recording(end_s=30_000, num_requests=3)), id="a long day"),
    ],
)
def test_there_is_a_report_of(given, tmp_path: Path) -> None:
    page = report.write(tmp_path, given()).read_text()
    assert inline_pictures(page)
    assert not re.search(r"\b(nan|inf|None)\b", page)


def test_without_a_router_there_are_no_counters() -> None:
    run = recording(policy="raw")
    run.samples.counters = [[], []]
    panel = panel_of(counters(study(run)), "raw")
    assert panel.empty == "no router, so no counters"
    assert "no router, so no counters" in texts(parsed(counters(study(run))))


# --- numbers -------------------------------------------------------------------------------------------------------


def test_every_metric_is_explained() -> None:
    assert set(MEASURES) == set(summarize(recording()).metrics)
    assert all(len(measure.meaning) > 20 for measure in MEASURES.values())


@pytest.mark.parametrize(
    ("better", "values", "best", "worst"),
    [
        (Better.HIGHER, {"a": 3.0, "b": 1.0, "c": 2.0}, {"a"}, {"b"}),
        (Better.LOWER, {"a": 3.0, "b": 1.0, "c": None}, {"b"}, {"a"}),
        (Better.LOWER, {"a": 1.01, "b": 1.02, "c": 2.0}, {"a", "b"}, {"c"}),
        (Better.LOWER, {"a": 1.01, "b": 1.02}, set(), set()),
        (Better.NEITHER, {"a": 1.0, "b": 2.0}, set(), set()),
        (Better.LOWER, {"a": None}, set(), set()),
    ],
)
def test_best_and_worst_are_those_that_look_so(better, values, best, worst) -> None:
    measure = Measure("x", better, lambda value: f"{value:.1f}", "")
    assert measure.extremes(values) == (best, worst)


def test_the_table_marks_best_and_worst_and_shows_the_spread(tmp_path: Path) -> None:
    runs = [recording(policy="fifo", seed=seed, accumulated_difference=9_000.0) for seed in (1, 2)]
    runs += [recording(seed=seed, accumulated_difference=1_000.0 * seed) for seed in (1, 2)]
    page = report.write(tmp_path, study(*runs)).read_text()
    row = re.search(r"<tr><th scope=\"row\"[^>]*>accumulated difference</th>(.*?)</tr>", page, re.S)
    assert row is not None
    cells = re.findall(r"<td class=\"num( \w+)?\" data-of=\"([^\"]*)\">(.*?)</td>", row.group(1), re.S)
    assert [(rank.strip(), policy) for rank, policy, _ in cells] == [("worst", "fifo"), ("best", "slo-fair")]
    assert cells[0][2].endswith("9,000")
    assert cells[1][2].endswith("1,500<small>1,000 to 2,000</small>")


def test_the_overview_shows_what_differs() -> None:
    figure = overview(study(recording(policy="fifo", accumulated_difference=9_000.0), recording()))
    assert [drawing.name for drawing in figure.drawings] == ["accumulated difference"]
    assert figure.table.rows == [["accumulated difference", "9,000", "1,200"]]
    assert "9,000" in texts(parsed(figure))
