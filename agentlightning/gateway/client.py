"""The agent's end of one call: its request, its answer, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import orjson
from starlette.types import Receive, Scope, Send

from agentlightning.address import Provider
from agentlightning.gateway.refusal import Refusal
from agentlightning.types import Json

Headers = Iterable[tuple[bytes, bytes]]

_KEEPALIVE = b": keep-alive\n\n"


class ClientGone(Exception):
    """The agent closed its connection before it had its answer."""


class Client:
    """One request of an agent. ``gone`` turns True once it has closed the connection."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.gone = False
        self._receive = receive
        self._send = send
        self._interrupted: asyncio.Task[object] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._sent_at = 0.0
        self._streaming = False

    async def read_json(self, limit: int) -> tuple[bytes, dict[str, Json]]:
        """The body as sent and as an object; Refusal 413 or 400 otherwise."""
        body = await self._read(limit)
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise Refusal(400, "invalid_json", f"The body is not JSON: {error}.") from error
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise Refusal(400, "invalid_json", f"The body is a JSON {kind}; send an object.")
        return body, value

    def watch(self) -> None:
        """From now on notices that the agent goes away. The body must have been read."""
        self._tasks.append(asyncio.ensure_future(self._watch()))

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Waits in this block end with ClientGone as soon as the agent goes away."""
        if self.gone:
            raise ClientGone
        self._interrupted = task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if not self.gone:
                raise
            if task is not None and hasattr(task, "uncancel"):
                task.uncancel()
            raise ClientGone from None
        finally:
            self._interrupted = None

    async def answer(
        self,
        status: int,
        body: bytes,
        headers: Headers = (),
        *,
        content_type: str = "application/json",
    ) -> None:
        """A whole answer."""
        fixed = [
            (b"content-type", content_type.encode("latin-1")),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._start(status, [*fixed, *headers])
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, refusal: Refusal, provider: Provider) -> None:
        """An error answer. A stream that has begun gets an error event and is then cut: it
        must not look like one that ended well."""
        if self._streaming:
            await self.write(b"data: " + refusal.body(provider) + b"\n\n")
            return
        headers = [(k.lower().encode(), v.encode()) for k, v in refusal.headers.items()]
        await self.answer(refusal.status, refusal.body(provider), headers)

    async def start_stream(self, headers: Headers, *, keepalive: float) -> None:
        """Begins an event stream; a comment goes out after each ``keepalive`` s of silence."""
        fixed = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ]
        await self._start(200, [*fixed, *headers])
        self._streaming = True
        self._sent_at = asyncio.get_running_loop().time()
        self._tasks.append(asyncio.ensure_future(self._keep_alive(keepalive)))

    async def write(self, data: bytes) -> None:
        """Sends whole events of a stream."""
        self._sent_at = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, data: bytes) -> None:
        """Sends the last events and ends the stream in good order."""
        self.close()
        await self._send({"type": "http.response.body", "body": data})

    def close(self) -> None:
        """Ends what runs beside the call. A stream that was not ended is cut by the server."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    async def _read(self, limit: int) -> bytes:
        length = self.headers.get("content-length", "0")
        parts: list[bytes] = []
        size = int(length) if length.isdigit() else 0
        while size <= limit:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)
            size = max(size, sum(map(len, parts)))
        text = f"The body has {size} bytes or more; at most {limit} are taken (gateway.max_body)."
        raise Refusal(413, "body_too_large", text, headers={"connection": "close"})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._interrupted is not None:
            self._interrupted.cancel()

    async def _keep_alive(self, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + seconds - clock()))
            if clock() - self._sent_at >= seconds:
                await self.write(_KEEPALIVE)
