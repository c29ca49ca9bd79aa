"""Prediction workers that misbehave, as real child processes: the real loop, protocol and files, another service.

python -m support.prediction_workers KIND --fd N [--dir DIR]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from router_ext.errors import ArtifactRefused
from router_ext.predict.messages import Answer, Ask, Ended
from router_ext.predict.notes import Notes
from router_ext.predict.worker import serve

PLAIN = (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0)

ABSURD: dict[str, tuple[float, ...]] = {
    "nan": (10.0, 20.0, 30.0, float("nan"), 50.0, 60.0, 70.0),
    "infinite": (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, float("inf")),
    "falling": (10.0, 20.0, 30.0, 25.0, 50.0, 60.0, 70.0),
    "few": (10.0, 20.0),
    "zero": (0.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0),
    "huge": (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 1e12),
}


_SLICES = 50


class Plain:
    """Answers every prompt with seven round numbers, and tells in them what it has learned."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seen: list[Ended] = []
        self.models: dict[str, str] = {}
        self.restored = b""

    @property
    def known(self) -> int:
        return len(self.restored)

    def load(self, data: bytes) -> str:
        if data.startswith(b"deadly"):
            os.kill(os.getpid(), signal.SIGKILL)
        if not data.startswith(b"model"):
            raise ArtifactRefused("this is no model")
        return data.decode()

    def assign(self, pool: str, digest: str | None, model: Any) -> None:
        self.models.pop(pool, None)
        if digest is not None:
            self.models[pool] = digest

    def answer(self, questions: Sequence[Ask]) -> tuple[list[Answer], list[int]]:
        if self.kind == "slow":
            time.sleep(0.03 * len(questions))
        if self.kind == "hangs":
            signal.alarm(0)
            while True:
                time.sleep(60)
        if self.kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "refuses":
            return [], [question.id for question in questions]
        if self.kind == "babbles":
            os.write(int(sys.argv[sys.argv.index("--fd") + 1]), b"\x03\0\0\0abc")
        return [
            Answer(
                id=question.id,
                quantiles=ABSURD.get(self.kind, PLAIN),
                source="model",
                runaway=2.0 if self.kind == "certain" else 0.01,
                features=" ".join(
                    map(str, (len(question.prompt), len(self.seen), os.getpid(), question.top_k, question.typical_p))
                ).encode(),
                feature_version=1,
                model=self.models.get(question.pool),
            )
            for question in questions
        ], []

    def ended(self, news: Ended) -> None:
        self.seen.append(news)

    def dump(self) -> Iterator[bytes]:
        for _ in range(_SLICES if self.kind == "saves" else 0):
            yield b""
        yield self.restored + b"." * len(self.seen)

    def restore(self, slices: Iterable[bytes]) -> None:
        data = b"".join(slices)
        if data.strip(b"."):
            raise ValueError("dots were expected")
        self.restored = data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--fd", type=int)
    args = parser.parse_args()
    interval = {"save_s": 0.01} if args.kind == "saves" else {}
    serve(args.fd, args.dir, Plain(args.kind), Notes(router="test"), **interval)


if __name__ == "__main__":
    main()
