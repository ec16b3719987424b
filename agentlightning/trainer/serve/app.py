"""The HTTP side of the model server."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from agentlightning.errors import ModelError, ServiceError
from agentlightning.trainer.serve import wire
from agentlightning.trainer.serve.choice import Choice, Growth
from agentlightning.trainer.serve.engine import Engine, Step
from agentlightning.trainer.serve.engine import Sequence as EngineSequence
from agentlightning.trainer.serve.metrics import metrics_text
from agentlightning.trainer.serve.tools import merge_deltas
from agentlightning.trainer.serve.wire import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    RequestError,
)

_UPDATE_WAIT = 300.0
"""Seconds that an update may wait for the engine's next step."""


@dataclass(frozen=True)
class ServedModel:
    """What the handlers know of the model. ``name`` is what requests call it."""

    name: str
    tokenizer: Any
    max_context: int
    vocabulary: int
    eos_ids: frozenset[int]
    chat_template: str | None = None


@dataclass
class Generation:
    """The sequences of one request, and the queue on which their steps arrive."""

    request: GenerationRequest
    prompts: list[list[int]]
    sequences: list[EngineSequence]
    choices: list[Choice]
    steps: asyncio.Queue[tuple[int, Step]]
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def prompt_of(self, index: int) -> list[int]:
        return self.prompts[index // (self.request.n or 1)]

    def usage(self) -> dict[str, Any]:
        return wire.usage(
            sum(len(prompt) for prompt in self.prompts),
            sum(len(choice.drawn) for choice in self.choices),
            sum(s.cached for s in self.sequences[:: self.request.n or 1]),
        )


class ModelApp:
    """Handlers over one engine."""

    def __init__(self, model: ServedModel, engine: Engine) -> None:
        self._model, self._engine = model, engine
        self._texts = wire.TokenTexts(model.tokenizer)
        self._updates = asyncio.Lock()

    def asgi(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/version", self.version),
                Route("/update_weights", self.update_weights, methods=["POST"]),
            ],
            lifespan=self._lifespan,
            exception_handlers={RequestError: _answer_error},
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._engine.close)

    async def chat(self, request: Request) -> Response:
        chat = wire.parse(ChatRequest, await request.body())
        prompt = await asyncio.to_thread(self._chat_prompt, chat)
        generation = self._begin(chat, [prompt], tools=bool(chat.offered_tools))
        if chat.stream:
            return _event_stream(self._stream_chat(chat, generation))
        await self._complete(request, generation)
        return JSONResponse(self._chat_answer(chat, generation))

    async def completions(self, request: Request) -> Response:
        completion = wire.parse(CompletionRequest, await request.body())
        prompts = [
            self._model.tokenizer.encode(p) if isinstance(p, str) else p
            for p in completion.prompts()
        ]
        generation = self._begin(completion, prompts)
        if completion.stream:
            return _event_stream(self._stream_completion(completion, generation))
        await self._complete(request, generation)
        return JSONResponse(self._completion_answer(completion, generation))

    async def models(self, _: Request) -> Response:
        card = {
            "id": self._model.name,
            "object": "model",
            "owned_by": "agentlightning",
            "max_model_len": self._model.max_context,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def health(self, _: Request) -> Response:
        if self._engine.alive:
            return JSONResponse({"status": "ok", "version": self._engine.version})
        return JSONResponse({"status": "the engine has ended; see the log"}, status_code=503)

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(metrics_text(self._engine))

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": self._engine.version})

    async def update_weights(self, request: Request) -> Response:
        """Answers once the new weights serve; requests in flight go on."""
        folder, version = _update_request(await request.body())
        async with self._updates:
            try:
                future = await asyncio.to_thread(self._engine.update_weights, folder, version)
                await asyncio.wait_for(asyncio.wrap_future(future), _UPDATE_WAIT)
            except ModelError as error:
                raise RequestError(str(error), param="path") from error
        return JSONResponse({"version": version})

    def _chat_prompt(self, chat: ChatRequest) -> list[int]:
        try:
            ids: list[int] = self._model.tokenizer.apply_chat_template(
                [_normalised(message) for message in chat.messages],
                tools=chat.offered_tools,
                chat_template=self._model.chat_template,
                add_generation_prompt=chat.add_generation_prompt
                and not chat.continue_final_message,
                continue_final_message=chat.continue_final_message,
                tokenize=True,
                return_dict=False,
                **(chat.chat_template_kwargs or {}),
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise RequestError(
                f"messages: the chat template cannot write them: {error}.", param="messages"
            ) from error
        return ids

    def _begin(
        self, request: GenerationRequest, prompts: list[list[int]], *, tools: bool = False
    ) -> Generation:
        """Submits every choice of a request; raises RequestError."""
        if request.model is not None and request.model != self._model.name:
            raise RequestError(
                f"The model {request.model!r} does not exist here; this server has "
                f"{self._model.name!r}.",
                status=404,
                param="model",
            )
        self._check_ids(request)
        limits = [self._limit(prompt, request) for prompt in prompts]
        count = request.n or 1
        generation = Generation(request, prompts, [], [], asyncio.Queue())
        for index in range(len(prompts) * count):
            which = index // count
            generation.choices.append(Choice(self._model.tokenizer, request.stops, tools=tools))
            generation.sequences.append(
                self._sequence(generation, index, prompts[which], limits[which])
            )
        try:
            for sequence in generation.sequences:
                self._engine.submit(sequence)
        except ServiceError as error:
            raise RequestError(str(error), status=503) from error
        return generation

    def _sequence(
        self, generation: Generation, index: int, prompt: list[int], limit: int
    ) -> EngineSequence:
        request, loop = generation.request, asyncio.get_running_loop()
        seed = secrets.randbits(64) if request.seed is None else request.seed

        def on_step(step: Step) -> None:
            loop.call_soon_threadsafe(generation.steps.put_nowait, (index, step))

        eos = frozenset() if request.ignore_eos else self._model.eos_ids
        return EngineSequence(
            prompt=np.array(prompt, np.int32),
            sampling=request.sampling(),
            rng=random.Random(f"{seed}/{index}"),
            max_tokens=limit,
            stop_ids=eos | frozenset(request.stop_token_ids or ()),
            on_step=on_step,
        )

    def _check_ids(self, request: GenerationRequest) -> None:
        wrong = [i for i in request.logit_bias or {} if not 0 <= i < self._model.vocabulary]
        if wrong:
            raise RequestError(
                f"logit_bias: {wrong[0]} is no token id; allowed are 0 to "
                f"{self._model.vocabulary - 1}.",
                param="logit_bias",
            )

    def _limit(self, prompt: list[int], request: GenerationRequest) -> int:
        """Most tokens that may be sampled after ``prompt``; raises RequestError."""
        context, asked = self._model.max_context, request.limit
        wrong = [i for i in prompt if not 0 <= i < self._model.vocabulary]
        if wrong or not prompt:
            what = f"{wrong[0]} is no token id" if wrong else "it is empty"
            raise RequestError(
                f"prompt: {what}; allowed ids are 0 to {self._model.vocabulary - 1}.",
                param="prompt",
            )
        if len(prompt) + (asked or 1) > context:
            raise RequestError(
                f"This model's maximum context length is {context} tokens, but the prompt has "
                f"{len(prompt)} and {asked or 1} were asked for. Shorten the prompt or lower "
                "max_tokens.",
                param="max_tokens" if asked and len(prompt) < context else "messages",
            )
        return asked or context - len(prompt)

    async def _growths(self, generation: Generation) -> AsyncIterator[tuple[int, Growth]]:
        """What each step adds, until all choices have ended. Leaving early aborts the rest."""
        open_choices = set(range(len(generation.choices)))
        try:
            while open_choices:
                index, step = await generation.steps.get()
                if index not in open_choices:
                    continue  # a stop string ended it before the engine knew
                growth = generation.choices[index].add(step)
                if growth.finish:
                    open_choices.discard(index)
                    self._engine.abort(generation.sequences[index])
                yield index, growth
        finally:
            for index in open_choices:
                self._engine.abort(generation.sequences[index])

    async def _complete(self, request: Request, generation: Generation) -> None:
        """Waits for all choices, or aborts them when the client goes away."""
        work = asyncio.ensure_future(_drain(self._growths(generation)))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()
        if not work.done() or work.cancelled():
            raise RequestError("the client went away", status=499)
        work.result()
        if any(choice.finish == "error" for choice in generation.choices):
            raise RequestError("the engine failed; see the server's log", status=500)

    def _chat_answer(self, chat: ChatRequest, generation: Generation) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(generation.choices):
            message = merge_deltas(choice.deltas)
            entry = {"index": index, "message": message, "finish_reason": choice.finish}
            entry["logprobs"] = self._chat_logprobs(chat, choice.drawn)
            choices.append(entry | _owned(chat, choice.token_ids, choice))
        answer = self._head(generation, "chat.completion") | {
            "choices": choices,
            "usage": generation.usage(),
        }
        if chat.return_token_ids:
            answer["prompt_token_ids"] = generation.prompts[0]
        return answer

    async def _stream_chat(self, chat: ChatRequest, generation: Generation) -> AsyncIterator[bytes]:
        head = self._head(generation, "chat.completion.chunk")
        opening: dict[str, Any] = {}
        if chat.return_token_ids:
            opening["prompt_token_ids"] = generation.prompts[0]
        for index in range(len(generation.choices)):
            first = {"role": "assistant", "content": ""}
            yield wire.sse(head | opening | {"choices": [_chunk_choice(index, first)]})
            opening = {}
        async for index, growth in self._growths(generation):
            if growth.finish == "error":
                yield _stream_error()
                return
            # A call comes as two deltas; the token belongs to the last of them.
            *early, delta = growth.deltas or ({},)
            for each in early:
                yield wire.sse(head | {"choices": [_chunk_choice(index, each)]})
            choice = _chunk_choice(index, delta, growth.finish)
            choice["logprobs"] = self._chat_logprobs(chat, growth.drawn)
            choice |= _owned(
                chat, [d.token for d in growth.drawn], generation.choices[index], growth.finish
            )
            yield wire.sse(head | {"choices": [choice]})
        if chat.include_usage:
            yield wire.sse(head | {"choices": [], "usage": generation.usage()})
        yield b"data: [DONE]\n\n"

    def _completion_answer(
        self, completion: CompletionRequest, generation: Generation
    ) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(generation.choices):
            entry = {"index": index, "text": choice.text, "finish_reason": choice.finish}
            entry["logprobs"] = (
                None
                if completion.logprobs is None
                else self._texts.completion(choice.drawn, offset=0)
            )
            entry |= _owned(completion, choice.token_ids, choice)
            if completion.return_token_ids:
                entry["prompt_token_ids"] = generation.prompt_of(index)
            choices.append(entry)
        return self._head(generation, "text_completion") | {
            "choices": choices,
            "usage": generation.usage(),
        }

    async def _stream_completion(
        self, completion: CompletionRequest, generation: Generation
    ) -> AsyncIterator[bytes]:
        head = self._head(generation, "text_completion")
        offsets = [0] * len(generation.choices)
        started: set[int] = set()
        async for index, growth in self._growths(generation):
            if growth.finish == "error":
                yield _stream_error()
                return
            text = "".join(delta["content"] for delta in growth.deltas)
            choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": growth.finish}
            choice["logprobs"] = (
                None
                if completion.logprobs is None
                else self._texts.completion(growth.drawn, offsets[index])
            )
            offsets[index] += sum(len(self._texts.text(d.token)) for d in growth.drawn)
            choice |= _owned(
                completion,
                [d.token for d in growth.drawn],
                generation.choices[index],
                growth.finish,
            )
            if completion.return_token_ids and index not in started:
                choice["prompt_token_ids"] = generation.prompt_of(index)
            started.add(index)
            yield wire.sse(head | {"choices": [choice]})
        if completion.include_usage:
            yield wire.sse(head | {"choices": [], "usage": generation.usage()})
        yield b"data: [DONE]\n\n"

    def _head(self, generation: Generation, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
        return {
            "id": f"{prefix}-{generation.answer_id}",
            "object": kind,
            "created": generation.created,
            "model": self._model.name,
        }

    def _chat_logprobs(self, chat: ChatRequest, drawn: Sequence[Any]) -> dict[str, Any] | None:
        if not chat.logprobs or not drawn:
            return None
        return {"content": [self._texts.chat(each) for each in drawn]}


def _owned(
    request: GenerationRequest, ids: list[int], choice: Choice, finish: str | None = "end"
) -> dict[str, Any]:
    """The ids, and with the end of a choice the versions that sampled them."""
    if not request.return_token_ids:
        return {}
    versions = {"weight_versions": choice.weight_versions} if finish else {}
    return {"token_ids": ids} | versions


def _chunk_choice(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def _event_stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    return StreamingResponse(
        events, media_type="text/event-stream", headers={"cache-control": "no-cache"}
    )


def _stream_error() -> bytes:
    return wire.sse(RequestError("the engine failed; see the server's log", status=500).body())


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error.body(), status_code=error.status)


async def _drain(items: AsyncIterator[Any]) -> None:
    async for _ in items:
        pass


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _normalised(message: dict[str, Any]) -> dict[str, Any]:
    """Templates take text: a missing content is empty, text parts are joined, and a call's
    arguments are an object as the Hermes templates expect."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    calls = [_call_with_object(call) for call in message.get("tool_calls") or ()]
    return message | {"content": content or ""} | ({"tool_calls": calls} if calls else {})


def _call_with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    # Where the model wrote no JSON, the template gets what it wrote.
    with suppress(ValueError, TypeError):
        function["arguments"] = json.loads(function.get("arguments") or "{}")
    return call | {"function": function}


def _update_request(body: bytes) -> tuple[Path, int]:
    try:
        content = json.loads(body)
        folder, version = Path(content["path"]), content["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError('send {"path": folder, "version": integer}', param="path") from error
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise RequestError(f"version is {version!r}; give an integer from 0", param="version")
    if not folder.is_dir():
        raise RequestError(f"path: there is no folder {folder} on this machine", param="path")
    return folder, version
