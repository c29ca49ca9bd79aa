"""``python -m router_ext.devserver``."""

import argparse
import sys

from router_ext.devserver.command import add_arguments, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="fairlane devserver", description="TGI's HTTP API on a CPU.")
    add_arguments(parser)
    return run(parser.parse_args())


sys.exit(main())
