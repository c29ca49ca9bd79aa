"""A length model for a simulation, trained on the prompts that the simulation does not send."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from router_ext.errors import SimulationError, TrainingFailed
from router_ext.sim.answers import NEEDED, read_answers
from router_ext.sim.foresight import facts_of

_SEED = 1


def train_on_others(folder: Path, *, on_progress: Callable[[float, str], None]) -> bytes:
    """The artifact of a model trained on all answers to prompts of the folder that are not replayed. Takes minutes.

    Raises:
        SimulationError: there are too few of them, or they cannot be read.
    """
    try:
        # Torch takes a second and hundreds of megabytes, which runs without a model do not need.
        from router_ext.predict.features import Features, RequestFacts, extract
        from router_ext.predict.training import Sample, train
    except ModuleNotFoundError as error:
        raise SimulationError(f"training needs {NEEDED}: {error}") from error

    seen: dict[tuple[str, RequestFacts], Features] = {}
    samples: list[Sample] = []
    for answer in read_answers(folder):
        prompt, facts = answer.prompt, facts_of(answer)
        if prompt.is_replayed:
            continue
        told = RequestFacts(
            max_new_tokens=answer.max_new_tokens,
            temperature=facts.temperature,
            top_p=facts.top_p,
            is_greedy=facts.is_greedy,
            is_chat=facts.is_chat,
        )
        features = seen.get((prompt.prompt_id, told))
        if features is None:
            features = seen[prompt.prompt_id, told] = extract(prompt.text, told)
        samples.append(
            Sample(
                features=features,
                model=answer.model,
                output_tokens=answer.output_tokens,
                is_complete=answer.is_complete,
            )
        )
    try:
        return train(samples, seed=_SEED, built_at_us=0, on_progress=on_progress).artifact
    except TrainingFailed as error:
        raise SimulationError(f"{folder}: no length model can be trained: {error.message}") from error
