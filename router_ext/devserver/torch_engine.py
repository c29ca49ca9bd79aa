"""The torch engine: SmolLM2-135M-Instruct on CPU, prefill chunks and decodes in one forward pass."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

# OpenMP reads this when torch is loaded. Its threads otherwise spin at every barrier, and a step takes ten times as
# long as soon as another process wants the core they spin on; sleeping costs 2 to 4 ms a step when nobody does.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from router_ext.devserver.engine import Sampled, Sampling, Sequence
from router_ext.devserver.gguf_model import load_weights
from router_ext.devserver.kv_arena import Arena, KvCache, Place
from router_ext.devserver.llama import DecodeGroup, Llama, PrefillChunk
from router_ext.devserver.smollm import EOS_ID
from router_ext.devserver.torch_sampling import choose, is_sampled

LOGIT_ROWS = 128  # prompt rows whose logits are held at once: 25 MB for this vocabulary


@dataclass(slots=True)
class _State:
    """What the engine keeps per sequence: its keys and values, its random numbers, its prompt's logprobs if wanted."""

    place: Place
    generator: torch.Generator | None
    prompt_logprobs: list[float] = field(default_factory=list)


class TorchEngine:
    """``engine.Engine`` over real weights.

    Tokens do not depend on batch mates beyond float rounding. One thread at a time may call it. A sequence
    exists from its first prefill chunk to ``remove``.

    Args:
        cache_dir: folder of cached weights; the first start fills it.
        threads: torch's threads for one operation (process-wide); None leaves torch's own choice.
    """

    def __init__(self, cache_dir: Path, *, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        config, weights = load_weights(cache_dir)
        self._llama = Llama(config, weights)
        self._cache = KvCache(config)
        self._states: dict[Sequence, _State] = {}
        self._warm_up()

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a generation."""
        return frozenset({EOS_ID})

    @property
    def held_bytes(self) -> int:
        """Memory held for keys and values."""
        return self._cache.held_bytes

    def step(self, *, prefill: list[tuple[Sequence, int]], decode: list[Sequence]) -> list[Sampled]:
        """One forward pass over all decoding sequences and prefill chunks; see ``engine.Engine``.

        Raises:
            ValueError: a chunk is empty or leaves the prompt, positions run out, or a sequence's keys and values
                do not end where this step would continue it.
        """
        for sequence, n_tokens in prefill:
            self._admit(sequence, n_tokens)
        for sequence in decode:
            self._extend(sequence)
        with torch.inference_mode():
            return self._forward(prefill, decode)

    def remove(self, sequence: Sequence) -> None:
        """Forget the sequence; one that never entered a step is none of the engine's business."""
        if state := self._states.pop(sequence, None):
            with torch.inference_mode():
                self._cache.release(state.place)

    def _warm_up(self) -> None:
        """Touch every page of the weights, so that the first request does not wait for the disk."""
        sequence = Sequence(sequence_id=-1, prompt_ids=[EOS_ID], sampling=Sampling())
        self.step(prefill=[(sequence, 1)], decode=[])
        self.remove(sequence)

    def _admit(self, sequence: Sequence, n_tokens: int) -> None:
        """Check a chunk; at the first one give the sequence its place."""
        state = self._states.get(sequence)
        length = state.place.length if state else 0
        n_prompt = len(sequence.prompt_ids)
        if sequence.prefilled != length or not 0 < n_tokens <= n_prompt - length:
            raise ValueError(
                f"sequence {sequence.sequence_id}: chunk of {n_tokens} at {sequence.prefilled} of {n_prompt} prompt "
                f"tokens, {length} of them processed"
            )
        self._check_positions(sequence, n_prompt)
        if state is None:
            s = sequence.sampling
            generator = torch.Generator().manual_seed(s.seed) if is_sampled(s) else None
            with torch.inference_mode():
                self._states[sequence] = _State(self._cache.reserve(n_prompt + 1), generator)

    def _extend(self, sequence: Sequence) -> None:
        """Check a decoding sequence and make room for its token."""
        state = self._states.get(sequence)
        end = len(sequence.prompt_ids) + len(sequence.output_ids)
        if state is None or not sequence.output_ids or state.place.length != end - 1:
            held = "nothing" if state is None else f"{state.place.length} tokens"
            raise ValueError(f"sequence {sequence.sequence_id}: {end} tokens, {held} processed; it cannot be decoded")
        self._check_positions(sequence, end)
        with torch.inference_mode():
            self._cache.grow(state.place, end)

    def _check_positions(self, sequence: Sequence, end: int) -> None:
        if end > (limit := self._llama.config.max_positions):
            raise ValueError(f"sequence {sequence.sequence_id}: {end} tokens, the model has {limit} positions")

    def _forward(self, prefill: list[tuple[Sequence, int]], decode: list[Sequence]) -> list[Sampled]:
        ids: list[int] = []
        positions: list[int] = []
        by_arena: defaultdict[Arena, list[Sequence]] = defaultdict(list)
        for sequence in decode:
            by_arena[self._states[sequence].place.arena].append(sequence)
        groups, chunks = [], []
        sampled: list[tuple[Sequence, int]] = []  # sequences to be sampled, and the row each is sampled from
        for arena, members in by_arena.items():
            members.sort(key=lambda member: self._states[member].place.slot)
            places = [self._states[member].place for member in members]
            lengths = [place.length for place in places]
            groups.append(DecodeGroup.build(arena, len(ids), [place.slot for place in places], lengths))
            sampled += [(member, len(ids) + i) for i, member in enumerate(members)]
            ids += [member.output_ids[-1] for member in members]
            positions += lengths
        for sequence, n_tokens in prefill:
            place = self._states[sequence].place
            start, end = place.length, place.length + n_tokens
            chunks.append(PrefillChunk.build(place.arena, len(ids), place.slot, start, end))
            ids += sequence.prompt_ids[start:end]
            positions += range(start, end)
            if end == len(sequence.prompt_ids):
                sampled.append((sequence, len(ids) - 1))
        if not ids:
            return []
        hidden = self._llama.forward(torch.tensor(ids), torch.tensor(positions), groups, chunks)
        for chunk, (sequence, n_tokens) in zip(chunks, prefill, strict=True):
            state = self._states[sequence]
            state.place.length += n_tokens
            if sequence.sampling.wants_prefill:
                state.prompt_logprobs += self._prompt_logprobs(hidden[chunk.rows], sequence, chunk.start)
        for sequence in decode:
            self._states[sequence].place.length += 1
        if not sampled:
            return []
        logits = self._llama.logits(hidden[[row for _, row in sampled]])
        sequences = [sequence for sequence, _ in sampled]
        chosen = choose(logits, sequences, [self._states[sequence].generator for sequence in sequences])
        return [
            replace(sample, prefill_logprobs=tuple(self._states[sample.sequence].prompt_logprobs))
            if sample.sequence.sampling.wants_prefill and not sample.sequence.output_ids
            else sample
            for sample in chosen
        ]

    def _prompt_logprobs(self, hidden: torch.Tensor, sequence: Sequence, start: int) -> list[float]:
        """Log probabilities of the prompt's tokens from ``start`` + 1 on, as far as these rows predict them."""
        following = sequence.prompt_ids[start + 1 : start + 1 + hidden.shape[0]]
        found: list[float] = []
        for at in range(0, len(following), LOGIT_ROWS):
            wanted = torch.tensor(following[at : at + LOGIT_ROWS]).unsqueeze(1)
            logprobs = self._llama.logits(hidden[at : at + len(wanted)]).log_softmax(-1)
            found += logprobs.gather(1, wanted).squeeze(1).tolist()
        return found
