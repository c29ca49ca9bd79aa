"""Predictor artifacts by digest: kept in a folder, fetched when missing, verified whenever they are read."""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path

from router_ext.errors import ArtifactRefused
from router_ext.sync.session import ControlPlaneSession, ControlPlaneUnavailable
from router_ext.sync.snapshot_file import write_atomically
from router_ext.wire.controlplane import ARTIFACT_PATH

MAX_ARTIFACT_BYTES = 128 << 20
KEPT_UNUSED = 4
"""Artifacts kept beside those in use, so that a roll back needs no transfer."""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


class ArtifactStore:
    """A folder of files named by the sha256 of their content."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    async def fetch(self, session: ControlPlaneSession, digest: str) -> bytes:
        """Bytes of an artifact, from the folder or else from the control plane.

        Raises:
            ArtifactRefused: the digest is none, or what came does not fit it.
            ControlPlaneUnavailable, ControlPlaneRefused: it could not be fetched.
        """
        if not _DIGEST.match(digest):
            raise ArtifactRefused(f"{digest[:80]!r} is not a sha256 digest")
        kept = await asyncio.to_thread(self.read, digest)
        if kept is not None:
            return kept
        answer = await session.request("GET", ARTIFACT_PATH + digest, timeout_s=60.0, max_bytes=MAX_ARTIFACT_BYTES)
        if answer.status != 200:
            raise ControlPlaneUnavailable(f"GET {ARTIFACT_PATH}{digest[:12]}: status {answer.status}")
        if hashlib.sha256(answer.body).hexdigest() != digest:
            raise ArtifactRefused(f"what came as artifact {digest[:12]} has another digest")
        await asyncio.to_thread(write_atomically, self.directory / digest, answer.body)
        return answer.body

    def read(self, digest: str) -> bytes | None:
        """Bytes of a kept artifact, None if there is none or it is damaged (then it is fetched again). Blocks."""
        path = self.directory / digest
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def prune(self, in_use: set[str]) -> None:
        """Remove all but the artifacts in use and the newest few others. Blocks."""
        if not self.directory.is_dir():
            return
        others = [path for path in self.directory.iterdir() if _DIGEST.match(path.name) and path.name not in in_use]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[KEPT_UNUSED:]:
            path.unlink(missing_ok=True)
