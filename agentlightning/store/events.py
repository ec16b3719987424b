"""Events of attempts as rows; a reward of the current attempt is the rollout's reward."""

from __future__ import annotations

import math
import sqlite3
from dataclasses import replace

from agentlightning.store import rollouts
from agentlightning.store.rows import dumps, event_of, rollout_of
from agentlightning.types import Event


def check_reward(event: Event) -> None:
    """ValueError unless the event is no reward or its value is a finite number."""
    if event.event_type != "reward":
        return
    value = event.data.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(
            f"a reward's data.value must be a finite number, got {value!r}; "
            'send {"event_type": "reward", "data": {"value": 1.0}}'
        )


def add(db: sqlite3.Connection, event: Event, *, key: str | None, now: float) -> Event:
    """Inserts an event; a known id or idempotency key gives the event that holds it."""
    check_reward(event)
    row = rollouts.find(db, event.rollout_id)
    known = db.execute(
        "SELECT * FROM events WHERE rollout = ? AND (event_id = ? OR idempotency_key = ?)",
        (row["seq"], event.event_id, key),
    ).fetchone()
    if known is not None:
        return event_of(known, event.rollout_id)
    stored = replace(event, created_at=event.created_at or now)
    db.execute(
        "INSERT INTO events (event_id, rollout, attempt_id, event_type, data, created_at, "
        "idempotency_key) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            *(stored.event_id, row["seq"], stored.attempt_id, stored.event_type),
            *(dumps(dict(stored.data)), stored.created_at, key),
        ),
    )
    rollout = rollout_of(row)
    if stored.event_type == "reward" and stored.attempt_id == rollout.attempt_id:
        rollouts.save(db, replace(rollout, reward=float(stored.data["value"])), now=now)
    return stored


def of_rollout(
    db: sqlite3.Connection,
    rollout_id: str,
    *,
    attempt_id: str | None,
    event_type: str | None,
) -> list[Event]:
    rows = db.execute(
        "SELECT * FROM events WHERE rollout = :rollout "
        "AND (:attempt IS NULL OR attempt_id = :attempt) "
        "AND (:type IS NULL OR event_type = :type) ORDER BY seq",
        {
            "rollout": rollouts.find(db, rollout_id)["seq"],
            "attempt": attempt_id,
            "type": event_type,
        },
    )
    return [event_of(row, rollout_id) for row in rows]
