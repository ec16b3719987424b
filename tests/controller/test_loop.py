"""The whole controller with real agents."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentlightning.controller.loop import Controller
from agentlightning.store.sqlite import SqliteStore
from agentlightning.types import Rollout
from tests.controller.waiting import appears, finished

Make = Callable[..., Rollout]
Start = Callable[..., Controller]


async def test_a_command_that_ends_by_itself_succeeds(
    store: SqliteStore, controller: Start, rollout: Make
) -> None:
    controller()
    await store.add_rollouts([rollout("echo hello")])
    [ended] = await finished(store, "r1")
    assert (ended.state, ended.outcome and ended.outcome.kind) == ("succeeded", "completed")


async def test_a_crash_shows_the_agents_last_words(
    store: SqliteStore, controller: Start, rollout: Make
) -> None:
    controller()
    await store.add_rollouts([rollout("echo no module named sympy >&2; exit 3")])
    [ended] = await finished(store, "r1")
    assert ended.outcome is not None
    assert (ended.state, ended.outcome.kind, ended.outcome.exit_code) == (
        "failed",
        "agent_error",
        3,
    )
    assert ended.error_message == "no module named sympy"


async def test_sixty_queued_with_a_limit_of_sixty_all_run_at_once(
    store: SqliteStore, controller: Start, rollout: Make, tmp_path: Path
) -> None:
    # Each agent waits until all are there: with fewer than 60 at once none would ever end.
    count = f"$(ls {tmp_path}/started-* | wc -l)"
    script = f"touch {tmp_path}/started-$AGL_ROLLOUT_ID; until [ {count} = 60 ]; do sleep 0.2; done"
    ids = [f"here-{i}" for i in range(60)]
    await store.add_rollouts([rollout(script, each) for each in ids])
    controller(max_running=60)
    assert {each.state for each in await finished(store, *ids)} == {"succeeded"}


async def test_the_limit_holds(
    store: SqliteStore, controller: Start, rollout: Make, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    controller(max_running=2)
    await store.add_rollouts([rollout(f"echo >> {mark}; sleep 30", f"r{i}") for i in range(5)])
    await appears(mark, lines=2)
    assert len(await store.list_rollouts(states=["queuing"])) == 3


async def test_a_time_limit_keeps_the_state_apart_from_a_crash(
    store: SqliteStore, controller: Start, rollout: Make
) -> None:
    controller()
    each = rollout("trap '' TERM; while :; do sleep 0.05; done", config={"timeout_seconds": 0.2})
    each.config["local"]["grace"] = 0.1
    await store.add_rollouts([each])
    [ended] = await finished(store, "r1")
    assert ended.outcome is not None
    assert (ended.state, ended.outcome.kind, ended.outcome.exit_code) == (
        "failed",
        "time_limit",
        -9,
    )
    assert ended.error_message == "ended after its time limit of 0.2 s"


@pytest.mark.parametrize(
    ("local", "what"),
    [
        ({"command": ["no-such-program"]}, "no-such-program"),
        ({"command": ["a"], "python": "b"}, "exactly one"),
        ({"command": ["{{ task.nope }}"]}, "nope"),
        ({"python": "this", "preload": ["no_such_library"]}, "no_such_library"),
    ],
)
async def test_a_launch_error_is_final_at_once(
    store: SqliteStore, controller: Start, rollout: Make, local: dict[str, Any], what: str
) -> None:
    controller()
    await store.add_rollouts([rollout(**local)])
    [ended] = await finished(store, "r1")
    assert ended.outcome is not None
    assert (ended.state, ended.outcome.kind, ended.attempt) == ("failed", "launch_error", 1)
    assert ended.error_message is not None
    assert what in ended.error_message


async def test_a_preload_that_failed_is_not_imported_for_each_rollout(
    store: SqliteStore, controller: Start, rollout: Make, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(
        f"open({str(tmp_path / 'tries')!r}, 'a').write('x')\nraise ValueError('not today')\n"
    )
    controller(max_running=1)
    each = {"python": "this", "preload": [str(tmp_path / "broken.py")]}
    await store.add_rollouts([rollout(rollout_id=f"r{i}", **each) for i in range(5)])
    for ended in await finished(store, *(f"r{i}" for i in range(5))):
        assert ended.outcome is not None
        assert ended.outcome.kind == "launch_error"
        assert "not today" in (ended.error_message or "")
    assert (tmp_path / "tries").read_text() == "x"


async def test_a_cancelled_rollouts_processes_end(
    store: SqliteStore, controller: Start, rollout: Make, tmp_path: Path
) -> None:
    controller()
    mark = tmp_path / "mark"
    await store.add_rollouts([rollout(f"echo $$ > {mark}; sleep 300")])
    agent = psutil.Process(int(await appears(mark)))
    await store.cancel("r1")
    await asyncio.to_thread(psutil.wait_procs, [agent], 10)
    assert not agent.is_running()
    assert (await store.get_rollout("r1")).state == "cancelled"


async def test_a_lost_agent_is_run_again_until_no_attempt_is_left(
    store: SqliteStore, controller: Start, rollout: Make
) -> None:
    controller()
    await store.add_rollouts([rollout("kill -9 $PPID; sleep 300")])  # its warden, each time
    [ended] = await finished(store, "r1")
    assert ended.outcome is not None
    assert (ended.state, ended.outcome.kind, ended.attempt) == ("failed", "lost", 2)
    kinds = [each.outcome and each.outcome.kind for each in await store.attempts("r1")]
    assert kinds == ["lost", "lost"]


async def test_two_controllers_share_the_work_and_start_nothing_twice(
    store: SqliteStore, controller: Start, rollout: Make, tmp_path: Path
) -> None:
    first, second = controller(max_running=4), controller(max_running=4)
    assert first.owner != second.owner
    ids = [f"r{i}" for i in range(12)]
    script = f"echo $AGL_ROLLOUT_ID >> {tmp_path}/started; sleep 0.1"
    await store.add_rollouts([rollout(script, each) for each in ids])
    ended = await finished(store, *ids)
    assert {(each.state, each.attempt) for each in ended} == {("succeeded", 1)}
    assert sorted((tmp_path / "started").read_text().split()) == sorted(ids)


async def test_what_a_dead_controller_held_is_taken_over_after_its_lease(
    store: SqliteStore, controller: Start, rollout: Make
) -> None:
    await store.add_rollouts([rollout("true")])
    await store.claim("dead", limit=1, lease_seconds=0.2)
    controller()
    [ended] = await finished(store, "r1")
    assert (ended.state, ended.attempt) == ("succeeded", 2)


async def test_a_controller_that_stops_hands_over_at_once_and_costs_no_attempt(
    store: SqliteStore, controller: Start, rollout: Make, tmp_path: Path
) -> None:
    mark, go = tmp_path / "mark", tmp_path / "go"
    first = controller(lease=600)
    script = f"echo $$ >> {mark}; until [ -e {go} ]; do sleep 0.02; done"
    await store.add_rollouts([rollout(script, config={"max_attempts": 1})])
    agent = psutil.Process(int(await appears(mark)))
    first.stop()
    controller()
    await appears(mark, lines=2)
    assert not agent.is_running()
    go.touch()
    [ended] = await finished(store, "r1")
    assert (ended.state, ended.attempt) == ("succeeded", 2)


async def test_kill_9_of_a_controller_ends_all_its_agents(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    program = f"""
import asyncio, sys
from pathlib import Path
from agentlightning.config import ControllerConfig
from agentlightning.controller.loop import run
from agentlightning.store.sqlite import SqliteStore
from agentlightning.types import Rollout

async def main():
    store = SqliteStore(Path({str(tmp_path / "store.db")!r}))
    script = "trap '' TERM; (setsid sleep 300 & echo $! >> {mark}); echo $$ >> {mark}; sleep 300"
    config = {{"local": {{"command": ["bash", "-c", script]}}}}
    await store.add_rollouts([Rollout("r1", {{}}, config=config)])
    await run(ControllerConfig(), store=store, gateway_url="http://127.0.0.1:9", admin_key="k",
              root=Path({str(tmp_path)!r}))

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    ready = await process.stdout.readline()
    assert ready == b"controller running local agents for http://127.0.0.1:9\n"
    below = [psutil.Process(int(pid)) for pid in (await appears(mark, lines=2)).split()]
    below += psutil.Process(process.pid).children(recursive=True)
    process.kill()
    await process.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, below, 10)
    assert alive == []


async def test_a_tick_that_fails_is_repeated(
    store: SqliteStore, controller: Start, rollout: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [ConnectionError("the gateway restarts")] * 2
    claim, transition = store.claim, store.transition

    async def failing_claim(*args: Any, **kwargs: Any) -> list[Rollout]:
        if answers:
            raise answers.pop()
        return await claim(*args, **kwargs)

    faults = [ConnectionError("again")]

    async def failing_transition(*args: Any, **kwargs: Any) -> Rollout:
        if faults:
            raise faults.pop()
        return await transition(*args, **kwargs)

    monkeypatch.setattr(store, "claim", failing_claim)
    monkeypatch.setattr(store, "transition", failing_transition)
    controller()
    await store.add_rollouts([rollout("true")])
    [ended] = await finished(store, "r1")
    assert (ended.state, ended.attempt) == ("succeeded", 1)


async def test_a_controller_whose_gateway_is_gone_ends_all_the_same(
    store: SqliteStore,
    controller: Start,
    rollout: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentlightning.controller.loop._GOODBYE_SECONDS", 0.05)
    given_up = asyncio.Event()

    async def never(*_: object, **__: object) -> list[Rollout]:
        given_up.set()
        await asyncio.Event().wait()
        return []

    await store.add_rollouts([rollout(f"echo $$ > {tmp_path}/mark; sleep 300")])
    leaving = controller(lease=600)
    agent = psutil.Process(int(await appears(tmp_path / "mark")))
    monkeypatch.setattr(store, "renew", never)
    leaving.stop()
    await asyncio.wait_for(given_up.wait(), 20)
    assert not agent.is_running()
    # the fixture waits for the controller's end


async def test_a_waiting_claim_does_not_outlast_our_leases(
    store: SqliteStore, controller: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    claimed = asyncio.Event()

    async def claim(*_: object, wait: float, **__: object) -> list[Rollout]:
        waits.append(wait)
        claimed.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(store, "claim", claim)
    controller(lease=2)
    await asyncio.wait_for(claimed.wait(), 20)
    # at worst the leases were renewed a quarter of their length before the claim
    assert waits[0] <= 2 * 3 / 4


@pytest.mark.parametrize(("deaths", "state"), [(1, "succeeded"), (9, "failed")])
async def test_a_fork_server_killed_while_it_starts_is_started_once_more(
    store: SqliteStore, controller: Start, rollout: Make, tmp_path: Path, deaths: int, state: str
) -> None:
    (tmp_path / "warm.py").write_text(
        "import os, signal\n"
        f"with open({str(tmp_path / 'starts')!r}, 'a+') as file:\n"
        "    file.write('x')\n"
        f"    if file.tell() <= {deaths}:\n"
        "        file.flush()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "agent.py").write_text("")
    controller()
    preload = [str(tmp_path / "warm.py")]
    await store.add_rollouts([rollout(python=str(tmp_path / "agent.py"), preload=preload)])
    [ended] = await finished(store, "r1")
    assert ended.state == state
    assert len((tmp_path / "starts").read_text()) == 2
