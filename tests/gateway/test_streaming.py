"""Streams are relayed live, and one that breaks never looks like one that ended well."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.fakes.model_server import Reply, encode
from tests.gateway.conftest import Stage, stage

HELLO = [{"role": "user", "content": "hello"}]
HELLO_IDS = encode("hello")


def _chat(s: Stage, **fields: Any) -> dict[str, Any]:
    return {
        "url": f"{s.base()}/chat/completions",
        "headers": {"authorization": f"Bearer {s.token()}"},
        "json": {"model": "policy", "messages": HELLO, "stream": True, **fields},
    }


async def test_chunks_arrive_before_the_answer_is_complete() -> None:
    middle = asyncio.Event()
    async with stage([Reply(middle=middle)]) as s, s.agent() as agent:
        stream = await agent.chat.completions.create(model="policy", messages=HELLO, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content == "h":
                assert not await s.calls()
                middle.set()
        assert (await s.call()).trainable


async def test_the_call_is_recorded_when_the_finishing_chunk_arrives() -> None:
    async with stage() as s, s.agent() as agent:
        stream = await agent.chat.completions.create(model="policy", messages=HELLO, stream=True)
        async for chunk in stream:
            if chunk.choices[0].finish_reason:
                assert (await s.call()).status == "ok"
                break
        await stream.close()
        assert (await s.call()).status == "ok"


async def test_only_what_was_asked_for_is_seen() -> None:
    async with stage() as s, httpx.AsyncClient() as http:
        plain = (await http.post(**_chat(s))).text
        assert "token_ids" not in plain
        assert "usage" not in plain
        assert '"logprob"' not in plain
        options = {"include_usage": True}
        fields = {"return_token_ids": True, "logprobs": True, "stream_options": options}
        full = (await http.post(**_chat(s, **fields))).text
        events = [json.loads(e[6:]) for e in full.split("\n\n") if e.startswith("data: {")]
        assert events[0]["prompt_token_ids"]
        assert [e["choices"][0]["token_ids"] for e in events[1:-1]] == [[t] for t in HELLO_IDS]
        assert events[1]["choices"][0]["logprobs"]["content"]
        assert events[-1]["usage"]["completion_tokens"] == 5
        assert full.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("fault", ["reset", "clean_end", "error_event"])
async def test_a_broken_stream_is_broken_for_the_agent_too(fault: Any) -> None:
    async with stage([Reply(fault=fault)]) as s, httpx.AsyncClient() as http:
        got: list[bytes] = []
        with pytest.raises(httpx.RemoteProtocolError):
            await _read(http, _chat(s), got)
        text = b"".join(got)
        assert b"[DONE]" not in text
        assert b'"error"' in text
        call = await s.call()
        assert (call.status, call.trainable, call.reason) == ("error", False, "upstream_error")
        assert 0 < len(call.completions[0].token_ids) < 5


async def test_the_sdk_raises_on_a_broken_stream() -> None:
    async with stage([Reply(fault="reset")]) as s, s.agent() as agent:
        stream = await agent.chat.completions.create(model="policy", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="broke off"):
            [chunk async for chunk in stream]


async def test_a_client_that_leaves_cancels_the_generation() -> None:
    middle = asyncio.Event()
    async with stage([Reply(middle=middle)]) as s, httpx.AsyncClient() as http:
        async with http.stream("POST", **_chat(s)) as answer:
            async for _ in answer.aiter_bytes():
                break
        await asyncio.wait_for(s.model.cancelled.wait(), 10)
        call = await s.recorded()
        assert (call.status, call.trainable, call.reason) == ("undelivered", False, "undelivered")


async def test_a_client_that_leaves_a_whole_answer_cancels_it_too() -> None:
    first = asyncio.Event()
    async with stage([Reply(first=first)]) as s, httpx.AsyncClient() as http:
        asking = asyncio.ensure_future(http.post(**_chat(s, stream=False)))
        await s.model.arrived.wait()
        asking.cancel()
        await asyncio.wait_for(s.model.cancelled.wait(), 10)
        assert (await s.recorded()).status == "undelivered"


async def test_silence_is_filled_with_comments() -> None:
    middle = asyncio.Event()
    async with stage([Reply(middle=middle)], keepalive=0.01) as s, httpx.AsyncClient() as http:
        text = b""
        async with http.stream("POST", **_chat(s)) as answer:
            async for data in answer.aiter_bytes():
                text += data
                if b": keep-alive" in text:
                    middle.set()
        assert text.endswith(b"data: [DONE]\n\n")
        assert (await s.call()).trainable


async def test_a_silent_model_server_is_given_up() -> None:
    never = asyncio.Event()
    async with stage([Reply(middle=never)], idle_timeout=0.05) as s, s.agent() as agent:
        stream = await agent.chat.completions.create(model="policy", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="broke off"):
            [chunk async for chunk in stream]
        assert (await s.call()).reason == "upstream_error"


@pytest.mark.parametrize("asked", [False, True])
async def test_the_form_of_the_answer_is_the_one_asked_for(asked: bool) -> None:
    async with stage([Reply(answer_stream=not asked)]) as s, httpx.AsyncClient() as http:
        answer = await http.post(**_chat(s, stream=asked))
        kind = answer.headers["content-type"]
        if asked:
            assert kind.startswith("text/event-stream")
            assert '"delta"' in answer.text
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert kind == "application/json"
            assert answer.json()["choices"][0]["message"]["content"] == "hello"
        call = await s.call()
        assert call.trainable is asked
        assert call.reason == (None if asked else "usage_missing")


async def test_choices_of_a_stream_are_kept_apart() -> None:
    async with stage() as s, s.agent() as agent:
        stream = await agent.chat.completions.create(
            model="policy", messages=HELLO, stream=True, n=3
        )
        texts = ["", "", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == ["hello"] * 3
        call = await s.call()
        assert [list(c.token_ids) for c in call.completions] == [encode("hello")] * 3
        assert call.trainable


async def _read(http: httpx.AsyncClient, request: dict[str, Any], got: list[bytes]) -> None:
    async with http.stream("POST", **request) as answer:
        async for data in answer.aiter_bytes():
            got.append(data)
