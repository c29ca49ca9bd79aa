"""Knobs: what an operator may set of a pool, each stated once, beside its field.

    burst_ratio: float = knob(0.25, low=0, high=10, section=FAIRNESS, label="Urgency pass", help="...")

From that line follow the validation where a revision is built and where it is applied, the field of the console's form
with its help and range, the property in the REST schema, and the table in the documentation. The field's default says
of what kind the value is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypeAlias

Value: TypeAlias = float | int | str | bool

PRICES = "Prices"
FAIRNESS = "Fairness"
LATENCY = "Latency"
QUEUES = "Queues"
SLICES = "Slices"
PREEMPTION = "Preemption"
POLICY = "Of single policies"
SECTIONS = (FAIRNESS, LATENCY, PREEMPTION, SLICES, QUEUES, PRICES, POLICY)
"""In the order of forms. ``POLICY``: knobs that concern one policy only."""


class ConfigError(ValueError):
    """A value outside its range; the message names field, value and accepted range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One field an operator may set.

    Attributes:
        low, high: accepted range of a number; ``is_low_open`` excludes ``low`` itself.
        choices: the accepted words, where the value is a word.
        label, help: for forms and documentation; the help says what the value bounds, its unit, and what zero means.
        policies: those that read it, empty for all.
    """

    name: str = ""
    default: Value
    low: float = 0.0
    high: float = math.inf
    is_low_open: bool = False
    choices: tuple[str, ...] = ()
    section: str
    label: str
    help: str
    policies: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """``number``, ``integer``, ``boolean`` or ``choice``."""
        if isinstance(self.default, bool):
            return "boolean"
        if self.choices:
            return "choice"
        return "integer" if isinstance(self.default, int) else "number"

    @property
    def range_text(self) -> str:
        """The accepted values in words."""
        if isinstance(self.default, bool):
            return "true or false"
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return f"{'above' if self.is_low_open else 'from'} {self.low:,.15g} to {self.high:,.15g}"

    def check(self, value: Any, where: str) -> Value:
        """The value as the configuration holds it; the default for None.

        Raises:
            ConfigError: naming knob, value and accepted range.
        """
        if value is None:
            return self.default
        if isinstance(self.default, bool):
            if not isinstance(value, bool):
                raise ConfigError(f"{where}: {self.name} must be true or false, not {value!r}")
            return value
        if self.choices:
            if value not in self.choices:
                raise ConfigError(f"{where}: unknown {self.name} {value!r} ({self.range_text})")
            return str(value)
        is_whole = isinstance(self.default, int)
        return number(self.name, value, self.low, self.high, where, is_low_open=self.is_low_open, is_whole=is_whole)


def knob(default: Any, **stated: Any) -> Any:
    """A dataclass field that an operator may set; arguments as the attributes of ``Knob``."""
    return field(default=default, metadata={"knob": Knob(default=default, **stated)})


def knobs_of(config: type) -> Mapping[str, Knob]:
    """The knobs of a dataclass by field name, in the order of its fields."""
    found = {}
    for each in fields(config):
        stated = each.metadata.get("knob")
        if stated is not None:
            found[each.name] = replace(stated, name=each.name)
    return MappingProxyType(found)


def number(
    name: str, value: Any, low: float, high: float, where: str, *, is_low_open: bool = False, is_whole: bool = False
) -> float | int:
    """A finite number within the range.

    Raises:
        ConfigError: naming field, value and accepted range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where}: {name} must be a number, not {value!r}")
    if value < low or value > high or (is_low_open and value == low):
        bracket = "above" if is_low_open else "from"
        raise ConfigError(f"{where}: {name} {value!r} is out of range ({bracket} {low:g} to {high:g})")
    if not is_whole:
        return float(value)
    if value != int(value):
        raise ConfigError(f"{where}: {name} must be a whole number, not {value!r}")
    return int(value)
