"""TGI's own wire format: stream events, request bodies, tokenise answers, ``/info`` and errors, as typed records.

Events are decoded with msgspec; the undecoded payload stays on the event, so that an encoder may forward it byte for
byte (float formatting and key order are then TGI's). Unknown fields are ignored everywhere.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
import orjson

from router_ext.wire.decoding import NotDecoded

MAX_UPSTREAM_NEW_TOKENS = 1_024
"""TGI runs anything longer in lossy pieces of its own (overshooting); a slice never asks for more."""


TokenCount = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]
"""A number of tokens as TGI counts them (u32); the books hold no other."""


class BadUpstreamAnswer(ValueError):
    """A backend sent something that is not TGI's format."""


class Token(msgspec.Struct, gc=False):
    """One token as TGI prints it; ``logprob`` is null for NaN. ``text`` is empty while a character is incomplete."""

    id: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]
    text: str
    logprob: float | None = None
    special: bool = False


class StreamDetails(msgspec.Struct, gc=False):
    """``details`` of the final event. ``seed`` is null when the request was greedy."""

    finish_reason: str
    generated_tokens: TokenCount
    seed: int | None = None
    input_length: TokenCount = 0


class StreamEvent(msgspec.Struct, gc=False):
    """One event of ``/generate_stream``: a token, the final token, or an error.

    ``index`` is the client's number (over all slices) once the continuation has seen the event; ``upstream_index`` is
    the one inside ``payload``, the undecoded JSON.
    """

    index: TokenCount = 0
    token: Token | None = None
    top_tokens: list[Token] | None = None
    generated_text: str | None = None
    details: StreamDetails | None = None
    error: str | None = None
    error_type: str | None = None
    payload: bytes = msgspec.field(default=b"", name="fairlane.payload")
    upstream_index: int = msgspec.field(default=0, name="fairlane.index")

    @property
    def is_final(self) -> bool:
        return self.generated_text is not None or self.details is not None


class TokenizedToken(msgspec.Struct, gc=False):
    """One item of ``/tokenize``. A token added by the tokenizer itself has ``text`` "" and ``start = stop = 0``."""

    id: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]
    text: str = ""
    start: int = 0
    stop: int = 0


class ChatTokenized(msgspec.Struct):
    """Answer of ``/chat_tokenize``: the rendered template and its tokens, nothing added."""

    tokenize_response: list[TokenizedToken]
    templated_text: str


_Tokens = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class Info(msgspec.Struct, kw_only=True):
    """The fields of ``/info`` a router uses. A number out of range is as good as no answer."""

    model_id: str
    max_concurrent_requests: _Count = 128
    max_best_of: _Count = 2
    max_stop_sequences: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 4
    max_input_tokens: _Tokens
    max_total_tokens: Annotated[int, msgspec.Meta(ge=2, le=10_000_000)]
    max_client_batch_size: _Count = 4
    model_pipeline_tag: str | None = None
    version: str = ""
    docker_label: str | None = None

    @property
    def system_fingerprint(self) -> str:
        """What TGI prints as ``system_fingerprint``."""
        return f"{self.version}-{self.docker_label or 'native'}"


class ErrorKind(enum.StrEnum):
    """What an upstream error means for the router."""

    VALIDATION = "validation"
    """The request is wrong; no other backend would take it."""
    OVERLOADED = "overloaded"
    """No permit was free: nothing ran; another backend, or a later moment, may take it."""
    GENERATION = "generation"
    """The backend failed; usually all its streams fail with it."""
    UNKNOWN = "unknown"


class UpstreamError(msgspec.Struct, frozen=True):
    """An error a backend answered with. ``status`` None: it came as an event of a 200 stream."""

    kind: ErrorKind
    message: str
    error_type: str
    status: int | None = None


_VALIDATION_TYPES = {
    "validation",
    "template_error",
    "missing_template_variable",
    "tool_error",
    "suffix not supported",
    "batch size exceeded",
    "Input validation error",
}

_decode_event = msgspec.json.Decoder(StreamEvent).decode
_decode_tokens = msgspec.json.Decoder(list[TokenizedToken]).decode
_decode_chat_tokens = msgspec.json.Decoder(ChatTokenized).decode
_decode_info = msgspec.json.Decoder(Info).decode


def decode_event(payload: bytes) -> StreamEvent:
    """One ``data`` payload of a stream.

    Raises:
        BadUpstreamAnswer: not an event of TGI.
    """
    try:
        event = _decode_event(payload)
    except NotDecoded as error:
        raise BadUpstreamAnswer(f"not a stream event: {error}") from None
    if event.details is not None and not 0 <= (event.details.seed or 0) < 1 << 64:
        raise BadUpstreamAnswer("not a stream event: a seed of more than 64 bits")
    event.payload = payload
    event.upstream_index = event.index
    return event


def decode_tokenize(body: bytes) -> list[TokenizedToken]:
    """Answer of ``POST /tokenize``."""
    try:
        return _decode_tokens(body)
    except NotDecoded as error:
        raise BadUpstreamAnswer(f"not an answer of /tokenize: {error}") from None


def decode_chat_tokenize(body: bytes) -> ChatTokenized:
    """Answer of ``POST /chat_tokenize``."""
    try:
        return _decode_chat_tokens(body)
    except NotDecoded as error:
        raise BadUpstreamAnswer(f"not an answer of /chat_tokenize: {error}") from None


def decode_info(body: bytes) -> Info:
    """Answer of ``GET /info``."""
    try:
        return _decode_info(body)
    except NotDecoded as error:
        raise BadUpstreamAnswer(f"not an answer of /info: {error}") from None


def encode_generate(inputs: str, parameters: dict[str, Any]) -> bytes:
    """Body of ``/generate_stream``."""
    return orjson.dumps({"inputs": inputs, "parameters": parameters})


def encode_tokenize(inputs: str) -> bytes:
    """Body of ``/tokenize``."""
    return orjson.dumps({"inputs": inputs})


def classify_error(message: str, error_type: str, status: int | None = None) -> UpstreamError:
    """What an error of TGI means. Chat streams tell no type, so the message prefix decides when the type is empty."""
    if error_type in _VALIDATION_TYPES:
        kind = ErrorKind.VALIDATION
    elif error_type == "overloaded":
        kind = ErrorKind.OVERLOADED
    elif error_type in ("generation", "incomplete_generation", "incomplete_generation_stream"):
        kind = ErrorKind.GENERATION
    elif message.startswith(("Input validation error", "Template error", "Tool error", "Missing template vatiable")):
        kind = ErrorKind.VALIDATION
    elif message.startswith("Model is overloaded"):
        kind = ErrorKind.OVERLOADED
    elif message.startswith(("Request failed during generation", "Incomplete generation")):
        kind = ErrorKind.GENERATION
    elif status in (400, 413, 415, 422):
        kind = ErrorKind.VALIDATION
    elif status == 429:
        kind = ErrorKind.OVERLOADED
    elif status == 424:
        kind = ErrorKind.GENERATION
    else:
        # Whatever stands in front of the backend says this, or the backend itself fell: no verdict on a batch.
        kind = ErrorKind.UNKNOWN
    return UpstreamError(kind=kind, message=message, error_type=error_type, status=status)


def decode_error(status: int, body: bytes) -> UpstreamError:
    """An error answer of a backend: TGI's JSON, or the plain text of its JSON layer, or nothing at all (401)."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = None
    if isinstance(data, dict):
        error = data.get("error")
        if isinstance(error, dict):
            return classify_error(str(error.get("message", "")), "", status)
        if isinstance(error, str):
            return classify_error(error, str(data.get("error_type") or ""), status)
    text = body[:500].decode("utf-8", "replace")
    return classify_error(text or f"status {status}", "", status)
