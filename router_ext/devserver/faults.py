"""Injected failures: what a TGI does when its shard errs, hangs, dies or slows down."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True, kw_only=True)
class Faults:
    """Counts start at the first forward after start-up; 0 means never. May be changed while the server runs.

    Attributes:
        fail_after_steps: this forward fails; every request of its batch gets a 424.
        fail_every_steps: and every so many forwards again.
        fail_message: what the shard said.
        shard_dead_after_steps: from this forward on every generation fails and ``/health`` is 503.
        exit_after_steps: the process ends at this forward with status 1, connections cut.
        freeze_after_steps: at this forward the batching stops, for ``freeze_s`` (0: for ever); ``/health`` hangs too.
        stall_after_tokens: a stream sends no event after this many, but keeps its place and connection.
        stall_every: only every n-th generation stalls.
        health_delay_s: ``/health`` answers this much later.
    """

    fail_after_steps: int = 0
    fail_every_steps: int = 0
    fail_message: str = "simulated failure"
    shard_dead_after_steps: int = 0
    exit_after_steps: int = 0
    freeze_after_steps: int = 0
    freeze_s: float = 0.0
    stall_after_tokens: int = 0
    stall_every: int = 1
    health_delay_s: float = 0.0

    def is_failing(self, step: int) -> bool:
        if self.fail_after_steps and step == self.fail_after_steps:
            return True
        return bool(self.fail_every_steps) and step % self.fail_every_steps == 0

    def is_shard_dead(self, step: int) -> bool:
        return bool(self.shard_dead_after_steps) and step >= self.shard_dead_after_steps

    def is_stalled(self, sequence_id: int, generated: int) -> bool:
        return 0 < self.stall_after_tokens < generated and sequence_id % self.stall_every == 0

    def update(self, values: dict[str, object]) -> None:
        """Set fields by name.

        Raises:
            ValueError: an unknown name, or a value of the wrong type.
        """
        known = {f.name: type(getattr(self, f.name)) for f in fields(self)}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"no fault is called {name}")
            if not isinstance(value, known[name]) and not (known[name] is float and isinstance(value, int)):
                raise ValueError(f"{name} takes {known[name].__name__}, not {value!r}")
            setattr(self, name, value)
