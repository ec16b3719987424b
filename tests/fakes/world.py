"""A controller and its agents without processes: takes rollouts from a store and ends them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from agentlightning.store import Store
from agentlightning.store.protocol import Transition
from agentlightning.trainer.policy import Policy
from agentlightning.trainer.statistics import Estimate
from agentlightning.types import (
    Call,
    Completion,
    Event,
    ModelServer,
    Outcome,
    RawCall,
    Rollout,
    float_array,
    token_array,
)

Reward = Callable[[Rollout], "float | None"]


class FakePublisher:
    """Says in the store which version is served, as the real one does, and notes the order."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.log: list[str] = []

    async def announce(self, version: int) -> None:
        self.log.append(f"announce {version}")
        await self._store.set_model_servers([ModelServer("policy", "http://m/v1", version)])

    async def publish(self, policy: Policy, version: int) -> None:  # noqa: ARG002
        await self.announce(version)

    async def pause(self) -> None:
        self.log.append("pause")

    async def resume(self) -> None:
        self.log.append("resume")


class Notes:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, Any]] = []
        self.validations: list[tuple[str, Estimate]] = []
        self.warnings: list[str] = []

    def phase(self, name: str, done: int, total: int) -> None: ...

    def step(self, line: Mapping[str, Any]) -> None:
        self.steps.append(line)

    def validation(self, name: str, reward: Estimate) -> None:
        self.validations.append((name, reward))

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@asynccontextmanager
async def agents(store: Store, reward: Reward, *, calls: bool = True) -> AsyncIterator[None]:
    """While the block runs, every queued rollout is run: one call, the reward, the end."""
    task = asyncio.create_task(_work(store, reward, calls))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _work(store: Store, reward: Reward, calls: bool) -> None:
    while True:
        for rollout in await store.claim("world", limit=100, lease_seconds=60, wait=5):
            await run_one(store, rollout, reward(rollout), calls=calls)


async def run_one(
    store: Store,
    rollout: Rollout,
    value: float | None,
    *,
    calls: bool = True,
    outcome: Outcome | None = None,
) -> None:
    """Runs a claimed rollout to its end."""
    assert rollout.attempt_id is not None
    if calls:
        await store.add_call(await one_call(store, rollout), RawCall(b"{}", b"{}"))
    if value is not None:
        event = Event(
            uuid.uuid4().hex, rollout.rollout_id, rollout.attempt_id, "reward", {"value": value}
        )
        await store.add_event(event)
    state = "succeeded" if outcome is None else "failed"
    outcome = outcome or Outcome("completed")
    end = Transition(
        to=state,
        attempt_id=rollout.attempt_id,
        outcome=outcome,
        error_message=outcome.message,
    )
    await store.transition(rollout.rollout_id, end)


async def one_call(store: Store, rollout: Rollout) -> Call:
    """A call sampled from the version that is served now."""
    servers = await store.model_servers()
    version = servers[0].version if servers else 0
    return Call(
        uuid.uuid4().hex,
        rollout.rollout_id,
        rollout.attempt_id or "",
        prompt_ids=token_array([1, 2, 3]),
        completions=(Completion(token_array([4, 5]), float_array([-0.5, -0.25]), "stop"),),
        version_start=version,
        version_end=version,
        prompt_tokens=3,
        completion_tokens=2,
    )
