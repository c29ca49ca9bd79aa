"""Runs a command that must not outlive the process that started it: ``launch.py PARENT_PID SIGNAL COMMAND...``

A script of its own, executed with ``python -I -S``, because ``prctl(PR_SET_PDEATHSIG)`` belongs between fork and exec
and Python's ``preexec_fn`` may deadlock in a process with threads. The setting survives the exec that follows.
The signal comes when the *thread* that called fork ends: start children from a thread that outlives them.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, signal_name, command = int(argv[0]), argv[1], argv[2:]
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.Signals[signal_name].value, 0, 0, 0) != 0:
            sys.exit(f"launch: prctl failed: {os.strerror(ctypes.get_errno())}")
    # The parent may have died before prctl took effect; its death would then never be reported.
    if os.getppid() != parent:
        sys.exit("launch: the parent is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"launch: cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
