from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from router_ext.sync.heartbeat import HeartbeatClient
from router_ext.sync.session import ControlPlaneSession
from router_ext.wire.controlplane import Heartbeat


def heartbeat(revision: int) -> Heartbeat:
    return Heartbeat(
        router="rtr_1", version="0.1.0", address="http://x", applied_revision=revision, applied_at_us=revision
    )


async def test_a_heartbeat_is_sent_at_once_when_something_was_applied(
    control_plane: Any, session: ControlPlaneSession
) -> None:
    revision = 1
    client = HeartbeatClient(session, lambda: heartbeat(revision), interval_s=60)
    task = asyncio.create_task(client.run())
    await control_plane.wait_for(lambda: len(control_plane.heartbeats) == 1)
    revision = 2
    client.notify()
    await control_plane.wait_for(lambda: len(control_plane.heartbeats) == 2)
    assert [beat.applied_revision for beat in control_plane.heartbeats] == [1, 2]
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_heartbeats_repeat_and_survive_a_control_plane_that_fails(
    control_plane: Any, session: ControlPlaneSession
) -> None:
    client = HeartbeatClient(session, lambda: heartbeat(1), interval_s=0.01)
    control_plane.heartbeat_status = 500
    assert not await client.send()
    assert client.last_error is not None
    task = asyncio.create_task(client.run())
    control_plane.heartbeat_status = 204
    await control_plane.wait_for(lambda: len(control_plane.heartbeats) >= 3)
    assert client.last_error is None
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
