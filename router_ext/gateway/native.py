"""Bodies of TGI's own paths: ``/generate``, ``/generate_stream``, ``/`` and ``/tokenize``."""

from __future__ import annotations

from typing import Any

from router_ext.gateway.bodies import Body
from router_ext.gateway.friendly import friendly_native
from router_ext.gateway.generation import Dialect, GenerationRequest, ModelLimits, PassThrough
from router_ext.gateway.shapes import Fields, check_fields, check_grammar, check_value, describe, refuse_shape
from router_ext.gateway.values import (
    check_grammar_value,
    check_inputs,
    check_parameters,
    check_truncate,
    is_greedy,
    refuse_value,
)

PARAMETER_FIELDS: Fields = {
    "best_of": ("usize", True),
    "temperature": ("f32", True),
    "repetition_penalty": ("f32", True),
    "frequency_penalty": ("f32", True),
    "top_k": ("i32", True),
    "top_p": ("f32", True),
    "typical_p": ("f32", True),
    "do_sample": ("bool", False),
    "max_new_tokens": ("u32", True),
    "return_full_text": ("bool", True),
    "stop": ("strings", False),
    "truncate": ("usize", True),
    "watermark": ("bool", False),
    "details": ("bool", False),
    "decoder_input_details": ("bool", False),
    "seed": ("u64", True),
    "top_n_tokens": ("u32", True),
    "adapter_id": ("str", True),
}

_SENT = ("temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "typical_p")

_NO_PARAMETERS: dict[str, Any] = {"do_sample": True}
"""What TGI takes when a body has no ``parameters`` at all: sampling. An empty object means greedy."""


def decode_tokenize(body: Body) -> str:
    """``inputs`` of a ``/tokenize`` body, which has the shape of a generate body; it may be empty."""
    data = friendly_native(body.data)
    _check_shape(data, body.dialect)
    inputs: str = data["inputs"]
    return inputs


def _check_shape(data: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Shapes of a generate body; returns its parameters, TGI's defaults when there are none."""
    if "inputs" in data:
        check_value(data["inputs"], "str", "inputs")
    p: dict[str, Any] = data.get("parameters", _NO_PARAMETERS)
    if p is not _NO_PARAMETERS:
        if not isinstance(p, dict):
            refuse_shape(f"invalid type: {describe(p)}, expected struct GenerateParameters", "parameters")
        check_fields(p, PARAMETER_FIELDS, "parameters.")
        if p.get("grammar") is not None:
            check_grammar(p["grammar"], "parameters.grammar")
    if dialect is Dialect.COMPAT and "stream" in data:
        check_value(data["stream"], "bool", "stream")
    if "inputs" not in data:
        refuse_shape("missing field `inputs`", param="inputs")
    return p


def decode_native(body: Body, limits: ModelLimits) -> GenerationRequest:
    """The request of a body.

    Raises:
        RequestRefused: anything TGI would refuse before it has counted the prompt's tokens.
    """
    data, dialect = friendly_native(body.data), body.dialect
    p = _check_shape(data, dialect)
    is_stream = dialect is Dialect.GENERATE_STREAM or (dialect is Dialect.COMPAT and data.get("stream") is True)
    best_of = p.get("best_of")
    if is_stream and best_of is not None and best_of != 1:
        raise refuse_value("`best_of` != 1 is not supported when streaming tokens", "best_of")
    if is_stream and p.get("decoder_input_details"):
        raise refuse_value(
            "`decoder_input_details` == true is not supported when streaming tokens", "decoder_input_details"
        )
    check_parameters(p, limits, {})
    inputs: str = data["inputs"]
    check_inputs(inputs, "inputs")
    check_truncate(p.get("truncate"), limits)
    grammar = p.get("grammar")
    check_grammar_value(grammar, "grammar")

    reason = None
    if grammar is not None:
        reason = "grammar"
    elif best_of is not None and best_of > 1:
        reason = "best_of"
    elif p.get("decoder_input_details"):
        reason = "decoder_input_details"

    stop = tuple(p.get("stop") or ())
    parameters: dict[str, Any] = {"do_sample": bool(p.get("do_sample", False))}
    parameters.update((field, p[field]) for field in _SENT if p.get(field) is not None)
    for field in ("truncate", "top_n_tokens", "adapter_id"):
        if p.get(field) is not None:
            parameters[field] = p[field]
    if stop:
        parameters["stop"] = list(stop)
    if p.get("watermark"):
        parameters["watermark"] = True
    full_text = p.get("return_full_text")
    if full_text is None:
        full_text = dialect is Dialect.COMPAT and limits.model_pipeline_tag in (None, "text-generation")
    return GenerationRequest(
        dialect=dialect,
        is_stream=is_stream,
        prompts=(inputs,),
        max_new_tokens=p.get("max_new_tokens"),
        parameters=parameters,
        stop=stop,
        seed=p.get("seed"),
        is_greedy=is_greedy(p),
        num_sequences=max(best_of or 1, 1),
        return_full_text=full_text,
        wants_details=bool(p.get("details") or p.get("decoder_input_details")),
        grammar=grammar,
        passthrough=None if reason is None else _pass_whole(body.path, data, p, reason, is_stream),
    )


def _pass_whole(path: str, data: dict[str, Any], p: dict[str, Any], reason: str, is_stream: bool) -> PassThrough:
    """Details are asked for where only they tell the tokens: of a stream, and of every sequence of ``best_of``."""
    if not is_stream and (p.get("best_of") or 1) == 1:
        return PassThrough(path=path, data=data, reason=reason)
    return PassThrough(path=path, data={**data, "parameters": {**p, "details": True}}, reason=reason)
