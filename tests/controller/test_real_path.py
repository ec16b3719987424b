"""Gateway and controller as processes, an agent with the openai SDK, an evaluator: all real."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentlightning.store import HttpStore
from agentlightning.types import ModelServer, Rollout
from tests.controller.waiting import finished
from tests.fakes.model_server import Reply, ScriptedModelServer

ROOT = Path(__file__).parents[2]
KEY = "the-admin-key"
AGENT = """
import os
from openai import OpenAI
assert "AGL_ADMIN_KEY" not in os.environ
asked = [{"role": "user", "content": os.environ["AGL_TASK"]}]
print(OpenAI().chat.completions.create(model="policy", messages=asked).choices[0].message.content)
"""
EVALUATOR = """
def reward(rollout):
    assert rollout.calls[0].completions[0].token_ids
    assert rollout.stdout.strip() == rollout.answer
    return 1.0 if rollout.answer == "4" else 0.0
"""


@asynccontextmanager
async def service(*arguments: str) -> AsyncIterator[str]:
    """A service of ours as a process; the last word of the line that says it is ready."""
    argv = [sys.executable, "-m", "agentlightning", *arguments]
    env = {**os.environ, "AGL_ADMIN_KEY": KEY}
    process: Process = await asyncio.create_subprocess_exec(*argv, env=env, cwd=ROOT, stdout=PIPE)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield line.decode().split()[-1]
    finally:
        process.terminate()
        assert await process.wait() in (0, -signal.SIGTERM)


async def test_from_queued_to_rewarded(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "evaluator.py").write_text(EVALUATOR)
    local = {
        "python": str(tmp_path / "agent.py"),
        "preload": ["examples/warm_openai.py"],
        "evaluate": {"python": f"{tmp_path}/evaluator.py:reward"},
    }
    script = (Reply("4"), Reply("5"))
    async with (
        ScriptedModelServer(script) as model,
        service("gateway", "--port", "0", "--store", str(tmp_path / "store.db")) as url,
        service("controller", "--gateway", url, "--root", str(tmp_path / "agents")),
    ):
        store = HttpStore(url, KEY)
        await store.set_model_servers([ModelServer("policy", model.url, version=3)])
        for name, reward in (("right", 1.0), ("wrong", 0.0)):
            await store.add_rollouts([Rollout(name, "2+2", config={"local": local})])
            [ended] = await finished(store, name)
            assert (ended.state, ended.reward, ended.attempt) == ("succeeded", reward, 1)
            [call] = await store.calls(name)
            assert (call.trainable, call.version_start) == (True, 3)
            assert call.attempt_id == ended.attempt_id
            [event] = await store.events(name)
            assert event.data == {"value": reward, "source": "evaluator"}
        await store.close()
