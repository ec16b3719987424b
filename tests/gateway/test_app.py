"""The gateway as a process: what it refuses to start with, and what it remembers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from agentlightning import address
from agentlightning.config import GatewayConfig
from agentlightning.errors import ConfigError
from agentlightning.gateway.app import run
from tests.fakes.model_server import ScriptedModelServer
from tests.gateway.conftest import KEY, stage

HELLO: Any = [{"role": "user", "content": "hello"}]
START = """
import sys
from agentlightning.config import GatewayConfig
from agentlightning.gateway.app import run
run(GatewayConfig(), store_url=sys.argv[1], sampling={"train": {}, "val": {}})
"""


@contextmanager
def gateway(store_url: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A gateway in a process of its own."""
    environment = {**os.environ, "AGL_ADMIN_KEY": KEY}
    command = [sys.executable, "-c", START, store_url]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1], process
        finally:
            process.terminate()


def test_beyond_loopback_a_key_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AGL_ADMIN_KEY", raising=False)
    url = f"sqlite:///{tmp_path}/store.db"
    with pytest.raises(ConfigError, match="AGL_ADMIN_KEY"):
        run(GatewayConfig(host="0.0.0.0"), store_url=url, sampling={})


def test_a_store_that_cannot_be_opened_is_said() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        run(GatewayConfig(), store_url="nonsense", sampling={})


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_was_told_to_end_exits_with_zero(tmp_path: Path, signum: int) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    command = [sys.executable, "-m", "agentlightning", "gateway", "--port=0", "--store", store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "gateway listening on http://127.0.0.1:" in process.stdout.readline()
        process.send_signal(signum)
        assert process.wait(30) == 0


async def test_calls_and_pause_survive_kill_nine(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    headers = {"authorization": f"Bearer {KEY}"}
    async with ScriptedModelServer() as model:
        with gateway(store) as (url, process):
            async with httpx.AsyncClient(base_url=url, headers=headers) as admin:
                rollout = {"rollout_id": "r1", "input": {}}
                assert (await admin.post("/api/rollouts", json=[rollout])).status_code == 201
                server = {"model": "policy", "endpoint": model.url, "version": 3}
                await admin.post("/api/models", json=[server])
                base = address.openai_base_url(url, "r1", "a1", "train")
                async with openai.AsyncOpenAI(base_url=base, api_key=KEY) as agent:
                    await agent.chat.completions.create(model="policy", messages=HELLO)
                await admin.post("/proxy/pause", json={"reason": "weights"})
                process.send_signal(signal.SIGKILL)
        with gateway(store) as (url, _):
            async with httpx.AsyncClient(base_url=url, headers=headers) as admin:
                assert (await admin.get("/proxy/state")).json()["reason"] == "weights"
                assert len((await admin.get("/api/rollouts/r1/calls")).json()) == 1


async def test_changes_through_the_api_hold_for_the_next_call() -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    async with stage() as s, s.agent() as agent:
        await agent.chat.completions.create(model="policy", messages=HELLO)
        async with httpx.AsyncClient(base_url=s.url, headers=headers) as admin:
            server = {"model": "policy", "endpoint": s.model.url, "version": 4}
            await admin.post("/api/models", json=[server])
            await agent.chat.completions.create(model="policy", messages=HELLO)
            assert [c.version_start for c in await s.calls()] == [3, 4]
            await admin.post("/api/rollouts/r1/cancel")
            with pytest.raises(openai.ConflictError, match="cancelled"):
                await agent.chat.completions.create(model="policy", messages=HELLO)


def test_the_sync_sdk_with_raw_response(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    with gateway(store) as (url, _), openai.OpenAI(base_url=f"{url}/x", api_key=KEY) as client:
        base = address.openai_base_url(url, "nobody", "a1", "train")
        agent = client.with_options(base_url=base, max_retries=0)
        with pytest.raises(openai.NotFoundError, match="nobody"):
            agent.chat.completions.with_raw_response.create(model="policy", messages=HELLO)
