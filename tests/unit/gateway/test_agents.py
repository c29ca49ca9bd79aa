"""The agent a request belongs to: declared by header, a name inside its tenant, unknown to the backends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.scripted import BODY, Peer, World, running

from router_ext.core.actions import Action
from router_ext.core.events import Arrived, Event, RequestSpec
from router_ext.core.ids import TenantId
from router_ext.errors import RequestRefused
from router_ext.gateway.agents import NO_AGENT, declared_agent

ALICE, BOB = TenantId("ten_alice"), TenantId("ten_bob")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as made:
        yield made


def arrivals(world: World) -> list[RequestSpec]:
    """What the scheduler is told of requests from now on."""
    engine = world.router.engines["pol_main"]
    handle = engine.scheduler.handle
    seen: list[RequestSpec] = []

    def watch(event: Event, now: float) -> list[Action]:
        if isinstance(event, Arrived):
            seen.append(event.request)
        return handle(event, now)

    engine.scheduler.handle = watch  # type: ignore[method-assign]
    return seen


def test_an_id_is_a_name_inside_its_tenant() -> None:
    one = declared_agent(ALICE, "planner", None)
    assert one == declared_agent(ALICE, "planner", "")
    assert one.agent != declared_agent(ALICE, "planner 2", None).agent
    assert one.agent != declared_agent(BOB, "planner", None).agent
    # Neither the border between the two nor their lengths can be shifted.
    assert declared_agent(TenantId("a"), "bc", None).agent != declared_agent(TenantId("ab"), "c", None).agent
    assert len(one.agent or "") == 16
    assert len(declared_agent(ALICE, "\u00e9" * 256, None).agent or "") == 16
    assert declared_agent(ALICE, None, "5") == declared_agent(ALICE, "", "nonsense") == NO_AGENT


def test_a_cost_is_a_number() -> None:
    assert declared_agent(ALICE, "a", "1.5e6").cost == 1_500_000.0
    assert declared_agent(ALICE, "a", None).cost is None


@pytest.mark.parametrize("cost", ["0", "-1", "nan", "inf", "1e999", "much", "1,5", "\u00b2"])
def test_anything_else_is_refused_by_name(cost: str) -> None:
    with pytest.raises(RequestRefused, match="finite number") as caught:
        declared_agent(ALICE, "a", cost)
    assert caught.value.param == "x-fairlane-agent-cost"


def test_a_long_id_is_refused_by_name() -> None:
    with pytest.raises(RequestRefused, match="256") as caught:
        declared_agent(ALICE, "a" * 257, None)
    assert caught.value.param == "x-fairlane-agent-id"


@pytest.mark.parametrize("grammar", [None, {"type": "regex", "value": "[a-z]+"}])
async def test_the_scheduler_knows_it_and_a_backend_does_not(world: World, grammar: Any) -> None:
    seen = arrivals(world)
    body = {**BODY, "parameters": {**BODY["parameters"], "grammar": grammar}}
    bob = world.setup.key("bob")
    await world.router.apply(world.setup.snapshot())
    headers = {"x-fairlane-agent-id": "my-planner-7", "x-fairlane-agent-cost": "12345"}
    await Peer(world, "/generate_stream", body, headers=headers).wait()
    await Peer(world, "/generate_stream", body, headers=headers, key=bob).wait()
    await Peer(world, "/generate_stream", body, headers={"x-fairlane-interaction-id": "my-planner-7"}).wait()
    await Peer(world, "/generate_stream", body).wait()
    alice = declared_agent(ALICE, "my-planner-7", None).agent
    other = declared_agent(BOB, "my-planner-7", None).agent
    assert [(spec.agent_id, spec.agent_cost) for spec in seen] == [
        (alice, 12345.0),
        (other, 12345.0),
        (alice, None),
        (None, None),
    ]
    sent = b"".join(body for _, body in world.client.requests)
    assert b"planner" not in sent
    assert b"12345" not in sent


async def test_a_bad_cost_is_refused_in_the_dialect(world: World) -> None:
    headers = {"x-fairlane-agent-id": "a", "x-fairlane-agent-cost": "much"}
    native = Peer(world, "/generate", BODY, headers=headers)
    answer = await native.wait()
    assert native.status == 422
    assert b'"error_type":"validation"' in answer
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    openai = Peer(world, "/v1/chat/completions", chat, headers=headers)
    answer = await openai.wait()
    assert openai.status == 400
    assert b'"param":"x-fairlane-agent-cost"' in answer
    assert world.router.ledger.running == 0
