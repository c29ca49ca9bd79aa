"""Mutants of ``slo-fair`` that several laws must notice."""

from __future__ import annotations

from typing import Any

import pytest

from router_ext.core.decision import Decider
from router_ext.core.fairness.base import Standing
from router_ext.core.fairness.slo_fair import SloFair


def free_skipping(patch: pytest.MonkeyPatch) -> None:
    """Whoever fits may go ahead of a pick that does not, without a pass and past its claim."""

    def in_turn(self: Any, now: float, floor: float) -> Any:
        popped: list[Any] = []
        standing = Standing.PICK
        try:
            while (entry := self._keys.pop()) is not None:
                popped.append(entry)
                yield entry[2].head(now, self._aging_s), standing
                standing = Standing.BACKFILL
        finally:
            self._keys.restore(popped)

    patch.setattr(SloFair, "_in_turn", in_turn)
    patch.setattr(Decider, "_unclaimed", lambda self, options, *rest: options)


def unlimited_going_on(patch: pytest.MonkeyPatch) -> None:
    """Whoever's slice has ended goes on, however far its tenant or key is ahead."""
    patch.setattr(SloFair, "may_go_on", lambda self, request, held_tokens, now: True)


def unlimited_urgency(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SloFair, "_may_pass", lambda self, queue, floor: True)
