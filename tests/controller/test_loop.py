"""The whole controller with real agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from agentlightning.controller.loop import Controller
from agentlightning.types import Rollout
from tests.fakes.store import MemoryStore

Make = Callable[..., Rollout]
Start = Callable[..., Controller]


async def test_a_command_that_ends_by_itself_succeeds(
    store: MemoryStore, controller: Start, rollout: Make
) -> None:
    controller()
    await store.add_rollouts([rollout("echo hello")])
    [ended] = await store.until_ended("r1")
    assert (ended.state, ended.outcome and ended.outcome.kind) == ("succeeded", "completed")


async def test_a_crash_shows_the_agents_last_words(
    store: MemoryStore, controller: Start, rollout: Make
) -> None:
    controller()
    await store.add_rollouts([rollout("echo no module named sympy >&2; exit 3")])
    [ended] = await store.until_ended("r1")
    assert ended.outcome is not None
    assert (ended.state, ended.outcome.kind, ended.outcome.exit_code) == (
        "failed",
        "agent_error",
        3,
    )
    assert ended.error_message == "no module named sympy"


async def test_sixty_queued_with_a_limit_of_sixty_all_run_at_once(
    store: MemoryStore, controller: Start, rollout: Make, tmp_path: Path
) -> None:
    # Each agent waits until all are there: with fewer than 60 at once none would ever end.
    count = f"$(ls {tmp_path}/started-* | wc -l)"
    script = f"touch {tmp_path}/started-$AGL_ROLLOUT_ID; until [ {count} = 60 ]; do sleep 0.2; done"
    ids = [f"here-{i}" for i in range(60)]
    await store.add_rollouts([rollout(script, each) for each in ids])
    controller(max_running=60)
    assert {each.state for each in await store.until_ended(*ids)} == {"succeeded"}


async def test_the_limit_holds(store: MemoryStore, controller: Start, rollout: Make) -> None:
    controller(max_running=2)
    await store.add_rollouts([rollout("sleep 30", f"r{i}") for i in range(5)])
    await store.until(lambda all_: sum(r.state == "running" for r in all_.values()) == 2)
    await asyncio.sleep(0)
    assert sum(r.state == "queuing" for r in store.rollouts.values()) == 3
