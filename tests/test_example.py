"""The calculator example: its tool, its agent against a scripted server, its grader, its tasks."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.controller.evaluate import FinishedRollout
from agentlightning.types import Outcome, Rollout
from examples.calculator import agent, grade, make_tasks
from tests.fakes.model_server import Reply, ScriptedModelServer

FOLDER = Path(agent.__file__).parent
QUESTION = "Take 12, multiply by 7, add 5."


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12 + 7", 19), ("2*3-10", -4), (" -(4) * 5 ", -20), ("90 * 90 * 90", 729000)],
)
def test_calc(expression: str, value: int) -> None:
    assert agent.calc(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "1 / 2", "2 ** 9", "__import__('os')", "True + 1", "1.5", "a", "1 +"]
)
def test_calc_refuses_what_is_no_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError, match=r"arithmetic|compute"):
        agent.calc(expression)


async def run_agent(folder: Path, url: str, *arguments: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(FOLDER / "agent.py"),
        *arguments,
        cwd=folder,
        env={"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "k", "MODEL": "policy", **_path()},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode().strip()


def _path() -> dict[str, str]:
    return {"PATH": os.environ["PATH"]}


async def test_the_agent_uses_its_tool_and_prints_the_answer(tmp_path: Path) -> None:
    script = (Reply("CALL calc(12 * 7 + 5)"), Reply("ANSWER 89"))
    async with ScriptedModelServer(script) as server:
        code, printed = await run_agent(tmp_path, server.url, QUESTION)
        first, second = (request["messages"] for request in server.requests)
    assert (code, printed) == (0, "89")
    assert first[-1] == {"role": "user", "content": QUESTION}
    assert second[: len(first)] == first, "the history is continued, not edited"
    assert second[-1] == {"role": "user", "content": "RESULT 89"}
    assert json.loads((tmp_path / "answer.json").read_text())["answer"] == "89"


async def test_the_agent_stops_after_its_turns_and_without_a_tool_call(tmp_path: Path) -> None:
    async with ScriptedModelServer(lambda _: Reply("CALL calc(1 +")) as server:
        code, printed = await run_agent(tmp_path, server.url, QUESTION)
        assert len(server.requests) == 1
    assert (code, printed) == (0, "no answer")
    async with ScriptedModelServer(lambda _: Reply("CALL calc(1 + 1)")) as server:
        await run_agent(tmp_path, server.url, QUESTION, "--no-example")
        assert len(server.requests) == agent.MAX_TURNS
        assert [m["role"] for m in server.requests[0]["messages"]] == ["system", "user"]


def finished(*said: tuple[str, str], question: str = QUESTION) -> FinishedRollout:
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in said]
    example = [{"role": role, "content": text} for role, text in agent.EXAMPLE]
    rollout = Rollout("r", {"question": QUESTION, "answer": "89"})
    asked = {"role": "user", "content": question}
    return FinishedRollout(
        rollout, Outcome("completed"), None, messages=(*example, asked, *messages)
    )


CALL, RESULT = ("assistant", "CALL calc(12 * 7 + 5)"), ("user", "RESULT 89")


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ((CALL, RESULT, ("assistant", "ANSWER 89")), 1.0),
        ((("assistant", "ANSWER 89"),), 1.0),
        ((CALL, RESULT, ("assistant", "ANSWER 90")), 0.2),
        ((CALL, RESULT, ("assistant", "ANSWER 1 2 3 89")), 0.2),
        ((CALL, RESULT, ("assistant", "It is 89")), 0.2),
        ((CALL, RESULT), 0.2),
        ((("assistant", "CALL calc(12 +"), ("user", "ERROR")), 0.0),
        ((("assistant", "CALCULATE 12 * 7"),), 0.0),
        ((), 0.0),
    ],
)
def test_the_grader(said: tuple[tuple[str, str], ...], reward: float) -> None:
    assert grade.final_answer(finished(*said))["value"] == reward


def test_an_answer_to_another_question_earns_nothing() -> None:
    other = finished(CALL, RESULT, ("assistant", "ANSWER 89"), question="Say ANSWER 89")
    assert grade.final_answer(other)["value"] == 0.0


def test_what_the_agent_prints_earns_nothing() -> None:
    silent = FinishedRollout(
        Rollout("r", {"question": QUESTION, "answer": "89"}),
        Outcome("completed"),
        None,
        stdout="ANSWER 89",
    )
    assert grade.final_answer(silent)["value"] == 0.0


def test_the_task_files_are_what_the_generator_makes() -> None:
    tasks = make_tasks.make_tasks(make_tasks.TRAIN + make_tasks.VAL)
    files = [
        json.loads(line)
        for name in ("train", "val")
        for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()
    ]
    assert files == tasks
    assert len({task["question"] for task in tasks}) == len(tasks)


def test_answers_do_not_depend_on_what_binds_tighter() -> None:
    words = {"add": "+", "subtract": "-", "multiply": "*", "by": ""}
    for task in make_tasks.make_tasks(300):
        text = task["question"].removeprefix("Take ").rstrip(".").replace(",", "")
        expression = " ".join(words.get(word, word) for word in text.split())
        assert str(agent.calc(expression)) == task["answer"]
