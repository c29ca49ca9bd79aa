"""``fairlane apply -f FILE``: make tenants, tiers, groups and pools as the file says, and say what that changed."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from router_ext.errors import SettingsError
from router_ext.ops.apply.api import Api, Refused, add_connection_arguments, connection_of
from router_ext.ops.apply.document import Document, read_document
from router_ext.ops.apply.kinds import KINDS, check
from router_ext.ops.apply.plan import Deed, Step, make_plan

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
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    document = _read(args.file)
    check(document)
    done: dict[Deed, list[Step]] = {deed: [] for deed in Deed}
    if not document.problems:
        url, token = connection_of(args)
        asyncio.run(_apply(Api(url, token), document, done, is_dry=args.dry_run, adopts=args.adopt))
    if args.json:
        report: dict[str, Any] = {deed.value: [step.name for step in steps] for deed, steps in done.items()}
        report["errors"] = [
            {"file": p.file, "line": p.line, "path": p.path, "message": p.message} for p in document.problems
        ]
        print(json.dumps(report))
    else:
        _print(done, is_dry=args.dry_run)
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


async def _apply(api: Api, document: Document, done: dict[Deed, list[Step]], *, is_dry: bool, adopts: bool) -> None:
    async with api:
        found = {kind.path: await api.all_of(kind) for kind in KINDS if kind.path in document.content}
        steps = make_plan(document, found, adopts=adopts)
        if document.problems:
            return
        for step in steps:
            try:
                if not is_dry:
                    await _do(api, step)
                done[step.deed].append(step)
            except Refused as error:
                _note(document, step, error)


async def _do(api: Api, step: Step) -> None:
    kind = step.kind
    match step.deed:
        case Deed.CREATE:
            row = await api.create(kind, {k: v for k, v in step.change.items() if k not in kind.later})
            later = {name: step.change[name] for name in kind.later if name in step.change}
            if any(row[name] != value for name, value in later.items()):
                await api.update(kind, row, later)
        case Deed.UPDATE:
            assert step.found is not None
            await api.update(kind, step.found, step.change)
        case Deed.DELETE:
            assert step.found is not None
            await api.delete(kind, step.found)


def _note(document: Document, step: Step, error: Refused) -> None:
    """The refusal of a step as problems of the file, at the fields that were named."""
    if not step.place:
        document.add((step.kind.path,), f"{step.key!r} cannot be deleted: {error.message}")
        return
    for name, messages in error.fields.items():
        place = (*step.place, *name.split(".")) if name else step.place
        for message in messages:
            document.add(place, message)
    if not error.fields:
        document.add((*step.place, step.kind.key), f"{step.key!r}: {error.message}")


def _print(done: dict[Deed, list[Step]], *, is_dry: bool) -> None:
    for deed, sign in SIGNS.items():
        for step in done[deed]:
            print(f"{sign} {step.name}")
            if deed is Deed.UPDATE and step.found is not None:
                for name, value in step.change.items():
                    print(f"    {name}: {_short(step.found.get(name))} -> {_short(value)}")
    words = [f"{len(steps)} {'to be ' if is_dry and deed in SIGNS else ''}{deed}" for deed, steps in done.items()]
    print(", ".join(words))


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
