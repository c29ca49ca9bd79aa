"""Why a request waited, found by the id its client got: by REST and in the console."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from django.test import Client
from django.urls import reverse
from django.utils.html import escape

from controlplane.accounts.models import User
from controlplane.common.actor import Actor
from controlplane.usage import ingest
from controlplane.usage.models import UsageExplanation
from router_ext.sync.ledger import new_event_id
from router_ext.wire.controlplane import MomentRecord, ReasonRecord, UsageBatch, UsageEvent
from tests.support.control_plane import ApiClient, make_backend, make_pool, make_tenant, usage_event

pytestmark = pytest.mark.django_db

REASONS = [
    ReasonRecord(
        cause="wait", text="waited 2.000 s in 2 turns", seconds=2.0, counts={"turns": 2, "own": 0, "others": 3}
    ),
    ReasonRecord(cause="kv", text="no backend had enough free KV (1.500 s in the pool)", seconds=1.5),
]
TIMELINE = [
    MomentRecord(at_s=0.0, step="queued", text="began to wait"),
    MomentRecord(at_s=1.5, step="dispatched", text="in turn; the only backend", backend="bkd_1", tokens=100),
    MomentRecord(at_s=1.75, step="first_token", text="first token", backend="bkd_1", tokens=1),
    MomentRecord(at_s=2.5, step="preempted", text="stopped for others", backend="bkd_1", tokens=30),
    MomentRecord(at_s=3.0, step="dispatched", text="in turn", backend="bkd_2", tokens=70),
    MomentRecord(at_s=4.0, step="finished", text="complete", tokens=100),
]


def book(*events: UsageEvent) -> None:
    body = msgspec.json.encode(UsageBatch(router="rtr_1", events=list(events)))
    assert ingest.ingest(ingest.decode_batch(body)).accepted == len(events)


def explained(**fields: Any) -> UsageEvent:
    event = usage_event(request="req_slow", preemptions=1, segments=2, predicted_tokens=80, **fields)
    lines = [reason.text for reason in REASONS]
    return msgspec.structs.replace(event, explanation=lines, reasons=REASONS, timeline=TIMELINE)


def test_a_request_is_found_by_the_id_its_client_got(api: ApiClient, system: Actor) -> None:
    tenant = make_tenant(system, name="Web chat")
    event = explained(tenant=tenant.id)
    book(event, usage_event(request="req_other"))
    answer = api.send("GET", "/requests/req_slow")
    assert answer.status_code == 200
    (found,) = answer.json()["requests"]
    assert (found["event"], found["tenant_name"], found["outcome"]) == (event.event, "Web chat", "completed")
    assert (found["segments"], found["preemptions"], found["predicted_tokens"]) == (2, 1, 80)
    assert found["waited_s"] == pytest.approx(
        ((event.first_dispatch_us or event.ended_at_us) - event.arrived_at_us) / 1e6
    )
    assert found["is_explained"]
    assert found["reasons"] == [msgspec.to_builtins(reason) for reason in REASONS]
    assert found["timeline"] == [msgspec.to_builtins(moment) for moment in TIMELINE]
    assert found["explanation"] == [reason.text for reason in REASONS]


def test_a_request_is_found_by_the_id_of_the_books(api: ApiClient) -> None:
    plain = explained()
    event = msgspec.structs.replace(plain, event=new_event_id(plain.arrived_at_us))
    book(event, usage_event(request="req_other"))
    (found,) = api.send("GET", f"/requests/{event.event}").json()["requests"]
    assert (found["event"], found["request"]) == (event.event, "req_slow")
    unknown = [new_event_id(plain.arrived_at_us), f"evt_{'f' * 30}", event.event.upper(), event.event[:-1]]
    assert {api.send("GET", f"/requests/{each}").status_code for each in unknown} == {404}


def test_a_request_that_did_not_wait_is_found_without_an_explanation(api: ApiClient) -> None:
    book(usage_event(request="req_fast"))
    (found,) = api.send("GET", "/requests/req_fast").json()["requests"]
    assert (found["is_explained"], found["reasons"], found["timeline"]) == (False, [], [])


def test_an_id_that_clients_used_twice_gives_both_newest_first(api: ApiClient) -> None:
    first = explained()
    second = explained(arrived_at_us=first.arrived_at_us + 5_000_000)
    book(first, second)
    found = api.send("GET", "/requests/req_slow").json()["requests"]
    assert [each["event"] for each in found] == [second.event, first.event]


@pytest.mark.parametrize("name", ["req_none", "a/b", "%00", "..", "x" * 200])
def test_an_unknown_id_is_not_found(name: str, api: ApiClient) -> None:
    assert api.send("GET", f"/requests/{name}").status_code == 404


def test_an_id_may_hold_what_a_header_may_hold(api: ApiClient) -> None:
    book(usage_event(request="trace/7?x=1&y"))
    assert len(api.send("GET", "/requests/trace/7%3Fx=1&y").json()["requests"]) == 1


def test_what_is_kept_of_an_explanation_is_bounded(api: ApiClient) -> None:
    event = explained()
    book(msgspec.structs.replace(event, reasons=REASONS * 100, timeline=TIMELINE * 100))
    kept = UsageExplanation.objects.get(event=event.event)
    assert (len(kept.reasons), len(kept.timeline)) == (ingest.MAX_LINES, ingest.MAX_MOMENTS)


@pytest.mark.parametrize(
    "change",
    [
        {"reasons": [ReasonRecord(cause="kv", text="a\0b")]},
        {"reasons": [ReasonRecord(cause="kv", text="x", counts={"a\0": 1})]},
        {"timeline": [MomentRecord(at_s=0.0, step="queued", text="x", backend="\0")]},
    ],
)
def test_what_no_row_can_hold_is_set_aside(change: dict[str, Any]) -> None:
    event = msgspec.structs.replace(explained(), **change)
    body = msgspec.json.encode(UsageBatch(router="rtr_1", events=[event]))
    assert ingest.ingest(ingest.decode_batch(body)).quarantined == 1


def test_the_console_shows_reasons_and_a_timeline(operator: User, system: Actor) -> None:
    pool = make_pool(system)
    backend = make_backend(system, pool, name="left")
    moments = [msgspec.structs.replace(m, backend=backend.id if m.backend == "bkd_1" else m.backend) for m in TIMELINE]
    hostile = [*REASONS, ReasonRecord(cause="kv", text="<script>alert(1)</script>")]
    book(msgspec.structs.replace(explained(), reasons=hostile, timeline=moments))
    client = Client()
    client.force_login(operator)
    page = client.get(reverse("console:requests"), {"id": "req_slow"}).content.decode()
    for text in ("waited 2.000 s in 2 turns", "stopped for others", "left", "bkd_2", escape(hostile[-1].text)):
        assert text in page
    assert "<script>alert" not in page
    assert page.count("<rect") == len(TIMELINE) - 1
    assert "first token at 1.750 s" in page
    assert "has been booked" in client.get(reverse("console:requests"), {"id": "req_none"}).content.decode()
    live = client.get(reverse("console:live_fragment")).content.decode()
    assert f"{reverse('console:requests')}?id=req_slow" in live
