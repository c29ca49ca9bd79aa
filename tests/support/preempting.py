"""Preemptions at places of a test's choosing, and a backend that answers every text as a greedy model would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.scripted import INFO, World
from support.sliced_tgi import SlicedTgi, scripted_model
from tokenizers import Tokenizer

from router_ext.backends.fake import Script
from router_ext.backends.tgi import TgiBackend
from router_ext.core.actions import Action, Dispatch, Preempt
from router_ext.core.events import Event, Finished, Preempted, SliceEnded
from router_ext.core.lifecycle import State
from router_ext.core.preemption import lost_tokens
from router_ext.core.request import Request
from router_ext.gateway.engine import PoolEngine
from router_ext.wire.controlplane import BackendRecord


class ForcedCuts:
    """Lets an engine's scheduler decide to preempt whenever ``choose`` says so of a request that is decoding.

    Everything else is the scheduler's own, and so is what happens to the request from then on.

    Attributes:
        cut: (request, output tokens) of every preemption, in order.
        handled: (instant, event, actions) of everything the scheduler was told.
    """

    def __init__(self, engine: PoolEngine, choose: Callable[[Request], bool]) -> None:
        self.cut: list[tuple[str, int]] = []
        self.handled: list[tuple[float, Event, list[Action]]] = []
        self._engine = engine
        self._choose = choose
        self._handle = engine.scheduler.handle
        engine.scheduler.handle = self._force  # type: ignore[method-assign]

    def stop(self) -> None:
        """Decide as the scheduler does."""
        self._engine.scheduler.handle = self._handle  # type: ignore[method-assign]

    def _force(self, event: Event, now: float) -> list[Action]:
        actions = self._handle(event, now)
        for request in list(self._engine.scheduler._requests.values()):
            if request.state is State.DECODING and self._choose(request):
                assert request.backend is not None
                self._engine.scheduler._books.preempt(request, lost_tokens(request), "a test's wish")
                request.backend.expect_release(request, now + request.backend.cut_lag_s())
                self.cut.append((request.request_id, request.output_tokens))
                actions.append(Preempt(request_id=request.request_id, backend=request.backend.backend_id))
        self.handled.append((now, event, actions))
        return actions

    def held_s(self) -> list[float]:
        """Most seconds for which each slice can have been open: from its dispatch to the report of its end.

        There is no least: tokens are reported later than they came while the loop has other work.
        """
        spans: list[float] = []
        opened = 0.0
        for now, event, actions in self.handled:
            if isinstance(event, SliceEnded | Preempted | Finished):
                spans.append(now - opened)
            if any(isinstance(action, Dispatch) for action in actions):
                opened = now
        return spans


class ModelWorld(World):
    """A scripted world whose backend continues any text; the router has its tokenizer.

    Words, and now and then a line break: two of them in a row are one token of their own, the odd split of this model.

    Attributes:
        alter: (path, body, answer) -> what is answered instead.
    """

    def __init__(self, tokenizer_path: Path) -> None:
        super().__init__()
        self.alter: Callable[[str, bytes, Script], Script] = lambda path, body, script: script
        self.setup.tokenizer_path = str(tokenizer_path)
        self.tokenizer = Tokenizer.from_file(str(tokenizer_path))
        words = [f" {word}" for word in ("the quick brown fox jumps over lazy dogs and runs home to sleep").split()]
        ids = [self.tokenizer.encode(text, add_special_tokens=False).ids for text in [*words, "\n"]]
        assert all(len(each) == 1 for each in ids)
        self.model = SlicedTgi(self.tokenizer, scripted_model((), [each[0] for each in ids]), ())

    def play(self, path: str, body: bytes) -> Script:
        return self.alter(path, body, self._answer(path, body))

    def _answer(self, path: str, body: bytes) -> Script:
        match path:
            case "/info":
                return Script(pieces=(INFO,))
            case "/tokenize":
                encoding = self.tokenizer.encode(json.loads(body)["inputs"])
                tokens: list[dict[str, Any]] = [
                    {"id": i, "text": "", "start": start, "stop": stop}
                    for i, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
                ]
                return Script(pieces=(json.dumps(tokens).encode(),))
            case "/generate_stream":
                return Script(pieces=tuple(b"data: %b\n\n" % payload for payload in self.model.answer(body)))
        return super().play(path, body)


class RealWorld(World):
    """A router in the process in front of real servers, so that its scheduler's decisions can be forced."""

    def __init__(self, *servers: BackendRecord, tokenizer_path: Path | None = None) -> None:
        super().__init__()
        self.setup.backends = list(servers)
        self.setup.tokenizer_path = None if tokenizer_path is None else str(tokenizer_path)

    def make_client(self, record: BackendRecord) -> TgiBackend:  # type: ignore[override]  # no script is played here
        return TgiBackend(record.url)
