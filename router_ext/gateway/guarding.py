"""A request with a grammar before it is queued: proven, priced, and written so that TGI's compilers take it.

    judged = await Guarding(guard, metrics).judge(engine, tenant, tier, generation)
    judged.generation        # its references followed, if it had some
    judged.digest, .stall_s  # what the scheduler must know (``core.exposure``)

The event loop compiles nothing: ``guard.service`` has it done, or knows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import orjson

from router_ext.core.ids import TenantId, TierName
from router_ext.errors import FairlaneError
from router_ext.gateway.brakes import grammars_stopped
from router_ext.gateway.generation import GenerationRequest
from router_ext.guard.grammar import Grammar, Kind
from router_ext.guard.messages import Proof
from router_ext.guard.service import Guard
from router_ext.guard.verdict import DEFAULT_LIMIT_S, ENTRY_S, Backend, check, predicted_stall_s
from router_ext.obs.metrics import Metrics

if TYPE_CHECKING:
    from router_ext.gateway.engine import PoolEngine


class Judged(msgspec.Struct, frozen=True):
    """``digest``: of the grammar, None without one, or unjudged. ``stall_s``: of a backend of usual speed."""

    generation: GenerationRequest
    digest: str | None = None
    stall_s: float = 0.0


class Guarding:
    """Of one router: one guard for all its pools."""

    def __init__(self, guard: Guard, metrics: Metrics) -> None:
        self._guard = guard
        self._verdicts = metrics.guard_verdicts

    async def judge(
        self, engine: PoolEngine, tenant: TenantId, tier: TierName, generation: GenerationRequest
    ) -> Judged:
        """Let a request through, or refuse it with the figures.

        Raises:
            GrammarRefused: no compiler takes the grammar, or it would stall a backend longer than the tier allows.
            GuardUnavailable: it could not be judged in time. StoppedByOperator: the pool takes no grammars at present.
        """
        found = _grammar_of(generation)
        if found is None:
            return Judged(generation)
        grammar, param = found
        if not engine.record.takes_grammars:
            raise grammars_stopped()
        if not engine.record.is_guarded:
            return Judged(generation)
        limit_s = engine.grammar_limits.get(tier, DEFAULT_LIMIT_S)
        backend = Backend(engine.model.vocabulary(engine.record.vocabulary))
        slowest = replace(backend, entry_s=ENTRY_S * engine.scheduler.stall_ratio)
        try:
            proof = await self._guard.prove(grammar, tenant, limit_s)
            check(proof, slowest, limit_s, param=param)
        except FairlaneError as error:
            self._verdicts.labels(engine.name, error.code).inc()
            raise
        self._verdicts.labels(engine.name, "proven").inc()
        return Judged(_inlined(generation, grammar, proof), grammar.digest, predicted_stall_s(proof, backend))


def _grammar_of(generation: GenerationRequest) -> tuple[Grammar, str] | None:
    """The grammar TGI would force on the answer, and the client's name for it."""
    if generation.grammar is not None:
        grammar = Grammar.of_field(generation.grammar)
        return None if grammar is None else (grammar, generation.dialect.grammar_param)
    tools = generation.tools
    if tools is None:
        return None
    grammar = Grammar.of_tools(tools.tools, tools.mode, tools.name)
    return None if grammar is None else (grammar, "tools")


def _inlined(generation: GenerationRequest, grammar: Grammar, proof: Proof) -> GenerationRequest:
    if proof.inlined is None or generation.passthrough is None:
        return generation
    value = orjson.loads(proof.inlined)
    passthrough = generation.passthrough
    changed = passthrough.with_functions(value) if grammar.kind is Kind.TOOLS else passthrough.with_schema(value)
    return msgspec.structs.replace(generation, passthrough=changed)
