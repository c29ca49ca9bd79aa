"""TGI's validation of a generate request: the same tests in the same order, with the same words."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router_ext.devserver.constraint import Constraint
from router_ext.devserver.engine import Sampling
from router_ext.devserver.generation import invalid
from router_ext.tgi_model import piece_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Start-up flags that requests are checked against; names and defaults are TGI's."""

    max_concurrent_requests: int = 128
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    max_input_tokens: int = 2048
    max_total_tokens: int = 4096
    payload_limit: int = 2_000_000
    validation_workers: int = 2
    is_grammar_disabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """A generate request that may be queued. ``inputs`` is the prompt as sent, ``input_ids`` what is left of it."""

    inputs: str
    input_ids: list[int]
    piece_tokens: int
    total_new_tokens: int
    max_new_tokens: int | None
    stops: tuple[str, ...]
    sampling: Sampling
    add_special_tokens: bool
    truncate: int | None
    decoder_input_details: bool


def check_stream(parameters: dict[str, Any]) -> None:
    """What a streaming endpoint refuses before anything else.

    Raises:
        GenerationFailed: the parameter does not stream.
    """
    if parameters["best_of"] not in (None, 1):
        raise invalid("`best_of` != 1 is not supported when streaming tokens")
    if parameters["decoder_input_details"]:
        raise invalid("`decoder_input_details` == true is not supported when streaming tokens")


def check_best_of(best_of: int, limits: Limits) -> None:
    if best_of > limits.max_best_of:
        raise invalid(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}")


def check_parameters(inputs: str, p: dict[str, Any], limits: Limits) -> None:
    """Everything that can be refused without the tokenizer.

    Raises:
        GenerationFailed: the first test that fails.
    """
    best_of = 1 if p["best_of"] is None else p["best_of"]
    samples = p["do_sample"] or any(p[k] is not None for k in ("temperature", "top_k", "top_p", "typical_p"))
    if best_of > 1 and not samples:
        raise invalid("you must use sampling when `best_of` is > 1")
    for name in ("temperature", "repetition_penalty"):
        if p[name] is not None and p[name] <= 0:
            raise invalid(f"`{name}` must be strictly positive")
    if p["frequency_penalty"] is not None and not -2.0 <= p["frequency_penalty"] <= 2.0:
        raise invalid("`frequency_penalty` must be >= -2.0 and <= 2.0")
    for name in ("top_p", "typical_p"):
        if p[name] is not None and not 0 < p[name] < 1:
            raise invalid(f"`{name}` must be > 0.0 and < 1.0")
    if p["top_k"] is not None and p["top_k"] <= 0:
        raise invalid("`top_k` must be strictly positive")
    if p["max_new_tokens"] == 0:
        raise invalid("`max_new_tokens` must be strictly positive")
    if len(p["stop"]) > limits.max_stop_sequences:
        raise invalid(f"`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {len(p['stop'])}")
    if best_of > 1 and p["seed"] is not None:
        raise invalid("`seed` must not be set when `best_of` > 1")
    if p["top_n_tokens"] is not None and p["top_n_tokens"] > limits.max_top_n_tokens:
        raise invalid(f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {p['top_n_tokens']}")
    if not inputs:
        raise invalid("`inputs` cannot be empty")
    if p["truncate"] is not None and not 1 <= p["truncate"] <= limits.max_input_tokens:
        raise invalid(
            f"`truncate` must be strictly positive and less than {limits.max_input_tokens}. Given: {p['truncate']}"
        )


def check_lengths(input_length: int, max_new_tokens: int | None, limits: Limits) -> tuple[int, int]:
    """Tokens of the first piece and of the whole request.

    Raises:
        GenerationFailed: prompt, or prompt and piece, are too long.
    """
    piece, total = piece_tokens(
        max_new_tokens=max_new_tokens, input_length=input_length, max_total_tokens=limits.max_total_tokens
    )
    if input_length + piece > limits.max_total_tokens:
        raise invalid(
            f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
            f"Given: {input_length} `inputs` tokens and {piece} `max_new_tokens`"
        )
    if input_length > limits.max_input_tokens:
        raise invalid(f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {input_length}")
    return piece, total


Constrain = Callable[[str, Any], Constraint | None]
"""What a grammar of a kind, with a value, binds its generation to."""


def validate(
    inputs: str,
    p: dict[str, Any],
    ids: list[int],
    limits: Limits,
    *,
    add_special_tokens: bool,
    constrain: Constrain,
    make_seed: Callable[[], int] = lambda: secrets.randbits(64),
) -> ValidRequest:
    """The last tests, with the prompt's ids at hand (truncated from the left as asked).

    Raises:
        GenerationFailed: too long, or the grammar is refused.
        ServerDies: of its grammar.
    """
    if p["truncate"] is not None:
        ids = ids[-p["truncate"] :]
    piece, total = check_lengths(len(ids), p["max_new_tokens"], limits)
    constraint = None
    if p["grammar"] is not None:
        if limits.is_grammar_disabled:
            raise invalid("grammar is not supported")
        constraint = constrain(*p["grammar"])
    temperature = 1.0 if p["temperature"] is None else p["temperature"]
    top_p = 1.0 if p["top_p"] is None else p["top_p"]
    typical_p = 1.0 if p["typical_p"] is None else p["typical_p"]
    top_k = p["top_k"] or 0
    has_warpers = temperature != 1.0 or top_k != 0 or top_p < 1.0 or typical_p < 1.0
    sampling = Sampling(
        do_sample=p["do_sample"] or has_warpers,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        typical_p=typical_p,
        repetition_penalty=1.0 if p["repetition_penalty"] is None else p["repetition_penalty"],
        frequency_penalty=p["frequency_penalty"] or 0.0,
        watermark=p["watermark"],
        seed=make_seed() if p["seed"] is None else p["seed"],
        top_n_tokens=p["top_n_tokens"] or 0,
        wants_prefill=p["decoder_input_details"],
        constraint=constraint,
    )
    return ValidRequest(
        inputs=inputs,
        input_ids=ids,
        piece_tokens=piece,
        total_new_tokens=total,
        max_new_tokens=p["max_new_tokens"],
        stops=tuple(p["stop"]),
        sampling=sampling,
        add_special_tokens=add_special_tokens,
        truncate=p["truncate"],
        decoder_input_details=p["decoder_input_details"],
    )
