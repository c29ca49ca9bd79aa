"""Which agent a request belongs to, as its client declares by header.

    x-fairlane-agent-id         any text; the calls of one tenant that carry the same one form one agent
    x-fairlane-interaction-id   the same for a dialogue of several turns; the agent's id goes before it
    x-fairlane-agent-cost       the agent's whole cost in KV token-time: sum of p * d + d * (d + 1) / 2 over its calls
                                (prompt p, output d tokens); without it the router predicts one

An id is a name inside its tenant and nothing else: the tenant comes from the key alone and is hashed into it, so two
tenants never share an agent. Nothing of it goes to a backend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b

from router_ext.core.ids import TenantId
from router_ext.errors import RequestRefused

AGENT_HEADER = b"x-fairlane-agent-id"
INTERACTION_HEADER = b"x-fairlane-interaction-id"
COST_HEADER = b"x-fairlane-agent-cost"
MAX_ID_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class DeclaredAgent:
    """What a request says of its agent. ``agent``: 16 hexadecimal digits, by which the scheduler knows it."""

    agent: str | None = None
    cost: float | None = None


NO_AGENT = DeclaredAgent()


def declared_agent(tenant: TenantId, agent: str | None, cost: str | None) -> DeclaredAgent:
    """Read the headers' values.

    Raises:
        RequestRefused: an id longer than 256 characters, or a cost that is no finite number above 0.
    """
    if not agent:
        return NO_AGENT
    if len(agent) > MAX_ID_CHARACTERS:
        raise RequestRefused(f"An agent's id has at most {MAX_ID_CHARACTERS} characters.", param=AGENT_HEADER.decode())
    return DeclaredAgent(blake2b(f"{tenant}\0{agent}".encode(), digest_size=8).hexdigest(), _cost(cost))


def _cost(given: str | None) -> float | None:
    if not given:
        return None
    try:
        cost = float(given)
    except ValueError:
        cost = math.nan
    if not 0.0 < cost < math.inf:
        message = f"An agent's cost is a finite number above 0, not {given[:40]!r}."
        raise RequestRefused(message, param=COST_HEADER.decode())
    return cost
