"""The dialects and the judgement on answers, without HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning.gateway.trainable import judge
from agentlightning.gateway.wire import Answer, chat, completions
from agentlightning.gateway.wire.answer import Asked, Choice
from agentlightning.gateway.wire.stream import StreamReader
from agentlightning.types import VersionSpan


def _answer(**choice: Any) -> Answer:
    fields = {"token_ids": [5, 6], "logprobs": [-1.0, -2.0], "finish_reason": "stop", **choice}
    known = Choice(ids_seen=True, logprobs_seen=True, **fields)
    return Answer(prompt_ids=[1], choices={0: known}, prompt_tokens=1, completion_tokens=2)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({}, None),
        ({"logprobs": [-1.0]}, "length_mismatch"),
        ({"logprobs": []}, "logprobs_missing"),
        ({"logprobs": [-1.0, None]}, "logprob_not_finite"),
        ({"logprobs": [-1.0, float("nan")]}, "logprob_not_finite"),
        ({"logprobs": [-1.0, float("-inf")]}, "logprob_not_finite"),
        ({"logprobs": [-1.0, -1e300]}, "logprob_not_finite"),
        ({"token_ids": [5]}, "ids_usage_mismatch"),
        ({"token_ids": [5, None]}, "ids_invalid"),
        ({"token_ids": [5, 2**40]}, "ids_invalid"),
        ({"finish_reason": None}, "finish_reason_missing"),
        ({"spans": [VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)]}, None),
        ({"spans": [VersionSpan(1, 0, 1), VersionSpan(2, 0, 2)]}, "version_spans_invalid"),
    ],
)
def test_judgement(choice: dict[str, Any], reason: str | None) -> None:
    judged = judge(_answer(**choice), version=7)
    assert judged.reason == reason
    (completion,) = judged.completions
    if completion.logprobs is not None:
        assert len(completion.logprobs) == len(completion.token_ids)


def test_nothing_at_all_is_not_trainable() -> None:
    assert judge(Answer(), version=0).reason == "ids_missing"


def test_a_batch_of_prompts_is_not_trainable() -> None:
    answer = Answer(completion_tokens=2)
    choices = [
        {"index": i, "token_ids": [9], "prompt_token_ids": [i], "finish_reason": "stop"}
        for i in range(2)
    ]
    completions.take({"choices": choices}, answer)
    assert judge(answer, version=0).reason == "several_prompts"


def test_spans_of_chunks_join() -> None:
    answer = Answer()
    for k, version in enumerate([3, 3, 4]):
        span = {"version": version, "start": k, "end": k + 1}
        chat.take({"choices": [{"index": 0, "token_ids": [k], "weight_versions": [span]}]}, answer)
    assert answer.choices[0].spans == [VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)]


def _sse(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(c).encode() + b"\r\n\r\n" for c in chunks)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stream_may_be_cut_anywhere(size: int) -> None:
    def chunk(finish: str | None, **delta: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "token_ids": [7], "finish_reason": finish}
        return {"id": "x", "choices": [choice]}

    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a'}}
    data = _sse(
        chunk(None, role="assistant", content="é"),
        chunk(None, content="b", reasoning_content="so"),
        chunk(None, tool_calls=[call]),
        chunk("tool_calls", tool_calls=[more]),
    )
    data = b": hello\n\n" + data + b"data: [DONE]\n\n"
    answer = Answer()
    reader = StreamReader(chat, answer, Asked(stream=True))
    seen = b"".join(reader.feed(data[i : i + size]) for i in range(0, len(data), size))
    assert reader.done
    assert seen.startswith(b": hello\n\n")
    assert b"[DONE]" not in seen
    assert b"tool_calls" not in seen.rsplit(b"data:", 1)[0] or b'"c1"' in seen
    assert reader.held.count(b"data:") == 2
    assert answer.choices[0].token_ids == [7] * 4
    message = answer.body["choices"][0]["message"]
    assert message["content"] == "éb"
    assert message["reasoning_content"] == "so"
    assert message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    ]


def test_an_answer_of_another_shape_goes_through_and_is_not_trained() -> None:
    answer = Answer()
    reader = StreamReader(chat, answer, Asked(stream=True))
    event = b'data: {"choices": "none"}\n\n'
    assert reader.feed(event) == event
    assert judge(answer, version=0).reason == "malformed_answer"


def test_a_negative_id_is_not_trained() -> None:
    answer = Answer(prompt_ids=[-1, 2], completion_tokens=0)
    answer.choices[0] = Choice(finish_reason="stop")
    assert judge(answer, version=0).reason == "ids_invalid"


@pytest.mark.parametrize(
    ("choice", "prompt_tokens", "reason"),
    [
        (Choice([5], [-0.5], True, True, "stop"), 2, None),
        (Choice([5], [-0.5], True, True, "error"), 2, "finish_reason_unknown"),
        (Choice([5], [0.7], True, True, "stop"), 2, "logprob_positive"),
        (Choice([5], [1e-6], True, True, "stop"), 2, None),
        (Choice([5], [-0.5], True, True, "stop"), 3, "prompt_usage_mismatch"),
    ],
)
def test_what_does_not_add_up_is_not_trained(
    choice: Choice, prompt_tokens: int, reason: str | None
) -> None:
    answer = Answer(prompt_ids=[1, 2], prompt_tokens=prompt_tokens, completion_tokens=1)
    answer.choices[0] = choice
    assert judge(answer, version=0).reason == reason
