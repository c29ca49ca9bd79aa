"""The suites by name: tenants, weights, targets, arrivals, servers.

Rates, lengths and step times of the suites in lower case with underscores, ``overload``, ``overload-*``,
``proportional``, ``increase`` and ``light`` are those of the VTC paper's artifact (Sheng et al., OSDI 2024). All
others are this product's: one thing that an operator fears each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from router_ext.errors import SimulationError
from router_ext.sim.answers import kinds
from router_ext.sim.models import A10G, INCIDENT, MODELS, ServerModel
from router_ext.sim.traces import Row, clients, conversation_lengths, played, read_trace
from router_ext.sim.workloads import (
    Client,
    Pattern,
    Sizes,
    agents,
    answered,
    at_once,
    between,
    drawn_from,
    evenly,
    fixed,
    on_off,
    phases,
    poisson,
    ramp,
    recorded,
    requests,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One experiment.

    Attributes:
        same_as: the suite whose random streams it shares, so that both get the same arrivals.
        duration_s: end of arrivals; with a batch and open-ended clients, the batch's last completion instead.
        is_drained: the run goes on until everything that arrived is complete.
        pool: fields of the pool that differ from their defaults.
        longest_tokens: a request is refused if its input and so many outputs exceed the KV; 0 for no such rule.
        has_raw: running it without a router says something.
        has_alone: each tenant is run alone as well, for comparison.
        has_capacity: the rate up to which its targets are met is looked for.
    """

    name: str
    about: str
    clients: tuple[Client, ...]
    same_as: str = ""
    duration_s: float = 600.0
    model: ServerModel = A10G
    num_backends: int = 1
    is_drained: bool = False
    pool: Mapping[str, float] = field(default_factory=dict)
    longest_tokens: int = 0
    has_raw: bool = False
    has_alone: bool = False
    has_capacity: bool = False

    @property
    def is_until_batch_ends(self) -> bool:
        """Whether the batch's last completion is the end of arrivals."""
        return any(client.is_open_ended for client in self.clients)

    def alone(self, name: str) -> Suite:
        """The same servers with that tenant's requests alone: a batch to its end, who sends beside it for as long as is
        enough for a percentile.
        """
        until_batch_ends = self.is_until_batch_ends
        clients = tuple(
            replace(client, is_open_ended=until_batch_ends and client.is_batch)
            for client in self.clients
            if client.name == name
        )
        return replace(self, clients=clients, has_alone=False)


_LONG = fixed(256, 256)
_INTERACTIVE = between((32, 128), (32, 128))
_BATCH = between((64, 1_024), (64, 768))


def _named(*sources_of: tuple[Pattern, Sizes], weights: tuple[float, ...] = ()) -> tuple[Client, ...]:
    return tuple(
        Client(
            name=f"client{index}",
            source=requests(pattern, sizes),
            weight=weights[index] if weights else 1.0,
        )
        for index, (pattern, sizes) in enumerate(sources_of)
    )


def _even(*rates: float, weights: tuple[float, ...] = ()) -> tuple[Client, ...]:
    return _named(*((evenly(rate), _LONG) for rate in rates), weights=weights)


def _batch(name: str = "batch") -> Client:
    return Client(name=name, source=requests(poisson(2.0), _BATCH), is_batch=True)


def _adversary_max(declared: int, name: str, about: str) -> Suite:
    return Suite(
        name=name,
        about=about,
        same_as="adversary-max",
        clients=(
            Client(name="client0", source=requests(poisson(4.0), fixed(128, 32), max_new_tokens=declared)),
            Client(name="client1", source=requests(poisson(1.5), _LONG)),
        ),
    )


def _agents(rate: float, name: str, about: str, *, has_reduce: bool) -> Suite:
    source = agents(poisson(rate), has_reduce=has_reduce)
    return Suite(name=name, about=about, clients=(Client(name="client0", source=source),), is_drained=True)


def _vtc() -> list[Suite]:
    return [
        Suite(
            name="overload",
            about="two clients over their share, one twice the other",
            clients=_even(1.5, 3.0),
            duration_s=360.0,
        ),
        Suite(
            name="overload-multi",
            about="eight clients over their share",
            clients=_even(0.4, 0.4, 0.4, 0.6, 0.6, 0.6, 0.6, 0.6),
            duration_s=360.0,
        ),
        Suite(
            name="overload-weighted",
            about="four clients with weights 1:2:3:4",
            clients=_even(0.8, 0.8, 1.2, 1.6, weights=(1.0, 2.0, 3.0, 4.0)),
            duration_s=360.0,
        ),
        Suite(
            name="proportional",
            about="one client below its share, one near it, one above",
            clients=_even(0.25, 0.5, 1.5),
        ),
        Suite(
            name="on_off_less",
            about="an on/off client below its share beside one that overloads",
            clients=_named((on_off(evenly(0.5)), _LONG), (evenly(2.0), _LONG)),
        ),
        Suite(
            name="on_off_overload",
            about="an on/off client over its share beside one that overloads",
            clients=_named((on_off(evenly(2.0)), _LONG), (evenly(3.0), _LONG)),
        ),
        Suite(
            name="poisson_on_off_overload",
            about="Poisson arrivals, mixed lengths, the first client on/off",
            clients=_named(
                (on_off(poisson(0.5)), between((16, 512), (16, 512))), (poisson(2.0), between((16, 512), (16, 512)))
            ),
        ),
        Suite(
            name="poisson_short_long",
            about="many short requests against few long ones",
            clients=_named((poisson(8.0), fixed(64, 64)), (poisson(1.5), _LONG)),
        ),
        Suite(
            name="poisson_short_long_2",
            about="long prompts with short answers against the reverse",
            clients=_named((poisson(8.0), fixed(512, 32)), (poisson(1.5), fixed(32, 512))),
        ),
        Suite(
            name="increase",
            about="a steady client beside one whose rate rises tenfold",
            clients=_named((evenly(0.5), _LONG), (ramp(0.2, 2.0, over_s=600.0), _LONG)),
        ),
        Suite(
            name="dist_shift",
            about="on/off, then both overloading, then one below its share",
            clients=_named(
                (phases(on_off(evenly(0.5)), evenly(1.0), evenly(0.5), each_s=300.0), _LONG),
                (phases(evenly(2.0), evenly(1.0), evenly(1.5), each_s=300.0), _LONG),
            ),
            duration_s=900.0,
        ),
        Suite(name="light", about="less than the server can do", clients=_even(0.2, 0.8), duration_s=300.0),
    ]


def _own() -> list[Suite]:
    return [
        Suite(
            name="flood",
            about="a quiet tenant beside one that floods",
            clients=(
                Client(name="quiet", source=requests(evenly(1.0), fixed(64, 64)), ttft_target_s=0.2),
                Client(name="flooder", source=requests(evenly(32.0), fixed(64, 64))),
            ),
            duration_s=300.0,
            has_raw=True,
            has_alone=True,
        ),
        Suite(
            name="mixed",
            about="an interactive tenant beside an overloading batch",
            clients=(
                Client(name="interactive", source=requests(poisson(0.5), _INTERACTIVE), ttft_target_s=1.0),
                _batch(),
            ),
            has_alone=True,
        ),
        Suite(
            name="burst",
            about="200 requests at once beside an interactive tenant",
            clients=(
                Client(name="client0", source=requests(at_once(200, at_s=60.0), _LONG)),
                Client(name="client1", source=requests(poisson(0.5), _LONG), ttft_target_s=1.0),
            ),
        ),
        Suite(
            name="weights",
            about="three tenants with weights 6:3:1, all overloading, mixed sizes",
            clients=_named(
                *((poisson(3.0), between((32, 1_024), (32, 512))) for _ in range(3)), weights=(6.0, 3.0, 1.0)
            ),
        ),
        Suite(
            name="adversary-flood",
            about="a tenant that floods its interactive tier, beside an honest one and a batch",
            clients=(
                Client(name="client0", source=requests(poisson(4.0), _INTERACTIVE), ttft_target_s=1.0),
                Client(name="client1", source=requests(poisson(0.3), _INTERACTIVE), ttft_target_s=1.0),
                _batch("client2"),
            ),
        ),
        _adversary_max(4_096, "adversary-max", "a tenant that declares 4,096 tokens and writes 32"),
        _adversary_max(32, "adversary-max-honest", "the same tenant when it declares the 32 it writes"),
        Suite(
            name="incident",
            about="a chatbot beside 3,000 prompts of 8,000 tokens at once",
            clients=(
                Client(
                    name="chatbot",
                    source=requests(poisson(4.0), fixed(200, 150)),
                    ttft_target_s=0.5,
                    is_open_ended=True,
                ),
                Client(name="batch", source=requests(at_once(3_000), fixed(8_000, 200)), is_batch=True),
            ),
            model=INCIDENT,
            num_backends=2,
            has_raw=True,
            has_alone=True,
        ),
        Suite(
            name="kv-overreserve",
            about="clients that declare 4,096 tokens and write 100 to 300",
            clients=(
                Client(
                    name="client0",
                    source=requests(poisson(8.0), between((32, 128), (100, 300)), max_new_tokens=4_096),
                ),
            ),
            duration_s=300.0,
            has_raw=True,
        ),
    ]


def _tiers(rate: float) -> Suite:
    """Violations against rate; the pool is tuned for it as its operator would: urgency U', headroom 10%."""
    lengths = drawn_from(conversation_lengths())
    source = requests(poisson(rate / 3.0), lengths)
    return Suite(
        name="tiers",
        about="equal thirds of a real conversation load: first token in 6 s, completion in 600 s, in 1,800 s",
        clients=(
            Client(name="client0", source=source, ttft_target_s=6.0),
            Client(name="client1", source=source, completion_target_s=600.0),
            Client(name="client2", source=source, completion_target_s=1_800.0),
        ),
        duration_s=1_800.0,
        is_drained=True,
        has_capacity=True,
        pool={"burst_ratio": 1.0, "headroom_ratio": 0.1},
    )


def _agents_parallel(rate: float) -> Suite:
    return _agents(rate, "agents", "tasks of 2 to 16 parallel calls", has_reduce=False)


def _agents_reduce(rate: float) -> Suite:
    return _agents(
        rate, "agents-reduce", "tasks of 2 to 16 parallel calls and one call over their results", has_reduce=True
    )


@dataclass(frozen=True, slots=True)
class RatedSuite:
    """A suite whose rate may be chosen. ``judged_by``: the metric that says how a policy bears the load."""

    build: Callable[[float], Suite]
    default_rate: float
    unit: str
    judged_by: str


_FIXED: Mapping[str, Suite] = {suite.name: suite for suite in [*_vtc(), *_own()]}

RATED: Mapping[str, RatedSuite] = {
    "tiers": RatedSuite(_tiers, 0.5, "req/s", "violations_ratio"),
    "agents": RatedSuite(_agents_parallel, 0.5, "agents/s", "completion_mean_s"),
    "agents-reduce": RatedSuite(_agents_reduce, 0.5, "agents/s", "completion_mean_s"),
}

TRACE = "trace"
TRACE_MAX_NEW_TOKENS = 4_096


def suite_names() -> tuple[str, ...]:
    """All suites by name; ``trace`` needs a file."""
    return (*_FIXED, *RATED, TRACE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteChoice:
    """A suite as it was asked for; small, so that it can be sent to another process.

    Attributes:
        file: of ``trace``. lengths: of ``trace``, a folder of real answers that are sent instead of its own lengths.
        speed: of ``trace``, so many times as fast. span_s: of ``trace``, up to so long after the first arrival.
        rate: of suites that have one to choose. num_backends, model: None for the suite's own.
    """

    name: str
    file: Path | None = None
    lengths: Path | None = None
    speed: float = 1.0
    span_s: float | None = None
    rate: float | None = None
    num_backends: int | None = None
    model: str | None = None
    is_chunked: bool = True

    def build(self) -> Suite:
        """The suite.

        Raises:
            SimulationError: an option that this suite does not have, or a file it cannot use.
        """
        if (self.file is not None) is not (self.name == TRACE):
            raise SimulationError(
                f"suite {TRACE} needs a file" if self.name == TRACE else f"suite {self.name} takes no file"
            )
        if self.file is None and (self.lengths is not None or self.speed != 1.0 or self.span_s is not None):
            raise SimulationError(f"suite {self.name} has neither lengths nor speed nor span to choose, {TRACE} has")
        rated = RATED.get(self.name)
        if self.rate is not None and rated is None:
            raise SimulationError(f"suite {self.name} has no rate to choose (those that have: {', '.join(RATED)})")
        if self.file is not None:
            suite = _trace(self.file, self.lengths, speed=self.speed, span_s=self.span_s)
        elif rated is not None:
            suite = rated.build(rated.default_rate if self.rate is None else self.rate)
        else:
            suite = _FIXED[self.name]
        model = suite.model if self.model is None else MODELS[self.model]
        return replace(
            suite,
            model=model if self.is_chunked else replace(model, is_chunked=False),
            num_backends=suite.num_backends if self.num_backends is None else self.num_backends,
        )


def _trace(path: Path, lengths: Path | None, *, speed: float, span_s: float | None) -> Suite:
    rows = played(read_trace(path), speed=speed, span_s=span_s)
    replayed = () if lengths is None else tuple(kinds(lengths).values())
    by_client: dict[str, list[Row]] = {name: [] for name in clients(rows)}
    for row in rows:
        by_client[row.client].append(row)
    return Suite(
        name=TRACE,
        about=f"recorded arrivals of {path.name}" + (f", answers of {lengths}" if lengths else ""),
        clients=tuple(
            Client(
                name=name,
                source=answered(own, replayed, max_new_tokens=TRACE_MAX_NEW_TOKENS)
                if replayed
                else recorded(own, max_new_tokens=TRACE_MAX_NEW_TOKENS),
            )
            for name, own in by_client.items()
        ),
        is_drained=lengths is not None,
        duration_s=rows[-1].at_s,
        model=INCIDENT,
        num_backends=2,
        longest_tokens=TRACE_MAX_NEW_TOKENS,
        has_raw=True,
    )
