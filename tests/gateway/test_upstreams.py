"""Model servers that are down, that refuse, and how the load is spread."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import openai
import pytest

from agentlightning.gateway.upstreams import Upstreams
from agentlightning.types import ModelServer
from tests.fakes.model_server import Reply, ScriptedModelServer
from tests.gateway.conftest import sqlite_store, stage

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("status", [502, 503])
async def test_a_server_that_is_down_is_tried_again(status: int) -> None:
    async with stage([Reply(status=status)] * 2) as s, s.agent() as agent:
        answer = await agent.chat.completions.create(model="policy", messages=HELLO)
        assert answer.choices[0].message.content == "hello"
        assert len(s.model.requests) == 3
        assert (await s.call()).trainable


async def test_a_server_that_stays_down_is_a_503_that_says_so() -> None:
    script = lambda _: Reply(status=503)  # noqa: E731
    async with stage(script, upstream_retry=0.2) as s, s.agent() as agent:
        with pytest.raises(openai.InternalServerError) as raised:
            await agent.chat.completions.create(model="policy", messages=HELLO)
        assert raised.value.status_code == 503
        assert raised.value.type == "model_server_error"
        call = await s.call()
        assert (call.status, call.trainable, call.reason) == ("error", False, "upstream_error")


async def test_another_server_takes_over_from_one_that_is_gone() -> None:
    async with stage() as s, s.agent() as agent, ScriptedModelServer() as gone:
        await s.store.set_model_servers(
            [ModelServer("policy", gone.url, 3), ModelServer("policy", s.model.url, 4)]
        )
        await gone.__aexit__(None, None, None)
        for _ in range(4):
            await agent.chat.completions.create(model="policy", messages=HELLO)
        assert {c.upstream for c in await s.calls()} == {s.model.url}
        assert {c.version_start for c in await s.calls()} == {4}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_4xx_passes_as_it_was_and_at_once(stream: bool) -> None:
    headers = ((b"x-request-cost", b"3"), (b"server", b"secret"), (b"keep-alive", b"5"))
    async with stage([Reply(status=400, headers=headers)]) as s, s.agent() as agent:
        with pytest.raises(openai.BadRequestError, match="scripted 400") as raised:
            await agent.chat.completions.create(model="policy", messages=HELLO, stream=stream)
        answer = raised.value.response
        assert answer.headers["x-request-cost"] == "3"
        assert not {"server", "keep-alive"} & set(answer.headers)
        assert len(s.model.requests) == 1
        call = await s.call()
        assert (call.status, call.http_status, call.reason) == ("error", 400, "upstream_refused")
        assert b"scripted 400" in (await s.store.raw_call(call.call_id)).response


@pytest.mark.parametrize("stream", [False, True])
async def test_a_200_without_an_answer_is_an_error(stream: bool) -> None:
    async with stage([Reply(fault="no_choices")]) as s, s.agent() as agent:
        with pytest.raises(openai.InternalServerError, match="it holds no choices"):
            await agent.chat.completions.create(model="policy", messages=HELLO, stream=stream)
        call = await s.call()
        assert (call.status, call.trainable, call.reason) == ("error", False, "upstream_error")


async def test_no_model_server_is_a_503() -> None:
    async with stage(upstream_retry=0.1) as s, s.agent() as agent:
        await s.store.set_model_servers([])
        with pytest.raises(openai.InternalServerError, match="No model server") as raised:
            await agent.chat.completions.create(model="policy", messages=HELLO)
        assert raised.value.status_code == 503
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{s.url}/readyz")).status_code == 503
            assert (await http.get(f"{s.url}/healthz")).status_code == 200


async def test_the_agent_s_key_stays_here() -> None:
    async with stage() as s, s.agent() as agent:
        await agent.chat.completions.create(model="policy", messages=HELLO)
        assert "authorization" not in s.model.headers[0]
        assert s.model.headers[0]["x-request-id"] == (await s.call()).call_id


SERVERS = [ModelServer("policy", "http://a/v1"), ModelServer("policy", "http://b/v1")]


async def test_a_rollout_stays_with_its_server() -> None:
    async with sqlite_store() as store:
        upstreams = Upstreams(store, wait=1)
        homes = {}
        for k in range(10):
            server = upstreams.acquire(SERVERS, f"r{k}")
            homes[f"r{k}"] = server.endpoint
            upstreams.release(server)
        assert sorted(homes.values()) == ["http://a/v1"] * 5 + ["http://b/v1"] * 5
        for rollout, home in homes.items():
            server = upstreams.acquire(SERVERS, rollout)
            assert server.endpoint == home
            upstreams.release(server)


async def test_a_rollout_moves_away_from_an_overloaded_server() -> None:
    async with sqlite_store() as store:
        upstreams = Upstreams(store, wait=1)
        home = upstreams.acquire(SERVERS, "r1")
        for _ in range(10):
            upstreams.acquire([home], "others")
        assert upstreams.acquire(SERVERS, "r1").endpoint != home.endpoint


async def test_a_change_of_servers_holds_for_the_next_call() -> None:
    async with sqlite_store() as store:
        upstreams = Upstreams(store, wait=1)
        await store.set_model_servers([ModelServer("policy", "http://a/v1", 1)])
        assert [s.version for s in await upstreams.candidates("policy")] == [1]
        await store.set_model_servers([ModelServer("policy", "http://a/v1", 2)])
        upstreams.expire()
        assert [s.version for s in await upstreams.candidates("policy")] == [2]
