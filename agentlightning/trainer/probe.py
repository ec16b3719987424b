"""Asks a model server whether it gives what training needs, before anything depends on it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

LogprobsMode = Literal["processed", "raw", "unknown"]

_TEMPERATURE = 0.5
_TOP = 5
_TOKENS = 8
_TIMEOUT_SECONDS = 120.0
_TOLERANCE = 0.05
_PROMPT = [{"role": "user", "content": "Name a colour, an animal and a town."}]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What an upstream gives. ``logprobs_mode`` is ``processed`` where the reported logprobs are
    those of the distribution that was sampled from, ``raw`` where temperature is not in them.
    ``problems`` say in words what is missing and what to do; none means ``trainable``.

    Example:
        >>> ProbeResult(ids=True, prompt_ids=True, logprobs=True, usage_matches=True,
        ...             streaming=True, logprobs_mode="processed").trainable
        True
    """

    ids: bool = False
    prompt_ids: bool = False
    logprobs: bool = False
    usage_matches: bool = False
    streaming: bool = False
    logprobs_mode: LogprobsMode = "unknown"
    problems: tuple[str, ...] = ()

    @property
    def trainable(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class _Answer:
    ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    completion_tokens: int | None
    top: tuple[Mapping[str, float], ...]


async def probe(endpoint: str, model: str, *, key: str = "") -> ProbeResult:
    """Asks ``endpoint`` (it ends in ``/v1``) for a few tokens, at temperatures 0.5 and 1, and
    once as a stream. Raises nothing for what the server lacks: that is in ``problems``."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    url = f"{endpoint.rstrip('/')}/chat/completions"
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            cool = await _ask(session, url, _request(model, _TEMPERATURE))
            warm = await _ask(session, url, _request(model, 1.0))
            streamed = await _ask_stream(session, url, _request(model, _TEMPERATURE))
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        problem = f"{endpoint} does not answer ({error or type(error).__name__}). Start it."
        return ProbeResult(problems=(problem,))
    except _Refused as error:
        return ProbeResult(problems=(f"{endpoint} {error}",))
    return judge(cool, warm, streamed)


def judge(cool: _Answer, warm: _Answer, streamed: _Answer) -> ProbeResult:
    """What the answers at temperature 0.5, at 1, and the streamed one show together."""
    answers = (cool, warm, streamed)
    facts = {
        "ids": all(answer.ids for answer in answers),
        "prompt_ids": all(answer.prompt_ids for answer in answers),
        "logprobs": all(_whole(answer) for answer in answers),
        "usage_matches": all(answer.completion_tokens == len(answer.ids) for answer in answers),
        "streaming": bool(streamed.ids) and _whole(streamed),
    }
    mode = logprobs_mode(cool.top, warm.top)
    return ProbeResult(**facts, logprobs_mode=mode, problems=tuple(_problems(facts, mode)))


def logprobs_mode(
    cool: Sequence[Mapping[str, float]], warm: Sequence[Mapping[str, float]]
) -> LogprobsMode:
    """Compares the first position, whose prompt is the same at both temperatures.

    Temperature T divides logits, so differences between two tokens' processed logprobs grow by
    1/T while raw ones do not change: the ratio of the differences is 1/T or 1.

    Example:
        >>> logprobs_mode([{"a": -0.1, "b": -2.1}], [{"a": -0.3, "b": -1.3}])
        'processed'
    """
    if not cool or not warm:
        return "unknown"
    common = sorted(set(cool[0]) & set(warm[0]), key=lambda token: -warm[0][token])
    if len(common) < 2:
        return "unknown"
    first, last = common[0], common[-1]
    base = warm[0][first] - warm[0][last]
    if not math.isfinite(base) or base < _TOLERANCE:
        return "unknown"
    ratio = (cool[0][first] - cool[0][last]) / base
    if abs(ratio - 1 / _TEMPERATURE) < 0.2 / _TEMPERATURE:
        return "processed"
    return "raw" if abs(ratio - 1) < 0.2 else "unknown"


def _problems(facts: Mapping[str, bool], mode: LogprobsMode) -> list[str]:
    words = {
        "ids": "no token ids of the answer: use a server that honours return_token_ids "
        "(vLLM 0.10.2 or newer, or `agl serve`), without a parser that drops them",
        "prompt_ids": "no token ids of the prompt: use a server that honours return_token_ids",
        "logprobs": "logprobs are missing, not finite, or not one a token: let the server give "
        "logprobs (vLLM: --max-logprobs 1 or more)",
        "usage_matches": "the ids are not as many as usage.completion_tokens: turn the server's "
        "tool and reasoning parsers off",
        "streaming": "streamed answers lack ids or logprobs: calls of harnesses that stream would "
        "not be trained",
    }
    problems = [text for name, text in words.items() if not facts[name]]
    if mode == "raw":
        problems.append(
            "logprobs are raw: temperature is not in them, so that ratios would be wrong. Start "
            "vLLM with --logprobs-mode processed_logprobs"
        )
    if mode == "unknown" and facts["logprobs"]:
        problems.append(
            "it cannot be told whether logprobs are those of what was sampled: let the server give "
            f"top_logprobs (vLLM: --max-logprobs {_TOP})"
        )
    return problems


def _request(model: str, temperature: float) -> dict[str, Any]:
    return {
        "model": model,
        "messages": _PROMPT,
        "max_tokens": _TOKENS,
        "temperature": temperature,
        "logprobs": True,
        "top_logprobs": _TOP,
        "return_token_ids": True,
    }


class _Refused(Exception):
    """The server answered, but not with a completion."""


async def _ask(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> _Answer:
    async with session.post(url, json=body) as response:
        await _check(response)
        return _parse([await response.json(content_type=None)])


async def _ask_stream(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> _Answer:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with session.post(url, json={**body, **options}) as response:
        await _check(response)
        text = await response.text()
    lines = (
        line.removeprefix("data:").strip() for line in text.splitlines() if line[:5] == "data:"
    )
    return _parse([json.loads(line) for line in lines if line and line != "[DONE]"])


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        text = " ".join((await response.text()).split())[:300]
        raise _Refused(f"refuses the probe with {response.status}: {text}")


def _parse(bodies: Sequence[Any]) -> _Answer:
    """One body, or the chunks of a stream; ids and logprobs are joined in order."""
    ids: list[int] = []
    prompt: list[int] = []
    entries: list[Mapping[str, Any]] = []
    usage: Mapping[str, Any] = {}
    for body in bodies:
        usage = body.get("usage") or usage
        prompt = prompt or body.get("prompt_token_ids") or []
        for choice in body.get("choices") or ():
            prompt = prompt or choice.get("prompt_token_ids") or []
            ids += choice.get("token_ids") or []
            entries += (choice.get("logprobs") or {}).get("content") or []
    return _Answer(
        ids=tuple(ids),
        prompt_ids=tuple(prompt),
        logprobs=tuple(entry.get("logprob") for entry in entries),
        completion_tokens=usage.get("completion_tokens"),
        top=tuple(_top(entry) for entry in entries),
    )


def _top(entry: Mapping[str, Any]) -> dict[str, float]:
    return {
        str(each.get("bytes") or each["token"]): each["logprob"]
        for each in entry.get("top_logprobs") or ()
        if each.get("logprob") is not None
    }


def _whole(answer: _Answer) -> bool:
    return len(answer.logprobs) == len(answer.ids) > 0 and all(
        value is not None and math.isfinite(value) for value in answer.logprobs
    )
