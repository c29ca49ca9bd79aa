"""The prediction worker: ``python -m router_ext.predict.worker --dir DIR --fd N``, started by ``predict.client``.

    main thread   wait for the socket -> everything that has come -> news, then one batch of questions -> answers
    loader        reads and checks models

Whatever arrives while a batch runs is the next batch. What is learned on line is written to the folder every half
minute and at the end. The process ends when its socket does, so it never outlives the router; should it hang at that
moment, an alarm of the kernel ends it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from router_ext.errors import ArtifactRefused
from router_ext.predict.messages import Answer, Answers, Ask, Assign, Assigned, Ended, Frames, Ready, ToWorker, frame
from router_ext.predict.notes import Notes
from router_ext.predict.state import SAVE_INTERVAL_S, StateFile

MAX_BATCH = 64
"""Questions of one pass: an answer waits for the whole of it, and more than this gains nothing."""

HANG_LIMIT_S = 20
"""An iteration that takes longer ends the process; the router, if it lives, ended it before."""

_SWITCH_S = 0.0005
"""How long the loader may keep the interpreter from a question."""

_READ_BYTES = 1 << 18


class Service(Protocol):
    """What answers. ``load`` runs in the loader's thread, everything else in the main one."""

    @property
    def known(self) -> int: ...
    def load(self, data: bytes) -> Any: ...
    def assign(self, pool: str, digest: str | None, model: Any) -> None: ...
    def answer(self, questions: Sequence[Ask]) -> tuple[list[Answer], list[int]]: ...
    def ended(self, news: Ended) -> None: ...
    def dump(self) -> bytes: ...
    def restore(self, data: bytes) -> None: ...


class Worker:
    """See the module."""

    def __init__(self, sock: socket.socket, service: Service, state: StateFile, notes: Notes) -> None:
        self._socket = sock
        self._service = service
        self._state = state
        self._frames = Frames()
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._notes = notes
        self._orders: queue.SimpleQueue[Assign] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        self._wanted: dict[str, str] = {}
        self._current: dict[str, str] = {}

    def run(self) -> None:
        """Answer until the other end closes."""
        threading.Thread(target=self._load_all, name="loader", daemon=True).start()
        self._send(Ready(os.getpid(), self._service.known))
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        saved_s = time.monotonic()
        is_changed = False
        while True:
            signal.alarm(0)
            events = poll.poll(1_000)
            signal.alarm(HANG_LIMIT_S)
            for descriptor, _ in events:
                if descriptor == self._wake_read:
                    os.read(self._wake_read, 4_096)
                    while not self._loaded.empty():
                        self._loaded.get()()
                    continue
                messages = self._receive()
                if messages is None:
                    return
                is_changed = True
                self._handle(messages)
            if is_changed and not events and time.monotonic() - saved_s >= SAVE_INTERVAL_S:
                self._state.write(self._service.dump())
                saved_s, is_changed = time.monotonic(), False
            elif is_changed and time.monotonic() - saved_s >= 4 * SAVE_INTERVAL_S:
                # Never idle: a batch that comes late once in two minutes is better than losing what was learned.
                self._state.write(self._service.dump())
                saved_s, is_changed = time.monotonic(), False

    def _receive(self) -> list[ToWorker] | None:
        """Everything that has come; None at the end of the stream."""
        messages: list[ToWorker] = []
        flags = 0
        while len(messages) < MAX_BATCH:
            try:
                data = self._socket.recv(_READ_BYTES, flags)
            except BlockingIOError:
                break
            if not data:
                return None
            messages += map(self._decoder.decode, self._frames.feed(data))
            flags = socket.MSG_DONTWAIT
        return messages

    def _handle(self, messages: Sequence[ToWorker]) -> None:
        questions: list[Ask] = []
        for message in messages:
            match message:
                case Ask():
                    questions.append(message)
                case Ended():
                    self._service.ended(message)
                case Assign():
                    self._assign(message)
        for first in range(0, len(questions), MAX_BATCH):
            batch = questions[first : first + MAX_BATCH]
            started = time.perf_counter()
            answers, refused = self._service.answer(batch)
            self._send(Answers(answers, time.perf_counter() - started, refused))

    def _send(self, message: Ready | Assigned | Answers) -> None:
        self._socket.sendall(frame(message))

    # --- models -----------------------------------------------------------------------------------------------------

    def _assign(self, order: Assign) -> None:
        if order.digest is None:
            self._wanted.pop(order.pool, None)
            self._service.assign(order.pool, None, None)
            self._send(Assigned(order.pool, None, None))
            self._current.pop(order.pool, None)
        else:
            self._wanted[order.pool] = order.digest
            self._orders.put(order)

    def _load_all(self) -> None:
        """The loader's thread."""
        models: dict[str, Any] = {}
        while True:
            order = self._orders.get()
            assert order.digest is not None
            try:
                model = models.get(order.digest)
                if model is None:
                    model = self._service.load(_read(Path(order.path), order.digest))
            except ArtifactRefused as error:
                self._tell(order, None, error.message)
            except Exception as error:  # whatever a damaged model may raise: the one before stays
                self._notes.exception("predictor.load_failed", digest=order.digest[:12])
                self._tell(order, None, f"it could not be loaded: {type(error).__name__}")
            else:
                models = {**{d: m for d, m in models.items() if d in list(self._wanted.values())}, order.digest: model}
                self._tell(order, model, None)

    def _tell(self, order: Assign, model: Any, refused: str | None) -> None:
        pool, digest = order.pool, order.digest

        def finish() -> None:
            if pool not in self._wanted or digest is None:
                return  # taken away meanwhile
            if refused is None:
                self._service.assign(pool, digest, model)
                self._current[pool] = digest
            self._send(Assigned(pool, digest, self._current.get(pool), refused))

        self._loaded.put(finish)
        os.write(self._wake_write, b"\0")


def _read(path: Path, digest: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactRefused(f"{path.name[:12]} cannot be read: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise ArtifactRefused(f"{path.name[:12]} does not fit its digest: it is damaged")
    return data


def serve(descriptor: int, directory: Path, service: Service, notes: Notes) -> None:
    """Run on an inherited socket until it closes, then save what was learned."""
    # The terminal's Ctrl-C goes to every process of the group; the router says when it is over by closing the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    sys.setswitchinterval(_SWITCH_S)
    state = StateFile(directory / "predictor.state", notes)
    saved = state.read()
    if saved is not None:
        try:
            service.restore(saved)
        except ValueError as error:
            notes.error("predictor.state_refused", reason=str(error))
    with socket.socket(fileno=descriptor) as sock:
        try:
            Worker(sock, service, state, notes).run()
        except OSError as error:
            notes.warning("predictor.socket_broke", reason=error.strerror)
        except SystemExit:
            notes.info("predictor.worker_told_to_end")
        signal.alarm(HANG_LIMIT_S)
        state.write(service.dump())


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of the worker."""
    parser = argparse.ArgumentParser(prog="router_ext.predict.worker", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="where what was learned is kept")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--router", default="")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    args = parser.parse_args(argv)
    notes = Notes(level=args.log_level, router=args.router)
    serve(args.fd, args.dir, _service(notes), notes)
    return 0


def _service(notes: Notes) -> Service:
    try:
        from router_ext.predict.service import LengthService
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "safetensors"):
            raise
        from router_ext.predict.silent import Silent

        notes.warning("predictor.not_installed", missing=error.name)
        return Silent()
    return LengthService(notes=notes)


if __name__ == "__main__":
    sys.exit(main())
