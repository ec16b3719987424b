"""plan by tables: what is known → what is done next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentlightning.controller.plan import (
    Action,
    Evaluate,
    Finish,
    Held,
    Kill,
    Launch,
    Limits,
    Remove,
    Retry,
    deadline,
    plan,
)
from agentlightning.controller.runner import Job
from agentlightning.types import Outcome, Rollout

HELD = Held(Rollout("r", {}, attempt_id="a"), time_limit=60.0, grace=2.0)
JUDGED = replace(HELD, evaluate=True)
RUNNING = Job("r", "a", started_at=100.0)
DONE = replace(RUNNING, outcome=Outcome("completed", 0))
CRASHED = replace(RUNNING, outcome=Outcome("agent_error", -15))
VANISHED = replace(RUNNING, outcome=Outcome("lost"))
UNSTARTED = replace(RUNNING, outcome=Outcome("launch_error", message="no such program"))
OVERTIME = replace(HELD, stopping="time_limit")
TIMED_OUT = Outcome("time_limit", -15, "ended after its time limit of 60 s")


def one(held: Held | None, job: Job | None, now: float = 101.0) -> Action | None:
    actions = plan([held] if held else [], [job] if job else [], Limits(evaluators=4), now)
    assert len(actions) <= 1
    return actions[0] if actions else None


@pytest.mark.parametrize(
    ("held", "job", "now", "expected"),
    [
        (HELD, None, 101, Launch(HELD)),
        (replace(HELD, busy="launch"), None, 101, None),
        (replace(HELD, not_before=102.0), None, 101, None),
        (replace(HELD, not_before=102.0), None, 102, Launch(replace(HELD, not_before=102.0))),
        (HELD, RUNNING, 159.9, None),
        (HELD, RUNNING, 160, Kill(RUNNING, HELD, 2.0, "time_limit")),
        (OVERTIME, RUNNING, 170, None),
        (OVERTIME, CRASHED, 170, Finish(OVERTIME, CRASHED, "failed", TIMED_OUT)),
        (OVERTIME, VANISHED, 170, Retry(OVERTIME, VANISHED, Outcome("lost"))),
        (HELD, DONE, 101, Finish(HELD, DONE, "succeeded", Outcome("completed", 0))),
        (HELD, CRASHED, 101, Finish(HELD, CRASHED, "failed", Outcome("agent_error", -15))),
        (HELD, VANISHED, 101, Retry(HELD, VANISHED, Outcome("lost"))),
    ],
)
def test_what_is_next(held: Held, job: Job | None, now: float, expected: Action | None) -> None:
    assert one(held, job, now) == expected


@pytest.mark.parametrize("job", [DONE, CRASHED])
def test_whoever_ended_is_evaluated_first(job: Job) -> None:
    assert job.outcome is not None
    assert one(JUDGED, job) == Evaluate(JUDGED, job, job.outcome)
    evaluated = replace(JUDGED, evaluated=True)
    assert isinstance(one(evaluated, job), Finish)


def test_an_agent_over_its_time_is_evaluated_too() -> None:
    held = replace(JUDGED, stopping="time_limit")
    assert one(held, CRASHED) == Evaluate(held, CRASHED, TIMED_OUT)


@pytest.mark.parametrize("held", [HELD, JUDGED])
def test_a_launch_error_ends_it_at_once(held: Held) -> None:
    assert UNSTARTED.outcome is not None
    assert one(held, UNSTARTED) == Finish(held, UNSTARTED, "failed", UNSTARTED.outcome)
    wrong = replace(held, launch_error="two programs")
    assert one(wrong, None) == Finish(
        wrong, None, "failed", Outcome("launch_error", message="two programs")
    )


def test_a_failed_evaluation_is_repeated_once_and_then_the_evaluators_fault() -> None:
    once = replace(JUDGED, evaluator_faults=("it raised",))
    assert isinstance(one(once, DONE), Evaluate)
    twice = replace(JUDGED, evaluator_faults=("it raised", "it raised again"))
    outcome = Outcome("evaluator_error", 0, "it raised again")
    assert one(twice, DONE) == Finish(twice, DONE, "failed", outcome)


def test_what_is_no_longer_ours_is_killed_then_forgotten() -> None:
    gone = replace(JUDGED, gone=True)
    assert one(gone, RUNNING) == Kill(RUNNING, gone, 2.0, "gone")
    assert one(replace(gone, stopping="gone"), RUNNING) is None
    assert one(gone, DONE) == Remove(DONE, gone)
    assert isinstance(one(gone, None), Remove)


def test_jobs_that_nobody_needs_are_killed_and_removed() -> None:
    assert one(None, RUNNING) == Kill(RUNNING, None, 0.0, "gone")
    assert one(None, CRASHED) == Remove(CRASHED, None)


def test_evaluators_are_bounded() -> None:
    held = [replace(JUDGED, rollout=Rollout(f"r{i}", {}, attempt_id=f"a{i}")) for i in range(5)]
    jobs = [replace(DONE, attempt_id=f"a{i}") for i in range(5)]
    held[4] = replace(held[4], busy="evaluate")
    actions = plan(held, jobs, Limits(evaluators=3), 101.0)
    assert [type(action) for action in actions] == [Evaluate, Evaluate]


def test_the_deadline_is_the_next_thing_that_nobody_announces() -> None:
    late = replace(HELD, not_before=120.0)
    assert deadline([HELD], [RUNNING]) == 160.0
    assert deadline([HELD, late], [RUNNING]) == 120.0
    assert deadline([OVERTIME], [RUNNING]) is None
