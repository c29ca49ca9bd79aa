"""How a router process collects garbage; commands that time its parts do the same."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (20_000, 10, 20)
"""Net allocations per young collection, young per middle, middle per full one. A request leaves few cycles behind."""


@contextmanager
def keeping() -> Iterator[None]:
    """What is built inside stays for long: the collector looks at it neither now nor later.

    Looking at 100,000 keys takes a tenth of a second in which nothing else runs. What refers to nothing any more is
    freed as ever; only a cycle that has come to be in the very time of the block is never found.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def tuned() -> Iterator[None]:
    """Collect seldom, and never look at what is there already.

    What has been imported and built by now lives as long as the process: the collector need not look at it again and
    again, and what a request leaves behind goes without it.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
