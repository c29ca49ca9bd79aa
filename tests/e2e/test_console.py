"""The way of a tenant through the console, in a real browser against the real processes."""

from __future__ import annotations

import csv
import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect
from support.stack import MODEL, Stack
from text_generation import Client
from text_generation.errors import UnknownError

PASSWORD = "a password of my own choosing"
PROPAGATION_S = 2.0


def eventually(condition: Callable[[], bool], *, limit_s: float, what: str) -> float:
    """Seconds until ``condition`` held."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < limit_s, f"{what}: not within {limit_s} s"
        time.sleep(0.05)
    return time.monotonic() - begun


def is_served(url: str, key: str) -> bool:
    """Whether the router takes the key, by an endpoint that costs nothing."""
    request = urllib.request.Request(
        f"{url}/tokenize",
        data=json.dumps({"inputs": "x"}).encode(),
        headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as problem:
        if problem.code != 401:
            raise
        return False


def problems_of(page: Page) -> list[str]:
    """Faults of scripts, and what the page's own security policy refuses, as the browser meets them."""
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if "Content Security Policy" in line.text else None)
    return problems


def sign_in(page: Page, stack: Stack) -> None:
    """Sign in with a one-time password and choose another."""
    started = json.loads(stack._django("bootstrap_operator", "--json", "--reset"))
    page.goto(stack.settings.console_url)
    page.get_by_label("Email").fill(started["email"])
    page.get_by_label("Password").fill(started["password"])
    page.get_by_role("button", name="Sign in").click()
    page.get_by_label("Present password").fill(started["password"])
    page.get_by_label("New password", exact=True).fill(PASSWORD)
    page.get_by_label("New password again").fill(PASSWORD)
    page.get_by_role("button", name="Change password").click()
    expect(page.get_by_role("heading", name="Live")).to_be_visible()


@pytest.mark.timeout(240)
def test_a_tenant_is_made_served_counted_and_refused_after_revocation(page: Page, whole_stack: Stack) -> None:
    """Sign in, see the router at work, create a tenant, issue a key, use it, see the usage, revoke it."""
    problems = problems_of(page)
    sign_in(page, whole_stack)
    with page.expect_response(lambda answer: "/live/fragment/" in answer.url) as refreshed:
        expect(page.get_by_role("heading", name="Routers")).to_be_visible()
    assert refreshed.value.status == 200
    expect(page.locator("h2", has_text=MODEL).first).to_be_visible()

    page.get_by_role("link", name="Tenants").click()
    page.get_by_role("link", name="New tenant").click()
    page.get_by_label("Name", exact=True).fill("Search team")
    page.get_by_label("Weight").fill("2.5")
    page.get_by_label("interactive").check()
    page.get_by_label("Default tier").select_option("interactive")
    page.get_by_role("button", name="Create tenant").click()
    expect(page.get_by_role("heading", name="Search team")).to_be_visible()

    keys = page.locator("section", has=page.get_by_role("heading", name="Issue a key"))
    keys.get_by_label("Name").fill("browser test")
    keys.get_by_label("Pool").select_option(MODEL)
    keys.get_by_role("button", name="Issue key").click()
    key = page.locator("#key-text").inner_text().strip()
    eventually(lambda: is_served(whole_stack.url, key), limit_s=PROPAGATION_S, what="the new key being served")

    client = Client(whole_stack.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)
    streamed = list(client.generate_stream("Tell me about rivers.", max_new_tokens=24))
    whole = client.generate("And about lakes?", max_new_tokens=9)
    received = len(streamed) + whole.details.generated_tokens

    page.get_by_role("link", name="Usage").click()
    row = page.locator("#usage-table tbody tr", has_text="Search team")

    def is_counted() -> bool:
        page.reload()
        return row.count() == 1 and row.locator("td").nth(2).inner_text() == "2"

    eventually(is_counted, limit_s=20, what="both requests being in the report")
    assert row.locator("td").nth(4).inner_text() == str(received)
    own = urllib.request.Request(f"{whole_stack.url}/v1/usage?tz=Asia/Kolkata&group_by=key", headers=client.headers)
    with urllib.request.urlopen(own, timeout=20) as answer:
        said = json.load(answer)
    assert (said["requests"], said["output_tokens"]) == (2, received)
    assert [(each["key_name"], each["requests"]) for each in said["rows"]] == [("browser test", 2)]
    with page.expect_download() as download:
        page.get_by_role("link", name="Download CSV").click()
    lines = list(csv.DictReader(io.StringIO(download.value.path().read_text())))
    mine = [line for line in lines if line["tenant_name"] == "Search team"]
    assert [(line["requests"], line["output_tokens"]) for line in mine] == [("2", str(received))]

    page.get_by_role("link", name="Tenants").click()
    page.get_by_role("link", name="Search team").click()
    page.get_by_label("Revoke browser test", exact=True).click()
    page.get_by_role("button", name="Really revoke browser test").click()
    expect(page.get_by_text("is revoked")).to_be_visible()
    eventually(lambda: not is_served(whole_stack.url, key), limit_s=PROPAGATION_S, what="the revoked key being refused")
    with pytest.raises(UnknownError, match="Invalid or missing API key"):
        client.generate("Once more?", max_new_tokens=2)
    assert problems == []


RUNNING = """
from datetime import timedelta
from controlplane.common.clock import utc_now
from controlplane.training.models import Job
now = utc_now()
Job.objects.filter(state="queued").update(
    state="running", lease="held by the test", lease_until=now + timedelta(hours=1), started_at=now, progress=0.4,
    log="12:00:01 epoch 3 of 8: loss 0.21")
"""


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_a_training_run_is_started_watched_and_cancelled_on_the_predictors_page(page: Page, whole_stack: Stack) -> None:
    """No worker runs here: the test moves the job's row, and the page must follow by itself."""
    problems = problems_of(page)
    sign_in(page, whole_stack)
    page.get_by_role("link", name="Predictor").click()
    expect(page.get_by_role("heading", name="Predictor", exact=True)).to_be_visible()
    expect(page.get_by_text("No version yet")).to_be_visible()
    expect(page.get_by_text("of 2,000 samples").first).to_be_visible()
    page.get_by_role("button", name="Retrain").click()
    jobs = page.locator("section", has=page.get_by_role("heading", name="Jobs"))
    expect(jobs.get_by_text("queued")).to_be_visible()
    whole_stack._django("shell", "-c", RUNNING)
    expect(jobs.get_by_text("epoch 3 of 8: loss 0.21")).to_be_visible()
    assert jobs.get_by_role("progressbar").get_attribute("value") == "0.4"
    jobs.get_by_role("button", name="Cancel job").click()
    expect(jobs.get_by_text("cancelled")).to_be_visible()
    routers = page.locator("section", has=page.get_by_role("heading", name="What the routers run"))
    expect(routers.get_by_role("cell", name=MODEL, exact=True)).to_be_visible()
    assert problems == []
