"""The control plane's REST API as ``apply`` and ``export`` need it: with versions, and refusals by field."""

from __future__ import annotations

import os
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from router_ext.errors import FairlaneError, SettingsError
from router_ext.ops.apply.kinds import Kind
from router_ext.ops.credentials import read_credentials

PAGE = 1_000
_TIMEOUT = aiohttp.ClientTimeout(total=60)


class Refused(FairlaneError):
    """The control plane said no. ``fields``: messages by field, where it named some."""

    def __init__(self, message: str, fields: Mapping[str, list[str]]) -> None:
        super().__init__(message)
        self.fields = fields


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


class Api:
    """Calls below ``/api/v1`` with one token. Use it as a context manager."""

    def __init__(self, url: str, token: str) -> None:
        self._url = f"{url}/api/v1"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Api:
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=_TIMEOUT)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The answer's object; empty where there is none. Redirects are not followed: they would take the token along.

        Raises:
            Refused: with the problem's words. SettingsError: nobody answers, or somebody else.
        """
        assert self._session is not None
        url = self._url + path
        try:
            async with self._session.request(method, url, json=body, headers=headers, allow_redirects=False) as answer:
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
            raise Refused(f"{answer.status}: {content.get('detail', content)}", content.get("errors") or {})
        return content

    async def all_of(self, kind: Kind) -> list[dict[str, Any]]:
        """Every object of a kind, the oldest first."""
        rows: list[dict[str, Any]] = []
        cursor = ""
        while True:
            page = await self.call("GET", f"/{kind.path}?limit={PAGE}{cursor}")
            rows += page["results"]
            if page["next"] is None:
                return rows[::-1]
            cursor = f"&cursor={page['next']}"

    async def create(self, kind: Kind, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Sent once, and taken once even if the connection breaks and somebody sends it again."""
        return await self.call("POST", f"/{kind.path}", fields, {"Idempotency-Key": uuid.uuid4().hex})

    async def update(self, kind: Kind, row: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Only if nobody has changed the row since it was read."""
        return await self.call("PATCH", f"/{kind.path}/{row['id']}", fields, headers=_if_match(row))

    async def delete(self, kind: Kind, row: Mapping[str, Any]) -> None:
        """Likewise. A tenant that is active is suspended first."""
        path = f"/{kind.path}/{row['id']}"
        if kind.path == "tenants" and row["state"] == "active":
            row = await self.call("POST", f"{path}/suspend", {"reason": "it is to be deleted"}, headers=_if_match(row))
        await self.call("DELETE", path, headers=_if_match(row))


def _if_match(row: Mapping[str, Any]) -> dict[str, str]:
    return {"If-Match": f'"{row["version"]}"'}
