"""Units of the scheduler as distinct names for the type checker."""

from __future__ import annotations

from typing import NewType

Seconds = NewType("Seconds", float)
"""A monotonic instant or a duration, in seconds."""

Tokens = NewType("Tokens", int)
"""Tokens of the served model's tokenizer."""

Blocks = NewType("Blocks", int)
"""KV-cache blocks; a backend states how many tokens one holds."""

Service = NewType("Service", float)
"""Weighted tokens: ``w_prompt * prompt tokens + w_output * output tokens``; divided by weight in counters."""
