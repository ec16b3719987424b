"""A controller with real processes over a SQLite file."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agentlightning.config import ControllerConfig
from agentlightning.controller.evaluator import LocalEvaluator
from agentlightning.controller.launch import Gateway
from agentlightning.controller.local import LocalRunner
from agentlightning.controller.loop import Controller
from agentlightning.controller.spawn import ForkServers
from agentlightning.store.sqlite import SqliteStore
from agentlightning.types import Rollout


@pytest.fixture
def gateway() -> Gateway:
    return Gateway("http://127.0.0.1:9", "admin")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db")
    yield store
    await store.close()


@pytest.fixture
async def runner(tmp_path: Path, gateway: Gateway) -> AsyncIterator[LocalRunner]:
    runner = LocalRunner(tmp_path, gateway, ForkServers(tmp_path / "forkserver.log"))
    yield runner
    await runner.close()


@pytest.fixture
def rollout() -> Callable[..., Rollout]:
    """A rollout whose agent is a shell command or whatever ``local`` says."""

    def make(script: str | None = None, rollout_id: str = "r1", **local: Any) -> Rollout:
        config = local.pop("config", {})
        task = local.pop("task", {"question": "2+2"})
        if script is not None:
            local["command"] = ["bash", "-c", script]
        return Rollout(rollout_id, task, config={**config, "local": local})

    return make


@pytest.fixture
async def controller(
    tmp_path: Path, gateway: Gateway, store: SqliteStore
) -> AsyncIterator[Callable[..., Controller]]:
    """Starts controllers, and ends them with the test."""
    running: list[tuple[Controller, asyncio.Task[None]]] = []

    def start(**settings: Any) -> Controller:
        servers = ForkServers(tmp_path / "forkserver.log")
        controller = Controller(
            store,
            LocalRunner(tmp_path, gateway, servers),
            LocalEvaluator(store, tmp_path, servers),
            ControllerConfig(**{"lease": 2.0, **settings}),
        )
        running.append((controller, asyncio.create_task(controller.run())))
        return controller

    yield start
    for each, task in running:
        each.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await task
