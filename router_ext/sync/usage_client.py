"""Ended requests to the control plane: batches of the spooled bytes, sent again byte for byte until acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from router_ext.sync.ledger import Ledger
from router_ext.sync.session import Backoff, ControlPlaneRefused, ControlPlaneSession, ControlPlaneUnavailable
from router_ext.wire.controlplane import USAGE_PATH, UsageAck
from router_ext.wire.decoding import NotDecoded

log = structlog.get_logger(__name__)

BATCH_EVENTS = 256
"""Reading and framing a batch takes about 0.5 ms of the event loop at this size."""
LINGER_S = 0.1
"""Wait after the first event, so that a busy router sends few batches and an idle one is prompt."""
TIMEOUT_S = 15.0
MAX_SERVER_FAULTS = 8
"""Answers of 500 to the same bytes after which the bytes are suspected (some 30 s with the backoff's delays)."""
_MAX_ANSWER_BYTES = 1 << 16

OnAcked = Callable[[list[bytes], int], None]


class UsageClient:
    """Delivers what the ledger holds, oldest first, one batch at a time.

    A batch that was answered with anything but a complete ``UsageAck`` is sent again with the same bytes; the control
    plane knows events by id. A batch that is refused (4xx, or 500 again and again) is halved to find the event at
    fault, which is set aside in the spool's ``damaged/`` folder if it is refused again after others of its batch were
    taken; as long as nothing is taken, nothing is set aside (a control plane that refuses everything is at fault
    itself).

    Attributes:
        n_sent: events acknowledged as new; n_known: as known before; n_set_aside: kept for the operator.
        n_failures: tries that failed since start. last_error: text of the newest failure, None while all is well.

    Args:
        on_acked: told what was taken, and by when it was booked (0: set aside). turn: held from a try to that.
        on_known: told that events had been taken before, without this router's having learnt of it.
    """

    def __init__(
        self,
        session: ControlPlaneSession,
        ledger: Ledger,
        *,
        router: str,
        backoff: Backoff | None = None,
        on_acked: OnAcked | None = None,
        on_known: Callable[[], None] | None = None,
        turn: asyncio.Lock | None = None,
    ) -> None:
        self.n_sent = 0
        self.n_known = 0
        self.n_quarantined = 0
        self.n_set_aside = 0
        self.n_failures = 0
        self.last_error: str | None = None
        self._session = session
        self._ledger = ledger
        self._head = b'{"router":' + msgspec.json.encode(router) + b',"events":['
        self._on_acked = on_acked
        self._on_known = on_known
        self._turn = turn or asyncio.Lock()
        self._backoff = backoff or Backoff(first_s=0.2, limit_s=10.0)
        self._decoder = msgspec.json.Decoder(UsageAck)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._ledger.wait_pending()
            await asyncio.sleep(LINGER_S)
            while await self.send_one():
                pass

    async def send_one(self) -> bool:
        """Send the oldest batch and acknowledge it, trying until it is taken. False if there was nothing to send."""
        batch = self._ledger.read_batch(max_events=BATCH_EVENTS)
        if batch is None:
            return False
        while not await self._deliver(batch.payloads):
            await asyncio.sleep(self._backoff.next_s())
            if len(batch.payloads) == 1:  # more may have come, to tell a bad event from a bad control plane
                batch = self._ledger.read_batch(max_events=BATCH_EVENTS) or batch
        self._ledger.ack(batch)
        return True

    async def _deliver(self, payloads: list[bytes]) -> bool:
        """True once every event is taken or set aside, False if all of them were refused."""
        refused: list[bytes] = []
        n_taken = await self._post(payloads, refused)
        if not n_taken:
            return False
        for payload in refused:
            if await self._post([payload], []):
                continue  # it was refused before the control plane came to its senses
            path = self._ledger.quarantine(payload)
            if self._on_acked is not None:
                self._on_acked([payload], 0)
            self.n_set_aside += 1
            log.error("usage.event_set_aside", file=str(path))
        return True

    async def _post(self, payloads: list[bytes], refused: list[bytes]) -> int:
        """Number of events taken of ``payloads``; the others are added to ``refused``."""
        body = self._head + b",".join(payloads) + b"]}"
        n_server_faults = 0
        while True:
            try:
                async with self._turn:
                    ack = await self._try(payloads, body)
                    if self._on_acked is not None:
                        self._on_acked(payloads, ack.booked_at_us)
            except ControlPlaneRefused as error:
                self._failed(error.message)
                return await self._halve(payloads, refused)
            except ControlPlaneUnavailable as error:
                self._failed(error.message)
                n_server_faults += error.is_server_fault
                if n_server_faults >= MAX_SERVER_FAULTS:
                    return await self._halve(payloads, refused)
                await asyncio.sleep(self._backoff.next_s(error.retry_after_s))
            except NotDecoded as error:
                self._failed(f"POST {USAGE_PATH}: not an acknowledgement: {error}")
                await asyncio.sleep(self._backoff.next_s())
            else:
                break
        self.n_sent += ack.accepted
        self.n_known += ack.known
        self.n_quarantined += ack.quarantined
        if ack.known and self._on_known is not None:
            self._on_known()
        if self.last_error is not None:
            log.info("usage.delivery_resumed", pending_events=self._ledger.pending_events)
        self.last_error = None
        self._backoff.reset()
        return len(payloads)

    async def _try(self, payloads: list[bytes], body: bytes) -> UsageAck:
        answer = await self._session.request(
            "POST", USAGE_PATH, body=body, timeout_s=TIMEOUT_S, max_bytes=_MAX_ANSWER_BYTES
        )
        if answer.status != 200:
            raise ControlPlaneUnavailable(f"POST {USAGE_PATH}: status {answer.status}")
        ack = self._decoder.decode(answer.body)
        if ack.accepted + ack.known + ack.quarantined != len(payloads):
            raise ControlPlaneUnavailable(f"sent {len(payloads)} events, acknowledged are {ack}")
        return ack

    async def _halve(self, payloads: list[bytes], refused: list[bytes]) -> int:
        if len(payloads) == 1:
            refused.append(payloads[0])
            return 0
        half = len(payloads) // 2
        return await self._post(payloads[:half], refused) + await self._post(payloads[half:], refused)

    def _failed(self, reason: str) -> None:
        if self.last_error is None:
            log.warning("usage.delivery_failed", reason=reason, pending_events=self._ledger.pending_events)
        self.n_failures += 1
        self.last_error = reason

    async def flush(self, *, limit_s: float) -> None:
        """Send what is pending for at most ``limit_s``; the rest stays in the spool for the next start."""
        try:
            async with asyncio.timeout(limit_s):
                while await self.send_one():
                    pass
        except TimeoutError:
            log.info("usage.left_in_spool", pending_events=self._ledger.pending_events)
