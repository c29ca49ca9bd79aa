"""Fairlane's data plane: the router, the CPU model server and the command line.

The core decides, the shell acts: ``core`` is pure, everything else moves bytes for it.
"""

__version__ = "0.1.0"
