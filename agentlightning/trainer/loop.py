"""The training loop, in the order in which things happen.

validate, then for each step: draw tasks, run a group of rollouts for each, turn their
calls into samples and their rewards into advantages, hold the gateway, update, publish,
let the gateway go on, checkpoint. Then validate again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from agentlightning.config import Config, launch_config
from agentlightning.errors import TrainerError
from agentlightning.store import Store
from agentlightning.trainer.batch import Batch, build_batch
from agentlightning.trainer.checkpoint import (
    Progress,
    latest_checkpoint,
    load_progress,
    save_checkpoint,
)
from agentlightning.trainer.collect import Collected, Collector, GroupPlan
from agentlightning.trainer.ledger import Ledger
from agentlightning.trainer.metrics import rollout_metrics
from agentlightning.trainer.policy import Policy
from agentlightning.trainer.publish import Publisher
from agentlightning.trainer.run_folder import RunFolder
from agentlightning.trainer.statistics import Estimate, estimate
from agentlightning.trainer.tasks import TaskOrder, load_run_tasks
from agentlightning.types import Rollout

log = logging.getLogger(__name__)

T = TypeVar("T")

_SILENT_STEPS_BEFORE_ALARM = 3


class Observer(Protocol):
    """Whoever shows a run while it goes on."""

    def phase(self, name: str, done: int, total: int) -> None: ...

    def step(self, line: Mapping[str, Any]) -> None: ...

    def validation(self, name: str, reward: Estimate) -> None: ...

    def warn(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Validation:
    """Rewards on held-out tasks at one policy version, by task number.

    Example:
        >>> Validation(0, {0: 1.0, 1: 0.0}).reward.mean
        0.5
    """

    policy_version: int
    rewards: Mapping[int, float]

    @property
    def reward(self) -> Estimate:
        return estimate(list(self.rewards.values()))

    def difference(self, earlier: Validation) -> Estimate:
        """Paired over the tasks that both have a reward for."""
        both = sorted(self.rewards.keys() & earlier.rewards.keys())
        return estimate([self.rewards[i] - earlier.rewards[i] for i in both])


@dataclass
class RunResult:
    """What a run came to."""

    progress: Progress
    before: Validation | None = None
    after: Validation | None = None
    excluded: dict[str, int] = field(default_factory=dict)


class Trainer:
    """One run. ``policy`` is the model, ``publisher`` the way to its server and the gateway."""

    def __init__(
        self,
        config: Config,
        *,
        folder: RunFolder,
        store: Store,
        policy: Policy,
        publisher: Publisher,
        model: str,
        observer: Observer,
    ) -> None:
        self._config = config
        self._folder = folder
        self._ledger = Ledger(store)
        self._policy = policy
        self._policy_thread = ThreadPoolExecutor(1, thread_name_prefix="policy")
        self._publisher = publisher
        self._observer = observer
        self._progress = Progress()
        self._silent_steps = 0
        tasks, self._val_tasks = load_run_tasks(config)
        self._tasks = TaskOrder(tasks, seed=config.seed, shuffle=config.tasks.shuffle)
        self._collector = Collector(
            store=store,
            launch=launch_config(config, model=model),
            wait=config.trainer.rollout_wait,
            max_sample_tokens=config.trainer.max_sample_tokens,
        )

    async def run(self, *, resume: bool = False) -> RunResult:
        """Trains to ``trainer.updates`` steps; with ``resume`` from the last checkpoint."""
        result = RunResult(self._progress)
        if resume:
            await self._restore()
        await self._announce(resumed=resume)
        result.before = await self._validate("before", step=0)
        while self._progress.step < self._config.trainer.updates:
            for reason, count in (await self._step()).items():
                result.excluded[reason] = result.excluded.get(reason, 0) + count
        if self._config.trainer.updates > 0:
            result.after = await self._validate("after", step=self._config.trainer.updates)
        result.progress = self._progress
        return result

    # --- one step

    async def _step(self) -> Mapping[str, int]:
        """Collect, update, publish, checkpoint; returns the rollouts left out, by reason."""
        clock = _Clock()
        groups = await self._collector.collect(self._plan_groups(), self._show_rollouts)
        clock.lap("rollouts")
        batch = self._batch(groups)
        update = await self._update(batch, clock) if batch.has_signal else {}
        self._advance(groups, batch, updated=bool(update), seconds=clock.total)
        line = self._describe(groups, batch, update, clock)
        self._folder.append_metrics(line)
        self._observer.step(line)
        self._watch_trainable(groups, batch)
        self._watch_signal(batch)
        await self._checkpoint_if_due(clock)
        return batch.dropped

    def _plan_groups(self) -> list[GroupPlan]:
        trainer, first = self._config.trainer, self._progress.next_group
        return [
            GroupPlan(f"g{n:06d}", self._tasks[n], "train", trainer.rollouts_per_group)
            for n in range(first, first + trainer.groups_per_update)
        ]

    def _batch(self, groups: Sequence[Sequence[Collected]]) -> Batch:
        return build_batch(
            [[(item.rollout, item.samples) for item in group] for group in groups],
            loss=self._config.trainer.loss,
            version=self._progress.policy_version,
            max_staleness=self._config.trainer.max_staleness,
        )

    async def _update(self, batch: Batch, clock: _Clock) -> Mapping[str, float]:
        """One optimizer update, published. Calls that come meanwhile wait at the gateway."""
        self._observer.phase("update", 0, 1)
        await self._publisher.pause()
        clock.lap("drain")
        try:
            metrics = await self._in_thread(self._policy.update, batch.rows)
            clock.lap("update")
            await self._publisher.publish(self._policy, self._progress.policy_version + 1)
            clock.lap("publish")
        finally:
            await self._publisher.resume()
        return metrics

    def _advance(
        self, groups: Sequence[Sequence[Collected]], batch: Batch, *, updated: bool, seconds: float
    ) -> None:
        before = self._progress
        step = before.step + 1
        consumed = dict.fromkeys(batch.consumed, step) if updated else {}
        calls = [call for group in groups for item in group for call in item.calls]
        self._progress = replace(
            before,
            step=step,
            policy_version=before.policy_version + updated,
            next_group=before.next_group + len(groups),
            rollouts=before.rollouts + sum(map(len, groups)),
            tokens_generated=before.tokens_generated
            + sum(len(c.token_ids) for call in calls for c in call.completions),
            tokens_trained=before.tokens_trained + (batch.trained_tokens if updated else 0),
            training_seconds=before.training_seconds + seconds,
            consumed={**before.consumed, **consumed},
        )

    def _describe(
        self,
        groups: Sequence[Sequence[Collected]],
        batch: Batch,
        update: Mapping[str, float],
        clock: _Clock,
    ) -> dict[str, Any]:
        seconds = clock.laps
        return {
            "step": self._progress.step,
            "steps": self._config.trainer.updates,
            "policy_version": self._progress.policy_version,
            **({} if update else {"event": "no_signal"}),
            **rollout_metrics(groups, seconds=seconds["rollouts"]),
            **batch.metrics,
            "excluded": batch.dropped,
            "update": dict(update),
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "training_seconds": round(self._progress.training_seconds, 3),
            "time": round(time.time(), 3),
        }

    def _watch_trainable(self, groups: Sequence[Sequence[Collected]], batch: Batch) -> None:
        """A step whose calls may not be trained looks like any other: say so at once."""
        if batch.rows or not any(item.calls for group in groups for item in group):
            return
        items = [item for group in groups for item in group]
        reasons = Counter(call.reason for item in items for call in item.calls if call.reason)
        self._observer.warn(
            f"no call of step {self._progress.step} can be trained: {_counted(reasons)}. "
            "`other_model` means that the agent asked for a model by another name than AGL_MODEL "
            "or {{ model }}; `agl calls` shows each call."
        )

    def _watch_signal(self, batch: Batch) -> None:
        self._silent_steps = 0 if batch.has_signal else self._silent_steps + 1
        if self._silent_steps == _SILENT_STEPS_BEFORE_ALARM:
            self._observer.warn(
                f"no signal: in the last {self._silent_steps} steps the rollouts of each group "
                "had equal rewards, so nothing was learned. The task is too hard or too easy for "
                "the model as it is, or the evaluator always says the same. Look at a few with "
                "`agl rollouts show`; show the model an example, or choose easier tasks."
            )
        if not batch.rows and self._silent_steps >= _SILENT_STEPS_BEFORE_ALARM:
            raise TrainerError(
                f"no rollout of the last {self._silent_steps} steps could be trained: "
                f"{_counted(batch.dropped)}. See `agl rollouts list`."
            )

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """One thread for all that the policy does: memory that one thread freed is not at
        once another's."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._policy_thread, work, *arguments)

    # --- validation

    async def _validate(self, name: str, *, step: int) -> Validation | None:
        """Runs the held-out tasks; what an earlier part of a resumed run left is read only."""
        if not self._val_tasks:
            return None
        plans = [
            GroupPlan(f"val-{step:06d}-{n:04d}", task, "val", 1)
            for n, task in enumerate(self._val_tasks)
        ]
        if step < self._progress.step:
            groups = await self._collector.recorded(plans)
        else:
            groups = await self._collector.collect(plans, self._show_validation)
        if why := _why_broken(groups):
            # Ended for good as they are: once the agent is mended, a resumed run makes them anew.
            await self._ledger.give_up(i.rollout.rollout_id for group in groups for i in group)
            raise TrainerError(why)
        rewards = {
            n: item.rollout.reward
            for n, group in enumerate(groups)
            for item in group
            if item.rollout.reward is not None
        }
        validation = Validation(self._progress.policy_version, rewards)
        self._observer.validation(name, validation.reward)
        return validation

    # --- start and restart

    async def _announce(self, *, resumed: bool) -> None:
        if resumed and self._progress.policy_version:
            await self._publisher.publish(self._policy, self._progress.policy_version)
        else:
            await self._publisher.announce(self._progress.policy_version)
        await self._publisher.resume()

    async def _restore(self) -> None:
        """Back to the last checkpoint. Rollouts that saw weights newer than it are lost."""
        checkpoint = latest_checkpoint(self._folder.path)
        if checkpoint is not None:
            self._progress = load_progress(checkpoint)
            await self._in_thread(self._policy.load, checkpoint / "training")
        dropped = self._folder.drop_metrics_after(self._progress.step)
        self._collector.lineage = await self._ledger.next_lineage()
        self._collector.lost = await self._ledger.lost(self._progress)
        await self._ledger.record_consumed(self._progress, since=0)
        self._observer.warn(
            f"resumed after step {self._progress.step}; {dropped} later steps and "
            f"{len(self._collector.lost)} rollouts of lost weights are left out"
        )

    async def _checkpoint_if_due(self, clock: _Clock) -> None:
        every, step = self._config.trainer.checkpoint_every, self._progress.step
        if step != self._config.trainer.updates and (every == 0 or step % every):
            return
        self._observer.phase("checkpoint", 0, 1)
        keep = self._config.trainer.keep_checkpoints
        await self._in_thread(
            save_checkpoint, self._folder.path, self._policy, self._progress, keep
        )
        seconds = clock.lap("checkpoint")
        self._progress = replace(
            self._progress, training_seconds=self._progress.training_seconds + seconds
        )
        await self._ledger.record_consumed(self._progress, since=self._last_checkpoint())

    def _last_checkpoint(self) -> int:
        """The step of the checkpoint before the current one, or an earlier one."""
        every = self._config.trainer.checkpoint_every
        return self._progress.step - every if every else 0

    def _show_rollouts(self, done: int, total: int) -> None:
        self._observer.phase("rollouts", done, total)

    def _show_validation(self, done: int, total: int) -> None:
        self._observer.phase("validation", done, total)


class _Clock:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> float:
        """Ends a phase; its seconds."""
        now = time.monotonic()
        self.laps[name] = now - self._last
        self._last = now
        return self.laps[name]

    @property
    def total(self) -> float:
        return time.monotonic() - self._started


def _why_broken(groups: Sequence[Sequence[Collected]]) -> str | None:
    """Without one call, or where every evaluator failed, nothing can be trained: say why."""
    items = [item for group in groups for item in group]
    if not items:
        return None
    first = items[0].rollout
    if not any(item.calls for item in items):
        why = first.error_message or "it ended without asking its model anything"
        return (
            f"none of {len(items)} rollouts called the model. {first.rollout_id} "
            f"{first.state}: {why}"
        )
    if all(_evaluator_failed(item.rollout) for item in items):
        lines = (first.error_message or "it said nothing").strip().splitlines()
        return (
            f"the evaluator failed on all {len(items)} rollouts. {first.rollout_id}: "
            f"{lines[-1].strip()}. See `agl rollouts show {first.rollout_id}`."
        )
    return None


def _evaluator_failed(rollout: Rollout) -> bool:
    return rollout.outcome is not None and rollout.outcome.kind == "evaluator_error"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or "none"
