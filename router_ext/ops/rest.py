"""The control plane's REST API with one token: for commands, ``apply`` and ``export``."""

from __future__ import annotations

import asyncio
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from router_ext.errors import SettingsError
from router_ext.ops.credentials import read_credentials

APPLY_LIMIT_S = 10.0
"""How long a change may take to reach every router; two seconds are promised."""
PAGE = 1_000
_TIMEOUT = aiohttp.ClientTimeout(total=60)


class Refused(SettingsError):
    """The control plane said no. ``code``: of the problem; ``fields``: messages by field, where it named some."""

    def __init__(self, message: str, code: str, fields: Mapping[str, list[str]]) -> None:
        super().__init__(message)
        self.code = code
        self.fields = fields


def refusal(status: int, problem: Mapping[str, Any]) -> Refused:
    """What problem+json says."""
    return Refused(
        f"{status}: {problem.get('detail', problem)}", str(problem.get("code", "")), problem.get("errors") or {}
    )


def add_connection_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--url", help="the control plane (else FAIRLANE_URL)")
    parser.add_argument("--dir", type=Path, help="take address and token of the embedded stack in this state folder")


def connection_of(args: Namespace) -> tuple[str, str]:
    """Address and token: of the stack in ``--dir``, else of FAIRLANE_URL and FAIRLANE_TOKEN or FAIRLANE_TOKEN_FILE.

    Raises:
        SettingsError: something is missing.
    """
    if args.dir is not None:
        credentials = read_credentials(args.dir / "credentials.json")
        return credentials.console_url.rstrip("/"), credentials.operator_token
    url = args.url or os.environ.get("FAIRLANE_URL", "")
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"FAIRLANE_URL: {url!r} is no http:// or https:// address of a control plane")
    token = os.environ.get("FAIRLANE_TOKEN", "")
    path = os.environ.get("FAIRLANE_TOKEN_FILE")
    if not token and path:
        try:
            token = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"FAIRLANE_TOKEN_FILE: cannot read {path}: {error}") from None
    if not token.strip():
        raise SettingsError("FAIRLANE_TOKEN or FAIRLANE_TOKEN_FILE must hold an API token of the control plane")
    return url.rstrip("/"), token.strip()


class Rest:
    """Calls below ``/api/v1``. Without a session of the caller's it is used as a context manager."""

    def __init__(self, url: str, token: str, session: aiohttp.ClientSession | None = None) -> None:
        self._url = f"{url}/api/v1"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session = session

    async def __aenter__(self) -> Rest:
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer's object; empty where there is none. Redirects are not followed: they would take the token along.

        Raises:
            Refused: with the problem's words. SettingsError: nobody answers, or somebody else.
        """
        assert self._session is not None
        url = self._url + path
        try:
            async with self._session.request(
                method, url, json=body, headers=self._headers, allow_redirects=False
            ) as answer:
                if answer.status == 204:
                    return {}
                content = await answer.json(content_type=None)
        except (TimeoutError, aiohttp.ClientError) as error:
            raise SettingsError(f"{self._url} does not answer: {error or type(error).__name__}") from None
        except ValueError:
            raise SettingsError(f"{method} {url} answered no JSON: this is no control plane") from None
        if not isinstance(content, dict) or 300 <= answer.status < 400:
            raise SettingsError(f"{method} {url} answered {answer.status}: this is no control plane")
        if answer.status >= 400:
            raise refusal(answer.status, content)
        return content

    async def all_of(self, path: str) -> list[dict[str, Any]]:
        """Every object of a list, the oldest first."""
        rows: list[dict[str, Any]] = []
        cursor = ""
        while True:
            page = await self.call("GET", f"{path}?limit={PAGE}{cursor}")
            rows += page["results"]
            if page["next"] is None:
                return rows[::-1]
            cursor = f"&cursor={page['next']}"

    async def batch(self, operations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Status and body of each of many changes, which are made by one transaction."""
        answer = await self.call("POST", "/batch", {"operations": operations})
        results: list[dict[str, Any]] = answer["results"]
        return results

    async def pool(self, name: str) -> dict[str, Any] | None:
        """The pool of this name."""
        return next((pool for pool in await self.all_of("/pools") if pool["name"] == name), None)

    async def applied(self) -> None:
        """Wait until every live router runs the newest revision.

        Raises:
            SettingsError: after ``APPLY_LIMIT_S``.
        """
        begun = time.monotonic()
        revision = int((await self.call("GET", "/revisions?limit=1"))["results"][0]["number"])
        while True:
            routers = (await self.call("GET", "/routers"))["results"]
            applied = [int(r["applied_revision"] or 0) for r in routers if r["is_live"]]
            if applied and min(applied) >= revision:
                return
            if time.monotonic() - begun > APPLY_LIMIT_S:
                raise SettingsError(
                    f"revision {revision} was not applied within {APPLY_LIMIT_S:g} s (routers: {applied})"
                )
            await asyncio.sleep(0.1)
