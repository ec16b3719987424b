"""A store in memory: the controller's part of the protocol, and leases that a test can end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from agentlightning.errors import Conflict, NotFound
from agentlightning.store.protocol import Transition
from agentlightning.types import (
    ALLOWED_TRANSITIONS,
    Call,
    Event,
    Outcome,
    RawCall,
    Rollout,
)


class MemoryStore:
    def __init__(self) -> None:
        self.rollouts: dict[str, Rollout] = {}
        self.lost: list[tuple[str, Outcome]] = []
        self.recorded: list[tuple[Call, RawCall]] = []
        self.posted: list[Event] = []
        self._keys: set[str | None] = {None}
        self._changed = asyncio.Condition()

    async def add_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        for rollout in rollouts:
            await self._put(rollout)
        return list(rollouts)

    async def get_rollout(self, rollout_id: str) -> Rollout:
        if rollout_id not in self.rollouts:
            raise NotFound(rollout_id)
        return self.rollouts[rollout_id]

    async def until(self, condition: Callable[[dict[str, Rollout]], bool]) -> None:
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: condition(self.rollouts)), 30)

    async def until_ended(self, *rollout_ids: str) -> list[Rollout]:
        await self.until(lambda all_: all(all_[each].terminal for each in rollout_ids))
        return [self.rollouts[each] for each in rollout_ids]

    async def cancel(self, rollout_id: str) -> Rollout:
        rollout = replace(self.rollouts[rollout_id], outcome=Outcome("cancelled"))
        return await self._put(replace(rollout, state="cancelled", owner=None, lease_until=None))

    async def transition(self, rollout_id: str, change: Transition) -> Rollout:
        rollout = await self._mine(rollout_id, change.owner, change.attempt_id)
        if change.to and change.to not in ALLOWED_TRANSITIONS[rollout.state]:
            raise Conflict(f"{rollout.state} to {change.to}")
        return await self._put(
            replace(
                rollout,
                state=change.to or rollout.state,
                outcome=change.outcome,
                error_message=change.error_message,
                owner=None,
                lease_until=None,
                ended_at=time.time(),
            )
        )

    async def claim(
        self, owner: str, *, limit: int, lease_seconds: float, wait: float = 0
    ) -> list[Rollout]:
        end = time.monotonic() + wait
        while True:
            taken = [
                await self._begin(each, owner, lease_seconds)
                for each in [r for r in self.rollouts.values() if self._free(r)][:limit]
            ]
            if taken or time.monotonic() >= end:
                return taken
            async with self._changed:
                try:
                    # Short: a lease ends without anybody telling.
                    await asyncio.wait_for(self._changed.wait(), 0.05)
                except asyncio.TimeoutError:
                    continue

    async def renew(
        self, owner: str, rollout_ids: Sequence[str], *, lease_seconds: float
    ) -> list[Rollout]:
        held = [self.rollouts[each] for each in rollout_ids if each in self.rollouts]
        return [
            await self._put(replace(each, lease_until=time.time() + lease_seconds))
            for each in held
            if each.owner == owner and each.state == "running"
        ]

    async def retry(
        self,
        rollout_id: str,
        *,
        owner: str,
        attempt_id: str,
        outcome: Outcome,
        lease_seconds: float,
    ) -> Rollout:
        rollout = await self._mine(rollout_id, owner, attempt_id)
        if rollout.attempt >= rollout.config.get("max_attempts", 2):
            raise Conflict("no attempt is left")
        self.lost.append((attempt_id, outcome))
        return await self._begin(rollout, owner, lease_seconds)

    async def calls(self, rollout_id: str, *, attempt_id: str | None = None) -> list[Call]:
        return [
            c for c, _ in self.recorded if (c.rollout_id, c.attempt_id) == (rollout_id, attempt_id)
        ]

    async def raw_call(self, call_id: str) -> RawCall:
        return next(raw for call, raw in self.recorded if call.call_id == call_id)

    async def add_event(self, event: Event, *, idempotency_key: str | None = None) -> Event:
        if idempotency_key is None or idempotency_key not in self._keys:
            self._keys.add(idempotency_key)
            self.posted.append(event)
            rollout = self.rollouts[event.rollout_id]
            await self._put(replace(rollout, reward=float(event.data["value"])))
        return event

    async def _mine(self, rollout_id: str, owner: str | None, attempt_id: str | None) -> Rollout:
        rollout = await self.get_rollout(rollout_id)
        if (rollout.owner, rollout.attempt_id) != (owner, attempt_id):
            raise Conflict(f"{rollout_id} is held by {rollout.owner}")
        return rollout

    def _free(self, rollout: Rollout) -> bool:
        lease = rollout.lease_until
        expired = rollout.state == "running" and lease is not None and lease < time.time()
        return rollout.state == "queuing" or expired

    async def _begin(self, rollout: Rollout, owner: str, lease_seconds: float) -> Rollout:
        number = rollout.attempt + 1
        return await self._put(
            replace(
                rollout,
                state="running",
                owner=owner,
                attempt=number,
                attempt_id=f"{rollout.rollout_id}-{number}",
                lease_until=time.time() + lease_seconds,
            )
        )

    async def _put(self, rollout: Rollout) -> Rollout:
        async with self._changed:
            self.rollouts[rollout.rollout_id] = rollout
            self._changed.notify_all()
        return rollout
