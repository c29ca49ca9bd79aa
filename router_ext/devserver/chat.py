"""Chat requests: the prompt a template makes of the messages, and the generate request they amount to."""

from __future__ import annotations

import datetime
from typing import Any

import jinja2
import jinja2.sandbox
import orjson

from router_ext.devserver.generation import GenerationFailed
from router_ext.devserver.schemas import default_parameters
from router_ext.devserver.tool_calls import NO_TOOL, tool_error
from router_ext.guard.grammar import functions_of, tool_schema

DEFAULT_TOOL_PROMPT = (
    "\nGiven the functions available, please respond with a JSON for a function call with its proper arguments that "
    "best answers the given prompt. Respond in the format {name: function name, parameters: dictionary of argument "
    "name and its value}.Do not use variables.\n"
)
_NO_TOOL = {
    "type": "function",
    "function": {
        "description": "Open ended response with no specific tool selected",
        "name": NO_TOOL,
        "arguments": {"type": "object"},
    },
}


class TemplateRaised(Exception):
    """A template called ``raise_exception``."""


class ChatTemplate:
    """A Jinja template with the variables and functions TGI gives it.

    Args:
        source: the template; None refuses every chat.
    """

    def __init__(self, source: str | None, *, bos_token: str | None, eos_token: str | None) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._uses_tools = source is not None and "tools" in source
        self._template: jinja2.Template | None = None
        if source is not None:
            environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
            environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
            self._template = environment.from_string(source)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, tool_prompt: str) -> str:
        """The prompt. A final assistant message is continued: cut after its content, trailing space removed.

        Raises:
            GenerationFailed: no template, or it does not render.
        """
        turns = [{"role": m["role"], "content": _content(m)} for m in messages]
        for turn, message in zip(turns, messages, strict=True):
            if message.get("name") is not None:
                turn["name"] = message["name"]
        if tools is not None and turns:
            listing = "" if self._uses_tools else f"{rust_json(tools)}\n"
            turns[-1]["content"] += f"\n---\n{listing}{tool_prompt}"
        if self._template is None:
            raise _template_error("template not found")
        try:
            text = self._template.render(messages=turns, add_generation_prompt=True, tools=tools, **self._tokens)
        except (jinja2.TemplateError, TemplateRaised, TypeError) as e:
            raise _template_error(f"invalid operation: {e} (in <string>:1)") from e
        if turns and turns[-1]["role"] == "assistant":
            content = turns[-1]["content"]
            at = text.rfind(content)
            if at >= 0:
                text = text[: at + len(content)].rstrip()
        return text


def _template_error(message: str) -> GenerationFailed:
    return GenerationFailed(message=f"Template error: {message}", error_type="template_error", status=422)


def _raise(message: str) -> None:
    raise TemplateRaised(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _content(message: dict[str, Any]) -> str:
    if "content" in message:
        return str(message["content"])
    return rust_json(
        [
            {
                "id": call["id"],
                "type": call["type"],
                "function": _function(call["function"], as_text=True),
            }
            for call in message["tool_calls"]
        ]
    )


def _function(function: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    """A function as serde writes it: its arguments are always JSON text."""
    arguments = function["arguments"]
    return {
        "description": function["description"],
        "name": function["name"],
        "arguments": rust_json(arguments) if as_text else arguments,
    }


def rust_json(value: Any) -> str:
    """Compact JSON; keys stay in the order in which they were sent."""
    return orjson.dumps(value).decode()


def chosen_tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Tools that take part in the request, or None.

    Raises:
        GenerationFailed: the tool asked for is not among them, or a response format is given as well.
    """
    tools: list[dict[str, Any]] | None = body["tools"]
    mode, name = body["tool_choice"]
    if not tools or mode == "none":
        return None
    if body["response_format"] is not None:
        raise tool_error("Grammar and tools are mutually exclusive")
    if mode == "function":
        tools = [t for t in tools if t["function"]["name"] == name][:1]
        if not tools:
            raise tool_error(f"Tool with name {name} not found")
    elif mode == "auto":
        tools = [*tools, _NO_TOOL]
    return [{"type": t["type"], "function": _function(t["function"], as_text=True)} for t in tools]


def next_call_id(body: dict[str, Any]) -> str:
    """Of a streamed call: how many messages with calls there are."""
    return str(sum("tool_calls" in message for message in body["messages"]))


def generate_parameters(body: dict[str, Any], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """``parameters`` of the generate request that a chat amounts to."""
    greedy = body["temperature"] == 0.0
    presence = body["presence_penalty"]
    grammar = body["response_format"]
    if tools:
        grammar = ("json", tool_schema(functions_of(body["tools"], *body["tool_choice"])))
    return default_parameters(do_sample=not greedy) | {
        "temperature": None if greedy else body["temperature"],
        "repetition_penalty": None if presence is None else presence + 2.0,
        "frequency_penalty": body["frequency_penalty"],
        "top_p": body["top_p"],
        "max_new_tokens": body["max_tokens"],
        "stop": body["stop"] or [],
        "details": True,
        "seed": body["seed"],
        "top_n_tokens": body["top_logprobs"],
        "grammar": grammar,
    }


def completion_parameters(body: dict[str, Any]) -> dict[str, Any]:
    """``parameters`` of the generate request of each prompt of a completion."""
    greedy = body["temperature"] == 0.0
    return default_parameters(do_sample=not greedy) | {
        "temperature": None if greedy else body["temperature"],
        "repetition_penalty": body["repetition_penalty"],
        "frequency_penalty": body["frequency_penalty"],
        "top_p": body["top_p"],
        "max_new_tokens": body["max_tokens"],
        "stop": body["stop"] or [],
        "details": True,
        "seed": body["seed"],
    }
