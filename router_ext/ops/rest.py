"""The control plane's REST API with an operator's token, for commands against the running stack."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp

from router_ext.errors import SettingsError
from router_ext.ops.credentials import Credentials

APPLY_LIMIT_S = 10.0
"""How long a change may take to reach every router; two seconds are promised."""


class Rest:
    """Calls below ``/api/v1``; whatever is refused raises with the answer's words."""

    def __init__(self, session: aiohttp.ClientSession, credentials: Credentials) -> None:
        self._session = session
        self._url = f"{credentials.console_url}/api/v1"
        self._headers = {"Authorization": f"Bearer {credentials.operator_token}"}

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer's object; empty where there is none.

        Raises:
            SettingsError: it was refused.
        """
        async with self._session.request(method, self._url + path, json=body, headers=self._headers) as answer:
            if answer.status >= 400:
                raise SettingsError(f"{method} {path} answered {answer.status}: {(await answer.text())[:300]}")
            result: dict[str, Any] = await answer.json() if answer.status != 204 else {}
            return result

    async def pool(self, name: str) -> dict[str, Any] | None:
        """The pool of this name."""
        for pool in (await self.call("GET", "/pools?limit=1000"))["results"]:
            if pool["name"] == name:
                found: dict[str, Any] = pool
                return found
        return None

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
