"""``manage.py seed_demo --pool NAME --backend-url URL ...``: prints one JSON object with all secrets on stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.api.demo import DemoPool, seed_demo
from controlplane.common.errors import ControlPlaneError


class Command(BaseCommand):
    help = "Lay down the demo's tiers, pool, backend, tenants, keys and credentials; safe to repeat."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--pool", required=True, help="the model's name")
        parser.add_argument("--alias", action="append", default=[], help="a further name of the model; may be repeated")
        parser.add_argument("--backend-url", action="append", required=True, help="a server; may be repeated")
        parser.add_argument("--kv-tokens", type=int)
        parser.add_argument("--block-size", type=int, default=1)
        parser.add_argument("--prefill-budget-tokens", type=int, default=4_096)
        parser.add_argument("--no-chunking", action="store_true", help="the server prefills whole prompts")
        parser.add_argument("--tokenizer-path", default="")
        parser.add_argument(
            "--held", metavar="FILE", help="JSON of an earlier call (- for stdin); credentials in it that are good stay"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            result = seed_demo(
                pool=DemoPool(
                    name=options["pool"],
                    url=options["backend_url"][0],
                    further_urls=options["backend_url"][1:],
                    aliases=options["alias"],
                    kv_tokens=options["kv_tokens"],
                    block_size=options["block_size"],
                    prefill_budget_tokens=options["prefill_budget_tokens"],
                    is_chunked=not options["no_chunking"],
                    tokenizer_path=options["tokenizer_path"],
                ),
                held=_held(options["held"]),
            )
        except ControlPlaneError as error:
            raise CommandError(error.message) from error
        self.stdout.write(json.dumps(result))


def _held(source: str | None) -> dict[str, Any]:
    """What the caller holds; a missing file is nothing held."""
    if source is None:
        return {}
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        held = json.loads(text or "{}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CommandError(f"--held {source}: {error}") from error
    if not isinstance(held, dict):
        raise CommandError(f"--held {source}: not a JSON object")
    return held
