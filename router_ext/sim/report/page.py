"""The page: what was run, the numbers, the pictures, and what every word means. One file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from router_ext import __version__
from router_ext.sim.models import ServerModel
from router_ext.sim.report.figures import Figure, Table, inline, sheet
from router_ext.sim.report.glossary import MEASURES, WORDS, Better, Measure
from router_ext.sim.report.scales import duration, percent
from router_ext.sim.report.strips import TTFT, Reading, Strip, metric_readings, tenant_readings
from router_ext.sim.report.study import Member, Study

_MOST_ROWS = 40
"""Tenants listed one by one; the JSON result has all of them."""

_LEVELS = ("p50", "p95", "p99")
_SHARE = Measure("share of service", Better.NEITHER, lambda ratio: f"{ratio:.1%}", WORDS["share"])
_ALONE = Measure("x alone", Better.LOWER, lambda ratio: f"{ratio:.2f}", WORDS["x alone"])


def page(study: Study, figures: Sequence[Figure]) -> str:
    """The whole page."""
    environment = Environment(
        loader=PackageLoader("router_ext.sim.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    metrics = [_metric_row(study, name, measure) for name, measure in MEASURES.items()]
    return environment.get_template("report.html").render(
        suite=study.suite,
        policies=study.policies,
        members=study.coloured,
        facts=list(_facts(study)),
        command=study.command,
        workload=_workload(study),
        metrics=[row for row in metrics if any(cell["text"] != "-" for cell in row["cells"])],
        missing=", ".join(row["label"] for row in metrics if all(cell["text"] == "-" for cell in row["cells"])),
        tenant_rows=[row for member in study.coloured for row in _tenant_rows(study, member)],
        rest_note=f"And {study.rest_label}, in grey in the pictures: see the table below." if study.rest else "",
        by_tenant=_by_tenant(study),
        figures=[_figure(figure) for figure in figures],
        definitions=[*((m.label, m.meaning) for m in MEASURES.values()), *WORDS.items()],
        sheets=Markup(f"{sheet()}{_asset('report.css')}"),
        script=Markup(_asset("report.js")),
    )


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _figure(figure: Figure) -> dict[str, Any]:
    is_small = any(isinstance(drawing, Strip) for drawing in figure.drawings)
    return {
        "name": figure.name,
        "title": figure.title,
        "axis": figure.axis,
        "caption": figure.caption,
        "is_small": is_small,
        "table": figure.table,
        "drawings": [
            # ElementTree has escaped every text in it.
            {"policy": None if is_small else drawing.name, "svg": Markup(inline(figure, drawing))}
            for drawing in figure.drawings
        ],
    }


# --- what was run --------------------------------------------------------------------------------------------------


def _facts(study: Study) -> Iterator[tuple[str, str]]:
    suite = study.suite
    first = study.shown[study.policies[0]]
    yield "servers", f"{suite.num_backends} x {_server(suite.model)}"
    yield "prices", f"{first.w_prompt:g} per prompt token, {first.w_output:g} per output token"
    if suite.pool:
        yield "pool", ", ".join(f"{name} {value:g}" for name, value in suite.pool.items())
    yield "seeds", f"{', '.join(map(str, study.seeds))}; courses over time show seed {study.seeds[0]}"
    yield from study.settings.items()
    yield "written by", f"fairlane {__version__}"


def _server(model: ServerModel) -> str:
    how = (
        f"prompts ride along, at most {model.prefill_budget_tokens:,} tokens per step"
        if model.is_chunked
        else f"without chunking, waiting_served_ratio {model.waiting_served_ratio:g}, "
        f"max_waiting_tokens {model.max_waiting_tokens}"
    )
    return (
        f"{model.name}: {model.kv_tokens:,} KV tokens; a step takes {model.decode_base_ms:g} + "
        f"{model.per_sequence_ms:g} x sequences + {model.per_context_token_ms:g} x context tokens ms, or "
        f"{model.prefill_base_ms:g} ms if nothing decodes, + {model.per_prefill_token_ms:g} ms per prompt token; {how}"
    )


def _workload(study: Study) -> Table:
    run = study.shown[study.policies[0]]
    requests = run.requests
    rows = []
    for member in study.members[:_MOST_ROWS]:
        info = run.tenants[member.index]
        mine = [index for index, owner in enumerate(requests.tenant) if owner == member.index]
        arrivals = [requests.arrival_s[index] for index in mine]
        targets = [
            f"{what} {duration(target)}"
            for what, target in (("TTFT", info.ttft_target_s), ("completion", info.completion_target_s))
            if target is not None
        ]
        rows.append(
            [
                member.name,
                f"{info.weight:g}",
                ", ".join(targets) or "-",
                f"{len(mine):,}",
                f"{len(mine) / run.end_s:.3g}" if run.end_s else "-",
                f"{duration(arrivals[0])} to {duration(arrivals[-1])}" if arrivals else "-",
                _lengths([requests.input_tokens[index] for index in mine]),
                _lengths([requests.wanted_tokens[index] for index in mine]),
            ]
        )
    header = ["tenant", "weight", "target", "requests", "per s", "arrivals", "input tokens", "output tokens"]
    return Table(header=header, rows=rows)


def _lengths(values: Sequence[int]) -> str:
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}, mean {sum(values) / len(values):,.0f}"


# --- numbers -------------------------------------------------------------------------------------------------------


def _metric_row(study: Study, name: str, measure: Measure) -> dict[str, Any]:
    return _row(measure.label, measure, metric_readings(study, name))


def _row(
    label: str, measure: Measure, readings: Sequence[Reading], small: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Any]:
    best, worst = measure.extremes({row.policy: row.mean for row in readings})
    cells = []
    for row in readings:
        rank = "best" if row.policy in best else "worst" if row.policy in worst else ""
        low, high = measure.text(row.low), measure.text(row.high)
        spread = [f"{low} to {high}"] if low != high else []
        below = spread if small is None else small[row.policy]
        cells.append({"policy": row.policy, "text": measure.text(row.mean), "small": below, "rank": rank})
    return {"label": label, "meaning": measure.meaning, "cells": cells}


def _tenant_rows(study: Study, member: Member) -> Iterator[dict[str, Any]]:
    means = {policy: study.tenants[policy][member.name] for policy in study.policies}
    small = {
        policy: [f"{level} {TTFT.text(tenant['ttft_s'][level])}" for level in _LEVELS[:2]]
        for policy, tenant in means.items()
    }
    yield _row(f"{member.name}: TTFT p99", TTFT, tenant_readings(study, member, "ttft_s", "p99"), small)
    if any("ttft_alone_ratio_p99" in tenant for tenant in means.values()):
        readings = [
            Reading(policy=policy, mean=value, low=value, high=value)
            for policy, tenant in means.items()
            for value in [tenant.get("ttft_alone_ratio_p99")]
        ]
        yield _row(f"{member.name}: {_ALONE.label}", _ALONE, readings)
    yield _row(f"{member.name}: {_SHARE.label}", _SHARE, tenant_readings(study, member, "share"))


def _by_tenant(study: Study) -> Table:
    rows = []
    for policy in study.policies:
        for member in study.members[:_MOST_ROWS]:
            tenant = study.tenants[policy][member.name]
            latencies = [tenant[what][level] for what in ("ttft_s", "completion_s") for level in _LEVELS]
            rows.append(
                [
                    policy,
                    member.name,
                    f"{tenant['requests']:,.0f}",
                    *("-" if value is None else duration(value) for value in latencies),
                    f"{tenant['tokens']:,.0f}",
                    "-" if tenant["share"] is None else percent(round(tenant["share"], 4)),
                ]
            )
    latency = [f"{what} {level}" for what in ("TTFT", "completion") for level in _LEVELS]
    return Table(header=["policy", "tenant", "requests", *latency, "tokens", "share"], rows=rows)
