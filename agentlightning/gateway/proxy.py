"""One model call of an agent from end to end.

Address, credential, attempt; held while paused; sent to a model server; relayed; recorded.
The record is committed before the last byte of the answer goes out.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

import orjson
from starlette.types import Receive, Scope, Send

from agentlightning import credentials
from agentlightning.address import AttemptAddress, Provider, parse
from agentlightning.errors import CredentialError
from agentlightning.gateway.attempts import Attempts
from agentlightning.gateway.client import Client, ClientGone
from agentlightning.gateway.gate import Gate, InFlight
from agentlightning.gateway.metrics import Metrics
from agentlightning.gateway.record import Run
from agentlightning.gateway.refusal import Refusal
from agentlightning.gateway.relay import Relay
from agentlightning.gateway.wire import OPENAI_WIRES, Wire
from agentlightning.types import Json, Mode

logger = logging.getLogger(__name__)

_CREDENTIALS = 4096
"""Proved credentials that are remembered."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The proxy's slice of the configuration."""

    admin_key: str
    sampling: Mapping[Mode, Mapping[str, Json]]
    max_body: int


class Proxy:
    """The ASGI application below ``/proxy/rollout/``."""

    def __init__(
        self,
        attempts: Attempts,
        relay: Relay,
        *,
        gate: Gate,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._attempts = attempts
        self._relay = relay
        self._gate = gate
        self._metrics = metrics
        self._settings = settings
        self._unknown_paths: set[str] = set()
        self._credentials: dict[str | None, credentials.Credential] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(scope, receive, send)
        address = parse(scope["raw_path"].decode("latin-1"))
        provider: Provider = address.provider if address else "openai"
        try:
            if address is None:
                raise Refusal(
                    404, "unknown_path", "This is no attempt's address. See AGL_OPENAI_BASE_URL."
                )
            await self._route(client, address)
        except Refusal as refusal:
            self._metrics.refused(refusal.code)
            await client.refuse(refusal, provider)
        except ClientGone:
            self._metrics.refused("client_gone")
        finally:
            client.close()

    async def _route(self, client: Client, address: AttemptAddress) -> None:
        if client.method == "HEAD" and address.rest.endswith("/api/hello"):
            return await client.answer(200, b"")
        self._authorise(client, address)
        wire = OPENAI_WIRES.get(address.rest) if address.provider == "openai" else None
        if wire and client.method == "POST":
            return await self._call(client, address, wire)
        if address.provider == "openai" and client.method == "GET":
            if address.rest == "/models":
                return await self._list_models(client)
            if address.rest.startswith("/models/"):
                return await self._show_model(client, address.rest.removeprefix("/models/"))
        if client.headers.get("upgrade", "").lower() == "websocket":
            raise Refusal(426, "no_websocket", "WebSockets are not spoken here: use HTTP.")
        if wire:
            raise Refusal(405, "method_not_allowed", f"{client.method} is not allowed: use POST.")
        raise self._unknown_path(client, address)

    def _unknown_path(self, client: Client, address: AttemptAddress) -> Refusal:
        path = f"{client.method} {address.provider}{address.rest}"[:200]
        if path not in self._unknown_paths and len(self._unknown_paths) < 1000:
            self._unknown_paths.add(path)
            logger.warning("an agent asked for %s, which this gateway does not have", path)
        return Refusal(404, "unknown_path", f"This gateway does not have {path}.")

    def _authorise(self, client: Client, address: AttemptAddress) -> None:
        try:
            proved = self._proved(credentials.bearer(client.headers))
        except CredentialError as error:
            raise Refusal(401, "invalid_api_key", f"{error}.") from error
        if proved.admin:
            return
        if (proved.rollout_id, proved.attempt_id) != (address.rollout_id, address.attempt_id):
            raise Refusal(
                403,
                "other_attempt",
                f"This credential is for attempt {proved.attempt_id!r} of rollout "
                f"{proved.rollout_id!r}: it lacks the scope 'call' for any other.",
            )
        if "call" not in proved.scopes:
            has = ", ".join(sorted(proved.scopes)) or "none"
            raise Refusal(403, "missing_scope", f"The scope 'call' is missing (it has: {has}).")

    def _proved(self, token: str | None) -> credentials.Credential:
        """Checking a signature costs more than the rest of a request's way in, and a harness
        sends the same token with each call: what was proved holds until it expires."""
        known = self._credentials.get(token)
        if known is None or known.expires_at <= time.time():
            known = credentials.check(self._settings.admin_key, token)
            if len(self._credentials) >= _CREDENTIALS:
                self._credentials.clear()
            self._credentials[token] = known
        return known

    async def _call(self, client: Client, address: AttemptAddress, wire: Wire) -> None:
        raw, request = await client.read_json(self._settings.max_body)
        run = Run(
            call_id=_new_id(),
            address=address,
            wire=wire,
            raw_request=raw,
            request=request,
            asked=wire.asked(request),
            body=wire.prepare(request, self._settings.sampling.get(address.mode, {})),
        )
        await self._attempts.check(address)
        client.watch()
        flight = InFlight(address.rollout_id, address.attempt_id, run.started_at)
        async with self._gate.admit(client, run.call_id, flight) as held:
            if held:
                await self._attempts.check(address, ask=True)
            await self._relay.run(client, run)

    async def _list_models(self, client: Client) -> None:
        names = sorted({server.model for server in await self._relay.servers()})
        data = [_model(name) for name in names]
        await client.answer(200, orjson.dumps({"object": "list", "data": data}))

    async def _show_model(self, client: Client, name: str) -> None:
        known = {server.model for server in await self._relay.servers()}
        if name not in known:
            raise Refusal(404, "model_not_found", f"There is no model {name!r}.")
        await client.answer(200, orjson.dumps(_model(name)))


def _new_id() -> str:
    """Begins with the time: what is recorded one after the other lies side by side in an index."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def _model(name: str) -> dict[str, Json]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"}
