"""The prediction worker: ``python -m router_ext.predict.worker --dir DIR --fd N``, started by ``predict.client``.

    main thread   wait for the socket -> news; questions -- gathered for a moment while many come --> answers
    loader        reads and checks models
    saving        writes to the disk

Whatever arrives while a batch runs is the next batch. What is learned on line is written to the folder every half
minute, a slice between two batches, and at the end. The process ends when its socket does, so it never outlives
the router; should it hang at that moment, an alarm of the kernel ends it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from router_ext.errors import ArtifactRefused
from router_ext.predict.gathering import Gathering
from router_ext.predict.messages import Answer, Answers, Ask, Assign, Assigned, Ended, Ready, ToWorker, framed
from router_ext.predict.notes import Notes
from router_ext.predict.state import SAVE_INTERVAL_S, Saving, StateFile
from router_ext.wire.frames import Frames

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
    def answer(self, questions: Sequence[Ask]) -> tuple[list[Answer], list[int]]:
        """Answers, and refused ones: at least one question, or the first few if all would take too long."""

    def ended(self, news: Ended) -> None: ...
    def dump(self) -> Iterator[bytes]: ...
    def restore(self, slices: Iterable[bytes]) -> None: ...


class Worker:
    """See the module."""

    def __init__(
        self, sock: socket.socket, service: Service, state: StateFile, notes: Notes, *, limit_s: float, save_s: float
    ) -> None:
        self._socket = sock
        self._service = service
        self._state = state
        self._frames = Frames()
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._notes = notes
        self._questions: list[Ask] = []
        self._gathering = Gathering(limit_s)
        self._saving: Saving | None = None
        self._save_s = save_s
        self._is_changed = False
        self._orders: queue.SimpleQueue[Assign] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        self._wanted: dict[str, str] = {}
        self._current: dict[str, str] = {}

    def run(self) -> None:
        """Answer until the other end closes."""
        threading.Thread(target=self._load_all, name="loader", daemon=True).start()
        self._send(Ready(os.getpid(), self._service.known))
        saved_s = time.monotonic()
        while True:
            signal.alarm(0)
            ready, _, _ = select.select([self._socket.fileno(), self._wake_read], [], [], self._rest_s())
            signal.alarm(HANG_LIMIT_S)
            if self._wake_read in ready:
                os.read(self._wake_read, 4_096)
                while not self._loaded.empty():
                    self._loaded.get()()
            if self._socket.fileno() in ready and not self._receive():
                return
            now_s = time.monotonic()
            if self._gathering.due_s is not None and self._gathering.due_s <= now_s:
                self._answer()
            if self._saving is not None:
                # However many questions there are: none waits for more than one slice.
                self._saving.step()
                if self._saving.is_written:
                    self._saving = None
                    # What is remembered by now is not searched for garbage again and again, for some 50 ms each time.
                    gc.freeze()
            elif self._is_changed and now_s - saved_s >= self._save_s:
                saved_s, self._is_changed = now_s, False
                self._saving = Saving(self._state, self._service.dump())

    def _rest_s(self) -> float:
        """How long there is nothing to do unless something comes."""
        if self._gathering.due_s is not None:
            return max(0.0, self._gathering.due_s - time.monotonic())
        return 0.0 if self._saving is not None and not self._saving.is_taken else 1.0

    def save(self) -> None:
        """Write down everything, now."""
        if self._saving is not None:
            self._saving.finish()
        self._state.write(self._service.dump())

    def _receive(self) -> bool:
        """Hear everything that has come; False at the end of the stream."""
        flags = 0
        while len(self._questions) < MAX_BATCH:
            try:
                data = self._socket.recv(_READ_BYTES, flags)
            except BlockingIOError:
                break
            if not data:
                return False
            for message in map(self._decoder.decode, self._frames.feed(data)):
                self._hear(message)
            flags = socket.MSG_DONTWAIT
        return True

    def _hear(self, message: ToWorker) -> None:
        match message:
            case Ask():
                self._questions.append(message)
                self._gathering.came(time.monotonic())
            case Ended():
                self._service.ended(message)
                self._is_changed = True
            case Assign():
                self._assign(message)

    def _answer(self) -> None:
        """One batch; whatever of it would take too long is the next one."""
        started = time.perf_counter()
        answers, refused = self._service.answer(self._questions[:MAX_BATCH])
        del self._questions[: len(answers) + len(refused)]
        self._send(Answers(answers, time.perf_counter() - started, refused))
        self._gathering.answered(len(self._questions), time.monotonic())

    def _send(self, message: Ready | Assigned | Answers) -> None:
        self._socket.sendall(framed(message))

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
                    _give_back()
            except ArtifactRefused as error:
                self._tell(order, None, error.message)
            except Exception as error:  # whatever a damaged model may raise: the one before stays
                self._notes.exception("predictor.load_failed", digest=order.digest[:12])
                self._tell(order, None, f"it could not be loaded: {type(error).__name__}")
            else:
                models = {**{d: m for d, m in models.items() if d in list(self._wanted.values())}, order.digest: model}
                self._tell(order, model, None)

    def _tell(self, order: Assign, model: Any, refused: str | None) -> None:
        """Have the main thread say what became of an order, and wait for it: should the next model end this process,
        the router must not take this one for the culprit."""
        pool, digest = order.pool, order.digest
        is_told = threading.Event()

        def finish() -> None:
            if pool in self._wanted and digest is not None:  # else it was taken away meanwhile
                if refused is None:
                    gc.freeze()
                    self._service.assign(pool, digest, model)
                    self._current[pool] = digest
                self._send(Assigned(pool, digest, self._current.get(pool), refused))
            is_told.set()

        self._loaded.put(finish)
        os.write(self._wake_write, b"\0")
        is_told.wait()


def _give_back() -> None:
    """Loading frees many small pieces between those that stay: 8 MiB of the process that glibc keeps unless asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _read(path: Path, digest: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactRefused(f"{path.name[:12]} cannot be read: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise ArtifactRefused(f"{path.name[:12]} does not fit its digest: it is damaged")
    return data


def serve(
    descriptor: int,
    directory: Path,
    service: Service,
    notes: Notes,
    *,
    limit_s: float = 0.0,
    save_s: float = SAVE_INTERVAL_S,
) -> None:
    """Run on an inherited socket until it closes, then save what was learned.

    Args:
        limit_s: see ``Gathering``. save_s: how often what was learned is saved.
    """
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
    gc.freeze()
    with socket.socket(fileno=descriptor) as sock:
        worker = Worker(sock, service, state, notes, limit_s=limit_s, save_s=save_s)
        try:
            worker.run()
        except (ConnectionResetError, BrokenPipeError):
            # A router that ends or is replaced closes with answers unread, or before they are written.
            notes.info("predictor.router_gone")
        except OSError as error:
            notes.warning("predictor.socket_broke", reason=error.strerror)
        except SystemExit:
            notes.info("predictor.worker_told_to_end")
        signal.alarm(HANG_LIMIT_S)
        worker.save()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of the worker."""
    parser = argparse.ArgumentParser(prog="router_ext.predict.worker", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="where what was learned is kept")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--router", default="")
    parser.add_argument("--limit-ms", type=float, default=0.0, help="how long the router waits for an answer")
    parser.add_argument("--save-s", type=float, default=SAVE_INTERVAL_S, help="how often what was learned is saved")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    args = parser.parse_args(argv)
    notes = Notes(level=args.log_level, router=args.router)
    serve(args.fd, args.dir, _service(notes), notes, limit_s=args.limit_ms / 1_000.0, save_s=args.save_s)
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
    return LengthService(timer=time.perf_counter, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
