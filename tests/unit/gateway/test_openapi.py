"""The document says what the application serves, and what bodies its readers take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from router_ext.errors import RequestRefused
from router_ext.gateway.app import App
from router_ext.gateway.chats import CHAT_FIELDS, COMPLETION_FIELDS
from router_ext.gateway.dialects import decode_request
from router_ext.gateway.generation import ModelLimits
from router_ext.gateway.lifespan import Router
from router_ext.gateway.native import PARAMETER_FIELDS
from router_ext.gateway.openapi import document
from router_ext.gateway.responses import RESPONSE_FIELDS
from router_ext.settings import RouterSettings

LIMITS = ModelLimits(model_id="m", max_input_tokens=200, max_total_tokens=300)


def test_it_is_an_openapi_document() -> None:
    OpenAPIV31SpecValidator(document()).validate()


async def test_every_route_is_in_it_and_nothing_else_is(tmp_path: Path) -> None:
    settings = RouterSettings(key_pepper="ab" * 32, controlplane_url="", port=0, dir=tmp_path)
    served = App(Router(settings)).methods
    told = {
        path: {name.upper() for name in item if name in ("get", "post", "put", "patch", "delete")}
        for path, item in document()["paths"].items()
    }
    assert told == served


VALUES: list[Any] = [None, True, 0, -1, 3, 1.5, 2**40, 2**70, "a", [], ["a"], [1], [1.5], {}, {"a": 1}]
BODIES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "/generate": ("GenerateParameters", {"inputs": "a"}, PARAMETER_FIELDS),
    "/v1/chat/completions": ("ChatRequest", {"messages": [{"role": "user", "content": "a"}]}, CHAT_FIELDS),
    "/v1/completions": ("CompletionRequest", {"prompt": "a"}, COMPLETION_FIELDS),
    "/v1/responses": ("ResponsesRequest", {"input": "a"}, RESPONSE_FIELDS),
}


@pytest.mark.parametrize("path", BODIES)
def test_a_value_of_the_wrong_shape_is_refused_as_such_exactly_where_the_document_says_so(path: str) -> None:
    """Values of the right shape may be refused too, but as values."""
    name, plain, fields = BODIES[path]
    validator = Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document()["components"]})
    for field in fields:
        for value in VALUES:
            body = {**plain, "parameters": {field: value}} if path == "/generate" else {**plain, field: value}
            is_told = validator.is_valid(body["parameters"] if path == "/generate" else body)
            try:
                decode_request(path, "application/json", json.dumps(body).encode(), LIMITS)
            except RequestRefused as error:
                is_unsupported = error.code == "unsupported_parameter" or error.param == "suffix"
                is_shaped = not (is_unsupported or error.message.startswith("Failed to deserialize"))
            else:
                is_shaped = True
            assert is_shaped == is_told, (field, value)
