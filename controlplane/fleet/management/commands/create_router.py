"""``manage.py create_router NAME [--renew]``: a router's credential, printed alone on stdout."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.common.actor import system_actor
from controlplane.common.errors import ControlPlaneError
from controlplane.fleet.models import Router
from controlplane.fleet.routers import create_router, renew_router_token


class Command(BaseCommand):
    help = "Make a router's credential and print its token, which cannot be shown again."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name")
        parser.add_argument(
            "--renew", action="store_true", help="a new token for a router that exists; the old one ends"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        actor = system_actor("create_router")
        try:
            if options["renew"]:
                router = Router.objects.filter(name=options["name"]).first()
                if router is None:
                    raise CommandError(f"there is no router {options['name']!r}")
                _, token = renew_router_token(actor=actor, router_id=router.id)
            else:
                _, token = create_router(actor=actor, name=options["name"])
        except ControlPlaneError as error:
            raise CommandError(error.message) from error
        self.stdout.write(token)
