"""KV ledger of one backend: what TGI has reserved, by TGI's own rule.

TGI takes the whole reservation of a request when it admits it and never grows it:

    tokens = input + min(new, 1024) + speculate - 1
    blocks = ceil(tokens / block size)
    usable = floor(kv tokens / block size) - 1        (block 0 serves TGI's health checks)

Shared prefix blocks give no room here: TGI's token budget counts them once per request, so a plan without
discounts is the one that always fits. A closed stream gives its blocks back only at the end of the running step
(of the whole prefill, if the prompt was still being processed); until then they stay in the ledger.

Conservation: ``reserved_blocks == sum(holdings)`` and ``free_blocks == usable_blocks - reserved_blocks`` always.

Source: TGI v3 ``queue.rs``, ``block_allocator.rs``.
"""

from __future__ import annotations

from router_ext.core.config import BackendConfig

TGI_NEW_TOKENS_CAP = 1_024
"""TGI reserves, and produces in one piece, at most this many new tokens."""


def usable_blocks(config: BackendConfig) -> int:
    """Blocks requests can hold together."""
    return config.kv_tokens // config.block_size - 1


def reservation_tokens(input_tokens: int, new_tokens: int, speculate: int) -> int:
    """Tokens TGI reserves for one sequence, before rounding to blocks."""
    return input_tokens + min(new_tokens, TGI_NEW_TOKENS_CAP) + speculate - 1


def reservation_blocks(config: BackendConfig, input_tokens: int, new_tokens: int) -> int:
    """Blocks TGI reserves for one sequence."""
    return -(-reservation_tokens(input_tokens, new_tokens, config.speculate) // config.block_size)


class Ledger:
    """Reservations on one backend, by ticket (one ticket per dispatch).

    ``free_blocks`` may fall below zero only when a prompt turned out longer than estimated or the operator lowered
    the stated KV while requests ran; nothing is admitted until it recovers.
    """

    __slots__ = ("block_size", "free_blocks", "holdings", "reserved_blocks", "usable_blocks")

    def __init__(self, config: BackendConfig) -> None:
        self.block_size = config.block_size
        self.usable_blocks = usable_blocks(config)
        self.reserved_blocks = 0
        self.free_blocks = self.usable_blocks
        self.holdings: dict[int, int] = {}

    def reserve(self, ticket: int, blocks: int) -> None:
        """Take ``blocks`` for a dispatch."""
        if ticket in self.holdings:
            raise ValueError(f"ticket {ticket} holds blocks already")
        self.holdings[ticket] = blocks
        self.reserved_blocks += blocks
        self.free_blocks -= blocks

    def correct(self, ticket: int, blocks: int) -> None:
        """Replace the reservation of a running dispatch by what the true input length makes it."""
        old = self.holdings[ticket]
        self.holdings[ticket] = blocks
        self.reserved_blocks += blocks - old
        self.free_blocks -= blocks - old

    def release(self, ticket: int) -> int:
        """Give back the blocks of a dispatch; 0 if it holds none (any more)."""
        blocks = self.holdings.pop(ticket, 0)
        self.reserved_blocks -= blocks
        self.free_blocks += blocks
        return blocks

    def resize(self, config: BackendConfig) -> None:
        """Apply a changed statement of the operator. Holdings are kept, in tokens rounded up to the new block."""
        if config.block_size != self.block_size:
            self.holdings = {
                ticket: -(-blocks * self.block_size // config.block_size) for ticket, blocks in self.holdings.items()
            }
            self.reserved_blocks = sum(self.holdings.values())
            self.block_size = config.block_size
        self.usable_blocks = usable_blocks(config)
        self.free_blocks = self.usable_blocks - self.reserved_blocks
