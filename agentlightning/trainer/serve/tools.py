"""Tool calls in the Hermes form, ``<tool_call>{"name": …, "arguments": …}</tool_call>``.

See the "Hermes Function Calling" format of Nous Research. What does not parse stays text:
the agent sees what the model wrote.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass

from agentlightning.trainer.serve.text import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """``index`` is its place among the calls of the answer, ``arguments`` are JSON text."""

    index: int
    id: str
    name: str
    arguments: str


class ToolCallParser:
    """Splits streamed text into content and tool calls. A call comes whole, so all tokens of
    a step fit one chunk of the client's stream.

    Example:
        >>> parser = ToolCallParser()
        >>> parser.push('Let me add.<tool_call>{"name": "add", "arg')
        ('Let me add.', ())
        >>> parser.push('uments": {"a": 1}}</tool_call>')[1][0].arguments
        '{"a": 1}'
    """

    def __init__(self) -> None:
        self._held = ""
        self._content = False
        self.calls = 0

    def push(self, text: str, *, last: bool = False) -> tuple[str, tuple[ToolCall, ...]]:
        """The content and the calls that ``text`` completes. With ``last`` nothing is held
        back any more; a last call may lack its closing tag."""
        self._held += text
        content, calls = [], []
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0 and not last:
                break
            content.append(self._text(self._held[:start]))
            stop = end + len(CLOSE) if end >= 0 else len(self._held)
            block, self._held = self._held[start:stop], self._held[stop:]
            if call := parse_call(block.removeprefix(OPEN).removesuffix(CLOSE)):
                calls.append(ToolCall(self.calls, f"call_{uuid.uuid4().hex[:24]}", *call))
                self.calls += 1
            else:
                content.append(self._text(block))
        keep = 0 if last else held_back(self._held, (OPEN,))
        cut = start if start >= 0 else len(self._held) - keep
        content.append(self._text(self._held[:cut]))
        self._held = self._held[cut:]
        return "".join(content), tuple(calls)

    def _text(self, text: str) -> str:
        # Blank lines around calls are layout of the form, not content.
        if not text or (not text.strip() and (self.calls or not self._content)):
            return ""
        self._content = True
        return text


def parse_call(text: str) -> tuple[str, str] | None:
    """Name and arguments as JSON text, or None where ``text`` is no call."""
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments") or {}
    if not isinstance(arguments, dict):
        return None
    return call["name"], json.dumps(arguments, ensure_ascii=False)
