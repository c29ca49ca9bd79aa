"""``fairlane``: the one entry point. Finds the command, imports its module alone, runs it.

The command is the first word that names one; everything else goes to the command's own parser, which takes options
and positionals in any order. A command's module has ``add_arguments(parser)`` and ``run(args) -> exit status``.

Exit status: 0 the command ran, 1 it could not (one line on stderr says why), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router_ext import __version__, compiled
from router_ext.errors import FairlaneError


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command lives.

    Attributes:
        extra: the optional dependency set it needs.
        runs_core: it schedules in its own process, so it runs the compiled core where there is one.
    """

    module: str
    help: str
    extra: str | None = None
    runs_core: bool = False


COMMANDS: Mapping[str, Command | Mapping[str, Command]] = {
    "up": Command("router_ext.ops.up", "start everything on this machine, until Ctrl-C", "embedded,controlplane"),
    "router": Command("router_ext.gateway.command", "the scheduling router", runs_core=True),
    "serve": Command("router_ext.ops.serve", "the router with a supervisor that can replace it while it serves"),
    "restart-router": Command(
        "router_ext.ops.restart_router", "replace the running router by a new process, without a failed request"
    ),
    "devserver": Command(
        "router_ext.devserver.command", "a model server on the CPU that speaks TGI's API", "devserver"
    ),
    "demo": {
        "incident": Command("router_ext.ops.incident", "two tenants, one flood, one policy after another", "client"),
        "predictor": Command("router_ext.ops.predictor.demo", "traffic, and a length model that learns it", "client"),
    },
    "bench": {
        "scheduler": Command("router_ext.ops.bench_scheduler", "time of one scheduling decision", runs_core=True),
        "gateway": Command("router_ext.ops.gatewaybench.bench", "what the router adds to a request and to a stream"),
        "config": Command("router_ext.ops.configbench.bench", "what a change of a large configuration costs a router"),
        "grammars": Command("router_ext.ops.bench_grammars", "what the guard makes of common grammars and of hazards"),
        "hazards": Command(
            "router_ext.ops.hazards.bench", "odd requests, and what the others notice of them", "devserver"
        ),
        "predictor": Command("router_ext.ops.bench_predictor", "what a prediction of an output length costs"),
        "usage": Command(
            "router_ext.ops.usagebench.bench",
            "books, pages and configuration of a large control plane",
            "embedded,controlplane",
        ),
    },
    "predictor": {
        "train": Command(
            "router_ext.ops.predictor.train", "train a length model from a folder of answers", "predictor"
        ),
        "evaluate": Command(
            "router_ext.ops.predictor.evaluate", "how well lengths are predicted, next to baselines", "predictor"
        ),
        "inspect": Command(
            "router_ext.ops.predictor.inspect", "what a length model's file says of itself", "predictor"
        ),
    },
    "simulate": Command("router_ext.sim.command", "policies on a suite of workloads, in virtual time", runs_core=True),
    "compile": Command(
        "router_ext.ops.compile", "the scheduler's core to machine code, for faster decisions", "compile"
    ),
    "top": Command("router_ext.ops.top.command", "what routers do now: tenants, shares, queues, backends"),
    "ask": Command("router_ext.ops.ask", "ask the model with a tenant's key and stream the answer", "client"),
    "apply": Command(
        "router_ext.ops.apply.command", "make tenants, keys, pools and all else that is configured as a file says"
    ),
    "export": Command("router_ext.ops.apply.export", "write what is configured as such a file"),
    "backup": Command("router_ext.ops.backup", "the database of `fairlane up` as one file", "embedded"),
    "restore": Command("router_ext.ops.restore", "make such a file the database of `fairlane up`", "embedded"),
    "reset-password": Command(
        "router_ext.ops.reset_password", "give an operator of `fairlane up` a new one-time password", "controlplane"
    ),
    "check-config": Command("router_ext.gateway.check_config", "validate the router's settings and a snapshot"),
}


class UsageError(Exception):
    """Wrong words on the command line."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something: not those of switches, nor of options that may be left out."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"fairlane {__version__}")
        return 0
    if not words or (words[0] in ("-h", "--help") and len(words) == 1):
        print(_overview())
        return 0 if words else 2
    if len(words) == 2 and words[1] in ("-h", "--help") and isinstance(COMMANDS.get(words[0]), Mapping):
        print(_overview(words[0]))
        return 0
    try:
        name, command, rest = _find(words)
    except UsageError as error:
        print(f"fairlane: {error}\n\n{_overview()}", file=sys.stderr)
        return 2
    return _run(name, command, rest)


def _find(words: list[str]) -> tuple[str, Command, list[str]]:
    name, rest = _take(words, COMMANDS, "command")
    found = COMMANDS[name]
    if isinstance(found, Command):
        return name, found, rest
    subject, rest = _take(rest, found, f"subject of `{name}`")
    return f"{name} {subject}", found[subject], rest


def _take(words: list[str], known: Mapping[str, object], what: str) -> tuple[str, list[str]]:
    for position, word in enumerate(words):
        if word in known:
            return word, words[:position] + words[position + 1 :]
    stranger = next((word for word in words if not word.startswith("-")), None)
    problem = f"unknown {what} {stranger!r}" if stranger is not None else f"no {what} given"
    raise UsageError(f"{problem} (known: {', '.join(known)})")


def _run(name: str, command: Command, words: list[str]) -> int:
    try:
        if command.runs_core:
            compiled.activate(os.environ)
        module = importlib.import_module(command.module)
    except FairlaneError as error:
        print(f"fairlane {name}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("router_ext"):
            print(f"fairlane: `{name}` is not part of this installation ({error})", file=sys.stderr)
        else:
            needs = f"fairlane[{command.extra}]" if command.extra else "fairlane"
            print(f"fairlane: `{name}` needs {needs}: {error}", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(
        prog=f"fairlane {name}",
        description=command.help[0].upper() + command.help[1:] + ".",
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    module.add_arguments(parser)
    arguments = parser.parse_intermixed_args(words)
    try:
        status: int = module.run(arguments)
        sys.stdout.flush()
        return status
    except FairlaneError as error:
        print(f"fairlane {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output went away; a second write at interpreter exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _overview(group: str | None = None) -> str:
    """All commands, or those of one group."""
    lines = ["usage: fairlane COMMAND [options]", "", "commands:"]
    for name, found in COMMANDS.items():
        if group not in (None, name):
            continue
        subjects = {name: found} if isinstance(found, Command) else {f"{name} {k}": c for k, c in found.items()}
        lines += [f"  {full:<18} {command.help}" for full, command in subjects.items()]
    return "\n".join([*lines, "", "`fairlane COMMAND --help` explains a command's options."])


if __name__ == "__main__":
    sys.exit(main())
