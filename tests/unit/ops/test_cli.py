"""The command line: which command runs, with which words, and how it fails."""

from __future__ import annotations

import argparse
import subprocess
import sys
import types

import pytest

from router_ext import cli
from router_ext.errors import SettingsError


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, argparse.Namespace]:
    """Registers ``demo incident`` and ``ask`` as commands that record what they were given."""
    calls: dict[str, argparse.Namespace] = {}

    def command(name: str) -> cli.Command:
        module = types.ModuleType(f"recorded_{name}")

        def add_arguments(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("words", nargs="*")
            parser.add_argument("--policy", action="append")
            parser.add_argument("--seed", type=int, default=1)
            parser.add_argument("--json", action="store_true")
            parser.add_argument("--fail", action="store_true")

        def run(args: argparse.Namespace) -> int:
            calls[name] = args
            if args.fail:
                raise SettingsError("port 8080 is taken")
            return 0

        module.add_arguments, module.run = add_arguments, run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return cli.Command(module.__name__, "records")

    monkeypatch.setattr(cli, "COMMANDS", {"demo": {"incident": command("incident")}, "ask": command("ask")})
    return calls


@pytest.mark.parametrize(
    "line",
    [
        "demo incident --policy fifo --policy slo-fair --json --seed 7",
        "demo --json incident --policy fifo --seed=7 --policy slo-fair",
        "--json demo --policy fifo --policy slo-fair --seed 7 incident",
        "demo --policy fifo --json --policy slo-fair incident --seed 7",
    ],
)
def test_options_and_positionals_may_come_in_any_order(line: str, seen: dict[str, argparse.Namespace]) -> None:
    assert cli.main(line.split()) == 0
    args = seen["incident"]
    assert (args.policy, args.json, args.seed, args.words) == (["fifo", "slo-fair"], True, 7, [])


def test_words_of_a_prompt_may_surround_its_options(seen: dict[str, argparse.Namespace]) -> None:
    assert cli.main(["ask", "why is", "--seed", "3", "the sky blue"]) == 0
    assert (seen["ask"].words, seen["ask"].seed) == (["why is", "the sky blue"], 3)


def test_second_mention_of_a_command_belongs_to_the_first_one(seen: dict[str, argparse.Namespace]) -> None:
    assert cli.main(["ask", "demo", "ask"]) == 0
    assert seen["ask"].words == ["demo", "ask"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("dance", "unknown command 'dance'"),
        ("--json", "no command given"),
        ("demo", "no subject of `demo` given"),
        ("demo dinner", "unknown subject of `demo` 'dinner'"),
    ],
)
def test_wrong_words_are_named_and_exit_with_2(line: str, text: str, seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert not seen


@pytest.mark.parametrize("line", ["ask --colour red", "ask --seed soon", "ask --jso"])
def test_wrong_option_exits_with_2(line: str, seen, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(line.split())
    assert exit_info.value.code == 2
    assert "usage: fairlane ask" in capsys.readouterr().err


def test_known_failure_is_one_line_on_stderr(seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ask", "--fail"]) == 1
    assert capsys.readouterr() == ("", "fairlane ask: port 8080 is taken\n")


def test_every_command_is_part_of_the_installation_and_offers_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name, found in cli.COMMANDS.items():
        for subject in [None] if isinstance(found, cli.Command) else found:
            words = [name, *([subject] if subject else [])]
            with pytest.raises(SystemExit) as ended:
                cli.main([*words, "--help"])
            assert ended.value.code == 0
            assert f"usage: fairlane {' '.join(words)}" in capsys.readouterr().out


def test_overview_loads_neither_django_nor_torch_nor_a_command() -> None:
    code = (
        "import sys; from router_ext import cli; cli.main(['--help']);"
        "print([m for m in sys.modules if m.split('.')[0] in ('django', 'torch', 'uvicorn', 'rich')"
        " or m.startswith('router_ext.ops')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_of_a_group_lists_its_commands_and_succeeds(seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--help"]) == 0
    out = capsys.readouterr().out
    assert "demo incident" in out
    assert "ask" not in out


def test_help_shows_only_defaults_that_say_something() -> None:
    parser = argparse.ArgumentParser(formatter_class=cli.HelpFormatter, add_help=False)
    parser.add_argument("--dir", help="folder")
    parser.add_argument("--json", action="store_true", help="JSON")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals")
    text = parser.format_help()
    assert "of arrivals (default: 1)" in text
    assert text.count("default") == 1
