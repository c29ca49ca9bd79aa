"""The process that compiles grammars for the model server, as TGI's shard does: regex -> automaton -> index of tokens.

    python -m router_ext.devserver.grammar_worker --fd N     # N: its end of a socket pair, MessagePack in frames

A process of its own, because a compilation of minutes must neither hold the interpreter lock of the server, which
still answers ``/info``, nor outlive it: the worker ends when the socket closes. Time and memory grow with states x
vocabulary, without a limit of time; beyond ``MEMORY_BYTES`` it dies, as a shard would be killed.
Source: ``server/.../utils/logits_process.py`` of TGI, ``fsm/guide.py`` of outlines-core 0.1.26.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import resource
import socket
import threading
from array import array
from collections import deque
from typing import Any, ClassVar

import msgspec

from router_ext.guard.automaton import automaton_of
from router_ext.wire.frames import Frames, frame

MEMORY_BYTES = 8 << 30

_ANY_TEXT = 32  # first characters that may follow


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class Setup(_Message):
    """The vocabulary, once: text of each id, bytes that are no character as outlines-core spells them; "" is none."""

    eos_id: int
    tokens: list[str]


class Compile(_Message):
    """Make the index of ``regex`` and keep it as ``key``."""

    key: int
    regex: str


class Drop(_Message):
    """Forget ``key``. Has no answer."""

    key: int


class Allowed(_Message):
    """Which tokens may follow in a state."""

    key: int
    state: int


class Options(_Message):
    """A few of them to choose from, without weights."""

    key: int
    state: int


class Next(_Message):
    """The state after a token."""

    key: int
    state: int
    token: int


class Answer(_Message):
    """To every message but ``Drop``.

    Attributes:
        error: why there is no index. is_fatal: TGI's shard ends after this error (a Python ``RuntimeError``).
        state: after the token; the initial one of a new index; -1 when the grammar is over.
        ids: allowed ids, four bytes each; of ``Options``: for each first character, in order, the longest word or, if
            there is none, the shortest token.
        nearest: the token that leaves least to come.
    """

    error: str | None = None
    is_fatal: bool = False
    state: int = -1
    ids: bytes = b""
    nearest: int = -1


Question = Setup | Compile | Drop | Allowed | Options | Next

encode = msgspec.msgpack.Encoder().encode
_question = msgspec.msgpack.Decoder(Question)


class _Index:
    """A compiled grammar."""

    def __init__(self, regex: str, vocabulary: Any, eos_id: int) -> None:
        from outlines_core.fsm import outlines_core_rs

        compilers: Any = outlines_core_rs  # its stub lacks the constructor
        self._automaton = automaton_of(regex)
        self._index = compilers.Index(self._automaton.fsm_info, vocabulary, eos_id, frozenset())
        self._eos_id = eos_id
        self._distances: dict[int, int] = {}

    @property
    def initial(self) -> int:
        return int(self._index.get_initial_state())

    def allowed(self, state: int) -> list[int]:
        return self._index.get_allowed_tokens(state) or [self._eos_id]

    def next(self, state: int, token: int) -> int:
        found = self._index.get_next_state(state, token)
        return -1 if found is None else int(found)

    def options(self, state: int, tokens: list[str]) -> tuple[list[int], int]:
        """O(allowed tokens)."""
        distances = self._distances or self._measured()
        best: dict[str, tuple[int, int]] = {}
        nearest = (1 << 30, 0, 0)
        for token in self.allowed(state):
            text = "" if token == self._eos_id else tokens[token]
            far = 0 if token == self._eos_id else 1 + distances.get(self.next(state, token), 0)
            nearest = min(nearest, (far, len(text), token))
            first = text[:1]
            best[first] = min(best.get(first, (1 << 30, 0)), (-len(text) if text.isalpha() else len(text), token))
        if len(best) > _ANY_TEXT:
            best.pop("\0", None)  # a byte of some character: where any text may stand, not all of them make one
        return [best[first][1] for first in sorted(best)], nearest[2]

    def _measured(self) -> dict[int, int]:
        """Fewest characters from each state to a final one."""
        before: dict[int, list[int]] = {}
        for state, after in self._automaton.map.items():
            for other in set(after.values()):
                before.setdefault(other, []).append(state)
        distances: dict[int, int] = dict.fromkeys(self._automaton.finals, 0)
        waiting = deque(distances)
        while waiting:
            state = waiting.popleft()
            for other in before.get(state, ()):
                if other not in distances:
                    distances[other] = distances[state] + 1
                    waiting.append(other)
        self._distances = distances
        return distances


class _Worker:
    _FATAL: ClassVar = (RuntimeError, MemoryError)

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}
        self._tokens: list[str] = []
        self._eos_id = 0
        self._vocabulary: Any = None

    def answer(self, question: Question) -> Answer | None:
        match question:
            case Setup(eos_id, tokens):
                self._set_up(eos_id, tokens)
                return Answer()
            case Compile(key, regex):
                return self._compile(key, regex)
            case Drop(key):
                self._indexes.pop(key, None)
                return None
            case Allowed(key, state):
                return Answer(ids=array("I", self._indexes[key].allowed(state)).tobytes())
            case Options(key, state):
                ids, nearest = self._indexes[key].options(state, self._tokens)
                return Answer(ids=array("I", ids).tobytes(), nearest=nearest)
            case Next(key, state, token):
                return Answer(state=self._indexes[key].next(state, token))

    def _set_up(self, eos_id: int, tokens: list[str]) -> None:
        from outlines_core.fsm.outlines_core_rs import Vocabulary

        by_text: dict[str, list[int]] = {}
        for i, text in enumerate(tokens):
            if text:
                by_text.setdefault(text, []).append(i)
        self._tokens, self._eos_id = tokens, eos_id
        self._vocabulary = Vocabulary.from_dict(by_text)

    def _compile(self, key: int, regex: str) -> Answer:
        try:
            index = self._indexes[key] = _Index(regex, self._vocabulary, self._eos_id)
        except Exception as error:  # TGI passes on what its compilers say, whatever it is
            return Answer(error=str(error), is_fatal=isinstance(error, self._FATAL))
        return Answer(state=index.initial)


def _listen(link: socket.socket, questions: queue.SimpleQueue[Question]) -> None:
    frames = Frames()
    with contextlib.suppress(OSError):  # a server that is killed with an answer unread resets the link
        while data := link.recv(1 << 20):
            for payload in frames.feed(data):
                questions.put(_question.decode(payload))
    os._exit(0)  # the server has gone, whatever is being compiled


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m router_ext.devserver.grammar_worker")
    parser.add_argument("--fd", type=int, required=True)
    link = socket.socket(fileno=parser.parse_args().fd)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions: queue.SimpleQueue[Question] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, questions), daemon=True).start()
    worker = _Worker()
    while True:
        answer = worker.answer(questions.get())
        if answer is not None:
            link.sendall(frame(encode(answer)))


if __name__ == "__main__":
    main()
