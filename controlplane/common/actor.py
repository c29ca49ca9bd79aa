"""On whose behalf a use case runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controlplane.common.errors import NotAllowed, NotFound


class Scope(StrEnum):
    """What an actor may do. The first three hold for the platform, the others for one tenant only."""

    READ = "admin.read"
    WRITE = "admin.write"
    MEMBERS = "admin.members"
    TENANT_READ = "tenant.read"
    TENANT_WRITE = "tenant.write"


TENANT_SCOPES = frozenset({Scope.TENANT_READ, Scope.TENANT_WRITE})
_OF_PLATFORM = {Scope.TENANT_READ: Scope.READ, Scope.TENANT_WRITE: Scope.WRITE}
_OF_TENANT = {Scope.MEMBERS: Scope.TENANT_WRITE}
_WRITING = {Scope.READ: Scope.WRITE, Scope.TENANT_READ: Scope.TENANT_WRITE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who acts. ``kind``: user, token, router, system. ``id`` is public, ``label`` is for people; neither is secret.

    ``tenant``: the only tenant whose things the actor may see or change; None for people of the platform.
    """

    kind: str
    id: str
    label: str
    scopes: frozenset[str] = frozenset()
    tenant: str | None = None

    def holds(self, scope: Scope) -> bool:
        """Whether the actor may do what ``scope`` stands for; writing includes reading.

        A scope of one tenant is held for all by who holds the platform's, and nothing of the platform by who acts for
        one tenant; members of the own tenant are among what its admins may write.
        """
        needed = self.needed(scope)
        if self.tenant is not None and needed not in TENANT_SCOPES:
            return False
        return needed in self.scopes or _WRITING.get(needed) in self.scopes

    def needed(self, scope: Scope) -> Scope:
        """The scope that this actor would have to hold for it."""
        return (_OF_PLATFORM if self.tenant is None else _OF_TENANT).get(scope, scope)

    def require(self, scope: Scope) -> None:
        """The actor must hold ``scope``.

        Raises:
            NotFound: the platform's things do not exist for who acts for one tenant.
            NotAllowed: in all other cases.
        """
        if self.holds(scope):
            return
        if self.tenant is not None and scope in _WRITING.keys() | _WRITING.values() and scope not in TENANT_SCOPES:
            raise NotFound("Nothing of that address.")
        raise NotAllowed(f"{self.label} lacks the scope {self.needed(scope)}")


def system_actor(name: str) -> Actor:
    """The control plane itself, acting by schedule or command."""
    return Actor(kind="system", id=name, label=name, scopes=frozenset(Scope))
