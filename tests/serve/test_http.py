from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import uvicorn

from agentlightning import serving
from agentlightning.config import ServeConfig
from agentlightning.trainer.serve.server import build_app
from tests.fakes.tiny_model import tiny_tokenizer

pytestmark = pytest.mark.slow

TOKENIZER = tiny_tokenizer()
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 8,
    "seed": 1,
}


def start(folder: Path) -> tuple[str, Callable[[], None]]:
    """A real server on a free port, in a thread."""
    config = ServeConfig(cache_tokens=2048, max_running=8, precision="fp32", device="cpu")
    sock = serving.listen("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(config, folder=folder, name="tiny"), log_level="error", lifespan="on"
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join(20)
        sock.close()

    return serving.bound_url(sock), stop


@pytest.fixture(scope="module")
def url(tiny_folder: Path) -> Iterator[str]:
    address, stop = start(tiny_folder)
    yield address
    stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


async def post(
    http: aiohttp.ClientSession, url: str, path: str, body: Any, status: int = 200
) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(url + path, data=data) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == status, answer
        return answer


async def events(http: aiohttp.ClientSession, url: str, path: str, body: Any) -> list[Any]:
    async with http.post(url + path, json=body | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def metric(http: aiohttp.ClientSession, url: str, name: str) -> float:
    async with http.get(f"{url}/metrics") as response:
        text = await response.text()
    [line] = [x for x in text.splitlines() if x.startswith(f"agl_serve_{name} ")]
    return float(line.split()[1])


async def test_chat_gives_ids_logprobs_and_versions(http: aiohttp.ClientSession, url: str) -> None:
    body = CHAT | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2}
    answer = await post(http, url, "/v1/chat/completions", body)
    assert answer["prompt_token_ids"] == TOKENIZER.encode("user:hi<|end|>assistant:")
    first, second = answer["choices"]
    for choice in (first, second):
        ids, content = choice["token_ids"], choice["logprobs"]["content"]
        assert len(ids) == len(content) <= 8
        assert TOKENIZER.decode(ids, skip_special_tokens=True) == choice["message"]["content"]
        assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": len(ids)}]
        assert all(len(c["top_logprobs"]) == 2 for c in content)
        assert all(math.isfinite(c["logprob"]) and c["logprob"] <= 0 for c in content)
    assert first["token_ids"] != second["token_ids"]
    total = sum(len(c["token_ids"]) for c in answer["choices"])
    assert answer["usage"]["completion_tokens"] == total
    assert await post(http, url, "/v1/chat/completions", CHAT | {"n": 2}) != answer
    again = await post(http, url, "/v1/chat/completions", body)
    assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in answer["choices"]]


async def test_without_being_asked_no_ids_are_given(http: aiohttp.ClientSession, url: str) -> None:
    answer = await post(http, url, "/v1/chat/completions", CHAT)
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None


async def test_a_stream_says_the_same_as_one_answer(http: aiohttp.ClientSession, url: str) -> None:
    body = CHAT | {"logprobs": True, "return_token_ids": True}
    whole = await post(http, url, "/v1/chat/completions", body)
    options = {"stream_options": {"include_usage": True}}
    first, *chunks, last = await events(http, url, "/v1/chat/completions", body | options)
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [i for c in choices for i in c["token_ids"]] == whole["choices"][0]["token_ids"]
    logprobs = [x["logprob"] for c in choices for x in c["logprobs"]["content"]]
    expected = [x["logprob"] for x in whole["choices"][0]["logprobs"]["content"]]
    assert logprobs == pytest.approx(expected, abs=1e-4)
    text = "".join(c["delta"].get("content", "") for c in choices)
    assert text == whole["choices"][0]["message"]["content"]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert choices[-1]["weight_versions"][0]["end"] == len(whole["choices"][0]["token_ids"])
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


async def test_the_openai_sdk_is_served(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chat = await client.chat.completions.create(**CHAT)
        stream = await client.chat.completions.create(**CHAT, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
        assert text == chat.choices[0].message.content
        completion = await client.completions.create(
            model="tiny", prompt=[1, 2, 3], max_tokens=3, logprobs=1, seed=1
        )
        assert completion.choices[0].logprobs is not None
        stream2 = await client.completions.create(
            model="tiny", prompt=[1, 2, 3], max_tokens=3, seed=1, stream=True
        )
        assert "".join([c.choices[0].text async for c in stream2]) == completion.choices[0].text
        [model] = (await client.models.list()).data
        assert (model.id, model.model_extra["max_model_len"]) == ("tiny", 256)  # type: ignore[index]


@pytest.mark.parametrize("prompt", ["ab", [65, 66], ["ab", "c"], [[65, 66], [67]]])
async def test_completions_take_text_and_ids(
    http: aiohttp.ClientSession, url: str, prompt: Any
) -> None:
    body = {"prompt": prompt, "n": 2, "logprobs": 0, "return_token_ids": True, "max_tokens": 3}
    choices = (await post(http, url, "/v1/completions", body))["choices"]
    several = not isinstance(prompt, str) and not isinstance(prompt[0], int)
    assert [c["index"] for c in choices] == list(range(4 if several else 2))
    for choice in choices:
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) <= 3
    assert choices[0]["prompt_token_ids"] == choices[1]["prompt_token_ids"]


async def test_a_stop_string_is_left_out_of_text_but_not_of_ids(
    http: aiohttp.ClientSession, url: str
) -> None:
    body = {"prompt": "ab", "temperature": 0, "max_tokens": 40, "return_token_ids": True}
    plain = (await post(http, url, "/v1/completions", body))["choices"][0]
    stop = next(char for char in plain["text"][2:] if char.isascii())
    at = plain["text"].index(stop)
    cut = (await post(http, url, "/v1/completions", body | {"stop": [stop]}))["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (plain["text"][:at], "stop")
    assert TOKENIZER.decode(cut["token_ids"]) == plain["text"][: at + 1]


async def test_the_eos_token_is_among_the_ids(http: aiohttp.ClientSession, url: str) -> None:
    eos = TOKENIZER.eos_token_id
    body = CHAT | {"logit_bias": {str(eos): 100}, "return_token_ids": True}
    choice = (await post(http, url, "/v1/chat/completions", body))["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == ([eos], "stop")
    assert choice["message"]["content"] == ""
    ignored = await post(
        http, url, "/v1/chat/completions", body | {"ignore_eos": True, "max_tokens": 3}
    )
    assert ignored["choices"][0]["token_ids"] == [eos] * 3


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        (CHAT | {"max_tokens": 1000}, 400, "max_tokens", "maximum context length is 256"),
        (CHAT | {"messages": [{"role": "user", "content": "x" * 300}]}, 400, "messages", "256"),
        (CHAT | {"model": "other"}, 404, "model", "does not exist"),
        (CHAT | {"temperature": -1}, 400, "temperature", "temperature is -1"),
        (CHAT | {"top_p": 0}, 400, "top_p", "top_p is 0"),
        (CHAT | {"messages": []}, 400, "messages", "messages"),
        ({"model": "tiny"}, 400, "messages", "required"),
        (CHAT | {"logit_bias": {"999": 1}}, 400, "logit_bias", "0 to 257"),
        (b"{", 400, None, "not JSON"),
        (b"[]", 400, None, "JSON list"),
    ],
)
async def test_what_cannot_be_served_says_why(
    http: aiohttp.ClientSession, url: str, body: Any, status: int, param: str | None, says: str
) -> None:
    error = (await post(http, url, "/v1/chat/completions", body, status))["error"]
    assert error["param"] == param
    assert says in error["message"]


async def test_unknown_and_null_fields_are_ignored(http: aiohttp.ClientSession, url: str) -> None:
    body = CHAT | {"temperature": None, "stop": None, "tools": [], "user": "u", "nonsense": 1}
    await post(http, url, "/v1/chat/completions", body)


async def test_an_assistant_message_without_content_is_templated(
    http: aiohttp.ClientSession, url: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = CHAT | {"messages": messages, "tools": tools, "return_token_ids": True}
    answer = await post(http, url, "/v1/chat/completions", body)
    prompt = TOKENIZER.decode(answer["prompt_token_ids"])
    assert prompt.startswith("tools:[")
    assert '"arguments": {"a": 1}' in prompt
    assert "None" not in prompt


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_slot(
    http: aiohttp.ClientSession, url: str, stream: bool
) -> None:
    # 12 answers of 250 tokens in 8 slots take long enough to be seen and left.
    body = {"prompt": "ab", "max_tokens": 250, "ignore_eos": True, "n": 12, "stream": stream}
    steps = await metric(http, url, "steps_total")
    request = asyncio.ensure_future(http.post(f"{url}/v1/completions", json=body))
    await until(lambda: metric(http, url, "running"))
    if stream:
        (await request).close()
    else:
        request.cancel()
    await until(lambda: idle(http, url))
    assert await metric(http, url, "steps_total") - steps < 400


async def test_no_row_is_lost_when_many_clients_leave(
    http: aiohttp.ClientSession, tiny_folder: Path
) -> None:
    url, stop = start(tiny_folder)
    rng = random.Random(0)

    async def one(stay: bool, wait: float, body: dict[str, Any]) -> None:
        send: Callable[..., Awaitable[Any]] = events if body["stream"] else post
        request = send(http, url, "/v1/completions", body)
        try:
            await asyncio.wait_for(request, 30 if stay else wait)
        except asyncio.TimeoutError:
            assert not stay

    def body() -> dict[str, Any]:
        prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
        tokens = rng.randrange(1, 60)
        return {"prompt": prompt, "max_tokens": tokens, "stream": rng.random() < 0.5, "n": 2}

    try:
        await asyncio.gather(
            *(one(rng.random() < 0.3, rng.random() / 3, body()) for _ in range(64)),
        )
        await until(lambda: idle(http, url))
        assert await metric(http, url, "cache_rows_used") > 0
        # New weights forget what was cached: what is used then was lost.
        await post(http, url, "/update_weights", {"path": str(tiny_folder), "version": 1})
        assert await metric(http, url, "cache_rows_used") == 0
    finally:
        stop()


async def idle(http: aiohttp.ClientSession, url: str) -> bool:
    return not await metric(http, url, "running") and not await metric(http, url, "waiting")


async def until(reached: Callable[[], Awaitable[Any]]) -> None:
    async def poll() -> None:
        while not await reached():
            pass

    await asyncio.wait_for(poll(), 20)


async def test_new_weights_serve_without_a_restart(
    http: aiohttp.ClientSession, tiny_folder: Path, other_folder: Path
) -> None:
    url, stop = start(tiny_folder)
    try:
        body = CHAT | {"return_token_ids": True, "temperature": 0}
        old = await post(http, url, "/v1/chat/completions", body)
        update = {"path": str(other_folder), "version": 4}
        assert await post(http, url, "/update_weights", update) == {"version": 4}
        new = await post(http, url, "/v1/chat/completions", body)
        assert new["choices"][0]["token_ids"] != old["choices"][0]["token_ids"]
        assert new["choices"][0]["weight_versions"][0]["version"] == 4
        assert new["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        wrong = {"path": str(other_folder / "absent"), "version": 5}
        error = (await post(http, url, "/update_weights", wrong, 400))["error"]
        assert "does not point to a directory" in error["message"]
        assert await metric(http, url, "policy_version") == 4
        async with http.get(f"{url}/health") as response:
            assert response.status == 200
    finally:
        stop()


@pytest.mark.parametrize("body", ["[" * 100_000, '{"model": "tiny", "prompt": "\\ud800"}'])
async def test_json_that_is_no_text_or_too_deep_is_400(url: str, body: str) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", data=body) as answer,
    ):
        assert answer.status == 400
        assert (await answer.json())["error"]["message"].startswith("the body is not JSON")
