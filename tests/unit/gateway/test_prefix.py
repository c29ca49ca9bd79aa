"""The chain of a prompt's start: equal beginnings, and nothing else, have equal beginnings of chains."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.preempting import ModelWorld
from support.scripted import Peer, running, until

from router_ext.core.actions import Action
from router_ext.core.events import Arrived, Event
from router_ext.core.ids import TenantId
from router_ext.core.prefix import PREFIX_BLOCK_TOKENS
from router_ext.gateway.prefix import MAX_BLOCKS, prefix_chain

ALICE = TenantId("ten_alice")


def common(one: tuple[int, ...], two: tuple[int, ...]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))))


@given(data=st.data())
def test_chains_share_what_their_prompts_share(data: st.DataObject) -> None:
    # A list of so many drawn integers takes seconds to make; four bytes each are the same ids.
    text = st.binary(max_size=4 * 5 * PREFIX_BLOCK_TOKENS).map(lambda raw: raw[: len(raw) // 4 * 4])
    start, one, two = (list(memoryview(data.draw(text)).cast("I")) for _ in range(3))
    first, second = start + one, start + two
    shared = common(tuple(first), tuple(second))
    chains = prefix_chain(ALICE, first), prefix_chain(ALICE, second)
    assert [len(chain) for chain in chains] == [len(each) // PREFIX_BLOCK_TOKENS for each in (first, second)]
    assert common(*chains) == shared // PREFIX_BLOCK_TOKENS
    assert not set(chains[0][common(*chains) :]) & set(chains[1][common(*chains) :])


def test_another_tenants_chain_has_nothing_in_common() -> None:
    ids = list(range(1_000))
    assert not set(prefix_chain(ALICE, ids)) & set(prefix_chain(TenantId("ten_bob"), ids))


def test_a_chain_is_bounded() -> None:
    assert len(prefix_chain(ALICE, range(100_000))) == MAX_BLOCKS


def test_every_process_says_the_same() -> None:
    program = f"from router_ext.gateway.prefix import prefix_chain; print(prefix_chain({ALICE!r}, range(200)))"
    said = {subprocess.check_output([sys.executable, "-c", program], text=True) for _ in range(2)}
    assert said == {f"{prefix_chain(ALICE, range(200))}\n"}


# --- at the gateway -------------------------------------------------------------------------------------------------


@pytest.fixture
async def world(tmp_path: Path, tokenizer_path: Path) -> AsyncIterator[ModelWorld]:
    async with running(tmp_path, ModelWorld(tokenizer_path)) as made:
        assert isinstance(made, ModelWorld)
        yield made


@pytest.mark.parametrize("has_file", [True, False])
async def test_a_request_carries_the_chain_of_its_tokens(world: ModelWorld, has_file: bool) -> None:
    """With the pool's own tokenizer as with a backend's; of a truncated prompt only the end."""
    if not has_file:
        world.setup.tokenizer_path = None
        await world.router.apply(world.setup.snapshot())
    engine = world.router.engines["pol_main"]
    await until(lambda: (engine.model.tokenizer is not None) is has_file)
    handle = engine.scheduler.handle
    seen: list[tuple[int, ...]] = []

    def watch(event: Event, now: float) -> list[Action]:
        if isinstance(event, Arrived):
            seen.append(event.request.prefix)
        return handle(event, now)

    engine.scheduler.handle = watch  # type: ignore[method-assign]
    text = " fox" * 150 + " dogs" * 1_200
    ids = world.tokenizer.encode(text).ids
    parameters: list[dict[str, Any]] = [{}, {"truncate": 200}, {}]
    for prompt, extra in zip((text, text, "Hi"), parameters, strict=True):
        body = {"inputs": prompt, "parameters": {"max_new_tokens": 2, **extra}}
        assert json.loads(await Peer(world, "/generate", body).wait())["generated_text"]
    assert seen == [prefix_chain(ALICE, ids), prefix_chain(ALICE, ids[-200:]), ()]
