"""``fairlane ask``: one question with a tenant's key, the answer as it streams in.

Speaks to the router through the ``text-generation`` client: by default the chat API, with ``--raw`` TGI's own
``/generate_stream``, where the model continues the text as it stands.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
from text_generation import Client
from text_generation.types import ChatRequest, Message

from router_ext.errors import FairlaneError, SettingsError
from router_ext.ops.credentials import Credentials, read_credentials


class AskFailed(FairlaneError):
    """The router refused, failed, or could not be reached."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="the question; read from standard input when left out or `-`")
    parser.add_argument("--key", help="a tenant's key (else FAIRLANE_KEY, else a demo tenant's)")
    parser.add_argument("--tenant", default="chatbot", help="demo tenant whose key is used when none is given")
    parser.add_argument("--url", help="the router (else FAIRLANE_URL, else the running stack's)")
    parser.add_argument("--dir", type=Path, default=Path(os.environ.get("FAIRLANE_DIR", ".fairlane")), help="state")
    parser.add_argument("--model", default="tgi", help="model name or alias; `tgi` is the key's default pool")
    parser.add_argument("--tier", help="SLO tier of this request")
    parser.add_argument("--max-tokens", type=int, default=200, help="longest answer")
    parser.add_argument("--temperature", type=float, help="sample at this temperature (greedy when left out)")
    parser.add_argument("--seed", type=int, help="seed of sampling")
    parser.add_argument("--raw", action="store_true", help="no chat: let the model continue the text")
    parser.add_argument("--json", action="store_true", help="one JSON object with the answer and its times on stdout")


def run(args: argparse.Namespace) -> int:
    prompt = _prompt(args.prompt)
    url, key = _address(args)
    headers = {"Authorization": f"Bearer {key}"} | ({"X-Fairlane-Tier": args.tier} if args.tier else {})
    client = _ChatClient(url, headers=headers, timeout=600)
    pieces = _raw(client, prompt, args) if args.raw else client.stream_chat(prompt, args)
    started, first, text, finish = time.monotonic(), None, "", None
    try:
        for piece, reason in pieces:
            first = first if first is not None else time.monotonic() - started
            text += piece
            finish = reason or finish
            if not args.json:
                print(piece, end="", flush=True)
    except requests.ConnectionError as error:
        if first is None and "Connection refused" in str(error):
            raise AskFailed(f"nobody listens at {url}: start the stack with `make run` (or `fairlane up`)") from None
        raise AskFailed(f"the connection to {url} broke: {error}") from None
    except requests.RequestException as error:
        raise AskFailed(f"no answer from {url}: {error}") from None
    if finish is None:
        raise AskFailed("the answer broke off")
    if args.json:
        times = {"ttft_ms": None if first is None else first * 1000, "seconds": time.monotonic() - started}
        print(json.dumps({"text": text, "finish_reason": finish, **times}))
    else:
        print()
    return 0


def _prompt(words: list[str]) -> str:
    if words and words != ["-"]:
        return " ".join(words)
    if not words and sys.stdin.isatty():
        print("Your question, then Ctrl-D:", file=sys.stderr)
    text = sys.stdin.read().strip()
    if not text:
        raise AskFailed("there is no question")
    return text


def _address(args: argparse.Namespace) -> tuple[str, str]:
    key = args.key or os.environ.get("FAIRLANE_KEY")
    url = args.url or os.environ.get("FAIRLANE_URL")
    credentials: Credentials | None = None
    try:
        credentials = read_credentials(args.dir / "credentials.json")
    except SettingsError:
        if not key:
            raise
    if not key:
        assert credentials is not None
        key = credentials.tenant_key(args.tenant)
    if not url:
        port = os.environ.get("FAIRLANE_ROUTER_PORT", "8080")
        url = credentials.router_url if credentials is not None else f"http://127.0.0.1:{port}"
    return url.rstrip("/"), key


def _raw(client: Client, prompt: str, args: argparse.Namespace) -> Iterator[tuple[str, str | None]]:
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature is not None else {}
    stream = client.generate_stream(prompt, max_new_tokens=args.max_tokens, seed=args.seed, **sampling)
    try:
        for response in stream:
            finish = response.details.finish_reason.value if response.details is not None else None
            yield ("" if response.token.special else response.token.text), finish
    except (requests.RequestException, FairlaneError):
        raise
    except Exception as error:  # the client has no common base of its errors
        raise AskFailed(str(error)) from None


class _ChatClient(Client):  # type: ignore[misc]
    """The client's own ``chat(stream=True)`` fails on TGI's closing ``[DONE]`` and passes over refusals in silence."""

    def stream_chat(self, prompt: str, args: argparse.Namespace) -> Iterator[tuple[str, str | None]]:
        request = ChatRequest(
            model=args.model,
            messages=[Message(role="user", content=prompt)],
            stream=True,
            max_tokens=args.max_tokens,
            # Without one the chat API would sample at 1.0, unlike /generate_stream.
            temperature=0.0 if args.temperature is None else args.temperature,
            seed=args.seed,
        )
        body = request.model_dump(exclude_none=True)
        address = f"{self.base_url}/v1/chat/completions"
        with requests.post(address, json=body, headers=self.headers, timeout=self.timeout, stream=True) as answer:
            if answer.status_code != 200:
                raise AskFailed(f"{answer.status_code}: {_reason(answer.text)}")
            for line in answer.iter_lines(chunk_size=1):
                data = line.removeprefix(b"data:").strip()
                if data == line.strip() or data == b"[DONE]":
                    continue
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise AskFailed(_reason(data.decode()))
                for choice in event.get("choices", []):
                    yield choice["delta"].get("content") or "", choice.get("finish_reason")


def _reason(body: str) -> str:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return body[:500]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
