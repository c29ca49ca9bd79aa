"""What ``fairlane up`` leaves for the command line: addresses and demo keys of the embedded stack.

The file exists for the embedded stack only (mode 0600 in a folder of mode 0700); a real deployment has no such file.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from router_ext.errors import SettingsError
from router_ext.wire.decoding import NotDecoded


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``credentials.json``. ``tenants``: name to key. ``admin_url``: the router's port for operators."""

    router_url: str
    console_url: str
    pool: str
    operator_email: str
    operator_token: str
    tenants: dict[str, str]
    admin_url: str | None = None

    def tenant_key(self, name: str) -> str:
        """The demo tenant's key.

        Raises:
            SettingsError: no such tenant in the file.
        """
        try:
            return self.tenants[name]
        except KeyError:
            raise SettingsError(f"no key of tenant {name!r} (known: {', '.join(sorted(self.tenants))})") from None


def write_credentials(path: Path, credentials: Credentials) -> None:
    """Write atomically, readable by the owner alone."""
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(credentials), indent=2))
    temporary.replace(path)


def read_credentials(path: Path) -> Credentials:
    """Read the file of a started stack.

    Raises:
        SettingsError: missing or damaged, with what to do.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Credentials)
    except FileNotFoundError:
        raise SettingsError(f"{path} does not exist: start the stack with `make run` (or `fairlane up`)") from None
    except NotDecoded as problem:
        raise SettingsError(f"{path} is damaged ({problem}): `fairlane up` writes it anew") from None
