"""How many tokens TGI sets aside for one request before it runs."""

from __future__ import annotations

# A request that wants more is run in pieces, each queued again at the tail (TGI 3.1.1 and later).
MAX_PIECE_TOKENS = 1024


def piece_tokens(
    *, max_new_tokens: int | None, input_length: int, max_total_tokens: int, cap: int = MAX_PIECE_TOKENS
) -> tuple[int, int]:
    """Output tokens of the piece about to be queued, and of the whole request.

    An explicit ``max_new_tokens`` above the cap asks for a full piece every time, so a request is overshot to the
    next multiple of the cap; an unset one shrinks with the room that is left.

    Returns:
        (tokens of this piece, tokens after which no further piece is queued).
    Source: TGI ``router/src/validation.rs``.
    """
    if max_new_tokens is None:
        room = max(0, max_total_tokens - input_length)
        return min(room, cap), room
    return min(max_new_tokens, cap), max_new_tokens


def reserved_tokens(*, input_length: int, new_tokens: int, speculate: int = 0) -> int:
    """KV slots of one admitted request: the last output token is never fed back, hence the minus one.

    Source: TGI ``backends/v3/src/queue.rs``.
    """
    return input_length + new_tokens + speculate - 1
