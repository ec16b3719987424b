"""Serves an ASGI application over a real socket within the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn

from agentlightning.serving import bound_url, listen


class _Server(uvicorn.Server):
    """The test's process keeps its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serve(app: Any, *, lifespan: str = "off") -> AsyncIterator[str]:
    """The URL of ``app``; the server is gone afterwards."""
    sock = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http="httptools",
        ws="none",
        lifespan=lifespan,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    task = asyncio.ensure_future(server.serve(sockets=[sock]))
    while not server.started:
        if task.done():
            await task
            raise RuntimeError("the application did not start")
        await asyncio.sleep(0.001)
    try:
        yield bound_url(sock)
    finally:
        server.should_exit = True
        await task
        sock.close()
