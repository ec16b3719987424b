"""Lets calls through, or holds them while the gateway is paused.

A held call is one waiting coroutine: it costs no thread and leaves no trace if its agent
gives up. The pause is kept in the store, so that a restarted gateway comes back paused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Literal

from agentlightning.gateway.client import Client
from agentlightning.gateway.refusal import Refusal
from agentlightning.store import Store
from agentlightning.types import Json

_SETTING = "gateway.pause"


@dataclass(frozen=True, slots=True)
class Pause:
    """Why and how calls wait. ``hold`` lets them wait, ``refuse`` answers 429 at once.

    Example:
        >>> Pause(reason="new weights").mode
        'hold'
    """

    retry_after_seconds: float = 5.0
    reason: str = ""
    mode: Literal["hold", "refuse"] = "hold"


@dataclass(frozen=True, slots=True)
class InFlight:
    """A call that has been let through and has not ended."""

    rollout_id: str
    attempt_id: str
    started_at: float


class Gate:
    """Counts the calls that are held and those in flight."""

    def __init__(self, store: Store, *, hold_limit: float) -> None:
        self.held = 0
        self._store = store
        self._hold_limit = hold_limit
        self._pause: Pause | None = None
        self._in_flight: dict[str, InFlight] = {}
        self._opened = asyncio.Event()
        self._idle = asyncio.Event()
        self._opened.set()
        self._idle.set()

    @property
    def inflight(self) -> int:
        return len(self._in_flight)

    async def restore(self) -> None:
        """Takes up the pause that the store remembers."""
        known = await self._store.setting(_SETTING)
        self._set(Pause(**known) if known else None)

    async def pause(self, pause: Pause) -> None:
        """No call is let through from now on."""
        self._set(pause)
        await self._store.set_setting(_SETTING, asdict(pause))

    async def resume(self) -> None:
        """Lets the held calls go, all at once."""
        await self._store.set_setting(_SETTING, None)
        self._set(None)

    def state(self) -> dict[str, Json]:
        """The body of ``GET /proxy/state``."""
        pause = self._pause or Pause()
        return {
            "paused": self._pause is not None,
            "retry_after_seconds": pause.retry_after_seconds if self._pause else None,
            "reason": pause.reason if self._pause else None,
            "inflight": self.inflight,
            "held": self.held,
        }

    async def drain(self, timeout: float) -> Mapping[str, Json]:
        """Waits until nothing is in flight, or says after ``timeout`` s what still is."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        calls = [{"call_id": call_id, **asdict(c)} for call_id, c in self._in_flight.items()]
        return {"drained": not calls, "inflight": len(calls), "calls": calls}

    @asynccontextmanager
    async def admit(self, client: Client, call_id: str, call: InFlight) -> AsyncIterator[bool]:
        """The call is in flight within this block; the value says whether it was held."""
        held = self._pause is not None
        if held:
            await self._hold(client)
        self._in_flight[call_id] = call
        self._idle.clear()
        try:
            yield held
        finally:
            del self._in_flight[call_id]
            if not self._in_flight:
                self._idle.set()

    async def _hold(self, client: Client) -> None:
        deadline = time.monotonic() + self._hold_limit
        self.held += 1
        try:
            while self._pause is not None:
                if self._pause.mode == "refuse":
                    raise _refusal(429, self._pause)
                with client.interruptible():
                    await asyncio.wait_for(self._opened.wait(), deadline - time.monotonic())
        except asyncio.TimeoutError:
            raise _refusal(503, self._pause or Pause()) from None
        finally:
            self.held -= 1

    def _set(self, pause: Pause | None) -> None:
        self._pause = pause
        self._opened.set()
        if pause is not None and pause.mode == "hold":
            self._opened.clear()


def _refusal(status: int, pause: Pause) -> Refusal:
    seconds = str(max(1, round(pause.retry_after_seconds)))
    reason = f" ({pause.reason})" if pause.reason else ""
    return Refusal(
        status,
        "paused",
        f"The gateway is paused{reason}. Try again in {seconds} s.",
        fault="gateway",
        headers={"Retry-After": seconds, "X-Agl-Paused": "true"},
    )
