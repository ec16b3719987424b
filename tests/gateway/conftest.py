"""A real gateway over HTTP with a store and a scripted model server."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from agentlightning import address, credentials
from agentlightning.config import GatewayConfig
from agentlightning.gateway.app import build_app
from agentlightning.store import SqliteStore
from agentlightning.types import Call, ModelServer, Rollout
from tests.fakes.http import serve
from tests.fakes.model_server import Script, ScriptedModelServer

KEY = "admin-key"
SAMPLING: dict[str, dict[str, Any]] = {
    "train": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 100},
    "val": {"temperature": 0.0},
}


@dataclass
class Stage:
    """What a test plays on."""

    url: str
    store: SqliteStore
    model: ScriptedModelServer

    def base(self, rollout: str = "r1", attempt: str = "a1", mode: Any = "train") -> str:
        return address.openai_base_url(self.url, rollout, attempt, mode)

    def token(self, rollout: str = "r1", attempt: str = "a1", scopes: Any = ("call",)) -> str:
        return credentials.sign(KEY, rollout, attempt, scopes=scopes, seconds=60)

    def agent(self, mode: Any = "train", **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "timeout": 20, **options}
        return openai.AsyncOpenAI(base_url=self.base(mode=mode), api_key=self.token(), **options)

    async def calls(self) -> list[Call]:
        return await self.store.calls("r1")

    async def call(self) -> Call:
        calls = await self.calls()
        assert len(calls) == 1
        return calls[0]

    async def recorded(self) -> Call:
        """The one call, once it is there."""
        while not await self.calls():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return await self.call()


@asynccontextmanager
async def sqlite_store() -> AsyncIterator[SqliteStore]:
    """A store in a file of its own."""
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "store.db")
        try:
            yield store
        finally:
            await store.close()


@asynccontextmanager
async def stage(script: Script = (), **config: Any) -> AsyncIterator[Stage]:
    """A gateway with one rollout ``r1`` and one model server, whose policy version is 3."""
    async with sqlite_store() as store, ScriptedModelServer(script) as model:
        await store.add_rollouts([Rollout("r1", {})])
        await store.set_model_servers([ModelServer("policy", model.url, 3)])
        app = build_app(GatewayConfig(key=KEY, **config), store, admin_key=KEY, sampling=SAMPLING)
        async with serve(app, lifespan="on") as url:
            yield Stage(url, store, model)
