"""Configuration from the control plane: long poll, check, apply, keep a copy; the last good one always serves."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import structlog

from router_ext.core.config import ConfigError
from router_ext.errors import ArtifactRefused, SnapshotRefused
from router_ext.obs import collector
from router_ext.sync.artifacts import ArtifactStore
from router_ext.sync.ledger import now_us
from router_ext.sync.saved_snapshot import SavedSnapshot
from router_ext.sync.session import (
    Answer,
    Backoff,
    ControlPlaneRefused,
    ControlPlaneSession,
    ControlPlaneUnavailable,
)
from router_ext.sync.snapshot_file import LARGE_BYTES, MAX_SNAPSHOT_BYTES, decode_snapshot, let_go, remove_parts
from router_ext.wire.controlplane import (
    BASE_HEADER,
    LONG_POLL_S,
    SNAPSHOT_PATH,
    ArtifactRecord,
    ConfigSnapshot,
    SnapshotDelta,
)
from router_ext.wire.deltas import decode_deltas, follow, keep_same

log = structlog.get_logger(__name__)

Apply: TypeAlias = Callable[[ConfigSnapshot], Awaitable[None] | None]
OnArtifact: TypeAlias = Callable[[str, ArtifactRecord, bytes], Awaitable[None] | None]
OnArtifactRefused: TypeAlias = Callable[[str, ArtifactRecord, str], None]

_LEAST_POLL_S = 0.5
"""Least time of one poll that brings nothing: a control plane that does not hold the poll is not hammered."""


class ConfigClient:
    """Follows the published revision and hands each one to ``apply``: by deltas from the one in force where it can.

    Records that have not changed are the very objects of the snapshot before, in whatever way it came.

    ``apply`` raises ``SnapshotRefused`` (or ``ConfigError``) to refuse; whatever it raises, the last good revision
    stays and the refusal is reported by the attributes below, hence by the heartbeat. A refused revision is not tried
    again until another one is published. ``on_artifact`` gets the bytes of each pool's predictor and length model,
    verified, once per digest, when they are in the folder; it raises ``ArtifactRefused`` to keep what it has.
    ``on_artifact_refused`` is told why one is not used.

    Attributes:
        snapshot: the revision in force, None before the first.
        applied_at_us: when it was applied here. last_error: why the newest poll failed, None while all is well.
    """

    def __init__(
        self,
        session: ControlPlaneSession,
        directory: Path,
        *,
        apply: Apply,
        on_artifact: OnArtifact | None = None,
        on_artifact_refused: OnArtifactRefused | None = None,
        on_changed: Callable[[], None] | None = None,
        long_poll_s: int = LONG_POLL_S,
        rng: random.Random | None = None,
    ) -> None:
        """``directory`` holds ``snapshot.json`` and ``artifacts/``. ``on_changed``: something to report was decided."""
        self.snapshot: ConfigSnapshot | None = None
        self.applied_at_us = 0
        self.refused_revision: int | None = None
        self.refused_reason: str | None = None
        self.last_error: str | None = None
        self._session = session
        self._directory = directory
        self._saved = SavedSnapshot(directory)
        self._wants_whole = False
        self._store = ArtifactStore(directory / "artifacts")
        self._apply = apply
        self._on_artifact = on_artifact
        self._on_artifact_refused = on_artifact_refused
        self._on_changed = on_changed
        self._long_poll_s = long_poll_s
        self._etag: str | None = None
        self._backoff = Backoff(first_s=0.2, limit_s=2.0, rng=rng)
        self._artifact_backoff = Backoff(first_s=0.5, limit_s=30.0, rng=rng)
        self._ready = asyncio.Event()
        self._changed = asyncio.Event()
        self._loaded: dict[tuple[str, str], str] = {}

    @property
    def applied_revision(self) -> int:
        """Revision in force, 0 before the first."""
        return self.snapshot.revision if self.snapshot else 0

    def save_at(self, directory: Path) -> None:
        """Keep the copy on disk in this folder from here on, whole at first: what is there may be another process's."""
        self._saved = SavedSnapshot(directory)
        self._wants_whole = True

    async def wait_ready(self) -> None:
        """Return once a revision is in force."""
        await self._ready.wait()

    async def load_saved(self) -> bool:
        """Apply the copy on disk, so that a router starts without its control plane. False if there is no good one."""
        for folder in (self._directory, self._store.directory):
            await asyncio.to_thread(remove_parts, folder)
        try:
            is_good = await self._consider(self._saved.read, is_saved=True, is_large=True)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.error("config.saved_copy_unreadable", reason=error.strerror)
            return False
        if is_good and self.snapshot is not None:
            self._etag = f'"{self.snapshot.digest}"'
        elif not is_good:
            await asyncio.to_thread(self._saved.set_aside)
        return is_good

    async def run(self) -> None:
        """Poll, apply and fetch artifacts until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            if self._on_artifact is not None:
                tasks.create_task(self._follow_artifacts(self._on_artifact))

    async def _follow(self) -> None:
        while True:
            started = time.monotonic()
            try:
                is_news = await self.poll()
            except (ControlPlaneUnavailable, ControlPlaneRefused) as error:
                if self.last_error is None:
                    log.warning("config.poll_failed", reason=error.message, serving_revision=self.applied_revision)
                self.last_error = error.message
                await asyncio.sleep(self._backoff.next_s(error.retry_after_s))
                continue
            if self.last_error is not None:
                log.info("config.poll_resumed", serving_revision=self.applied_revision)
            self.last_error = None
            self._backoff.reset()
            if not is_news:
                await asyncio.sleep(max(0.0, _LEAST_POLL_S - (time.monotonic() - started)))

    async def poll(self) -> bool:
        """One long poll; True if it brought another revision, applied or refused.

        Raises:
            ControlPlaneUnavailable, ControlPlaneRefused: no answer, or one that is damaged.
        """
        headers = {"If-None-Match": self._etag} if self._etag else {}
        path = f"{SNAPSHOT_PATH}?wait_s={self._long_poll_s}"
        if self.snapshot is not None and not self._wants_whole and not self._saved.is_long:
            path += f"&base={self.snapshot.digest}"
        answer = await self._session.request(
            "GET",
            path,
            headers=headers,
            timeout_s=self._long_poll_s + 30.0,
            max_bytes=MAX_SNAPSHOT_BYTES,
        )
        if answer.status == 304:
            return False
        if answer.status != 200:
            raise ControlPlaneUnavailable(f"nothing is published yet (status {answer.status})")
        return await self._receive(answer)

    async def _receive(self, answer: Answer) -> bool:
        before = None if self.snapshot is None else self.snapshot.digest
        deltas: list[tuple[SnapshotDelta, bytes]] = []
        if BASE_HEADER.lower() in answer.headers:
            try:
                deltas = await asyncio.to_thread(decode_deltas, answer.body)
                following = await asyncio.to_thread(self._follow_deltas, [delta for delta, _ in deltas])
            except SnapshotRefused as error:
                # What leads nowhere is made up for by the whole.
                self._wants_whole = True
                raise ControlPlaneUnavailable(error.message) from error
            is_taken = await self._consider(lambda: following, is_large=False)
        else:
            is_large = len(answer.body) > LARGE_BYTES
            is_taken = await self._consider(lambda: self._decode(answer.body), is_large=is_large)
        if not is_taken and self.refused_revision is None:
            # A damaged transfer is fetched again; a revision that was refused for its content is not.
            raise ControlPlaneUnavailable(self.refused_reason or "damaged snapshot")
        self._etag = answer.headers.get("etag")
        if not is_taken:
            return True
        if not deltas:
            self._wants_whole = False
        is_news = self.snapshot is not None and self.snapshot.digest != before
        if is_news:
            try:
                if deltas:
                    await asyncio.to_thread(self._saved.append, [raw for _, raw in deltas])
                else:
                    await asyncio.to_thread(self._saved.write, answer.body)
            except OSError as error:  # it serves; only a start without the control plane would be on the older one
                log.error("config.not_saved", revision=self.applied_revision, reason=error.strerror)
                # Deltas would lead on from a whole that is not there.
                self._wants_whole = not deltas
        return is_news

    def _follow_deltas(self, deltas: list[SnapshotDelta]) -> ConfigSnapshot:
        if self.snapshot is None:
            raise SnapshotRefused("deltas came, and there is nothing they could go from")
        return follow(self.snapshot, deltas)

    def _decode(self, body: bytes) -> ConfigSnapshot:
        snapshot = decode_snapshot(body)
        if self.snapshot is not None:
            keep_same(snapshot, self.snapshot)
        return snapshot

    async def _consider(self, load: Callable[[], ConfigSnapshot], *, is_large: bool, is_saved: bool = False) -> bool:
        """Load off the loop, check and apply. False if it was refused. ``is_large``: a whole one of many records.

        Raises:
            OSError: from ``load``.
        """
        revision: int | None = None
        try:
            with collector.keeping() if is_large else contextlib.nullcontext():
                snapshot = await asyncio.to_thread(load)
                revision = snapshot.revision
                if self.snapshot is not None and snapshot.digest == self.snapshot.digest:
                    self.refused_revision = self.refused_reason = None
                    return True
                result = self._apply(snapshot)
                if inspect.isawaitable(result):
                    await result
        except OSError:
            if revision is None:
                raise
            log.exception("config.apply_failed", revision=revision)
            self._refuse(revision, "could not be applied: OSError", is_saved=is_saved)
            return False
        except (SnapshotRefused, ConfigError) as error:
            self._refuse(revision, str(error), is_saved=is_saved)
            return False
        except Exception as error:  # a revision that trips a defect must not take the router down
            log.exception("config.apply_failed", revision=revision)
            self._refuse(revision, f"could not be applied: {type(error).__name__}", is_saved=is_saved)
            return False
        before, self.snapshot = self.snapshot, snapshot
        self.applied_at_us = now_us()
        self.refused_revision = self.refused_reason = None
        self._ready.set()
        self._changed.set()
        log.info("config.applied", revision=snapshot.revision, digest=snapshot.digest[:12], saved_copy=is_saved)
        self._report()
        if before is not None:
            box = [before]
            del before
            await asyncio.to_thread(let_go, box, lambda old: [list(old.keys), list(old.tenants)])
        return True

    def _refuse(self, revision: int | None, reason: str, *, is_saved: bool) -> None:
        self.refused_revision = revision
        self.refused_reason = reason
        log.error(
            "config.refused",
            revision=revision,
            reason=reason,
            saved_copy=is_saved,
            serving_revision=self.applied_revision,
        )
        self._report()

    def _report(self) -> None:
        if self._on_changed is not None:
            self._on_changed()

    # --- artifacts -------------------------------------------------------------------------------------------------

    async def _follow_artifacts(self, on_artifact: OnArtifact) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while not await self._load_artifacts(on_artifact):
                delay_s = self._artifact_backoff.next_s()
                try:
                    async with asyncio.timeout(delay_s):
                        await self._changed.wait()
                except TimeoutError:
                    continue
                self._changed.clear()
            self._artifact_backoff.reset()

    async def _load_artifacts(self, on_artifact: OnArtifact) -> bool:
        """Load what the revision in force names and is not loaded. False if something has to be tried again."""
        if self.snapshot is None:
            return True
        is_complete = True
        wanted = {
            (pool.pool, use): record
            for pool in self.snapshot.pools
            for use, record in (("predictor", pool.predictor), ("length_model", pool.length_model))
            if record is not None
        }
        for (pool, use), record in wanted.items():
            if self._loaded.get((pool, use)) == record.digest:
                continue
            try:
                data = await self._store.fetch(self._session, record.digest)
                result = on_artifact(pool, record, data)
                if inspect.isawaitable(result):
                    await result
            except (ControlPlaneUnavailable, ControlPlaneRefused, OSError) as error:
                log.warning("artifact.not_fetched", pool=pool, digest=record.digest[:12], reason=str(error))
                is_complete = False
                continue
            except ArtifactRefused as error:
                log.error("artifact.refused", pool=pool, digest=record.digest[:12], reason=error.message)
                if self._on_artifact_refused is not None:
                    self._on_artifact_refused(pool, record, error.message)
            else:
                log.info("artifact.loaded", pool=pool, digest=record.digest[:12], kind=record.kind)
            self._loaded[pool, use] = record.digest
        for gone in self._loaded.keys() - wanted.keys():
            del self._loaded[gone]
        if is_complete:
            await asyncio.to_thread(self._store.prune, set(self._loaded.values()))
        return is_complete
