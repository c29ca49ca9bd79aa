"""Two tenants on one backend: tokens by weight while both wait, everything for one that is alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.exchange import Wire, call
from support.modelserver import model_server
from support.routers import RouterProcess, Setup, backend, router
from support.tenants import Tenant, new_tenant

from router_ext.wire.controlplane import GroupRecord

FLAGS = ("--sim-step-ms", "4", "--sim-mean-tokens", "0", "--max-total-tokens", "2048")
BODY = {"inputs": "Tell me a story", "parameters": {"max_new_tokens": 60}}


class Flood:
    """Keeps ``width`` requests of one tenant open until it is stopped, and counts the tokens that came."""

    def __init__(self, tenant: Tenant, width: int) -> None:
        self.tokens = 0
        self._is_over = False
        self._tenant = tenant
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(width)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._is_over:
            with Wire(self._tenant.router.port) as wire:
                wire.send("POST", "/generate_stream", BODY, headers=self._tenant.headers)
                wire.head()
                for piece in wire.chunks():
                    with self._lock:
                        self.tokens += piece.count(b"data: ")
                    if self._is_over:
                        return

    def stop(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join(30)


def counted(running: RouterProcess, floods: list[Flood], tokens: int) -> list[int]:
    """Tokens of each flood over a window in which they received ``tokens`` together, both waiting all the time."""
    running.wait(lambda: all(flood.tokens > 100 for flood in floods))
    before = [flood.tokens for flood in floods]
    running.wait(lambda: sum(f.tokens for f in floods) - sum(before) >= tokens, 60)
    return [flood.tokens - start for flood, start in zip(floods, before, strict=True)]


def test_tokens_go_by_weight() -> None:
    with model_server(*FLAGS) as server, router(Setup(backends=[backend(server.port, kv_tokens=560)])) as running:
        heavy, light = new_tenant(running, weight=3.0), new_tenant(running, weight=1.0)
        floods = [Flood(heavy, 16), Flood(light, 16)]
        try:
            got = counted(running, floods, 6_000)
        finally:
            for flood in floods:
                flood.stop()
        assert 0.70 <= got[0] / sum(got) <= 0.80, got
        running.wait(running.is_idle)


def test_a_change_of_weight_takes_effect_on_those_who_wait() -> None:
    with model_server(*FLAGS) as server, router(Setup(backends=[backend(server.port, kv_tokens=560)])) as running:
        one, two = new_tenant(running), new_tenant(running)
        floods = [Flood(one, 16), Flood(two, 16)]
        try:
            # The difference stays under a constant, so its part of the sum shrinks with the sum.
            got = counted(running, floods, 8_000)
            assert 0.44 <= got[0] / sum(got) <= 0.56, got
            running.setup.tenant(one.name, weight=4.0)
            running.publish()
            got = counted(running, floods, 12_000)
            assert 0.74 <= got[0] / sum(got) <= 0.86, got
        finally:
            for flood in floods:
                flood.stop()


@pytest.mark.slow
def test_the_tenants_of_a_group_share_what_one_tenant_would_get() -> None:
    """And a tenant that leaves the group under load competes for itself from then on."""
    groups = [GroupRecord(group="both")]
    with (
        model_server(*FLAGS) as server,
        router(Setup(backends=[backend(server.port, kv_tokens=560)], groups=groups)) as running,
    ):
        one, two = new_tenant(running, group="both"), new_tenant(running, group="both")
        alone = new_tenant(running)
        floods = [Flood(tenant, 12) for tenant in (one, two, alone)]
        try:
            got = counted(running, floods, 9_000)
            assert 0.44 <= got[2] / sum(got) <= 0.56, got
            assert 0.42 <= got[0] / (got[0] + got[1]) <= 0.58, got
            running.setup.tenant(two.name, group=None)
            running.publish()
            got = counted(running, floods, 12_000)
            assert all(0.27 <= tokens / sum(got) <= 0.40 for tokens in got), got
        finally:
            for flood in floods:
                flood.stop()


def test_a_quiet_tenant_is_served_beside_a_flood() -> None:
    """Forty requests wait; the quiet tenant's next one does not wait for them."""
    with model_server(*FLAGS) as server, router(Setup(backends=[backend(server.port, kv_tokens=560)])) as running:
        loud, quiet = new_tenant(running), new_tenant(running)
        flood = Flood(loud, 40)
        try:
            running.wait(lambda: running.metric("fairlane_queue_length") > 20)
            before = flood.tokens
            body: Any = {"inputs": "Hi", "parameters": {"max_new_tokens": 5}}
            status, _, _ = call(running.port, "POST", "/generate", body, headers=quiet.headers)
            assert status == 200
            assert flood.tokens - before < 20 * 60
        finally:
            flood.stop()
