"""What routers call: the long poll, heartbeats, artifacts; under gunicorn where waiting is the point."""

from __future__ import annotations

import http.client
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from django.db import connection
from django.test import Client
from django.urls import reverse

from controlplane.accounts.models import User
from controlplane.common.actor import Actor
from controlplane.common.clock import to_us, utc_now
from controlplane.common.valkey import valkey
from controlplane.fleet.models import AppliedRevision, Router, RouterStatus
from controlplane.fleet.queries import live_heartbeats
from controlplane.fleet.routers import create_router
from controlplane.keys.actions import revoke_key
from controlplane.rollout import actions
from controlplane.rollout.models import Revision
from controlplane.rollout.queries import current
from controlplane.rollout.watch import RevisionWatcher
from controlplane.tenants.actions import update_tenant
from controlplane.training.models import Artifact
from router_ext.wire import controlplane as wire
from router_ext.wire.deltas import decode_deltas, follow
from tests.support.control_plane import ApiClient, Site, make_key, make_pool, make_tenant, wait_for

RouterAndHeaders = tuple[Router, dict[str, str]]
VISIBLE_WITHIN_S = 2.0


def heartbeat(**fields: Any) -> wire.Heartbeat:
    given = {
        "router": "rtr_host", "version": "0.1", "address": "127.0.0.1:8080", "applied_revision": 1,
        "applied_at_us": to_us(utc_now()),
    }  # fmt: skip
    return wire.Heartbeat(**{**given, **fields})


def beat(headers: dict[str, str], **fields: Any) -> int:
    body = msgspec.json.encode(heartbeat(**fields))
    answer = Client().post(wire.HEARTBEAT_PATH, body, content_type="application/json", headers=headers)
    return answer.status_code


@pytest.mark.django_db
class TestSnapshot:
    def get(self, headers: dict[str, str], query: str = "", etag: str | None = None) -> Any:
        named = {**headers, **({"if-none-match": etag} if etag else {})}
        return Client().get(f"{wire.SNAPSHOT_PATH}{query}", headers=named)

    def test_nothing_is_published_at_first(self, router: RouterAndHeaders) -> None:
        assert self.get(router[1]).status_code == 404

    def test_the_newest_revision_is_given_with_its_digest(self, router: RouterAndHeaders, system: Actor) -> None:
        make_tenant(system)
        answer = self.get(router[1])
        snapshot = msgspec.json.decode(answer.content, type=wire.ConfigSnapshot)
        assert answer.headers["etag"] == f'"{snapshot.digest}"' == f'"{wire.snapshot_digest(snapshot)}"'
        assert answer.content == msgspec.json.encode(snapshot, order="deterministic")
        assert self.get(router[1], etag=answer.headers["etag"]).status_code == 304
        assert self.get(router[1], etag='"another"').status_code == 200

    @pytest.mark.parametrize("query", ["?wait_s=26", "?wait_s=-1", "?wait_s=soon", "?wait_s=nan"])
    def test_a_wait_out_of_range_is_refused(self, router: RouterAndHeaders, query: str) -> None:
        assert self.get(router[1], query).status_code == 422

    def test_only_a_live_router_reads_it(self, router: RouterAndHeaders, api: ApiClient, system: Actor) -> None:
        make_tenant(system)
        operators = {"authorization": api.defaults["HTTP_AUTHORIZATION"]}
        _, key = make_key(system, make_tenant(system), make_pool(system))
        for headers in ({}, operators, {"authorization": f"Bearer {key}"}):
            assert self.get(headers).status_code == 401
        renewed = api.send("POST", f"/routers/{router[0].id}/renew-token").json()["token"]
        assert self.get(router[1]).status_code == 401
        assert self.get({"authorization": f"Bearer {renewed}"}).status_code == 200

    def test_old_bodies_are_forgotten_and_the_newest_stays(
        self, router: RouterAndHeaders, system: Actor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(actions, "KEPT_BODIES", 3)
        tenant = make_tenant(system)
        for n in range(5):
            update_tenant(actor=system, tenant_id=tenant.id, weight=float(n + 2))
        n_revisions = Revision.objects.count()
        assert actions.trim_revisions() == n_revisions - 3
        assert Revision.objects.filter(body__isnull=False).count() == 3
        assert Revision.objects.count() == n_revisions
        assert self.get(router[1]).status_code == 200

    def test_a_router_gets_what_has_changed_since_the_revision_it_has(
        self, router: RouterAndHeaders, system: Actor
    ) -> None:
        pool = make_pool(system)
        others = [make_tenant(system) for _ in range(40)]
        tenant = others[0]
        key, _ = make_key(system, tenant, pool)
        first = self.get(router[1])
        held = msgspec.json.decode(first.content, type=wire.ConfigSnapshot)
        update_tenant(actor=system, tenant_id=tenant.id, weight=7.0)
        make_key(system, tenant, pool)
        revoke_key(actor=system, key_id=key.id)
        answer = self.get(router[1], f"?base={held.digest}", etag=first.headers["etag"])
        whole = self.get(router[1])
        assert answer.headers[wire.BASE_HEADER] == first.headers["etag"]
        assert answer.headers["etag"] == whole.headers["etag"]
        deltas = [delta for delta, _ in decode_deltas(answer.content)]
        assert len(deltas) == 3
        assert [[t.weight for t in d.tenants] for d in deltas] == [[7.0], [], []]
        assert deltas[2].keys_gone == [key.id]
        assert followed(held, deltas) == msgspec.json.decode(whole.content, type=wire.ConfigSnapshot)
        assert len(answer.content) < len(whole.content) // 2

    @pytest.mark.parametrize("base", ["f" * 64, "soon", "%00", "'"])
    def test_from_what_is_unknown_the_whole_is_given(self, router: RouterAndHeaders, system: Actor, base: str) -> None:
        make_tenant(system)
        answer = self.get(router[1], f"?base={base}")
        assert answer.status_code == 200
        assert wire.BASE_HEADER not in answer.headers
        assert msgspec.json.decode(answer.content, type=wire.ConfigSnapshot).tenants

    def test_where_the_way_is_forgotten_the_whole_is_given(
        self, router: RouterAndHeaders, system: Actor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(actions, "KEPT_BODIES", 2)
        tenants = [make_tenant(system) for _ in range(20)]
        held = msgspec.json.decode(self.get(router[1]).content, type=wire.ConfigSnapshot)
        for n in range(3):
            update_tenant(actor=system, tenant_id=tenants[0].id, weight=float(n + 2))
        assert wire.BASE_HEADER in self.get(router[1], f"?base={held.digest}").headers
        actions.trim_revisions()
        assert wire.BASE_HEADER not in self.get(router[1], f"?base={held.digest}").headers


def followed(held: wire.ConfigSnapshot, deltas: list[wire.SnapshotDelta]) -> wire.ConfigSnapshot:
    """Where the deltas lead, with the records in the order in which they are published."""
    after = follow(held, deltas)
    return msgspec.structs.replace(
        after,
        tenants=sorted(after.tenants, key=lambda r: r.tenant),
        keys=sorted(after.keys, key=lambda r: r.key),
    )


class TestWatcher:
    """One thread looks, any number wait."""

    def test_all_who_wait_are_woken_by_one_look(self) -> None:
        number = [5]
        n_looks = [0]

        def look() -> int:
            n_looks[0] += 1
            return number[0]

        watcher = RevisionWatcher(look)
        woken: list[bool] = []
        threads = [threading.Thread(target=lambda: woken.append(watcher.wait_beyond(5, 20))) for _ in range(20)]
        for thread in threads:
            thread.start()
        wait_for(lambda: n_looks[0] >= 2)
        assert not woken
        number[0] = 6
        for thread in threads:
            thread.join(20)
        assert woken == [True] * 20
        assert n_looks[0] < 20

    def test_it_gives_up_after_the_time_asked_for_and_stops_looking(self) -> None:
        watcher = RevisionWatcher(lambda: 1)
        begun = time.monotonic()
        assert watcher.wait_beyond(1, 0.3) is False
        assert 0.3 <= time.monotonic() - begun < 5
        wait_for(lambda: not any(t.name == "revision-watcher" for t in threading.enumerate()))
        assert watcher.wait_beyond(1, 0.1) is False

    def test_a_smaller_number_wakes_as_well(self) -> None:
        """A database restored from a backup has an older newest revision; routers must follow it."""
        watcher = RevisionWatcher(lambda: 3)
        assert watcher.wait_beyond(7, 20) is True

    def test_a_failing_look_is_tried_again(self) -> None:
        from django.db import OperationalError

        outcomes = iter([OperationalError("down"), OperationalError("down")])

        def look() -> int:
            for error in outcomes:
                raise error
            return 2

        assert RevisionWatcher(look).wait_beyond(1, 20) is True


class LongPoll(threading.Thread):
    """One router's poll in a thread of its own; ``answered_at`` is when its answer came."""

    def __init__(self, url: str, headers: dict[str, str], etag: str, wait_s: float = 25) -> None:
        super().__init__(daemon=True)
        self.url, self.headers, self.etag, self.wait_s = url, headers, etag, wait_s
        self.status, self.body, self.answered_at = 0, b"", 0.0
        self.start()

    def run(self) -> None:
        address = urlsplit(self.url)
        link = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        try:
            path = f"{wire.SNAPSHOT_PATH}?wait_s={self.wait_s}"
            link.request("GET", path, headers={**self.headers, "If-None-Match": f'"{self.etag}"'})
            answer = link.getresponse()
            self.status, self.body = answer.status, answer.read()
            self.answered_at = time.monotonic()
        finally:
            link.close()

    @property
    def snapshot(self) -> wire.ConfigSnapshot:
        return msgspec.json.decode(self.body, type=wire.ConfigSnapshot)


def router_headers(system: Actor) -> dict[str, str]:
    return {"Authorization": f"Bearer {create_router(actor=system, name='r')[1]}"}


def newest_digest() -> str:
    newest = current()
    assert newest is not None
    return newest.digest


def looks_at_revisions() -> set[Any]:
    """When other processes' sessions on this database last looked for the newest revision."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT query_start FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND query LIKE '%%FROM \"rollout_revision\"%%'"
        )
        return {start for (start,) in cursor.fetchall()}


def wait_until_watched() -> None:
    """A poll looks once itself, and again when it ends; a third look is the watcher's, on behalf of who waits."""
    looks: set[Any] = set()
    wait_for(lambda: looks.update(looks_at_revisions()) or len(looks) >= 3, what="the watcher looking")


def test_a_change_ends_every_waiting_poll_and_waiting_holds_no_connection(running_site: Site, system: Actor) -> None:
    """Thirty routers wait on a site with two database connections; pages are served meanwhile."""
    tenant, pool = make_tenant(system), make_pool(system)
    key, _ = make_key(system, tenant, pool)
    headers = router_headers(system)
    url = running_site(FAIRLANE_DB_POOL_SIZE="2", FAIRLANE_CONSOLE_THREADS="40")
    polls = [LongPoll(url, headers, newest_digest()) for _ in range(30)]
    wait_until_watched()
    for _ in range(5):
        link = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        link.request("GET", "/readyz")
        assert link.getresponse().status == 200
        link.close()
    assert all(p.is_alive() for p in polls)
    changed_at = time.monotonic()
    revoke_key(actor=system, key_id=key.id)
    for poll in polls:
        poll.join(20)
    assert {p.status for p in polls} == {200}
    assert all(not p.snapshot.keys for p in polls)
    assert max(p.answered_at for p in polls) - changed_at < VISIBLE_WITHIN_S


def test_without_valkey_a_change_is_still_seen_in_time(running_site: Site, system: Actor) -> None:
    tenant = make_tenant(system)
    headers = router_headers(system)
    url = running_site(REDIS_URL="redis://127.0.0.1:1/0")
    poll = LongPoll(url, headers, newest_digest())
    wait_until_watched()
    assert poll.is_alive()
    changed_at = time.monotonic()
    update_tenant(actor=system, tenant_id=tenant.id, weight=7.0)
    poll.join(20)
    assert poll.status == 200
    assert [t.weight for t in poll.snapshot.tenants] == [7.0]
    assert poll.answered_at - changed_at < VISIBLE_WITHIN_S


def test_a_poll_without_news_ends_with_304_in_time(running_site: Site, system: Actor) -> None:
    make_tenant(system)
    headers = router_headers(system)
    url = running_site()
    begun = time.monotonic()
    poll = LongPoll(url, headers, newest_digest(), wait_s=1)
    poll.join(20)
    assert (poll.status, poll.body) == (304, b"")
    assert 1 <= poll.answered_at - begun < 10


def test_a_site_that_is_stopped_lets_waiting_routers_go_at_once(running_site: Site, system: Actor) -> None:
    make_tenant(system)
    headers = router_headers(system)
    site = running_site()
    poll = LongPoll(site, headers, newest_digest())
    wait_until_watched()
    begun = time.monotonic()
    running_site.stop()
    poll.join(1)
    assert (poll.status, poll.body) == (304, b"")
    assert time.monotonic() - begun < 10


@pytest.mark.django_db
class TestHeartbeat:
    def test_the_live_picture_and_the_summary_are_kept(self, router: RouterAndHeaders, api: ApiClient) -> None:
        pools = [wire.PoolState(pool="pool_a", policy="fifo", running=3)]
        assert beat(router[1], applied_revision=4, pools=pools, spool_events=9) == 204
        assert live_heartbeats()["rtr_host"].pools == pools
        (shown,) = api.send("GET", "/routers").json()["results"]
        assert (shown["is_live"], shown["applied_revision"]) == (True, 4)
        assert shown["instances"][0]["spool_events"] == 9

    def test_a_heartbeat_of_the_next_version_is_taken(self, router: RouterAndHeaders) -> None:
        sent = msgspec.to_builtins(heartbeat(pools=[wire.PoolState(pool="pool_a", policy="fifo")]))
        sent["pools"][0]["new_here"] = {"of": ["the", "next", "version"]}
        body = msgspec.json.encode({**sent, "more": 1})
        answer = Client().post(wire.HEARTBEAT_PATH, body, content_type="application/json", headers=router[1])
        assert answer.status_code == 204
        assert [pool.pool for pool in live_heartbeats()["rtr_host"].pools] == ["pool_a"]

    def test_the_console_names_a_router_whose_disk_is_full(self, router: RouterAndHeaders, operator: User) -> None:
        client = Client()
        client.force_login(operator)
        alarm = "The disk of router rtr_host takes no more usage:"
        beat(router[1], overflow_events=0)
        assert alarm not in client.get(reverse("console:live")).content.decode()
        beat(router[1], overflow_events=1_234)
        page = client.get(reverse("console:live")).content.decode()
        assert f"{alarm}</b> 1,234 ended requests wait in" in page

    def test_several_instances_show_the_oldest_revision_in_force(
        self, router: RouterAndHeaders, api: ApiClient
    ) -> None:
        beat(router[1], router="one", applied_revision=7)
        beat(router[1], router="two", applied_revision=5)
        (shown,) = api.send("GET", "/routers").json()["results"]
        assert shown["applied_revision"] == 5
        RouterStatus.objects.filter(instance="two").update(seen_at=utc_now() - timedelta(minutes=1))
        (shown,) = api.send("GET", "/routers").json()["results"]
        assert shown["applied_revision"] == 7

    def test_the_row_is_written_on_change_and_not_at_every_beat(
        self, router: RouterAndHeaders, django_assert_num_queries: Any
    ) -> None:
        beat(router[1])
        with django_assert_num_queries(2):
            beat(router[1], spool_events=5)
        beat(router[1], applied_revision=2)
        assert RouterStatus.objects.get().applied_revision == 2
        assert list(AppliedRevision.objects.order_by("revision").values_list("revision", flat=True)) == [1, 2]

    def test_a_refused_revision_is_kept_with_its_reason(self, router: RouterAndHeaders) -> None:
        beat(router[1], refused_revision=9, refused_reason="weight out of range")
        row = AppliedRevision.objects.get(revision=9)
        assert row.refused_reason == "weight out of range"

    def test_without_valkey_the_summary_is_still_kept(self, router: RouterAndHeaders, settings: Any) -> None:
        settings.REDIS_URL = "redis://127.0.0.1:1/0"
        valkey.cache_clear()
        try:
            assert beat(router[1]) == 204
            assert live_heartbeats() == {}
        finally:
            settings.REDIS_URL = settings.ENVIRONMENT.redis_url
            valkey.cache_clear()
        assert RouterStatus.objects.exists()

    @pytest.mark.parametrize("body", [b"", b"{}", b"[1]"])
    def test_a_malformed_one_is_refused(self, router: RouterAndHeaders, body: bytes) -> None:
        answer = Client().post(wire.HEARTBEAT_PATH, body, content_type="application/json", headers=router[1])
        assert answer.status_code == 400

    @pytest.mark.parametrize("name", ["", "x" * 101, "a\0b"])
    def test_an_impossible_instance_is_refused(self, router: RouterAndHeaders, name: str) -> None:
        assert beat(router[1], router=name) == 422

    @pytest.mark.parametrize("field", [{"applied_at_us": 10**18}, {"version": "a\0b"}, {"applied_revision": 2**63 - 1}])
    def test_a_value_that_cannot_be_kept_is_no_fault_of_ours(
        self, router: RouterAndHeaders, field: dict[str, Any]
    ) -> None:
        assert beat(router[1], **field) == (204 if "applied_revision" in field else 422)
        assert beat(router[1], router="another") == 204


@pytest.mark.django_db
def test_an_artifact_is_served_by_its_digest_to_routers_only(router: RouterAndHeaders) -> None:
    digest = "ab" * 32
    Artifact.objects.create(kind="baseline", digest=digest, body=b"bytes", n_bytes=5)
    answer = Client().get(wire.ARTIFACT_PATH + digest, headers=router[1])
    assert (answer.status_code, answer.content) == (200, b"bytes")
    assert Client().get(wire.ARTIFACT_PATH + digest).status_code == 401
    assert Client().get(wire.ARTIFACT_PATH + "cd" * 32, headers=router[1]).status_code == 404


@contextmanager
def broken_database() -> Any:
    """Every new cursor fails as if the server were gone."""
    from django.db import OperationalError

    def fail(execute: Any, sql: str, *rest: Any) -> Any:
        raise OperationalError("server closed the connection unexpectedly")

    with connection.execute_wrapper(fail):
        yield


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", wire.SNAPSHOT_PATH), ("POST", wire.USAGE_PATH), ("POST", wire.HEARTBEAT_PATH), ("GET", "/readyz")],
)
def test_without_its_database_it_asks_to_be_tried_again(router: RouterAndHeaders, method: str, path: str) -> None:
    with broken_database():
        answer = Client().generic(method, path, b"{}", content_type="application/json", headers=router[1])
    assert answer.status_code == 503
