"""How answers are written: OpenAI's API with vLLM's ``return_token_ids``.

A whole answer and a chunk of a stream say the same of a choice: one of all its steps, the
other of one step. So each token's id and logprob are in exactly one chunk.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from agentlightning.trainer.serve.generation import ENGINE_FAILED, Generation, Growth
from agentlightning.trainer.serve.requests import RequestError
from agentlightning.trainer.serve.sampler import Drawn
from agentlightning.trainer.serve.tools import ToolCall


class TokenTexts:
    """Text of single tokens, as logprobs report them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]


class Answer(ABC):
    """One generation as a whole answer or as the events of a stream."""

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(self, generation: Generation, *, model: str, texts: TokenTexts) -> None:
        self._generation, self._texts = generation, texts
        self._asked_ids = bool(generation.request.return_token_ids)
        self._head = {
            "id": f"{self.PREFIX}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self) -> dict[str, Any]:
        """The answer once the generation has finished."""
        choices = [
            self._choice(index, choice.whole(), whole=True)
            for index, choice in enumerate(self._generation.choices)
        ]
        return self._body(self.WHOLE, choices) | {"usage": self._generation.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, one a step of a choice, as the steps come."""
        for chunk in self._opening():
            yield sse(chunk)
        async for index, growth in self._generation.growths():
            if growth.finish == "error":
                yield sse(RequestError(ENGINE_FAILED, status=500).body())
                return
            yield sse(self._body(self.CHUNK, [self._choice(index, growth, whole=False)]))
        if self._generation.request.include_usage:
            yield sse(self._body(self.CHUNK, []) | {"usage": self._generation.usage()})
        yield b"data: [DONE]\n\n"

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"object": kind, **self._head, "choices": choices}

    def _choice(self, index: int, growth: Growth, *, whole: bool) -> dict[str, Any]:
        choice = {
            "index": index,
            **self._content(growth, whole=whole),
            "logprobs": self._logprobs(index, growth.drawn),
            "finish_reason": growth.finish,
        }
        if self._asked_ids:
            choice["token_ids"] = [drawn.token for drawn in growth.drawn]
            if growth.finish:
                choice["weight_versions"] = self._generation.choices[index].weight_versions
        return choice

    def _opening(self) -> Iterable[dict[str, Any]]:
        """Chunks that a stream begins with, before any token."""
        return ()

    @abstractmethod
    def _content(self, growth: Growth, *, whole: bool) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, index: int, drawn: Sequence[Drawn]) -> dict[str, Any] | None: ...


class ChatAnswer(Answer):
    """``POST /v1/chat/completions``: the prompt's ids stand beside the choices."""

    PREFIX, WHOLE, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        return super().whole() | self._prompt_ids()

    def _opening(self) -> Iterable[dict[str, Any]]:
        top = self._prompt_ids()
        for index in range(len(self._generation.choices)):
            choice = self._choice(index, Growth((), "", (), None), whole=False)
            choice["delta"] = {"role": "assistant", "content": ""}
            yield self._body(self.CHUNK, [choice]) | top
            top = {}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._generation.prompts[0]} if self._asked_ids else {}

    def _content(self, growth: Growth, *, whole: bool) -> dict[str, Any]:
        calls = [_call(call) for call in growth.calls]
        if whole:
            message = {"role": "assistant", "content": growth.text or ("" if not calls else None)}
            return {"message": message | ({"tool_calls": calls} if calls else {})}
        for call, body in zip(growth.calls, calls, strict=True):
            body["index"] = call.index
        delta = {"content": growth.text, "tool_calls": calls}
        return {"delta": {key: value for key, value in delta.items() if value}}

    def _logprobs(self, index: int, drawn: Sequence[Drawn]) -> dict[str, Any] | None:  # noqa: ARG002
        if self._generation.request.alternatives is None or not drawn:
            return None
        return {
            "content": [
                self._token(each.token, each.logprob)
                | {"top_logprobs": [self._token(*alternative) for alternative in each.top]}
                for each in drawn
            ]
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._texts[token]
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


class CompletionAnswer(Answer):
    """``POST /v1/completions``: each prompt's ids stand in what is first said of a choice."""

    PREFIX, WHOLE, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(self, generation: Generation, *, model: str, texts: TokenTexts) -> None:
        super().__init__(generation, model=model, texts=texts)
        self._offsets: dict[int, int] = {}

    def _choice(self, index: int, growth: Growth, *, whole: bool) -> dict[str, Any]:
        first = index not in self._offsets
        choice = super()._choice(index, growth, whole=whole)
        if self._asked_ids and first:
            choice["prompt_token_ids"] = self._generation.prompt_of(index)
        return choice

    def _content(self, growth: Growth, *, whole: bool) -> dict[str, Any]:  # noqa: ARG002
        return {"text": growth.text}

    def _logprobs(self, index: int, drawn: Sequence[Drawn]) -> dict[str, Any] | None:
        """``text_offset`` is where a token's text starts among the texts of all tokens."""
        texts, offset = [self._texts[each.token] for each in drawn], self._offsets.get(index, 0)
        offsets = list(accumulate(map(len, texts), initial=offset))
        self._offsets[index] = offsets.pop()
        if self._generation.request.alternatives is None:
            return None
        return {
            "tokens": texts,
            "token_logprobs": [finite(each.logprob) for each in drawn],
            "top_logprobs": [
                {self._texts[token]: finite(logprob) for token, logprob in each.top} or None
                for each in drawn
            ],
            "text_offset": offsets,
        }


def finite(logprob: float) -> float:
    """JSON has no infinity: an alternative that cannot be drawn is -9999, as in vLLM."""
    return max(logprob, -9999.0)


def sse(content: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + data.encode() + b"\n\n"


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
