"""``make docker-check``: runs the build stage of docker/Dockerfile without docker, in a temporary folder.

Every ``RUN`` and ``COPY`` line of the stage is carried out as written, with the image's ``/opt/fairlane`` and ``/src``
moved below the folder; but packages of the system (``apt-get``) are for this machine to have. Then the installed
programs are started once.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECRETS = {
    "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none",
    "REDIS_URL": "redis://127.0.0.1:1/0",
    "FAIRLANE_SECRET_KEY": "only-for-this-check",
    "FAIRLANE_KEY_PEPPER": "0f" * 32,
    "DJANGO_SETTINGS_MODULE": "controlplane.settings",
}


def build_steps(dockerfile: str) -> list[tuple[str, str]]:
    """(instruction, rest) of the first stage, comments dropped and continued lines joined."""
    text = re.sub(r"(?m)^\s*#.*\n", "", dockerfile)
    lines = [line.strip() for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    steps: list[tuple[str, str]] = []
    for line in lines:
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM" and steps:
            break
        steps.append((instruction, rest.strip()))
    return steps


def moved(text: str, folder: Path) -> str:
    return re.sub(r"(?<![\w./])/(opt/fairlane|src)\b", lambda found: f"{folder}/{found[1]}", text)


def carry_out(instruction: str, rest: str, folder: Path, env: dict[str, str]) -> None:
    match instruction:
        case "FROM":
            wanted = re.search(r"python:(\d+)\.(\d+)", rest)
            assert wanted is not None, rest
            if sys.version_info[:2] != (int(wanted[1]), int(wanted[2])):
                print(f"   (checked with Python {sys.version_info[0]}.{sys.version_info[1]}, the image has {rest})")
        case "ENV" | "ARG":
            for word in shlex.split(rest):
                name, _, value = word.partition("=")
                env.setdefault(name, value)
        case "COPY":
            *sources, target = moved(rest, folder).split()
            for source in sources:
                place = Path(target) / source if target.endswith("/") else Path(target)
                place.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, place)
        case "RUN" if rest.startswith("apt-get "):
            print("   (left to this machine)")
        case "RUN":
            subprocess.run(["sh", "-ec", moved(rest, folder)], env=env, cwd=folder, check=True)
        case _:
            raise SystemExit(f"docker-check does not know how to carry out {instruction}")


def missing_files(environment: Path) -> list[str]:
    """Files of our packages (templates, static files, data) that the installation lacks."""
    packages = next(environment.glob("lib/python*/site-packages"))
    ours = [path for name in ("router_ext", "controlplane") for path in (ROOT / name).rglob("*") if path.is_file()]
    names = [str(path.relative_to(ROOT)) for path in ours if "__pycache__" not in path.parts]
    return [name for name in sorted(names) if not (packages / name).exists()]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fairlane-image-") as name:
        folder = Path(name)
        env = {
            key: value for key, value in os.environ.items() if not key.startswith(("FAIRLANE_", "PYTHON", "VIRTUAL"))
        }
        env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', os.defpath)}"
        for instruction, rest in build_steps((ROOT / "docker" / "Dockerfile").read_text()):
            print(f"== {instruction} {rest}", flush=True)
            carry_out(instruction, rest, folder, env)
        binaries = folder / "opt" / "fairlane" / "bin"
        for command in (
            ["fairlane", "--version"],
            ["fairlane", "router", "--help"],
            ["python", "-m", "django", "check"],
            ["gunicorn", "--check-config", "--config", "python:controlplane.gunicorn_conf", "controlplane.wsgi"],
            ["python", "-c", "import controlplane.celery"],
            ["pip", "check"],
        ):
            print(f"== {' '.join(command)}", flush=True)
            # The router starts on the compiled core or not at all.
            core = {"FAIRLANE_CORE": "compiled", "FAIRLANE_CACHE": str(folder / "opt" / "fairlane" / "cache")}
            subprocess.run(
                [str(binaries / command[0]), *command[1:]], env=env | SECRETS | core, cwd=folder, check=True, stdout=2
            )
        left_out = missing_files(folder / "opt" / "fairlane")
        if left_out:
            raise SystemExit(f"not installed: {', '.join(left_out)}")
    print("every install step of docker/Dockerfile passed")


if __name__ == "__main__":
    main()
