"""The store of a gateway, over HTTP."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import aiohttp
from tenacity import (
    AsyncRetrying,
    RetryError,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)
from yarl import URL

from agentlightning.errors import (
    Conflict,
    CredentialError,
    NotFound,
    StoreError,
    StoreUnavailable,
)
from agentlightning.store import codec
from agentlightning.store.events import check_reward
from agentlightning.store.protocol import Transition
from agentlightning.types import (
    Attempt,
    Call,
    Event,
    Json,
    ModelServer,
    Outcome,
    RawCall,
    Rollout,
    RolloutState,
    TerminalPage,
)

_ERRORS: dict[int, type[Exception]] = {
    400: ValueError,
    401: CredentialError,
    403: CredentialError,
    404: NotFound,
    409: Conflict,
    422: ValueError,
}
_UNAVAILABLE = frozenset({502, 503, 504})
_ANSWER_SECONDS = 60.0


class _Unreachable(Exception):
    """The gateway did not answer this try."""


class HttpStore:
    """See :class:`agentlightning.store.Store`. Use it in one event loop.

    Requests are repeated while the gateway cannot be reached, up to ``patience`` seconds, then
    StoreUnavailable. Repeating is safe: ids are made here, and a claim has an id of its own.
    """

    def __init__(self, base_url: str, key: str = "", *, patience: float = 60.0) -> None:
        self._base = base_url.rstrip("/") + "/api"
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._patience = patience
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- rollouts

    async def add_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        body = [codec.dump_rollout(one) for one in rollouts]
        return _rollouts(await self._ask("POST", "/rollouts", body))

    async def get_rollout(self, rollout_id: str) -> Rollout:
        data = await self._ask("GET", _rollout(rollout_id))
        return codec.load_rollout(data["rollout"])

    async def list_rollouts(
        self,
        *,
        states: Sequence[RolloutState] = (),
        group_ids: Sequence[str] = (),
        after: str | None = None,
        limit: int = 1000,
    ) -> list[Rollout]:
        query = [("state_in", one) for one in states] + [("group_id", one) for one in group_ids]
        query += [("limit", str(limit))] + ([("after", after)] if after is not None else [])
        return _rollouts(await self._ask("GET", "/rollouts", query=query))

    async def transition(self, rollout_id: str, change: Transition) -> Rollout:
        body = {"status": codec.dump_transition(change), "strict": True}
        return codec.load_rollout(await self._ask("PATCH", _rollout(rollout_id), body))

    async def cancel(self, rollout_id: str) -> Rollout:
        return codec.load_rollout(await self._ask("POST", f"{_rollout(rollout_id)}/cancel"))

    async def delete_rollout(self, rollout_id: str) -> None:
        await self._ask("DELETE", _rollout(rollout_id))

    async def terminal(self, *, after: int = 0, limit: int = 1000, wait: float = 0) -> TerminalPage:
        query = [("after", str(after)), ("limit", str(limit)), ("wait", str(wait))]
        return codec.load_page(await self._ask("GET", "/rollouts/terminal", query=query, wait=wait))

    # --- attempts and leases

    async def claim(
        self,
        owner: str,
        *,
        limit: int,
        lease_seconds: float,
        wait: float = 0,
        request_id: str | None = None,
    ) -> list[Rollout]:
        body = {
            "owner": owner,
            "limit": limit,
            "lease_seconds": lease_seconds,
            "wait": wait,
            "request_id": request_id or uuid.uuid4().hex,
        }
        return _rollouts(await self._ask("POST", "/claim", body, wait=wait))

    async def renew(
        self, owner: str, rollout_ids: Sequence[str], *, lease_seconds: float
    ) -> list[Rollout]:
        body = {"owner": owner, "rollout_ids": list(rollout_ids), "lease_seconds": lease_seconds}
        return _rollouts(await self._ask("POST", "/renew", body))

    async def retry(
        self,
        rollout_id: str,
        *,
        owner: str,
        attempt_id: str,
        outcome: Outcome,
        lease_seconds: float,
    ) -> Rollout:
        body = {
            "owner": owner,
            "attempt_id": attempt_id,
            "outcome": codec.dump_outcome(outcome),
            "lease_seconds": lease_seconds,
        }
        return codec.load_rollout(await self._ask("POST", f"{_rollout(rollout_id)}/retry", body))

    async def open_attempt(self, rollout_id: str, attempt_id: str) -> Rollout:
        path = f"{_attempt(rollout_id, attempt_id)}/open"
        return codec.load_rollout(await self._ask("POST", path))

    async def attempts(self, rollout_id: str) -> list[Attempt]:
        data = await self._ask("GET", _rollout(rollout_id))
        return [codec.load_attempt(one) for one in data["attempts"]]

    # --- calls and events

    async def add_call(self, call: Call, raw: RawCall) -> None:
        body = {"call": codec.dump_call(call), "raw": codec.dump_raw(raw)}
        await self._ask("POST", f"{_rollout(call.rollout_id)}/calls", body)

    async def mark_undelivered(self, call_id: str, reason: str) -> None:
        path = f"/calls/{quote(call_id, safe='')}/undelivered"
        await self._ask("POST", path, {"reason": reason})

    async def calls(self, rollout_id: str, *, attempt_id: str | None = None) -> list[Call]:
        query = [] if attempt_id is None else [("attempt_id", attempt_id)]
        data = await self._ask("GET", f"{_rollout(rollout_id)}/calls", query=query)
        return [codec.load_call(one) for one in data]

    async def raw_call(self, call_id: str) -> RawCall:
        return codec.load_raw(await self._ask("GET", f"/calls/{quote(call_id, safe='')}/raw"))

    async def add_event(self, event: Event, *, idempotency_key: str | None = None) -> Event:
        # JSON writers turn NaN into null: refuse it here, where the value is still known.
        check_reward(event)
        body = {**codec.dump_event(event), "idempotency_key": idempotency_key}
        path = f"{_attempt(event.rollout_id, event.attempt_id)}/events"
        return codec.load_event(await self._ask("POST", path, body))

    async def events(
        self, rollout_id: str, *, attempt_id: str | None = None, event_type: str | None = None
    ) -> list[Event]:
        wanted = {"attempt_id": attempt_id, "event_type": event_type}
        query = [(name, value) for name, value in wanted.items() if value is not None]
        data = await self._ask("GET", f"{_rollout(rollout_id)}/events", query=query)
        return [codec.load_event(one) for one in data]

    # --- what the gateway must remember

    async def set_model_servers(
        self, servers: Sequence[ModelServer], *, owner: str | None = None
    ) -> None:
        own = [one if owner is None else replace(one, owner=owner) for one in servers]
        body = [codec.dump_server(one) for one in own]
        query = [] if owner is None else [("owner", owner)]
        await self._ask("PUT", "/models", body, query=query)

    async def model_servers(self) -> list[ModelServer]:
        return [codec.load_server(one) for one in await self._ask("GET", "/models")]

    async def set_setting(self, name: str, value: Json) -> None:
        await self._ask("PUT", f"/settings/{quote(name, safe='')}", {"value": value})

    async def setting(self, name: str) -> Json:
        return (await self._ask("GET", f"/settings/{quote(name, safe='')}"))["value"]

    # --- how

    async def _ask(
        self,
        method: str,
        path: str,
        body: Json = None,
        *,
        query: Sequence[tuple[str, str]] = (),
        wait: float = 0,
    ) -> Json:
        options: dict[str, Any] = {
            "params": list(query),
            "data": None if body is None else codec.dumps(body),
            "headers": self._headers,
            "timeout": aiohttp.ClientTimeout(total=_ANSWER_SECONDS + wait),
        }
        tries = AsyncRetrying(
            retry=retry_if_exception_type(_Unreachable),
            wait=wait_random_exponential(multiplier=0.1, max=5),
            stop=stop_after_delay(self._patience + wait),
        )
        try:
            return await tries(self._once, method, path, options)
        except RetryError as error:
            cause = error.last_attempt.exception()
            raise StoreUnavailable(
                f"no answer from {self._base} within {self._patience + wait:g} s ({cause}). "
                "Is the gateway running?"
            ) from cause

    async def _once(self, method: str, path: str, options: dict[str, Any]) -> Json:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        url = self._base + path
        try:
            async with self._session.request(method, URL(url, encoded=True), **options) as answer:
                data = await answer.read()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _Unreachable(f"{type(error).__name__}: {error}") from error
        except asyncio.TimeoutError as error:
            raise _Unreachable("timed out") from error
        return _checked(answer.status, data, f"{method} {path}")


def _rollout(rollout_id: str) -> str:
    return f"/rollouts/{quote(rollout_id, safe='')}"


def _attempt(rollout_id: str, attempt_id: str) -> str:
    return f"{_rollout(rollout_id)}/attempt/{quote(attempt_id, safe='')}"


def _rollouts(data: Json) -> list[Rollout]:
    return [codec.load_rollout(one) for one in data]


def _checked(status: int, data: bytes, what: str) -> Json:
    if status in _UNAVAILABLE:
        raise _Unreachable(f"HTTP {status}")
    if status >= 400:
        raise _ERRORS.get(status, StoreError)(_detail(data) or f"{what} gave HTTP {status}")
    return codec.loads(data) if data else None


def _detail(data: bytes) -> str:
    try:
        detail = codec.loads(data)["detail"]
    except (ValueError, KeyError, TypeError):
        return data[:500].decode(errors="replace")
    return detail if isinstance(detail, str) else codec.dumps(detail).decode()
