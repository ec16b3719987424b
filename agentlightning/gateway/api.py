"""``/api``: rollouts, events, calls and model servers over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar
from urllib.parse import unquote

from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from agentlightning import credentials
from agentlightning.errors import Conflict, CredentialError, NotFound, StoreError, StoreUnavailable
from agentlightning.gateway import api_models as models
from agentlightning.samples import build_samples
from agentlightning.store import Store, Transition, codec
from agentlightning.types import Json, Rollout, Sample

B = TypeVar("B")
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

_MOST_BYTES = 64 * 2**20
_MOST_BYTES_OF_AN_AGENT = 2**20

_STATUS: dict[type[Exception], int] = {
    NotFound: 404,
    Conflict: 409,
    StoreUnavailable: 503,
    StoreError: 500,
    ValidationError: 422,
    ValueError: 422,
}


def api_routes(store: Store, *, admin_key: str) -> list[Route]:
    """The routes below ``/api``. Each error's body is ``{"detail": …}``."""
    api = _Api(store, admin_key)
    rollout, attempt = "/api/rollouts/{rollout_id}", "/attempt/{attempt_id}"
    table: list[tuple[str, str, Handler]] = [
        ("POST", "/api/rollouts", api.add_rollouts),
        ("GET", "/api/rollouts", api.list_rollouts),
        ("GET", "/api/rollouts/terminal", api.terminal),
        ("GET", rollout, api.get_rollout),
        ("PATCH", rollout, api.patch),
        ("DELETE", rollout, api.delete),
        ("POST", f"{rollout}/cancel", api.cancel),
        ("POST", f"{rollout}/retry", api.retry),
        ("POST", f"{rollout}{attempt}/open", api.open_attempt),
        ("GET", f"{rollout}/events", api.events),
        ("GET", f"{rollout}/calls", api.calls),
        ("POST", f"{rollout}/calls", api.add_call),
        ("GET", f"{rollout}/samples", api.samples),
        ("POST", "/api/claim", api.claim),
        ("POST", "/api/renew", api.renew),
        ("GET", "/api/calls/{call_id}/raw", api.raw_call),
        ("POST", "/api/calls/{call_id}/undelivered", api.mark_undelivered),
        ("GET", "/api/models", api.model_servers),
        ("POST", "/api/models", api.register_models),
        ("PUT", "/api/models", api.set_models),
        ("DELETE", "/api/models", api.delete_models),
        ("GET", "/api/settings/{name}", api.setting),
        ("PUT", "/api/settings/{name}", api.set_setting),
    ]
    routes: list[Route] = [
        _ExactRoute(path, _guarded(handler, admin_key), methods=[method])
        for method, path, handler in table
    ]
    # The one route that checks for itself: an agent may be its own judge.
    events = _answering(api.add_event)
    routes.append(_ExactRoute(f"{rollout}{attempt}/events", events, methods=["POST"]))
    return routes


class _Api:
    """One method a route; errors are turned into answers around them."""

    def __init__(self, store: Store, admin_key: str) -> None:
        self._store = store
        self._admin_key = admin_key

    # --- rollouts

    async def add_rollouts(self, request: Request) -> Response:
        new = await _body(request, list[models.NewRollout])
        added = await self._store.add_rollouts([one.record() for one in new])
        return _json([codec.dump_rollout(one) for one in added], 201)

    async def list_rollouts(self, request: Request) -> Response:
        values = dict(request.query_params)
        lists = {name: request.query_params.getlist(name) for name in ("state_in", "group_id")}
        query = models.ListQuery.model_validate({**values, **lists})
        found = await self._store.list_rollouts(
            states=query.state_in, group_ids=query.group_id, after=query.after, limit=query.limit
        )
        return _json([codec.dump_rollout(one) for one in found])

    async def terminal(self, request: Request) -> Response:
        query = models.TerminalQuery.model_validate(dict(request.query_params))
        page = await self._store.terminal(
            after=query.after, limit=query.limit, wait=min(query.wait, models.MAX_WAIT)
        )
        return _json(codec.dump_page(page))

    async def get_rollout(self, request: Request) -> Response:
        rollout_id = request.path_params["rollout_id"]
        rollout = await self._store.get_rollout(rollout_id)
        attempts = [codec.dump_attempt(one) for one in await self._store.attempts(rollout_id)]
        return _json({"rollout": codec.dump_rollout(rollout), "attempts": attempts})

    async def patch(self, request: Request) -> Response:
        patch = await _body(request, models.Patch)
        status, rollout_id = patch.status, request.path_params["rollout_id"]
        if status.state == "running" and status.last_attempt_id and not patch.strict:
            await self._store.open_attempt(rollout_id, status.last_attempt_id)
        change = Transition(
            to=status.state,
            attempt_id=status.last_attempt_id,
            owner=status.owner,
            outcome=status.outcome.record() if status.outcome else None,
            error_message=status.error_message,
            k8s_job_name=status.k8s_job_name,
        )
        return _json(codec.dump_rollout(await self._store.transition(rollout_id, change)))

    async def delete(self, request: Request) -> Response:
        await self._store.delete_rollout(request.path_params["rollout_id"])
        return Response(status_code=204)

    async def cancel(self, request: Request) -> Response:
        rollout = await self._store.cancel(request.path_params["rollout_id"])
        return _json(codec.dump_rollout(rollout))

    # --- attempts and leases

    async def claim(self, request: Request) -> Response:
        body = await _body(request, models.Claim)
        claim = self._store.claim(
            body.owner,
            limit=body.limit,
            lease_seconds=body.lease_seconds,
            wait=min(body.wait, models.MAX_WAIT),
            request_id=body.request_id,
        )
        taken = await _while_connected(request, claim)
        return _json([codec.dump_rollout(one) for one in taken])

    async def renew(self, request: Request) -> Response:
        body = await _body(request, models.Renewal)
        held = await self._store.renew(
            body.owner, body.rollout_ids, lease_seconds=body.lease_seconds
        )
        return _json([codec.dump_rollout(one) for one in held])

    async def retry(self, request: Request) -> Response:
        body = await _body(request, models.Retry)
        rollout = await self._store.retry(
            request.path_params["rollout_id"],
            owner=body.owner,
            attempt_id=body.attempt_id,
            outcome=body.outcome.record(),
            lease_seconds=body.lease_seconds,
        )
        return _json(codec.dump_rollout(rollout))

    async def open_attempt(self, request: Request) -> Response:
        where = request.path_params
        rollout = await self._store.open_attempt(where["rollout_id"], where["attempt_id"])
        return _json(codec.dump_rollout(rollout))

    # --- calls and events

    async def add_event(self, request: Request) -> Response:
        rollout_id = request.path_params["rollout_id"]
        attempt_id = request.path_params["attempt_id"]
        credential = _credential(request, self._admin_key)
        _require_judge(credential, rollout_id, attempt_id)
        if not credential.admin:
            _require_running(await self._store.get_rollout(rollout_id), attempt_id)
        limit = _MOST_BYTES if credential.admin else _MOST_BYTES_OF_AN_AGENT
        new = await _body(request, models.NewEvent, limit=limit)
        event = await self._store.add_event(
            new.record(rollout_id, attempt_id),
            idempotency_key=request.headers.get("idempotency-key") or new.idempotency_key,
        )
        return _json(codec.dump_event(event), 201)

    async def events(self, request: Request) -> Response:
        rollout_id, query = request.path_params["rollout_id"], request.query_params
        attempt_id = query.get("attempt_id")
        if query.get("format") == "triplet":
            calls = await self._store.calls(rollout_id, attempt_id=attempt_id)
            return _json([codec.dump_triplet(c, one) for c in calls for one in c.completions])
        if query.get("format"):
            raise ValueError(f"format {query['format']!r} is not known; use 'triplet' or leave it")
        events = await self._store.events(
            rollout_id, attempt_id=attempt_id, event_type=query.get("event_type")
        )
        return _json([codec.dump_event(one) for one in events])

    async def calls(self, request: Request) -> Response:
        calls = await self._store.calls(
            request.path_params["rollout_id"], attempt_id=request.query_params.get("attempt_id")
        )
        return _json([codec.dump_call(one) for one in calls])

    async def add_call(self, request: Request) -> Response:
        body = await _body(request, models.NewCall)
        try:
            call, raw = codec.load_call(body.call), codec.load_raw(body.raw)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"not a call as GET …/calls gives it: {error!r}") from error
        if call.rollout_id != request.path_params["rollout_id"]:
            raise ValueError(f"the call is of rollout {call.rollout_id!r}, not of the path's")
        await self._store.add_call(call, raw)
        return _json({"call_id": call.call_id}, 201)

    async def raw_call(self, request: Request) -> Response:
        return _json(codec.dump_raw(await self._store.raw_call(request.path_params["call_id"])))

    async def mark_undelivered(self, request: Request) -> Response:
        body = await _body(request, models.Undelivered)
        await self._store.mark_undelivered(request.path_params["call_id"], body.reason)
        return Response(status_code=204)

    async def samples(self, request: Request) -> Response:
        rollout = await self._store.get_rollout(request.path_params["rollout_id"])
        built = build_samples(rollout, await self._store.calls(rollout.rollout_id))
        samples = [_dump_sample(one) for one in built.samples]
        return _json({"samples": samples, "counts": dict(built.counts)})

    # --- model servers and settings

    async def model_servers(self, _: Request) -> Response:
        return _json([codec.dump_server(one) for one in await self._store.model_servers()])

    async def register_models(self, request: Request) -> Response:
        """Replaces the servers of the one owner that the list names, or all of them."""
        servers = [one.record() for one in await _body(request, list[models.Server])]
        owners = {one.owner for one in servers}
        if len(owners) > 1:
            raise ValueError("the servers have different owners; register each owner's by itself")
        await self._store.set_model_servers(servers, owner=owners.pop() if owners else None)
        return await self.model_servers(request)

    async def set_models(self, request: Request) -> Response:
        servers = [one.record() for one in await _body(request, list[models.Server])]
        await self._store.set_model_servers(servers, owner=request.query_params.get("owner"))
        return Response(status_code=204)

    async def delete_models(self, request: Request) -> Response:
        await self._store.set_model_servers([], owner=request.query_params.get("owner"))
        return Response(status_code=204)

    async def setting(self, request: Request) -> Response:
        return _json({"value": await self._store.setting(request.path_params["name"])})

    async def set_setting(self, request: Request) -> Response:
        body = await _body(request, models.Setting)
        await self._store.set_setting(request.path_params["name"], body.value)
        return Response(status_code=204)


class _ExactRoute(Route):
    """Matches the path as it was sent, so that an id may hold an encoded slash."""

    def matches(self, scope: MutableMapping[str, Any]) -> tuple[Match, Any]:
        raw = scope.get("raw_path")
        if raw:
            path = raw.decode("latin-1").partition("?")[0]
            scope = {**scope, "path": path, "root_path": ""}
        match, child = super().matches(scope)
        if raw and match is not Match.NONE:
            params = child["path_params"]
            child = {**child, "path_params": {k: unquote(v) for k, v in params.items()}}
        return match, child


def _guarded(handler: Handler, admin_key: str) -> Handler:
    async def guarded(request: Request) -> Response:
        credential = _credential(request, admin_key)
        if not credential.admin:
            raise HTTPException(
                403,
                f"{request.method} {request.url.path} needs the admin key; this credential's "
                f"scopes are: {', '.join(sorted(credential.scopes)) or 'none'} (admin is missing)",
            )
        return await handler(request)

    return _answering(guarded)


def _answering(handler: Handler) -> Handler:
    async def answering(request: Request) -> Response:
        try:
            return await handler(request)
        except HTTPException as error:
            return _json({"detail": error.detail}, error.status_code)
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_context=False, include_input=False)
            return _json({"detail": wrong}, 422)
        except tuple(_STATUS) as error:
            status = next(code for kind, code in _STATUS.items() if isinstance(error, kind))
            return _json({"detail": str(error)}, status)

    return answering


def _credential(request: Request, admin_key: str) -> credentials.Credential:
    try:
        return credentials.check(admin_key, credentials.bearer(request.headers))
    except CredentialError as error:
        raise HTTPException(401, str(error)) from error


def _require_judge(credential: credentials.Credential, rollout_id: str, attempt_id: str) -> None:
    if credential.admin:
        return
    if (credential.rollout_id, credential.attempt_id) != (rollout_id, attempt_id):
        raise HTTPException(403, "this credential is of another attempt; it may post none here")
    if "reward" not in credential.scopes:
        raise HTTPException(403, "posting events needs the scope 'reward', which is missing")


def _require_running(rollout: Rollout, attempt_id: str) -> None:
    """What an agent leaves running may not change its reward after it was graded."""
    if rollout.terminal or rollout.attempt_id != attempt_id:
        raise Conflict(f"attempt {attempt_id!r} is over: it may post no more events")


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled once the client is gone: a claim that still
    waits for rollouts must not take any for a controller that has ended."""
    task, gone = asyncio.create_task(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(503, "the client closed the connection before the answer")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _body(request: Request, kind: type[B], *, limit: int = _MOST_BYTES) -> B:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise HTTPException(413, f"the body has more than {limit} bytes, which is the most")
    try:
        data: Json = codec.loads(bytes(body))
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    return TypeAdapter(kind).validate_python(data)


def _json(data: Json, status: int = 200) -> Response:
    return Response(codec.dumps(data), status, media_type="application/json")


def _dump_sample(sample: Sample) -> dict[str, Json]:
    arrays = ("token_ids", "loss_mask", "rollout_logprobs", "policy_versions")
    plain = {name: getattr(sample, name) for name in ("rollout_id", "group_id", "reward")}
    return {**plain, **{name: getattr(sample, name).tolist() for name in arrays}}
