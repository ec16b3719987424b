"""What a model server said in one call, gathered from a whole answer or from its chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentlightning.types import Json, VersionSpan

OWN_FIELDS = ("token_ids", "prompt_token_ids", "weight_versions")
"""Fields of a choice that the gateway asked for, not the client."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the client asked for and therefore gets to see."""

    stream: bool = False
    token_ids: bool = False
    logprobs: bool = False
    usage: bool = False
    choices: int = 1

    @property
    def own_fields(self) -> bool:
        return self.token_ids or self.logprobs


@dataclass(slots=True)
class Choice:
    """One choice of an answer, as reported. ``*_seen``: the server gave any at all."""

    token_ids: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    ids_seen: bool = False
    logprobs_seen: bool = False
    finish_reason: str | None = None
    spans: list[VersionSpan] = field(default_factory=list)

    def add_logprobs(self, values: list[Any]) -> None:
        self.logprobs_seen = True
        self.logprobs.extend(values)


@dataclass(slots=True)
class Answer:
    """Ids, logprobs, finish reasons and usage; ``body`` is the answer without ids.

    ``malformed`` says that a part of the answer had no shape that the dialect knows.
    """

    prompt_ids: list[Any] | None = None
    prompts_differ: bool = False
    malformed: bool = False
    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    body: dict[str, Json] = field(default_factory=dict)

    def choice(self, index: int) -> Choice:
        if index not in self.choices:
            self.choices[index] = Choice()
        return self.choices[index]

    def add_prompt(self, ids: list[Any] | None) -> None:
        if ids is None:
            return
        if self.prompt_ids is None:
            self.prompt_ids = ids
        elif self.prompt_ids != ids:
            self.prompts_differ = True

    def add_usage(self, usage: Mapping[str, Json] | None) -> None:
        """The last usage that a server reports holds for the whole answer."""
        if usage:
            self.prompt_tokens = usage.get("prompt_tokens")
            self.completion_tokens = usage.get("completion_tokens")

    def finished(self, choices: int) -> bool:
        """Whether ``choices`` choices have ended."""
        ended = sum(choice.finish_reason is not None for choice in self.choices.values())
        return ended >= choices


def take_choice(choice: dict[str, Json], answer: Answer) -> Choice:
    """Moves what both dialects put in the same place out of a choice."""
    known = answer.choice(choice.get("index", 0))
    ids = choice.pop("token_ids", None)
    if ids is not None:
        known.ids_seen = True
        known.token_ids.extend(ids)
    if choice.get("finish_reason") is not None:
        known.finish_reason = choice["finish_reason"]
    _take_spans(choice.pop("weight_versions", None), known)
    return known


def _take_spans(spans: list[dict[str, int]] | None, known: Choice) -> None:
    """A chunk may carry its own span or, beginning at 0 again, all of them so far."""
    for each in spans or ():
        span = VersionSpan(each["version"], each["start"], each["end"])
        last = known.spans[-1] if known.spans else None
        if span.start == 0:
            known.spans = [span]
        elif last and last.version == span.version and last.end == span.start:
            known.spans[-1] = VersionSpan(span.version, last.start, span.end)
        else:
            known.spans.append(span)


def strip(payload: dict[str, Json], asked: Asked) -> None:
    """Removes from an untouched payload what the client did not ask for."""
    if not asked.token_ids:
        payload.pop("prompt_token_ids", None)
    for choice in payload.get("choices") or ():
        choice.pop("weight_versions", None)
        if not asked.token_ids:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
        if not asked.logprobs and "logprobs" in choice:
            choice["logprobs"] = None


def merge_top(chunk: dict[str, Json], body: dict[str, Json], *, object_name: str) -> None:
    """Adds a chunk's fields beside its choices to the assembled body."""
    for key, value in chunk.items():
        if key != "choices" and value is not None:
            body[key] = value
    body["object"] = object_name
    body.setdefault("choices", [])


def merged_choice(body: dict[str, Json], index: int) -> dict[str, Json]:
    """The assembled choice of that index, made where it is new."""
    for known in body["choices"]:
        if known["index"] == index:
            return dict_of(known)
    fresh: dict[str, Json] = {"index": index, "logprobs": None, "finish_reason": None}
    body["choices"].append(fresh)
    return fresh


def dict_of(value: Json) -> dict[str, Json]:
    """``value`` itself if it is an object; TypeError otherwise."""
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {type(value).__name__}")
    return value
