"""Requests with a grammar: proven before a backend sees them, or refused with the figures."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.scripted import Peer, World, running, until

from router_ext.backends.fake import Ending, FakeBackend, Script
from router_ext.gateway.engine import PoolEngine
from router_ext.guard.examples import COMMON, HAZARDS, TOOLS

ANSWER = Script(
    headers=((b"content-type", b"application/json"), (b"x-generated-tokens", b"1"), (b"x-prompt-tokens", b"3")),
    pieces=(b'{"generated_text":"{}"}',),
)
CHAT = b'{"tokenize_response":[{"id":1,"text":"a","start":0,"stop":1}],"templated_text":"a"}'


class Guarded(World):
    """A backend that notes what it is given, and answers whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = ANSWER

    def play(self, path: str, body: bytes) -> Script:
        if path in ("/generate", "/v1/chat/completions"):
            return self.answer
        if path == "/chat_tokenize" and b"tools" in body:
            return Script(pieces=(CHAT,))
        return super().play(path, body)

    @property
    def given(self) -> list[dict[str, Any]]:
        """Bodies of generations, in order."""
        wanted = ("/generate", "/generate_stream", "/v1/chat/completions")
        return [json.loads(body) for path, body in self.client.requests if path in wanted]

    async def publish(self, tiers: dict[str, Any] | None = None, **changes: Any) -> None:
        snapshot = self.setup.snapshot()
        pools = [msgspec.structs.replace(each, **changes) for each in snapshot.pools]
        kept = [msgspec.structs.replace(each, **(tiers or {})) for each in snapshot.tiers]
        await self.router.apply(msgspec.structs.replace(snapshot, pools=pools, tiers=kept))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with running(tmp_path, Guarded()) as made:
        assert isinstance(made, Guarded)
        made.router._guard._wait_s = 300.0  # verdicts are what is tested here, not the machine
        await made.publish(vocabulary=49_152)
        yield made


def engine_of(world: World) -> PoolEngine:
    return world.router.engines["pol_main"]


def ask(world: World, grammar: Any, path: str = "/generate", **parameters: Any) -> Peer:
    return Peer(world, path, {"inputs": "a b c", "parameters": {"max_new_tokens": 5, "grammar": grammar, **parameters}})


def chat(world: World, **fields: Any) -> Peer:
    return Peer(world, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **fields})


@pytest.mark.parametrize("name", ["yes or no", "invoice lines", "shared definition", "regex: date"])
async def test_a_common_grammar_reaches_the_backend(world: Guarded, name: str) -> None:
    peer = ask(world, COMMON[name])
    await peer.wait()
    assert peer.status == 200
    (given,) = world.given
    assert given["parameters"]["grammar"]["type"] == COMMON[name]["type"]
    assert "$ref" not in json.dumps(given), "its references have been followed"


QUICK = [name for name in HAZARDS if name not in ("12 optional fields", "string of at most 200", "40 required fields")]
"""Those that the compilers judge in tenths of a second."""


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_no_backend_sees_a_hazard(world: Guarded, name: str, path: str) -> None:
    peer = ask(world, HAZARDS[name], path)
    error = json.loads(await peer.wait())
    assert peer.status == 422, "with its real status, in streams too"
    assert error["error"].startswith("Input validation error: ")
    assert world.given == []
    assert engine_of(world).stats().queued == 0


async def test_a_refusal_on_v1_names_field_code_and_figures(world: Guarded) -> None:
    schema = HAZARDS["40 required fields"]["value"]
    peer = chat(world, response_format={"type": "json_object", "value": schema})
    error = json.loads(await peer.wait())["error"]
    assert peer.status == 400
    assert (error["code"], error["param"]) == ("grammar_too_expensive", "response_format")
    for figure in ("712 states", "49152 tokens", "2 s are allowed"):
        assert figure in error["message"]


async def test_tools_are_judged_and_refer_to_their_own_definitions(world: Guarded) -> None:
    await chat(world, tools=TOOLS["shared definition"]).wait()
    (given,) = world.given
    assert "$ref" not in json.dumps(given["tools"])
    many = [{**tool, "function": {**tool["function"], "name": f"t{i}"}} for i in range(60) for tool in TOOLS["weather"]]
    peer = chat(world, tools=many)
    error = json.loads(await peer.wait())["error"]
    assert (error["code"], error["param"]) == ("grammar_too_expensive", "tools")


async def test_the_limit_is_that_of_the_tier(world: Guarded) -> None:
    await world.publish({"grammar_stall_s": 30.0}, vocabulary=49_152)
    peer = ask(world, HAZARDS["40 required fields"])
    await peer.wait()
    assert peer.status == 200
    await world.publish({"grammar_stall_s": 0.2}, vocabulary=49_152)
    peer = ask(world, COMMON["invoice lines"])
    assert b"0.2 s are allowed" in await peer.wait()


async def test_without_the_guard_everything_goes_through(world: Guarded) -> None:
    await world.publish(is_guarded=False)
    await ask(world, HAZARDS["schema that refers to itself"]).wait()
    assert len(world.given) == 1


async def test_an_empty_regex_is_no_grammar(world: Guarded) -> None:
    await ask(world, {"type": "regex", "value": ""}).wait()
    assert len(world.given) == 1


async def test_new_grammars_are_known_to_the_scheduler(world: Guarded) -> None:
    await ask(world, COMMON["point"]).wait()
    assert engine_of(world).stats().backends[0].compiled_grammars == 1
    await ask(world, COMMON["point"]).wait()
    await ask(world, COMMON["polygon"]).wait()
    assert engine_of(world).stats().backends[0].compiled_grammars == 2


async def test_an_operator_stops_all_grammars_of_a_pool(world: Guarded) -> None:
    world.answer = Script(ending=Ending.HANG)
    running = ask(world, COMMON["point"])
    await until(lambda: len(world.given) == 1)
    await world.publish(takes_grammars=False)
    data = await running.wait()
    assert b"has stopped grammars" in data
    assert running.status == 403
    refused = ask(world, COMMON["point"])
    assert b"has stopped grammars" in await refused.wait()
    assert b"generated_text" in await Peer(world, "/generate_stream", {"inputs": "a b c"}).wait()
    assert isinstance(world.client, FakeBackend)
    assert not world.client.streams
