"""A scripted model server over a real socket: answers with ids and logprobs as vLLM does.

Its tokenizer is bytes: a token is one byte of UTF-8. Without a script it echoes the last
message. Each request takes the next :class:`Reply` of the script; then the default one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.fakes.http import serve

Fault = Literal[
    "reset",  # the connection ends in the middle of the stream
    "clean_end",  # the stream ends in good order, without [DONE]
    "error_event",  # an error event in the middle, then [DONE]
    "null_ids",  # token_ids: null beside text
    "partial_ids",  # ids for every second token only
    "no_prompt_ids",
    "no_logprobs",
    "nan_logprob",
    "no_usage",
    "no_choices",  # 200 with an object that answers nothing
]


@dataclass(frozen=True)
class Reply:
    """What one request gets. ``text`` None echoes; ``first`` and ``middle`` are awaited before
    the first token and after half of the tokens."""

    text: str | None = None
    status: int = 200
    fault: Fault | None = None
    finish_reason: str = "stop"
    tool_calls: tuple[dict[str, Any], ...] = ()
    versions: tuple[tuple[int, int, int], ...] = ()
    first: asyncio.Event | None = None
    middle: asyncio.Event | None = None
    answer_stream: bool | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()


Script = Sequence[Reply] | Callable[[dict[str, Any]], Reply]


def encode(text: str) -> list[int]:
    """The ids of a text."""
    return list(text.encode())


def logprob(token_id: int) -> float:
    """The log-probability that this server gives a token: always the same, exact in float32."""
    return -(1 + token_id % 7) / 8


def render(messages: Sequence[dict[str, Any]]) -> str:
    """The chat template."""
    turns = (f"<{m['role']}>{_text(m.get('content'))}" for m in messages)
    return "".join(turns) + "<assistant>"


@dataclass
class ScriptedModelServer:
    """``async with ScriptedModelServer(script) as server: server.url`` (ends in ``/v1``)."""

    script: Script = ()
    model: str = "policy"
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self._replies = iter(self.script) if not callable(self.script) else None
        self._server: AbstractAsyncContextManager[str] = serve(self._app)

    async def __aenter__(self) -> ScriptedModelServer:
        self.url = await self._server.__aenter__() + "/v1"
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._server.__aexit__(*exception)

    def _reply(self, request: dict[str, Any]) -> Reply:
        if self._replies is None:
            return self.script(request)  # type: ignore[operator]
        return next(self._replies, Reply())

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        request = json.loads(body)
        self.requests.append(request)
        self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        reply = self._reply(request)
        self.arrived.set()
        answering = asyncio.ensure_future(self._answer(scope["path"], request, reply, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            answering.cancel()
            self.cancelled.set()
        leaving.cancel()
        if not answering.cancelled() and answering.done():
            answering.result()

    async def _answer(self, path: str, request: dict[str, Any], reply: Reply, send: Any) -> None:
        refusal = self._refusal(request)
        if reply.status != 200 or refusal:
            status, text = refusal or (reply.status, f"scripted {reply.status}")
            error = {"message": text, "type": "BadRequestError", "param": None, "code": status}
            await _send_json(send, status, {"error": error}, reply)
            return
        if reply.fault == "no_choices":
            await _send_json(send, 200, {}, reply)
            return
        if reply.first:
            await reply.first.wait()
        answer = _Answer(path.removeprefix("/v1/"), request, reply, self.model)
        streamed = reply.answer_stream
        if request.get("stream", False) if streamed is None else streamed:
            await _send_stream(send, answer, reply)
        else:
            await _send_json(send, 200, answer.whole(), reply)

    def _refusal(self, request: dict[str, Any]) -> tuple[int, str] | None:
        """What vLLM refuses too."""
        if request.get("model") != self.model:
            return 404, f"The model `{request.get('model')}` does not exist."
        if "stream_options" in request and not request.get("stream"):
            return 400, "Stream options can only be defined when `stream=True`."
        if request.get("tools") == []:
            return 400, "tools must not be empty"
        if "parallel_tool_calls" in request and not request.get("tools"):
            return 400, "parallel_tool_calls needs tools"
        return None


class _Answer:
    """The same answer whole and as chunks."""

    def __init__(self, path: str, request: dict[str, Any], reply: Reply, model: str) -> None:
        self.chat = path == "chat/completions"
        self.request = request
        self.reply = reply
        self.n = request.get("n") or 1
        prompt = render(request["messages"]) if self.chat else request["prompt"]
        self.prompt_ids = encode(prompt) if isinstance(prompt, str) else prompt
        self.base = {"id": "answer-1", "created": 1, "model": model}
        text = reply.text
        if text is None:
            last = request["messages"][-1].get("content") if self.chat else request["prompt"]
            text = _text(last) if self.chat or isinstance(last, str) else bytes(last).decode()
        self.ids = encode(text)

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(i, self.ids, whole=True) for i in range(self.n)]
        name = "chat.completion" if self.chat else "text_completion"
        answer = {**self.base, "object": name, "choices": choices, "usage": self._usage()}
        if self.chat:
            answer["prompt_token_ids"] = self._prompt_ids()
        if self.reply.fault == "no_usage":
            del answer["usage"]
        return answer

    def chunks(self) -> Iterator[dict[str, Any]]:
        name = "chat.completion.chunk" if self.chat else "text_completion"
        base = {**self.base, "object": name}
        if self.chat:
            for i in range(self.n):
                role = {"role": "assistant", "content": ""}
                first = {"index": i, "delta": role, "logprobs": None, "finish_reason": None}
                yield {**base, "choices": [first], "prompt_token_ids": self._prompt_ids()}
        for k in range(max(1, len(self.ids))):
            for i in range(self.n):
                last = k >= len(self.ids) - 1
                yield {**base, "choices": [self._choice(i, self.ids[k : k + 1], last=last, k=k)]}
        options = self.request.get("stream_options") or {}
        if options.get("include_usage") and self.reply.fault != "no_usage":
            yield {**base, "choices": [], "usage": self._usage()}

    def _choice(
        self, i: int, ids: list[int], *, whole: bool = False, last: bool = True, k: int = 0
    ) -> dict[str, Any]:
        text = bytes(ids).decode(errors="replace")
        choice: dict[str, Any] = {"index": i, "logprobs": self._logprobs(ids), "stop_reason": None}
        choice["finish_reason"] = self.reply.finish_reason if whole or last else None
        choice["token_ids"] = self._token_ids(ids, k)
        if not self.chat:
            choice.update(text=text, prompt_token_ids=self._prompt_ids() if k == 0 else None)
        elif whole:
            message = {"role": "assistant", "content": text}
            if self.reply.tool_calls:
                message = {**message, "content": None, "tool_calls": list(self.reply.tool_calls)}
            choice["message"] = message
        elif self.reply.tool_calls:
            calls = [{"index": j, **c} for j, c in enumerate(self.reply.tool_calls)]
            choice["delta"] = {"tool_calls": calls} if k == 0 else {}
        else:
            choice["delta"] = {"content": text}
        if self.reply.versions and last:
            spans = [{"version": v, "start": s, "end": e} for v, s, e in self.reply.versions]
            choice["weight_versions"] = spans
        return choice

    def _token_ids(self, ids: list[int], k: int) -> list[int] | None:
        if not self.request.get("return_token_ids") or self.reply.fault == "null_ids":
            return None
        if self.reply.fault == "partial_ids":
            return [t for j, t in enumerate(ids) if (j + k) % 2 == 0]
        return ids

    def _prompt_ids(self) -> list[int] | None:
        wanted = self.request.get("return_token_ids") and self.reply.fault != "no_prompt_ids"
        return self.prompt_ids if wanted else None

    def _logprobs(self, ids: list[int]) -> dict[str, Any] | None:
        asked = self.request.get("logprobs")
        if asked is None or asked is False or self.reply.fault == "no_logprobs":
            return None
        values = [logprob(t) for t in ids]
        if self.reply.fault == "nan_logprob" and values:
            values[0] = float("nan")
        if self.chat:
            return {
                "content": [
                    {"token": chr(t), "logprob": v, "bytes": [t], "top_logprobs": []}
                    for t, v in zip(ids, values, strict=True)
                ]
            }
        return {"tokens": [chr(t) for t in ids], "token_logprobs": values, "top_logprobs": None}

    def _usage(self) -> dict[str, int]:
        prompt, completion = len(self.prompt_ids), len(self.ids) * self.n
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


async def _send_stream(send: Any, answer: _Answer, reply: Reply) -> None:
    headers = [(b"content-type", b"text/event-stream"), *reply.headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    chunks = list(answer.chunks())
    for k, chunk in enumerate(chunks):
        if k == len(chunks) // 2:
            if reply.middle:
                await reply.middle.wait()
            if reply.fault == "reset":
                return
            if reply.fault == "clean_end":
                break
            if reply.fault == "error_event":
                await _event(send, json.dumps({"error": {"message": "engine died", "code": 500}}))
                break
        await _event(send, json.dumps(chunk))
    if reply.fault != "clean_end":
        await _event(send, "[DONE]")
    await send({"type": "http.response.body", "body": b""})


async def _event(send: Any, data: str) -> None:
    body = f"data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_json(send: Any, status: int, value: Any, reply: Reply) -> None:
    headers = [(b"content-type", b"application/json"), *reply.headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""
