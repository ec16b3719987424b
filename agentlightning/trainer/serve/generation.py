"""The answers to one request as they grow: what the engine drew, and the text and calls of it."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentlightning.errors import ServiceError
from agentlightning.trainer.serve import prompts as checks
from agentlightning.trainer.serve.engine import Engine, Step
from agentlightning.trainer.serve.engine import Sequence as EngineSequence
from agentlightning.trainer.serve.prompts import ServedModel
from agentlightning.trainer.serve.requests import GenerationRequest, RequestError
from agentlightning.trainer.serve.sampler import Drawn
from agentlightning.trainer.serve.text import TextStream
from agentlightning.trainer.serve.tools import ToolCall, ToolCallParser


@dataclass(frozen=True, slots=True)
class Growth:
    """What some steps of a choice drew, the text and calls that this completed, and its end."""

    drawn: tuple[Drawn, ...]
    text: str
    calls: tuple[ToolCall, ...]
    finish: str | None


class Choice:
    """Collects the steps of one sequence.

    Example of ``weight_versions``: ``[{"version": 0, "start": 0, "end": 55}]``.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, tools: bool = False) -> None:
        self._text = TextStream(tokenizer, stops)
        self._tools = ToolCallParser() if tools else None
        self._growths: list[Growth] = []
        self.weight_versions: list[dict[str, int]] = []
        self.tokens = 0

    def add(self, step: Step) -> Growth:
        """Takes a step in; the choice may end before its sequence, at a stop string."""
        text = "" if step.drawn is None else self._take(step.drawn, step.version)
        finish = "stop" if self._text.stopped else step.finish
        if finish:
            text += self._text.finish()
        calls: tuple[ToolCall, ...] = ()
        if self._tools:
            text, calls = self._tools.push(text, last=finish is not None)
            if finish == "stop" and self._tools.calls:
                finish = "tool_calls"
        growth = Growth(() if step.drawn is None else (step.drawn,), text, calls, finish)
        self._growths.append(growth)
        return growth

    def whole(self) -> Growth:
        """All that was added so far."""
        return Growth(
            tuple(drawn for growth in self._growths for drawn in growth.drawn),
            "".join(growth.text for growth in self._growths),
            tuple(call for growth in self._growths for call in growth.calls),
            self._growths[-1].finish if self._growths else None,
        )

    def _take(self, drawn: Drawn, version: int) -> str:
        if not self.weight_versions or self.weight_versions[-1]["version"] != version:
            self.weight_versions.append({"version": version, "start": self.tokens})
        self.tokens += 1
        self.weight_versions[-1]["end"] = self.tokens
        return self._text.push(drawn.token)


class Generation:
    """All choices of one request: ``n`` for each prompt, in the order of the prompts.

    Raises RequestError where the request cannot be served; nothing was submitted then.
    """

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        *,
        request: GenerationRequest,
        prompts: Sequence[list[int]],
        tools: bool = False,
    ) -> None:
        checks.check(model, request)
        limits = [checks.token_limit(model, prompt, request.limit) for prompt in prompts]
        self._engine, self._count = engine, request.n or 1
        self._steps: asyncio.Queue[tuple[int, Step]] = asyncio.Queue()
        self.request, self.prompts = request, prompts
        total = len(prompts) * self._count
        self.choices = [Choice(model.tokenizer, request.stops, tools=tools) for _ in range(total)]
        seed = secrets.randbits(64) if request.seed is None else request.seed
        eos = frozenset() if request.ignore_eos else model.eos_ids
        self._sequences = [
            EngineSequence(
                prompt=np.array(self.prompt_of(index), np.int32),
                sampling=request.sampling(),
                rng=random.Random(f"{seed}/{index}"),
                max_tokens=limits[index // self._count],
                stop_ids=eos | frozenset(request.stop_token_ids or ()),
                on_step=self._receiver(index),
            )
            for index in range(total)
        ]
        try:
            for sequence in self._sequences:
                engine.submit(sequence)
        except ServiceError as error:
            raise RequestError(str(error), status=503) from error

    def prompt_of(self, index: int) -> list[int]:
        return self.prompts[index // self._count]

    async def growths(self) -> AsyncIterator[tuple[int, Growth]]:
        """What each step adds, until all choices have ended. Leaving early aborts the rest."""
        open_choices = set(range(len(self.choices)))
        try:
            while open_choices:
                index, step = await self._steps.get()
                if index not in open_choices:
                    continue  # a stop string ended it before the engine knew
                growth = self.choices[index].add(step)
                if growth.finish:
                    open_choices.discard(index)
                    self._engine.abort(self._sequences[index])
                yield index, growth
        finally:
            for index in open_choices:
                self._engine.abort(self._sequences[index])

    async def finish(self) -> None:
        """Waits until all choices have ended; RequestError where the engine failed."""
        async for _, growth in self.growths():
            if growth.finish == "error":
                raise RequestError(ENGINE_FAILED, status=500)

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(prompt) for prompt in self.prompts)
        completion = sum(choice.tokens for choice in self.choices)
        cached = sum(sequence.cached for sequence in self._sequences[:: self._count])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _receiver(self, index: int) -> Any:
        loop = asyncio.get_running_loop()

        def receive(step: Step) -> None:
            loop.call_soon_threadsafe(self._steps.put_nowait, (index, step))

        return receive


ENGINE_FAILED = "the engine failed; see the server's log"
