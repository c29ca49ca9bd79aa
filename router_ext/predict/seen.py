"""Which prompts a length model was trained on, so that whoever judges it knows whether they are new to it.

    sketch = the ``MAX_HASHES`` smallest 32-bit hashes of its prompts' features, rising

Up to that many prompts the sketch is all of them. Beyond, prompts whose hash lies above its largest one cannot be told;
the others are a fair sample. Equal prompts are found, near-duplicates are not.

Cost: 4 bytes a prompt, 64 kB at most. Who holds a model and guesses a whole prompt can test whether it was among them.
Source: bottom-k sketches (Cohen and Kaplan 2007).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from router_ext.predict.features import N_FACTS, Features

TENSOR = "seen.hashes"
MAX_HASHES = 16_384

Hashes = NDArray[np.uint32]


def prompt_key(features: Features) -> bytes:
    """What is the same for requests of the same prompt, however they are to be answered."""
    return features.dense[N_FACTS:].tobytes() + features.ids.tobytes() + features.counts.tobytes()


def sketch(prompts: Iterable[Features]) -> Hashes:
    """Of the prompts that a model is trained on."""
    return np.unique(_hashes(prompts))[:MAX_HASHES]


def seen(known: Hashes, prompts: Iterable[Features]) -> tuple[int, int]:
    """How many of these prompts are among those of a sketch, and of how many that can be told."""
    hashes = _hashes(prompts)
    if len(known) >= MAX_HASHES:
        hashes = hashes[hashes <= known[-1]]
    return int(np.isin(hashes, known).sum()), len(hashes)


def _hashes(prompts: Iterable[Features]) -> Hashes:
    digests = b"".join(hashlib.blake2b(prompt_key(one), digest_size=4).digest() for one in prompts)
    return np.frombuffer(digests, "<u4").astype(np.uint32)
