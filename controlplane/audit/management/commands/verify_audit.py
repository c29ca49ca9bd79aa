"""``manage.py verify_audit [--head HASH] [--json]``: whether the audit log is what was written."""

from __future__ import annotations

import json
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from controlplane.audit.queries import verify
from controlplane.common.actor import system_actor


class Command(BaseCommand):
    help = "Check the hash chain of the audit log; exit status 1 if an entry was changed, removed, inserted or cut off."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--head", action="append", default=[], help="a hash logged before, which must be in it")
        parser.add_argument("--json", action="store_true", help='{"is_whole", "entries", "head", "broken", "missing"}')

    def handle(self, *args: Any, **options: Any) -> None:
        verdict = verify(actor=system_actor("command"), heads=options["head"])
        if options["json"]:
            found = {
                "is_whole": verdict.is_whole, "entries": verdict.entries, "head": verdict.head,
                "broken": verdict.broken, "missing": list(verdict.missing),
            }  # fmt: skip
            self.stdout.write(json.dumps(found))
        else:
            self.stdout.write(f"{verdict.entries} entries, head {verdict.head}")
            if verdict.broken is not None:
                self.stdout.write(f"BROKEN at entry {verdict.broken}: it, or the one before, is not what was written")
            for head in verdict.missing:
                self.stdout.write(f"MISSING: no entry has the hash {head}: the tail was cut, or all was written anew")
        if not verdict.is_whole:
            sys.exit(1)
