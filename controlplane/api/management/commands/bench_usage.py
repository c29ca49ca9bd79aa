"""``manage.py bench_usage STEP``: what ``fairlane bench usage`` does inside the control plane; JSON on stdout."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import msgspec
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.api.benchset.fill import as_json, fill
from controlplane.api.benchset.pages import UNMEASURED, measure_pages, measure_reports
from controlplane.common.actor import system_actor
from controlplane.common.errors import ControlPlaneError

_BEGAN = time.monotonic()


class Command(BaseCommand):
    help = "Fill an empty database with the data set of `fairlane bench usage`, or measure on it."

    def add_arguments(self, parser: CommandParser) -> None:
        steps = parser.add_subparsers(dest="step", required=True)
        filling = steps.add_parser("fill", help="make the data set; booking its events is measured")
        filling.add_argument("--events", type=int, default=1_000_000)
        filling.add_argument("--days", type=int, default=30)
        filling.add_argument("--tenants", type=int, default=10_000)
        filling.add_argument("--keys", type=int, default=100_000)
        filling.add_argument("--sessions", type=int, default=1, help="batches booked at once")
        paging = steps.add_parser("pages", help="time and queries of every page of the console")
        paging.add_argument("--loads", type=int, default=5)
        paging.add_argument("--only", action="append", default=[], metavar="NAME", help="of these pages (repeatable)")
        reporting = steps.add_parser("reports", help="time of the usage report by REST; a token on stdin")
        reporting.add_argument("--loads", type=int, default=5)
        reporting.add_argument("--timezone", default="UTC")
        reporting.add_argument("--only", action="append", default=[], metavar="GROUPING", help="of these (repeatable)")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            self.stdout.write(getattr(self, f"_{options['step']}")(options))
        except ControlPlaneError as error:
            raise CommandError(error.message) from error

    def _fill(self, options: dict[str, Any]) -> str:
        filled = fill(
            actor=system_actor("bench_usage"),
            events=options["events"],
            days=options["days"],
            tenants=options["tenants"],
            keys=options["keys"],
            sessions=options["sessions"],
            say=_say,
        )
        return as_json(filled)

    def _pages(self, options: dict[str, Any]) -> str:
        found = measure_pages(loads=options["loads"], only=options["only"], say=_say)
        return json.dumps({"pages": msgspec.to_builtins(found), "unmeasured": UNMEASURED})

    def _reports(self, options: dict[str, Any]) -> str:
        found = measure_reports(
            token=sys.stdin.readline().strip(),
            loads=options["loads"],
            timezone=options["timezone"],
            only=options["only"],
            say=_say,
        )
        return json.dumps({"reports": msgspec.to_builtins(found)})


def _say(line: str) -> None:
    print(f"{time.monotonic() - _BEGAN:7.1f} s  {line}", file=sys.stderr, flush=True)
