"""Every page of the console, in a real browser, as each role sees it.

The routes are those of ``routes_by_role.txt``, which another test holds to the URL table: a new page is looked at here
without being named. Objects have names that do harm if a page or a file takes them for more than text.
"""

from __future__ import annotations

import csv
import io
import json
import re
from zoneinfo import ZoneInfo

import pytest
from playwright.sync_api import Locator, expect

from controlplane.common.clock import utc_now
from controlplane.fleet.models import Pool
from controlplane.tenants.models import Tenant
from tests.support.console_pages import (
    MARK,
    NOT_OURS,
    Console,
    Looking,
    Names,
    answers_by_role,
    is_file,
    picture_name,
)
from tests.support.console_world import report_state

NAMED = Names()
ANSWERS = answers_by_role()
PAGES = [each for each in ANSWERS if not is_file(each) and "{provider_id}" not in each]
OWN = [each for each in PAGES if each not in NOT_OURS and ANSWERS[each]["nobody"] != "ok"]
OPEN = [each for each in PAGES if each not in NOT_OURS and ANSWERS[each]["nobody"] == "ok"]
FORMULA = re.compile(r"[=+\-@\t\r]")
NUMBER = re.compile(r"-?[\d.]+\Z")


def look_at(console: Console, route: str, column: str) -> Looking:
    looking = console.look(column)
    looking.visit(console.path(route))
    return looking


def check(console: Console, route: str, column: str) -> None:
    looking = look_at(console, route, column)
    if not looking.is_page():
        assert console.is_fetched(route), "neither a page nor fetched by one"
        return  # looked at there
    looking.page.evaluate("() => fairlane.unfold()")
    faults = looking.shown_as_text(NAMED.given) + looking.faults()
    if faults:
        looking.picture(f"{picture_name(route)}.{column}")
    assert faults == [], "\n".join(faults)


@pytest.mark.parametrize("route", OPEN)
def test_pages_before_signing_in(console: Console, route: str) -> None:
    check(console, route, "nobody")


@pytest.mark.parametrize("route", OWN)
def test_pages_of_an_owner(console: Console, route: str) -> None:
    check(console, route, "owner")


@pytest.mark.parametrize("route", [each for each in OWN if ANSWERS[each]["tenant_member"] == "ok"])
def test_pages_of_a_tenants_member(console: Console, route: str) -> None:
    check(console, route, "tenant_member")


@pytest.mark.slow
@pytest.mark.parametrize("column", ["operator", "viewer", "tenant_admin"])
@pytest.mark.parametrize("route", OWN)
def test_pages_of_all_other_roles(console: Console, route: str, column: str) -> None:
    if ANSWERS[route][column] == "ok":
        check(console, route, column)
    else:
        looking = look_at(console, route, column)
        expected = f"{ANSWERS[route][column]}: {console.url}{console.path(route)}"
        looking.problems = [each for each in looking.problems if each != expected and "Failed to load" not in each]
        assert looking.faults() == []


def test_a_name_without_a_place_to_break_it_stays_inside(console: Console) -> None:
    ids, looking, found = console.world.ids, console.look("owner"), {}
    rows = [Tenant.objects.get(pk=ids["tenant_id"]), Pool.objects.get(pk=ids["pool_id"])]
    paths = (f"/tenants/{rows[0].pk}/", f"/pools/{rows[1].pk}/", "/usage/")
    try:
        for row in rows:
            type(row).objects.filter(pk=row.pk).update(name="W" * 200)
        for path in (*paths, "/usage/?from_day=2020-01-01&to_day=2020-01-02"):
            looking.visit(path)
            looking.page.evaluate("() => fairlane.unfold()")
            if faults := looking.faults():
                found[path] = faults
    finally:
        for row in rows:
            type(row).objects.filter(pk=row.pk).update(name=row.name)
    assert found == {}


def test_the_documentation_of_rest(console: Console) -> None:
    """A package's page: its script runs under our policy, and finds all there is."""
    looking = look_at(console, "/api/v1/docs", "nobody")
    looking.page.get_by_text("/api/v1/tenants", exact=True).first.wait_for(timeout=20_000)
    assert looking.problems == []


@pytest.mark.parametrize("route", [each for each in ANSWERS if is_file(each)])
def test_files_hold_nothing_that_a_spreadsheet_runs(console: Console, route: str) -> None:
    answer = console.look("owner").context.request.get(console.path(route))
    assert answer.ok
    assert "attachment" in answer.headers["content-disposition"]
    text = answer.body().decode("utf-8")
    assert MARK in text, "no name of a person or thing is in it"
    if "csv" not in route:
        json.loads(text)
        return
    cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
    assert [each for each in cells if FORMULA.match(each) and not NUMBER.match(each)] == []
    shown = {each.removeprefix("'") for each in cells}
    assert {each for each in shown if MARK in each and not each.startswith(("{", "["))} <= set(NAMED.given)


OFFERED = """async (address) => {
    const text = await (await fetch(address)).text();
    const page = new DOMParser().parseFromString(text, "text/html");
    const path = (there) => new URL(there || address, location).pathname;
    return [...[...page.forms].filter((form) => form.method === "post" && form.querySelector("button"))
        .map((form) => path(form.getAttribute("action"))),
      ...[...page.querySelectorAll("main a[href]")].map((each) => path(each.getAttribute("href")))
        .filter((there) => there.endsWith("/new/"))];
}"""
"""Addresses to which the page at ``address`` has a form that can be sent, or a link to one."""


@pytest.mark.parametrize(
    "column",
    [
        "viewer",
        "tenant_member",
        pytest.param("operator", marks=pytest.mark.slow),
        pytest.param("tenant_admin", marks=pytest.mark.slow),
    ],
)
def test_nobody_is_offered_what_their_role_may_not_do(console: Console, column: str) -> None:
    looking = look_at(console, "/tokens/", column)
    posts = answers_by_role("POST")
    refused = {
        f"{console.fetched(each)} on {route}"
        for route in OWN
        if ANSWERS[route][column] == "ok"
        for each in looking.page.evaluate(OFFERED, console.path(route))
        if posts[console.fetched(each)][column] != "ok"
    }
    assert refused == set()


FAULTY = """<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel=icon href="data:,">
<title>Faulty · Fairlane</title>
<style>:root { color-scheme: light dark }</style></head><body><main><h1>Faulty</h1>BODY</main></body></html>"""


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<p>Nothing is wrong.</p>", ""),
        ("<h1>Again</h1>", "2 h1"),
        ("<p id=a>a</p><p id=a>b</p>", "id a stands there twice"),
        ("<table><tr><th>a</th></tr><tr><td>b</td><td>c</td></tr></table>", "rows of 1,2 cells"),
        ("<input name=a>", "label: input"),
        ("<p style='color:#999'>Hard to read</p>", "color-contrast: p"),
        ("<p style='background:#fff;color:light-dark(#000,#ccc)'>Hard to read</p>", "dark: color-contrast: p"),
        ("<button style='outline:none'>Go</button>", "its focus is not seen: <button"),
        ("<button tabindex=3>Go</button>", "out of order: <button"),
        ("<p onclick='go()'>Go</p>", "for the mouse only: <p"),
        ("<p style='width:600px'>Wide</p>", "narrow: 6"),
        ("<svg class=chart width=50 aria-label=Plot><text x=45>too long</text></svg>", "cut in Plot: too long"),
        ("<script>go()</script>", "script: go is not defined"),
        ("<img src=/nowhere.png alt=''>", "404: http"),
        (f"<p>{MARK} alone</p>", "1 of 1 names are not as they are"),
        ("<img src=x alt=''>", "1 elements of a name"),
    ],
)
def test_a_fault_of_a_page_is_found(console: Console, body: str, fault: str) -> None:
    looking = console.look("nobody")
    page = FAULTY.replace("BODY", body)
    looking.page.route("**/faulty/", lambda route: route.fulfill(body=page, content_type="text/html"), times=1)
    looking.visit("/faulty/")
    found = looking.shown_as_text(NAMED.given) + looking.faults()
    assert any(each.startswith(fault) for each in found) if fault else found == [], found


def reading(figure: Locator) -> list[str]:
    """What a plot says of the moment under its cursor, as the row of its table of numbers says it."""
    stamp = figure.locator(".at").inner_text().rpartition(" ")[0]
    return [stamp, *figure.locator("button.series b").all_inner_texts()]


def number(said: list[str]) -> int:
    return int(said[1].replace(",", ""))


def rows_of(figure: Locator) -> list[list[str]]:
    return figure.evaluate("f => [...f.querySelectorAll('tbody tr')].map(r => [...r.cells].map(c => c.textContent))")


def point_at(figure: Locator, across: float) -> None:
    """Move the mouse to a place of the plot, from 0 to 1."""
    area = figure.locator(".u-over")
    box = area.bounding_box()
    assert box is not None
    area.hover(position={"x": across * box["width"], "y": 0.5 * box["height"]})  # waits until it stands still


PAINTED = """async figure => {
    for (let n = 0; n < 3; n++) await new Promise(requestAnimationFrame);
    const colour = getComputedStyle(figure.querySelector("button.series > i")).backgroundColor;
    const [r, g, b] = colour.match(/\\d+/g).map(Number);
    const canvas = figure.querySelector("canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < data.length; i += 4)
        if (data[i] === r && data[i + 1] === g && data[i + 2] === b && data[i + 3] === 255) return true;
    return false;
}"""
"""Whether a plot is painted in the colour that its legend has."""


def test_live_plots_are_read_off_and_outlive_a_refresh(console: Console) -> None:
    looking = look_at(console, "/", "owner")
    page, pool = looking.page, console.world.pool.id
    ttft, tokens = page.locator(f"#plot-ttft-{pool}"), page.locator(f"#plot-tokens-{pool}")
    expect(ttft.locator("canvas")).to_be_visible()
    assert ttft.locator("svg.chart").evaluate("svg => svg.clientWidth") == 1, "the picture is there for screen readers"
    page.evaluate("() => { window.kept = [...document.querySelectorAll('.drawn canvas')] }")
    ttft.locator("button.series").last.click()
    expect(ttft.locator("button.series").last).to_have_attribute("aria-pressed", "false")

    told = [row[1] != "–" for row in rows_of(tokens)]
    point_at(tokens, max(i for i in range(1, 19) if told[i] and told[i + 1]) / 19)
    before = reading(tokens)
    assert before in rows_of(tokens)
    assert before != rows_of(tokens)[-1]
    report_state(console.world, router="rtr_second")
    page.evaluate("() => fairlane.unfold()")
    after = reading(tokens)
    assert after in rows_of(tokens)
    assert number(after) > 1.5 * number(before)
    assert page.evaluate("() => kept.every((each, i) => each === document.querySelectorAll('.drawn canvas')[i])")
    expect(ttft.locator("button.series").last).to_have_attribute("aria-pressed", "false")

    page.mouse.move(1, 1)
    point_at(tokens, [row[1] for row in rows_of(tokens)].index("–") / 19)
    expect(tokens.locator("button.series b")).to_have_text("–")
    every = tokens.get_by_role("button", name="Show all")
    point_at(tokens, 0.2)
    page.mouse.down()
    point_at(tokens, 0.6)
    page.mouse.up()
    expect(every).to_be_visible()
    tokens.locator(".u-over").dblclick()
    expect(every).to_be_hidden()
    tokens.locator(".frame").press("End")
    assert reading(tokens) == rows_of(tokens)[-1]
    assert looking.faults() == []


def test_the_plot_of_usage_is_in_the_zone_of_the_page(console: Console) -> None:
    looking = look_at(console, "/usage/?group_by=hour&tz=Asia/Kolkata", "owner")
    figure = looking.page.locator("#plot-usage")
    frame, rows = figure.locator(".frame"), rows_of(figure)
    used = next(row for row in rows if row[1] not in ("0", "–"))
    frame.press("Home")
    assert reading(figure) == rows[0]
    for _ in range(rows.index(used)):
        frame.press("ArrowRight")
    assert reading(figure) == used
    assert used[0].endswith("+0530")
    assert figure.locator(".at").inner_text().endswith("Asia/Kolkata")
    assert rows[-1][1] == ("–" if utc_now().astimezone(ZoneInfo("Asia/Kolkata")).hour < 23 else "0")
    looking.page.emulate_media(color_scheme="dark")
    assert figure.evaluate(PAINTED), "bars have not the colours that the sheet has now"
    assert looking.faults() == []
