"""Pause, resume, drain, health and metrics."""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from agentlightning import credentials
from agentlightning.errors import CredentialError, StoreError
from agentlightning.gateway.gate import Gate, Pause
from agentlightning.gateway.metrics import Metrics
from agentlightning.gateway.upstreams import Upstreams

B = TypeVar("B", bound=BaseModel)


class PauseBody(BaseModel):
    """Body of ``POST /proxy/pause``."""

    model_config = ConfigDict(allow_inf_nan=False)

    retry_after_seconds: float = Field(5.0, ge=0)
    reason: str = ""
    mode: Literal["hold", "refuse"] = "hold"


class DrainBody(BaseModel):
    """Body of ``POST /proxy/drain``."""

    model_config = ConfigDict(allow_inf_nan=False)

    timeout_seconds: float = Field(30.0, ge=0, le=3600)


def control_routes(
    gate: Gate, upstreams: Upstreams, metrics: Metrics, *, admin_key: str
) -> list[Route]:
    """The routes beside the calls and ``/api``; those under ``/proxy`` need the admin key."""

    async def pause(request: Request) -> Response:
        _require_admin(request, admin_key)
        body = await _body(request, PauseBody)
        await gate.pause(Pause(body.retry_after_seconds, body.reason, body.mode))
        return JSONResponse(gate.state())

    async def resume(request: Request) -> Response:
        _require_admin(request, admin_key)
        await gate.resume()
        return JSONResponse(gate.state())

    async def state(request: Request) -> Response:
        _require_admin(request, admin_key)
        return JSONResponse(gate.state())

    async def drain(request: Request) -> Response:
        _require_admin(request, admin_key)
        body = await _body(request, DrainBody)
        return JSONResponse(await gate.drain(body.timeout_seconds))

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_: Request) -> Response:
        try:
            servers = await upstreams.servers()
        except StoreError as error:
            return JSONResponse({"ready": False, "reason": f"store: {error}"}, 503)
        reason = None if servers else "no model server is registered"
        return JSONResponse({"ready": bool(servers), "reason": reason}, 200 if servers else 503)

    async def metrics_text(_: Request) -> Response:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    return [
        Route("/proxy/pause", pause, methods=["POST"]),
        Route("/proxy/resume", resume, methods=["POST"]),
        Route("/proxy/state", state),
        Route("/proxy/drain", drain, methods=["POST"]),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics_text),
    ]


async def _body(request: Request, model: type[B]) -> B:
    try:
        return model.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        raise HTTPException(422, str(error)) from error


def _require_admin(request: Request, admin_key: str) -> None:
    try:
        proved = credentials.check(admin_key, credentials.bearer(request.headers))
    except CredentialError as error:
        raise HTTPException(401, str(error)) from error
    if not proved.admin:
        raise HTTPException(403, "the admin key is needed: an attempt's credential cannot do this")
