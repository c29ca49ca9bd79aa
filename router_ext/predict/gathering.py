"""How long the worker waits for company before it answers: a batch of two costs far less than two of one.

Nothing is waited for while questions are rare, nor once ``ENOUGH`` are there. Questions may be frequent and yet never
meet, if each is asked when the one before is answered; so what came of waiting is remembered, and where nothing came of
it, it is tried again once in ``_TRY_AGAIN`` questions.
"""

from __future__ import annotations

SHARE = 0.5
"""Of the time that answers are waited for. The rest is for the batch itself, and for both ways through the socket."""
LONGEST_S = 0.0025
ENOUGH = 4
"""What a batch shares is a small part of it from here on."""

_WORTH, _FIRST = 0.15, 0.3
"""Company, on average, that a wait must bring, and what is believed at first: two dozen vain waits refute it."""
_LEARNED_SHARE, _LEARNED_COMPANY = 0.1, 0.03
_TRY_AGAIN = 500
_LONGEST_GAP_S = 1.0


class Gathering:
    """When the questions that are there are answered. Seconds of any clock that does not go back.

    Args:
        limit_s: how long the router waits for an answer.

    Attributes:
        due_s: when to answer; None: there are no questions.
    """

    def __init__(self, limit_s: float) -> None:
        self.due_s: float | None = None
        self._window_s = min(SHARE * limit_s, LONGEST_S)
        self._count = 0
        self._is_waiting = False
        self._last_s = -_LONGEST_GAP_S
        self._gap_s = _LONGEST_GAP_S
        self._company = _FIRST
        self._unwaited = 0

    def came(self, now_s: float) -> None:
        """A question has come."""
        gap_s = min(now_s - self._last_s, _LONGEST_GAP_S)
        self._last_s = now_s
        self._gap_s += _LEARNED_SHARE * (gap_s - self._gap_s)
        self._count += 1
        if self.due_s is None:
            self._is_waiting = self._is_worth_it()
            self.due_s = now_s + self._window_s if self._is_waiting else now_s
        if self._count >= ENOUGH:
            self.due_s = now_s

    def _is_worth_it(self) -> bool:
        if self._window_s < _FIRST * self._gap_s:
            return False
        if self._company < _WORTH:
            self._unwaited += 1
            if self._unwaited < _TRY_AGAIN:
                return False
        self._unwaited = 0
        return True

    def answered(self, n_left: int, now_s: float) -> None:
        """A batch is done; so many questions are left, and wait no longer."""
        if self._is_waiting:
            self._company += _LEARNED_COMPANY * (self._count - 1 - self._company)
        self._is_waiting = False
        self._count = n_left
        self.due_s = now_s if n_left else None
