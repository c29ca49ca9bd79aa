"""Coverage-guided fuzzing of one harness, or of each in turn: ``python tests/fuzz/run.py [NAME ...] --seconds 20``.

Each harness runs in a process of its own, as atheris wants it, from its seeds and from what earlier runs kept in
``build/fuzz/NAME``. An input that breaks a reader is written there as ``crash-*``, printed, and makes the run fail.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]


def fuzz(name: str, seconds: int) -> None:
    """Never returns: atheris ends the process."""
    import atheris

    with atheris.instrument_imports(include=["router_ext"]):
        from fuzz.harnesses import HARNESSES
    harness = HARNESSES[name]
    corpus = ROOT / "build" / "fuzz" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(harness.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    limits = (
        f"-max_total_time={seconds}",
        "-max_len=4096",
        "-timeout=10",
        "-rss_limit_mb=2048",
        "-print_final_stats=0",
    )
    atheris.Setup([name, f"-artifact_prefix={corpus}/", *limits, str(corpus)], harness.run)
    atheris.Fuzz()


def main() -> int:
    from fuzz.harnesses import HARNESSES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(HARNESSES))
    parser.add_argument("--seconds", type=int, default=20, help="for each harness")
    args = parser.parse_args()
    if unknown := set(args.names) - set(HARNESSES):
        parser.error(f"no harness named {', '.join(sorted(unknown))}")
    broken = []
    for name in args.names or HARNESSES:
        code = f"import runpy; runpy.run_path({__file__!r})['fuzz']({name!r}, {args.seconds})"
        print(f"== {name}", flush=True)
        done = subprocess.run(
            [sys.executable, "-c", code], check=False, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        lines = done.stdout.decode("utf-8", "replace").splitlines()
        shown = lines[-60:] if done.returncode else [line for line in lines if line.startswith("Done ")]
        print("\n".join(shown), flush=True)
        if done.returncode:
            broken.append(name)
    if broken:
        print(f"== BROKEN: {', '.join(broken)}; the inputs are in build/fuzz", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
