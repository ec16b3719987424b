"""Whether an attempt may make calls.

What the store said is remembered for a moment: a change that went through this process is
seen by the next call, one that another process made within ``FRESH_SECONDS``. A call in that
gap is recorded with its own attempt all the same, so nothing mixes.
"""

from __future__ import annotations

import time

from agentlightning.address import AttemptAddress
from agentlightning.errors import Conflict, NotFound, StoreError
from agentlightning.gateway.refusal import Refusal
from agentlightning.store import Store
from agentlightning.types import Rollout

FRESH_SECONDS = 0.25


class Attempts:
    """The attempts that are under way."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._checked: dict[tuple[str, str], float] = {}
        self._change = 0

    def expire(self) -> None:
        """A rollout may have changed: the next call of each asks the store."""
        self._change += 1
        self._checked.clear()

    async def check(self, address: AttemptAddress, *, ask: bool = False) -> None:
        """Refusal where the rollout is unknown or has ended, or another attempt is current.
        A rollout that no controller claimed is opened by its first call. ``ask``: the store is
        asked in any case."""
        key = (address.rollout_id, address.attempt_id)
        now = time.monotonic()
        if not ask and now - self._checked.get(key, float("-inf")) < FRESH_SECONDS:
            return
        change = self._change
        _require_current(await self._current(address), address)
        if change == self._change:
            self._forget_old(now)
            self._checked.pop(key, None)
            self._checked[key] = now

    async def _current(self, address: AttemptAddress) -> Rollout:
        rollout_id, attempt_id = address.rollout_id, address.attempt_id
        try:
            rollout = await self._store.get_rollout(rollout_id)
            if not rollout.terminal and rollout.attempt_id != attempt_id and rollout.owner is None:
                rollout = await self._store.open_attempt(rollout_id, attempt_id)
        except NotFound as error:
            raise Refusal(404, "unknown_rollout", f"There is no rollout {rollout_id!r}.") from error
        except Conflict as error:
            raise Refusal(409, "attempt_over", str(error)) from error
        except StoreError as error:
            raise Refusal(503, "store_unavailable", str(error), fault="gateway") from error
        return rollout

    def _forget_old(self, now: float) -> None:
        """The oldest come first: a re-checked attempt goes to the end."""
        while self._checked:
            key, checked = next(iter(self._checked.items()))
            if now - checked < FRESH_SECONDS:
                return
            del self._checked[key]


def _require_current(rollout: Rollout, address: AttemptAddress) -> None:
    if rollout.terminal:
        text = f"Rollout {rollout.rollout_id!r} has ended ({rollout.state}): no more calls."
        raise Refusal(409, "rollout_ended", text)
    if rollout.attempt_id != address.attempt_id:
        text = f"Attempt {address.attempt_id!r} is over: {rollout.attempt_id!r} is the current one."
        raise Refusal(409, "attempt_over", text)
