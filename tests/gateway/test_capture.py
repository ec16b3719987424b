"""What does not add up is kept, marked not trainable with the reason, and nothing is invented."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.fakes.model_server import Reply, encode, logprob
from tests.gateway.conftest import stage

HELLO = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}

FAULTS = [
    ("null_ids", "ids_missing"),
    ("partial_ids", "ids_usage_mismatch"),
    ("no_prompt_ids", "prompt_ids_missing"),
    ("no_logprobs", "logprobs_missing"),
    ("nan_logprob", "logprob_not_finite"),
    ("no_usage", "usage_missing"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fault", "reason"), FAULTS)
async def test_what_does_not_add_up(fault: Any, reason: str, stream: bool) -> None:
    async with stage([Reply(fault=fault)]) as s, s.agent() as agent:
        answer: Any = await agent.chat.completions.create(
            model="policy", messages=HELLO, stream=stream
        )
        if stream:
            text = "".join([c.choices[0].delta.content or "" async for c in answer])
        else:
            text = answer.choices[0].message.content
        assert text == "hello"
        call = await s.call()
        assert (call.status, call.trainable, call.reason) == ("ok", False, reason)
        if reason in ("logprobs_missing", "logprob_not_finite"):
            assert call.completions[0].logprobs is None


async def test_an_aborted_answer_is_not_trained() -> None:
    async with stage([Reply(finish_reason="abort")]) as s, s.agent() as agent:
        await agent.chat.completions.create(model="policy", messages=HELLO)
        assert (await s.call()).reason == "aborted"


async def test_versions_that_the_server_names_are_kept_and_hidden() -> None:
    spans = ((3, 0, 2), (4, 2, 5))
    async with stage([Reply(versions=spans)]) as s, s.agent() as agent:
        answer = await agent.chat.completions.with_raw_response.create(
            model="policy", messages=HELLO
        )
        assert b"weight_versions" not in answer.content
        call = await s.call()
        assert [(v.version, v.start, v.end) for v in call.completions[0].spans] == list(spans)
        assert (call.version_start, call.version_end) == (3, 4)


async def test_versions_that_do_not_cover_the_tokens_are_not_trained() -> None:
    async with stage([Reply(versions=((3, 0, 2),))]) as s, s.agent() as agent:
        await agent.chat.completions.create(model="policy", messages=HELLO)
        assert (await s.call()).reason == "version_spans_invalid"


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_with_ids_as_prompt(stream: bool) -> None:
    async with stage() as s, s.agent() as agent:
        answer: Any = await agent.completions.create(
            model="policy", prompt=encode("say"), n=2, stream=stream, extra_body={"top_k": 5}
        )
        if stream:
            texts = ["", ""]
            async for chunk in answer:
                texts[chunk.choices[0].index] += chunk.choices[0].text
        else:
            texts = [choice.text for choice in answer.choices]
            assert answer.choices[0].logprobs is None
        assert texts == ["say", "say"]
        call = await s.call()
        assert (call.dialect, call.trainable, list(call.prompt_ids)) == (
            "completions",
            True,
            encode("say"),
        )
        assert [list(c.logprobs or []) for c in call.completions] == [
            [logprob(t) for t in encode("say")]
        ] * 2


@pytest.mark.parametrize("arguments", ["", '{"a": 1', '{"a": 1}'])
async def test_tool_calls_go_through_as_they_were_written(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    reply = Reply(tool_calls=(call,), text="add it")
    async with stage([reply, reply]) as s, s.agent() as agent:
        whole = await agent.chat.completions.create(model="policy", messages=HELLO, tools=[TOOL])
        calls: Any = whole.choices[0].message.tool_calls
        assert calls[0].function.arguments == arguments
        async with agent.chat.completions.stream(
            model="policy", messages=HELLO, tools=[TOOL]
        ) as stream:
            async for event in stream:
                assert event is not None
        assert [c.trainable for c in await s.calls()] == [True, True]


async def test_requests_that_servers_refuse_are_put_right() -> None:
    async with stage() as s, s.agent() as agent:
        await agent.chat.completions.create(
            model="policy",
            messages=HELLO,
            tools=[],
            parallel_tool_calls=True,
            stream_options={"include_usage": True},
        )
        assert (await s.call()).trainable


async def test_sampling_is_the_run_s_and_the_shorter_length_holds() -> None:
    async with stage() as s, s.agent() as agent, s.agent(mode="val") as validator:
        await agent.chat.completions.create(
            model="policy", messages=HELLO, temperature=0.2, max_completion_tokens=128_000
        )
        await agent.chat.completions.create(model="policy", messages=HELLO, max_tokens=7)
        await validator.chat.completions.create(
            model="policy", messages=HELLO, temperature=0.9, top_p=0.5
        )
        sent = s.model.requests
        assert (sent[0]["temperature"], sent[0]["max_completion_tokens"]) == (1.0, 100)
        assert sent[1]["max_tokens"] == 7
        assert (sent[2]["temperature"], sent[2]["top_p"]) == (0.0, 0.5)
        used = [call.sampling for call in await s.calls()]
        assert used[0]["max_tokens"] == 100
        assert used[2] == {"temperature": 0.0, "top_p": 0.5}


async def test_another_model_is_served_and_not_trained() -> None:
    async with stage() as s, s.agent() as agent:
        await agent.chat.completions.create(model="tiny-judge", messages=HELLO)
        call = await s.call()
        assert (call.requested_model, call.model) == ("tiny-judge", "policy")
        assert (call.trainable, call.reason) == (False, "other_model")


async def test_another_model_can_be_refused() -> None:
    async with stage(other_models="refuse") as s, s.agent() as agent:
        with pytest.raises(openai.NotFoundError, match="tiny-judge"):
            await agent.chat.completions.create(model="tiny-judge", messages=HELLO)
        assert not await s.calls()


async def test_equal_prompts_are_not_duplicates() -> None:
    async with stage() as s, s.agent() as agent:
        for _ in range(3):
            await agent.chat.completions.create(model="policy", messages=HELLO)
        calls = await s.calls()
        assert len({c.call_id for c in calls}) == 3
        assert all(c.trainable for c in calls)
