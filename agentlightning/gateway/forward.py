"""Sends a call to a model server, again while that one is down."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
import orjson
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from agentlightning.config import GatewayConfig
from agentlightning.errors import UpstreamError
from agentlightning.gateway.upstreams import Upstreams
from agentlightning.types import Json, ModelServer

TRANSPORT_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)

_DOWN = frozenset({502, 503})
_NOT_COPIED = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "server",
        "set-cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that belong to one connection, or that the gateway sets itself."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to send for a call. ``body`` lacks only the server's model name."""

    call_id: str
    rollout_id: str
    path: str
    body: dict[str, Json]


@dataclass(slots=True)
class Exchange:
    """A model server that has begun to answer; must be closed."""

    server: ModelServer
    response: aiohttp.ClientResponse

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The server's headers that may be passed on."""
        return [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in self.response.headers.items()
            if name.lower() not in _NOT_COPIED
        ]

    @property
    def event_stream(self) -> bool:
        return self.response.content_type == "text/event-stream"


class Forwarder:
    """The gateway's HTTP client."""

    def __init__(self, config: GatewayConfig, upstreams: Upstreams) -> None:
        self._upstreams = upstreams
        self._retry_seconds = config.upstream_retry
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=config.connect_timeout, sock_read=config.idle_timeout
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=timeout,
            headers={"accept-encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def open(self, request: Request, servers: Collection[ModelServer]) -> Exchange:
        """The first server that answers. While none does, or only with 502 or 503, it is tried
        again with jittered back-off within ``upstream_retry``; then UpstreamError."""
        server = self._upstreams.acquire(servers, request.rollout_id)
        try:
            return await self._once(request, server)
        except UpstreamError as error:
            return await self._again(request, server, error)

    async def _again(
        self, request: Request, server: ModelServer, failure: UpstreamError
    ) -> Exchange:
        retrying = AsyncRetrying(
            stop=stop_after_delay(self._retry_seconds),
            wait=wait_random_exponential(multiplier=0.1, max=2),
            retry=retry_if_exception_type(UpstreamError),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                if attempt.retry_state.attempt_number == 1:
                    raise failure  # the first try is behind us: wait before the next
                servers = await self._upstreams.candidates(request.body["model"])
                server = self._upstreams.acquire(servers, request.rollout_id, avoid=server.endpoint)
                return await self._once(request, server)
        raise failure

    def close_exchange(self, exchange: Exchange) -> None:
        """Gives the connection back, or cuts it where the answer was not read to its end."""
        self._upstreams.release(exchange.server)
        exchange.response.close()

    async def _once(self, request: Request, server: ModelServer) -> Exchange:
        try:
            response = await self._post(request, server)
        except BaseException as error:
            self._upstreams.release(server)
            if isinstance(error, TRANSPORT_ERRORS):
                raise _unreachable(server, str(error) or type(error).__name__) from error
            raise
        if response.status not in _DOWN:
            return Exchange(server, response)
        self._upstreams.release(server)
        text = b""
        with suppress(*TRANSPORT_ERRORS):
            text = await response.content.read(500)
        response.close()
        raise _unreachable(server, f"HTTP {response.status} {text.decode(errors='replace')}")

    async def _post(self, request: Request, server: ModelServer) -> aiohttp.ClientResponse:
        body = orjson.dumps({**request.body, "model": server.model})
        return await self._session.post(
            server.endpoint.rstrip("/") + request.path,
            data=body,
            headers={"content-type": "application/json", "x-request-id": request.call_id},
            allow_redirects=False,
        )


def _unreachable(server: ModelServer, detail: str) -> UpstreamError:
    return UpstreamError(f"The model server {server.endpoint} does not answer: {detail.strip()}")
