"""Values of a request, checked as TGI's validation does: in its order, with its words, against the model's limits.

``check_parameters`` and its companions run before the prompt is tokenised, ``fit_lengths`` after. Parameters are TGI's
own (OpenAI's fields mapped before); ``names`` tells what the client calls them.

Source: ``router/src/validation.rs`` of TGI.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from router_ext.errors import RequestRefused
from router_ext.gateway.generation import Dialect, GenerationRequest, ModelLimits
from router_ext.gateway.shapes import to_f32
from router_ext.wire.tgi import MAX_UPSTREAM_NEW_TOKENS

_PROMPT_PARAM = {Dialect.CHAT: "messages", Dialect.RESPONSES: "input"}


class Lengths(msgspec.Struct, frozen=True):
    """Sizes that fit the model: input length after truncation, and the cap of new tokens."""

    prompt_tokens: int
    max_new_tokens: int


def refuse_value(problem: str, param: str | None, *, code: str = "invalid_parameter") -> RequestRefused:
    """TGI's refusal of a value, to be raised."""
    return RequestRefused(f"Input validation error: {problem}", code=code, param=param)


def check_parameters(p: dict[str, Any], limits: ModelLimits, names: dict[str, str]) -> None:
    """TGI's checks of the parameters, in TGI's order. ``names``: what a field is called in the client's dialect."""

    def refuse(problem: str, field: str) -> RequestRefused:
        return refuse_value(problem, names.get(field, field))

    def number(field: str) -> float | None:
        value = p.get(field)
        return None if value is None else to_f32(value)

    best_of = p.get("best_of") or 1
    is_sampling = p.get("do_sample") or any(
        p.get(f) is not None for f in ("temperature", "top_k", "top_p", "typical_p")
    )
    if best_of > 1 and best_of > limits.max_best_of:
        raise refuse(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}", "best_of")
    if best_of > 1 and not is_sampling:
        raise refuse("you must use sampling when `best_of` is > 1", "best_of")
    temperature, repetition = number("temperature"), number("repetition_penalty")
    frequency = number("frequency_penalty")
    if temperature is not None and temperature <= 0:
        raise refuse("`temperature` must be strictly positive", "temperature")
    if repetition is not None and repetition <= 0:
        raise refuse("`repetition_penalty` must be strictly positive", "repetition_penalty")
    if frequency is not None and not -2 <= frequency <= 2:
        raise refuse("`frequency_penalty` must be >= -2.0 and <= 2.0", "frequency_penalty")
    for field in ("top_p", "typical_p"):
        value = number(field)
        if value is not None and not 0 < value < 1:
            raise refuse(f"`{field}` must be > 0.0 and < 1.0", field)
    top_k = p.get("top_k")
    if top_k is not None and top_k <= 0:
        raise refuse("`top_k` must be strictly positive", "top_k")
    if p.get("max_new_tokens") == 0:
        raise refuse("`max_new_tokens` must be strictly positive", "max_new_tokens")
    stop = p.get("stop") or ()
    if len(stop) > limits.max_stop_sequences:
        raise refuse(f"`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {len(stop)}", "stop")
    if best_of > 1 and p.get("seed") is not None:
        raise refuse("`seed` must not be set when `best_of` > 1", "seed")
    top_n = p.get("top_n_tokens") or 0
    if top_n > limits.max_top_n_tokens:
        raise refuse(f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {top_n}", "top_n_tokens")


def check_inputs(inputs: str, param: str) -> None:
    """An empty prompt is refused."""
    if not inputs:
        raise refuse_value("`inputs` cannot be empty", param)


def check_truncate(truncate: int | None, limits: ModelLimits) -> None:
    """``truncate`` keeps the last tokens of a prompt; it may not exceed what a prompt may have."""
    if truncate is not None and not 0 < truncate <= limits.max_input_tokens:
        problem = f"`truncate` must be strictly positive and less than {limits.max_input_tokens}. Given: {truncate}"
        raise refuse_value(problem, "truncate")


def check_grammar_value(grammar: dict[str, Any] | None, param: str) -> None:
    """The part of TGI's grammar check that needs no compiler. ``param``: where it stands."""
    if grammar is None or grammar["type"] not in ("json", "json_object", "json_schema"):
        return
    schema = grammar["value"]["schema"] if grammar["type"] == "json_schema" else grammar["value"]
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise refuse_value(f"grammar is not valid: {error}", param) from None
    elif not isinstance(schema, dict):
        raise refuse_value("grammar is not valid: Grammar must be a string or object", param)
    if not isinstance(schema, dict) or "properties" not in schema:
        raise refuse_value("grammar is not valid: Grammar must have a 'properties' field", param)


def fit_lengths(request: GenerationRequest, prompt_tokens: int, limits: ModelLimits) -> Lengths:
    """Check a measured prompt against the model and bound ``max_new_tokens`` by what is left.

    Args:
        prompt_tokens: tokens of one prompt, before ``truncate``.

    Raises:
        RequestRefused: ``context_length_exceeded``, exactly where TGI refuses.
    """
    truncate = request.parameters.get("truncate")
    length = prompt_tokens if truncate is None else min(prompt_tokens, truncate)
    room = max(limits.max_total_tokens - length, 0)
    wanted = request.max_new_tokens
    piece = min(room if wanted is None else wanted, MAX_UPSTREAM_NEW_TOKENS)
    param = _PROMPT_PARAM.get(request.dialect)
    if length + piece > limits.max_total_tokens:
        raise refuse_value(
            f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
            f"Given: {length} `inputs` tokens and {piece} `max_new_tokens`",
            param,
            code="context_length_exceeded",
        )
    if length > limits.max_input_tokens:
        raise refuse_value(
            f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {length}",
            param,
            code="context_length_exceeded",
        )
    return Lengths(length, max(min(room if wanted is None else wanted, room), 1))


def is_greedy(p: dict[str, Any]) -> bool:
    """The shard samples if asked to, or as soon as any warper is not neutral."""
    temperature = p.get("temperature")
    return not (
        p.get("do_sample")
        or (temperature is not None and to_f32(temperature) != 1.0)
        or p.get("top_k")
        or p.get("top_p") is not None
        or p.get("typical_p") is not None
    )
