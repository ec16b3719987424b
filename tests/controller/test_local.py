"""LocalRunner with real processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agentlightning.controller.local import LocalRunner
from agentlightning.controller.runner import Job
from agentlightning.errors import LaunchError
from agentlightning.types import Rollout
from tests.controller.waiting import appears

Make = Callable[..., Rollout]


async def ended(runner: LocalRunner, job: Job) -> Job:
    async def poll() -> Job:
        while True:
            for each in await runner.list():
                if each.attempt_id == job.attempt_id and each.outcome is not None:
                    return each
            await runner.wait_for_change(5)

    return await asyncio.wait_for(poll(), 30)


async def run(runner: LocalRunner, rollout: Rollout) -> Job:
    rollout = rollout if rollout.attempt_id else replace(rollout, attempt_id="a1")
    return await ended(runner, await runner.launch(rollout))


def log(job: Job, name: str = "stdout.log") -> str:
    assert job.workspace is not None
    return (job.workspace.parent / name).read_text(errors="replace")


async def test_a_command_runs_in_its_workspace_with_its_environment(
    runner: LocalRunner, rollout: Make
) -> None:
    job = await run(runner, rollout("pwd; echo $AGL_ATTEMPT_ID; cat; cat $AGL_TASK_FILE"))
    assert log(job).splitlines() == [str(job.workspace), "a1", '{"question": "2+2"}']
    assert job.outcome is not None
    assert (job.outcome.kind, job.outcome.exit_code) == ("completed", 0)


@pytest.mark.parametrize(
    ("end", "code"), [("exit 3", 3), ("kill -9 $$", -9), ("kill -SEGV $$", -11)]
)
async def test_exit_codes_and_signals_are_agent_errors(
    runner: LocalRunner, rollout: Make, end: str, code: int
) -> None:
    outcome = (await run(runner, rollout(end))).outcome
    assert outcome is not None
    assert (outcome.kind, outcome.exit_code) == ("agent_error", code)


async def test_a_script_runs_as_by_python(
    runner: LocalRunner, rollout: Make, tmp_path: Path
) -> None:
    (tmp_path / "helper.py").write_text("value = 'helped'\n")
    (tmp_path / "agent.py").write_text(
        "import sys, os, atexit, threading, helper\n"
        "atexit.register(lambda: print('at exit'))\n"
        "threading.Timer(0.05, lambda: print('thread')).start()\n"
        "print(__name__, sys.argv[1:], helper.value, sys.path[0] == os.path.dirname(__file__))\n"
        "print(os.environ['HOME'] != os.getcwd(), 'AGL_ADMIN_KEY' in os.environ)\n"
        "print('no newline', end='')\n"
        "sys.exit('a reason')\n"
    )
    job = await run(
        runner, rollout(python=str(tmp_path / "agent.py"), args=["{{ task.question }}"])
    )
    first, second, rest = log(job).split("\n", 2)
    assert (first, second) == ("__main__ ['2+2'] helped True", "True False")
    assert rest == "no newlinethread\nat exit\n"
    assert log(job, "stderr.log") == "a reason\n"
    assert job.outcome is not None
    assert job.outcome.exit_code == 1


async def test_a_module_and_classes_run_with_what_is_preloaded(
    runner: LocalRunner, rollout: Make, tmp_path: Path
) -> None:
    name = f"agents_{os.getpid()}"
    warm = tmp_path / f"{name}.py"
    warm.write_text(
        "import os\nimported_by = os.getpid()\n"
        "class Plain:\n"
        "    def run(self): print('plain', os.getpid() != imported_by)\n"
        "class Async:\n"
        "    async def run(self): raise RuntimeError('boom')\n"
    )
    shared = {"preload": [str(warm)]}
    module = await run(runner, replace(rollout(python="this", **shared), attempt_id="m"))
    assert "Zen of Python" in log(module)
    path = f"agl_file_{name}"
    plain = await run(
        runner, replace(rollout(agent_class=f"{path}.Plain", **shared), attempt_id="p")
    )
    assert log(plain) == "plain True\n"
    broken = await run(
        runner, replace(rollout(agent_class=f"{path}.Async", **shared), attempt_id="b")
    )
    assert broken.outcome is not None
    assert broken.outcome.kind == "agent_error"
    assert (await runner.output_tail(broken)).endswith("RuntimeError: boom")


async def test_each_fork_draws_other_random_numbers(
    runner: LocalRunner, rollout: Make, tmp_path: Path
) -> None:
    (tmp_path / "draw.py").write_text("import random; print(random.random())\n")
    jobs = [
        await run(
            runner,
            replace(
                rollout(python=str(tmp_path / "draw.py"), preload=["random"]), attempt_id=f"a{i}"
            ),
        )
        for i in range(3)
    ]
    assert len({log(job) for job in jobs}) == 3


@pytest.mark.parametrize(
    ("local", "what"),
    [
        ({"command": ["no-such-program"]}, "'no-such-program'.*No such file"),
        ({"agent_class": "no_such_module.Agent"}, "no_such_module"),
        ({"agent_class": "json.NoSuchAgent"}, "NoSuchAgent"),
    ],
)
async def test_what_cannot_start_is_a_launch_error(
    runner: LocalRunner, rollout: Make, local: dict[str, object], what: str
) -> None:
    outcome = (await run(runner, rollout(**local))).outcome
    assert outcome is not None
    assert outcome.kind == "launch_error"
    with pytest.raises(LaunchError, match=what):
        raise LaunchError(outcome.message)


async def test_a_preload_that_fails_shows_its_import_error(
    runner: LocalRunner, rollout: Make
) -> None:
    each = replace(rollout(python="this", preload=["no_such_library"]), attempt_id="a1")
    with pytest.raises(LaunchError, match="No module named 'no_such_library'"):
        await runner.launch(each)
    assert await runner.list() == []


async def test_a_second_launch_of_an_attempt_starts_nothing(
    runner: LocalRunner, rollout: Make
) -> None:
    each = replace(rollout("echo started"), attempt_id="a1")
    first = await runner.launch(each)
    assert await runner.launch(each) == first
    job = await ended(runner, first)
    assert await runner.launch(each) == job
    assert log(job) == "started\n"


async def test_a_program_that_prints_much_leaves_head_and_tail(
    runner: LocalRunner, rollout: Make
) -> None:
    script = "echo first; head -c 50000000 /dev/zero | tr '\\0' x; echo; echo last"
    job = await run(runner, rollout(script, output_limit=10_000))
    text = log(job)
    assert len(text) < 10_200
    assert text.startswith("first\nxxx")
    assert text.endswith("xxx\nlast\n")
    assert "49990012 bytes left out here" in text


async def test_any_bytes_may_be_printed(runner: LocalRunner, rollout: Make) -> None:
    job = await run(runner, rollout(r"printf '\xff\xfe broken \x80\n' >&2; exit 1"))
    assert "broken" in await runner.output_tail(job)


async def test_a_daemon_does_not_outlive_its_agent(
    runner: LocalRunner, rollout: Make, tmp_path: Path
) -> None:
    mark = tmp_path / "pid"
    daemon = f"setsid bash -c 'echo $$ > {mark}; exec sleep 300' >/dev/null 2>&1 &"
    job = await run(runner, rollout(f"( {daemon} ) ; until [ -s {mark} ]; do sleep 0.02; done"))
    assert job.outcome is not None
    assert job.outcome.kind == "completed"
    assert not psutil.pid_exists(int(mark.read_text()))


async def test_kill_ends_whatever_ignores_term(
    runner: LocalRunner, rollout: Make, tmp_path: Path
) -> None:
    mark = tmp_path / "pids"
    stubborn = f"trap '' TERM; echo $$ >> {mark}; while :; do sleep 0.1; done"
    script = f'bash -c "{stubborn.replace("$$", chr(92) + "$$")}" & {stubborn}'
    job = await runner.launch(replace(rollout(script), attempt_id="a1"))

    pids = [int(pid) for pid in (await appears(mark, lines=2)).split()]
    await runner.kill(job, grace_seconds=0.1)
    done = await ended(runner, job)
    assert done.outcome is not None
    assert done.outcome.exit_code == -9
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_term_comes_first(runner: LocalRunner, rollout: Make, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    script = f"trap 'echo saved; exit 0' TERM; echo > {mark}; while :; do sleep 0.05; done"
    job = await runner.launch(replace(rollout(script), attempt_id="a1"))
    await appears(mark)
    await runner.kill(job, grace_seconds=20)
    assert log(await ended(runner, job)) == "saved\n"


async def test_a_killed_warden_means_lost_and_leaves_nothing(
    runner: LocalRunner, rollout: Make, tmp_path: Path
) -> None:
    mark = tmp_path / "pid"
    job = await runner.launch(
        replace(rollout(f"sleep 300 & echo $$ $! > {mark}; wait"), attempt_id="a1")
    )
    agent, child = (psutil.Process(int(pid)) for pid in (await appears(mark)).split())
    warden = agent.parent()
    assert warden is not None
    warden.kill()
    outcome = (await ended(runner, job)).outcome
    assert outcome is not None
    assert outcome.kind == "lost"
    await asyncio.to_thread(psutil.wait_procs, [agent, child], 10)
    assert not agent.is_running()
    assert not child.is_running()


async def test_a_killed_fork_server_harms_no_agent_and_is_replaced(
    runner: LocalRunner, rollout: Make, tmp_path: Path
) -> None:
    mark, go = tmp_path / "pid", tmp_path / "go"
    script = f"echo $$ > {mark}; until [ -e {go} ]; do sleep 0.02; done"
    job = await runner.launch(replace(rollout(script), attempt_id="a1"))
    agent = psutil.Process(int(await appears(mark)))
    server = agent.parents()[1]
    assert "agentlightning.controller.forkserver" in server.cmdline()
    server.kill()
    await asyncio.to_thread(psutil.wait_procs, [server], 10)
    second = await run(runner, replace(rollout("true"), attempt_id="a2"))
    go.touch()
    first = await ended(runner, job)
    assert [each.outcome and each.outcome.kind for each in (first, second)] == ["completed"] * 2


@pytest.mark.parametrize(
    ("keep", "script", "kept"),
    [
        ("always", "true", True),
        ("failed", "true", False),
        ("failed", "false", True),
        ("never", "false", False),
    ],
)
async def test_workspaces_are_kept_as_asked(
    runner: LocalRunner, rollout: Make, keep: str, script: str, kept: bool
) -> None:
    job = await run(runner, rollout(script, workspace={"keep": keep}))
    await runner.remove(job)
    assert job.workspace is not None
    assert job.workspace.exists() == kept
    assert log(job, "stderr.log") == ""
    assert await runner.list() == []


async def test_close_leaves_no_process(runner: LocalRunner, rollout: Make, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    await runner.launch(
        replace(rollout(f"trap '' TERM; echo $$ > {mark}; sleep 300"), attempt_id="a1")
    )
    agent = psutil.Process(int(await appears(mark)))
    family = [agent, *agent.parents()[:2]]
    await runner.close()
    assert not any(each.is_running() for each in family)
