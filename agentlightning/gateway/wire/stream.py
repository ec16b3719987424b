"""Reads a model server's event stream while it is relayed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from agentlightning.gateway.wire.answer import Answer, Asked, strip
from agentlightning.gateway.wire.parse import SHAPE_ERRORS, parse_json

if TYPE_CHECKING:
    from agentlightning.gateway.wire import Wire

_DONE = b"[DONE]"


class StreamReader:
    """Takes the raw bytes of a stream; gives what may go to the agent at once.

    From the chunk on that finishes the last choice, events are kept back in ``held`` until
    the call is committed: whoever reads the end of an answer finds it recorded. ``done`` is
    True after ``[DONE]``; ``error`` holds an error event of the model server, after which
    nothing more is taken.
    """

    def __init__(self, wire: Wire, answer: Answer, asked: Asked) -> None:
        self.done = False
        self.error: bytes | None = None
        self.held = b""
        self._wire = wire
        self._answer = answer
        self._asked = asked
        self._rest = b""

    @property
    def ended(self) -> bool:
        return self.done or self.error is not None

    def feed(self, data: bytes) -> bytes:
        """Events that ``data`` completes, without the fields that the client did not ask for."""
        buffer = self._rest + data
        if b"\r\n" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *events, self._rest = buffer.split(b"\n\n")
        out: list[bytes] = []
        for event in events:
            if self.ended:
                break
            sent = self._event(event)
            if self.done or (self._answer.choices and self._answer.finished(self._asked.choices)):
                self.held += sent
            else:
                out.append(sent)
        return b"".join(out)

    def _event(self, event: bytes) -> bytes:
        lines = [line for line in event.split(b"\n") if line.startswith(b"data:")]
        data = b"\n".join(line[5:].strip() for line in lines)
        if data == _DONE:
            self.done = True
            return event + b"\n\n"
        if not data:
            return event + b"\n\n" if event else b""
        try:
            return self._chunk(data)
        except SHAPE_ERRORS:
            self._answer.malformed = True
            return event + b"\n\n"

    def _chunk(self, data: bytes) -> bytes:
        chunk = parse_json(data)
        if chunk.get("error"):
            self.error = data
            return b""
        self._wire.take(chunk, self._answer)
        self._wire.merge(chunk, self._answer)
        visible = parse_json(data) if self._asked.own_fields else chunk
        if self._asked.own_fields:
            strip(visible, self._asked)
        if not self._asked.usage and "usage" in visible:
            if not visible.get("choices"):
                return b""
            del visible["usage"]
        return b"data: " + orjson.dumps(visible) + b"\n\n"
