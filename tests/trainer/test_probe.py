"""What the probe says about model servers, good and bad."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning.trainer.probe import ProbeResult, logprobs_mode, probe
from tests.fakes.http import serve

LOGITS = {"red": 2.0, "green": 1.0, "blue": -1.0}


def top(temperature: float, *, processed: bool) -> dict[str, float]:
    scale = temperature if processed else 1.0
    total = math.log(sum(math.exp(logit / scale) for logit in LOGITS.values()))
    return {token: logit / scale - total for token, logit in LOGITS.items()}


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_the_mode_is_told_by_the_differences(mode: str) -> None:
    cool, warm = (top(t, processed=mode == "processed") for t in (0.5, 1.0))
    assert logprobs_mode([cool], [warm]) == mode


@pytest.mark.parametrize(
    ("cool", "warm"),
    [([], []), ([{"a": -1.0}], [{"a": -1.0}]), ([{"a": -1, "b": -1}], [{"a": -1, "b": -1}])],
)
def test_too_little_to_tell(cool: list[Any], warm: list[Any]) -> None:
    assert logprobs_mode(cool, warm) == "unknown"


class Server:
    """A chat endpoint of two tokens whose answer a test spoils through ``change``."""

    def __init__(self, *, processed: bool = True, **change: Any) -> None:
        self.processed = processed
        self.change = change
        self.app = Starlette(routes=[Route("/v1/chat/completions", self.chat, methods=["POST"])])

    async def chat(self, request: Request) -> Response:
        asked = await request.json()
        body = self.body(asked["temperature"])
        if not asked.get("stream"):
            return JSONResponse(body)
        return Response(f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n")

    def body(self, temperature: float) -> dict[str, Any]:
        values = top(temperature, processed=self.processed)
        entry = {
            "token": "red",
            "logprob": values["red"],
            "top_logprobs": [{"token": t, "logprob": v} for t, v in values.items()],
        }
        facts = {"ids": [4, 4], "prompt": [1, 2], "entries": [entry, entry], "tokens": 2}
        facts.update(self.change)
        choice = {"token_ids": facts["ids"], "logprobs": {"content": facts["entries"]}}
        usage = {"completion_tokens": facts["tokens"]}
        return {"prompt_token_ids": facts["prompt"], "choices": [choice], "usage": usage}

    async def probe(self) -> ProbeResult:
        async with serve(self.app) as url:
            return await probe(f"{url}/v1", "policy")


async def test_a_good_server_is_trainable() -> None:
    result = await Server().probe()
    assert result == ProbeResult(True, True, True, True, True, "processed")
    assert result.trainable


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"ids": None}, "no token ids of the answer"),
        ({"prompt": None}, "no token ids of the prompt"),
        ({"entries": []}, "logprobs are missing"),
        ({"tokens": 3}, "usage.completion_tokens"),
        ({"processed": False}, "processed_logprobs"),
    ],
)
async def test_what_is_missing_is_said_with_what_helps(change: dict[str, Any], part: str) -> None:
    result = await Server(**change).probe()
    assert not result.trainable
    assert any(part in problem for problem in result.problems)


async def test_a_server_that_refuses_or_is_not_there() -> None:
    async with serve(Starlette()) as url:
        refused = await probe(f"{url}/v1", "policy")
    assert "refuses the probe with 404" in refused.problems[0]
    absent = await probe(f"{url}/v1", "policy")
    assert "does not answer" in absent.problems[0]
