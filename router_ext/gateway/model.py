"""What a pool knows of the model it serves: limits, tokenizer, ends of text; and short questions to its backends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from typing import TypeVar

from router_ext.backends.base import Backend, Headers
from router_ext.backends.pool import BackendPool
from router_ext.backends.pool import Member as PoolMember
from router_ext.backends.probe import tokenize
from router_ext.core.config import PoolConfig
from router_ext.core.ids import TenantId
from router_ext.errors import FairlaneError, NoBackend, UpstreamFailed
from router_ext.gateway.cuts import CutDecision, CutJob, TextTokenizer, choose_cut, cut_unchecked, search_cut
from router_ext.gateway.encoders import AnswerContext
from router_ext.gateway.generation import ModelLimits
from router_ext.gateway.knowledge import ModelKnowledge
from router_ext.gateway.waiting import Places, Turns
from router_ext.obs.logs import get_logger

_log = get_logger(__name__)

Member = PoolMember[ModelKnowledge]

T = TypeVar("T")

ATTEMPTS = 3
"""Backends asked before a short call fails."""

OTHER_ASKED_S = 1.0
"""A short call that takes longer is given to another backend, if there is one: this one may have frozen."""

QUIET_S = 2.5
"""A backend whose last health answer is older is asked only if all are: checks come every second as a rule."""

WARM_UP_S = 5.0
"""How long after the start of the process requests wait for backends nobody has asked yet."""

PROBE_TEXT = "Zażółć gęślą jaźń — 12 345 tokens, \t tabs,\n\nnew lines and 😀."
"""What a pool's tokenizer file must split as its backends do before it is believed."""


class PoolModel:
    """One pool's model.

    Attributes:
        name: the pool's public name. config: in force; ``backend_wait_s`` bounds what waits here too.
        eos_ids: end-of-text ids known of the model; grows as answers show them.
        tokenizer: the pool's own tokenizer, None if it has no file or the file disagrees with the backends.
        large_texts: only one large text at a time is sent to a backend's tokenizer threads, tenants in turn.
        places: who waits here, before the queue.
    """

    def __init__(
        self,
        *,
        name: str,
        config: PoolConfig,
        backends: BackendPool[ModelKnowledge],
        executor: Executor,
        tokenizer_path: str | None,
        on_failure: Callable[[Member, FairlaneError], None],
    ) -> None:
        self.name = name
        self.config = config
        self.eos_ids: set[int] = set()
        self.tokenizer: TextTokenizer | None = None
        self.executor = executor
        self.large_texts = Turns()
        self.places = Places(lambda: self.config, hint_s=lambda: self.retry_after(1.0))
        self._loop = asyncio.get_running_loop()
        self._backends = backends
        self._on_failure = on_failure
        self._path = tokenizer_path
        self._path_changed = asyncio.Event()
        self._started_s = self._loop.time()
        self._down_since: float | None = self._started_s
        self._compute_type = "cpu"
        self._limits: ModelLimits | None = None
        self._up = asyncio.Event()
        self._random = random.Random()

    # --- kept up to date by the engine ------------------------------------------------------------------------------

    def use_tokenizer(self, path: str | None) -> None:
        """Another tokenizer file, or none."""
        if path != self._path:
            self._path = path
            self._path_changed.set()

    def backends_changed(self) -> None:
        """A backend came, went, or told something else of itself."""
        self._limits = None
        if self._backends.up:
            self._up.set()
            self._down_since = None
        else:
            self._up.clear()
            if self._down_since is None:
                self._down_since = self._loop.time()

    async def follow_tokenizer(self) -> None:
        """Load the pool's tokenizer file whenever it is another one, and believe it only if it splits as a backend."""
        while True:
            path = self._path
            self._path_changed.clear()
            self.tokenizer = None
            if path is not None:
                try:
                    await self._load_tokenizer(path)
                except Exception:  # whatever a tokenizer may raise: the pool serves without it
                    _log.exception("tokenizer.failed", pool=self.name, path=path)
            await self._path_changed.wait()

    async def _load_tokenizer(self, path: str) -> None:
        try:
            loaded = await self._loop.run_in_executor(self.executor, TextTokenizer.load, path)
        except (OSError, ValueError) as error:
            _log.error("tokenizer.refused", pool=self.name, path=path, reason=str(error))
            return
        while True:
            await self._up.wait()
            try:
                theirs = [token.id for token in await tokenize(self._backends.up[0].client, PROBE_TEXT)]
                break
            except (UpstreamFailed, IndexError):
                await asyncio.sleep(0.5)
        if loaded.encode(PROBE_TEXT) != theirs:
            _log.error("tokenizer.refused", pool=self.name, path=path, reason="it splits text otherwise than a backend")
        elif self._path == path:
            self.tokenizer = loaded
            self.eos_ids |= loaded.eos_ids

    # --- what is known ----------------------------------------------------------------------------------------------

    async def wait_up(self, tenant: TenantId | None = None) -> None:
        """Return once a backend is up. An outage is waited for once, whoever comes when.

        Raises:
            NoBackend: none came within the pool's limit since the last one was lost.
            QueueRefused: too many wait already, of ``tenant`` or of all.
        """
        if self._up.is_set():
            return
        since = self._loop.time() if self._down_since is None else self._down_since
        rest_s = since + self.config.backend_wait_s - self._loop.time()
        if rest_s <= 0:
            raise self.no_backend()
        try:
            with contextlib.nullcontext() if tenant is None else self.places.take(tenant):
                async with asyncio.timeout(rest_s):
                    await self._up.wait()
        except TimeoutError:
            raise self.no_backend() from None

    def no_backend(self) -> NoBackend:
        return NoBackend("No backend is available for this model.", retry_after_s=self.retry_after(5.0))

    def limits(self) -> ModelLimits:
        """Limits of the largest live backend; of the largest known one while none is up.

        Raises:
            NoBackend: no backend has ever told its limits.
        """
        if self._limits is None:
            members = self._backends.up or list(self._backends.members.values())
            infos = [member.info for member in members if member.info is not None]
            if not infos:
                raise self.no_backend()
            self._limits = ModelLimits.from_info(
                max(infos, key=lambda info: (info.max_total_tokens, info.max_input_tokens))
            )
        return self._limits

    async def known_limits(self, tenant: TenantId) -> ModelLimits:
        """``limits``; right after the start of the process, once the first backend has told them.

        Raises:
            NoBackend: nobody has, though there was time. QueueRefused: too many wait for it already.
        """
        if self._limits is None and not any(member.info for member in self._backends.members.values()):
            grace_s = min(WARM_UP_S, self.config.backend_wait_s) - (self._loop.time() - self._started_s)
            with contextlib.suppress(TimeoutError), self.places.take(tenant):
                async with asyncio.timeout(max(grace_s, 0.0)):
                    await self._up.wait()
        return self.limits()

    @property
    def model_id(self) -> str:
        """What the backends call their model; the pool's name until one has told."""
        return next((m.info.model_id for m in self._backends.members.values() if m.info is not None), self.name)

    def vocabulary(self, stated: int) -> int:
        """Tokens of the model's vocabulary: of the pool's tokenizer file, else as ``stated`` by the operator."""
        return stated if self.tokenizer is None else self.tokenizer.vocabulary

    @property
    def is_resumable(self) -> bool:
        """No backend is known to be unable to continue a text."""
        return all(m.knowledge is None or m.knowledge.is_resumable for m in self._backends.members.values())

    @property
    def reads_images(self) -> bool:
        """Some backend takes an image's address inside a text for the image."""
        return any(m.knowledge is not None and m.knowledge.reads_images for m in self._backends.members.values())

    def answer_context(self, headers: Headers, characters: int) -> AnswerContext:
        """What an answer says of the backend that serves it; ``characters`` of all its prompts."""
        compute_type = self._compute_type
        for name, value in headers:
            if name == b"x-compute-type":
                compute_type = self._compute_type = value.decode("latin-1")
        info = next((m.info for m in self._backends.members.values() if m.info is not None), None)
        return AnswerContext(
            model_id=info.model_id if info else self.name,
            system_fingerprint=info.system_fingerprint if info else "",
            created=int(time.time()),
            compute_type=compute_type,
            compute_characters=characters,
        )

    # --- questions --------------------------------------------------------------------------------------------------

    async def choose_cut(self, job: CutJob) -> CutDecision:
        """Where a slice ends: searched in a worker thread, or with a backend's help; never fails."""
        try:
            if self.tokenizer is not None:
                return await self._loop.run_in_executor(self.executor, choose_cut, self.tokenizer, job)
            return await self._cut_by_backend(job)
        except (UpstreamFailed, NoBackend):
            return cut_unchecked(job)
        except Exception:  # whatever a tokenizer may raise: this request goes on with an unchecked cut
            _log.exception("cut.failed", pool=self.name)
            return cut_unchecked(job)

    async def _cut_by_backend(self, job: CutJob) -> CutDecision:
        """Search with one ``/tokenize`` call per place tried; usually the first one fits."""
        search = search_cut(job, await self._ids(job.base_text))
        try:
            text = next(search)
            while True:
                text = search.send(await self._ids(job.base_text + text))
        except StopIteration as stop:
            decision: CutDecision = stop.value
            return decision

    async def _ids(self, text: str) -> list[int]:
        _, tokens = await self.ask(lambda client: tokenize(client, text))
        return [token.id for token in tokens]

    @contextlib.asynccontextmanager
    async def large_text(self, tenant: TenantId, *, is_large: bool) -> AsyncIterator[None]:
        """Around a question whose text is large for a backend's tokenizer threads.

        Raises:
            QueueRefused: too many wait already, of ``tenant`` or of all.
        """
        if not is_large:
            yield
            return
        async with contextlib.AsyncExitStack() as stack:
            with self.places.take(tenant):
                await stack.enter_async_context(self.large_texts.take(tenant))
            yield

    async def ask(
        self,
        question: Callable[[Backend], Awaitable[T]],
        *,
        tenant: TenantId | None = None,
        takes_long: bool = False,
    ) -> tuple[Member, T]:
        """A short call to any live backend; another one is asked if it breaks or says nothing for ``OTHER_ASKED_S``.

        Args:
            tenant: who waits, while there is no backend; None for a request that runs.
            takes_long: the answer may need more time than that.

        Raises:
            NoBackend: none is up, and none came within the pool's limit. UpstreamFailed: the last one asked broke.
            QueueRefused: too many wait already.
        """
        slow: Member | None = None
        for attempt in range(ATTEMPTS):
            member = await self.some_member(tenant, besides=slow)
            is_last = attempt + 1 == ATTEMPTS
            try:
                if takes_long or is_last or len(self._backends.up) == 1:
                    return member, await question(member.client)
                async with asyncio.timeout(OTHER_ASKED_S):
                    return member, await question(member.client)
            except TimeoutError:
                slow = member
            except UpstreamFailed as error:
                self._on_failure(member, error)
                if is_last:
                    raise
        raise AssertionError("unreachable")

    async def some_member(self, tenant: TenantId | None = None, *, besides: Member | None = None) -> Member:
        """A live backend for a short call, ``besides`` only if it is alone; waits for one if there is none.

        Raises:
            NoBackend, QueueRefused: as ``wait_up``.
        """
        up = self._backends.up
        if not up:
            await self.wait_up(tenant)
            up = self._backends.up
        if len(up) == 1:
            return up[0]
        others = [member for member in up if member is not besides]
        since = self._loop.time() - QUIET_S
        heard = [member for member in others if member.answered_s > since] or others
        return heard[self._random.randrange(len(heard))]

    def retry_after(self, estimate_s: float) -> float:
        """A hint up to 120 s, spread so that the refused do not come back together; ``Retry-After`` says 1 at least."""
        return min(max(estimate_s, 0.8) * self._random.uniform(1.0, 1.25), 120.0)
