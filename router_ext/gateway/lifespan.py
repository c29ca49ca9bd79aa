"""One router process: configuration in, engines running, books kept, and an orderly end.

start   open the ledger (booking what a killed predecessor left), apply the saved snapshot; go on with the saved
        counters, or with the counters and requests of the router that is replaced; listen
run     follow the control plane; each new snapshot is validated whole, then applied to every pool
drain   SIGTERM: readiness false at once, new requests refused, running ones go on up to the limit
leave   replaced by another process (``gateway.handover``): no connection is accepted, what is open is served on
stop    the rest ends with a clear error, usage is flushed, sockets close
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from router_ext import __version__
from router_ext.backends.base import Backend
from router_ext.backends.tgi import TgiBackend
from router_ext.core.ids import BackendId
from router_ext.errors import ArtifactRefused, FairlaneError, NoBackend, SettingsError, SnapshotRefused
from router_ext.gateway.configure import Directory
from router_ext.gateway.engine import PoolEngine
from router_ext.gateway.foresight import ABSURD, DOWN, LATE, Predictions
from router_ext.gateway.guarding import Guarding
from router_ext.gateway.handover import SOCKET_NAME, Leaver, listen_at
from router_ext.gateway.limits import SWEEP_S, Limiter
from router_ext.gateway.pool_states import pool_states, state_word
from router_ext.gateway.refused import Refusals
from router_ext.gateway.succession import Greeting, Succession
from router_ext.guard.service import Guard
from router_ext.obs import collector
from router_ext.obs.logs import get_logger
from router_ext.obs.metrics import BackendReading, Metrics, PoolReading, Readings, TenantReading
from router_ext.obs.tracing import PassedOn, Tracing
from router_ext.predict.baseline import KIND, Baseline
from router_ext.settings import RouterSettings, load_backend_key, read_peppers, variable_of
from router_ext.sync.artifacts import ArtifactStore
from router_ext.sync.counters import CountersFile
from router_ext.sync.generations import adopt_books, leaving_folder
from router_ext.sync.ledger import Ledger, now_us
from router_ext.sync.link import ControlPlaneLink
from router_ext.sync.quota import QuotaBook
from router_ext.sync.session import Answer, ControlPlaneUnavailable
from router_ext.sync.snapshot_file import LARGE_BYTES, decode_snapshot, let_go
from router_ext.wire.controlplane import (
    ArtifactRecord,
    BackendRecord,
    ConfigSnapshot,
    Heartbeat,
    MovedKey,
    PoolRecord,
)
from router_ext.wire.deltas import keep_same
from router_ext.wire.handover import Moved

SNAPSHOT_FILE_POLL_S = 0.2
"""How often a snapshot file given in place of a control plane is looked at."""

_MOVES_EVERY_S = 60.0

ADOPT_INTERVAL_S = 1.0
"""How often it is looked whether a router that was replaced has ended."""

LEAVE_IDLE_S = 5.0
"""How long a router that was replaced waits for another request on connections on which nothing happens."""

LEAVE_LOOK_S = 0.05

LENGTH_MODEL = "mixture"
"""Kind of an artifact that the prediction worker loads."""

_log = get_logger(__name__)


class Router:
    """Everything of one process but its sockets.

    Attributes:
        directory: the snapshot in force, None before the first.
        active: generation requests inside the process, those being measured included.
        refusals: requests that were refused before their pool was known.
    """

    def __init__(
        self, settings: RouterSettings, *, greeting: Greeting | None = None, sockets: Sequence[socket.socket] = ()
    ) -> None:
        """``greeting``: the router to be replaced. ``sockets``: those a successor is given (``handover.Leaver``)."""
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.metrics = Metrics(self.readings)
        self.executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self.directory: Directory | None = None
        self.engines: dict[str, PoolEngine] = {}
        self.ledger: Ledger
        self._counters: CountersFile
        self.is_draining = False
        self.active = 0
        self._link: ControlPlaneLink | None = None
        self._tasks: asyncio.TaskGroup
        self._engine_tasks: dict[str, asyncio.Task[None]] = {}
        self._refused: tuple[int, str] | None = None
        self._applied_at_us = 0
        self._peppers = settings.peppers
        self._moves_due_s = 0.0
        self._drained = asyncio.Event()
        self._listening = asyncio.Event()
        self._artifacts = ArtifactStore(settings.dir / "artifacts")
        self.is_leaving = False
        self.last_request_s = 0.0
        self.on_left: Callable[[], None] = _nothing
        self._greeting = greeting
        self._sockets = sockets
        self._seated = asyncio.Event()
        self._leaver: Leaver | None = None
        self._following: list[asyncio.Task[None]] = []
        self._predicting: asyncio.Task[None] | None = None
        self._guard = Guard()
        self.guarding = Guarding(self._guard, self.metrics)
        self.tracing = make_tracing(settings)
        self.refusals = Refusals()
        self.quotas = QuotaBook()
        self.limits = Limiter(self.quotas, clock=self.loop.time, lifetime_s=settings.request_limit_s)
        self.predictions = Predictions(settings, self.metrics, self.engines, on_changed=self._report)

    # --- life -------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        """Open the books and run everything in the background for the time of the block.

        Raises:
            SettingsError: another process uses the folder.
        """
        settings = self.settings
        self.ledger = Ledger.open(settings.dir, now_us=now_us())
        self.quotas.load(self.ledger.unsent())
        self.ledger.on_end = self.limits.end
        self.ledger.on_adopted = self.quotas.adopted
        self._counters = CountersFile(settings.dir / "counters.json")
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                background = [
                    tasks.create_task(self._once_seated(await self._start())),
                    tasks.create_task(self._once_seated(self._counters.run(self._save_counters))),
                    tasks.create_task(self._once_seated(self._adopt_books())),
                    tasks.create_task(self._guard.run()),
                    tasks.create_task(self._sweep_limits()),
                    *self._share_minutes(tasks),
                ]
                self._predicting = tasks.create_task(self._predict())
                background.append(self._predicting)
                try:
                    yield self
                finally:
                    for task in (*background, *self._following):
                        task.cancel()
                    for task in self._engine_tasks.values():
                        task.cancel()
                    for engine in self.engines.values():
                        engine.close()
                        await engine.backends.close()
            if self._link is not None:
                await self._link.close()
        finally:
            if self._seated.is_set() and not self.is_leaving:
                self._counters.write(self._save_counters(), is_last=True)
            await self.tracing.close()
            self.ledger.close()
            self.executor.shutdown(wait=False, cancel_futures=True)

    async def _once_seated(self, work: Coroutine[Any, Any, None]) -> None:
        """What another process does until this one has taken over."""
        try:
            await self._seated.wait()
        except asyncio.CancelledError:
            work.close()
            raise
        await work

    async def _adopt_books(self) -> None:
        """Deliver what routers that were replaced have left at their end, however they ended."""
        while not self.is_leaving:
            try:
                await adopt_books(self.ledger, self.settings.dir)
            except Exception:  # a defect in here must not take what is being served with it
                _log.exception("ledger.adoption_failed")
            await asyncio.sleep(ADOPT_INTERVAL_S)

    async def take_over(self) -> None:
        """Become the router that decides for this folder: at once, or in place of those that serve from it now.

        Raises:
            HandoverFailed: the one that serves goes on doing so.
        """
        succession = Succession(
            directory=self.settings.dir,
            greeting=self._greeting,
            engines=self.engines,
            limits=self.limits,
            restore=self._restore_counters,
        )
        await succession.wait_ready(limit_s=self.settings.take_over_limit_s)
        predecessors = await succession.take()
        if predecessors and self._link is not None:
            self._link.config.save_at(self.settings.dir)
        self._seated.set()
        for predecessor in predecessors:
            self._following.append(self._tasks.create_task(predecessor.follow()))
        leaver = self._leaver = Leaver(
            engines=self.engines,
            move=self._move_books,
            describe=self._describe,
            on_left=self._left,
            end_all=self._end_all,
            sockets=self._sockets,
        )
        self._following.append(self._tasks.create_task(leaver.run(listen_at(self.settings.dir))))

    def _move_books(self) -> None:
        """The successor keeps its books where ours are: ours go aside, with a door for further successors."""
        root = self.settings.dir
        if self.ledger.directory == root:
            self.ledger.move(leaving_folder(root))
            os.link(root / SOCKET_NAME, self.ledger.directory / SOCKET_NAME)

    def _describe(self) -> Moved:
        return Moved(
            pid=os.getpid(),
            folder=self.ledger.directory.name,
            revision=self.directory.revision if self.directory else 0,
            up={pool: [m.backend for m in engine.backends.up] for pool, engine in self.engines.items()},
        )

    def _left(self) -> None:
        """Another process decides from here on."""
        self.is_leaving = True
        self._counters.close()
        if self._link is not None:
            self._link.leave(self.ledger.directory)
        if self._predicting is not None:
            self._predicting.cancel()
        self.on_left()

    def begin_leave(self, finish: Callable[[], None], count_connections: Callable[[], int]) -> None:
        """Serve what is here and what still comes on open connections, then call ``finish``."""
        _log.info("router.leaving", running=self.active, limit_s=self.settings.leave_limit_s)
        self.last_request_s = self.loop.time()
        self._tasks.create_task(self._leave(finish, count_connections))

    async def _leave(self, finish: Callable[[], None], count_connections: Callable[[], int]) -> None:
        try:
            async with asyncio.timeout(self.settings.leave_limit_s):
                # A connection that is closed while its client sends is a failed request: idle ones get a while.
                while self.active or (count_connections() and not self._is_quiet):  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(LEAVE_LOOK_S)
        except TimeoutError:
            _log.warning("router.leave_limit", running=self.active)
            self._end_all(draining())
        finish()

    @property
    def _is_quiet(self) -> bool:
        return self.loop.time() - self.last_request_s >= LEAVE_IDLE_S

    def _end_all(self, error: FairlaneError) -> None:
        for engine in self.engines.values():
            engine.end_all(error)

    def listening(self) -> None:
        """The sockets are open: what serving does not depend on may start."""
        self._listening.set()
        self._guard.warm()

    async def _predict(self) -> None:
        if self.predictions.client is not None:
            await self._listening.wait()
            await self.predictions.client.run()

    def _share_minutes(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        settings = self.settings
        if settings.redis_url is None:
            return []
        from router_ext.sync.minutes import SharedMinutes  # redis-py is imported by those alone who use it

        shared = self.limits.shared = SharedMinutes(
            settings.redis_url.get_secret_value(), limit_s=settings.redis_timeout_s, windows=self.limits.windows
        )
        return [tasks.create_task(shared.run())]

    async def _sweep_limits(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            if lapsed := self.limits.sweep():
                _log.error("limits.lapsed", reservations=lapsed)

    def _report(self) -> None:
        """Tell the control plane soon."""
        if self._link is not None:
            self._link.heartbeat.notify()

    async def _start(self) -> Coroutine[Any, Any, None]:
        settings = self.settings
        if settings.snapshot_file is not None:
            await self._load_file()
            return self._follow_file()
        if not settings.controlplane_url or settings.token is None:
            raise SettingsError("neither a control plane nor a snapshot file is configured")
        self._link = ControlPlaneLink(
            url=settings.controlplane_url,
            token=settings.token.get_secret_value(),
            directory=settings.dir,
            router=settings.id,
            ledger=self.ledger,
            apply=self.apply,
            on_artifact=self.load_artifact,
            on_artifact_refused=self.refuse_artifact,
            build_heartbeat=self.heartbeat,
            quotas=self.quotas,
        )
        await self._link.start()
        return self._link.run()

    async def _load_file(self) -> None:
        path = self.settings.snapshot_file
        assert path is not None
        try:
            body = await asyncio.to_thread(path.read_bytes)
            with collector.keeping() if len(body) > LARGE_BYTES else contextlib.nullcontext():
                snapshot = await asyncio.to_thread(decode_snapshot, body)
                if self.directory is not None:
                    await asyncio.to_thread(keep_same, snapshot, self.directory.snapshot)
                await self.apply(snapshot)
            await self._load_kept(snapshot)
        except OSError as error:
            self._refused = (0, f"{path}: {error.strerror}")
        except SnapshotRefused as error:
            self._refused = (0, error.message)
        except Exception as error:  # a file that trips a defect must not take the router down
            _log.exception("config.apply_failed", path=str(path))
            self._refused = (0, f"could not be applied: {type(error).__name__}")
        else:
            self._refused = None
            return
        _log.error("config.refused", reason=self._refused[1])

    async def _load_kept(self, snapshot: ConfigSnapshot) -> None:
        """Without a control plane artifacts come from the router's folder alone."""
        for record in snapshot.pools:
            for artifact in (record.predictor, record.length_model):
                if artifact is None:
                    continue
                data = await asyncio.to_thread(self._artifacts.read, artifact.digest)
                try:
                    if data is None:
                        raise ArtifactRefused(
                            f"there is no whole artifact {artifact.digest[:12]} in the router's folder"
                        )
                    await self.load_artifact(record.pool, artifact, data)
                except ArtifactRefused as error:
                    self.refuse_artifact(record.pool, artifact, error.message)

    async def _follow_file(self) -> None:
        """Watch the snapshot file; keep the books' upkeep that the control plane's link does otherwise."""
        path = self.settings.snapshot_file
        assert path is not None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.ledger.run())
            seen = await asyncio.to_thread(_stamp, path)
            while True:
                await asyncio.sleep(SNAPSHOT_FILE_POLL_S)
                stamp = await asyncio.to_thread(_stamp, path)
                if stamp != seen:
                    seen = stamp
                    await self._load_file()

    def begin_drain(self, finish: Any) -> None:
        """SIGTERM: refuse what is new, let run what runs, then call ``finish``."""
        self.is_draining = True
        _log.info("router.draining", running=self.active, limit_s=self.settings.drain_limit_s)
        self._report()
        self._tasks.create_task(self._drain(finish))

    async def _drain(self, finish: Any) -> None:
        try:
            async with asyncio.timeout(self.settings.drain_limit_s):
                while self.active:
                    self._drained.clear()
                    await self._drained.wait()
        except TimeoutError:
            _log.warning("router.drain_limit", running=self.active)
            self._end_all(draining())
            # What is still being measured ends by the server's own limit.
        finish()

    def request_ended(self) -> None:
        """A generation request has left the process."""
        self.active -= 1
        if not self.active:
            self._drained.set()

    # --- configuration ----------------------------------------------------------------------------------------------

    def _make_directory(self, snapshot: ConfigSnapshot, before: Directory | None) -> Directory:
        """In a thread. Where a key needs a pepper that is not here, their file is looked at again: it may have come.

        Raises:
            SnapshotRefused
        """
        directory = Directory(snapshot, self._peppers, before)
        if directory.keys.without_pepper:
            try:
                found = read_peppers() or self._peppers
            except SettingsError as error:
                _log.error("config.peppers_unreadable", reason=error.message)
                found = self._peppers
            if directory.keys.without_pepper.keys() & found.keys():
                self._peppers = found
                _log.info("config.peppers_read_again", versions=sorted(found))
                directory = Directory(snapshot, found, before)
        if without := directory.keys.without_pepper:
            _log.error("config.keys_without_pepper", versions=sorted(without), keys=without.total())
        return directory

    async def apply(self, snapshot: ConfigSnapshot) -> None:
        """Validate a snapshot whole, then put it in force.

        Raises:
            SnapshotRefused: with the reason; the last good one keeps serving.
        """
        # Ten thousands of keys take a while; the loop goes on serving.
        before = self.directory
        directory = await asyncio.to_thread(self._make_directory, snapshot, before)
        clients: dict[str, Mapping[BackendId, Backend]] = {}
        new: dict[str, PoolEngine] = {}
        # Whatever may fail comes before whatever changes something.
        try:
            for pool, record in directory.pools.items():
                if pool in self.engines:
                    clients[pool] = self.engines[pool].prepare(record, snapshot, directory.roster)
                else:
                    new[pool] = self._make_engine(record, directory)
        except (OSError, ValueError, SettingsError) as error:
            raise SnapshotRefused(f"revision {snapshot.revision}: {error}") from error
        for pool, prepared in clients.items():
            self.engines[pool].apply(directory.pools[pool], snapshot, directory.roster, prepared)
        for pool, engine in new.items():
            if self._seated.is_set():
                self._restore_counters(pool, engine, None)
            self.engines[pool] = engine
            if self._leaver is not None:
                self._leaver.cover(pool, engine)
            self._engine_tasks[pool] = self._tasks.create_task(engine.run(), name=f"pool {engine.name}")
        for pool in [pool for pool in self.engines if pool not in directory.pools]:
            engine = self.engines.pop(pool)
            engine.end_all(NoBackend("This model is not served any more.", code="model_removed"))
            self.predictions.forget(pool)
            self._engine_tasks.pop(pool).cancel()
            engine.close()
        for pool, engine in self.engines.items():
            model = directory.pools[pool].length_model
            self.predictions.want(engine, None if model is None else model.digest)
        self.limits.apply(directory.limits, directory.ranks)
        if directory.has_new_quotas and self._link is not None and self._link.totals is not None:
            self._link.totals.notify(is_whole=True)
        self.directory = directory
        self._applied_at_us = now_us()
        if before is not None:
            box = [before]
            del before
            await asyncio.to_thread(let_go, box, Directory.parts)

    def _make_engine(self, record: PoolRecord, directory: Directory) -> PoolEngine:
        return PoolEngine(
            record=record,
            snapshot=directory.snapshot,
            roster=directory.roster,
            settings=self.settings,
            ledger=self.ledger,
            metrics=self.metrics,
            spawn=self._tasks.create_task,
            executor=self.executor,
            make_client=self._make_client,
            predictions=self.predictions,
        )

    def _restore_counters(self, pool: str, engine: PoolEngine, saved: Any) -> None:
        """A pool begins: who was ahead of whom, as the router before says, or as it was last saved."""
        kept = self._counters.take(pool)
        saved = kept if saved is None else saved
        if saved is not None:
            ignored = engine.scheduler.restore(saved, self.loop.time())
            _log.info("counters.restored", pool=engine.name, ignored=ignored)

    def _save_counters(self) -> dict[str, Any]:
        return {pool: engine.scheduler.save() for pool, engine in self.engines.items()}

    def _make_client(self, record: BackendRecord) -> Backend:
        settings = self.settings
        return TgiBackend(
            record.url,
            api_key=load_backend_key(record.api_key_name) if record.api_key_name else None,
            connect_timeout_s=settings.connect_timeout_s,
            idle_timeout_s=settings.upstream_idle_s,
            unary_timeout_s=settings.unary_timeout_s,
        )

    async def load_artifact(self, pool: str, record: ArtifactRecord, data: bytes) -> None:
        """Put a pool's fallback predictor in force, or hand its length model to the worker, which tells the outcome.

        Raises:
            ArtifactRefused: the one in force stays.
        """
        engine = self.engines.get(pool)
        if record.kind == LENGTH_MODEL:
            if engine is not None:
                self.predictions.load(engine, record.digest, self._artifacts.directory / record.digest)
            return
        if record.kind != KIND:
            raise ArtifactRefused(f"this router serves no predictor of kind {record.kind!r}")
        loaded = await asyncio.to_thread(Baseline.from_bytes, data)
        if engine is not None:
            engine.predictor, engine.predictor_digest = loaded, record.digest

    def refuse_artifact(self, pool: str, record: ArtifactRecord, reason: str) -> None:
        """What came as a pool's artifact cannot be used; the one in force stays."""
        engine = self.engines.get(pool)
        if engine is None or record.kind != LENGTH_MODEL:
            _log.error("artifact.refused", pool=pool, digest=record.digest[:12], reason=reason)
        else:
            self.predictions.refuse(engine, reason)

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Has a configuration and a usable backend, and is not draining."""
        return not self.is_draining and any(engine.backends.up for engine in self.engines.values())

    @property
    def has_control_plane(self) -> bool:
        return self._link is not None

    async def tenant_usage(self, key: str, query: str) -> Answer | None:
        """The usage report of a key's tenant from the control plane; None without an answer."""
        if self._link is None:
            return None
        try:
            return await self._link.tenant_usage(key, query)
        except ControlPlaneUnavailable:
            return None

    @property
    def totals_age_s(self) -> float | None:
        """How long ago the control plane told what is used of quotas; None: never, only this router's use is known."""
        return None if self._link is None or self._link.totals is None else self._link.totals.age_s

    def why_not_ready(self) -> str:
        """One sentence for the operator."""
        if self.is_draining:
            return "draining"
        if self.directory is None:
            return f"no configuration: {self._refused[1]}" if self._refused else "no configuration yet"
        return "no backend is up"

    def heartbeat(self) -> Heartbeat:
        """What this router does now."""
        config = self._link.config if self._link is not None else None
        return Heartbeat(
            router=self.settings.id,
            version=__version__,
            address=f"{self.settings.host}:{self.settings.port}",
            applied_revision=self.directory.revision if self.directory else 0,
            applied_at_us=self._applied_at_us,
            refused_revision=config.refused_revision if config else None,
            refused_reason=config.refused_reason if config else None,
            hazards=[hazard for engine in self.engines.values() for hazard in engine.suspects.recent],
            spool_events=self.ledger.pending_events,
            spool_bytes=self.ledger.pending_bytes,
            overflow_events=self.ledger.overflow_events,
            is_draining=self.is_draining,
            pools=pool_states(self.engines, now_us()),
            moved_keys=self._moved_keys(),
        )

    def _moved_keys(self) -> list[MovedKey]:
        """Once a minute: what the control plane takes of it makes a revision."""
        if self.directory is None or not self.directory.keys.moves or self.loop.time() < self._moves_due_s:
            return []
        self._moves_due_s = self.loop.time() + _MOVES_EVERY_S
        return list(self.directory.keys.moves.values())

    def readings(self) -> Readings:
        """State for the metrics pages."""
        now = Readings(
            spool_events=self.ledger.pending_events,
            spool_bytes=self.ledger.pending_bytes,
            ledger_overflow_events=self.ledger.overflow_events,
            ledger_damaged_bytes=self.ledger.damaged_bytes,
            ledger_set_aside_events=self._link.usage.n_set_aside if self._link is not None else 0,
            ledger_lag_s=self.ledger.lag_s(now_us()) if self._link is not None else None,
            applied_revision=self.directory.revision if self.directory else 0,
            keys_without_pepper=self.directory.keys.without_pepper.total() if self.directory else 0,
            is_draining=self.is_draining,
            reservations=self.limits.count,
            reserved_tokens=self.limits.tokens,
            is_minute_store_up=None if self.limits.shared is None else self.limits.shared.is_up,
            totals_age_s=self.totals_age_s,
        )
        for engine in self.engines.values():
            stats = engine.stats()
            now.pools.append(
                PoolReading(
                    pool=engine.name,
                    running=stats.running,
                    parked=stats.parked,
                    queued_bytes=stats.queued_bytes,
                    bound_service=stats.bound_service,
                    largest_gap_service=stats.largest_gap_service,
                    bound_gpu_s=stats.bound_gpu_s,
                    largest_gap_gpu_s=stats.largest_gap_gpu_s,
                    preempted_total=stats.preempted_total,
                    waste_tokens=stats.waste_tokens,
                    predictions=engine.foresight.by_source,
                    prediction_fallbacks={**dict.fromkeys((LATE, DOWN, ABSURD), 0), **engine.foresight.fallbacks},
                    is_length_model_refused=engine.foresight.refused is not None,
                    slice_level=stats.slice_level,
                    paused_clients=sum(call.client.is_paused for call in engine.calls),
                    strikes={kind.value: count for kind, count in engine.suspects.strikes.items()},
                    retries=engine.retries.granted,
                    retries_refused=engine.retries.refused,
                    retries_left=engine.retries.left(self.loop.time()),
                )
            )
            for name, promised in engine.config.tiers.items():
                if promised.ttft_target_s is not None:
                    now.ttft_targets[engine.name, name] = promised.ttft_target_s
            for tier, count in stats.queued_by_tier.items():
                now.queued[engine.name, tier] = count
            for b in stats.backends:
                member = engine.backends.members.get(b.backend)
                now.backends.append(
                    BackendReading(
                        pool=engine.name,
                        backend=b.backend,
                        is_up=b.is_up,
                        running=b.running,
                        reserved_tokens=b.reserved_tokens,
                        kv_tokens=b.usable_tokens,
                        queue_size=None if member is None else member.queue_size,
                        breaker="closed" if member is None else member.breaker.phase.value,
                        openings=0 if member is None else member.breaker.openings,
                        state="down" if member is None else state_word(member),
                        reservations=b.reservations,
                    )
                )
            weights = {group.group: group.weight for group in stats.groups}
            for t in stats.tenants:
                prompt_tokens, output_tokens = engine.books.tenant_tokens.get(t.tenant, (0, 0))
                now.tenants.append(
                    TenantReading(
                        pool=engine.name,
                        tenant=t.tenant,
                        queued=t.queued,
                        running=t.running,
                        weight=t.weight,
                        prompt_tokens=prompt_tokens,
                        output_tokens=output_tokens,
                        counter=t.counter,
                        group=t.group,
                        group_weight=weights.get(t.group, 0.0) if t.group is not None else 0.0,
                    )
                )
        return now


def make_tracing(settings: RouterSettings) -> Tracing:
    """Spans if the settings ask for them; the context of clients is handed on in any case.

    Raises:
        SettingsError: the extra is not installed.
    """
    if not settings.has_tracing:
        return PassedOn()
    try:
        from router_ext.obs.otel import Recording
    except ModuleNotFoundError as error:
        raise SettingsError(f"{variable_of('otlp_endpoint')} is set, which needs fairlane[tracing]: {error}") from None
    return Recording(router=settings.id, endpoint=settings.traces_endpoint)


def _nothing() -> None:
    """Nobody listens yet."""


def draining() -> NoBackend:
    """The refusal of a router that ends."""
    return NoBackend("The router is shutting down.", code="draining", retry_after_s=2.0)


def _stamp(path: Any) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
