"""The estimate of a backend's prefix cache, against one that keeps whole prompts and scans them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from router_ext.core.prefix import PREFIX_BLOCK_TOKENS, PrefixIndex

Chain = tuple[int, ...]


@dataclass
class ScannedCache:
    """Blocks with the instant of their last use, and who runs on them."""

    used: dict[Chain, int] = field(default_factory=dict)
    running: dict[int, tuple[Chain, int]] = field(default_factory=dict)
    clock: int = 0

    def match(self, chain: Chain) -> int:
        found = 0
        while found < len(chain) and chain[: found + 1] in self.used:
            found += 1
        return found

    def start(self, ticket: int, chain: Chain) -> int:
        found = self.match(chain)
        self.running[ticket] = (chain, found)
        return found

    def stop(self, ticket: int, is_prefilled: bool) -> None:
        chain, found = self.running.pop(ticket)
        held = len(chain) if is_prefilled else found
        for length in range(held, 0, -1):
            self.clock += 1
            self.used[chain[:length]] = self.clock

    def shared(self) -> set[Chain]:
        return {chain[:length] for chain, found in self.running.values() for length in range(1, found + 1)}

    def trim(self, blocks: int) -> None:
        shared = self.shared()
        idle = sorted((block for block in self.used if block not in shared), key=lambda block: self.used[block])
        for block in idle[: max(0, len(idle) - blocks)]:
            del self.used[block]


def hashes(chain: Chain) -> Chain:
    """A chain as the router makes it: every hash is over the whole start."""
    return tuple(int("1" + "".join(map(str, chain[: length + 1]))) for length in range(len(chain)))


@pytest.mark.parametrize("seed", range(30))
def test_it_finds_what_a_scan_over_all_prompts_finds(seed: int) -> None:
    rng = random.Random(seed)
    index, scanned = PrefixIndex(), ScannedCache()
    tickets: list[int] = []
    found_any = 0
    for ticket in range(400):
        if tickets and rng.random() < 0.5:
            over = tickets.pop(rng.randrange(len(tickets)))
            is_prefilled = rng.random() < 0.8
            index.stop(over, is_prefilled=is_prefilled)
            scanned.stop(over, is_prefilled)
        else:
            chain = tuple(rng.randrange(2) for _ in range(rng.randint(0, 7)))
            found = index.start(ticket, hashes(chain))
            assert found == scanned.start(ticket, chain)
            found_any += found
            tickets.append(ticket)
        if rng.random() < 0.5:
            blocks = rng.randint(0, 30)
            index.trim(blocks * PREFIX_BLOCK_TOKENS + rng.randrange(PREFIX_BLOCK_TOKENS))
            scanned.trim(blocks)
        probe = tuple(rng.randrange(2) for _ in range(7))
        assert index.match(hashes(probe)) == scanned.match(probe)
        assert len(index) == len(scanned.used)
    assert found_any > 50


def test_a_prompt_is_held_when_its_request_is_over_not_before() -> None:
    index = PrefixIndex()
    assert index.start(1, (1, 2)) == 0
    assert index.start(2, (1, 2)) == 0
    index.stop(1, is_prefilled=True)
    assert index.match((1, 2, 3)) == 2


def test_a_prompt_that_was_not_processed_is_not_held() -> None:
    index = PrefixIndex()
    index.start(1, (1, 2))
    index.stop(1, is_prefilled=False)
    assert len(index) == 0


def test_the_start_of_a_prompt_outlives_its_end() -> None:
    index = PrefixIndex()
    index.start(1, (1, 2, 3, 4))
    index.stop(1, is_prefilled=True)
    index.trim(2 * PREFIX_BLOCK_TOKENS)
    assert index.match((1, 2, 3, 4)) == 2


def test_what_a_running_request_shares_stays_when_the_kv_is_full() -> None:
    index = PrefixIndex()
    index.start(1, (1, 2, 3))
    index.stop(1, is_prefilled=True)
    index.start(2, (1, 2, 9))
    index.trim(-5)
    assert index.match((1, 2, 3)) == 2


def test_a_request_that_ran_through_an_outage_leaves_nothing() -> None:
    index = PrefixIndex()
    index.start(1, (1, 2))
    index.clear()
    index.stop(1, is_prefilled=True)
    assert index.match((1, 2)) == 0
