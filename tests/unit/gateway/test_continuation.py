"""One stream out of many slices: what the client sees does not depend on where the slices end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sliced_tgi import Seen, SlicedTgi, scripted_model
from tokenizers import Tokenizer

from router_ext.devserver.smollm import EOS_ID, load_tokenizer
from router_ext.gateway import continuation
from router_ext.gateway.continuation import Continuation, Phase, derive_seed
from router_ext.gateway.cuts import CutDecision, CutJob, TextTokenizer, choose_cut
from router_ext.gateway.dialects import decode_request
from router_ext.gateway.encoders import AnswerContext, encoder_for
from router_ext.gateway.generation import Dialect, GenerationRequest, ModelLimits, ResumeClass
from router_ext.wire.sse import SseParser
from router_ext.wire.tgi import StreamEvent

LIMITS = ModelLimits(model_id="m", max_input_tokens=2_047, max_total_tokens=2_048)
PIECES = [
    *(" the", "a", " word", "token", "ing", " New", "York", ".", ",", " ", "  ", "\n", "\n\n", "\t", "\r\n"),
    *("é", "naïve", "日本", "語", "한국", "नम", "عربى", "Ω", "🎉", "👩‍💻", "\N{COMBINING ACUTE ACCENT}"),
    *("12", " 345", "def f(x):", "{}", "==", "'s", " 've", "<|im_start|>", "<file_sep>", "STOP"),
]


@dataclass(frozen=True)
class Case:
    """One generation: what the model would say, what the client asked for, where the slices end."""

    prompt: str
    answer: tuple[str, ...]
    max_new_tokens: int
    slices: tuple[int, ...]
    splits: tuple[int, ...] = ()  # places whose token is sampled in pieces of one byte
    stop: tuple[str, ...] = ()
    knows_eos: bool = True
    breaks: tuple[int | None, ...] = (None,)  # per segment: events after which the connection breaks


@dataclass(frozen=True)
class Pool:
    """The tokenizer as the model server has it, and as the router has it."""

    server: Tokenizer
    router: TextTokenizer


@pytest.fixture(scope="module")
def pool(model_dir: Path) -> Pool:
    return Pool(load_tokenizer(model_dir), TextTokenizer(load_tokenizer(model_dir)))


def answer_ids(tokenizer: Tokenizer, case: Case) -> list[int]:
    """The sampled ids: the tokenizer's own split, but for the tokens that ``splits`` takes apart."""
    ids: list[int] = tokenizer.encode("".join(case.answer), add_special_tokens=False).ids
    for place in sorted(set(case.splits), reverse=True):
        if place < len(ids):
            symbols = tokenizer.id_to_token(ids[place])
            parts = [tokenizer.token_to_id(symbol) for symbol in symbols]
            if len(parts) > 1 and None not in parts:
                ids[place : place + 1] = parts
    return ids


def make_server(tokenizer: Tokenizer, case: Case) -> SlicedTgi:
    script = tokenizer.encode(case.prompt).ids + answer_ids(tokenizer, case) + [EOS_ID]
    palette = [*sorted(set(script) - {EOS_ID}), EOS_ID]
    return SlicedTgi(tokenizer, scripted_model(script, palette), {EOS_ID})


@dataclass
class Outcome:
    seen: Seen
    flow: Continuation
    jobs: list[tuple[CutJob, CutDecision]]
    server: SlicedTgi


Cutter = Callable[[TextTokenizer, CutJob], CutDecision]


def run_sliced(
    pool: Pool,
    case: Case,
    *,
    flow_class: type[Continuation] = Continuation,
    cutter: Cutter = choose_cut,
) -> Outcome:
    """The client's view: what it reads off the stream that continuation and encoder make."""
    tokenizer = pool.server
    server = make_server(tokenizer, case)
    parameters: dict[str, object] = {"do_sample": False}
    if case.stop:
        parameters["stop"] = list(case.stop)
    flow = flow_class(
        prompt=case.prompt,
        parameters=parameters,
        max_new_tokens=case.max_new_tokens,
        limits=LIMITS,
        base_seed=1,
        stop=case.stop,
        eos_ids={EOS_ID} if case.knows_eos else set(),
        eos_is_complete=case.knows_eos,
        prompt_tokens=len(tokenizer.encode(case.prompt).ids),
    )
    request = GenerationRequest(dialect=Dialect.GENERATE_STREAM, is_stream=True, wants_details=True)
    encoder = encoder_for(request, AnswerContext(model_id="m", system_fingerprint="f", created=1))
    jobs, stream = [], bytearray()

    def show(events: Sequence[StreamEvent]) -> None:
        if flow.completion is not None:
            stream.extend(encoder.finish(events, flow.completion))
        elif events:
            stream.extend(encoder.tokens(events))

    for segment in range(4 * case.max_new_tokens + 16):
        size = case.slices[segment % len(case.slices)]
        payloads = server.answer(flow.next_slice(size))
        limit = case.breaks[segment] if segment < len(case.breaks) else None
        for payload in payloads if limit is None else payloads[:limit]:
            show(flow.feed(payload))
            if flow.phase is not Phase.RUNNING:
                break
        if flow.phase is Phase.RUNNING:
            assert limit is not None, "the stream ended without an end"
            assert flow.interrupt()
        if flow.phase is Phase.CUT:
            job = flow.cut_job()
            decision = cutter(pool.router, job)
            jobs.append((job, decision))
            show(flow.resume(decision))
        if flow.phase is Phase.DONE:
            break
    assert flow.phase is Phase.DONE, "no progress"
    return Outcome(Seen.streamed(SseParser().feed(bytes(stream))), flow, jobs, server)


def run_unsliced(tokenizer: Tokenizer, case: Case) -> Seen:
    parameters = {"max_new_tokens": case.max_new_tokens, "stop": list(case.stop)}
    server = make_server(tokenizer, case)
    return Seen.streamed(server.answer(json.dumps({"inputs": case.prompt, "parameters": parameters}).encode()))


def has_exact_boundary(tokenizer: Tokenizer, job: CutJob) -> bool:
    """By brute force over the whole text: could this slice have been cut exactly?"""
    base = tokenizer.encode(job.base_text).ids
    for place in range(max(job.lowest, 1), job.highest + 1):
        if job.texts[place - 1] or place == job.lowest:
            whole = tokenizer.encode(job.base_text + "".join(job.texts[:place])).ids
            if whole == base + list(job.ids[:place]):
                return True
    return False


def check_exact(pool: Pool, case: Case, **mutant: object) -> Outcome:
    """The law, for a generation whose every slice has an exact place to end."""
    outcome = check_law(pool, case, **mutant)
    assert outcome.flow.resume_class is ResumeClass.EXACT
    return outcome


def check_law(pool: Pool, case: Case, **mutant: object) -> Outcome:
    """Sliced equals unsliced, unless a cut was told to be inexact and really had no exact place."""
    outcome = run_sliced(pool, case, **mutant)  # type: ignore[arg-type]  # a mutant is spelt by name
    seen, flow = outcome.seen, outcome.flow
    assert [index for index, *_ in seen.tokens] == list(range(1, len(seen.tokens) + 1))
    assert seen.output_tokens == len(seen.tokens) == flow.kept_tokens == flow.shown_tokens
    assert flow.received_tokens >= flow.kept_tokens + flow.recomputed_tokens
    for job, decision in outcome.jobs:
        assert decision.is_exact or not has_exact_boundary(pool.server, job), "an exact boundary was missed"
    inexact = [decision for _, decision in outcome.jobs if not decision.is_exact]
    assert flow.approximate_cuts == len(inexact)
    if not inexact:
        assert flow.resume_class is ResumeClass.EXACT
        assert seen == run_unsliced(pool.server, case)
    else:
        assert flow.resume_class is ResumeClass.APPROXIMATE
    return outcome


# --- the law on random generations -------------------------------------------------------------------------------

texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=30).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    answer = draw(texts)
    whole = "".join(answer)
    stop: list[str] = []
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, len(whole) - 1))
        stop.append(whole[start : start + draw(st.integers(1, 9))])
    return Case(
        prompt=draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)),
        answer=answer,
        max_new_tokens=draw(st.integers(1, 60)),
        slices=draw(st.lists(st.integers(1, 16), min_size=1, max_size=4).map(tuple)),
        splits=draw(st.one_of(st.just(()), st.lists(st.integers(0, 30), max_size=2).map(tuple))),
        stop=tuple(stop),
        knows_eos=draw(st.booleans()),
        breaks=draw(st.one_of(st.just(()), st.lists(st.one_of(st.none(), st.integers(0, 12)), max_size=4).map(tuple))),
    )


@settings(max_examples=600, deadline=None)
@given(case=cases())
def test_slices_and_broken_connections_do_not_show(pool: Pool, case: Case) -> None:
    check_law(pool, case)


# --- single facts ------------------------------------------------------------------------------------------------

WORDS = tuple(" the quick brown fox jumps over the lazy dog and then runs home to sleep".replace(" ", "| ").split("|"))[
    1:
]


def test_a_cut_moves_back_where_two_tokens_would_be_one(pool: Pool) -> None:
    """Two newline tokens at the slice's end re-tokenise to one; the cut before them is exact."""
    ids = pool.server.encode("".join(WORDS[:7]), add_special_tokens=False).ids
    newline = pool.server.encode("\n", add_special_tokens=False).ids
    assert len(pool.server.encode("\n\n", add_special_tokens=False).ids) == 1
    job = CutJob("Say", ids + newline + newline, [*WORDS[:7], "\n", "\n"], lowest=5, highest=9)
    assert choose_cut(pool.router, job) == CutDecision(8, True, 8)
    job = CutJob("Say", job.ids, job.texts, lowest=9, highest=9)
    assert choose_cut(pool.router, job) == CutDecision(9, False, 8)


def test_an_odd_split_spoils_its_own_slice_only(pool: Pool) -> None:
    """After an inexact cut the backend goes on from the text's own tokens, so the next cuts are exact again."""
    encode = pool.router.encode_tail
    odd = [*encode(" the"), *(pool.server.token_to_id(symbol) for symbol in "Ġquick"), *encode(" brown fox")]
    texts = [" the", " ", *"quick", " brown", " fox"]
    decision = choose_cut(pool.router, CutJob("Once", odd, texts, lowest=5, highest=9))
    assert decision == CutDecision(9, False, 4)
    base = "Once" + "".join(texts)
    assert choose_cut(
        pool.router, CutJob(base, encode(" jumps over"), [" jumps", " over"], lowest=0, highest=2)
    ).is_exact


def test_the_end_of_a_slice_does_not_look_like_an_end(pool: Pool) -> None:
    """The backend's last event of a slice carries text and details; inside the client's stream it may not."""
    outcome = check_exact(pool, Case("Once", WORDS, 100, (5,)))
    assert outcome.flow.segments > 2


def test_the_last_tokens_of_a_slice_wait_and_no_others(pool: Pool) -> None:
    case = Case("Once", WORDS, 100, (8,))
    server = make_server(pool.server, case)
    flow = Continuation(
        prompt="Once", parameters={"do_sample": False}, max_new_tokens=100, limits=LIMITS, base_seed=1, prompt_tokens=1
    )
    shown = [len(flow.feed(payload)) for payload in server.answer(flow.next_slice(8))]
    assert shown == [1, 1, 1, 1, 0, 0, 0, 0]
    assert len(flow.resume(choose_cut(pool.router, flow.cut_job()))) == 4


def test_nothing_is_held_back_in_a_last_slice(pool: Pool) -> None:
    case = Case("Once", WORDS, 8, (8,))
    server = make_server(pool.server, case)
    flow = Continuation(
        prompt="Once", parameters={"do_sample": False}, max_new_tokens=8, limits=LIMITS, base_seed=1, prompt_tokens=1
    )
    assert [len(flow.feed(p)) for p in server.answer(flow.next_slice(64))] == [1] * 8
    assert flow.phase is Phase.DONE


def test_an_end_of_text_hidden_by_the_slice_limit_ends_the_answer(pool: Pool) -> None:
    outcome = check_law(pool, Case("Once", WORDS[:7], 100, (8,)))
    assert outcome.seen.finish_reason == "eos_token"
    assert outcome.flow.segments == 1


def test_an_unknown_end_of_text_is_learned_from_the_next_slice(pool: Pool) -> None:
    outcome = check_law(pool, Case("Once", WORDS[:7], 100, (8,), knows_eos=False))
    assert outcome.seen.finish_reason == "eos_token"
    assert outcome.flow.learned_eos_id == EOS_ID
    assert outcome.flow.segments == 2


def test_a_stop_string_across_a_cut_ends_the_answer(pool: Pool) -> None:
    outcome = check_law(pool, Case("Once", WORDS, 100, (8,), stop=(" lazy dog and",)))
    assert outcome.seen.finish_reason == "stop_sequence"
    assert outcome.seen.generated_text.endswith(" lazy dog and")
    assert not outcome.flow.is_upstream_over, "the backend cannot have seen it"


def test_a_slice_inside_a_character_goes_on(pool: Pool) -> None:
    outcome = check_law(pool, Case("Emoji:", ("🎉", "🎉", "👩‍💻", "🎉", "日本"), 100, (2,)))
    assert outcome.seen.generated_text == "🎉🎉👩‍💻🎉日本"


def test_a_broken_connection_shows_nothing_twice(pool: Pool) -> None:
    outcome = check_law(pool, Case("Once", WORDS, 100, (64,), breaks=(5, 0, 3)))
    assert outcome.flow.segments == 4
    assert outcome.flow.recomputed_tokens == 0


def test_the_client_gets_its_limit_and_not_more(pool: Pool) -> None:
    outcome = check_law(pool, Case("Once", WORDS, 11, (5,)))
    assert outcome.seen.output_tokens == 11
    assert outcome.seen.finish_reason == "length"


def make_flow(**changes: object) -> Continuation:
    arguments: dict[str, object] = {
        "prompt": "Once",
        "parameters": {"do_sample": False},
        "max_new_tokens": 100,
        "limits": LIMITS,
        "base_seed": 7,
        "prompt_tokens": 1,
    }
    return Continuation(**{**arguments, **changes})  # type: ignore[arg-type]  # spelt by name


def play(flow: Continuation, pool: Pool, case: Case, size: int) -> dict[str, object]:
    """One slice and its cut; returns what was asked of the backend."""
    server = make_server(pool.server, case)
    for payload in server.answer(flow.next_slice(size)):
        flow.feed(payload)
    if flow.phase is Phase.CUT:
        flow.resume(choose_cut(pool.router, flow.cut_job()))
    parameters: dict[str, object] = server.requests[0]["parameters"]
    return parameters


def say(flow: Continuation, place: int, word: str) -> None:
    token = {"id": place, "text": word, "logprob": -0.5, "special": False}
    flow.feed(json.dumps({"index": place, "token": token, "generated_text": None, "details": None}).encode())


@pytest.mark.parametrize("length", [5, 2_000], ids=["short answers", "a long answer"])
def test_texts_that_nobody_says_twice_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    kept: dict[str, str] = {}
    monkeypatch.setattr(continuation, "_texts", kept)
    monkeypatch.setattr(continuation, "_shared", kept.setdefault)
    monkeypatch.setattr(continuation, "MAX_SHARED_TEXTS", 100)
    most = 0
    for answer in range(4_000 // length):
        flow = make_flow(max_new_tokens=length + 1)
        flow.next_slice(length + 1)
        for place in range(1, length + 1):
            say(flow, place, f" {answer}-{place}")
            most = max(most, len(kept))
    assert 100 < most <= 100 + 64


def test_upstream_bodies_say_everything_explicitly(pool: Pool) -> None:
    parameters = play(make_flow(), pool, Case("Once", WORDS, 100, (8,)), 8)
    assert parameters == {"do_sample": False, "max_new_tokens": 8, "details": True, "return_full_text": False}


def test_a_resumed_slice_draws_with_another_seed(pool: Pool) -> None:
    case = Case("Once", WORDS, 100, (8,))
    flow = make_flow(parameters={"do_sample": True}, is_greedy=False)
    first, second = play(flow, pool, case, 8)["seed"], play(flow, pool, case, 8)["seed"]
    assert (first, second) == (7, derive_seed(7, 8))
    assert flow.resume_class is ResumeClass.EXACT


def test_a_seed_of_the_client_makes_a_resumed_answer_approximate(pool: Pool) -> None:
    case = Case("Once", WORDS, 100, (8,))
    flow = make_flow(parameters={"do_sample": True}, is_greedy=False, client_seed=42)
    assert play(flow, pool, case, 8)["seed"] == 42
    assert flow.resume_class is ResumeClass.EXACT
    play(flow, pool, case, 8)
    assert flow.resume_class is ResumeClass.APPROXIMATE


def test_truncation_keeps_the_same_prompt_tokens_in_later_slices(pool: Pool) -> None:
    """The prompt is cut to its last N tokens; a later slice allows for what was generated."""
    prompt = "one two three four five six seven eight"
    flow = make_flow(prompt=prompt, parameters={"do_sample": False, "truncate": 5}, prompt_tokens=5)
    case = Case(prompt, WORDS, 100, (8,))
    assert play(flow, pool, case, 8)["truncate"] == 5
    assert flow.kept_tokens == 8
    assert play(flow, pool, case, 8)["truncate"] == 13
    assert flow.prompt_tokens == 5


def test_a_slice_that_could_not_be_resumed_is_not_cut(pool: Pool) -> None:
    """Past ``max_input_tokens`` TGI takes no continuation, so the slice before it runs to the client's limit."""
    limits = ModelLimits(model_id="m", max_input_tokens=20, max_total_tokens=200)
    flow = make_flow(limits=limits)
    assert not flow.is_sliceable
    assert flow.slice_for(12) == 12
    play(flow, pool, Case("Once", WORDS, 100, (12,)), 12)
    assert flow.next_prompt_tokens == 13
    assert flow.slice_for(12) == flow.remaining_tokens == 88
    play(flow, pool, Case("Once", WORDS, 100, (12,)), 12)
    assert flow.phase is Phase.DONE


def test_a_broken_stream_past_the_input_limit_cannot_go_on(pool: Pool) -> None:
    limits = ModelLimits(model_id="m", max_input_tokens=4, max_total_tokens=200)
    flow = make_flow(limits=limits)
    for payload in make_server(pool.server, Case("Once", WORDS, 100, (64,))).answer(flow.next_slice(64))[:6]:
        flow.feed(payload)
    assert not flow.interrupt()


def test_an_error_event_leaves_the_answer_resumable(pool: Pool) -> None:
    flow = make_flow()
    server = make_server(pool.server, Case("Once", WORDS, 100, (64,)))
    for payload in server.answer(flow.next_slice(64))[:3]:
        flow.feed(payload)
    assert flow.feed(b'{"error":"Request failed during generation: Server error: ","error_type":"generation"}') == []
    assert flow.phase is Phase.BROKEN
    assert flow.error is not None
    assert flow.error.kind == "generation"
    assert flow.interrupt()
    assert flow.phase is Phase.CUT
    flow.resume(choose_cut(pool.router, flow.cut_job()))
    assert flow.kept_tokens == 3


@pytest.mark.parametrize(
    "nonsense",
    [
        b"<html>Bad Gateway</html>",
        b"[DONE]",
        b"{}",
        b'{"index":4,"token":{"id":1,"text":"a","logprob":-1.0,"special":false},"generated_text":"a","details":null}',
    ],
)
def test_nonsense_of_a_backend_breaks_the_slice_and_loses_nothing(pool: Pool, nonsense: bytes) -> None:
    flow = make_flow()
    server = make_server(pool.server, Case("Once", WORDS, 100, (64,)))
    for payload in server.answer(flow.next_slice(64))[:3]:
        flow.feed(payload)
    assert flow.feed(nonsense) == []
    assert (flow.phase, flow.is_upstream_over) == (Phase.BROKEN, False)
    assert flow.interrupt()
    flow.resume(choose_cut(pool.router, flow.cut_job()))
    assert flow.shown_tokens == flow.kept_tokens == 3


def test_a_request_that_showed_nothing_starts_anew_with_its_seed() -> None:
    flow = make_flow(parameters={"do_sample": True}, is_greedy=False)
    first = flow.next_slice(64)
    assert flow.interrupt()
    assert flow.phase is Phase.READY
    assert flow.next_slice(64) == first


def test_every_slice_asks_for_what_the_client_asked(pool: Pool) -> None:
    """All that shapes a token is sent again; what only counts, or names the run, is the slice's own."""
    asked = {
        **{"repetition_penalty": 1.2, "frequency_penalty": 0.3, "temperature": 0.7, "top_k": 40, "top_p": 0.9},
        **{"typical_p": 0.95, "watermark": True, "top_n_tokens": 3, "stop": ["no such words"], "adapter_id": "mine"},
        **{"do_sample": True, "seed": 9, "truncate": 4, "details": True, "return_full_text": True},
    }
    body = json.dumps({"inputs": "Once upon a time there was", "parameters": {**asked, "max_new_tokens": 100}}).encode()
    request = decode_request("/generate", "application/json", body, LIMITS)
    flow = Continuation.for_request(request, max_new_tokens=100, limits=LIMITS, base_seed=1, prompt_tokens=4)
    case = Case("Once upon a time there was", WORDS, 100, (8,))
    first, second = play(flow, pool, case, 8), play(flow, pool, case, 8)
    own = {"max_new_tokens": 8, "details": True, "return_full_text": False}
    assert first == {**asked, **own}
    assert second == {**asked, **own, "seed": derive_seed(9, 8), "truncate": 12}


def test_a_lost_byte_makes_a_cut_approximate(pool: Pool) -> None:
    """Half a character followed by a letter is shown as U+FFFD: no text gives back the ids it was made of."""
    half = pool.server.encode("🎉", add_special_tokens=False).ids[:1]
    ids = [*pool.server.encode(" one two", add_special_tokens=False).ids, *half, *pool.server.encode("x").ids]
    texts = [" one", " two", "", "\N{REPLACEMENT CHARACTER}x"]
    assert choose_cut(pool.router, CutJob("Say", ids, texts, lowest=4, highest=4)).is_exact is False
    assert choose_cut(pool.router, CutJob("Say", ids, texts, lowest=2, highest=4)) == CutDecision(2, True, 2)


def test_an_answer_resumed_after_an_inexact_cut_is_complete_and_approximate(pool: Pool) -> None:
    case = Case("Once", WORDS, 100, (8,), splits=(2,), breaks=(5,))
    outcome = check_law(pool, case)
    assert not next(decision.is_exact for _, decision in outcome.jobs)
    assert (outcome.flow.resume_class, outcome.flow.approximate_cuts) == (ResumeClass.APPROXIMATE, 1)
    # Its last cuts were exact, each is counted as what it was itself.
    assert outcome.flow.last_resume is ResumeClass.EXACT
    shown = run_unsliced(pool.server, case)
    assert [t[:3] for t in outcome.seen.tokens[:5]] == [t[:3] for t in shown.tokens[:5]]


def test_a_cut_that_nothing_follows_is_no_resume(pool: Pool) -> None:
    """The class tells what became of an answer, not what could have."""
    flow = make_flow(parameters={"do_sample": True}, is_greedy=False, client_seed=42)
    play(flow, pool, Case("Once", WORDS, 100, (8,)), 8)
    assert (flow.kept_tokens, flow.last_resume, flow.resume_class) == (8, None, ResumeClass.EXACT)
    flow.next_slice(8)
    assert (flow.last_resume, flow.resume_class) == (ResumeClass.APPROXIMATE, ResumeClass.APPROXIMATE)


def test_a_text_that_cannot_be_continued_is_not_sliced(pool: Pool) -> None:
    """A tokenizer that appends an end of text would put it in the middle: one slice, and no second after a token."""
    flow = make_flow(is_resumable=False)
    assert (flow.is_sliceable, flow.resume_class) == (False, ResumeClass.NEVER)
    assert flow.slice_for(8) == 100
    payloads = make_server(pool.server, Case("Once", WORDS, 100, (64,))).answer(flow.next_slice(8))
    assert flow.is_interruptible, "nothing is lost yet"
    assert len(flow.feed(payloads[0])) == 1
    assert not flow.is_interruptible
    assert not flow.interrupt()
    assert (flow.phase, flow.resume_class) == (Phase.BROKEN, ResumeClass.NEVER)
    flow = make_flow(is_resumable=False)
    flow.next_slice(8)
    assert flow.interrupt()
    assert flow.phase is Phase.READY


def test_past_the_input_limit_an_answer_is_never_resumed(pool: Pool) -> None:
    limits = ModelLimits(model_id="m", max_input_tokens=4, max_total_tokens=200)
    flow = make_flow(limits=limits)
    assert flow.resume_class is ResumeClass.NEVER
    payloads = make_server(pool.server, Case("Once", WORDS, 100, (64,))).answer(flow.next_slice(64))
    flow.feed(payloads[0])
    assert flow.interrupt(), "as long as it fits it goes on"
    flow.resume(choose_cut(pool.router, flow.cut_job()))
    for payload in make_server(pool.server, Case("Once", WORDS, 100, (64,))).answer(flow.next_slice(64))[:5]:
        flow.feed(payload)
    assert flow.resume_class is ResumeClass.EXACT
    assert not flow.interrupt()
    assert flow.resume_class is ResumeClass.NEVER


IMAGE = "![](http://h/i.png)"


def test_an_image_in_the_prompt_makes_a_resume_approximate(pool: Pool) -> None:
    for reads_images in (True, False):
        flow = make_flow(prompt=f"{IMAGE} Once", reads_images=reads_images)
        case = Case(f"{IMAGE} Once", WORDS, 100, (8,))
        play(flow, pool, case, 8)
        assert flow.resume_class is ResumeClass.EXACT
        play(flow, pool, case, 8)
        assert flow.resume_class is (ResumeClass.APPROXIMATE if reads_images else ResumeClass.EXACT)


@pytest.mark.parametrize("size", [64, 32])
def test_an_answer_that_names_an_image_is_not_sent_to_a_model_that_would_fetch_it(pool: Pool, size: int) -> None:
    """Neither after a broken stream nor at a slice's end; a model of text alone goes on."""
    case = Case("Draw", (" look:", IMAGE, *WORDS, *WORDS, *WORDS), 100, (size,))
    for reads_images in (True, False):
        flow = make_flow(prompt="Draw", reads_images=reads_images)
        payloads = make_server(pool.server, case).answer(flow.next_slice(size))
        for payload in payloads[:32]:
            flow.feed(payload)
        if size == 64:
            assert flow.interrupt() is not reads_images
        if reads_images:
            assert (flow.phase, flow.resume_class) == (Phase.BROKEN, ResumeClass.NEVER)
        else:
            assert flow.phase is Phase.CUT


# --- mutants: each must break the law ----------------------------------------------------------------------------


class ForgetsTail(Continuation):
    """Stop strings are matched within a slice only."""

    __slots__ = ()

    def _keep(self, count: int) -> None:
        super()._keep(count)
        self._tail = ""


class ForgetsRunningTail(Continuation):
    """Looks for a stop string across a cut at a slice's end only."""

    __slots__ = ()

    def _crosses_stop(self, text: str) -> bool:
        return False


class FeedsBackNoSpecials(Continuation):
    """Sends what the client reads, not what was generated."""

    __slots__ = ()

    def next_slice(self, slice_tokens: int) -> bytes:
        self._kept_text = list(self._visible)
        return super().next_slice(slice_tokens)


class IgnoresEnd(Continuation):
    """Takes every ``length`` at a slice's end at its word."""

    __slots__ = ()

    def next_slice(self, slice_tokens: int) -> bytes:
        self._eos_ids, self._eos_is_complete = (), True
        return super().next_slice(slice_tokens)


class ReportsUpstreamIndex(Continuation):
    """Numbers every slice from one."""

    __slots__ = ()

    def feed(self, payload: bytes) -> list[StreamEvent]:
        events = super().feed(payload)
        for event in events:
            event.index = event.upstream_index
        return events


class HoldsNothing(Continuation):
    """Shows every token as it comes."""

    __slots__ = ()

    def feed(self, payload: bytes) -> list[StreamEvent]:
        self._show_limit = self._slice
        events = super().feed(payload)
        if self.phase is Phase.CUT:
            events, self._held = [*events, *self._held], []
            self._shown = self._n
            self.shown_tokens += 1
        return events


class DropsWhatIsHeld(Continuation):
    """Loses held tokens when a slice ends by itself."""

    __slots__ = ()

    def _finish(self, reason: str, event: StreamEvent) -> list[StreamEvent]:
        self._held = []
        return super()._finish(reason, event)


def cut_at_the_end(tokenizer: TextTokenizer, job: CutJob) -> CutDecision:
    """No search: the whole slice, called exact."""
    return CutDecision(job.highest, True, job.highest)


NEWLINES = Case("Once", (*WORDS[:6], "\n\n", "The", *WORDS), 60, (8,))
CHARACTERS = Case("Emoji:", ("🎉", "日本", "한국", "👩‍💻", "नम", "語"), 60, (7, 5, 6))
STOPPED = Case("Once", WORDS, 100, (8,), stop=(" lazy dog and",))
ENDED = Case("Once", WORDS[:7], 100, (8,))
SPECIAL = Case("Once", (*WORDS[:3], "<|im_start|>", *WORDS[3:]), 100, (8,))


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        pytest.param({"flow_class": ForgetsTail}, STOPPED, id="tail not kept"),
        pytest.param({"flow_class": ForgetsRunningTail}, STOPPED, id="stop not looked for inside a slice"),
        pytest.param({"flow_class": FeedsBackNoSpecials}, SPECIAL, id="special tokens not fed back"),
        pytest.param({"flow_class": IgnoresEnd}, ENDED, id="end of text not looked for"),
        pytest.param({"flow_class": ReportsUpstreamIndex}, STOPPED, id="index of the slice"),
        pytest.param({"flow_class": DropsWhatIsHeld}, Case("Once", WORDS[:6], 100, (8,)), id="held tokens lost"),
        pytest.param({"cutter": cut_at_the_end}, CHARACTERS, id="cut inside a character"),
        pytest.param({"cutter": cut_at_the_end}, NEWLINES, id="no search for the cut"),
        pytest.param({"flow_class": HoldsNothing}, NEWLINES, id="no hold-back"),
    ],
)
def test_a_mutant_breaks_the_law(pool: Pool, mutant: dict[str, object], case: Case) -> None:
    check_exact(pool, case)
    with pytest.raises(AssertionError):
        check_exact(pool, case, **mutant)
