"""What the prediction worker answers with where numpy is not installed: nothing, so every request has its fallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router_ext.errors import ArtifactRefused
from router_ext.predict.messages import Answer, Ask, Ended


class Silent:
    """Answers questions about output lengths; see ``worker.Service``."""

    @property
    def known(self) -> int:
        """Prompts and histories remembered."""
        return 0

    def warm_up(self) -> None:
        """Import what a model needs, before one comes."""

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
        """Learn from the length of an answer."""

    def dump(self) -> bytes:
        """What was learned, for ``restore``."""
        return b""

    def restore(self, data: bytes) -> None:
        """Go on with what another process has learned.

        Raises:
            ValueError: it cannot be used.
        """
