"""The HTTP side of the model server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from agentlightning.errors import ModelError
from agentlightning.trainer.serve.answers import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    TokenTexts,
)
from agentlightning.trainer.serve.engine import Engine
from agentlightning.trainer.serve.generation import Generation
from agentlightning.trainer.serve.metrics import metrics_text
from agentlightning.trainer.serve.prompts import ServedModel, chat_prompt, completion_prompts
from agentlightning.trainer.serve.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    RequestError,
    UpdateRequest,
    parse,
)

_UPDATE_WAIT = 300.0
"""Seconds that an update may wait for the engine's next step."""


class ModelApp:
    """Handlers over one engine."""

    def __init__(self, model: ServedModel, engine: Engine) -> None:
        self._model, self._engine = model, engine
        self._texts = TokenTexts(model.tokenizer)
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
        chat = parse(ChatRequest, await request.body())
        prompt = await asyncio.to_thread(chat_prompt, self._model, chat)
        generation = self._begin(chat, [prompt], tools=bool(chat.offered_tools))
        return await self._answer(request, generation, ChatAnswer)

    async def completions(self, request: Request) -> Response:
        completion = parse(CompletionRequest, await request.body())
        generation = self._begin(completion, completion_prompts(self._model, completion))
        return await self._answer(request, generation, CompletionAnswer)

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
        update = parse(UpdateRequest, await request.body())
        async with self._updates:
            try:
                future = await asyncio.to_thread(
                    self._engine.update_weights, update.path, update.version
                )
                await asyncio.wait_for(asyncio.wrap_future(future), _UPDATE_WAIT)
            except ModelError as error:
                raise RequestError(str(error), param="path") from error
        return JSONResponse({"version": update.version})

    def _begin(
        self, request: GenerationRequest, prompts: Sequence[list[int]], *, tools: bool = False
    ) -> Generation:
        return Generation(self._model, self._engine, request=request, prompts=prompts, tools=tools)

    async def _answer(
        self, request: Request, generation: Generation, kind: type[Answer]
    ) -> Response:
        answer = kind(generation, model=self._model.name, texts=self._texts)
        if generation.request.stream:
            return StreamingResponse(
                answer.events(),
                media_type="text/event-stream",
                headers={"cache-control": "no-cache"},
            )
        await _finish(request, generation)
        return JSONResponse(answer.whole())


async def _finish(request: Request, generation: Generation) -> None:
    """Waits for all choices, or aborts them when the client goes away."""
    work = asyncio.ensure_future(generation.finish())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        work.cancel()
    if not work.done():
        raise RequestError("the client went away", status=499)
    work.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error.body(), status_code=error.status)
