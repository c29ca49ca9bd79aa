"""What the prediction worker answers with where numpy is not installed: nothing, so every request has its fallback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from router_ext.errors import ArtifactRefused
from router_ext.predict.messages import Answer, Ask, Ended


class Silent:
    """Answers questions about output lengths; see ``worker.Service``."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []

    @property
    def known(self) -> int:
        """Prompts and histories remembered."""
        return 0

    def load(self, data: bytes) -> Any:
        """A model from its artifact.

        Raises:
            ArtifactRefused: this router cannot serve it.
        """
        raise ArtifactRefused("length models need numpy and safetensors (fairlane[predictor]), which this router lacks")

    def assign(self, pool: str, digest: str | None, model: Any) -> None:
        """Answer for a pool by this model from now on; None: by none."""

    def answer(self, questions: Sequence[Ask]) -> tuple[list[Answer], list[int]]:
        """Answers to a batch, and the ids of questions that tripped a defect."""
        return [
            Answer(
                id=question.id,
                quantiles=None,
                source="",
                runaway=None,
                features=None,
                feature_version=None,
                model=None,
            )
            for question in questions
        ], []

    def ended(self, news: Ended) -> None:
        """Nothing is learned."""

    def dump(self) -> Iterator[bytes]:
        """What ``restore`` was given: a process that can read it goes on with it."""
        return iter(self._kept)

    def restore(self, slices: Iterable[bytes]) -> None:
        """Keep it as it is."""
        self._kept = list(slices)
