"""What is known of a call while it runs, and the records that it becomes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from agentlightning.address import AttemptAddress
from agentlightning.gateway.trainable import judge
from agentlightning.gateway.wire import Answer, Asked, Wire
from agentlightning.gateway.wire.sampling import used
from agentlightning.types import Call, CallStatus, Json, ModelServer, RawCall


@dataclass(slots=True)
class Run:
    """One call on its way. ``policy``: the agent asked for the model that is trained."""

    call_id: str
    address: AttemptAddress
    wire: Wire
    raw_request: bytes
    request: Mapping[str, Json]
    asked: Asked
    body: dict[str, Json]
    policy: bool = True
    answer: Answer = field(default_factory=Answer)
    server: ModelServer | None = None
    http_status: int | None = None
    started_at: float = field(default_factory=time.time)
    first_byte_at: float | None = None
    last_byte_at: float = 0.0


@dataclass(frozen=True, slots=True)
class End:
    """How a call ended. ``response`` replaces the assembled answer (an error's own body)."""

    status: CallStatus = "ok"
    reason: str | None = None
    error: str | None = None
    response: bytes | None = None


def records(run: Run, end: End, *, version_end: int | None) -> tuple[Call, RawCall]:
    """The call with its tokens, and its texts. ``version_end`` is what the server is known to
    serve now; versions that the answer itself names go before."""
    server = run.server or ModelServer(model="", endpoint="")
    judged = judge(run.answer, server.version)
    reason = end.reason or (None if run.policy else "other_model") or judged.reason
    completions, prompt_ids = judged.completions, judged.prompt_ids
    spans = [span for completion in completions for span in completion.spans]
    named = any(choice.spans for choice in run.answer.choices.values())
    call = Call(
        call_id=run.call_id,
        rollout_id=run.address.rollout_id,
        attempt_id=run.address.attempt_id,
        prompt_ids=prompt_ids,
        completions=completions,
        dialect=run.wire.DIALECT,
        requested_model=str(run.request.get("model") or ""),
        model=server.model,
        upstream=server.endpoint,
        sampling=used(run.body),
        version_start=_version(run, min((s.version for s in spans), default=None), named),
        version_end=max(s.version for s in spans) if named and spans else version_end,
        status=end.status,
        trainable=reason is None,
        reason=reason,
        error=end.error,
        http_status=run.http_status,
        streamed=run.asked.stream,
        prompt_tokens=_count(run.answer.prompt_tokens, len(prompt_ids)),
        completion_tokens=_count(
            run.answer.completion_tokens, sum(len(c.token_ids) for c in completions)
        ),
        started_at=run.started_at,
        first_byte_at=run.first_byte_at,
        ended_at=time.time(),
    )
    response = end.response if end.response is not None else orjson.dumps(run.answer.body)
    return call, RawCall(run.raw_request, response, parsed=run.request)


def _version(run: Run, first_sampled: int | None, named: bool) -> int | None:
    if named:
        return first_sampled
    return run.server.version if run.server else None


def _count(reported: Json, counted: int) -> int:
    return reported if isinstance(reported, int) else counted
