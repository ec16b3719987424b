"""Which rollouts a step consumed, and which saw weights that no longer exist. Kept in the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from uuid import uuid4

from agentlightning.errors import NotFound
from agentlightning.store import Store
from agentlightning.trainer.checkpoint import Progress
from agentlightning.types import Event

_LOST = "lost_rollouts"
_RESUMES = "resumes"


class Ledger:
    """The books of a run. A checkpoint is the truth; the store's books follow it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def next_lineage(self) -> int:
        """A number that no earlier part of the run used: resumes may follow one checkpoint."""
        number = int(await self._store.setting(_RESUMES) or 0) + 1
        await self._store.set_setting(_RESUMES, number)
        return number

    async def lost(self, progress: Progress) -> frozenset[str]:
        """The rollouts that sampled from weights newer than the checkpoint's, now or at an
        earlier resume (version numbers are used again, so the store remembers them). Those that
        still run are cancelled."""
        known = frozenset(await self._store.setting(_LOST) or [])
        lost, after = set[str](), None
        while page := await self._store.list_rollouts(after=after, limit=500):
            after = page[-1].rollout_id
            for rollout in page:
                if rollout.rollout_id in known or rollout.rollout_id in progress.consumed:
                    continue
                if await self._newest_version(rollout.rollout_id) > progress.policy_version:
                    await self._store.cancel(rollout.rollout_id)
                    lost.add(rollout.rollout_id)
        await self._store.set_setting(_LOST, sorted(known | lost))
        return known | lost

    async def give_up(self, rollout_ids: Iterable[str]) -> None:
        """A resumed run makes these anew, as it does those of lost weights."""
        known = set(await self._store.setting(_LOST) or [])
        await self._store.set_setting(_LOST, sorted(known.union(rollout_ids)))

    async def record_consumed(self, progress: Progress, *, since: int) -> None:
        """Says with each rollout that a step after ``since`` consumed which step that was. May
        be repeated: a rollout gets one such event, and one that was deleted gets none."""
        recent = [item for item in progress.consumed.items() if item[1] > since]
        await asyncio.gather(*(self._record(*item) for item in recent))

    async def _record(self, rollout_id: str, step: int) -> None:
        try:
            rollout = await self._store.get_rollout(rollout_id)
        except NotFound:
            return
        event = Event(
            uuid4().hex,
            rollout_id,
            rollout.attempt_id or "",
            "trained",
            {"step": step},
            time.time(),
        )
        await self._store.add_event(event, idempotency_key=f"trained-{rollout_id}")

    async def _newest_version(self, rollout_id: str) -> int:
        calls = await self._store.calls(rollout_id)
        return max((call.version_end or 0 for call in calls), default=0)
