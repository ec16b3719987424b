"""``/v1/chat/completions``.

Where a model server puts what it was asked for with ``return_token_ids`` and ``logprobs``:
``prompt_token_ids`` at the top level (in a stream: of the first chunk), ``token_ids`` and
``logprobs.content[k].logprob`` in each choice of an answer or chunk.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentlightning.gateway.wire import sampling as sampling_fields
from agentlightning.gateway.wire.answer import (
    Answer,
    Asked,
    dict_of,
    merge_top,
    merged_choice,
    take_choice,
)
from agentlightning.types import Dialect, Json

DIALECT: Dialect = "chat"

_WHOLE = frozenset({"role", "id", "type", "name"})
"""Strings of a delta that come in one piece; all others grow."""


def asked(request: Mapping[str, Json]) -> Asked:
    """What the client wants to see."""
    return Asked(
        stream=bool(request.get("stream")),
        token_ids=bool(request.get("return_token_ids")),
        logprobs=bool(request.get("logprobs")),
        usage=sampling_fields.wants_usage(request),
        choices=sampling_fields.choices(request),
    )


def prepare(request: Mapping[str, Json], sampling: Mapping[str, Json]) -> dict[str, Json]:
    """The body for the model server: ids and logprobs on, the run's sampling, valid tools."""
    body = sampling_fields.prepare(request, sampling)
    body["logprobs"] = True
    if not body.get("tools"):
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            body.pop(name, None)
    return body


def take(payload: dict[str, Json], answer: Answer) -> None:
    """Moves ids, logprobs and versions out of an answer or chunk."""
    answer.add_prompt(payload.pop("prompt_token_ids", None))
    for choice in payload.get("choices") or ():
        known = take_choice(choice, answer)
        content = (choice.get("logprobs") or {}).get("content")
        if content is not None:
            known.add_logprobs([entry["logprob"] for entry in content])
        if "logprobs" in choice:
            choice["logprobs"] = None
    answer.add_usage(payload.get("usage"))


def merge(chunk: dict[str, Json], answer: Answer) -> None:
    """Adds a chunk to the assembled ``chat.completion``."""
    merge_top(chunk, answer.body, object_name="chat.completion")
    for choice in chunk.get("choices") or ():
        whole = merged_choice(answer.body, choice.get("index", 0))
        message = whole.setdefault("message", {"role": "assistant", "content": None})
        _merge_delta(message, choice.get("delta") or {})
        for key, value in choice.items():
            if key != "delta" and value is not None:
                whole[key] = value


def as_chunk(payload: dict[str, Json]) -> dict[str, Json]:
    """A ``chat.completion`` as the one chunk of a stream."""
    chunk = {**payload, "object": "chat.completion.chunk", "choices": []}
    for choice in payload.get("choices") or ():
        delta = dict(choice.get("message") or {})
        if delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **c} for i, c in enumerate(delta["tool_calls"])]
        rest = {key: value for key, value in choice.items() if key != "message"}
        chunk["choices"].append({**rest, "delta": delta})
    return chunk


def _merge_delta(whole: dict[str, Json], delta: dict[str, Json]) -> None:
    for key, value in delta.items():
        known = whole.get(key)
        if value is None:
            whole.setdefault(key, None)
        elif isinstance(value, str) and isinstance(known, str) and key not in _WHOLE:
            whole[key] = known + value
        elif isinstance(value, dict) and isinstance(known, dict):
            _merge_delta(known, value)
        elif isinstance(value, list):
            _merge_parts(whole, key, value)
        else:
            whole[key] = value


def _merge_parts(whole: dict[str, Json], key: str, parts: list[Json]) -> None:
    """Tool calls and the like: parts with one ``index`` are one part."""
    known = whole.get(key)
    if not isinstance(known, list):
        known = whole[key] = []
    for part in parts:
        index = dict_of(part).get("index", len(known))
        while len(known) <= index:
            known.append({})
        _merge_delta(known[index], {k: v for k, v in part.items() if k != "index"})
