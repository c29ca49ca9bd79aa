"""Where ``fairlane top`` looks: the operators' ports of routers, and the token that opens them."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router_ext.errors import SettingsError
from router_ext.ops.credentials import read_credentials
from router_ext.settings import read_secret_file

LIMIT_S = 3.0
TOKEN_VARIABLE = "FAIRLANE_ADMIN_TOKEN"


@dataclass(frozen=True, slots=True)
class Look:
    """What one router said: its document, or why there is none."""

    url: str
    document: dict[str, Any] | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """One router's port for operators."""

    url: str
    token: str

    def look(self) -> Look:
        """Ask it now; waits ``LIMIT_S`` at most for each part of the answer."""
        request = urllib.request.Request(f"{self.url}/overview", headers={"Authorization": f"Bearer {self.token}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=LIMIT_S) as answer:
                document = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Look(self.url, None, "the token is not the router's" if error.code == 401 else str(error))
        except (OSError, http.client.HTTPException) as error:
            return Look(self.url, None, f"does not answer: {getattr(error, 'reason', error)}")
        except ValueError:
            return Look(self.url, None, "answers something that is no overview")
        if not isinstance(document, dict) or "pools" not in document:
            return Look(self.url, None, "answers something that is no overview")
        return Look(self.url, document)


def find_sources(urls: Sequence[str], *, token_file: Path | None, directory: Path) -> list[Source]:
    """The routers named by ``urls``, else the one of the stack whose state is in ``directory``.

    Raises:
        SettingsError: no token, no stack, or an address that is none.
    """
    if urls:
        token = _token(token_file)
        if token is None:
            raise SettingsError(
                f"--url needs the router's token: {TOKEN_VARIABLE}, {TOKEN_VARIABLE}_FILE or --token-file"
            )
        return [Source(_address(url), token) for url in urls]
    url = read_credentials(directory / "credentials.json").admin_url
    if url is None:
        raise SettingsError(f"{directory}/credentials.json names no admin port: start the stack again, or give --url")
    token = _token(token_file) or read_secret_file(str(directory / "secrets" / "admin_token"), "the state folder")
    return [Source(url, token)]


def look_at(sources: Sequence[Source]) -> list[Look]:
    """Ask all of them at once, in their order."""
    if len(sources) == 1:
        return [sources[0].look()]
    with ThreadPoolExecutor(max_workers=min(len(sources), 16)) as threads:
        return list(threads.map(Source.look, sources))


def _token(file: Path | None) -> str | None:
    if file is not None:
        return read_secret_file(str(file), "--token-file")
    path = os.environ.get(f"{TOKEN_VARIABLE}_FILE")
    if path:
        return read_secret_file(path, f"{TOKEN_VARIABLE}_FILE")
    return os.environ.get(TOKEN_VARIABLE) or None


def _address(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"--url: {url!r} is no http:// or https:// address")
    return url.rstrip("/")
