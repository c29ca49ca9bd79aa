"""The torch engine against tokens that a running TGI gave, and against itself under other batches and chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from router_ext.devserver.engine import Sampled, Sampling, Sequence
from router_ext.devserver.smollm import load_tokenizer
from router_ext.devserver.torch_engine import TorchEngine

pytestmark = pytest.mark.torch_engine
TRANSCRIPTS = Path(__file__).parent / "transcripts"
TOLERANCE = 2e-4  # of a logprob; the recorded server's kernels round differently


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TRANSCRIPTS / name).read_text(encoding="utf-8").splitlines()]


RECORDED = records("torch_tokens.jsonl")
RESUMED = records("resume.jsonl")
LONG = next(record for record in RECORDED if record["name"].startswith("first 1,024"))


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[TorchEngine]:
    engine = TorchEngine(model_dir, threads=2)
    yield engine
    assert engine.held_bytes == 0, "a test left a sequence behind"


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir)


class Run:
    """Sequences on an engine; the caller's part of the protocol."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.samples: dict[Sequence, list[Sampled]] = {}

    def add(self, ids: list[int], **sampling: Any) -> Sequence:
        sequence = Sequence(sequence_id=len(self.samples), prompt_ids=ids, sampling=Sampling(**sampling))
        self.samples[sequence] = []
        return sequence

    def step(self, *, prefill: list[tuple[Sequence, int]] = [], decode: list[Sequence] = []) -> None:  # noqa: B006
        for sample in self.engine.step(prefill=prefill, decode=decode):
            sample.sequence.output_ids.append(sample.token_id)
            self.samples[sample.sequence].append(sample)
        for sequence, n_tokens in prefill:
            sequence.prefilled += n_tokens

    def generate(self, n_tokens: int, *, stop_at_eos: bool = False) -> None:
        """Run every sequence to its end in one ragged batch; each is removed when it ends."""
        self.step(prefill=[(s, len(s.prompt_ids) - s.prefilled) for s in self.samples if not s.output_ids])
        running = list(self.samples)
        while running:
            ended = [
                s
                for s in running
                if len(s.output_ids) == n_tokens or (stop_at_eos and s.output_ids[-1] in self.engine.eos_ids)
            ]
            for sequence in ended:
                running.remove(sequence)
                self.engine.remove(sequence)
            self.step(decode=running)


def single(engine: TorchEngine, ids: list[int], n_tokens: int) -> list[int]:
    run = Run(engine)
    sequence = run.add(ids)
    run.generate(n_tokens)
    return sequence.output_ids


def replay(engine: TorchEngine, tokenizer: Tokenizer, record: dict[str, Any], n_tokens: int) -> list[Sampled]:
    parameters = dict(record["parameters"])
    ids = tokenizer.encode(record["inputs"]).ids
    ids = ids[-parameters.pop("truncate", len(ids)) :]
    run = Run(engine)
    sequence = run.add(ids, **parameters, seed=record["seed"] or 0, wants_prefill="prefill" in record)
    run.generate(n_tokens)
    return run.samples[sequence]


@pytest.mark.parametrize("record", [r for r in RECORDED if r is not LONG], ids=lambda record: record["name"])
def test_tokens_are_those_of_a_running_tgi(engine: TorchEngine, tokenizer: Tokenizer, record: dict[str, Any]) -> None:
    """Greedy, penalised and seeded alike, with their logprobs, top tokens and prompt logprobs."""
    if "text" in record:
        samples = replay(engine, tokenizer, record, record["n_tokens"])
        assert tokenizer.decode([sample.token_id for sample in samples]) == record["text"]
        return
    samples = replay(engine, tokenizer, record, len(record["tokens"]))
    assert [sample.token_id for sample in samples] == [token_id for token_id, _ in record["tokens"]]
    assert [sample.logprob for sample in samples] == pytest.approx([p for _, p in record["tokens"]], abs=TOLERANCE)
    for sample, top in zip(samples, record.get("top_tokens", []), strict=False):
        assert [token_id for token_id, _ in sample.top] == [token_id for token_id, _ in top]
        assert [p for _, p in sample.top] == pytest.approx([p for _, p in top], abs=TOLERANCE)
    expected = [p for _, p in record.get("prefill", [])][1:]  # nothing stands before the first token
    assert list(samples[0].prefill_logprobs) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.slow
def test_a_long_generation_stays_on_the_recorded_path(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    """118 tokens after a prompt of 17: keys and values move to larger arenas twice."""
    samples = replay(engine, tokenizer, LONG, 118)
    assert [sample.token_id for sample in samples] == [token_id for token_id, _ in LONG["tokens"][:118]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_generation_of_1024_tokens_stays_on_the_recorded_path(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    samples = replay(engine, tokenizer, LONG, 1024)
    assert [sample.token_id for sample in samples] == [token_id for token_id, _ in LONG["tokens"]]


def test_prompts_end_where_the_recorded_ones_ended(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    ending = [record for record in RESUMED if record["finish"][0] == "eos_token"]
    others = [record for record in RESUMED if record["finish"][0] != "eos_token"][:4]
    run = Run(engine)
    sequences = [run.add(tokenizer.encode(record["prompt"]).ids) for record in ending + others]
    run.generate(48, stop_at_eos=True)
    assert [len(s.output_ids) for s in sequences] == [record["tokens"] for record in ending + others]
    assert [s.output_ids[-1] in engine.eos_ids for s in sequences] == [True] * len(ending) + [False] * len(others)


@pytest.mark.parametrize("n", [4, pytest.param(24, marks=pytest.mark.slow)])
def test_a_ragged_batch_gives_what_its_members_give_alone(engine: TorchEngine, tokenizer: Tokenizer, n: int) -> None:
    texts = [record["prompt"] for record in RESUMED]
    prompts = [tokenizer.encode(text).ids for text in [*texts[: n - 1], " ".join(texts[:30])]]
    run = Run(engine)
    together = [run.add(ids) for ids in prompts]
    run.generate(8)
    assert {len(ids) for ids in prompts} >= {5, 17}, "lengths should differ"
    assert max(map(len, prompts)) > 256
    for sequence in together:
        alone = Run(engine)
        twin = alone.add(sequence.prompt_ids)
        alone.generate(8)
        assert sequence.output_ids == twin.output_ids
        ragged, unmixed = (samples[s] for samples, s in ((run.samples, sequence), (alone.samples, twin)))
        assert [x.logprob for x in ragged] == pytest.approx([x.logprob for x in unmixed], abs=TOLERANCE)


@pytest.mark.slow
def test_prefill_in_chunks_beside_decodes_changes_neither(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    long = tokenizer.encode(" ".join(record["prompt"] for record in RESUMED[:12])).ids
    short = tokenizer.encode("The capital of France is").ids
    run = Run(engine)
    talking, reading = run.add(short), run.add(long, wants_prefill=True)
    run.step(prefill=[(talking, len(short))])
    while reading.prefilled < len(long):
        run.step(prefill=[(reading, min(37, len(long) - reading.prefilled))], decode=[talking])
    n_before = len(talking.output_ids)
    while len(reading.output_ids) < 8:
        run.step(decode=[reading, talking])
    for sequence in (talking, reading):
        engine.remove(sequence)
    assert n_before >= 4
    assert talking.output_ids == single(engine, short, len(talking.output_ids))
    whole = Run(engine)
    alone = whole.add(long, wants_prefill=True)
    whole.generate(8)
    assert reading.output_ids == alone.output_ids
    in_chunks, at_once = (r.samples[s][0].prefill_logprobs for r, s in ((run, reading), (whole, alone)))
    assert len(at_once) == len(long) - 1
    assert in_chunks == pytest.approx(at_once, abs=TOLERANCE)


def test_who_leaves_frees_memory_and_disturbs_nobody(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode(record["prompt"]).ids for record in RESUMED[:6]]
    run = Run(engine)
    sequences = [run.add(ids) for ids in prompts]
    run.step(prefill=[(s, len(s.prompt_ids)) for s in sequences])
    run.step(decode=sequences)
    held = engine.held_bytes
    for leaving in sequences[:5]:
        engine.remove(leaving)
        engine.remove(leaving)  # a second farewell is harmless
    assert engine.held_bytes <= held // 2
    for _ in range(6):
        run.step(decode=sequences[5:])
    assert sequences[5].output_ids == single(engine, prompts[5], 8)
    assert engine.held_bytes <= held // 2
    engine.remove(sequences[5])
    assert engine.held_bytes == 0


def test_a_sequence_may_pause_while_its_neighbours_decode(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode(record["prompt"]).ids for record in RESUMED[:3]]
    run = Run(engine)
    sequences = [run.add(ids) for ids in prompts]
    run.step(prefill=[(s, len(s.prompt_ids)) for s in sequences])
    for _ in range(5):
        run.step(decode=[sequences[2], sequences[0]])
    for _ in range(5):
        run.step(decode=[sequences[1]])
    for sequence in sequences:
        engine.remove(sequence)
    assert [s.output_ids for s in sequences] == [single(engine, ids, 6) for ids in prompts]


def test_steps_that_do_not_continue_a_sequence_are_refused(engine: TorchEngine) -> None:
    run = Run(engine)
    sequence = run.add([5, 6, 7])
    with pytest.raises(ValueError, match="cannot be decoded"):
        engine.step(prefill=[], decode=[sequence])
    for n_tokens in (0, 4):
        with pytest.raises(ValueError, match=f"chunk of {n_tokens} at 0 of 3"):
            engine.step(prefill=[(sequence, n_tokens)], decode=[])
    with pytest.raises(ValueError, match="8192 positions"):
        engine.step(prefill=[(run.add([5] * 8193), 1)], decode=[])
    run.step(prefill=[(sequence, 2)])
    sequence.prefilled = 0
    with pytest.raises(ValueError, match="2 of them processed"):
        engine.step(prefill=[(sequence, 1)], decode=[])
    engine.remove(sequence)
    assert engine.step(prefill=[], decode=[]) == []
