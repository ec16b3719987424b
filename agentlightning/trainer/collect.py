"""Rollouts out, finished groups back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentlightning.errors import NotFound, TrainerError
from agentlightning.samples import SampleSet, build_samples
from agentlightning.store import Store
from agentlightning.trainer.tasks import Task
from agentlightning.types import Call, Json, Mode, Rollout

_POLL_SECONDS = 5.0

OnProgress = Callable[[int, int], None]
"""Called with how many rollouts of how many have ended."""


@dataclass(frozen=True, slots=True)
class Collected:
    """A finished rollout with its calls and what could be trained of it."""

    rollout: Rollout
    calls: Sequence[Call]
    samples: SampleSet


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group that is wanted: which task, how many rollouts."""

    group_id: str
    task: Task
    mode: Mode
    size: int


@dataclass
class Collector:
    """Creates the rollouts of groups, waits for their ends, reads what they did.

    Rollouts of a group that are in the store already (a resumed run) are adopted, unless
    they are in ``lost``: those saw weights that no longer exist. ``launch`` is the launch spec
    that every rollout gets. ``wait`` bounds the waiting for one set of groups, in seconds.
    """

    store: Store
    launch: Mapping[str, Json]
    wait: float
    lineage: int = 0
    max_sample_tokens: int | None = None
    lost: frozenset[str] = frozenset()
    _position: int = field(default=0, init=False)

    async def collect(
        self, plans: Sequence[GroupPlan], on_progress: OnProgress
    ) -> list[list[Collected]]:
        """The groups, whole, in the order of ``plans``."""
        present = await self._present(plans)
        groups, new = [], []
        for plan in plans:
            known = present.get(plan.group_id, [])[: plan.size]
            missing = [self._rollout(plan, n) for n in range(len(known), plan.size)]
            groups.append(known + missing)
            new += missing
        if new:
            await self.store.add_rollouts(new)
        finished = await self._finished([r for group in groups for r in group], on_progress)
        return await self._read_all(groups, finished)

    async def recorded(self, plans: Sequence[GroupPlan]) -> list[list[Collected]]:
        """What the store already holds of the groups and has ended; starts nothing."""
        present = await self._present(plans)
        groups = [present.get(plan.group_id, []) for plan in plans]
        finished = {r.rollout_id: r for group in groups for r in group if r.terminal}
        return await self._read_all(groups, finished)

    async def _present(self, plans: Sequence[GroupPlan]) -> dict[str, list[Rollout]]:
        """Rollouts of the groups that are in the store and may be used, by group."""
        present: dict[str, list[Rollout]] = {}
        group_ids = [plan.group_id for plan in plans]
        for rollout in await self.store.list_rollouts(group_ids=group_ids, limit=10_000):
            if rollout.rollout_id not in self.lost:
                present.setdefault(rollout.group_id or "", []).append(rollout)
        return present

    def _rollout(self, plan: GroupPlan, number: int) -> Rollout:
        suffix = f"-resumed{self.lineage}" if self.lineage else ""
        return Rollout(
            f"{plan.group_id}-{number}{suffix}",
            input=plan.task,
            group_id=plan.group_id,
            mode=plan.mode,
            config=self.launch,
        )

    async def _finished(
        self, rollouts: Sequence[Rollout], on_progress: OnProgress
    ) -> dict[str, Rollout]:
        """Waits until each has ended; a rollout that somebody deleted is left out."""
        done = {rollout.rollout_id for rollout in rollouts if rollout.terminal}
        pending = {rollout.rollout_id for rollout in rollouts} - done
        deadline = time.monotonic() + self.wait
        while pending:
            on_progress(len(done), len(rollouts))
            page = await self.store.terminal(after=self._position, wait=_POLL_SECONDS)
            self._position = page.next_after
            ended = pending & {item.rollout_id for item in page.items}
            if not page.items:
                ended, gone = await self._look(pending)
                pending -= gone
            pending -= ended
            done |= ended
            if pending and time.monotonic() > deadline:
                raise TrainerError(await self._why_waiting(pending))
        on_progress(len(done), len(rollouts))
        ends = await asyncio.gather(*(self.store.get_rollout(i) for i in done))
        return {rollout.rollout_id: rollout for rollout in ends}

    async def _look(self, pending: set[str]) -> tuple[set[str], set[str]]:
        """Which of ``pending`` have ended unseen, and which exist no more."""
        ended, gone = set(), set()
        for rollout_id in sorted(pending):
            try:
                if (await self.store.get_rollout(rollout_id)).terminal:
                    ended.add(rollout_id)
            except NotFound:
                gone.add(rollout_id)
        return ended, gone

    async def _why_waiting(self, pending: set[str]) -> str:
        rollouts = [await self.store.get_rollout(i) for i in sorted(pending)]
        states = Counter(rollout.state for rollout in rollouts)
        counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        hint = (
            "Is a controller running?"
            if set(states) == {"queuing"}
            else f"The first is {rollouts[0].rollout_id}; see `agl rollouts show`."
        )
        return f"waited {self.wait:.0f} s (trainer.rollout_wait) for rollouts: {counted}. {hint}"

    async def _read_all(
        self, groups: Sequence[Sequence[Rollout]], finished: Mapping[str, Rollout]
    ) -> list[list[Collected]]:
        read = await asyncio.gather(*(self._read(rollout) for rollout in finished.values()))
        by_id = {item.rollout.rollout_id: item for item in read}
        return [[by_id[r.rollout_id] for r in group if r.rollout_id in by_id] for group in groups]

    async def _read(self, rollout: Rollout) -> Collected:
        calls = await self.store.calls(rollout.rollout_id)
        samples = build_samples(rollout, calls, max_sample_tokens=self.max_sample_tokens)
        return Collected(rollout, calls, samples)
