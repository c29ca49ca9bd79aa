"""The frame around every use case, and the seam through which configuration changes reach ``rollout``."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar, cast

from django.db import transaction

from controlplane.common.actor import Actor, Scope

_NAMED = 10
P = ParamSpec("P")
R = TypeVar("R")


class _Frame(threading.local):
    """State of the use case that runs in this thread."""

    depth = 0
    is_config_changed = False
    reasons: tuple[str, ...] = ()
    last: tuple[Callable[[], object], ...] = ()


_frame = _Frame()
_publishers: list[Callable[[Actor, str], object]] = []


def on_config_change(publisher: Callable[[Actor, str], object]) -> None:
    """Register what runs at the end of a use case that changed the configuration, inside its transaction.

    It may raise to refuse the change, which rolls everything back.
    """
    if publisher not in _publishers:
        _publishers.append(publisher)


def mark_config_changed(reason: str) -> None:
    """Say that routers must learn of what the running use case does. ``reason`` is shown beside the revision."""
    if _frame.depth == 0:
        raise RuntimeError("mark_config_changed outside a use case")
    _frame.is_config_changed = True
    _frame.reasons = (*_frame.reasons, reason)


def _together(reasons: Sequence[str]) -> str:
    """Why routers get another revision; of many reasons the first."""
    named = "; ".join(reasons[:_NAMED])
    return named if len(reasons) <= _NAMED else f"{named}; and {len(reasons) - _NAMED:,} more"


def run_last(function: Callable[[], object]) -> bool:
    """Have ``function`` run at the end of the running use case, behind publishing, inside its transaction.

    For what takes a lock that everybody wants: it is held only until the commit, and no other lock is waited for
    meanwhile. What an inner use case asked for is forgotten when that one fails.

    Returns:
        False outside a use case: the caller runs it itself.
    """
    if _frame.depth == 0:
        return False
    _frame.last = (*_frame.last, function)
    return True


def use_case(*, scope: Scope | None = Scope.WRITE) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run the function in one transaction on behalf of its keyword argument ``actor``.

    Nested use cases join the outermost one, so that several changes give one revision. Publishing comes last but
    for the audit entries: its lock is taken after every row lock and held only until the commit.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            actor = cast(Actor, kwargs["actor"])
            if scope is not None:
                actor.require(scope)
            is_outermost = _frame.depth == 0
            asked = _frame.last, _frame.is_config_changed, _frame.reasons
            try:
                with transaction.atomic():
                    _frame.depth += 1
                    result = function(*args, **kwargs)
                    if is_outermost and _frame.is_config_changed:
                        for publisher in _publishers:
                            publisher(actor, _together(_frame.reasons))
                    if is_outermost:
                        for each in _frame.last:
                            each()
                    return result
            except BaseException:
                _frame.last, _frame.is_config_changed, _frame.reasons = asked
                raise
            finally:
                if is_outermost:
                    _frame.depth, _frame.is_config_changed, _frame.reasons, _frame.last = 0, False, (), ()
                else:
                    _frame.depth -= 1

        return run

    return decorate
