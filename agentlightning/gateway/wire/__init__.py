"""The dialects of the wire, one file each, and what they share.

A dialect turns a harness's request into what the model server must be asked, and moves ids,
log-probabilities and usage out of the answer (or out of each chunk of a streamed one).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from agentlightning.gateway.wire import chat, completions
from agentlightning.gateway.wire.answer import Answer, Asked
from agentlightning.types import Dialect, Json

__all__ = ["OPENAI_WIRES", "Answer", "Asked", "Wire"]


class Wire(Protocol):
    """What each dialect's module offers."""

    DIALECT: Dialect

    def asked(self, request: Mapping[str, Json]) -> Asked:
        """What the client wants to see."""

    def prepare(self, request: Mapping[str, Json], sampling: Mapping[str, Json]) -> dict[str, Json]:
        """The body for the model server; ``request`` stays as it is."""

    def take(self, payload: dict[str, Json], answer: Answer) -> None:
        """Moves ids, logprobs and versions out of a whole answer or one chunk. Raises
        TypeError, ValueError, KeyError or AttributeError where it has no such shape."""

    def merge(self, chunk: dict[str, Json], answer: Answer) -> None:
        """Adds a chunk, after ``take``, to the assembled ``answer.body``."""

    def as_chunk(self, payload: dict[str, Json]) -> dict[str, Json]:
        """A whole answer as the one chunk of a stream."""


OPENAI_WIRES: Mapping[str, Wire] = {"/chat/completions": chat, "/completions": completions}
"""Dialect by path below ``openai/v1``."""
