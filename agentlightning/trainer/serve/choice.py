"""One answer as it grows: what the engine drew, and the text, calls and spans made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.trainer.serve.engine import Step
from agentlightning.trainer.serve.sampler import Drawn
from agentlightning.trainer.serve.text import TextStream
from agentlightning.trainer.serve.tools import Delta, ToolCallParser


@dataclass(frozen=True, slots=True)
class Growth:
    """What one step adds: a token where there is one, deltas for the client, an end."""

    drawn: tuple[Drawn, ...]
    deltas: tuple[Delta, ...]
    finish: str | None


class Choice:
    """Collects the steps of one sequence.

    Example of ``weight_versions``: ``[{"version": 0, "start": 0, "end": 55}]``.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, tools: bool = False) -> None:
        self._text = TextStream(tokenizer, stops)
        self._tools = ToolCallParser() if tools else None
        self.drawn: list[Drawn] = []
        self.deltas: list[Delta] = []
        self.weight_versions: list[dict[str, int]] = []
        self.finish: str | None = None

    def add(self, step: Step) -> Growth:
        """Takes a step in; the choice may end before its sequence, at a stop string."""
        drawn = () if step.drawn is None else (step.drawn,)
        text = "".join(self._take(each, step.version) for each in drawn)
        self.finish = "stop" if self._text.stopped else step.finish
        if self.finish:
            text += self._text.finish()
        deltas = self._deltas(text)
        if self.finish == "stop" and self._tools and self._tools.calls:
            self.finish = "tool_calls"
        self.deltas += deltas
        return Growth(drawn, tuple(deltas), self.finish)

    @property
    def token_ids(self) -> list[int]:
        return [each.token for each in self.drawn]

    @property
    def text(self) -> str:
        return "".join(delta.get("content", "") for delta in self.deltas)

    def _take(self, drawn: Drawn, version: int) -> str:
        at = len(self.drawn)
        self.drawn.append(drawn)
        if not self.weight_versions or self.weight_versions[-1]["version"] != version:
            self.weight_versions.append({"version": version, "start": at, "end": at})
        self.weight_versions[-1]["end"] = at + 1
        return self._text.push(drawn.token)

    def _deltas(self, text: str) -> list[Delta]:
        if self._tools is None:
            return [{"content": text}] if text else []
        deltas = self._tools.push(text)
        return deltas + self._tools.finish() if self.finish else deltas
