"""OpenAI's Responses API on the wire: the response object, its output items, and the events of a streamed one.

    events = ResponseEvents(frame, key="5f0c...", with_logprobs=False)
    send(events.text("Hel") + events.text("lo"))             # the first opens the response and the message
    send(events.call("get_weather") + events.arguments('{"city":'))
    send(events.end("stop", prompt_tokens=9, output_tokens=3))

Every event is an ``event:`` line and a ``data:`` line with a ``sequence_number``; there is no ``[DONE]``. Ids are the
``key`` with a prefix, and the place of the item.

Source: OpenAI's API reference, and the types of the ``openai`` package 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

_dumps = orjson.dumps

Item = dict[str, Any]


def response_id(key: str) -> str:
    """The id of the response that ``key`` stands for."""
    return f"resp_{key}"


def message_item(key: str, place: int, text: str, *, status: str, logprobs: Sequence[Item] = ()) -> Item:
    """A message of the assistant."""
    return {
        "id": f"msg_{key}{place:02x}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [_part(text, logprobs)],
    }


def call_item(key: str, place: int, name: str, arguments: str, *, status: str) -> Item:
    """A call of a function. ``call_id`` is what the client's result refers to."""
    return {
        "id": f"fc_{key}{place:02x}",
        "type": "function_call",
        "status": status,
        "call_id": f"call_{key}{place:02x}",
        "name": name,
        "arguments": arguments,
    }


def response_object(
    frame: Mapping[str, Any],
    key: str,
    *,
    status: str,
    output: Sequence[Item] = (),
    usage: Item | None = None,
    error: Item | None = None,
) -> Item:
    """The response. ``frame``: what it says of its request: model, ``created_at``, and what is repeated."""
    return {
        "id": response_id(key),
        "object": "response",
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        **frame,
        "output": list(output),
        "usage": usage,
    }


def response_usage(prompt_tokens: int, output_tokens: int) -> Item:
    """``usage``; a backend tells nothing of its prefix cache, and nothing here is reasoning."""
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + output_tokens,
    }


def response_status(finish_reason: str | None) -> str:
    """``length`` leaves a response incomplete; every other end, TGI's words or OpenAI's, completes it."""
    return "incomplete" if finish_reason == "length" else "completed"


def response_logprob(token: str, logprob: float | None, top: Sequence[tuple[str, float | None]]) -> Item:
    """One token of ``logprobs``; a logprob that TGI could not tell (NaN) is null."""
    return {
        "token": token,
        "bytes": list(token.encode()),
        "logprob": logprob,
        "top_logprobs": [{"token": t, "bytes": list(t.encode()), "logprob": value} for t, value in top],
    }


def _part(text: str, logprobs: Sequence[Item] = ()) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


class ResponseEvents:
    """Events of one streamed response, in order. At most one item is open at a time.

    Attributes:
        has_begun: its first event has been written.
    """

    __slots__ = (
        "_arguments",
        "_call",
        "_delta_head",
        "_delta_tail",
        "_frame",
        "_key",
        "_logprobs",
        "_number",
        "_output",
        "_texts",
        "has_begun",
    )

    def __init__(self, frame: Mapping[str, Any], key: str) -> None:
        self._frame = frame
        self._key = key
        self._number = 0
        self._output: list[Item] = []
        self._texts: list[str] | None = None  # of the open message
        self._logprobs: list[Item] = []
        self._call: str | None = None  # name of the open call
        self._arguments: list[str] = []
        self._delta_head = self._delta_tail = b""
        self.has_begun = False

    def text(self, delta: str, logprobs: Sequence[Item] = ()) -> bytes:
        """More text of the message; without a delta (a special token, an unfinished character) it is only begun."""
        out = self._open_message()
        assert self._texts is not None
        self._logprobs += logprobs
        if not delta:
            return out
        self._texts.append(delta)
        number = self._number
        self._number = number + 1
        told = _dumps(list(logprobs)) if logprobs else b"[]"
        return b"".join((out, self._delta_head, _dumps(delta), b',"logprobs":', told, self._delta_tail % number))

    def call(self, name: str) -> bytes:
        """A function call begins."""
        out = self._begin() + self._close("completed")
        self._call = name
        item = call_item(self._key, len(self._output), name, "", status="in_progress")
        return out + self._event("response.output_item.added", output_index=len(self._output), item=item)

    def arguments(self, delta: str) -> bytes:
        """More of its arguments' text."""
        assert self._call is not None
        if not delta:
            return b""
        self._arguments.append(delta)
        return self._event(
            "response.function_call_arguments.delta",
            item_id=self._item_id("fc"),
            output_index=len(self._output),
            delta=delta,
        )

    def end(self, finish_reason: str | None, *, prompt_tokens: int, output_tokens: int) -> bytes:
        """Close what is open, and the response."""
        status = response_status(finish_reason)
        out = self._begin() if self._output or self._call is not None else self._open_message()
        out += self._close(status)
        usage = response_usage(prompt_tokens, output_tokens)
        return out + self._lifecycle(
            status, response_object(self._frame, self._key, status=status, output=self._output, usage=usage)
        )

    def failed(self, *, message: str, code: str, kind: str, param: str | None) -> bytes:
        """The response fails. The second event is what OpenAI's package raises an error for."""
        out = self._begin()
        if self._texts is not None or self._call is not None:
            self._output.append(self._item("incomplete"))
        told = code if code == "rate_limit_exceeded" else "server_error"
        error = {"code": told, "message": message}
        response = response_object(self._frame, self._key, status="failed", output=self._output, error=error)
        out += self._lifecycle("failed", response)
        body = {"message": message, "type": kind, "param": param, "code": code}
        return out + self._event("error", code=code, message=message, param=param, error=body)

    # --- parts ------------------------------------------------------------------------------------------------------

    def _begin(self) -> bytes:
        if self.has_begun:
            return b""
        self.has_begun = True
        response = response_object(self._frame, self._key, status="in_progress")
        return self._lifecycle("created", response) + self._lifecycle("in_progress", response)

    def _open_message(self) -> bytes:
        if self._texts is not None:
            return b""
        out = self._begin() + self._close("completed")
        self._texts = []
        place = len(self._output)
        item = {**message_item(self._key, place, "", status="in_progress"), "content": []}
        out += self._event("response.output_item.added", output_index=place, item=item)
        where = {"item_id": item["id"], "output_index": place, "content_index": 0}
        out += self._event("response.content_part.added", **where, part=_part(""))
        self._delta_head = b"event: response.output_text.delta\ndata: " + (
            _dumps({"type": "response.output_text.delta", **where})[:-1] + b',"delta":'
        )
        self._delta_tail = b',"sequence_number":%d}\n\n'
        return out

    def _close(self, status: str) -> bytes:
        """Finish the open item, if there is one."""
        place = len(self._output)
        if self._texts is not None:
            item = self._item(status)
            where = {"item_id": item["id"], "output_index": place, "content_index": 0}
            part = item["content"][0]
            out = self._event("response.output_text.done", **where, text=part["text"], logprobs=part["logprobs"])
            out += self._event("response.content_part.done", **where, part=part)
        elif self._call is not None:
            item = self._item(status)
            out = self._event(
                "response.function_call_arguments.done",
                item_id=item["id"],
                output_index=place,
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            return b""
        self._output.append(item)
        self._texts = self._call = None
        self._arguments, self._logprobs = [], []
        return out + self._event("response.output_item.done", output_index=place, item=item)

    def _item(self, status: str) -> Item:
        """The open item as it stands."""
        place = len(self._output)
        if self._call is not None:
            return call_item(self._key, place, self._call, "".join(self._arguments), status=status)
        return message_item(self._key, place, "".join(self._texts or ()), status=status, logprobs=self._logprobs)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._key}{len(self._output):02x}"

    def _lifecycle(self, what: str, response: Item) -> bytes:
        return self._event(f"response.{what}", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._number
        self._number = number + 1
        data = {"type": kind, "sequence_number": number, **fields}
        return b"event: " + kind.encode() + b"\ndata: " + _dumps(data) + b"\n\n"
