"""Records to the public JSON shape and back, without loss.

Log-probabilities are numbers; those that JSON cannot say are the strings ``"nan"``,
``"inf"`` and ``"-inf"``.
"""

from __future__ import annotations

import base64
import json
import math
from dataclasses import asdict, fields
from typing import Any

import orjson

from agentlightning.store.protocol import Transition
from agentlightning.types import (
    Attempt,
    Call,
    Completion,
    Event,
    Floats,
    Json,
    ModelServer,
    Outcome,
    ParentRef,
    RawCall,
    Rollout,
    TerminalItem,
    TerminalPage,
    VersionSpan,
    float_array,
    token_array,
)

_TOP = ("rollout_id", "input", "config", "metadata", "group_id", "harness", "reward")
_STATUS = (
    *("state", "k8s_job_name", "error_message", "version", "created_at", "updated_at"),
    *("attempt", "owner", "lease_until", "started_at", "ended_at"),
)
_CALL_PLAIN = tuple(
    field.name
    for field in fields(Call)
    if field.name not in {"prompt_ids", "completions", "sampling", "parent"}
)


def dumps(value: Json) -> bytes:
    """JSON bytes; ValueError where JSON cannot hold the value."""
    try:
        return orjson.dumps(value)
    except TypeError:  # integers beyond 64 bits, lone surrogates
        return json.dumps(value, allow_nan=False).encode()


def loads(data: bytes) -> Json:
    """Strict JSON: NaN and infinity are a ValueError."""
    return orjson.loads(data)


def dump_rollout(rollout: Rollout) -> dict[str, Json]:
    return {
        **{name: getattr(rollout, name) for name in _TOP},
        "is_train": rollout.mode == "train",
        "status": {
            **{name: getattr(rollout, name) for name in _STATUS},
            "last_attempt_id": rollout.attempt_id,
            "outcome": dump_outcome(rollout.outcome),
        },
    }


def load_rollout(data: Json) -> Rollout:
    status = data["status"]
    return Rollout(
        **{name: data[name] for name in _TOP},
        **{name: status[name] for name in _STATUS},
        mode="train" if data["is_train"] else "val",
        attempt_id=status["last_attempt_id"],
        outcome=load_outcome(status["outcome"]),
    )


def dump_outcome(outcome: Outcome | None) -> Json:
    return None if outcome is None else asdict(outcome)


def load_outcome(data: Json) -> Outcome | None:
    return None if data is None else Outcome(**data)


def dump_transition(change: Transition) -> dict[str, Json]:
    """The ``status`` of a PATCH."""
    return {
        "state": change.to,
        "last_attempt_id": change.attempt_id,
        "owner": change.owner,
        "outcome": dump_outcome(change.outcome),
        "error_message": change.error_message,
        "k8s_job_name": change.k8s_job_name,
    }


def dump_attempt(attempt: Attempt) -> dict[str, Json]:
    return asdict(attempt)


def load_attempt(data: Json) -> Attempt:
    return Attempt(**{**data, "outcome": load_outcome(data["outcome"])})


def dump_call(call: Call) -> dict[str, Json]:
    return {
        **{name: getattr(call, name) for name in _CALL_PLAIN},
        "sampling": dict(call.sampling),
        "parent": None if call.parent is None else asdict(call.parent),
        "prompt_ids": call.prompt_ids.tolist(),
        "completions": [dump_completion(one) for one in call.completions],
    }


def load_call(data: Json) -> Call:
    return Call(
        **{name: data[name] for name in _CALL_PLAIN},
        sampling=data["sampling"],
        parent=None if data["parent"] is None else ParentRef(**data["parent"]),
        prompt_ids=token_array(data["prompt_ids"]),
        completions=tuple(_load_completion(one) for one in data["completions"]),
    )


def dump_completion(completion: Completion) -> dict[str, Json]:
    logprobs = completion.logprobs
    return {
        "token_ids": completion.token_ids.tolist(),
        "logprobs": None if logprobs is None else dump_floats(logprobs),
        "finish_reason": completion.finish_reason,
        "spans": [asdict(span) for span in completion.spans],
    }


def _load_completion(data: Json) -> Completion:
    logprobs = data["logprobs"]
    return Completion(
        token_array(data["token_ids"]),
        None if logprobs is None else float_array(float(value) for value in logprobs),
        data["finish_reason"],
        tuple(VersionSpan(**span) for span in data["spans"]),
    )


def dump_floats(values: Floats) -> list[float | str]:
    return [value if math.isfinite(value) else str(value) for value in values]


def dump_raw(raw: RawCall) -> dict[str, str]:
    """Bodies as base64: they need be neither JSON nor text."""
    return {
        "request": base64.b64encode(raw.request).decode(),
        "response": base64.b64encode(raw.response).decode(),
    }


def load_raw(data: Json) -> RawCall:
    return RawCall(base64.b64decode(data["request"]), base64.b64decode(data["response"]))


def dump_event(event: Event) -> dict[str, Json]:
    return asdict(event)


def load_event(data: Json) -> Event:
    return Event(**data)


def dump_server(server: ModelServer) -> dict[str, Json]:
    return asdict(server)


def load_server(data: Json) -> ModelServer:
    return ModelServer(**data)


def dump_page(page: TerminalPage) -> dict[str, Json]:
    return asdict(page)


def load_page(data: Json) -> TerminalPage:
    items = tuple(TerminalItem(**item) for item in data["items"])
    return TerminalPage(items, data["next_after"], data["total_terminal"])


def dump_triplet(call: Call, completion: Completion) -> dict[str, Any]:
    """One answer as the events' ``format=triplet`` shows it."""
    logprobs = completion.logprobs
    return {
        "rollout_id": call.rollout_id,
        "attempt_id": call.attempt_id,
        "call_id": call.call_id,
        "prompt_token_ids": call.prompt_ids.tolist(),
        "response_token_ids": completion.token_ids.tolist(),
        "response_log_probs": None if logprobs is None else dump_floats(logprobs),
        "server": call.upstream,
        "model": call.model,
        "version": call.version_start,
        "trainable": call.trainable,
        "created_at": call.ended_at,
    }
