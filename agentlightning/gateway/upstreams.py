"""Which model server a call goes to.

A rollout stays with one server, whose prefix cache knows its history, as long as the load
stays even. Servers live in the store; what is cached here is at most a second old, and is
read anew at once after a change that went through this process.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Collection

from agentlightning.errors import NoUpstream
from agentlightning.store import Store
from agentlightning.types import ModelServer

_FRESH_SECONDS = 1.0
_POLL_SECONDS = 0.1
_PINS = 65_536
"""Rollouts whose server is remembered; the longest unused is forgotten first."""

_SLACK = 4
"""Calls that a pinned server may have in flight beyond twice those of the idlest one."""


class Upstreams:
    """The registered model servers, with the calls in flight on each."""

    def __init__(self, store: Store, *, wait: float) -> None:
        self._store = store
        self._wait = wait
        self._servers: list[ModelServer] = []
        self._loaded_at = float("-inf")
        self._change = 0
        self._lock = asyncio.Lock()
        self._in_flight: Counter[str] = Counter()
        self._pins: OrderedDict[str, str] = OrderedDict()
        self._pinned: Counter[str] = Counter()

    def expire(self) -> None:
        """The servers changed: the next look reads them from the store."""
        self._change += 1
        self._loaded_at = float("-inf")

    async def servers(self) -> list[ModelServer]:
        """All registered servers."""
        if time.monotonic() - self._loaded_at > _FRESH_SECONDS:
            async with self._lock:
                while time.monotonic() - self._loaded_at > _FRESH_SECONDS:
                    change = self._change
                    self._servers = await self._store.model_servers()
                    if change == self._change:
                        self._loaded_at = time.monotonic()
        return self._servers

    async def candidates(self, model: str) -> list[ModelServer]:
        """The servers of the policy ``model``, or all where it is no policy's name; waits a
        bounded time for one to be registered, then raises NoUpstream."""
        deadline = time.monotonic() + self._wait
        while True:
            servers = await self.servers()
            if servers:
                return [s for s in servers if s.model == model] or servers
            if time.monotonic() >= deadline:
                raise NoUpstream(
                    f"No model server is registered (waited {self._wait:g} s). "
                    "Register one with POST /api/models."
                )
            await asyncio.sleep(_POLL_SECONDS)
            self.expire()

    def acquire(
        self, servers: Collection[ModelServer], rollout_id: str, *, avoid: str | None = None
    ) -> ModelServer:
        """The server for a rollout's next call, which now counts as in flight on it."""
        usable = [s for s in servers if s.endpoint != avoid] or list(servers)
        idlest = min(usable, key=lambda s: (self._in_flight[s.endpoint], self._pinned[s.endpoint]))
        pinned = next((s for s in usable if s.endpoint == self._pins.get(rollout_id)), None)
        limit = 2 * self._in_flight[idlest.endpoint] + _SLACK
        chosen = pinned if pinned and self._in_flight[pinned.endpoint] < limit else idlest
        self._pin(rollout_id, chosen.endpoint)
        self._in_flight[chosen.endpoint] += 1
        return chosen

    def release(self, server: ModelServer) -> None:
        """The call on ``server`` has ended."""
        self._in_flight[server.endpoint] -= 1
        if not self._in_flight[server.endpoint]:
            del self._in_flight[server.endpoint]

    def version(self, endpoint: str) -> int | None:
        """The version that an endpoint is known to serve now."""
        return next((s.version for s in self._servers if s.endpoint == endpoint), None)

    def _pin(self, rollout_id: str, endpoint: str) -> None:
        before = self._pins.pop(rollout_id, None)
        self._pins[rollout_id] = endpoint
        if before == endpoint:
            return
        if before is None and len(self._pins) > _PINS:
            before = self._pins.popitem(last=False)[1]
        if before is not None:
            self._pinned[before] -= 1
        self._pinned[endpoint] += 1
