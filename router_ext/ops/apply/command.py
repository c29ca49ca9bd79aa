"""``fairlane apply -f FILE``: make the control plane as the file says, and say what that changed."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from router_ext.errors import SettingsError
from router_ext.ops.apply.deeds import do, everything, portions
from router_ext.ops.apply.document import Document, read_document
from router_ext.ops.apply.kinds import check
from router_ext.ops.apply.plan import Deed, Step, make_plan
from router_ext.ops.apply.secrets import Secrets
from router_ext.ops.rest import Refused, Rest, add_connection_arguments, connection_of

SIGNS = {Deed.CREATE: "+", Deed.UPDATE: "~", Deed.DELETE: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--file", required=True, help="the YAML file; - reads standard input")
    parser.add_argument("--dry-run", action="store_true", help="say what would be changed, and change nothing")
    parser.add_argument("--adopt", action="store_true", help="take over objects of the file that nobody manages")
    parser.add_argument(
        "--detailed-exitcode",
        action="store_true",
        help="exit status 0: nothing to change, 1: errors, 2: something was, or with --dry-run would be, changed",
    )
    parser.add_argument(
        "--json", action="store_true", help='{"created", "updated", "deleted", "unchanged", "errors"} on stdout'
    )
    parser.add_argument(
        "--keys-out",
        type=Path,
        metavar="FILE",
        help="add keys and links of invitations that are made to FILE (mode 600), one JSON object a line; "
        "without it they are shown once, at the end",
    )
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    document = Document(args.file, {}, {})
    done: dict[Deed, list[Step]] = {deed: [] for deed in Deed}
    secrets = Secrets(None)
    try:
        document = _read(args.file)
        check(document)
        if not document.problems:
            secrets = Secrets(None if args.dry_run else args.keys_out)
            url, token = connection_of(args)
            asyncio.run(_apply(Rest(url, token), document, done, secrets, is_dry=args.dry_run, adopts=args.adopt))
    except SettingsError as error:
        if not args.json:
            raise
        document.add((), str(error))
    finally:
        secrets.close()
    if args.json:
        report: dict[str, Any] = {deed.value: [step.name for step in steps] for deed, steps in done.items()}
        report["errors"] = [
            {"file": p.file, "line": p.line, "path": p.path, "message": p.message} for p in document.problems
        ]
        if secrets.shown:
            report["secrets"] = secrets.shown
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print(done, secrets, is_dry=args.dry_run)
    for problem in document.problems:
        print(problem, file=sys.stderr)
    if document.problems:
        return 1
    return 2 if args.detailed_exitcode and any(done[deed] for deed in SIGNS) else 0


def _read(name: str) -> Document:
    path = Path("<stdin>" if name == "-" else name)
    try:
        text = sys.stdin.read() if name == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {path}: {error}") from None
    return read_document(path, text)


async def _apply(
    rest: Rest, document: Document, done: dict[Deed, list[Step]], secrets: Secrets, *, is_dry: bool, adopts: bool
) -> None:
    async with rest:
        steps = make_plan(document, await everything(rest, list(document.content)), adopts=adopts)
        if document.problems:
            return
        if is_dry:
            for step in steps:
                done[step.deed].append(step)
            return
        n_asked = 0
        for portion in portions(steps):
            try:
                outcomes = await do(rest, portion)
            except SettingsError as error:
                unknown = f"the next {len(portion)} of {len(steps)} may have been done or not, the rest was not"
                document.add((), f"{error}; {n_asked} were done or refused, {unknown}: apply again")
                return
            n_asked += len(portion)
            for step, outcome in zip(portion, outcomes, strict=True):
                if isinstance(outcome, Refused):
                    _note(document, step, outcome)
                else:
                    done[step.deed].append(step)
                    secrets.take(step, outcome)


def _note(document: Document, step: Step, error: Refused) -> None:
    """The refusal of a step as problems of the file, at the fields that were named."""
    if not step.place:
        document.add((step.kind.name,), f"{'/'.join(step.key)!r} cannot be deleted: {error.message}")
        return
    for name, messages in error.fields.items():
        place = (
            (*step.place, *(int(part) if part.isdigit() else part for part in name.split("."))) if name else step.place
        )
        for message in messages:
            document.add(place, message)
    if not error.fields:
        document.add((*step.place, step.kind.key[-1]), f"{'/'.join(step.key)!r}: {error.message}")


def _print(done: dict[Deed, list[Step]], secrets: Secrets, *, is_dry: bool) -> None:
    for deed, sign in SIGNS.items():
        for step in done[deed]:
            print(f"{sign} {step.name}")
            if deed is Deed.UPDATE and step.found is not None:
                before = step.kind.stated(step.found) | {"managed_by": step.found["managed_by"]}
                for name, value in step.change.items():
                    print(f"    {name}: {_short(before.get(name))} -> {_short(value)}")
    words = [f"{len(steps)} {'to be ' if is_dry and deed in SIGNS else ''}{deed}" for deed, steps in done.items()]
    print(", ".join(words))
    for secret in secrets.shown:
        print(f"shown this once: {json.dumps(secret, ensure_ascii=False)}")


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
