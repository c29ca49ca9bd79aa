"""The reservation rule, number by number as TGI computes it, and the ledger's conservation."""

from __future__ import annotations

from typing import Any

import pytest

from router_ext.core.config import BackendConfig
from router_ext.core.ids import BackendId
from router_ext.core.kv import Ledger, reservation_blocks, usable_blocks


def backend(**fields: Any) -> BackendConfig:
    return BackendConfig(backend=BackendId("bke_a"), **{"kv_tokens": 100_000, **fields})


@pytest.mark.parametrize(
    ("prompt", "new", "block_size", "blocks"),
    [
        (500, 200, 1, 699),
        (500, 1_024, 1, 1_523),
        (500, 8_000, 1, 1_523),
        (30_000, 256, 1, 30_255),
        (500, 128, 1, 627),
        (628, 128, 1, 755),
        (500, 200, 256, 3),
    ],
)
def test_a_reservation_is_input_plus_capped_new_minus_one_in_whole_blocks(
    prompt: int, new: int, block_size: int, blocks: int
) -> None:
    assert reservation_blocks(backend(block_size=block_size), prompt, new) == blocks


def test_speculation_adds_its_tokens() -> None:
    assert reservation_blocks(backend(speculate=3), 500, 200) == 702


@pytest.mark.parametrize(("kv", "block_size", "usable"), [(100_000, 1, 99_999), (1_000, 16, 61), (1_007, 16, 61)])
def test_one_block_is_reserved_and_a_broken_one_is_lost(kv: int, block_size: int, usable: int) -> None:
    assert usable_blocks(backend(kv_tokens=kv, block_size=block_size)) == usable


def test_the_ledger_gives_back_what_it_took() -> None:
    ledger = Ledger(backend(kv_tokens=101))
    ledger.reserve(1, 40)
    ledger.reserve(2, 60)
    assert (ledger.free_blocks, ledger.reserved_blocks) == (0, 100)
    ledger.correct(2, 70)
    assert ledger.free_blocks == -10
    assert ledger.release(2) == 70
    assert ledger.release(2) == 0
    assert ledger.release(1) == 40
    assert (ledger.free_blocks, ledger.reserved_blocks) == (100, 0)


def test_a_ticket_cannot_hold_twice() -> None:
    ledger = Ledger(backend())
    ledger.reserve(1, 4)
    with pytest.raises(ValueError, match="ticket 1"):
        ledger.reserve(1, 4)


def test_a_changed_block_size_keeps_the_tokens_that_are_held() -> None:
    ledger = Ledger(backend(kv_tokens=1_000, block_size=4))
    ledger.reserve(1, 5)
    ledger.resize(backend(kv_tokens=2_000, block_size=16))
    assert ledger.holdings == {1: 2}
    assert ledger.free_blocks == 2_000 // 16 - 1 - 2
