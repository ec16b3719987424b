"""The Store protocol: what every implementation does, in the words of its callers.

Each method is atomic and durable when it returns. Each may be repeated with the same
arguments after a lost answer. Times are Unix seconds, waits are seconds and bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentlightning.types import (
    Attempt,
    Call,
    Event,
    Json,
    ModelServer,
    Outcome,
    RawCall,
    Rollout,
    RolloutState,
    TerminalPage,
)


@dataclass(frozen=True, slots=True)
class Transition:
    """A wanted change of a rollout's state and of what is known about its end.

    ``to`` None changes no state (only the other fields). ``attempt_id`` and ``owner``, where
    given, must be the rollout's current ones, else Conflict: an old attempt or a controller
    that lost its lease changes nothing. Going to a terminal state ends the attempt, frees the
    lease and sets ``ended_at``.

    Example:
        >>> Transition(to="failed", attempt_id="a1", outcome=Outcome("time_limit")).to
        'failed'
    """

    to: RolloutState | None = None
    attempt_id: str | None = None
    owner: str | None = None
    outcome: Outcome | None = None
    error_message: str | None = None
    k8s_job_name: str | None = None


class Store(Protocol):
    """Raises NotFound for an unknown rollout, Conflict for a lost compare-and-swap,
    StoreUnavailable when it cannot answer within its bound."""

    async def close(self) -> None:
        """Waits for what is being written, then releases everything."""

    # --- rollouts

    async def add_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Queues rollouts, in order. One whose id exists is returned unchanged."""

    async def get_rollout(self, rollout_id: str) -> Rollout: ...

    async def list_rollouts(
        self,
        *,
        states: Sequence[RolloutState] = (),
        group_ids: Sequence[str] = (),
        after: str | None = None,
        limit: int = 1000,
    ) -> list[Rollout]:
        """Rollouts in order of creation; ``after`` is the id of the last one already seen."""

    async def transition(self, rollout_id: str, change: Transition) -> Rollout:
        """Compare-and-swap by ALLOWED_TRANSITIONS. Repeating the state that holds already
        returns the rollout as it is; any other move out of a terminal state is a Conflict."""

    async def cancel(self, rollout_id: str) -> Rollout:
        """To ``cancelled`` with outcome ``cancelled``; a rollout that ended is returned as is."""

    async def delete_rollout(self, rollout_id: str) -> None:
        """Removes the rollout, its attempts, calls and events. Unknown ids are no error."""

    async def terminal(self, *, after: int = 0, limit: int = 1000, wait: float = 0) -> TerminalPage:
        """Rollouts in order of completion, from position ``after`` on. Where there is none
        yet, the answer is held up to ``wait`` seconds for one."""

    # --- attempts and leases

    async def claim(
        self,
        owner: str,
        *,
        limit: int,
        lease_seconds: float,
        wait: float = 0,
        request_id: str | None = None,
    ) -> list[Rollout]:
        """Takes up to ``limit`` rollouts that nobody holds and begins an attempt of each:
        queued ones in order, and running ones whose lease has ended (their old attempt is
        closed as ``lost``; without attempts left the rollout becomes ``failed`` instead and is
        not returned). Held up to ``wait`` seconds while there is nothing to take. Rollouts
        that no controller ever claimed but that were opened by ``open_attempt`` have no lease
        and are never taken. Repeating a ``request_id`` gives the owner again what that request
        took and it still holds, so that a lost answer leaks nothing."""

    async def renew(
        self, owner: str, rollout_ids: Sequence[str], *, lease_seconds: float
    ) -> list[Rollout]:
        """Renews leases; returns those still held. What is missing was cancelled, deleted,
        ended or taken over: its agent must be ended. ``lease_seconds`` 0 gives the rollouts up:
        the next claim takes them, closes their attempts as ``cancelled``, and does not count
        these as attempts made."""

    async def retry(
        self,
        rollout_id: str,
        *,
        owner: str,
        attempt_id: str,
        outcome: Outcome,
        lease_seconds: float,
    ) -> Rollout:
        """The holder closes the current attempt with an infrastructure fault and begins the
        next one; Conflict if no attempt is left (``config.max_attempts``, default 2)."""

    async def open_attempt(self, rollout_id: str, attempt_id: str) -> Rollout:
        """Makes ``attempt_id`` the current attempt of a rollout that no controller claimed
        (``owner`` None): the rollout becomes ``running``. Returns it as is where that attempt
        is current already; Conflict where the rollout has ended, is held, or where that
        attempt is over."""

    async def attempts(self, rollout_id: str) -> list[Attempt]: ...

    # --- calls and events

    async def add_call(self, call: Call, raw: RawCall) -> None:
        """Records a call and finds its ``sequence`` and ``parent``. A call id that exists is
        left as it was recorded. The attempt need not be running any more: what was sampled is
        kept."""

    async def mark_undelivered(self, call_id: str, reason: str) -> None:
        """The answer did not reach the agent: status ``undelivered``, not trainable."""

    async def calls(self, rollout_id: str, *, attempt_id: str | None = None) -> list[Call]:
        """Calls with their full prompts, by attempt and sequence."""

    async def raw_call(self, call_id: str) -> RawCall: ...

    async def add_event(self, event: Event, *, idempotency_key: str | None = None) -> Event:
        """Appends an event. A reward (checked to be a finite number, else ValueError) of the
        rollout's current attempt also becomes ``Rollout.reward``. An idempotency key that was
        used on the rollout returns that event and adds nothing."""

    async def events(
        self, rollout_id: str, *, attempt_id: str | None = None, event_type: str | None = None
    ) -> list[Event]: ...

    # --- what the gateway must remember

    async def set_model_servers(
        self, servers: Sequence[ModelServer], *, owner: str | None = None
    ) -> None:
        """Replaces, in one step, the servers of ``owner`` (all servers where None)."""

    async def model_servers(self) -> list[ModelServer]: ...

    async def set_setting(self, name: str, value: Json) -> None: ...

    async def setting(self, name: str) -> Json:
        """The value, or None."""
