"""Tool calls in the Hermes form, ``<tool_call>{"name": …, "arguments": …}</tool_call>``.

See the "Hermes Function Calling" format of Nous Research. What does not parse stays text:
the agent sees what the model wrote.
"""

from __future__ import annotations

import json
import uuid
from typing import Any, TypeAlias

from agentlightning.trainer.serve.text import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"

Delta: TypeAlias = "dict[str, Any]"
"""A delta of OpenAI's chat stream: ``{"content": …}`` or ``{"tool_calls": [{…}]}``."""


class ToolCallParser:
    """Splits streamed text into content and tool calls.

    Example:
        >>> parser = ToolCallParser()
        >>> parser.push('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')[1]
        {'tool_calls': [{'index': 0, 'function': {'arguments': '{"a": 1}'}}]}
    """

    def __init__(self) -> None:
        self._held = ""
        self._content = False
        self.calls = 0

    def push(self, text: str) -> list[Delta]:
        """Deltas that ``text`` completes: for a call, its id and name, then its arguments."""
        self._held += text
        deltas: list[Delta] = []
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            deltas += self._text(self._held[:start])
            self._held = self._held[start:]
            if end < 0:
                return deltas
            end += len(CLOSE) - start
            block, self._held = self._held[:end], self._held[end:]
            deltas += self._block(block)
        keep = held_back(self._held, (OPEN,))
        cut = len(self._held) - keep
        deltas += self._text(self._held[:cut])
        self._held = self._held[cut:]
        return deltas

    def finish(self) -> list[Delta]:
        """Deltas of what was held back; a last call may lack its closing tag."""
        held, self._held = self._held, ""
        return self._block(held) if held.startswith(OPEN) else self._text(held)

    def _text(self, text: str) -> list[Delta]:
        # Blank lines around calls are layout of the form, not content.
        if not text or (not text.strip() and (self.calls or not self._content)):
            return []
        self._content = True
        return [{"content": text}]

    def _block(self, block: str) -> list[Delta]:
        call = parse_call(block.removeprefix(OPEN).removesuffix(CLOSE))
        if call is None:
            self._content = True
            return [{"content": block}]
        name, arguments = call
        index, self.calls = self.calls, self.calls + 1
        head = {
            "index": index,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        tail = {"index": index, "function": {"arguments": arguments}}
        return [{"tool_calls": [head]}, {"tool_calls": [tail]}]


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


def merge_deltas(deltas: list[Delta]) -> dict[str, Any]:
    """The message that a client builds from deltas; ``content`` is None where there is none.

    Example:
        >>> merge_deltas([{"content": "a"}, {"content": "b"}])
        {'role': 'assistant', 'content': 'ab'}
    """
    content = "".join(d["content"] for d in deltas if "content" in d)
    calls: dict[int, dict[str, Any]] = {}
    for part in (part for d in deltas for part in d.get("tool_calls", ())):
        call = calls.setdefault(
            part["index"], {"type": "function", "function": {"name": "", "arguments": ""}}
        )
        call.update({key: part[key] for key in ("id", "type") if key in part})
        for key, value in part["function"].items():
            call["function"][key] += value
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message
