"""Waiting for the next revision: one watcher thread per process, any number of waiting requests, no connection held.

The watcher looks at the database once a second, for one short query, and at once when Valkey announces a revision.
So a change is seen within about a second with Valkey gone or its message lost, and within milliseconds otherwise.
It runs only while somebody waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import redis
import structlog
from django.db import DatabaseError, connection
from psycopg_pool import PoolTimeout

from controlplane.common.valkey import UNAVAILABLE, valkey
from controlplane.rollout.actions import CHANNEL

logger = structlog.get_logger(__name__)

LOOK_EVERY_S = 1.0


class RevisionWatcher:
    """Wakes waiting threads when the newest revision's number changes.

    Args:
        look: reads the number of the newest revision; called in the watcher's thread.
    """

    def __init__(self, look: Callable[[], int]) -> None:
        self._look = look
        self._condition = threading.Condition()
        self._number = 0
        self._waiting = 0
        self._is_running = False
        self._is_stopping = False

    def stop(self) -> None:
        """Let everybody who waits go within a second; whoever comes later does not wait. Safe in a signal handler."""
        self._is_stopping = True

    def wait_beyond(self, number: int, timeout_s: float) -> bool:
        """Block until a revision other than ``number`` is known, or ``timeout_s`` have passed."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            self._waiting += 1
            # What an earlier watch has seen may be older than what the caller has read.
            self._number = max(self._number, number)
            try:
                while self._number == number and not self._is_stopping:
                    if not self._is_running:
                        self._is_running = True
                        threading.Thread(target=self._run, name="revision-watcher", daemon=True).start()
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        return False
                    self._condition.wait(remaining)
                return self._number != number
            finally:
                self._waiting -= 1

    def _run(self) -> None:
        subscription: redis.client.PubSub | None = None
        try:
            while True:
                with self._condition:
                    if self._waiting == 0 or self._is_stopping:
                        self._is_running = False
                        self._condition.notify_all()
                        return
                # Subscribe before looking: what is announced in between is then either seen or heard.
                subscription = self._subscribe(subscription)
                self._take_look()
                subscription = self._listen(subscription)
        except BaseException:
            # The thread must not die and leave the flag up: nobody would start another.
            with self._condition:
                self._is_running = False
                self._condition.notify_all()
            raise
        finally:
            if subscription is not None:
                subscription.close()

    def _take_look(self) -> None:
        try:
            number = self._look()
        except (DatabaseError, PoolTimeout):
            logger.warning("revision.look_failed")
            return
        with self._condition:
            if number != self._number:
                self._number = number
                self._condition.notify_all()

    def _subscribe(self, subscription: redis.client.PubSub | None) -> redis.client.PubSub | None:
        if subscription is not None:
            return subscription
        try:
            subscription = valkey().pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call] # redis' own
            subscription.subscribe(CHANNEL)
        except UNAVAILABLE:
            return None
        return subscription

    def _listen(self, subscription: redis.client.PubSub | None) -> redis.client.PubSub | None:
        """Return after an announcement or a second, whichever comes first."""
        if subscription is None:
            time.sleep(LOOK_EVERY_S)
            return None
        deadline = time.monotonic() + LOOK_EVERY_S
        try:
            while (remaining := deadline - time.monotonic()) > 0:
                if subscription.get_message(timeout=remaining) is not None:
                    break
        except UNAVAILABLE:
            subscription.close()
            time.sleep(max(0.0, deadline - time.monotonic()))
            return None
        return subscription


def look_at_database() -> int:
    """The newest number, by a connection that goes back to the pool at once."""
    from controlplane.rollout.queries import current_number

    try:
        return current_number()
    finally:
        connection.close()


watcher = RevisionWatcher(look_at_database)
"""The one of this process: threads are what it shares."""
