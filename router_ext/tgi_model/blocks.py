"""KV blocks: reserved up front, whole, per request; optionally shared along common prompt prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Node:
    """One cached block of prompt ids in the prefix trie; the root holds no block."""

    key: tuple[int, ...]
    parent: _Node | None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    refs: int = 0
    used_at: int = 0


@dataclass(slots=True, eq=False)
class Allocation:
    """Blocks of one request. ``prefix_tokens`` of its prompt are in the cache and need no prefill."""

    blocks: int
    prefix_tokens: int
    _owned: int
    _path: list[_Node]
    _prompt_ids: Sequence[int] | None


class BlockAllocator:
    """Counts blocks as TGI's allocator does: one block is kept for health checks, nothing is taken while decoding.

    With ``prefix_cache`` whole blocks of prompt ids are shared: looked up when a request is allocated, inserted when
    it is freed (prompt tokens only), evicted least recently used first and only when room is needed. A lookup that
    ends in a refusal may still have evicted, as in TGI.

    Invariants: free + owned by requests + cached = usable.
    Source: TGI ``backends/v3/src/{block_allocator,radix}.rs``.
    """

    def __init__(self, *, total_tokens: int, block_size: int, prefix_cache: bool = False) -> None:
        if block_size < 1:
            raise ValueError(f"block size {block_size} must be at least 1")
        self.block_size = block_size
        self.usable = max(0, total_tokens // block_size - 1)
        self.free_blocks = self.usable
        self.cached_blocks = 0
        self._has_prefix_cache = prefix_cache
        self._root = _Node((), None)
        self._clock = 0

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, tokens: int, prompt_ids: Sequence[int] | None = None) -> Allocation | None:
        """Reserve ``tokens`` slots, or None if they do not fit now.

        Args:
            prompt_ids: prompt token ids for the prefix cache; None neither reads nor writes it.
        """
        path = self._lookup(prompt_ids)
        for node in path:
            node.refs += 1
        owned = self.blocks_for(tokens - len(path) * self.block_size)
        if owned > self.free_blocks:
            self._evict(owned - self.free_blocks)
        if owned > self.free_blocks:
            for node in path:
                node.refs -= 1
            return None
        self.free_blocks -= owned
        prefix = len(path) * self.block_size
        if prompt_ids is not None and prefix >= len(prompt_ids):
            prefix = len(prompt_ids) - 1  # a forward needs at least one token to compute
        return Allocation(owned + len(path), prefix, owned, path, prompt_ids)

    def free(self, allocation: Allocation) -> None:
        """Give the blocks back; with the prefix cache, those of the prompt stay cached."""
        kept = self._insert(allocation) if self._has_prefix_cache and allocation._prompt_ids is not None else 0
        for node in allocation._path:
            node.refs -= 1
        self.free_blocks += allocation._owned - kept
        self.cached_blocks += kept

    def _keys(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        size = self.block_size
        return [tuple(ids[i : i + size]) for i in range(0, len(ids) - size + 1, size)]

    def _lookup(self, ids: Sequence[int] | None) -> list[_Node]:
        path: list[_Node] = []
        if not self._has_prefix_cache or ids is None:
            return path
        self._clock += 1
        node = self._root
        for key in self._keys(ids):
            child = node.children.get(key)
            if child is None:
                break
            child.used_at = self._clock
            path.append(child)
            node = child
        return path

    def _insert(self, allocation: Allocation) -> int:
        assert allocation._prompt_ids is not None
        self._clock += 1
        node, kept = self._root, 0
        for key in self._keys(allocation._prompt_ids):
            child = node.children.get(key)
            if child is None:
                if kept == allocation._owned:
                    break
                child = node.children[key] = _Node(key, node)
                kept += 1
            child.used_at = self._clock
            node = child
        return kept

    def _evict(self, blocks: int) -> None:
        while blocks > 0:
            leaves = [n for n in self._walk() if not n.children and n.refs == 0]
            if not leaves:
                return
            leaf = min(leaves, key=lambda n: n.used_at)
            assert leaf.parent is not None
            del leaf.parent.children[leaf.key]
            self.cached_blocks -= 1
            self.free_blocks += 1
            blocks -= 1

    def _walk(self) -> list[_Node]:
        found: list[_Node] = []
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found
