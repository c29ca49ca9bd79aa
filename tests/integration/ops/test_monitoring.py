"""docker/: the shipped alerts and dashboard against what a router's metrics page really says."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.routers import TierRecord, backend
from support.scripted import BODY, Peer, World, running, stream, until

from router_ext.backends.fake import Ending
from router_ext.obs.metrics import Metrics

DOCKER = Path(__file__).resolve().parents[3] / "docker"
OF_PROMETHEUS = {"job", "instance"}
"""Labels that the scrape adds."""


@dataclass
class Page:
    """What stands on metrics pages: labels of each series by name, and the values of each of its labels."""

    labels: dict[str, list[frozenset[str]]] = field(default_factory=lambda: defaultdict(list))
    values: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))

    def read(self, text: bytes) -> None:
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                self.labels[sample.name].append(frozenset(sample.labels))
                for label, value in sample.labels.items():
                    self.values[sample.name, label].add(value)


async def _scrape(folder: Path) -> Page:
    """A router's own pages after requests that end in several ways, and once more as they look when nothing is absent:
    with a control plane, a shared store of limits, and a backend that tells the length of its queue."""
    world = World()
    world.setup.tiers.append(TierRecord(name="patient", rank=20, max_queue_wait_s=0.05))
    world.setup.backends = [backend(1, kv_tokens=12, block_size=1)]
    world.key = world.setup.key("alice", may_choose_tier=True)
    world.setup.tenant("alice", tiers=["standard", "interactive", "patient"])
    page = Page()
    async with running(folder, world):
        for path in ("/generate", "/generate_stream"):
            await Peer(world, path, BODY).wait()
        await Peer(world, "/generate", BODY, key="wrong").wait()
        await Peer(world, "/generate", {"inputs": "a", "parameters": {"max_new_tokens": 10**7}}).wait()
        world.generation = stream(2, ending=Ending.CUT)
        await Peer(world, "/generate_stream", BODY).wait()
        world.generation = stream(2, ending=Ending.HANG)
        gone = Peer(world, "/generate_stream", BODY)
        await until(lambda: gone.data.count(b"data: ") == 2)
        late = Peer(world, "/generate", BODY, headers={"x-fairlane-tier": "patient"})
        await late.wait()
        assert late.status == 429
        gone.exchange.connection_lost()
        await gone.wait()
        page.read(world.router.metrics.page(is_admin=True))
        full = world.router.readings()
        full.ledger_lag_s = 1.0
        full.backends = [replace(each, queue_size=0) for each in full.backends]
        full.is_minute_store_up, full.totals_age_s = True, 1.0
        page.read(Metrics(lambda: full).page(is_admin=True))
    return page


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return asyncio.run(_scrape(tmp_path_factory.mktemp("scraped")))


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DOCKER / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return dict(json.loads((DOCKER / "grafana" / "fairlane.json").read_text()))


def queries() -> list[tuple[str, str]]:
    """(where, query with Grafana's own words filled in)."""
    found = [(rule["alert"], rule["expr"]) for rule in alerts()]
    for panel in dashboard()["panels"]:
        asked = [target["expr"] for target in panel.get("targets", [])]
        found += [(panel["title"], q.replace("$__rate_interval", "1m").replace("$model", ".*")) for q in asked]
    return found


def selectors(node: Any) -> Iterator[Any]:
    match node:
        case promql.VectorSelector():
            yield node
        case promql.MatrixSelector():
            yield node.vector_selector
        case promql.BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case promql.Call():
            for each in node.args:
                yield from selectors(each)
        case promql.NumberLiteral() | promql.StringLiteral():
            return
        case _:
            yield from selectors(node.expr)


def grouped(node: Any) -> Iterator[tuple[list[str], Any]]:
    """(labels, what they are taken of) of each ``by``, ``on`` and ``group_left``."""
    match node:
        case promql.AggregateExpr():
            if node.modifier is not None:
                yield list(node.modifier.labels), node.expr
            yield from grouped(node.expr)
        case promql.BinaryExpr():
            if node.modifier is not None and node.modifier.matching is not None:
                for side in (node.lhs, node.rhs):
                    yield list(node.modifier.matching.labels), side
            yield from grouped(node.lhs)
            yield from grouped(node.rhs)
        case promql.Call():
            for each in node.args:
                yield from grouped(each)
        case promql.VectorSelector() | promql.MatrixSelector() | promql.NumberLiteral() | promql.StringLiteral():
            return
        case _:
            yield from grouped(node.expr)


def problems(query: str, scraped: Page) -> list[str]:
    """What a query asks for that the pages do not have."""
    tree = promql.parse(query)
    found: list[str] = []
    for selector in selectors(tree):
        if selector.name == "up":
            continue
        if not scraped.labels[selector.name]:
            found.append(f"there is no {selector.name}")
        for matcher in selector.matchers.matchers:
            values = scraped.values[selector.name, matcher.name]
            if not values:
                found.append(f"{selector.name} has no label {matcher.name}")
            elif matcher.op == promql.MatchOp.Equal and matcher.value not in values:
                found.append(f"{selector.name} has no {matcher.name} {matcher.value!r}")
            elif matcher.op == promql.MatchOp.Re and not any(re.fullmatch(matcher.value, each) for each in values):
                found.append(f"{selector.name} has no {matcher.name} like {matcher.value!r}")
    for labels, node in grouped(tree):
        for selector in selectors(node):
            lacking = [
                n for n in labels if not all(n in each | OF_PROMETHEUS for each in scraped.labels[selector.name])
            ]
            found += [f"{selector.name} has no label {label}" for label in lacking]
    return found


def test_every_query_asks_for_what_there_is(scraped: Page) -> None:
    wrong = {f"{where}: {query}": said for where, query in queries() if (said := problems(query, scraped))}
    assert wrong == {}
    assert len(queries()) > 60


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("fairlane_queue_size", "there is no fairlane_queue_size"),
        ('rate(fairlane_requests_total{result="failed"}[5m])', "fairlane_requests_total has no label result"),
        ('fairlane_requests_total{outcome="broken"}', "fairlane_requests_total has no outcome 'broken'"),
        (
            'fairlane_requests_total{outcome=~"broken|lost"}',
            "fairlane_requests_total has no outcome like 'broken|lost'",
        ),
        ("sum by (pool) (fairlane_queue_length)", "fairlane_queue_length has no label pool"),
        ("fairlane_queue_length / on (backend) fairlane_backend_up", "fairlane_queue_length has no label backend"),
        (
            "histogram_quantile(0.5, sum by (le) (rate(fairlane_overhead_seconds[1m])))",
            "there is no fairlane_overhead_seconds",
        ),
    ],
)
def test_a_query_for_something_else_is_noticed(scraped: Page, query: str, said: str) -> None:
    assert said in problems(query, scraped)


def test_every_alarm_of_the_router_has_an_alert() -> None:
    """The gauges of which the documentation says that anything but 0 is an alarm, and what a tier is promised."""
    asked = " ".join(rule["expr"] for rule in alerts())
    books = (DOCKER.parent / "docs" / "architecture.md").read_text().partition("the alarms are the gauges")[2]
    alarms = set(re.findall(r"`(fairlane_\w+)`", books.partition("all 0 in health")[0]))
    assert len(alarms) == 3
    alarms |= {"fairlane_ledger_lag_seconds", "fairlane_time_to_first_token_target_seconds", "fairlane_backend_up"}
    alarms |= {"fairlane_fairness_bound_service", "fairlane_prediction_model_refused", "fairlane_backend_queue_size"}
    assert [name for name in sorted(alarms) if name not in asked] == []


def test_every_metric_is_documented_and_every_documented_one_is_there(scraped: Page) -> None:
    written = set(
        re.findall(r"`(fairlane_\w+)`", "".join(p.read_text() for p in (DOCKER.parent / "docs").glob("*.md")))
    )
    there = {name for name, series in scraped.labels.items() if series and not name.endswith("_created")}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in there}
    assert sorted(shown - written) == []
    # These begin with their first event: a grammar, a length model, a request that cannot be cut, a full queue, a rate.
    quiet = {
        "fairlane_guard_verdicts_total",
        "fairlane_prediction_intervals_total",
        "fairlane_displaced_requests_total",
    }
    quiet |= {"fairlane_unresumable_requests_total", "fairlane_resumes_total"}
    quiet |= {"fairlane_fairness_bound_gpu_seconds", "fairlane_fairness_largest_gap_gpu_seconds"}
    database_roles = {"fairlane_app", "fairlane_audit"}
    assert sorted(written - shown - quiet - database_roles) == []


def test_alerts_are_told_apart_and_say_what_they_mean(scraped: Page) -> None:
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        tree = promql.parse(rule["expr"])
        kept = {label for labels, _ in grouped(tree) for label in labels}
        plain = {label for each in selectors(tree) for series in scraped.labels[each.name] for label in series}
        # An aggregation keeps what it names; anything else keeps all labels of its series.
        assert named <= (kept or plain | OF_PROMETHEUS), rule["alert"]


def test_the_dashboard_shows_what_it_is_for() -> None:
    shown = {"time_to_first_token_target", "queue_length", "tenant_entitled_share", "backend_kv", "preemptions"}
    shown |= {"rejected", "ledger_lag", "backend_state", "overhead", "breaker", "limit"}
    asked = " ".join(query for _, query in queries()[len(alerts()) :])
    assert [word for word in sorted(shown) if f"fairlane_{word}" not in asked and word not in asked] == []
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        box = panel["gridPos"]
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_prometheus_finds_what_compose_starts() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert compose[host]["environment"]["FAIRLANE_ADMIN_PORT"] == port
    assert job["authorization"]["credentials_file"] == compose[host]["environment"]["FAIRLANE_ADMIN_TOKEN_FILE"]
    assert set(compose["prometheus"]["networks"]) & set(compose[host]["networks"])
    assert all(rule["expr"].count(f'job="{job["job_name"]}"') for rule in alerts() if "up{" in rule["expr"])
    mounted = [volume.split(":") for name in ("prometheus", "grafana") for volume in compose[name]["volumes"]]
    ours = [(DOCKER / source, target) for source, target, *_ in mounted if source.startswith("./")]
    assert all(source.exists() for source, _ in ours)
    assert set(config["rule_files"]) <= {target for _, target in ours}
    assert {compose[name]["profiles"][0] for name in ("prometheus", "grafana")} == {"monitoring"}
