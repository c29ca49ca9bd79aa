"""One HTTP session to the control plane: bearer token, bounded answers, two kinds of failure, jittered backoff."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from router_ext.errors import FairlaneError


class ControlPlaneUnavailable(FairlaneError):
    """No usable answer: connection, timeout, 5xx, 429, 401. Worth another try later.

    ``retry_after_s`` is what the answer asked for, None if nothing. ``is_server_fault``: it was a 500, which may be
    the fault of what was sent.
    """

    is_server_fault = False


class ControlPlaneRefused(FairlaneError):
    """The control plane understood and will not take it (4xx other than 401, 403, 404, 408, 429)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers and whole body of an answer; of ``request`` below 400, or 404."""

    status: int
    headers: Mapping[str, str]
    body: bytes


_LATER = frozenset((401, 403, 408, 425, 429))


class ControlPlaneSession:
    """Requests to the control plane; open inside a running loop, close when done.

    Redirects are not followed (the token belongs to one address), proxies of the environment are not used.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}", "Accept": "application/json"},
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        max_bytes: int,
    ) -> Answer:
        """Send one request and read the whole answer.

        Raises:
            ControlPlaneUnavailable: try again later.
            ControlPlaneRefused: trying the same again is futile.
        """
        answer = await self.exchange(
            method, path, body=body, headers=headers, timeout_s=timeout_s, max_bytes=max_bytes
        )  # fmt: skip
        status = answer.status
        if status in (404,) or status < 300 or status == 304:
            return answer
        message = f"{method} {path}: status {status}"
        if status >= 500 or status in _LATER or status < 400:
            failure = ControlPlaneUnavailable(message, retry_after_s=_seconds(answer.headers.get("retry-after")))
            failure.is_server_fault = status == 500
            raise failure
        raise ControlPlaneRefused(f"{message}: {answer.body[:200].decode(errors='replace')}")

    async def exchange(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        max_bytes: int,
    ) -> Answer:
        """As ``request``, with every status an answer.

        Raises:
            ControlPlaneUnavailable: there was none.
        """
        sent = dict(headers or {})
        if body is not None:
            sent["Content-Type"] = "application/json"
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=body,
                headers=sent,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s, connect=min(timeout_s, 5.0)),
            ) as response:
                content = await _read(response, max_bytes)
                status, answered = response.status, dict(response.headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ControlPlaneUnavailable(f"{method} {path}: {type(error).__name__} {error}".rstrip()) from error
        return Answer(status, {name.lower(): value for name, value in answered.items()}, content)

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    # Unlike a join at the end, it copies nothing twice: 30 MB at once would hold the loop for 10 ms.
    buffer = io.BytesIO()
    n_bytes = 0
    async for part in response.content.iter_chunked(1 << 18):
        n_bytes += len(part)
        if n_bytes > max_bytes:
            raise aiohttp.ClientPayloadError(f"the answer is larger than {max_bytes} bytes")
        buffer.write(part)
    return buffer.getvalue()


def _seconds(text: str | None) -> float | None:
    if text is None or not text.isascii() or not text.isdigit():
        return None
    return min(float(text), 120.0)


class Backoff:
    """Delays between tries: doubling from ``first_s`` to ``limit_s``, each drawn evenly from its upper half."""

    def __init__(self, *, first_s: float, limit_s: float, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._rng = rng or random.Random()  # jitter only: many routers must not return in step
        self._n_failures = 0

    def reset(self) -> None:
        """A try succeeded."""
        self._n_failures = 0

    def next_s(self, at_least_s: float | None = None) -> float:
        """The next delay; ``at_least_s`` is what the other side asked for."""
        whole = min(self._limit_s, self._first_s * 2.0 ** min(self._n_failures, 30))
        self._n_failures += 1
        return max(self._rng.uniform(whole / 2, whole), at_least_s or 0.0)
