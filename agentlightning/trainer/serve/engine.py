"""Continuous batching: sequences join, advance by one token a step, and leave.

One thread owns the model. Everything that others want of it (submit, abort, new weights) is
put on a queue and done between steps, so nothing here needs a lock.

A sequence is its ids and how many of them are computed. One with more than one id to
compute is in its prompt; preempting one is setting ``computed`` to 0 and letting it wait.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentlightning.errors import ServiceError
from agentlightning.trainer.serve.cache import Ids, PrefixCache, Rows, common_prefix
from agentlightning.trainer.serve.runner import ModelRunner, Segment
from agentlightning.trainer.serve.sampler import Drawn, Sampling, draw

logger = logging.getLogger(__name__)

_STEP_TOKENS = 1024
"""Prompt tokens computed in one step: bounds how long decoded sequences wait for prompts."""

_WORTH_WAITING = 16
"""Tokens that a prompt must share with one being computed to wait for it."""


@dataclass(frozen=True, slots=True)
class Step:
    """What happened to a sequence: a token, its end, or both. ``finish`` is None, ``stop``,
    ``length``, ``abort`` or ``error``."""

    drawn: Drawn | None
    version: int
    finish: str | None = None


@dataclass(eq=False)
class Sequence:
    """One answer being sampled. ``on_step`` is called in the engine's thread."""

    prompt: Ids
    sampling: Sampling
    rng: random.Random
    max_tokens: int
    stop_ids: frozenset[int]
    on_step: Callable[[Step], None]
    output: list[int] = field(default_factory=list)
    rows: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    computed: int = 0
    cached: int = 0
    cache_version: int = -1
    done: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def ids(self, start: int, stop: int) -> Ids:
        """Ids ``[start, stop)`` of prompt and output together."""
        split = len(self.prompt)
        if start >= split:
            return np.array(self.output[start - split : stop - split], np.int32)
        tail = np.array(self.output[: max(0, stop - split)], np.int32)
        return np.concatenate((self.prompt[start:stop], tail))


@dataclass
class EngineStats:
    """Counters since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class Engine:
    """Samples for many requests at once. Start it with :meth:`start`, end it with
    :meth:`close`."""

    def __init__(
        self, runner: ModelRunner, *, cache_tokens: int, max_running: int, version: int = 0
    ) -> None:
        self._runner = runner
        self._cache = PrefixCache(cache_tokens)
        self._max_running = max_running
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="model engine", daemon=True)
        self.version = version
        self.stats = EngineStats()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def rows_used(self) -> int:
        """Rows of the pool that are not free."""
        return self._cache.size - self._cache.pool.free_count

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 30.0) -> None:
        """Ends the thread after its current step; open sequences end with ``abort``."""
        self._commands.put(self._begin_close)
        self._thread.join(timeout)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence; its steps arrive at ``on_step``. Any thread."""
        if not self.alive:
            raise ServiceError("model server: the engine has ended; see its log. Restart it.")
        self._commands.put(lambda: self._waiting.append(sequence))

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence after the current step; does nothing to one that has ended."""
        self._commands.put(lambda: self._end(sequence, "abort"))

    def update_weights(self, folder: Path, version: int) -> Future[None]:
        """Serves the weights of ``folder`` as ``version`` from the next step on.

        Loading happens in the caller's thread, beside the sampling; only the copy is made
        between two steps. Raises ModelError, or puts it into the future; then nothing has
        changed.
        """
        source = self._runner.load_aside(folder)
        return self._between_steps(lambda: self._swap(source, version))

    def _between_steps(self, work: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()

        def command() -> None:
            try:
                work()
            except Exception as error:  # handed to whoever waits for the future
                future.set_exception(error)
            else:
                future.set_result(None)

        self._commands.put(command)
        return future

    def _swap(self, source: Any, version: int) -> None:
        self._runner.copy_weights(source)
        self.version = version
        self._cache.clear()
        logger.info("serving weights of version %d", version)

    def _begin_close(self) -> None:
        self._closing = True

    def _run(self) -> None:
        try:
            while not self._closing:
                self._do_commands()
                self._step()
        finally:
            # Also after an exception: nobody may wait for a token that never comes.
            finish = "abort" if self._closing else "error"
            self._closing = True
            for sequence in [*self._running, *self._waiting]:
                self._end(sequence, finish)

    def _do_commands(self) -> None:
        """Does what is queued; waits for something to do where there is nothing."""
        idle = not self._running and not self._waiting
        try:
            while True:
                self._commands.get(block=idle)()
                idle = False
        except queue.Empty:
            return

    def _step(self) -> None:
        self._admit()
        batch = self._plan()
        if not batch:
            return
        segments = [Segment(s.ids(s.computed, stop), s.rows[:stop]) for s, stop in batch]
        logits = self._runner.forward(segments)
        self.stats.steps += 1
        sampled = []
        for index, (sequence, stop) in enumerate(batch):
            self._computed(sequence, stop)
            if stop == sequence.length:
                sampled.append((index, sequence))
        if not sampled:
            return
        rows = [index for index, _ in sampled]
        drawn = draw(
            logits if len(rows) == len(batch) else logits[rows],
            [s.sampling for _, s in sampled],
            [s.rng.random() for _, s in sampled],
        )
        for (_, sequence), token in zip(sampled, drawn, strict=True):
            self._append(sequence, token)

    def _computed(self, sequence: Sequence, stop: int) -> None:
        in_prompt = sequence.computed < len(sequence.prompt)
        sequence.computed = stop
        if in_prompt and stop >= len(sequence.prompt):
            self._remember(sequence)

    def _append(self, sequence: Sequence, drawn: Drawn) -> None:
        sequence.output.append(drawn.token)
        self.stats.generated_tokens += 1
        finish = None
        if drawn.token in sequence.stop_ids:
            finish = "stop"
        elif len(sequence.output) >= sequence.max_tokens:
            finish = "length"
        if finish:
            self._end(sequence, finish, drawn)
        else:
            sequence.on_step(Step(drawn, self.version))

    def _end(self, sequence: Sequence, finish: str, drawn: Drawn | None = None) -> None:
        if sequence.done:
            return
        sequence.done = True
        self._remember(sequence)
        self._leave(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self.stats.finished[finish] = self.stats.finished.get(finish, 0) + 1
        sequence.on_step(Step(drawn, self.version, finish))

    def _remember(self, sequence: Sequence) -> None:
        """Keys and values of older weights are never offered to others."""
        if sequence.cache_version == self.version and sequence.computed:
            count = sequence.computed
            self._cache.insert(sequence.ids(0, count), sequence.rows[:count])

    def _leave(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        self._cache.release(sequence.rows)
        sequence.rows = np.empty(0, np.int64)
        sequence.computed = 0

    def _admit(self) -> None:
        for sequence in list(self._waiting):
            if len(self._running) >= self._max_running:
                return
            rows = self._cache.match(sequence.ids(0, sequence.length - 1))
            if self._shares_with_one_in_prompt(sequence, len(rows)):
                self._cache.release(rows)
                continue
            new = self._cache.allocate(sequence.length - len(rows))
            if new is None:
                self._cache.release(rows)
                return
            sequence.rows = np.concatenate((rows, new))
            sequence.computed = sequence.cached = len(rows)
            sequence.cache_version = self.version
            self.stats.prompt_tokens += sequence.length
            self.stats.cached_prompt_tokens += len(rows)
            self._waiting.remove(sequence)
            self._running.append(sequence)

    def _shares_with_one_in_prompt(self, sequence: Sequence, cached: int) -> bool:
        """Whether waiting gets more of the prompt from the cache: equal prompts that arrive
        together are computed once."""
        return any(
            other.computed < len(other.prompt)
            and common_prefix(other.prompt, sequence.prompt[:-1]) >= cached + _WORTH_WAITING
            for other in self._running
        )

    def _plan(self) -> list[tuple[Sequence, int]]:
        """Which sequences advance in this step, and up to which length they are computed."""
        batch: list[tuple[Sequence, int]] = []
        budget = _STEP_TOKENS
        for sequence in list(self._running):
            if sequence not in self._running or not self._make_room(sequence):
                continue
            missing = sequence.length - sequence.computed
            count = 1 if missing == 1 else min(missing, budget)
            if missing > 1:
                budget -= count
            if count:
                batch.append((sequence, sequence.computed + count))
        return [(s, stop) for s, stop in batch if s.rows.size]

    def _make_room(self, sequence: Sequence) -> bool:
        """Rows for all ids of ``sequence``, preempting the youngest where there are none."""
        while len(sequence.rows) < sequence.length:
            new = self._cache.allocate(sequence.length - len(sequence.rows))
            if new is not None:
                sequence.rows = np.concatenate((sequence.rows, new))
                return True
            youngest = self._running[-1]
            self._remember(youngest)
            self._leave(youngest)
            self._waiting.appendleft(youngest)
            self.stats.preemptions += 1
            if youngest is sequence:
                return False
        return True
