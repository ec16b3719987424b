"""A sampled tool call, from logits to the client, with the model's place taken by a script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest
import torch

from agentlightning.trainer.serve.app import ModelApp
from agentlightning.trainer.serve.engine import Engine
from agentlightning.trainer.serve.prompts import ServedModel
from agentlightning.trainer.serve.runner import Segment
from tests.fakes.http import serve
from tests.fakes.tiny_model import tiny_tokenizer

pytestmark = pytest.mark.slow

TOKENIZER = tiny_tokenizer()
CONTENT = "Let me see."
SCRIPT = (
    f"{CONTENT}<tool_call>\n"
    '{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>\n'
    '<tool_call>{"name": "now"}</tool_call>'
)
IDS = [*TOKENIZER.encode(SCRIPT), TOKENIZER.eos_token_id]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "now")
]
REQUEST: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": TOOLS,
    "logprobs": True,
    "extra_body": {"return_token_ids": True},
}


class ScriptedRunner:
    """In the place of ModelRunner: after ``prompt`` tokens the script is all but certain."""

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        logits = torch.zeros(len(segments), len(TOKENIZER))
        for row, segment in zip(logits, segments, strict=True):
            row[IDS[len(segment.rows) - self._prompt]] = 50.0
        return logits


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    prompt = TOKENIZER.apply_chat_template(
        REQUEST["messages"], tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    engine = Engine(
        ScriptedRunner(len(prompt)),  # type: ignore[arg-type]
        cache_tokens=1024,
        max_running=4,
    )
    model = ServedModel(
        name="tiny",
        tokenizer=TOKENIZER,
        max_context=512,
        vocabulary=len(TOKENIZER),
        eos_ids=frozenset({TOKENIZER.eos_token_id}),
    )
    async with (
        serve(ModelApp(model, engine).asgi(), lifespan="on") as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def check_calls(calls: Sequence[Any] | None) -> None:
    assert calls is not None
    assert [(c.function.name, c.function.arguments) for c in calls] == [
        ("add", '{"a": 1, "b": "ü"}'),
        ("now", "{}"),
    ]
    assert len({c.id for c in calls}) == 2


async def test_sampled_calls_reach_the_client(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**REQUEST)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (CONTENT, "tool_calls")
    check_calls(choice.message.tool_calls)
    assert choice.token_ids == IDS  # type: ignore[attr-defined]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(IDS)


async def test_each_streamed_token_has_its_id_in_one_chunk(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        **REQUEST, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    choices: list[Any] = [chunk.choices[0] for chunk in chunks]
    assert [c.token_ids for c in choices] == [[], *([each] for each in IDS)]
    assert [len(c.logprobs.content) for c in choices[1:]] == [1] * len(IDS)
    assert "".join(c.delta.content or "" for c in choices) == CONTENT
    calls = [call for c in choices for call in c.delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 1]
    check_calls(calls)
    assert [c.finish_reason for c in choices[-2:]] == [None, "tool_calls"]
    assert last.usage is not None
    assert last.usage.completion_tokens == len(IDS)


async def test_the_sdk_assembles_the_streamed_calls(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(**REQUEST) as stream:
        answer = await stream.get_final_completion()
    check_calls(answer.choices[0].message.tool_calls)
