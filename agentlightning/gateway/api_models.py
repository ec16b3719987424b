"""What ``/api`` accepts: bodies and queries."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agentlightning.config import LaunchConfig
from agentlightning.types import (
    Event,
    Json,
    ModelServer,
    Outcome,
    OutcomeKind,
    Rollout,
    RolloutState,
)

MAX_WAIT = 60.0
"""Seconds that an answer is held at most; who wants more asks again."""

Id = Annotated[str, Field(min_length=1, max_length=512)]
Limit = Annotated[int, Field(ge=1, le=100_000)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class NewRollout(Body):
    input: Json
    is_train: bool = True
    config: dict[str, Json] | None = None
    metadata: dict[str, Json] | None = None
    rollout_id: Id | None = None
    group_id: str | None = None
    harness: str | None = None

    @field_validator("config")
    @classmethod
    def _launchable(cls, value: dict[str, Json] | None) -> dict[str, Json] | None:
        LaunchConfig.model_validate(value or {})
        return value

    def record(self) -> Rollout:
        return Rollout(
            self.rollout_id or f"r-{uuid.uuid4().hex}",
            self.input,
            group_id=self.group_id,
            mode="train" if self.is_train else "val",
            config=self.config or {},
            metadata=self.metadata or {},
            harness=self.harness,
        )


class OutcomeBody(Body):
    kind: OutcomeKind
    exit_code: int | None = None
    message: str | None = None

    def record(self) -> Outcome:
        return Outcome(self.kind, self.exit_code, self.message)


class Status(Body):
    state: RolloutState | None = None
    k8s_job_name: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None
    outcome: OutcomeBody | None = None
    owner: str | None = None


class Patch(Body):
    """``strict`` asks for a plain compare-and-swap: no attempt is begun by naming it."""

    status: Status
    strict: bool = False


class NewEvent(Body):
    event_type: Id
    data: dict[str, Json] = Field(default_factory=dict)
    event_id: Id | None = None
    created_at: float = 0.0
    idempotency_key: str | None = None

    def record(self, rollout_id: str, attempt_id: str) -> Event:
        return Event(
            self.event_id or f"e-{uuid.uuid4().hex}",
            rollout_id,
            attempt_id,
            self.event_type,
            self.data,
            created_at=self.created_at,
        )


class Server(Body):
    model: Id
    endpoint: Id
    version: int = 0
    owner: str | None = None

    def record(self) -> ModelServer:
        return ModelServer(self.model, self.endpoint, self.version, self.owner)


class Claim(Body):
    owner: Id
    limit: Limit
    lease_seconds: Seconds
    wait: Seconds = 0
    request_id: str | None = None


class Renewal(Body):
    owner: Id
    rollout_ids: list[str]
    lease_seconds: Seconds


class Retry(Body):
    owner: Id
    attempt_id: Id
    outcome: OutcomeBody
    lease_seconds: Seconds


class NewCall(Body):
    call: dict[str, Any]
    raw: dict[str, str]


class Undelivered(Body):
    reason: Id


class Setting(Body):
    value: Json


class ListQuery(Body):
    state_in: list[RolloutState] = Field(default_factory=list)
    group_id: list[str] = Field(default_factory=list)
    after: str | None = None
    limit: Limit = 1000


class TerminalQuery(Body):
    after: Annotated[int, Field(ge=0, lt=2**63)] = 0
    limit: Limit = 1000
    wait: Seconds = 0
