"""Token ids to text, as they come: never half a character, never past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one answer. Special tokens are left out.

    ``stopped`` is set once a stop string was seen; the text ends before it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._decoded = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """What ``token`` adds to the text that may go out now."""
        self._ids.append(token)
        piece: str = self._stream.step(self._backend, token) or ""
        self._decoded += len(piece)
        return self._release(piece)

    def finish(self) -> str:
        """What was held back: a possible stop string that was none, an incomplete character."""
        if self.stopped:
            return ""
        text: str = self._backend.decode(self._ids, skip_special_tokens=True)
        out = self._release(text[self._decoded :])
        if not self.stopped:
            out, self._held = out + self._held, ""
        return out

    def _release(self, piece: str) -> str:
        if self.stopped:
            return ""
        self._held += piece
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = held_back(self._held, self._stops)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out


def held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that could begin one of ``marks``.

    Example:
        >>> held_back("one </to", ["</tool_call>"])
        4
    """
    longest = max((len(mark) - 1 for mark in marks), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
