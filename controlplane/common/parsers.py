"""Bodies of ``/api/v1``: JSON that every later step can walk through, store and show."""

from __future__ import annotations

from typing import Any

from rest_framework.exceptions import ParseError
from rest_framework.parsers import JSONParser

MAX_DEPTH = 32
"""No operation takes a body half as deep; what is deeper would exhaust the stack of whoever walks through it."""


class PlainJSONParser(JSONParser):
    """Refuses what is JSON and yet no text or structure that can be worked with.

    Cost: one more walk through the body.
    """

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        """The body.

        Raises:
            ParseError: not JSON, nested deeper than ``MAX_DEPTH``, or half of a surrogate pair in a text.
        """
        try:
            body = super().parse(stream, media_type, parser_context)
        except RecursionError as error:
            raise _too_deep() from error
        level, depth = [body], 0
        while level:
            below: list[Any] = []
            for each in level:
                if isinstance(each, dict):
                    below += each
                    below += each.values()
                elif isinstance(each, list):
                    below += each
                elif isinstance(each, str) and not each.isascii():
                    _check_text(each)
            level, depth = below, depth + 1
            if depth > MAX_DEPTH and any(isinstance(each, dict | list) for each in level):
                raise _too_deep()
        return body


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParseError("A text holds half of a surrogate pair, which is no character.") from error


def _too_deep() -> ParseError:
    return ParseError(f"Nested more than {MAX_DEPTH} levels deep.")
