"""Reservation arithmetic against numbers worked out by hand from TGI's rule."""

from __future__ import annotations

import pytest

from router_ext.tgi_model import BlockAllocator, piece_tokens, reserved_tokens


@pytest.mark.parametrize(
    ("input_length", "max_new", "max_total", "piece", "reserved"),
    [
        (500, 200, 32_768, 200, 699),
        (500, None, 32_768, 1024, 1523),
        (500, 8000, 32_768, 1024, 1523),
        (1524, 8000, 32_768, 1024, 2547),
        (30_000, 256, 32_768, 256, 30_255),
        (500, 128, 32_768, 128, 627),
        (628, 128, 32_768, 128, 755),
        (4000, None, 4096, 96, 4095),
    ],
)
def test_a_request_reserves_its_prompt_and_one_piece_less_one(
    input_length: int, max_new: int | None, max_total: int, piece: int, reserved: int
) -> None:
    found, _ = piece_tokens(max_new_tokens=max_new, input_length=input_length, max_total_tokens=max_total)
    assert found == piece
    assert reserved_tokens(input_length=input_length, new_tokens=found) == reserved


def test_an_explicit_limit_is_overshot_to_whole_pieces() -> None:
    first, wanted = piece_tokens(max_new_tokens=1100, input_length=17, max_total_tokens=4096)
    second, _ = piece_tokens(max_new_tokens=1100, input_length=17 + first, max_total_tokens=4096)
    assert (first, second, wanted) == (1024, 1024, 1100)


def test_one_block_is_kept_for_health_checks() -> None:
    assert BlockAllocator(total_tokens=100_000, block_size=1).usable == 99_999
    assert BlockAllocator(total_tokens=100_000, block_size=256).usable == 389
    assert BlockAllocator(total_tokens=2048, block_size=16).usable == 127


def test_blocks_round_up() -> None:
    allocator = BlockAllocator(total_tokens=100_000, block_size=256)
    allocation = allocator.allocate(699)
    assert allocation is not None
    assert allocation.blocks == 3
    assert allocator.usable - allocator.free_blocks == 3


def test_blocks_come_back_when_freed_and_never_run_below_zero() -> None:
    allocator = BlockAllocator(total_tokens=160, block_size=16)
    first, second = allocator.allocate(100), allocator.allocate(33)
    assert first is not None
    assert second is None
    allocator.free(first)
    assert allocator.free_blocks == allocator.usable == 9


class TestPrefixCache:
    def test_freed_prompts_are_found_again_in_whole_blocks(self) -> None:
        allocator = BlockAllocator(total_tokens=1600, block_size=16, prefix_cache=True)
        ids = list(range(50))
        first = allocator.allocate(60, ids)
        assert first is not None
        assert first.prefix_tokens == 0
        allocator.free(first)
        second = allocator.allocate(60, ids)
        assert second is not None
        assert second.prefix_tokens == 48
        assert allocator.free_blocks + allocator.cached_blocks == allocator.usable - 1

    def test_at_least_one_token_is_left_to_compute(self) -> None:
        allocator = BlockAllocator(total_tokens=1600, block_size=16, prefix_cache=True)
        ids = list(range(32))
        for expected in (0, 31):
            allocation = allocator.allocate(40, ids)
            assert allocation is not None
            assert allocation.prefix_tokens == expected
            allocator.free(allocation)

    def test_only_unreferenced_leaves_are_evicted_oldest_first(self) -> None:
        allocator = BlockAllocator(total_tokens=16 * 9, block_size=16, prefix_cache=True)
        old, young = list(range(32)), list(range(100, 132))
        for ids in (old, young):
            allocation = allocator.allocate(33, ids)
            assert allocation is not None
            allocator.free(allocation)
        held = allocator.allocate(33, young)
        assert held is not None
        assert allocator.cached_blocks == 4
        assert allocator.allocate(16 * 5) is not None, "the old prompt's blocks make room"
        assert allocator.allocate(16 * 3) is None, "blocks in use are never evicted"
        again = allocator.allocate(33, old)
        assert again is None

    def test_every_block_is_free_owned_or_cached(self) -> None:
        allocator = BlockAllocator(total_tokens=16 * 40, block_size=16, prefix_cache=True)
        held = []
        for n in range(60):
            ids = [*range(16 * (n % 5)), *([n] * (n % 7))] or [n]
            allocation = allocator.allocate(len(ids) + 20, ids)
            if allocation is None or n % 3 == 0:
                for other in held:
                    allocator.free(other)
                held = [allocation] if allocation else []
            else:
                held.append(allocation)
            owned = sum(a._owned for a in held)
            assert allocator.free_blocks + allocator.cached_blocks + owned == allocator.usable
