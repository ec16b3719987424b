"""Records to rows of a store file and back."""

from __future__ import annotations

import json
import sqlite3
import sys
from array import array
from dataclasses import asdict, fields
from typing import Any

from agentlightning.types import (
    Attempt,
    Completion,
    Event,
    Json,
    ModelServer,
    Outcome,
    Rollout,
    VersionSpan,
)

_ROLLOUT_FIELDS = tuple(field.name for field in fields(Rollout))
_ROLLOUT_JSON = frozenset({"input", "config", "metadata"})


_STRICT = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def dumps(value: Json) -> str:
    """Strict JSON text; ValueError for NaN and infinity, which JSON does not have."""
    return _STRICT.encode(value)


def pack(values: array[Any]) -> bytes:
    """Little-endian bytes of an array."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def unpack(kind: str, data: bytes) -> array[Any]:
    """An array of ``kind`` from its little-endian bytes."""
    values = array(kind, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def dump_outcome(outcome: Outcome | None) -> str | None:
    return None if outcome is None else dumps(asdict(outcome))


def load_outcome(text: str | None) -> Outcome | None:
    return None if text is None else Outcome(**json.loads(text))


def rollout_values(rollout: Rollout) -> dict[str, Any]:
    """Column values of a rollout, by name."""
    values = {name: getattr(rollout, name) for name in _ROLLOUT_FIELDS}
    for name in _ROLLOUT_JSON:
        values[name] = dumps(values[name])
    values["outcome"] = dump_outcome(rollout.outcome)
    return values


def rollout_of(row: sqlite3.Row) -> Rollout:
    values = {name: row[name] for name in _ROLLOUT_FIELDS}
    for name in _ROLLOUT_JSON:
        values[name] = json.loads(values[name])
    values["outcome"] = load_outcome(values["outcome"])
    return Rollout(**values)


def attempt_of(row: sqlite3.Row, rollout_id: str) -> Attempt:
    return Attempt(
        rollout_id,
        row["attempt_id"],
        number=row["number"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        outcome=load_outcome(row["outcome"]),
    )


def event_of(row: sqlite3.Row, rollout_id: str) -> Event:
    return Event(
        row["event_id"],
        rollout_id,
        row["attempt_id"],
        row["event_type"],
        json.loads(row["data"]),
        created_at=row["created_at"],
    )


def server_of(row: sqlite3.Row) -> ModelServer:
    return ModelServer(row["model"], row["endpoint"], version=row["version"], owner=row["owner"])


def completion_of(row: sqlite3.Row) -> Completion:
    logprobs = row["logprobs"]
    return Completion(
        unpack("i", row["token_ids"]),
        None if logprobs is None else unpack("f", logprobs),
        row["finish_reason"],
        tuple(VersionSpan(*span) for span in json.loads(row["spans"])),
    )
