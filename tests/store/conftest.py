from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette

from agentlightning.gateway.api import api_routes
from agentlightning.serving import bound_url, listen
from agentlightning.store import HttpStore, SqliteStore, Store

KEY = "admin-key"


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def sqlite(tmp_path: Path, clock: Clock) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db", clock=clock)
    yield store
    await store.close()


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """A real server on a free port; gives its address."""
    sock = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield bound_url(sock)
    finally:
        server.should_exit = True
        await task
        sock.close()


@pytest.fixture
async def api_url(sqlite: SqliteStore) -> AsyncIterator[str]:
    async with serving(Starlette(routes=api_routes(sqlite, admin_key=KEY))) as url:
        yield url


@pytest.fixture
async def http(api_url: str) -> AsyncIterator[HttpStore]:
    store = HttpStore(api_url, KEY)
    yield store
    await store.close()


@pytest.fixture(params=["sqlite", "http"])
async def store(request: Any, sqlite: SqliteStore, http: HttpStore) -> Store:
    return sqlite if request.param == "sqlite" else http
