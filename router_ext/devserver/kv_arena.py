"""Keys and values of all sequences, in arenas by capacity.

An arena holds sequences of one capacity (a power of two) in neighbouring slots, so that a decode step attends to
all of them with one batched product and at most half of what it reads is padding:

    capacity   64: [seq][seq][seq][ free ]
    capacity  128: [seq]
    capacity 1024: [seq][seq]

A sequence that outgrows its arena is copied into the next (amortised one copy of each token); one that leaves
gives its slot to the last sequence of the arena. Arenas shrink when three quarters of their slots are free and
disappear with their last sequence. Memory comes from anonymous mappings, so what is given back leaves the process
at once (the heap would keep most of it), and slots not yet written to cost nothing.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from router_ext.devserver.gguf_model import ModelConfig

SMALLEST = 64  # tokens; below it, copying costs more than padding saves


@dataclass(slots=True, eq=False)
class Place:
    """Where one sequence's keys and values are; ``length`` tokens of them are valid."""

    arena: Arena
    slot: int
    length: int = 0


class Arena:
    """Slots of one capacity.

    Shape: ``keys[layer]``, ``values[layer]`` [slots, kv heads, capacity, head dim], float32. What is not valid is
    finite (fresh memory is zero), as a masked product needs it.
    """

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self.capacity = capacity
        self.places: list[Place] = []
        self._shape = (config.n_kv_heads, capacity, config.head_dim)
        self.keys = [_zeros(1, *self._shape) for _ in range(config.n_layers)]
        self.values = [_zeros(1, *self._shape) for _ in range(config.n_layers)]

    @property
    def used(self) -> int:
        """Slots in use: the first ``used`` ones."""
        return len(self.places)

    @property
    def n_slots(self) -> int:
        """Slots that memory is held for."""
        return self.keys[0].shape[0]

    def add(self) -> Place:
        """Take the first free slot, growing by half when there is none."""
        if self.used == self.n_slots:
            self._resize(self.n_slots + max(1, self.n_slots // 2))
        place = Place(self, self.used)
        self.places.append(place)
        return place

    def drop(self, place: Place) -> None:
        """Free a slot; the last sequence moves into it."""
        last = self.places.pop()
        if last is not place:
            for tensor in (*self.keys, *self.values):
                tensor[place.slot, :, : last.length] = tensor[last.slot, :, : last.length]
            last.slot = place.slot
            self.places[last.slot] = last
        if self.used and self.used * 4 <= self.n_slots:
            self._resize(self.used * 2)

    def _resize(self, n_slots: int) -> None:
        # Layer by layer: only one layer is ever held twice.
        for tensors in (self.keys, self.values):
            for i, old in enumerate(tensors):
                tensors[i] = _zeros(n_slots, *self._shape)
                tensors[i][: self.used] = old[: self.used]


def _zeros(*shape: int) -> Tensor:
    """A zeroed float32 tensor in a mapping of its own, unmapped with its last reference."""
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * 4), dtype=torch.float32).view(shape)


class KvCache:
    """All arenas; places stay valid until ``release``, their ``arena`` and ``slot`` may change in any call."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._arenas: dict[int, Arena] = {}

    def reserve(self, n_tokens: int) -> Place:
        """A place for a sequence that will hold ``n_tokens`` at first."""
        capacity = max(SMALLEST, 1 << (n_tokens - 1).bit_length())
        if capacity not in self._arenas:
            self._arenas[capacity] = Arena(self._config, capacity)
        return self._arenas[capacity].add()

    def grow(self, place: Place, n_tokens: int) -> None:
        """Make room for ``n_tokens`` in all, moving the sequence if its arena is too small."""
        if n_tokens <= place.arena.capacity:
            return
        target = self.reserve(n_tokens)
        for old, new in zip(
            (*place.arena.keys, *place.arena.values), (*target.arena.keys, *target.arena.values), strict=True
        ):
            new[target.slot, :, : place.length] = old[place.slot, :, : place.length]
        # The caller keeps its place: it takes over the slot of the target.
        self.release(place)
        place.arena, place.slot = target.arena, target.slot
        place.arena.places[place.slot] = place

    def release(self, place: Place) -> None:
        """Give the slot back; memory follows as the arena shrinks or empties."""
        place.arena.drop(place)
        if not place.arena.used:
            del self._arenas[place.arena.capacity]

    @property
    def held_bytes(self) -> int:
        """Memory held for keys and values."""
        return sum(tensor.nbytes for arena in self._arenas.values() for tensor in (*arena.keys, *arena.values))
