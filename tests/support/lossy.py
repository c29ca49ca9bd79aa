"""A relay between a router and its control plane that can lose answers: what was booked is not known to be booked."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class LossyLink:
    """Forwards bytes both ways. ``lose(n)``: the next ``n`` acknowledgements of usage are swallowed, connections cut.

    Attributes:
        n_lost: answers swallowed so far.
    """

    def __init__(self) -> None:
        self.port = 0
        self.n_lost = 0
        self._to_lose = 0

    def lose(self, count: int) -> None:
        self._to_lose += count

    @contextlib.contextmanager
    def running(self, port: int, target: int) -> Iterator[None]:
        """Listen on ``port`` and forward to ``target``, in a thread with a loop of its own."""
        loop = asyncio.new_event_loop()
        started = threading.Event()
        over = asyncio.Event()

        async def serve() -> None:
            server = await asyncio.start_server(lambda r, w: self._relay(r, w, target), "127.0.0.1", port)
            started.set()
            await over.wait()
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        def run() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(serve())
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

        thread = threading.Thread(target=run)
        thread.start()
        started.wait()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(over.set)
            thread.join()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(reader, upstream_writer, is_answer=False))
                tasks.create_task(self._copy(upstream_reader, writer, is_answer=True))
        except* OSError:
            pass
        finally:
            writer.close()
            upstream_writer.close()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_answer: bool) -> None:
        while data := await source.read(1 << 16):
            if is_answer and self._to_lose and b'"accepted"' in data:
                self._to_lose -= 1
                self.n_lost += 1
                raise ConnectionResetError("an answer was lost")
            sink.write(data)
            await sink.drain()
        raise ConnectionResetError("one side has closed")
