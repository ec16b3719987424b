"""What to do next, decided from what is known now. Pure: no clock, no store, no process.

How an attempt ends:

    exit code 0                → succeeded, after evaluation
    other exit code, signal    → failed agent_error; evaluated: a crash is training data
    time limit                 → failed time_limit; evaluated
    could not start            → failed launch_error at once; the same spec would fail again
    vanished                   → a new attempt, while attempts are left
    evaluator failed           → evaluated once more, then failed evaluator_error, no reward
    lease lost, cancelled      → its processes are ended; somebody else wrote its state
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from agentlightning.controller.runner import Job
from agentlightning.types import Outcome, Rollout, RolloutState

EVALUATIONS = 2
"""Tries of one evaluation."""


@dataclass(frozen=True, slots=True)
class Held:
    """A rollout that this controller holds, and what it knows of it beyond its job.

    Times are Unix seconds. ``busy`` names the action that is
    under way for it; ``not_before``
    delays the next one after a fault of ours. ``gone`` once the lease is no longer ours.

    Example:
        >>> Held(Rollout("r1", {}, attempt_id="a1"), time_limit=60.0, grace=2.0).evaluated
        False
    """

    rollout: Rollout
    time_limit: float
    grace: float
    evaluate: bool = False
    evaluated: bool = False
    evaluator_faults: tuple[str, ...] = ()
    launch_error: str | None = None
    stopping: Literal["time_limit", "gone"] | None = None
    gone: bool = False
    busy: str | None = None
    not_before: float = 0.0

    @property
    def attempt_id(self) -> str:
        return self.rollout.attempt_id or ""


@dataclass(frozen=True, slots=True)
class Limits:
    """``evaluators``: evaluations that may run at once."""

    evaluators: int


@dataclass(frozen=True, slots=True)
class Launch:
    held: Held
    job: None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """Ends a job. ``held`` is None where it belongs to no rollout of ours any more."""

    job: Job
    held: Held | None
    grace: float
    reason: Literal["time_limit", "gone"]


@dataclass(frozen=True, slots=True)
class Evaluate:
    held: Held
    job: Job
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Finish:
    held: Held
    job: Job | None
    state: RolloutState
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Retry:
    held: Held
    job: Job
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Remove:
    job: Job
    held: Held | None


Action: TypeAlias = Launch | Kill | Evaluate | Finish | Retry | Remove


def plan(rollouts: Sequence[Held], jobs: Sequence[Job], limits: Limits, now: float) -> list[Action]:
    """At most one action for each rollout, and one for each job that no rollout needs."""
    by_attempt = {job.attempt_id: job for job in jobs}
    actions = [
        action
        for held in rollouts
        if not held.busy and held.not_before <= now
        for action in _next(held, by_attempt.get(held.attempt_id), now)
    ]
    known = {held.attempt_id for held in rollouts}
    strays = (_stray(job) for job in jobs if job.attempt_id not in known)
    evaluating = sum(held.busy == "evaluate" for held in rollouts)
    return [*_at_most(actions, limits.evaluators - evaluating), *strays]


def deadline(rollouts: Sequence[Held], jobs: Sequence[Job]) -> float | None:
    """When the next thing is due that nobody will tell us about."""
    started = {job.attempt_id: job.started_at for job in jobs if job.outcome is None}
    due = [
        started[held.attempt_id] + held.time_limit
        for held in rollouts
        if held.attempt_id in started and not held.stopping
    ]
    return min([*due, *(held.not_before for held in rollouts if held.not_before)], default=None)


def ended(held: Held, job: Job) -> Outcome:
    """How the agent ended, with what only the controller knows: that it ended it."""
    outcome = job.outcome or Outcome("lost")
    if held.stopping == "time_limit" and outcome.kind in ("completed", "agent_error"):
        message = f"ended after its time limit of {held.time_limit:g} s"
        return replace(outcome, kind="time_limit", message=message)
    return outcome


def _next(held: Held, job: Job | None, now: float) -> Iterator[Action]:
    if held.gone:
        yield from _let_go(held, job)
    elif held.launch_error is not None:
        yield Finish(held, job, "failed", Outcome("launch_error", message=held.launch_error))
    elif job is None:
        yield Launch(held)
    elif job.outcome is not None:
        yield _after(held, job, ended(held, job))
    elif now >= job.started_at + held.time_limit and not held.stopping:
        yield Kill(job, held, held.grace, "time_limit")


def _let_go(held: Held, job: Job | None) -> Iterator[Action]:
    if job is None or job.outcome is not None:
        yield Remove(job or Job(held.rollout.rollout_id, held.attempt_id, 0.0), held)
    elif held.stopping != "gone":
        yield Kill(job, held, held.grace, "gone")


def _after(held: Held, job: Job, outcome: Outcome) -> Action:
    if outcome.kind == "lost":
        return Retry(held, job, outcome)
    if outcome.kind == "launch_error":
        return Finish(held, job, "failed", outcome)
    if held.evaluate and not held.evaluated:
        if len(held.evaluator_faults) < EVALUATIONS:
            return Evaluate(held, job, outcome)
        fault = Outcome("evaluator_error", outcome.exit_code, held.evaluator_faults[-1])
        return Finish(held, job, "failed", fault)
    return Finish(held, job, "succeeded" if outcome.kind == "completed" else "failed", outcome)


def _stray(job: Job) -> Action:
    return Kill(job, None, 0.0, "gone") if job.outcome is None else Remove(job, None)


def _at_most(actions: Sequence[Action], evaluations: int) -> Iterator[Action]:
    for action in actions:
        if isinstance(action, Evaluate):
            evaluations -= 1
            if evaluations < 0:
                continue
        yield action
