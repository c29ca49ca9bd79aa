"""Next tokens from logits, as TGI's token chooser picks them.

Order: watermark, repetition penalty, frequency penalty, grammar, then the warpers temperature, top-k, top-p, typical-p.
Any warper switches sampling on. Log probabilities and top tokens are those after all of them. Penalties count the
request's own prompt and output; a running TGI also counts the padding of its batch, which makes them depend on
batch mates and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from router_ext.devserver.engine import Sampled, Sampling, Sequence

WATERMARK_GAMMA, WATERMARK_DELTA, WATERMARK_KEY = 0.5, 2.0, 15485863  # TGI's defaults
NUCLEUS = 1024  # tokens sorted first for top-p; a flat distribution needs the whole vocabulary


def is_sampled(sampling: Sampling) -> bool:
    """Whether the next token is drawn, and not simply the most probable one."""
    return sampling.do_sample or _has_warper(sampling)


def choose(logits: Tensor, sequences: Rows[Sequence], generators: Rows[torch.Generator | None]) -> list[Sampled]:
    """The next token of each sequence.

    Args:
        logits: [sequences, vocab], float32, changed in place.
        sequences: prompt and output so far are read from them.
        generators: one per sampled sequence, seeded with its seed; None for greedy ones.
    """
    for row, sequence in zip(logits, sequences, strict=True):
        _process(row, sequence)
    logprobs = torch.log_softmax(logits, dim=-1)
    ids = logits.argmax(dim=-1)
    for i, generator in enumerate(generators):
        if generator is not None:
            # argmax of p / q with q exponential draws from p (the exponential race), with one draw a token.
            noise = torch.empty_like(logits[i]).exponential_(1, generator=generator)
            ids[i] = logits[i].softmax(-1).div_(noise).argmax()
    chosen = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1).tolist()
    for sequence, token_id in zip(sequences, ids.tolist(), strict=True):
        if sequence.guide is not None and sequence.guide_state >= 0:
            sequence.guide_state = sequence.guide.next(sequence.guide_state, token_id)
    return [
        Sampled(sequence, token_id, logprob, _top(row, sequence.sampling.top_n_tokens))
        for sequence, token_id, logprob, row in zip(sequences, ids.tolist(), chosen, logprobs, strict=True)
    ]


def _has_warper(sampling: Sampling) -> bool:
    return sampling.temperature != 1.0 or sampling.top_k != 0 or sampling.top_p < 1.0 or sampling.typical_p < 1.0


def _process(logits: Tensor, sequence: Sequence) -> None:
    """Apply penalties and warpers to one row [vocab] in place."""
    s = sequence.sampling
    if s.watermark:
        _watermark(logits, (sequence.output_ids or sequence.prompt_ids)[-1])
    if s.repetition_penalty != 1.0 or s.frequency_penalty != 0.0:
        ids = torch.tensor(sequence.prompt_ids + sequence.output_ids)
        if s.repetition_penalty != 1.0:
            seen = logits[ids]
            logits[ids] = torch.where(seen < 0, seen * s.repetition_penalty, seen / s.repetition_penalty)
        if s.frequency_penalty != 0.0:
            share = torch.bincount(ids, minlength=logits.shape[0]).float() / len(ids)
            logits.sub_(share * s.frequency_penalty)
    if sequence.guide is not None and sequence.guide_state >= 0:
        allowed = torch.from_numpy(np.asarray(sequence.guide.allowed(sequence.guide_state), np.int64))
        kept = logits[allowed]
        logits.fill_(-torch.inf)[allowed] = kept
    if s.temperature != 1.0:
        logits.div_(s.temperature)
    if s.top_k != 0:
        kth = logits.topk(min(s.top_k, logits.shape[0])).values[-1]
        logits.masked_fill_(logits < kth, -torch.inf)
    if s.top_p < 1.0:
        _nucleus(logits, s.top_p)
    if s.typical_p < 1.0:
        _typical(logits, s.typical_p)


def _watermark(logits: Tensor, previous_id: int) -> None:
    """Favour half of the vocabulary, a half that depends on the previous token.

    Source: Kirchenbauer et al., A Watermark for Large Language Models (ICML 2023).
    """
    generator = torch.Generator().manual_seed(WATERMARK_KEY * previous_id)
    shuffled = torch.randperm(logits.shape[0], generator=generator)
    logits[shuffled[: int(logits.shape[0] * WATERMARK_GAMMA)]] += WATERMARK_DELTA


def _nucleus(logits: Tensor, top_p: float) -> None:
    """Keep the smallest set of most probable tokens that holds ``top_p``; the most probable one always stays."""
    probabilities = logits.softmax(-1)
    for n in (NUCLEUS, logits.shape[0]):
        best, ids = probabilities.topk(min(n, logits.shape[0]))
        reached = best.cumsum(0)
        if reached[-1] >= top_p:
            break
    keep = int((reached < top_p).sum()) + 1
    kept = logits[ids[:keep]]
    logits.fill_(-torch.inf)[ids[:keep]] = kept


def _typical(logits: Tensor, mass: float) -> None:
    """Keep the tokens whose surprise is closest to the entropy, until they hold ``mass``.

    Source: Meister et al., Locally Typical Sampling (TACL 2023).
    """
    logprobs = logits.log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = -(logprobs * probabilities).nansum()
    ids = (-logprobs - entropy).abs().argsort()
    reached = probabilities[ids].cumsum(0)
    keep = int((reached < mass).sum()) + 1
    kept = logits[ids[:keep]]
    logits.fill_(-torch.inf)[ids[:keep]] = kept


def _top(logprobs: Tensor, n: int) -> tuple[tuple[int, float], ...]:
    """The ``n`` most probable tokens and whatever ties with the last; impossible ones never."""
    if n == 0:
        return ()
    values, ids = logprobs.topk(n)
    if (ties := int((logprobs >= values[-1]).sum())) > n and values[-1] != -torch.inf:
        values, ids = logprobs.topk(ties)
    return tuple((i, v) for i, v in zip(ids.tolist(), values.tolist(), strict=True) if v > -torch.inf)
