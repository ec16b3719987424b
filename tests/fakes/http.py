"""Serves an ASGI application over a real socket within the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from agentlightning.serving import bound_url, listen


@asynccontextmanager
async def serve(app: Any, *, lifespan: str = "off") -> AsyncIterator[str]:
    """The URL of ``app``. At the end open connections are cut and the application is gone.

    The protocol is uvicorn's; its server class is not used, since that polls and takes over
    the signals of the process.
    """
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http="httptools",
        ws="none",
        lifespan=lifespan,
        access_log=False,
        log_config=None,
    )
    config.load()
    life = config.lifespan_class(config)
    await life.startup()
    if life.should_exit:
        raise RuntimeError("the application did not start")
    state = ServerState()
    sock = listen("127.0.0.1", 0)

    def protocol() -> asyncio.Protocol:
        return config.http_protocol_class(config=config, server_state=state, app_state=life.state)

    server = await asyncio.get_running_loop().create_server(protocol, sock=sock)
    try:
        yield bound_url(sock)
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        for task in list(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)
        await life.shutdown()
