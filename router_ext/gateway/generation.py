"""One client request in the router's own terms, independent of the dialect it came in.

``dialects.decode_request`` builds it, ``continuation.Continuation`` turns it into upstream slices, and
``encoders.encoder_for`` writes the answer back in the client's dialect. Tokens travel as
``router_ext.wire.tgi.StreamEvent``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import orjson

from router_ext.wire.tgi import Info


class Dialect(enum.StrEnum):
    """Which API the client speaks; decides bodies, errors and headers of the answer."""

    GENERATE = "generate"
    GENERATE_STREAM = "generate_stream"
    COMPAT = "compat"
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"

    @property
    def grammar_param(self) -> str:
        """What this API calls the field that forces a form on the answer."""
        return {Dialect.CHAT: "response_format", Dialect.RESPONSES: "text.format"}.get(self, "grammar")

    @property
    def is_openai(self) -> bool:
        return self in (Dialect.CHAT, Dialect.COMPLETIONS, Dialect.RESPONSES)

    @property
    def is_chat(self) -> bool:
        """Messages that a template turns into a prompt."""
        return self in (Dialect.CHAT, Dialect.RESPONSES)


class ResumeClass(enum.StrEnum):
    """How faithful a resumed generation is; reported with its usage."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    NEVER = "never"


_WORST_FIRST = (ResumeClass.NEVER, ResumeClass.APPROXIMATE, ResumeClass.EXACT)


def worst_class(classes: Sequence[ResumeClass]) -> ResumeClass | None:
    """The class of an answer made of parts of these; None if there are none."""
    return next((each for each in _WORST_FIRST if each in classes), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the largest live backend of the pool takes (``/info``)."""

    model_id: str
    max_input_tokens: int
    max_total_tokens: int
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    model_pipeline_tag: str | None = None

    @classmethod
    def from_info(cls, info: Info) -> ModelLimits:
        """The limits one backend states."""
        return cls(
            model_id=info.model_id,
            max_input_tokens=info.max_input_tokens,
            max_total_tokens=info.max_total_tokens,
            max_best_of=info.max_best_of,
            max_stop_sequences=info.max_stop_sequences,
            max_client_batch_size=info.max_client_batch_size,
            model_pipeline_tag=info.model_pipeline_tag,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassThrough:
    """Work that cannot be resumed goes whole to TGI's matching endpoint; bytes are relayed, tokens counted.

    ``data`` is the client's body in TGI's form, with only ``model`` rewritten for the backend, so that TGI judges it
    itself.
    """

    path: str
    data: Mapping[str, Any]
    reason: str

    @property
    def body(self) -> bytes:
        """What is sent. Cost: one encoding per call."""
        return orjson.dumps(self.data)

    def with_schema(self, schema: Mapping[str, Any]) -> PassThrough:
        """The same forced into another JSON schema: the client's, with its references inlined."""
        if "response_format" in self.data:
            data = {**self.data, "response_format": _with_schema(self.data["response_format"], schema)}
        else:
            parameters = self.data["parameters"]
            changed = {**parameters, "grammar": _with_schema(parameters["grammar"], schema)}
            data = {**self.data, "parameters": changed}
        return replace(self, data=data)

    def with_functions(self, functions: Sequence[Mapping[str, Any]]) -> PassThrough:
        """The same with functions of these names instead of its own: the client's, with their references inlined."""
        known = {function["name"]: function for function in functions}
        tools = [
            {**tool, "function": known.get(tool["function"]["name"], tool["function"])} for tool in self.data["tools"]
        ]
        return replace(self, data={**self.data, "tools": tools})


def _with_schema(grammar: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    if grammar["type"] == "json_schema":
        return {**grammar, "value": {**grammar["value"], "schema": schema}}
    return {**grammar, "value": schema}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """A chat's tools in TGI's form, and which of them may be called.

    ``mode``: ``auto``, ``required``, or ``function`` (then ``name`` is the one).
    """

    tools: Sequence[Mapping[str, Any]]
    mode: str
    name: str | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request. Frozen; everything that changes lives in ``Continuation`` and the encoder.

    Attributes:
        model: as the client sent it (None, "", "tgi", "dummy" mean the key's default pool).
        prompts: one text per generation (several only for completions); empty for chat until templated.
        chat_body: body for ``/chat_tokenize``, chats only. chat: the whole body for ``/v1/chat/completions``, likewise.
        parameters: TGI ``parameters`` to send with every slice: sampling, stop, top_n_tokens, truncate.
            Without max_new_tokens, seed, details, return_full_text, which the continuation sets.
        seed: the client's seed, None if it sent none.
        is_greedy: no sampling; the resume class depends on it.
        num_sequences: generations that one upstream request runs at once (best_of); several ``prompts`` are
            requests of their own.
        grammar: the checked ``grammar`` or ``response_format`` (TGI's form) the answer is forced into. tools: likewise,
            where the answer may be a call of one.
        echo: what an answer repeats of the request, ``/v1/responses`` only.
    """

    dialect: Dialect
    is_stream: bool
    model: str | None = None
    prompts: tuple[str, ...] = ()
    chat_body: dict[str, Any] | None = None
    chat: Mapping[str, Any] | None = None
    max_new_tokens: int | None = None
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    stop: tuple[str, ...] = ()
    seed: int | None = None
    is_greedy: bool = True
    num_sequences: int = 1
    return_full_text: bool = False
    wants_details: bool = False
    wants_logprobs: bool = False
    include_usage: bool = False
    grammar: Mapping[str, Any] | None = None
    tools: ToolUse | None = None
    echo: Mapping[str, Any] = msgspec.field(default_factory=dict)
    passthrough: PassThrough | None = None

    @property
    def is_forced(self) -> bool:
        """The answer has a form forced on it."""
        return self.grammar is not None or self.tools is not None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """How one generation ended, over all its slices.

    Attributes:
        finish_reason: TGI's word: ``length``, ``eos_token``, ``stop_sequence``.
        generated_text: special tokens skipped, as TGI's own; the prompt is not part of it.
    """

    finish_reason: str
    generated_text: str
    prompt_tokens: int
    output_tokens: int
    seed: int | None
