"""Evaluators: functions, commands, and what they may give back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentlightning.controller.evaluate import FinishedRollout, checked_reward, conversation
from agentlightning.controller.loop import Controller
from agentlightning.errors import EvaluatorError
from agentlightning.store.sqlite import SqliteStore
from agentlightning.types import Call, Outcome, RawCall, Rollout, token_array
from tests.controller.waiting import appears, finished

Make = Callable[..., Rollout]
Start = Callable[..., Controller]

FUNCTIONS = """
import os, sys, time
from pathlib import Path

def reads_all(rollout):
    assert rollout.workspace.name == "workspace"
    assert "AGL_ADMIN_KEY" not in os.environ
    good = rollout.stdout == "4\\n" and rollout.stderr == "hm\\n"
    good &= (rollout.workspace / "answer.txt").read_text() == "4\\n"
    good &= rollout.task == {"question": "2+2"} and rollout.outcome.kind == "completed"
    good &= [m["content"] for m in rollout.messages] == ["2+2", "4"] and rollout.answer == "4"
    good &= [c.call_id for c in rollout.calls] == ["c1"]
    return {"value": int(good), "reason": "read it all"}

def of_outcome(rollout):
    return {"agent_error": -1, "time_limit": -2}[rollout.outcome.kind]

def none(rollout): return None
def nan(rollout): return float("nan")
def yes(rollout): return True
def text(rollout): return "1.0"
def raises(rollout): raise ValueError("no such answer")
def exits(rollout): os._exit(0)
def hangs(rollout): time.sleep(300)
async def waits(rollout): return 0.25

def flaky(rollout):
    mark = rollout.workspace / "tried"
    if not mark.exists():
        mark.touch()
        raise ValueError("first time")
    return 1.0
"""


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    path = tmp_path / "evaluators.py"
    path.write_text(FUNCTIONS)
    return lambda name: {"python": f"{path}:{name}"}


async def judged(store: SqliteStore, controller: Start, rollout: Rollout) -> Rollout:
    controller()
    await store.add_rollouts([rollout])
    [ended] = await finished(store, rollout.rollout_id)
    return ended


async def test_a_function_reads_the_finished_rollout(
    store: SqliteStore,
    controller: Start,
    rollout: Make,
    python: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AGL_ADMIN_KEY", "secret")
    request = json.dumps({"messages": [{"role": "user", "content": "2+2"}]}).encode()
    message = {"role": "assistant", "content": "4"}
    response = json.dumps({"choices": [{"message": message}]}).encode()
    mark, go = tmp_path / "mark", tmp_path / "go"
    script = f"echo >> {mark}; until [ -e {go} ]; do sleep 0.02; done; echo 4 | tee answer.txt"
    controller()
    await store.add_rollouts([rollout(f"{script}; echo hm >&2", evaluate=python("reads_all"))])
    await appears(mark)
    attempt = (await store.get_rollout("r1")).attempt_id or ""
    call = Call("c1", "r1", attempt, prompt_ids=token_array([1]), completions=())
    await store.add_call(call, RawCall(request, response))
    go.touch()
    [ended] = await finished(store, "r1")
    assert (ended.state, ended.reward) == ("succeeded", 1.0)
    [event] = await store.events("r1")
    assert event.data == {"value": 1.0, "source": "evaluator", "reason": "read it all"}
    assert (event.attempt_id, event.event_type) == (attempt, "reward")


async def test_the_evaluation_of_a_cancelled_rollout_is_ended(
    store: SqliteStore,
    controller: Start,
    rollout: Make,
    tmp_path: Path,
) -> None:
    mark = tmp_path / "mark"
    evaluate = {"command": ["bash", "-c", f"echo $$ >> {mark}; sleep 300"], "time_limit": 300}
    controller(lease=1.0)
    await store.add_rollouts([rollout("true", evaluate=evaluate)])
    process = psutil.Process(int(await appears(mark)))
    await store.cancel("r1")
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [process], 20)
    assert gone == [process]
    # It was let go, not tried again.
    await store.add_rollouts([rollout("true", "r2")])
    [other] = await finished(store, "r2")
    assert other.state == "succeeded"
    assert mark.read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("script", "reward", "kind"),
    [("exit 1", -1.0, "agent_error"), ("sleep 300", -2.0, "time_limit")],
)
async def test_agents_that_failed_are_evaluated_too(
    store: SqliteStore,
    controller: Start,
    rollout: Make,
    python: Callable[[str], dict[str, Any]],
    script: str,
    reward: float,
    kind: str,
) -> None:
    config = {"timeout_seconds": 0.5}
    each = rollout(script, evaluate=python("of_outcome"), config=config)
    ended = await judged(store, controller, each)
    assert (ended.state, ended.reward) == ("failed", reward)
    assert ended.outcome is not None
    assert ended.outcome.kind == kind


async def test_async_functions_and_no_reward(
    store: SqliteStore, controller: Start, rollout: Make, python: Callable[[str], dict[str, Any]]
) -> None:
    controller()
    each = [rollout("true", name, evaluate=python(name)) for name in ("waits", "none")]
    await store.add_rollouts(each)
    ended = await finished(store, "waits", "none")
    assert [(e.state, e.reward) for e in ended] == [("succeeded", 0.25), ("succeeded", None)]
    assert [len(await store.events(each)) for each in ("waits", "none")] == [1, 0]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nan", "nan"),
        ("yes", r"True \(bool\)"),
        ("text", r"'1.0' \(str\)"),
        ("raises", "ValueError: no such answer"),
        ("exits", "without an answer"),
        ("hangs", "time limit of 0.3 s"),
        ("not_there", "not_there"),
    ],
)
async def test_a_fault_of_the_evaluator_is_not_the_agents(
    store: SqliteStore,
    controller: Start,
    rollout: Make,
    python: Callable[[str], dict[str, Any]],
    name: str,
    what: str,
) -> None:
    limit = {"time_limit": 0.3} if name == "hangs" else {}
    ended = await judged(store, controller, rollout("true", evaluate={**python(name), **limit}))
    assert ended.outcome is not None
    assert (ended.state, ended.outcome.kind, ended.attempt) == ("failed", "evaluator_error", 1)
    assert (ended.reward, ended.outcome.exit_code) == (None, 0)
    with pytest.raises(EvaluatorError, match=what):
        raise EvaluatorError(ended.error_message)


async def test_an_evaluation_is_repeated_without_the_agent(
    store: SqliteStore,
    controller: Start,
    rollout: Make,
    python: Callable[[str], dict[str, Any]],
    tmp_path: Path,
) -> None:
    script = f"echo ran >> {tmp_path}/runs"
    ended = await judged(store, controller, rollout(script, evaluate=python("flaky")))
    assert (ended.state, ended.reward, ended.attempt) == ("succeeded", 1.0, 1)
    assert (tmp_path / "runs").read_text() == "ran\n"


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("echo judging; grep -q 4 answer.txt && echo 0.5", 0.5),
        ("grep -q completed $AGL_ROLLOUT_FILE && grep -q 2+2 $AGL_TASK_FILE && echo 1", 1.0),
        ("test -z $OPENAI_API_KEY && test $PWD != / && echo 2", 2.0),
        ("echo '{{ task.question }}' | grep -q 2+2 && echo 3", 3.0),
    ],
)
async def test_a_command_prints_the_reward(
    store: SqliteStore, controller: Start, rollout: Make, script: str, reward: float
) -> None:
    evaluate = {"command": ["bash", "-c", script]}
    ended = await judged(store, controller, rollout("echo 4 > answer.txt", evaluate=evaluate))
    assert (ended.state, ended.reward) == ("succeeded", reward)


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["echo", "good"], "'good'"),
        (["true"], "''"),
        (["echo", "nan"], "nan"),
        (["bash", "-c", "echo bad test >&2; exit 2"], "exit code 2: bad test"),
        (["no-such-grader"], "no-such-grader"),
        (["{{ task.nope }}"], "nope"),
    ],
)
async def test_a_command_that_fails_is_the_evaluators_fault(
    store: SqliteStore, controller: Start, rollout: Make, command: list[str], what: str
) -> None:
    ended = await judged(store, controller, rollout("true", evaluate={"command": command}))
    assert ended.outcome is not None
    assert ended.outcome.kind == "evaluator_error"
    assert ended.error_message is not None
    assert what in ended.error_message


async def test_an_agent_that_is_its_own_judge_has_no_evaluator(
    store: SqliteStore, controller: Start, rollout: Make
) -> None:
    ended = await judged(store, controller, rollout("true", evaluate={"event": True}))
    assert (ended.state, ended.reward) == ("succeeded", None)


@pytest.mark.parametrize("value", [True, "1", float("inf"), [1], {"reason": "none"}])
def test_rewards_are_finite_numbers(value: object) -> None:
    with pytest.raises(EvaluatorError):
        checked_reward(value)


def test_conversations_of_each_dialect() -> None:
    call = Call("c", "r", "a", prompt_ids=token_array(), completions=())

    def last(dialect: Any, request: object, response: object) -> str:
        raw = RawCall(json.dumps(request).encode(), json.dumps(response).encode())
        messages = conversation(replace(call, dialect=dialect), raw)
        finished = FinishedRollout(Rollout("r", {}), Outcome("completed"), None, messages=messages)
        assert len(messages) == 2
        return finished.answer

    ask = {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": "a"}
    blocks = [{"type": "text", "text": "a"}, {"type": "tool_use", "input": {}}]
    assert last("chat", {"messages": [ask]}, {"choices": [{"message": answer}]}) == "a"
    assert last("completions", {"prompt": "q"}, {"choices": [{"text": "a"}]}) == "a"
    assert last("messages", {"messages": [ask]}, {"content": blocks}) == "a"
    output = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    assert last("responses", {"input": "q"}, {"output": [output]}) == "a"
