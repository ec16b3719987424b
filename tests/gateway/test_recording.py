"""Each call is recorded with the ids and logprobs that the model server reported."""

from __future__ import annotations

import json

import pytest

from tests.fakes.model_server import Reply, encode, logprob, render
from tests.gateway.conftest import stage

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_is_recorded_token_exactly(stream: bool) -> None:
    async with stage() as s:
        async with s.agent() as agent:
            answer = await agent.chat.completions.create(
                model="policy", messages=HELLO, stream=stream
            )
            if stream:
                text = "".join([c.choices[0].delta.content or "" async for c in answer])
            else:
                text = answer.choices[0].message.content
        assert text == "hello"
        call = await s.call()
        assert list(call.prompt_ids) == encode(render(HELLO))
        (completion,) = call.completions
        assert list(completion.token_ids) == encode("hello")
        assert list(completion.logprobs or []) == [logprob(t) for t in encode("hello")]
        assert (call.trainable, call.reason, call.status) == (True, None, "ok")
        assert [(v.version, v.start, v.end) for v in completion.spans] == [(3, 0, 5)]
        assert (call.version_start, call.version_end, call.streamed) == (3, 3, stream)
        assert call.sampling == {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_tokens": 100,
        }
        raw = await s.store.raw_call(call.call_id)
        assert json.loads(raw.request)["messages"] == HELLO
        response = json.loads(raw.response)
        assert response["choices"][0]["message"]["content"] == "hello"
        assert "token_ids" not in raw.response.decode()


async def test_empty_completion_is_valid() -> None:
    async with stage([Reply(text="")]) as s, s.agent() as agent:
        await agent.chat.completions.create(model="policy", messages=HELLO)
        assert (await s.call()).trainable
