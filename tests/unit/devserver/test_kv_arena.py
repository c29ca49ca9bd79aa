"""Keys and values stay with their sequence, whatever moves."""

from __future__ import annotations

import random

import pytest
import torch

from router_ext.devserver.gguf_model import ModelConfig
from router_ext.devserver.kv_arena import KvCache, Place

CONFIG = ModelConfig(
    n_layers=2, hidden_size=8, intermediate_size=8, n_heads=2, n_kv_heads=1, head_dim=4, vocab_size=16,
    max_positions=1024, rope_theta=1e4, rms_norm_eps=1e-5,
)  # fmt: skip
TOKEN_BYTES = 2 * 2 * 1 * 4 * 4


def write(place: Place, first: int, end: int, mark: float) -> None:
    for layer, (keys, values) in enumerate(zip(place.arena.keys, place.arena.values, strict=True)):
        keys[place.slot, :, first:end] = mark + layer
        values[place.slot, :, first:end] = -mark - layer
    place.length = end


def holds(place: Place, mark: float) -> bool:
    return all(
        bool((keys[place.slot, :, : place.length] == mark + layer).all())
        and bool((values[place.slot, :, : place.length] == -mark - layer).all())
        for layer, (keys, values) in enumerate(zip(place.arena.keys, place.arena.values, strict=True))
    )


@pytest.mark.parametrize("seed", range(5))
def test_every_sequence_keeps_its_own_through_growth_and_departures(seed: int) -> None:
    rng, cache, live = random.Random(seed), KvCache(CONFIG), {}
    for step in range(300):
        if live and rng.random() < 0.4:
            place = rng.choice([*live])
            assert holds(place, live.pop(place))
            cache.release(place)
        elif live and rng.random() < 0.5:
            place = rng.choice([*live])
            end = min(CONFIG.max_positions, place.length + rng.choice([1, 30, 200]))
            cache.grow(place, end)
            write(place, place.length, end, live[place])
        else:
            n_tokens = rng.randint(1, 200)
            place = cache.reserve(n_tokens)
            live[place] = float(step)
            write(place, 0, n_tokens, float(step))
        slots = [(place.arena, place.slot) for place in live]
        assert len(set(slots)) == len(slots)
        assert all(place.slot < place.arena.used and place.arena.places[place.slot] is place for place in live)
        held_tokens = sum(place.arena.capacity for place in live)
        assert cache.held_bytes <= 4 * held_tokens * TOKEN_BYTES
    for place, mark in live.items():
        assert holds(place, mark)
        cache.release(place)
    assert cache.held_bytes == 0


def test_fresh_slots_are_finite() -> None:
    """A masked product multiplies what is not valid by zero, which a NaN would survive."""
    cache = KvCache(CONFIG)
    places = [cache.reserve(10) for _ in range(7)]
    arena = places[0].arena
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (*arena.keys, *arena.values))
    assert arena.capacity == 64
    assert cache.reserve(65).arena.capacity == 128
