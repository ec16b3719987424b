"""Controllers as processes over one SQLite file, one of them killed."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import psutil
import pytest

from agentlightning.store.sqlite import SqliteStore
from agentlightning.types import Rollout
from tests.controller.waiting import appears

PROGRAM = """
import asyncio, sys
from pathlib import Path
from agentlightning.config import ControllerConfig
from agentlightning.controller.loop import run
from agentlightning.store.sqlite import SqliteStore

async def main(folder):
    store = SqliteStore(folder / "store.db")
    await run(ControllerConfig(lease=1.0), store=store, gateway_url="http://127.0.0.1:9",
              admin_key="k", root=folder / "rollouts")
    await store.close()

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_the_next_controller_runs_what_the_last_one_left(
    tmp_path: Path, signum: signal.Signals
) -> None:
    mark, go = tmp_path / "mark", tmp_path / "go"
    script = f"echo $$ >> {mark}; until [ -e {go} ]; do sleep 0.02; done"
    store = SqliteStore(tmp_path / "store.db")
    config = {"local": {"command": ["bash", "-c", script]}}
    await store.add_rollouts([Rollout("r1", {}, config=config)])
    first = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, str(tmp_path))
    agent = psutil.Process(int(await appears(mark)))
    first.send_signal(signum)
    assert await first.wait() == (-9 if signum == signal.SIGKILL else 0)
    second = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, str(tmp_path))
    await appears(mark, lines=2)
    assert not agent.is_running()
    go.touch()
    page = await store.terminal(wait=20)
    assert [(item.rollout_id, item.state) for item in page.items] == [("r1", "succeeded")]
    kinds = [each.outcome and each.outcome.kind for each in await store.attempts("r1")]
    assert kinds == ["lost" if signum == signal.SIGKILL else "cancelled", "completed"]
    second.terminate()
    assert await second.wait() == 0
    await store.close()
