"""The part of a store that the gateway's proxy uses, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentlightning.errors import Conflict, NotFound
from agentlightning.types import Call, Json, ModelServer, RawCall, Rollout


class MemoryStore:
    def __init__(self) -> None:
        self.rollouts: dict[str, Rollout] = {}
        self.recorded: dict[str, tuple[Call, RawCall]] = {}
        self.servers: list[ModelServer] = []
        self.settings: dict[str, Json] = {}

    async def add_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        for rollout in rollouts:
            self.rollouts.setdefault(rollout.rollout_id, rollout)
        return list(rollouts)

    async def get_rollout(self, rollout_id: str) -> Rollout:
        try:
            return self.rollouts[rollout_id]
        except KeyError:
            raise NotFound(f"no rollout {rollout_id}") from None

    async def open_attempt(self, rollout_id: str, attempt_id: str) -> Rollout:
        rollout = await self.get_rollout(rollout_id)
        if rollout.terminal:
            raise Conflict("ended")
        rollout = replace(rollout, state="running", attempt_id=attempt_id, attempt=1)
        self.rollouts[rollout_id] = rollout
        return rollout

    async def cancel(self, rollout_id: str) -> Rollout:
        self.rollouts[rollout_id] = replace(self.rollouts[rollout_id], state="cancelled")
        return self.rollouts[rollout_id]

    async def add_call(self, call: Call, raw: RawCall) -> Call:
        call = replace(call, sequence=len(self.recorded))
        self.recorded[call.call_id] = (call, raw)
        return call

    async def mark_undelivered(self, call_id: str, reason: str) -> None:
        call, raw = self.recorded[call_id]
        call = replace(call, status="undelivered", trainable=False, reason=reason)
        self.recorded[call_id] = (call, raw)

    async def calls(self, rollout_id: str, *, attempt_id: str | None = None) -> list[Call]:  # noqa: ARG002
        return [c for c, _ in self.recorded.values() if c.rollout_id == rollout_id]

    async def raw_call(self, call_id: str) -> RawCall:
        return self.recorded[call_id][1]

    async def set_model_servers(
        self,
        servers: Sequence[ModelServer],
        *,
        owner: str | None = None,  # noqa: ARG002
    ) -> None:
        self.servers = list(servers)

    async def model_servers(self) -> list[ModelServer]:
        return self.servers

    async def set_setting(self, name: str, value: Json) -> None:
        self.settings[name] = value

    async def setting(self, name: str) -> Json:
        return self.settings.get(name)

    async def close(self) -> None:
        pass
