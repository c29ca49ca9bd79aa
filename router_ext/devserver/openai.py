"""OpenAI's endpoints as TGI has them: chat completions and completions."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import orjson

from router_ext.devserver import chat, schemas
from router_ext.devserver.admission import Admission
from router_ext.devserver.chat import ChatTemplate
from router_ext.devserver.endpoint import JSON, Identity, read_body, start_stream, timing_headers
from router_ext.devserver.generation import Generation, GenerationFailed
from router_ext.devserver.http import Exchange
from router_ext.devserver.sinks import ChatSink, Collected, CompletionSink, chat_logprob, usage_json
from router_ext.devserver.tool_calls import NO_TOOL, parse_call


class OpenAIEndpoints:
    """Each public method answers one exchange; ``chat_prompt`` is shared with the endpoints that only need the text."""

    def __init__(self, admission: Admission, identity: Identity, template: ChatTemplate) -> None:
        self._admission = admission
        self._identity = identity
        self._template = template
        self._again: set[asyncio.Task[None]] = set()

    async def chat(self, exchange: Exchange) -> None:
        await self.chat_body(exchange, read_body(exchange, schemas.CHAT))

    def chat_prompt(self, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]] | None]:
        """The text that the template makes of a chat, and the tools that take part.

        Raises:
            GenerationFailed: the template does not render, or a tool does not exist.
        """
        tools = chat.chosen_tools(body)
        tool_prompt = body["tool_prompt"] or chat.DEFAULT_TOOL_PROMPT
        try:
            return self._template.render(body["messages"], tools, tool_prompt), tools
        except GenerationFailed:
            self._admission.metrics.count("tgi_request_failure", 'err="template"')
            raise

    async def chat_body(self, exchange: Exchange, body: dict[str, Any]) -> None:
        self._admission.metrics.count("tgi_request_count")
        if body["stream"]:
            await self._stream_chat(exchange, body)
        else:
            await self._answer_chat(exchange, body)

    async def _stream_chat(self, exchange: Exchange, body: dict[str, Any], *, is_again: bool = False) -> None:
        """Start the stream; ``is_again``: generate without tools what was started with them."""
        prompt, tools = self.chat_prompt(body)
        parameters = chat.generate_parameters(body, tools)
        self._admission.metrics.count("tgi_request_count")

        def again(generation: Generation) -> None:
            self._admission.drop(generation)
            plain = {**body, "tools": None, "response_format": None}
            task = asyncio.get_running_loop().create_task(self._stream_chat(exchange, plain, is_again=True))
            self._again.add(task)
            task.add_done_callback(self._again.discard)

        sink = ChatSink(
            exchange,
            self._admission.codec,
            model=self._shown_model(body["model"]),
            fingerprint=self._identity.fingerprint,
            logprobs=bool(body["logprobs"]),
            include_usage=body["stream_options"].get("include_usage", False),
            call_id=chat.next_call_id(body) if tools else None,
            on_no_tool=again,
        )
        if not is_again:
            start_stream(exchange, self._identity, len(prompt))
        try:
            await self._admission.begin(exchange, prompt, parameters, sink, add_special_tokens=False)
        except GenerationFailed as e:
            sink.on_error(None, e)

    async def _answer_chat(self, exchange: Exchange, body: dict[str, Any]) -> None:
        prompt, tools, found = await self._collect_chat(exchange, body)
        message: dict[str, Any] = {"role": "assistant", "content": found.ending.generated_text}
        if tools:
            call = parse_call(found.ending.generated_text)
            if call.name == NO_TOOL:
                prompt, _, found = await self._collect_chat(exchange, {**body, "tools": None, "response_format": None})
                message["content"] = found.ending.generated_text
            else:
                function = {"description": None, "name": call.name, "arguments": call.arguments_json()}
                message = {"role": "assistant", "tool_calls": [{"id": "0", "type": "function", "function": function}]}
        ending = found.ending
        logprobs = (
            {"content": [chat_logprob(self._admission.codec, t) for t in found.tokens]} if body["logprobs"] else None
        )
        page = {
            "object": "chat.completion",
            "id": "",
            "created": int(time.time()),
            "model": self._shown_model(body["model"]),
            "system_fingerprint": self._identity.fingerprint,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": "stop" if ending.finish_reason == "eos_token" else ending.finish_reason,
                }
            ],
            "usage": orjson.Fragment(usage_json(found.generation.input_length, ending.generated_tokens)),
        }
        headers = [*JSON, *timing_headers(exchange, self._identity, [found], len(prompt), has_compute_time=True)]
        exchange.respond(200, headers, orjson.dumps(page))

    async def _collect_chat(
        self, exchange: Exchange, body: dict[str, Any]
    ) -> tuple[str, list[dict[str, Any]] | None, Collected]:
        """(prompt, tools that took part, finished generation)."""
        prompt, tools = self.chat_prompt(body)
        parameters = chat.generate_parameters(body, tools)
        self._admission.metrics.count("tgi_request_count")
        (found,) = await self._admission.collect(exchange, [prompt], parameters, add_special_tokens=False)
        return prompt, tools, found

    def _shown_model(self, asked: str | None) -> str:
        return self._identity.model_id if asked in (None, "tgi") else str(asked)

    async def completions(self, exchange: Exchange) -> None:
        await self.completion_body(exchange, read_body(exchange, schemas.COMPLETION))

    async def completion_body(self, exchange: Exchange, body: dict[str, Any]) -> None:
        self._admission.metrics.count("tgi_request_count")
        prompts: list[str] = body["prompt"]
        if body["suffix"] is not None:
            message = "Suffix is not supported and can be achieved by preprocessing the prompt."
            raise GenerationFailed(message=message, error_type="suffix not supported", status=422)
        limit = self._admission.limits.max_client_batch_size
        if len(prompts) > limit:
            message = f"Number of prompts exceeds the maximum allowed batch size of {limit}"
            raise GenerationFailed(message=message, error_type="batch size exceeded", status=422)
        parameters = chat.completion_parameters(body)
        self._admission.metrics.count("tgi_request_count", by=len(prompts))
        model = self._shown_model(body["model"])
        characters = sum(len(p) for p in prompts)
        if body["stream"]:
            sink = CompletionSink(exchange, model=model, fingerprint=self._identity.fingerprint, prompts=len(prompts))
            start_stream(exchange, self._identity, characters)
            for index, prompt in enumerate(prompts):
                try:
                    await self._admission.begin(
                        exchange,
                        prompt,
                        parameters,
                        sink,
                        add_special_tokens=True,
                        is_detached=True,
                        before_queueing=partial(sink.add, index=index),
                    )
                except GenerationFailed as e:
                    sink.on_error(None, e)
            return
        # TGI takes the prompt's token count from its details, and a prompt with details skips the prefix cache
        found = await self._admission.collect(
            exchange, prompts, parameters, add_special_tokens=True, uses_prefix_cache=False
        )
        prompt_tokens = sum(f.generation.input_length for f in found)
        completion_tokens = sum(f.ending.generated_tokens for f in found)
        page = {
            "object": "text_completion",
            "id": "",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": self._identity.fingerprint,
            "choices": [
                {
                    "index": i,
                    "text": f.ending.generated_text,
                    "logprobs": None,
                    "finish_reason": "stop" if f.ending.finish_reason == "eos_token" else f.ending.finish_reason,
                }
                for i, f in enumerate(found)
            ],
            "usage": orjson.Fragment(usage_json(prompt_tokens, completion_tokens)),
        }
        headers = [*JSON, *timing_headers(exchange, self._identity, found, characters, has_compute_time=False)]
        exchange.respond(200, headers, orjson.dumps(page))
