"""Sends an admitted call to a model server, relays the answer and records both."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import NoReturn

import orjson

from agentlightning.config import GatewayConfig
from agentlightning.errors import NoUpstream, UpstreamError
from agentlightning.gateway.client import Client, ClientGone
from agentlightning.gateway.forward import TRANSPORT_ERRORS, Exchange, Forwarder, Request
from agentlightning.gateway.metrics import Metrics
from agentlightning.gateway.record import End, Run, records
from agentlightning.gateway.refusal import Refusal
from agentlightning.gateway.upstreams import Upstreams
from agentlightning.gateway.wire.answer import strip
from agentlightning.gateway.wire.parse import SHAPE_ERRORS, parse_json
from agentlightning.gateway.wire.stream import StreamReader
from agentlightning.store import Store
from agentlightning.types import Json, ModelServer

logger = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"
_UNDELIVERED = End("undelivered", "undelivered")


class Relay:
    """The way of a call from the gate to the model server and back."""

    def __init__(
        self,
        config: GatewayConfig,
        store: Store,
        *,
        upstreams: Upstreams,
        forwarder: Forwarder,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._store = store
        self._upstreams = upstreams
        self._forwarder = forwarder
        self._metrics = metrics

    async def run(self, client: Client, run: Run) -> None:
        """Raises Refusal where the agent is to get an error of the gateway's own."""
        exchange = await self._open(client, run)
        if exchange is None:
            return
        run.server = exchange.server
        run.http_status = exchange.response.status
        try:
            if run.http_status == 200 and exchange.event_stream:
                await self._stream(client, run, exchange)
            else:
                await self._whole(client, run, exchange)
        finally:
            self._forwarder.close_exchange(exchange)

    async def servers(self) -> list[ModelServer]:
        """The registered model servers."""
        return await self._upstreams.servers()

    async def _open(self, client: Client, run: Run) -> Exchange | None:
        try:
            with client.interruptible():
                servers = await self._servers(run)
                path, rollout_id = run.address.rest, run.address.rollout_id
                request = Request(run.call_id, rollout_id, path, run.body)
                return await self._forwarder.open(request, servers)
        except ClientGone:
            await self._record(client, run, _UNDELIVERED)
            return None
        except TypeError as error:
            text = f"The body cannot be sent on: {error}."
            raise Refusal(400, "invalid_json", text) from error
        except NoUpstream as error:
            raise Refusal(503, "no_model_server", str(error), fault="gateway") from error
        except UpstreamError as error:
            await self._record(client, run, End("error", "upstream_error", str(error)))
            raise Refusal(503, "unreachable", str(error), fault="model_server") from error

    async def _servers(self, run: Run) -> list[ModelServer]:
        model = str(run.request.get("model") or "")
        servers = await self._upstreams.candidates(model)
        run.policy = not model or any(server.model == model for server in servers)
        if not run.policy and self._config.other_models == "refuse":
            known = ", ".join(sorted({server.model for server in servers}))
            raise Refusal(404, "model_not_found", f"There is no model {model!r}, only: {known}.")
        return servers

    async def _whole(self, client: Client, run: Run, exchange: Exchange) -> None:
        try:
            with client.interruptible():
                body = await exchange.response.read()
        except ClientGone:
            await self._record(client, run, _UNDELIVERED)
            return
        except TRANSPORT_ERRORS as error:
            await self._broken(client, run, failure=error)
        run.first_byte_at = time.time()
        run.last_byte_at = time.monotonic()
        if run.http_status != 200:
            await self._pass_on_error(client, run, exchange, body)
            return
        visible = self._take(run, body)
        if not run.answer.choices:  # never "zero tokens and no error"
            await self._broken(client, run, failure=ValueError("it holds no choices"))
        await self._commit(client, run)
        if run.asked.stream:
            await client.start_stream(exchange.headers(), keepalive=self._config.keepalive)
            await client.end_stream(b"data: " + visible + b"\n\n" + _DONE)
        else:
            await client.answer(200, visible, exchange.headers())

    async def _pass_on_error(
        self, client: Client, run: Run, exchange: Exchange, body: bytes
    ) -> None:
        text = body[:2000].decode(errors="replace")
        refused = exchange.response.status < 500
        reason = "upstream_refused" if refused else "upstream_error"
        await self._record(client, run, End("error", reason, text, response=body))
        kind = exchange.response.headers.get("content-type", "application/json")
        await client.answer(exchange.response.status, body, exchange.headers(), content_type=kind)

    def _take(self, run: Run, body: bytes) -> bytes:
        """What the agent gets to see of a whole answer; the rest goes into ``run.answer``."""
        try:
            payload = parse_json(body)
            run.answer.body = payload
            run.wire.take(payload, run.answer)
            return orjson.dumps(self._visible(run, body, payload))
        except SHAPE_ERRORS as error:
            run.answer.malformed = True
            logger.warning("call %s: the answer has an unknown shape: %s", run.call_id, error)
            return body

    def _visible(self, run: Run, body: bytes, payload: dict[str, Json]) -> Mapping[str, Json]:
        if run.asked.own_fields:
            payload = parse_json(body)
            strip(payload, run.asked)
        return run.wire.as_chunk(payload) if run.asked.stream else payload

    async def _stream(self, client: Client, run: Run, exchange: Exchange) -> None:
        reader = StreamReader(run.wire, run.answer, run.asked)
        if run.asked.stream:
            await client.start_stream(exchange.headers(), keepalive=self._config.keepalive)
        try:
            with client.interruptible():
                await self._pump(client, run, exchange, reader)
        except ClientGone:
            await self._record(client, run, _UNDELIVERED)
            return
        except TRANSPORT_ERRORS as error:
            await self._broken(client, run, failure=error)
        run.last_byte_at = time.monotonic()
        if not reader.done:
            await self._broken(client, run, said=reader.error)
        await self._commit(client, run)
        if run.asked.stream:
            await client.end_stream(reader.held)
        else:
            await client.answer(200, orjson.dumps(run.answer.body), exchange.headers())

    async def _pump(
        self, client: Client, run: Run, exchange: Exchange, reader: StreamReader
    ) -> None:
        async for data in exchange.response.content.iter_any():
            run.first_byte_at = run.first_byte_at or time.time()
            visible = reader.feed(data)
            if visible and run.asked.stream:
                await client.write(visible)
            if reader.ended:
                return

    async def _broken(
        self,
        client: Client,
        run: Run,
        *,
        failure: BaseException | None = None,
        said: bytes | None = None,
    ) -> NoReturn:
        """Records what came of an answer that broke off; the agent sees it broken too."""
        endpoint = run.server.endpoint if run.server else ""
        what = str(failure) or type(failure).__name__ if failure else "it ended too early"
        text = f"The answer of the model server {endpoint} broke off: {what}."
        if said is not None:
            text = said[:2000].decode(errors="replace")
        await self._record(client, run, End("error", "upstream_error", text))
        raise Refusal(502, "broken_answer", text, fault="model_server", raw=said) from failure

    async def _commit(self, client: Client, run: Run) -> None:
        """Records a whole answer. What cannot be recorded does not reach the agent."""
        if not await self._record(client, run, _UNDELIVERED if client.gone else End()):
            text = "The answer could not be recorded, so it is withheld. Try again."
            raise Refusal(503, "not_recorded", text, fault="gateway")

    async def _record(self, client: Client, run: Run, end: End) -> bool:
        """Whether the call was committed."""
        version = self._upstreams.version(run.server.endpoint) if run.server else None
        try:
            call, raw = records(run, end, version_end=version)
            await self._store.add_call(call, raw)
            if client.gone and end.status == "ok":
                await self._store.mark_undelivered(call.call_id, "undelivered")
        except Exception:
            logger.exception("call %s of %r was not recorded", run.call_id, run.address.rollout_id)
            self._metrics.record_failed()
            return False
        added = time.monotonic() - run.last_byte_at if run.last_byte_at else 0.0
        self._metrics.recorded(call, added)
        return True
