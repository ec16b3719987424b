"""Pausing is invisible to the harness: calls wait, they do not fail."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.fakes.model_server import Reply
from tests.gateway.conftest import KEY, Stage, stage

HELLO: Any = [{"role": "user", "content": "hello"}]


def _admin(s: Stage) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=s.url, headers={"authorization": f"Bearer {KEY}"})


def _ask(agent: openai.AsyncOpenAI) -> asyncio.Task[Any]:
    return asyncio.ensure_future(agent.chat.completions.create(model="policy", messages=HELLO))


async def _until_held(admin: httpx.AsyncClient, held: int) -> dict[str, Any]:
    while True:
        state: dict[str, Any] = (await admin.get("/proxy/state")).json()
        if state["held"] == held:
            return state


async def test_calls_are_held_and_go_on() -> None:
    async with stage() as s, s.agent() as agent, _admin(s) as admin:
        body = {"reason": "weights", "retry_after_seconds": 3}
        assert (await admin.post("/proxy/pause", json=body)).json()["paused"]
        asking = [_ask(agent) for _ in range(5)]
        state = await _until_held(admin, 5)
        assert state == {
            "paused": True,
            "retry_after_seconds": 3,
            "reason": "weights",
            "inflight": 0,
            "held": 5,
        }
        assert not s.model.requests
        await admin.post("/proxy/resume")
        answers = await asyncio.gather(*asking)
        assert {a.choices[0].message.content for a in answers} == {"hello"}
        assert len(await s.calls()) == 5
        assert not (await admin.get("/proxy/state")).json()["paused"]


async def test_a_call_held_too_long_is_told_when_to_come_back() -> None:
    async with stage(hold_limit=0.05) as s, s.agent() as agent, _admin(s) as admin:
        await admin.post("/proxy/pause", json={"retry_after_seconds": 7})
        with pytest.raises(openai.InternalServerError) as raised:
            await agent.chat.completions.create(model="policy", messages=HELLO)
        assert raised.value.status_code == 503
        assert raised.value.response.headers["retry-after"] == "7"


async def test_a_pause_that_refuses() -> None:
    async with stage() as s, s.agent() as agent, _admin(s) as admin:
        await admin.post("/proxy/pause", json={"mode": "refuse", "retry_after_seconds": 2})
        with pytest.raises(openai.RateLimitError) as raised:
            await agent.chat.completions.create(model="policy", messages=HELLO)
        assert raised.value.response.headers["retry-after"] == "2"
        assert raised.value.response.headers["x-agl-paused"] == "true"


async def test_a_held_client_that_gives_up_leaves_no_trace() -> None:
    async with stage() as s, s.agent() as agent, _admin(s) as admin:
        await admin.post("/proxy/pause")
        asking = _ask(agent)
        await _until_held(admin, 1)
        asking.cancel()
        await _until_held(admin, 0)
        await admin.post("/proxy/resume")
        assert not await s.calls()
        assert not s.model.requests


async def test_a_rollout_cancelled_while_held_is_refused() -> None:
    async with stage() as s, s.agent() as agent, _admin(s) as admin:
        await admin.post("/proxy/pause")
        asking = _ask(agent)
        await _until_held(admin, 1)
        await s.store.cancel("r1")
        await admin.post("/proxy/resume")
        with pytest.raises(openai.ConflictError):
            await asking


async def test_drain_says_what_is_in_flight() -> None:
    first = asyncio.Event()
    async with stage([Reply(first=first)]) as s, s.agent() as agent, _admin(s) as admin:
        asking = _ask(agent)
        await s.model.arrived.wait()
        await admin.post("/proxy/pause")
        drained = (await admin.post("/proxy/drain", json={"timeout_seconds": 0.05})).json()
        assert (drained["drained"], drained["inflight"]) == (False, 1)
        assert drained["calls"][0]["rollout_id"] == "r1"
        draining = asyncio.ensure_future(admin.post("/proxy/drain", json={"timeout_seconds": 20}))
        first.set()
        assert (await draining).json() == {"drained": True, "inflight": 0, "calls": []}
        await asking


async def test_only_the_admin_pauses() -> None:
    async with stage() as s, httpx.AsyncClient(base_url=s.url) as http:
        for path in ("pause", "resume", "drain"):
            token = {"authorization": f"Bearer {s.token()}"}
            assert (await http.post(f"/proxy/{path}")).status_code == 401
            assert (await http.post(f"/proxy/{path}", headers=token)).status_code == 403
        bad = {"mode": "sleep"}
        headers = {"authorization": f"Bearer {KEY}"}
        assert (await http.post("/proxy/pause", json=bad, headers=headers)).status_code == 422


async def test_metrics_count_calls() -> None:
    async with stage([Reply(), Reply(fault="no_logprobs")]) as s, s.agent() as agent:
        for _ in range(2):
            await agent.chat.completions.create(model="policy", messages=HELLO)
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"{s.url}/metrics")).text
        ok = 'agl_calls_total{dialect="chat",reason="",status="ok",trainable="true"} 1.0'
        assert ok in text
        assert 'reason="logprobs_missing"' in text
        assert 'agl_tokens_total{kind="completion"} 10.0' in text
