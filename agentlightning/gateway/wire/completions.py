"""``/v1/completions``, the prompt as text or as token ids.

A model server puts ``prompt_token_ids``, ``token_ids`` and ``logprobs.token_logprobs`` into
each choice (in a stream: the prompt's ids into the first chunk of each choice).
"""

from __future__ import annotations

from collections.abc import Mapping

from agentlightning.gateway.wire import sampling as sampling_fields
from agentlightning.gateway.wire.answer import (
    Answer,
    Asked,
    merge_top,
    merged_choice,
    take_choice,
)
from agentlightning.types import Dialect, Json

DIALECT: Dialect = "completions"


def asked(request: Mapping[str, Json]) -> Asked:
    """What the client wants to see."""
    return Asked(
        stream=bool(request.get("stream")),
        token_ids=bool(request.get("return_token_ids")),
        logprobs=request.get("logprobs") is not None,
        usage=sampling_fields.wants_usage(request),
        choices=sampling_fields.choices(request),
    )


def prepare(request: Mapping[str, Json], sampling: Mapping[str, Json]) -> dict[str, Json]:
    """The body for the model server: ids and logprobs on, and the run's sampling."""
    body = sampling_fields.prepare(request, sampling)
    if body.get("logprobs") is None:
        body["logprobs"] = 1
    return body


def take(payload: dict[str, Json], answer: Answer) -> None:
    """Moves ids, logprobs and versions out of an answer or chunk."""
    answer.add_prompt(payload.pop("prompt_token_ids", None))
    for choice in payload.get("choices") or ():
        known = take_choice(choice, answer)
        answer.add_prompt(choice.pop("prompt_token_ids", None))
        values = (choice.get("logprobs") or {}).get("token_logprobs")
        if values is not None:
            known.add_logprobs(values)
        if "logprobs" in choice:
            choice["logprobs"] = None
    answer.add_usage(payload.get("usage"))


def merge(chunk: dict[str, Json], answer: Answer) -> None:
    """Adds a chunk to the assembled ``text_completion``."""
    merge_top(chunk, answer.body, object_name="text_completion")
    for choice in chunk.get("choices") or ():
        whole = merged_choice(answer.body, choice.get("index", 0))
        text = whole.get("text", "") + (choice.get("text") or "")
        whole.update({key: value for key, value in choice.items() if value is not None})
        whole["text"] = text


def as_chunk(payload: dict[str, Json]) -> dict[str, Json]:
    """A whole answer and a chunk have one shape here."""
    return payload
