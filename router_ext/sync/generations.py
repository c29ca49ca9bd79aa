"""Books of routers that were replaced, beside those of the router that serves.

    <state folder>/                 the newest router: router.lock, spool/, inflight.bin
    <state folder>/leaving-*/       one that was replaced and still answers: the same, until it ends

Whoever leaves keeps its own books to the end and delivers from them. Once its lock is free (it has ended, however),
the newest router books what it left and delivers the rest: every event is in one spool or, after a kill in between,
in two, and the control plane knows it by its id.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
from pathlib import Path

import structlog

from router_ext.errors import LedgerFull, SettingsError
from router_ext.sync.ledger import Ledger, now_us

log = structlog.get_logger(__name__)

PREFIX = "leaving-"
RETRY_S = 0.2


def leaving_folder(directory: Path) -> Path:
    """A new name for the books of this process, which is being replaced."""
    return directory / f"{PREFIX}{os.getpid()}-{now_us():x}"


def leaving_folders(directory: Path) -> list[Path]:
    """Books of routers that were replaced, oldest first."""
    found = [path for path in directory.glob(PREFIX + "*") if path.is_dir()]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def is_alive(folder: Path) -> bool:
    """Whether the router that left these books still runs."""
    try:
        descriptor = os.open(folder / "router.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


async def adopt_books(ledger: Ledger, directory: Path) -> int:
    """Take over the books of every router that was replaced and has ended. Returns the number of events.

    Waits while there is no room for them here. What blocks runs in a worker thread.
    """
    count = 0
    for folder in await asyncio.to_thread(leaving_folders, directory):
        if folder == ledger.directory:
            continue  # ours: a process is not kept out by its own lock
        try:
            left = await asyncio.to_thread(Ledger.open, folder, now_us=now_us(), lock_wait_s=0.0)
        except SettingsError:
            continue  # it is still there
        except (LedgerFull, OSError) as error:
            log.error("ledger.not_adopted", folder=folder.name, reason=str(error))
            continue
        try:
            count += await _take_all(ledger, left, folder)
        except OSError as error:
            log.error("ledger.not_adopted", folder=folder.name, reason=error.strerror)
        is_done = not left.pending_events
        await asyncio.to_thread(left.close)
        if is_done:
            await asyncio.to_thread(_remove, folder, directory)
            log.info("ledger.adopted", folder=folder.name, aborted=len(left.recovered))
    return count


async def _take_all(ledger: Ledger, left: Ledger, folder: Path) -> int:
    count = 0
    is_full = False
    while left.pending_events:
        try:
            taken = ledger.append_from(left)
        except LedgerFull as error:
            # Opened anew the other spool would begin with what is here already.
            if not is_full:
                log.error("ledger.not_adopted", folder=folder.name, reason=error.message)
            is_full = True
            await asyncio.sleep(RETRY_S)
            continue
        if taken is None:
            break
        is_full = False
        # Here for good before it goes there.
        await asyncio.to_thread(ledger.sync)
        left.ack(taken)
        count += len(taken.payloads)
    return count


def _remove(folder: Path, directory: Path) -> None:
    _keep_damaged(folder, directory)
    shutil.rmtree(folder, ignore_errors=True)


def _keep_damaged(folder: Path, directory: Path) -> None:
    """What could not be read stays for the operator."""
    damaged = folder / "spool" / "damaged"
    if not damaged.is_dir():
        return
    kept = directory / "spool" / "damaged"
    kept.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in damaged.iterdir():
        with contextlib.suppress(OSError):
            path.replace(kept / f"{folder.name}-{path.name}")
