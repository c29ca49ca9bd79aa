"""What a run keeps. Metrics and reports are computed from this alone.

Units: seconds of virtual time from the start of the run; tokens; service units (``w_prompt`` per prompt token,
``w_output`` per output token), not divided by weight unless said. Lists by tenant follow ``tenants``, lists by backend
the order of the servers.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class TenantInfo:
    """A tenant of the suite. Targets as in ``workloads.Client``."""

    name: str
    weight: float
    ttft_target_s: float | None
    completion_target_s: float | None
    is_batch: bool


@dataclass(slots=True, kw_only=True)
class Requests:
    """One row per request, in order of arrival, as columns.

    Attributes:
        tenant: index into ``Recording.tenants``.
        first_s, finish_s: when the client saw the first and the last token; None if it did not within the run.
        output_tokens: delivered within the run. wanted_tokens: what it would get in all.
        agent: index into ``Recording.agents``, -1 for none.
        is_refused: turned away, on arrival or while it waited.
        num_preempted: how often it was cut.
    """

    tenant: list[int] = field(default_factory=list)
    arrival_s: list[float] = field(default_factory=list)
    first_s: list[float | None] = field(default_factory=list)
    finish_s: list[float | None] = field(default_factory=list)
    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    wanted_tokens: list[int] = field(default_factory=list)
    agent: list[int] = field(default_factory=list)
    is_refused: list[bool] = field(default_factory=list)
    num_preempted: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tenant)


@dataclass(slots=True, kw_only=True)
class Samples:
    """The state at regular instants: after everything that happened until then, before anything later.

    Attributes:
        interval_s: a whole number of seconds that divides 30.
        at_s: the instants: 0, ``interval_s``, ... and, whenever that is, ``Recording.end_s``.
        prompt_tokens, output_tokens: by tenant: delivered so far. The prompt counts when the first token is seen,
            once, every output token once.
        counters: by tenant: the scheduler's service counter (service per weight, lifts included), as it stands;
            empty without a router.
        queued: by tenant: requests that wait, in the router or in a server's own queue.
        kv_tokens, running: by backend: reserved tokens and running requests.
    """

    interval_s: float = 1.0
    at_s: list[float] = field(default_factory=list)
    prompt_tokens: list[list[int]] = field(default_factory=list)
    output_tokens: list[list[int]] = field(default_factory=list)
    counters: list[list[float]] = field(default_factory=list)
    queued: list[list[int]] = field(default_factory=list)
    kv_tokens: list[list[int]] = field(default_factory=list)
    running: list[list[int]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Recording:
    """One suite, one policy, one seed.

    Attributes:
        end_s: end of arrivals, up to which throughput, shares and differences are taken. over_s: end of the run.
        w_prompt, w_output: prices of a token.
        usable_tokens: by backend: KV that requests can hold together.
        kv_seconds, running_seconds: integrals over time of reserved KV tokens and of running requests, over all
            backends, up to ``end_s``; ``kv_seconds_over``: the first one up to ``over_s``.
        agents: (arrival, finish or None) of every agent.
        accumulated_difference: largest difference of delivered service per weight between two tenants, from 0 to
            ``end_s``. accumulated_while_waiting: see ``gaps.Gaps``; None without a spell.
        bound: largest pair bound of the pool's policy (service per weight), None if it promises none.
        counter_bound, largest_gap: the bound of ``(c_f - min c) * w_f`` and the largest seen, in service units.
        num_recomputed: prompt tokens computed again because of a preemption, over the whole run.
            num_continued: at slice continuations. num_prefilled: all prompt tokens computed.
        num_output: output tokens delivered over the whole run.
        num_dispatched, num_preempted: dispatches and cuts.
        digest: hash of all decisions: equal digests mean that the same was done at the same instants.
        cpu_s: CPU time of the run.
    """

    suite: str
    policy: str
    seed: int
    tenants: list[TenantInfo]
    end_s: float
    over_s: float
    w_prompt: float
    w_output: float
    usable_tokens: list[int]
    kv_seconds: float
    kv_seconds_over: float
    running_seconds: float
    requests: Requests
    agents: list[tuple[float, float | None]]
    samples: Samples
    accumulated_difference: float
    accumulated_while_waiting: float | None
    bound: float | None
    counter_bound: float | None
    largest_gap: float | None
    num_recomputed: int
    num_continued: int
    num_prefilled: int
    num_output: int
    num_dispatched: int
    num_preempted: int
    digest: str
    cpu_s: float

    def service(self, tenant: int, sample: int) -> float:
        """Service delivered to a tenant up to a sample."""
        samples = self.samples
        return (
            self.w_prompt * samples.prompt_tokens[tenant][sample]
            + self.w_output * samples.output_tokens[tenant][sample]
        )
