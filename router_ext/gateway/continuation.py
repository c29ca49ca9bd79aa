"""One stream out of many slices, as a pure state machine: no clock, no socket, no task.

    READY --next_slice()--> RUNNING --feed()--> DONE
      ^                      |   |
      |                      |   '--error event--> BROKEN --interrupt()--+
      |                      '--slice ended, or interrupt()--> CUT <-----'
      '------------------------------resume()-----------------'

How a caller drives it:

    flow = Continuation.for_request(request, limits=limits, base_seed=secrets.randbits(64), eos_ids=pool.eos_ids)
    while flow.phase is not Phase.DONE:
        body = flow.next_slice(dispatch.slice_tokens)          # POST /generate_stream
        for payload in parser.feed(chunk):                     # hot path
            events = flow.feed(payload)                        # what the client may see now
            if flow.phase is Phase.RUNNING:
                send(encoder.tokens(events))
            else: ...
        # DONE:   send(encoder.finish(events, flow.completion)); abort the upstream unless flow.is_upstream_over
        # CUT:    decision = await to_thread(choose_cut, tokenizer, flow.cut_job()); events = flow.resume(decision)
        #         then READY (send(encoder.tokens(events)), back to the queue) or DONE (finish as above)
        # BROKEN: flow.error; if flow.interrupt(): as CUT or READY, else fail the request

A connection that breaks without an event: ``interrupt()`` from RUNNING. Nothing shown is ever taken back.

Source: ``server/text_generation_server/utils/tokens.py`` of TGI (StoppingCriteria) for the ends at a cut; the hold-back
rule was measured on a running TGI (``tests/conformance/transcripts/resume.jsonl``).
"""

from __future__ import annotations

import enum
import re
from array import array
from collections.abc import Container
from hashlib import blake2b
from typing import Any

from router_ext.gateway.cuts import CutDecision, CutJob
from router_ext.gateway.generation import Completion, GenerationRequest, ModelLimits, ResumeClass
from router_ext.wire.tgi import (
    MAX_UPSTREAM_NEW_TOKENS,
    BadUpstreamAnswer,
    ErrorKind,
    StreamEvent,
    UpstreamError,
    classify_error,
    decode_event,
    encode_generate,
)

HOLD_BACK_TOKENS = 4
"""Tokens at the end of a slice that wait for the cut. Fewer make cuts inexact, more delay the client; 4 are plenty."""

_NO_LIMIT = 1 << 62

_IMAGE = re.compile(r"!\[\]\([^\)]*\)")
"""What a model that reads images takes for one, wherever in its input (``validation.rs``, ``prepare_input``)."""

MAX_SHARED_TEXTS = 20_000
"""Token texts kept for all streams together before they are gathered anew: 3 MB, and nearly all that is ever said."""

_texts: dict[str, str] = {}
_shared = _texts.setdefault


def _bound_texts() -> None:
    """Begin anew when there are too many. Looked at with every slice, and every 64 tokens of a long one."""
    if len(_texts) > MAX_SHARED_TEXTS:
        _texts.clear()


class Phase(enum.Enum):
    """Where a generation stands; see the module's diagram."""

    READY = "ready"
    RUNNING = "running"
    CUT = "cut"
    BROKEN = "broken"
    DONE = "done"


class Continuation:
    """State of one generation over all its slices.

    Attributes (read only for callers):
        phase: see above. completion: set when DONE. error: the upstream's error event, set when BROKEN.
        received_tokens: events with a token that came from upstream, over all slices.
        shown_tokens: tokens handed out by ``feed`` and ``resume``. kept_tokens: tokens of finished slices that stay.
        recomputed_tokens: tokens dropped at cuts; dropped_at_cut: those of the last cut.
        segments: slices started. approximate_cuts: cuts whose text does not re-tokenise to its ids.
        prompt_tokens: input length of the first slice (None until known). next_prompt_tokens: of the next slice.
        learned_eos_id: an end-of-text id this generation showed, for the pool to remember.
        resume_class: what became of it so far; NEVER from the start where no later slice is possible at all, and from
            the moment one was refused. last_resume: class of the last resume alone, None before the first.
        is_upstream_over: the upstream stream ended by itself; otherwise it must be aborted.
    """

    __slots__ = (
        "_added_ids",
        "_base_seed",
        "_client_seed",
        "_eos_ids",
        "_eos_is_complete",
        "_final_class",
        "_held",
        "_hold_back",
        "_ids",
        "_images",
        "_input_tokens",
        "_is_cut_slice",
        "_is_greedy",
        "_is_interrupted",
        "_is_last_cut_exact",
        "_is_resumable",
        "_kept_text",
        "_max_input_tokens",
        "_max_new_tokens",
        "_max_total_tokens",
        "_min_slice",
        "_n",
        "_parameters",
        "_prompt",
        "_seed",
        "_segment_text",
        "_show_limit",
        "_shown",
        "_slice",
        "_specials",
        "_stop_reach",
        "_stops",
        "_tail",
        "_texts",
        "_truncate",
        "_visible",
        "_watches_stops",
        "approximate_cuts",
        "completion",
        "dropped_at_cut",
        "error",
        "is_upstream_over",
        "kept_tokens",
        "last_resume",
        "learned_eos_id",
        "phase",
        "prompt_tokens",
        "received_tokens",
        "recomputed_tokens",
        "resume_class",
        "segments",
        "shown_tokens",
    )

    def __init__(
        self,
        *,
        prompt: str,
        parameters: dict[str, Any],
        max_new_tokens: int,
        limits: ModelLimits,
        base_seed: int,
        stop: tuple[str, ...] = (),
        client_seed: int | None = None,
        is_greedy: bool = True,
        prompt_tokens: int | None = None,
        eos_ids: Container[int] = frozenset(),
        eos_is_complete: bool = False,
        added_ids: Container[int] = frozenset(),
        hold_back: int = HOLD_BACK_TOKENS,
        resume_class: ResumeClass = ResumeClass.EXACT,
        is_resumable: bool = True,
        reads_images: bool = False,
    ) -> None:
        """
        Args:
            prompt: text to be sent as ``inputs`` (for a chat: templated, BOS stripped as ``bos`` says).
            parameters: as ``GenerationRequest.parameters``.
            max_new_tokens: the client's cap, clamped to the model (``dialects.clamp_max_new_tokens``).
            base_seed: 64 random bits, used when the client sent no seed and sampling is on.
            prompt_tokens: measured length, used until the backend states its own.
            eos_ids: end-of-text ids known of the pool; may grow meanwhile. eos_is_complete: they are all there are.
            added_ids: ids of added tokens; one of them at a slice end could be an unknown end of text.
            resume_class: APPROXIMATE if the prompt's tokens are not certain (template without the BOS).
            is_resumable: the model's text can be continued (``knowledge``); if not, nothing that was shown goes on.
            reads_images: an image's address in the text is fetched, in the answer's part of it too.
        """
        self._prompt = prompt
        self._parameters = parameters
        self._max_new_tokens = max_new_tokens
        self._max_input_tokens = limits.max_input_tokens
        self._max_total_tokens = limits.max_total_tokens
        self._stops = stop
        self._stop_reach = max((len(s) for s in stop), default=0) + 1
        self._client_seed = client_seed
        self._base_seed = client_seed if client_seed is not None else base_seed
        self._is_greedy = is_greedy
        self._eos_ids = eos_ids
        self._eos_is_complete = eos_is_complete
        self._added_ids = added_ids
        self._hold_back = hold_back
        self._truncate: int | None = parameters.get("truncate")

        self.phase = Phase.READY
        self.completion: Completion | None = None
        self.error: UpstreamError | None = None
        self.last_resume: ResumeClass | None = None
        self.prompt_tokens = prompt_tokens
        self.received_tokens = 0
        self.shown_tokens = 0
        self.kept_tokens = 0
        self.recomputed_tokens = 0
        self.dropped_at_cut = 0
        self.segments = 0
        self.approximate_cuts = 0
        self.learned_eos_id: int | None = None
        self.is_upstream_over = True

        self._kept_text: list[str] = []  # kept text by slice, special tokens included: fed back upstream
        self._visible: list[str] = []  # the same without special tokens: generated_text
        self._tail = ""
        self._seed: int | None = None
        self._input_tokens = prompt_tokens
        self._min_slice = 0
        self._is_last_cut_exact = True
        self._is_resumable = is_resumable
        self._images = len(_IMAGE.findall(prompt)) if reads_images else -1
        # What a resumed answer can be at best: images are fetched and encoded again.
        self._final_class = ResumeClass.APPROXIMATE if self._images > 0 else resume_class
        self.resume_class = resume_class if self.is_sliceable else ResumeClass.NEVER
        self._start_slice(0)

    @classmethod
    def for_request(
        cls,
        request: GenerationRequest,
        *,
        max_new_tokens: int,
        limits: ModelLimits,
        base_seed: int,
        prompt: str | None = None,
        prompt_index: int = 0,
        prompt_tokens: int | None = None,
        eos_ids: Container[int] = frozenset(),
        eos_is_complete: bool = False,
        added_ids: Container[int] = frozenset(),
        resume_class: ResumeClass = ResumeClass.EXACT,
        is_resumable: bool = True,
        reads_images: bool = False,
    ) -> Continuation:
        """For prompt ``prompt_index`` of a request, or for ``prompt`` (a chat's templated text)."""
        return cls(
            prompt=request.prompts[prompt_index] if prompt is None else prompt,
            parameters=request.parameters,
            max_new_tokens=max_new_tokens,
            limits=limits,
            base_seed=base_seed,
            stop=request.stop,
            client_seed=request.seed,
            is_greedy=request.is_greedy,
            prompt_tokens=prompt_tokens,
            eos_ids=eos_ids,
            eos_is_complete=eos_is_complete,
            added_ids=added_ids,
            resume_class=resume_class,
            is_resumable=is_resumable,
            reads_images=reads_images,
        )

    # --- what is left -------------------------------------------------------------------------------------------

    @property
    def remaining_tokens(self) -> int:
        """Tokens the client may still get beyond those kept."""
        return self._max_new_tokens - self.kept_tokens

    @property
    def next_prompt_tokens(self) -> int:
        """Input length of the next slice; an estimate only while no backend and nobody else has measured."""
        if self._input_tokens is None:
            return (self.prompt_tokens or 0) + self.kept_tokens
        return self._input_tokens

    @property
    def is_interruptible(self) -> bool:
        """RUNNING, and ``interrupt`` would leave something to go on with that a backend takes."""
        if self.phase is not Phase.RUNNING or self.kept_tokens + self._n >= self._max_new_tokens:
            return False
        if not self._can_go_on(self._n):
            return False
        # The text of what was kept may tokenise to a token or two more than were sampled.
        return self._input_tokens is None or self._input_tokens + self._n + self._hold_back <= self._max_input_tokens

    @property
    def is_sliceable(self) -> bool:
        """Every later slice fits ``max_input_tokens``; otherwise the scheduler should treat the request as whole."""
        return self._is_resumable and (self.prompt_tokens or 0) + self._max_new_tokens - 1 <= self._max_input_tokens

    def _can_go_on(self, count: int) -> bool:
        """The text with the first ``count`` tokens of this slice may be sent as a prompt."""
        if not self._is_resumable and (count or self.kept_tokens):
            return False
        if self._images < 0:
            return True
        text = "".join([self._prompt, *self._kept_text, *self._texts[:count]])
        return len(_IMAGE.findall(text)) == self._images

    def slice_for(self, slice_tokens: int) -> int:
        """What ``next_slice`` will ask for: at most 1024 and what is left.

        More than ``slice_tokens`` in two cases: the request could not be resumed after such a slice (its input would
        pass ``max_input_tokens``), and the last slice ended without one whole character.
        """
        remaining = self._max_new_tokens - self.kept_tokens
        ceiling = min(remaining, MAX_UPSTREAM_NEW_TOKENS)
        inputs = self._input_tokens
        if inputs is not None:
            ceiling = max(min(ceiling, self._max_total_tokens - inputs), 1)
        wanted = max(min(slice_tokens, ceiling), min(self._min_slice, ceiling), 1)
        if wanted < remaining and not self._ends_resumable(wanted):
            return ceiling
        return wanted

    def _ends_resumable(self, size: int) -> bool:
        """What a slice of ``size`` leaves could be sent as a prompt, as far as its length tells."""
        inputs = self._input_tokens
        return self._is_resumable and (inputs is None or inputs + size <= self._max_input_tokens)

    # --- slices -------------------------------------------------------------------------------------------------

    def digest(self) -> str:
        """Hex digest of what the client asks for: prompt, parameters and length, whatever the seed."""
        asked = encode_generate(self._prompt, {**self._parameters, "max_new_tokens": self._max_new_tokens})
        return blake2b(asked, digest_size=16).hexdigest()

    def next_slice(self, slice_tokens: int) -> bytes:
        """Begin a slice: the body for ``/generate_stream``. READY -> RUNNING."""
        assert self.phase is Phase.READY, self.phase
        size = self.slice_for(slice_tokens)
        self._start_slice(size)
        self.segments += 1
        self.phase = Phase.RUNNING
        self.is_upstream_over = False
        parameters = dict(self._parameters)
        parameters["max_new_tokens"] = size
        parameters["details"] = True
        parameters["return_full_text"] = False
        if not self._is_greedy:
            parameters["seed"] = derive_seed(self._base_seed, self.kept_tokens)
        if self._truncate is not None and self.kept_tokens:
            truncate = self._truncate + self.kept_tokens if self._input_tokens is None else self._input_tokens
            parameters["truncate"] = min(truncate, self._max_input_tokens)
        if self.kept_tokens:
            self._note_resume()
        return encode_generate(self._prompt + "".join(self._kept_text), parameters)

    def _note_resume(self) -> None:
        is_seeded = self._client_seed is not None and not self._is_greedy
        if self._is_last_cut_exact and not is_seeded:
            self.last_resume = self._final_class
        else:
            self.last_resume = ResumeClass.APPROXIMATE
        if self.resume_class is not ResumeClass.APPROXIMATE:
            self.resume_class = self.last_resume

    def _start_slice(self, size: int) -> None:
        remaining = self._max_new_tokens - self.kept_tokens
        self._slice = size
        self._is_cut_slice = size < remaining and self._ends_resumable(size)
        self._show_limit = size - self._hold_back if self._is_cut_slice else _NO_LIMIT
        self._n = 0
        self._shown = 0
        self._ids = array("I")  # 4 bytes each; a list holds 36
        self._texts: list[str] = []
        _bound_texts()
        self._specials: list[int] = []
        self._held: list[StreamEvent] = []
        self._segment_text = ""
        self._watches_stops = bool(self._stops and self._tail)
        self._is_interrupted = False

    def feed(self, payload: bytes) -> list[StreamEvent]:
        """One upstream event; returns the tokens the client may see now (they are never taken back).

        When the phase is DONE afterwards, the last of them carries the end (``completion``). An error event, or bytes
        that are not TGI's, make it BROKEN; it never raises for what a backend sends.
        """
        try:
            event = decode_event(payload)
        except BadUpstreamAnswer as error:
            return self._on_nonsense(str(error))
        token = event.token
        if token is None:
            return self._on_error(event)
        is_final = event.details is not None
        if not is_final and event.generated_text is not None:
            return self._on_nonsense("a final event without details")
        n = self._n + 1
        self._n = n
        self.received_tokens += 1
        # Streams of one model say the same words: each text is kept once, not once per token.
        text = _shared(token.text, token.text)
        if not n & 63:
            _bound_texts()
        self._ids.append(token.id)
        self._texts.append(text)
        if token.special:
            self._specials.append(n - 1)
        event.index = self.kept_tokens + n
        if is_final:
            return self._on_final(event)
        if self._watches_stops and self._crosses_stop(text):
            return self._finish("stop_sequence", event)
        held = self._held
        if text and n <= self._show_limit:
            if held:
                held.append(event)
                self._held = []
            else:
                held = [event]
            self._shown = n
            self.shown_tokens += len(held)
            return held
        held.append(event)
        return []

    def _on_error(self, event: StreamEvent) -> list[StreamEvent]:
        if event.error is None:
            return self._on_nonsense("an event with neither token nor error")
        self.error = classify_error(event.error, event.error_type or "")
        self.phase = Phase.BROKEN
        self.is_upstream_over = True
        return []

    def _on_nonsense(self, problem: str) -> list[StreamEvent]:
        self.error = UpstreamError(ErrorKind.UNKNOWN, problem, "")
        self.phase = Phase.BROKEN
        return []

    def _on_final(self, event: StreamEvent) -> list[StreamEvent]:
        details, token = event.details, event.token
        assert details is not None
        assert token is not None
        self.is_upstream_over = True
        if self.segments == 1 or self.kept_tokens == 0:
            self.prompt_tokens = details.input_length
            self._seed = details.seed
        elif self.prompt_tokens is None:
            self.prompt_tokens = max(details.input_length - self.kept_tokens, 0)
        self._input_tokens = details.input_length
        reason = details.finish_reason
        if reason == "eos_token":
            self.learned_eos_id = token.id
        if reason == "length" and self._is_cut_slice and self._n >= self._slice:
            # `length` wins inside TGI, so an end that falls on the slice's last token has to be seen here.
            if token.id in self._eos_ids:
                reason = "eos_token"
            elif self._stops and self._ends_with_stop(self._tail + "".join(self._texts)):
                reason = "stop_sequence"
            else:
                self._held.append(event)
                if not self._can_go_on(self._n):
                    return self._refuse_image()
                self.phase = Phase.CUT
                return []
        return self._finish(reason, event)

    def _refuse_image(self) -> list[StreamEvent]:
        problem = "the answer names an image, which this model would fetch if the answer went on"
        self.error = UpstreamError(ErrorKind.VALIDATION, problem, "validation")
        self.resume_class = ResumeClass.NEVER
        self.phase = Phase.BROKEN
        return []

    # --- stop strings -------------------------------------------------------------------------------------------

    def _crosses_stop(self, text: str) -> bool:
        """A stop string that began in an earlier slice ends here. The backend sees those within its own slice."""
        self._segment_text += text
        if len(self._segment_text) > self._stop_reach:
            self._watches_stops = False
        return self._ends_with_stop(self._tail + self._segment_text)

    def _ends_with_stop(self, text: str) -> bool:
        """TGI's rule: the text ends with the stop string, one newline behind it tolerated (the pattern ends in $)."""
        if text.endswith(self._stops):
            return True
        return text.endswith("\n") and text[:-1].endswith(self._stops)

    # --- ends ---------------------------------------------------------------------------------------------------

    def _finish(self, reason: str, event: StreamEvent) -> list[StreamEvent]:
        """The generation ends with ``event``; everything held is shown."""
        events = [*self._held, event]
        self._held = []
        own_text = event.generated_text if self.kept_tokens == 0 and event.is_final else None
        self._keep(self._n)
        self.shown_tokens += len(events)
        self._complete(reason, own_text)
        return events

    def _complete(self, reason: str, own_text: str | None) -> None:
        # TGI's own text is empty when the generation ends inside a character; the tokens' texts are then the truth.
        text = own_text or "".join(self._visible)
        seed = self._seed
        if seed is None and not self._is_greedy:
            seed = self._base_seed
        self.completion = Completion(
            finish_reason=reason,
            generated_text=text,
            prompt_tokens=self.prompt_tokens or 0,
            output_tokens=self.kept_tokens,
            seed=seed,
        )
        self.phase = Phase.DONE

    def _keep(self, count: int) -> None:
        """The first ``count`` tokens of the slice become part of the answer."""
        texts = self._texts[:count]
        text = "".join(texts)
        self._kept_text.append(text)
        if self._specials:
            specials = set(self._specials)
            self._visible.append("".join([text for place, text in enumerate(texts) if place not in specials]))
        else:
            self._visible.append(text)
        self.kept_tokens += count
        if self._stops:
            self._tail = (self._tail + text)[-self._stop_reach :]

    # --- cuts ---------------------------------------------------------------------------------------------------

    def interrupt(self) -> bool:
        """The upstream stream broke, or is to be given up. RUNNING or BROKEN -> CUT or READY.

        Returns:
            False if the request cannot go on (its input would pass ``max_input_tokens``, or the model's text cannot be
            continued); the phase is BROKEN then, and the class NEVER.
        """
        assert self.phase in (Phase.RUNNING, Phase.BROKEN), self.phase
        places = [place for place in range(self._n, self._shown, -1) if self._texts[place - 1]]
        last = places[0] if places else self._shown
        inputs = self._input_tokens
        is_too_long = inputs is not None and inputs + last > self._max_input_tokens
        if last and (is_too_long or not self._can_go_on(last)):
            self.phase = Phase.BROKEN
            self.resume_class = ResumeClass.NEVER
            return False
        self.phase = Phase.CUT
        self._is_interrupted = True
        if last == 0:
            self.resume(CutDecision(0, True, 0))
        return True

    def cut_job(self) -> CutJob:
        """What ``cuts.choose_cut`` needs; safe to hand to a thread."""
        assert self.phase is Phase.CUT, self.phase
        highest = self._n
        if highest > self._shown and not self._is_interrupted and not self._eos_is_complete:
            # An added token at the very end may be an end of text nobody told us of: let the next slice find out.
            last = highest - 1
            if (self._specials and self._specials[-1] == last) or self._ids[last] in self._added_ids:
                highest = last
        return CutJob(
            base_text=self._prompt + "".join(self._kept_text),
            ids=list(self._ids),
            texts=self._texts,
            lowest=self._shown,
            highest=highest,
        )

    def resume(self, decision: CutDecision) -> list[StreamEvent]:
        """Apply the cut: CUT -> READY, or DONE when nothing more fits the model.

        Returns:
            Held tokens that may be shown now; when DONE, the last of them carries the end.
        """
        assert self.phase is Phase.CUT, self.phase
        kept = decision.kept
        if not self._shown <= kept <= self._n:
            raise ValueError(f"cut at {kept}, but {self._shown} of {self._n} tokens are shown")
        added = kept if decision.text_tokens is None else decision.text_tokens
        next_input = None if self._input_tokens is None else self._input_tokens + added
        is_full = next_input is not None and (
            next_input > self._max_input_tokens or next_input >= self._max_total_tokens
        )
        if is_full and self._held and not self._is_interrupted:
            return self._finish("length", self._held.pop())
        self.dropped_at_cut = self._n - kept
        self.recomputed_tokens += self.dropped_at_cut
        self._is_last_cut_exact = decision.is_exact
        if not decision.is_exact:
            self.approximate_cuts += 1
        events = self._held[: kept - self._shown]
        self._held = []
        self.shown_tokens += len(events)
        self._min_slice = 0 if kept or self._is_interrupted else self._slice * 2
        self._keep(kept)
        self._input_tokens = next_input
        self.phase = Phase.READY
        return events


def derive_seed(seed: int, kept_tokens: int) -> int:
    """Seed of a slice: the request's own for the first, then a mix of it and the position (SplitMix64).

    The same seed again would replay the same noise vector at the first resumed steps and correlate the choices.
    """
    if kept_tokens == 0:
        return seed
    mask = (1 << 64) - 1
    z = (seed + kept_tokens * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
