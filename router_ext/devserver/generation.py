"""One generation while it runs: from sampled ids to text, events and the reason it ends.

A request above 1024 output tokens runs in pieces, each a queue entry of its own under the same permit; the client
sees one stream. What TGI loses between pieces is lost here too: the stop buffer, the seed's noise, special tokens
of the text that is fed back.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from router_ext.devserver.codec import REPLACEMENT, Codec
from router_ext.devserver.engine import Sampled, Sampling, Sequence
from router_ext.tgi_model import Entry

if TYPE_CHECKING:
    from router_ext.devserver.validation import ValidRequest


@dataclass(slots=True, eq=False)  # not frozen: one is made per token, and freezing doubles its cost
class Token:
    """One event: ``text`` is empty while a character is incomplete; ``whole`` says that ``text`` is the id's own."""

    token_id: int
    text: str
    is_whole: bool
    logprob: float
    special: bool
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the last event of a generation carries."""

    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None


class GenerationFailed(Exception):
    """The request's outcome as TGI words it: the error text, its ``error_type`` and the status when not streaming."""

    def __init__(self, *, message: str, error_type: str, status: int) -> None:
        super().__init__(message)
        self.message = message
        self.error_type = error_type
        self.status = status


def invalid(message: str) -> GenerationFailed:
    """A request refused by validation."""
    return GenerationFailed(message=f"Input validation error: {message}", error_type="validation", status=422)


def generation_error(message: str) -> GenerationFailed:
    """What every request of a failed batch is told."""
    return GenerationFailed(
        message=f"Request failed during generation: Server error: {message}", error_type="generation", status=424
    )


class Sink(Protocol):
    """Where a generation's events go. Called on the event loop, never re-entered."""

    def on_token(self, generation: Generation, token: Token, ending: Ending | None) -> None: ...

    def on_error(self, generation: Generation, error: GenerationFailed) -> None: ...


@dataclass(slots=True, kw_only=True)
class Timing:
    """Monotonic seconds of one generation's phases; ``batched`` is the first admission."""

    arrived: float
    validated: float = 0.0
    batched: float = 0.0
    ended: float = 0.0


class StopMatcher:
    """Stop strings against the end of the text so far, by the pattern ``<stop>$`` (one trailing line break tolerated).

    The buffer is cut to its last 200 characters once it is longer than 300, so a longer stop string may never match.
    Source: TGI ``server/text_generation_server/utils/tokens.py``.
    """

    __slots__ = ("_patterns", "_text")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._patterns = [re.compile(re.escape(stop) + "$") for stop in stops]
        self._text = ""

    def matches(self, text: str) -> bool:
        if not self._patterns:
            return False
        self._text += text
        if len(self._text) > 300:
            self._text = self._text[-200:]
        return any(pattern.search(self._text) for pattern in self._patterns)


class Generation:
    """See the module. ``index`` of the next event is ``generated + 1``."""

    __slots__ = (
        "codec",
        "entry",
        "eos_ids",
        "fed_text",
        "generated",
        "holds_permit",
        "is_closed",
        "is_lagging",
        "next_ids",
        "next_limit",
        "pending",
        "piece_limit",
        "prefill_logprobs",
        "request",
        "sequence",
        "sink",
        "stops",
        "text_so_far",
        "timing",
        "wanted",
    )

    def __init__(
        self, request: ValidRequest, sink: Sink, codec: Codec, eos_ids: frozenset[int], timing: Timing
    ) -> None:
        self.request = request
        self.sink = sink
        self.codec = codec
        self.eos_ids = eos_ids
        self.timing = timing
        self.generated = 0
        self.wanted = request.total_new_tokens
        self.holds_permit = True
        self.is_closed = False
        self.is_lagging = False
        self.next_ids: list[int] = []
        self.next_limit = 0
        self.text_so_far = ""
        self.fed_text = request.inputs
        self.prefill_logprobs: tuple[float, ...] | None = None
        self.start_piece(request.input_ids, request.piece_tokens, sequence_id=0)

    def start_piece(self, ids: list[int], limit: int, *, sequence_id: int) -> None:
        """A fresh queue entry and engine sequence for the next ``limit`` tokens."""
        request = self.request
        self.piece_limit = limit
        self.pending = b""
        self.stops = StopMatcher(request.stops)
        self.sequence = Sequence(sequence_id=sequence_id, prompt_ids=ids, sampling=request.sampling)
        self.entry = Entry(
            input_length=len(ids),
            max_new_tokens=limit,
            prompt_ids=None if request.decoder_input_details else ids,
            owner=self,
        )

    def advance(self, sampled: Sampled) -> tuple[Token, str | None]:
        """Take one sampled id; the event it makes, and why the piece ends if it does.

        ``length`` is tested first, then EOS, then stop strings, as in TGI: an EOS or a stop string that falls on the
        last allowed token is reported as ``length``.
        """
        codec = self.codec
        token_id = sampled.token_id
        output = self.sequence.output_ids
        output.append(token_id)
        self.generated += 1
        if sampled.prefill_logprobs:
            self.prefill_logprobs = sampled.prefill_logprobs
        text = codec.token_text[token_id]
        is_whole = text is not None and not self.pending
        if text is None or self.pending:
            self.pending += codec.token_bytes[token_id]
            text = self.pending.decode("utf-8", "replace")
            if text.endswith(REPLACEMENT):
                text = ""
            else:
                self.pending = b""
        token = Token(token_id, text, is_whole, sampled.logprob, token_id in codec.special, sampled.top)
        if len(output) >= self.piece_limit:
            return token, "length"
        if token_id in self.eos_ids:
            return token, "eos_token"
        if self.stops.matches(text):
            return token, "stop_sequence"
        return token, None

    def piece_text(self) -> str:
        return self.codec.generated_text(self.sequence.output_ids)

    def ending(self, reason: str, piece_text: str) -> Ending:
        return Ending(
            generated_text=self.text_so_far + piece_text,
            finish_reason=reason,
            generated_tokens=self.generated,
            seed=self.request.sampling.seed if self.request.sampling.do_sample else None,
        )

    @property
    def input_length(self) -> int:
        return len(self.request.input_ids)


_F32 = struct.Struct("<f")
_logprob_texts: dict[float, bytes] = {}


def logprob_json(value: float) -> bytes:
    """Shortest decimal that is this float32; NaN as null."""
    found = _logprob_texts.get(value)
    if found is not None:
        return found
    if value != value:
        return b"null"
    try:
        single = _F32.unpack(_F32.pack(value))[0]
    except OverflowError:
        return b"null"
    text = f"{single:.9g}"
    for digits in range(1, 9):
        short = f"{single:.{digits}g}"
        if _F32.unpack(_F32.pack(float(short)))[0] == single:
            text = short
            break
    text = repr(float(text))
    if len(_logprob_texts) < 4096:
        _logprob_texts[value] = text.encode()
    return text.encode()


__all__ = [
    "Ending",
    "Generation",
    "GenerationFailed",
    "Sampling",
    "Sink",
    "StopMatcher",
    "Timing",
    "Token",
    "generation_error",
    "invalid",
    "logprob_json",
]
