"""Who may call, for which attempt, and what everyone else is told."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2 as httpx
import openai
import pytest

from agentlightning import address, credentials
from agentlightning.gateway.attempts import Attempts
from agentlightning.gateway.refusal import Refusal
from agentlightning.types import Outcome, Rollout
from tests.gateway.conftest import KEY, Stage, sqlite_store, stage

HELLO: Any = [{"role": "user", "content": "hello"}]


async def _post(s: Stage, token: str | None, *, base: str | None = None) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    body = {"model": "policy", "messages": HELLO}
    async with httpx.AsyncClient() as http:
        url = f"{base or s.base()}/chat/completions"
        return await http.post(url, json=body, headers=headers)


async def _ask_for_ever(agent: openai.AsyncOpenAI) -> None:
    while True:
        await agent.chat.completions.create(model="policy", messages=HELLO)


async def test_credentials() -> None:
    async with stage() as s:
        assert (await _post(s, None)).status_code == 401
        assert (await _post(s, "nonsense")).status_code == 401
        other = await _post(s, s.token(attempt="a2"))
        assert other.status_code == 403
        assert "'call'" in other.json()["error"]["message"]
        reward_only = await _post(s, s.token(scopes=("reward",)))
        assert reward_only.status_code == 403
        assert reward_only.json()["error"]["code"] == "missing_scope"
        assert not await s.calls()
        assert (await _post(s, s.token())).status_code == 200
        assert (await _post(s, KEY)).status_code == 200


async def test_an_expired_credential_is_refused_even_if_it_was_used_before() -> None:
    async with stage() as s:
        token = credentials.sign(KEY, "r1", "a1", scopes=["call"], seconds=-1)
        answer = await _post(s, token)
        assert answer.status_code == 401
        assert "expired" in answer.json()["error"]["message"]


async def test_unknown_rollout_is_404_in_the_dialect() -> None:
    async with stage() as s:
        base = address.openai_base_url(s.url, "nobody", "a1", "train")
        answer = await _post(s, KEY, base=base)
        assert answer.status_code == 404
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["type"] == "agent_error"


async def test_a_rollout_that_another_process_cancelled_soon_takes_no_calls() -> None:
    async with stage() as s, s.agent() as agent:
        await agent.chat.completions.create(model="policy", messages=HELLO)
        await s.store.cancel("r1")
        with pytest.raises(openai.ConflictError, match="cancelled"):
            await _ask_for_ever(agent)


async def test_a_change_through_this_process_holds_at_once() -> None:
    async with sqlite_store() as store:
        attempts = Attempts(store)
        await store.add_rollouts([Rollout("r1", {})])
        own = address.AttemptAddress("r1", "a1", "train", "openai")
        await attempts.check(own)
        await store.cancel("r1")
        attempts.expire()
        with pytest.raises(Refusal, match="cancelled"):
            await attempts.check(own)


async def test_an_earlier_attempt_takes_no_calls() -> None:
    async with stage() as s, s.agent() as agent:
        await s.store.add_rollouts([Rollout("r2", {}, config={"max_attempts": 2})])
        lost = Outcome("lost")
        (first,) = [
            r for r in await s.store.claim("c1", limit=9, lease_seconds=60) if r.rollout_id == "r2"
        ]
        assert first.attempt_id
        await s.store.retry(
            "r2", owner="c1", attempt_id=first.attempt_id, outcome=lost, lease_seconds=60
        )
        base = address.openai_base_url(s.url, "r2", first.attempt_id, "train")
        async with agent.with_options(base_url=base, api_key=KEY) as late:
            with pytest.raises(openai.ConflictError, match="current"):
                await late.chat.completions.create(model="policy", messages=HELLO)


async def test_ids_survive_the_address() -> None:
    async with stage() as s:
        rollout = "harbor/hello-world:0 é"
        await s.store.add_rollouts([Rollout(rollout, {})])
        base = address.openai_base_url(s.url, rollout, "1/2", "train")
        assert (await _post(s, s.token(rollout, "1/2"), base=base)).status_code == 200
        (call,) = await s.store.calls(rollout)
        assert (call.rollout_id, call.attempt_id) == (rollout, "1/2")


async def test_models_are_listed_and_are_no_calls() -> None:
    async with stage() as s, s.agent() as agent:
        assert [m.id async for m in agent.models.list()] == ["policy"]
        assert (await agent.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError):
            await agent.models.retrieve("other")
        assert not await s.calls()


async def test_what_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    async with stage() as s, httpx.AsyncClient(headers={"x-api-key": s.token()}) as http:
        for _ in range(2):
            answer = await http.post(f"{s.base()}/files", json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_path")
        assert sum("openai/files" in r.message for r in caplog.records) == 1
        base = address.anthropic_base_url(s.url, "r1", "a1", "train")
        answer = await http.post(f"{base}/v1/messages?beta=true", json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "not_found_error"
        assert (await http.head(f"{base}/api/hello")).status_code == 200
        upgrade = {"connection": "Upgrade", "upgrade": "websocket"}
        answer = await http.get(f"{s.base()}/responses", headers=upgrade)
        assert answer.status_code == 426
        assert (await http.get(f"{s.base()}/chat/completions")).status_code == 405
        assert (await http.get(f"{s.url}/proxy/rollout/r1")).status_code == 404


async def test_bodies_that_are_refused() -> None:
    async with stage(max_body=1024) as s:
        async with httpx.AsyncClient(headers={"x-api-key": s.token()}) as http:
            url = f"{s.base()}/chat/completions"
            answer = await http.post(url, content=b"x" * 2000)
            assert answer.status_code == 413
            assert "1024" in answer.json()["error"]["message"]
            assert (await http.post(url, content=b"[1]")).status_code == 400
            assert (await http.post(url, content=b"{")).status_code == 400
        assert not s.model.requests


async def test_a_body_without_length_is_cut_off_at_the_bound() -> None:
    async with stage(max_body=1024) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(s.url).port)
        path = httpx.URL(f"{s.base()}/chat/completions").path
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {s.token()}\r\n"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n800\r\n".encode() + b"x" * 2048)
        assert b"413" in await reader.readline()
        writer.close()


async def test_a_body_nested_too_deeply_to_send_on_is_400() -> None:
    async with stage() as s, httpx.AsyncClient() as http:
        body = '{"model": "policy", "messages": ' + "[" * 900 + "]" * 900 + "}"
        headers = {"authorization": f"Bearer {s.token()}"}
        answer = await http.post(f"{s.base()}/chat/completions", content=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_json"
        past = await http.get(
            f"{s.url}/api/rollouts/terminal?after={2**70}",
            headers={"authorization": f"Bearer {KEY}"},
        )
        assert past.status_code == 422
