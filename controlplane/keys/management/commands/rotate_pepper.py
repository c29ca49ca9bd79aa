"""``manage.py rotate_pepper [--retire VERSION] [--json]``: leave an old pepper behind."""

from __future__ import annotations

import json
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.common.actor import system_actor
from controlplane.common.errors import ControlPlaneError
from controlplane.keys import peppers, queries

SHOWN = 200


class Command(BaseCommand):
    help = "Encrypt second factors under the newest pepper, and say what still hangs on older ones."
    # It is what helps where the check complains.
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--retire", type=int, metavar="VERSION", help="give up what is left under it: revokes keys, tokens, routers"
        )
        parser.add_argument(
            "--json", action="store_true", help='{"newest", "resealed", "retired", "versions": {VERSION: {KIND: n}}}'
        )

    def handle(self, *args: Any, **options: Any) -> None:
        actor = system_actor("rotate_pepper")
        retired = None
        try:
            resealed = peppers.reseal(actor=actor)
            if options["retire"] is not None:
                retired = peppers.retire(actor=actor, version=options["retire"])
        except ControlPlaneError as error:
            raise CommandError(error.message) from error
        newest, found = settings.KEY_PEPPER_VERSION, peppers.in_use()
        if options["json"]:
            said = {"newest": newest, "resealed": resealed, "retired": retired, "versions": found}
            self.stdout.write(json.dumps(said))
            return
        self.stdout.write(f"second factors encrypted anew: {resealed}")
        if retired is not None:
            self.stdout.write(f"given up under pepper {options['retire']}: {peppers.told(retired) or 'nothing'}")
        for version, counts in found.items():
            which = " (of new ones)" if version == newest else ""
            is_here = "" if version in settings.KEY_PEPPERS else ", AND IT IS NOT HERE"
            self.stdout.write(f"pepper {version}{which}: {peppers.told(counts) or 'nothing'}{is_here}")
        for key in queries.under_old_pepper(queries.keys(actor=actor))[:SHOWN]:
            used = f"{key.last_used_at:%Y-%m-%d %H:%M}" if key.last_used_at else "never"
            self.stdout.write(f"  key {key.public_id} of {key.tenant.slug}, pepper {key.pepper_version}, used {used}")
