"""Puts the gateway together and runs it."""

from __future__ import annotations

import gc
import ipaddress
import os
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.config import GatewayConfig
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.gateway.api import api_routes
from agentlightning.gateway.attempts import Attempts
from agentlightning.gateway.control import control_routes
from agentlightning.gateway.forward import Forwarder
from agentlightning.gateway.gate import Gate
from agentlightning.gateway.metrics import Metrics
from agentlightning.gateway.proxy import Proxy, Settings
from agentlightning.gateway.relay import Relay
from agentlightning.gateway.upstreams import Upstreams
from agentlightning.serving import listen, serve_app
from agentlightning.store import Store, open_store
from agentlightning.types import Json, Mode

_CALLS = "/proxy/rollout/"
_API = "/api/"


def build_app(
    gateway: GatewayConfig,
    store: Store,
    *,
    admin_key: str,
    sampling: Mapping[Mode, Mapping[str, Json]],
) -> ASGIApp:
    """The gateway as an ASGI application; it does not close the store."""
    return _Gateway(gateway, store, Settings(admin_key, sampling, gateway.max_body))


def run(
    gateway: GatewayConfig, *, store_url: str, sampling: Mapping[Mode, Mapping[str, Json]]
) -> None:
    """Serves until SIGTERM or SIGINT. ConfigError where it would be open to others."""
    admin_key = gateway.key or os.environ.get("AGL_ADMIN_KEY", "")
    if not admin_key and not _loopback(gateway.host):
        raise ConfigError(
            f"gateway.host is {gateway.host!r}, beyond loopback, and there is no key. Set "
            "gateway.key or AGL_ADMIN_KEY, or bind to 127.0.0.1."
        )
    sock = listen(gateway.host, gateway.port)

    def build(store: Store) -> ASGIApp:
        return build_app(gateway, store, admin_key=admin_key, sampling=sampling)

    # A call makes thousands of short-lived objects that reference counting frees by itself:
    # looking for cycles every 700 of them costs a tenth of the call.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    opening = _OnStore(store_url, build)
    try:
        serve_app(opening, sock, name="gateway")
    except SystemExit:
        if opening.failure is None:
            raise
        raise opening.failure from None
    finally:
        sock.close()


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _OnStore:
    """Opens the store within the server's event loop and closes it last."""

    def __init__(self, url: str, build: Callable[[Store], ASGIApp]) -> None:
        self.failure: AgentLightningError | None = None
        self._url = url
        self._build = build
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
            return
        try:
            store = await open_store(self._url)
        except AgentLightningError as error:
            self.failure = error
            await receive()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return

        async def closing(message: MutableMapping[str, Any]) -> None:
            """The server ends as soon as it has this message: the store closes before."""
            if message["type"].startswith("lifespan.shutdown."):
                await store.close()
            await send(message)

        self._app = self._build(store)
        await self._app(scope, receive, closing)


class _Gateway:
    """Model calls go straight to the proxy, all else through Starlette."""

    def __init__(self, config: GatewayConfig, store: Store, settings: Settings) -> None:
        self._config = config
        self._store = store
        self._settings = settings
        self._gate = Gate(store, hold_limit=config.hold_limit)
        self._metrics = Metrics(self._gate)
        self._attempts = Attempts(store)
        self._upstreams = Upstreams(store, wait=config.upstream_retry)
        routes = [
            *control_routes(
                self._gate, self._upstreams, self._metrics, admin_key=settings.admin_key
            ),
            *api_routes(store, admin_key=settings.admin_key),
        ]
        self._control = Starlette(routes=routes, lifespan=self._lifespan)
        self._proxy: Proxy | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if self._proxy is not None and scope["path"].startswith(_CALLS):
                await self._proxy(scope, receive, send)
                return
            if scope["path"].startswith(_API) and scope["method"] not in ("GET", "HEAD"):
                send = self._expiring(send)
        await self._control(scope, receive, send)

    def _expiring(self, send: Send) -> Send:
        """Whoever has the answer to a change finds it in force."""

        async def wrapped(message: MutableMapping[str, Any]) -> None:
            self._upstreams.expire()
            self._attempts.expire()
            await send(message)

        return wrapped

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._gate.restore()
        forwarder = Forwarder(self._config, self._upstreams)
        relay = Relay(
            self._config,
            self._store,
            upstreams=self._upstreams,
            forwarder=forwarder,
            metrics=self._metrics,
        )
        self._proxy = Proxy(
            self._attempts,
            relay,
            gate=self._gate,
            metrics=self._metrics,
            settings=self._settings,
        )
        try:
            yield
        finally:
            await forwarder.close()
