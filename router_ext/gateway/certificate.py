"""The certificate of the port for clients follows its files: a renewed one is given to connections that begin then."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from router_ext.errors import SettingsError
from router_ext.gateway.server import load_certificate
from router_ext.obs.logs import get_logger
from router_ext.settings import RouterSettings

POLL_S = 2.0
"""How often the files are looked at."""

_log = get_logger(__name__)


async def follow_certificate(context: ssl.SSLContext, settings: RouterSettings, *, poll_s: float = POLL_S) -> None:
    """Read certificate and key again whenever one of the files changes; a pair that cannot be used changes nothing.

    The two are seldom replaced in one instant: a pair that does not fit yet is looked at again with the next change.
    """
    assert settings.tls_cert_file is not None
    assert settings.tls_key_file is not None
    files = (settings.tls_cert_file, settings.tls_key_file)
    seen = await asyncio.to_thread(_stamps, files)
    while True:
        await asyncio.sleep(poll_s)
        stamps = await asyncio.to_thread(_stamps, files)
        if stamps == seen:
            continue
        seen = stamps
        try:
            load_certificate(context, settings)
        except SettingsError as error:
            _log.error("certificate.refused", reason=error.message)
        else:
            _log.info("certificate.loaded", file=str(settings.tls_cert_file))


def _stamps(files: tuple[Path, ...]) -> list[tuple[int, int] | None]:
    """Modification time and inode of each, following links (as secrets are mounted in containers)."""
    stamps: list[tuple[int, int] | None] = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_mtime_ns, status.st_ino))
    return stamps
