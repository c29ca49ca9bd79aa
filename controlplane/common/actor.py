"""On whose behalf a use case runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controlplane.common.errors import NotAllowed


class Scope(StrEnum):
    READ = "admin.read"
    WRITE = "admin.write"


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who acts. ``kind``: user, token, router, system. ``id`` is public, ``label`` is for people; neither is secret."""

    kind: str
    id: str
    label: str
    scopes: frozenset[str] = frozenset()

    def require(self, scope: Scope) -> None:
        """Raises NotAllowed unless the actor holds ``scope``; writing includes reading."""
        if scope not in self.scopes and not (scope == Scope.READ and Scope.WRITE in self.scopes):
            raise NotAllowed(f"{self.label} lacks the scope {scope}")


def system_actor(name: str) -> Actor:
    """The control plane itself, acting by schedule or command."""
    return Actor(kind="system", id=name, label=name, scopes=frozenset(Scope))
