"""Grammars of the requests that run: compiled once, 32 kept, and asked by the engines token by token.

    guide = await grammars.guide(regex)      # as long as TGI's shard would take; nobody gets a token meanwhile
    state = guide.initial
    ids = guide.allowed(state)               # which tokens may follow
    state = guide.next(state, token_id)      # -1: the grammar is over

The work is done in a process (``grammar_worker``) that starts with the first grammar. ``guide`` is for the event loop,
the others for whoever runs the engine, which never happens at the same time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from router_ext.devserver.codec import REPLACEMENT, Codec
from router_ext.devserver.grammar_worker import Allowed, Answer, Compile, Drop, Next, Options, Question, Setup, encode
from router_ext.settings import child_environment
from router_ext.wire.frames import Frames, frame

KEPT = 32
"""Compiled grammars kept; TGI's number."""

_KEPT_STATES = 8  # states of a grammar whose tokens are kept; a JSON string comes back to one state again and again

_answer = msgspec.msgpack.Decoder(Answer)
_T = TypeVar("_T")


class GrammarFailed(Exception):
    """A grammar that TGI's shard cannot compile. ``is_fatal``: its shard ends of it."""

    def __init__(self, message: str, *, is_fatal: bool) -> None:
        super().__init__(message)
        self.is_fatal = is_fatal


class CompilerGone(Exception):
    """The process that compiles has died."""


class CompiledGuide:
    """``Guide`` of a compiled grammar.

    Raises (all methods):
        CompilerGone: the process that holds the index has died.
    """

    def __init__(self, link: _Link, key: int, initial: int) -> None:
        self._link = link
        self._key = key
        self.initial = initial
        self._allowed: OrderedDict[int, array[int]] = OrderedDict()
        self._options: OrderedDict[int, tuple[array[int], int]] = OrderedDict()

    def allowed(self, state: int) -> array[int]:
        found = self._allowed.get(state)
        if found is None:
            found = _ids(self._link.ask(Allowed(self._key, state)))
            _keep(self._allowed, state, found)
        return found

    def options(self, state: int) -> tuple[array[int], int]:
        found = self._options.get(state)
        if found is None:
            answer = self._link.ask(Options(self._key, state))
            found = _ids(answer), answer.nearest
            _keep(self._options, state, found)
        return found

    def next(self, state: int, token: int) -> int:
        return self._link.ask(Next(self._key, state, token)).state


def _ids(answer: Answer) -> array[int]:
    ids = array("I")
    ids.frombytes(answer.ids)
    return ids


def _keep(kept: OrderedDict[int, _T], state: int, value: _T) -> None:
    kept[state] = value
    if len(kept) > _KEPT_STATES:
        kept.popitem(last=False)


class ScriptedGuide:
    """``Guide`` through given ids, then EOS: where an answer must look compiled and nothing is (``--sim-hazards``)."""

    initial = 0

    def __init__(self, ids: Sequence[int], eos_id: int) -> None:
        self._ids = (*ids, eos_id)

    def allowed(self, state: int) -> Sequence[int]:
        return self._ids[state : state + 1]

    def options(self, state: int) -> tuple[Sequence[int], int]:
        return self.allowed(state), self._ids[state]

    def next(self, state: int, token: int) -> int:
        return state + 1 if state + 1 < len(self._ids) else -1


class _Link:
    """The worker process and our end of its socket; one question at a time."""

    def __init__(self, codec: Codec, eos_id: int) -> None:
        self._lock = threading.Lock()
        self._dropped: list[int] = []
        self._frames = Frames()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "router_ext.devserver.grammar_worker", "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=child_environment(os.environ),
            )
        self._setup: Question | None = Setup(eos_id, _vocabulary(codec))

    def ask(self, question: Question) -> Answer:
        """Blocks until the answer is there.

        Raises:
            CompilerGone: the worker has died.
        """
        with self._lock:
            if self._setup is not None:
                self._exchange(self._setup)
                self._setup = None
            dropped, self._dropped = self._dropped, []
            for key in dropped:
                self._send(Drop(key))
            return self._exchange(question)

    def drop(self, key: int) -> None:
        """Forget an index before the next question; may be called anywhere."""
        self._dropped.append(key)

    def _exchange(self, question: Question) -> Answer:
        self._send(question)
        while True:
            try:
                data = self._socket.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                raise CompilerGone(f"the process that compiles grammars has died ({self._process.wait()})")
            for payload in list(self._frames.feed(data)):
                return _answer.decode(payload)

    def _send(self, question: Question) -> None:
        try:
            self._socket.sendall(frame(encode(question)))
        except OSError:
            raise CompilerGone(f"the process that compiles grammars has died ({self._process.wait()})") from None

    def close(self) -> None:
        """Ends the worker, and with it a question that waits."""
        self._process.kill()
        self._process.wait()
        with self._lock:
            self._socket.close()


def _vocabulary(codec: Codec) -> list[str]:
    """Tokens as outlines-core wants them: text, or where they are no text, symbol by symbol for each byte."""
    texts = []
    for i, raw in enumerate(codec.token_bytes):
        text = "" if i in codec.special else raw.decode("utf-8", "replace")
        if REPLACEMENT in text:
            text = "".join(f"\x00{byte:02X}" if byte >= 0x80 else chr(byte) for byte in raw)
        texts.append(text)
    return texts


class Grammars:
    """See the module. Event loop's thread only."""

    def __init__(self, codec: Codec, eos_id: int) -> None:
        self._codec = codec
        self._eos_id = eos_id
        self._link: _Link | None = None
        self._kept: OrderedDict[str, CompiledGuide] = OrderedDict()
        self._keys = 0

    async def guide(self, regex: str) -> CompiledGuide:
        """The compiled grammar, at once if it is one of the last 32.

        Raises:
            GrammarFailed: it cannot be compiled.
            CompilerGone: compiling it killed the process.
        """
        found = self._kept.get(regex)
        if found is not None:
            self._kept.move_to_end(regex)
            return found
        if self._link is None:
            self._link = _Link(self._codec, self._eos_id)
        link = self._link
        self._keys += 1
        key = self._keys
        answer = await asyncio.to_thread(link.ask, Compile(key, regex))
        if answer.error is not None:
            raise GrammarFailed(answer.error, is_fatal=answer.is_fatal)
        found = self._kept[regex] = CompiledGuide(link, key, answer.state)
        weakref.finalize(found, link.drop, key).atexit = False  # requests that run may hold it longer than this table
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
