"""``manage.py bootstrap_operator EMAIL [--reset]``: the first operator, or a new one-time password."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.accounts.actions import bootstrap_operator
from controlplane.common.errors import ControlPlaneError


class Command(BaseCommand):
    help = "Create the operator EMAIL, or reset its password, and print a one-time password."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("email", nargs="?", default="operator@fairlane.local")
        parser.add_argument("--reset", action="store_true", help="give an existing account a new one-time password")
        parser.add_argument("--json", action="store_true", help='print {"email", "password"}; password null if kept')

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            password = bootstrap_operator(email=options["email"], is_reset=options["reset"])
        except ControlPlaneError as error:
            raise CommandError(error.message) from error
        if options["json"]:
            self.stdout.write(json.dumps({"email": options["email"], "password": password}))
        elif password is None:
            self.stdout.write(f"{options['email']} exists; its password is unchanged (--reset gives a new one)")
        else:
            self.stdout.write(f"one-time password of {options['email']}: {password}")
