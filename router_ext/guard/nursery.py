"""Where grammars are compiled: a parent that has the compilers loaded and forks a child for each job.

    python -m router_ext.guard.nursery --fd N        # N: its end of a socket pair; Job frames in, Proof frames out

A child has a limit of CPU time and of memory, and dies of what it was given without anybody noticing: of a regex
without end, of a stack that overflows inside a compiler. The parent never compiles. It ends, and its children with
it, when the socket closes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import os
import resource
import select
import signal
import socket
import time
from dataclasses import dataclass, field

import msgspec

from router_ext.guard.automaton import prove
from router_ext.guard.messages import Job, Proof, framed
from router_ext.wire.frames import Frames

NICENESS = 10
"""A verdict may wait for others' tokens, never the reverse."""

_COMPILERS = ("interegular", "jsonschema_rs", "outlines_core.fsm.json_schema", "outlines_core.fsm.regex")

_WALL_SHARE, _WALL_S = 20.0, 5.0
"""A child is killed after so many times its CPU limit, and seconds, on the clock: on a busy machine it gets little."""


@dataclass
class _Child:
    job: Job
    pid: int
    ends_at: float
    data: bytearray = field(default_factory=bytearray)


class _Nursery:
    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._frames = Frames()
        self._decoder = msgspec.msgpack.Decoder(Job)
        self._children: dict[int, _Child] = {}

    def run(self) -> None:
        """Until the socket closes."""
        try:
            while self._turn():
                pass
        finally:
            for child in self._children.values():
                os.kill(child.pid, signal.SIGKILL)

    def _turn(self) -> bool:
        now = time.monotonic()
        for child in self._children.values():
            if child.ends_at <= now:
                os.kill(child.pid, signal.SIGKILL)
        waits = [child.ends_at - now for child in self._children.values()]
        link = self._link.fileno()
        readable, _, _ = select.select([link, *self._children], [], [], max(0.05, min(waits)) if waits else None)
        for source in readable:
            if source != link:
                self._hear(source)
        if link in readable:
            data = self._link.recv(1 << 16)
            if not data:
                return False
            for payload in self._frames.feed(data):
                self._fork(self._decoder.decode(payload))
        return True

    def _fork(self, job: Job) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reader)
                self._link.close()
                _limit(job)
                proof = prove(job)
                proof.cpu_s = time.process_time()
                with os.fdopen(writer, "wb") as out:
                    out.write(framed(proof))
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        ends_at = time.monotonic() + _WALL_SHARE * job.cpu_s + _WALL_S
        self._children[reader] = _Child(job, pid, ends_at)

    def _hear(self, reader: int) -> None:
        child = self._children[reader]
        data = os.read(reader, 1 << 16)
        if data:
            child.data += data
            return
        os.close(reader)
        del self._children[reader]
        _, status, usage = os.wait4(child.pid, 0)
        is_whole = os.waitstatus_to_exitcode(status) == 0
        answer = bytes(child.data) if is_whole else framed(_buried(child.job, status, usage.ru_utime + usage.ru_stime))
        self._link.sendall(answer)


def _limit(job: Job) -> None:
    """Limits of a child. The timer of CPU time is exact, the resource limit stands behind it in whole seconds."""
    signal.setitimer(signal.ITIMER_PROF, job.cpu_s)
    seconds = math.ceil(job.cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    memory = pages * resource.getpagesize() + (job.memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _buried(job: Job, status: int, cpu_s: float) -> Proof:
    """What is known of a job whose child died."""
    code = os.waitstatus_to_exitcode(status)
    proof = Proof(digest=job.digest, cpu_s=cpu_s, is_cost=True)
    if -code in (signal.SIGPROF, signal.SIGXCPU, signal.SIGKILL):
        proof.tried_s = job.cpu_s
        proof.problem = f"the grammar was not compiled within {job.cpu_s:g} s of CPU time"
    elif -code in (signal.SIGSEGV, signal.SIGABRT):
        proof.problem = "the grammar overflows the compiler's stack or memory"
    else:
        proof.problem = f"the compiler ended without an answer (status {code})"
    return proof


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m router_ext.guard.nursery")
    parser.add_argument("--fd", type=int, required=True)
    link = socket.socket(fileno=parser.parse_args().fd)
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the router, which closes the socket
    for name in _COMPILERS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children share the pages
    _Nursery(link).run()


if __name__ == "__main__":
    main()
