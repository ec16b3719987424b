"""Rollouts, attempts and leases as rows. Each function runs within one transaction."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Sequence
from dataclasses import replace

from agentlightning.errors import Conflict, NotFound
from agentlightning.store.protocol import Transition
from agentlightning.store.rows import attempt_of, dump_outcome, rollout_of, rollout_values
from agentlightning.types import (
    ALLOWED_TRANSITIONS,
    TERMINAL_STATES,
    Attempt,
    Outcome,
    Rollout,
    RolloutState,
    TerminalItem,
    TerminalPage,
)

DEFAULT_MAX_ATTEMPTS = 2
GIVEN_UP = 0.0
"""As ``lease_until``: the holder stopped in good order and gave the rollout up."""


def find(db: sqlite3.Connection, rollout_id: str) -> sqlite3.Row:
    """The row of a rollout; raises NotFound."""
    row = db.execute("SELECT * FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if row is None:
        raise NotFound(f"no rollout has the id {rollout_id!r}")
    assert isinstance(row, sqlite3.Row)
    return row


def get(db: sqlite3.Connection, rollout_id: str) -> Rollout:
    return rollout_of(find(db, rollout_id))


def add(db: sqlite3.Connection, rollout: Rollout, *, now: float) -> Rollout:
    """Inserts a rollout; one whose id exists is returned unchanged."""
    new = replace(
        rollout, created_at=rollout.created_at or now, updated_at=rollout.updated_at or now
    )
    values = rollout_values(new)
    db.execute(
        f"INSERT INTO rollouts ({', '.join(values)}) VALUES ({', '.join('?' * len(values))}) "
        "ON CONFLICT (rollout_id) DO NOTHING",
        tuple(values.values()),
    )
    return get(db, rollout.rollout_id)


def save(db: sqlite3.Connection, rollout: Rollout, *, now: float) -> Rollout:
    """Writes what may change of a rollout; its version grows by one."""
    new = replace(rollout, version=rollout.version + 1, updated_at=now)
    db.execute(
        "UPDATE rollouts SET state = ?, version = ?, attempt = ?, attempt_id = ?, owner = ?, "
        "lease_until = ?, outcome = ?, error_message = ?, reward = ?, k8s_job_name = ?, "
        "updated_at = ?, started_at = ?, ended_at = ? WHERE rollout_id = ?",
        (
            *(new.state, new.version, new.attempt, new.attempt_id, new.owner),
            *(new.lease_until, dump_outcome(new.outcome), new.error_message, new.reward),
            *(new.k8s_job_name, new.updated_at, new.started_at, new.ended_at, new.rollout_id),
        ),
    )
    return new


def list_page(
    db: sqlite3.Connection,
    *,
    states: Sequence[RolloutState],
    group_ids: Sequence[str],
    after: str | None,
    limit: int,
) -> list[Rollout]:
    where, values = ["seq > ?"], [0 if after is None else find(db, after)["seq"]]
    for column, wanted in (("state", states), ("group_id", group_ids)):
        if wanted:
            where.append(f"{column} IN ({', '.join('?' * len(wanted))})")
            values += wanted
    rows = db.execute(
        f"SELECT * FROM rollouts WHERE {' AND '.join(where)} ORDER BY seq LIMIT ?",
        (*values, limit),
    )
    return [rollout_of(row) for row in rows]


def terminal_page(db: sqlite3.Connection, *, after: int, limit: int) -> TerminalPage:
    rows = db.execute(
        "SELECT position, rollout_id, state, mode, json_extract(metadata, '$.data_id') AS data_id "
        "FROM terminals JOIN rollouts ON seq = rollout WHERE position > ? "
        "ORDER BY position LIMIT ?",
        (after, limit),
    )
    items = tuple(
        TerminalItem(
            position=row["position"],
            rollout_id=row["rollout_id"],
            state=row["state"],
            data_id=None if row["data_id"] is None else str(row["data_id"]),
            is_train=row["mode"] == "train",
        )
        for row in rows
    )
    total = db.execute("SELECT count(*) FROM terminals").fetchone()[0]
    return TerminalPage(items, items[-1].position if items else after, total)


def transition(
    db: sqlite3.Connection, rollout_id: str, change: Transition, *, now: float
) -> Rollout:
    rollout = get(db, rollout_id)
    _check_holder(rollout, change)
    to = change.to
    if to == rollout.state and rollout.terminal:
        return rollout
    if to is not None and to != rollout.state and to not in ALLOWED_TRANSITIONS[rollout.state]:
        allowed = ", ".join(sorted(ALLOWED_TRANSITIONS[rollout.state])) or "nothing"
        raise Conflict(
            f"rollout {rollout_id!r} is {rollout.state}: it can go to {allowed}, not {to}"
        )
    wanted = replace(
        rollout,
        state=to or rollout.state,
        outcome=change.outcome or rollout.outcome,
        error_message=_or(change.error_message, rollout.error_message),
        k8s_job_name=_or(change.k8s_job_name, rollout.k8s_job_name),
    )
    if wanted == rollout:
        return rollout
    if to == "running" and rollout.started_at is None:
        wanted = replace(wanted, started_at=now)
    if to in TERMINAL_STATES:
        return _end(db, wanted, now=now)
    return save(db, wanted, now=now)


def cancel(db: sqlite3.Connection, rollout_id: str, *, now: float) -> Rollout:
    rollout = get(db, rollout_id)
    if rollout.terminal:
        return rollout
    return _end(db, replace(rollout, state="cancelled", outcome=Outcome("cancelled")), now=now)


def delete(db: sqlite3.Connection, rollout_id: str) -> None:
    """Deletes a rollout and all that hangs on it, and messages that no other rollout has."""
    row = db.execute("SELECT seq FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if row is None:
        return
    held = db.execute("SELECT message FROM rollout_messages WHERE rollout = ?", (row["seq"],))
    messages = [(one["message"],) for one in held]
    db.execute("DELETE FROM rollouts WHERE seq = ?", (row["seq"],))
    db.executemany(
        "DELETE FROM messages WHERE id = ?1 "
        "AND NOT EXISTS (SELECT 1 FROM rollout_messages WHERE message = ?1)",
        messages,
    )


def attempts(db: sqlite3.Connection, rollout_id: str) -> list[Attempt]:
    rollout = find(db, rollout_id)["seq"]
    rows = db.execute("SELECT * FROM attempts WHERE rollout = ? ORDER BY number", (rollout,))
    return [attempt_of(row, rollout_id) for row in rows]


def open_attempt(
    db: sqlite3.Connection, rollout_id: str, attempt_id: str, *, now: float
) -> Rollout:
    row = find(db, rollout_id)
    rollout = rollout_of(row)
    if rollout.terminal:
        raise Conflict(f"rollout {rollout_id!r} has ended ({rollout.state}); its attempts are over")
    if rollout.attempt_id == attempt_id:
        return rollout
    if rollout.owner is not None:
        raise Conflict(
            f"rollout {rollout_id!r} is held by {rollout.owner!r} and its attempt is "
            f"{rollout.attempt_id!r}, not {attempt_id!r}"
        )
    if db.execute(
        "SELECT 1 FROM attempts WHERE rollout = ? AND attempt_id = ?", (row["seq"], attempt_id)
    ).fetchone():
        raise Conflict(f"attempt {attempt_id!r} of rollout {rollout_id!r} is over")
    _close_attempt(db, rollout, Outcome("lost", message=f"attempt {attempt_id} began"), now=now)
    return save(db, _begin_attempt(db, rollout, attempt_id, now=now), now=now)


def claim(
    db: sqlite3.Connection,
    owner: str,
    *,
    limit: int,
    until: float,
    now: float,
    request: str | None,
) -> list[Rollout]:
    """As :meth:`Store.claim` without the wait. A request that took rollouts gets the same again."""
    if request is not None:
        held = db.execute(
            "SELECT * FROM rollouts WHERE state = 'running' AND owner = ? AND claim_request = ? "
            "ORDER BY seq",
            (owner, request),
        ).fetchall()
        if held:
            return [rollout_of(row) for row in held]
    taken: list[Rollout] = []
    for rollout in _free(db, limit=limit, now=now):
        if len(taken) >= limit:
            break
        fresh = _relaunchable(db, rollout, now=now)
        if fresh is not None:
            taken.append(_take(db, fresh, owner, until=until, now=now))
    if request is not None:
        db.executemany(
            "UPDATE rollouts SET claim_request = ? WHERE rollout_id = ?",
            [(request, rollout.rollout_id) for rollout in taken],
        )
    return taken


def renew(
    db: sqlite3.Connection, owner: str, rollout_ids: Sequence[str], *, until: float
) -> list[Rollout]:
    """A renewal is no change of the rollout: its version stays."""
    held = []
    for rollout_id in rollout_ids:
        if db.execute(
            "UPDATE rollouts SET lease_until = ? "
            "WHERE rollout_id = ? AND owner = ? AND state = 'running'",
            (until, rollout_id, owner),
        ).rowcount:
            held.append(get(db, rollout_id))
    return held


def retry(
    db: sqlite3.Connection,
    rollout_id: str,
    change: Transition,
    *,
    until: float,
    now: float,
) -> Rollout:
    """Ends the attempt that ``change`` names with its outcome and begins the next one."""
    rollout = get(db, rollout_id)
    if _was_retried(db, rollout, change):
        return rollout
    if rollout.state != "running":
        raise Conflict(f"rollout {rollout_id!r} is {rollout.state}; only a running one is retried")
    _check_holder(rollout, change)
    tries = _tries(db, rollout_id)
    if tries >= max_attempts(rollout):
        raise Conflict(
            f"rollout {rollout_id!r} has no attempt left: {tries} of "
            f"{max_attempts(rollout)} were made; raise config.max_attempts or end it as failed"
        )
    _close_attempt(db, rollout, change.outcome, now=now)
    return _take(db, rollout, change.owner or "", until=until, now=now)


def _tries(db: sqlite3.Connection, rollout_id: str) -> int:
    """Attempts that count: all but those whose controller gave them up in good order."""
    row = db.execute(
        "SELECT count(*) FROM attempts JOIN rollouts ON seq = rollout WHERE rollout_id = ? "
        "AND coalesce(json_extract(attempts.outcome, '$.kind'), '') != 'cancelled'",
        (rollout_id,),
    ).fetchone()
    return int(row[0])


def max_attempts(rollout: Rollout) -> int:
    value = rollout.config.get("max_attempts")
    return value if isinstance(value, int) and value > 0 else DEFAULT_MAX_ATTEMPTS


def _free(db: sqlite3.Connection, *, limit: int, now: float) -> list[Rollout]:
    """Rollouts that nobody holds: those whose lease has ended, then ``limit`` queued ones."""
    lapsed = db.execute(
        "SELECT * FROM rollouts WHERE state = 'running' AND owner IS NOT NULL "
        "AND lease_until <= ? ORDER BY seq",
        (now,),
    ).fetchall()
    queued = db.execute(
        "SELECT * FROM rollouts WHERE state = 'queuing' AND owner IS NULL ORDER BY seq LIMIT ?",
        (limit,),
    )
    return [rollout_of(row) for row in lapsed] + [rollout_of(row) for row in queued]


def _relaunchable(db: sqlite3.Connection, rollout: Rollout, *, now: float) -> Rollout | None:
    """The rollout with its lost attempt closed; None if that was its last one (it failed)."""
    if rollout.state == "queuing":
        return rollout
    if rollout.lease_until == GIVEN_UP:
        stopped = Outcome("cancelled", message=f"{rollout.owner} stopped")
        _close_attempt(db, rollout, stopped, now=now)
        return rollout
    lost = Outcome("lost", message=f"the lease of {rollout.owner} ended")
    if _tries(db, rollout.rollout_id) < max_attempts(rollout):
        _close_attempt(db, rollout, lost, now=now)
        return rollout
    _end(db, replace(rollout, state="failed", outcome=lost, error_message=lost.message), now=now)
    return None


def _take(
    db: sqlite3.Connection, rollout: Rollout, owner: str, *, until: float, now: float
) -> Rollout:
    attempt_id = f"a{rollout.attempt + 1}-{secrets.token_hex(8)}"
    begun = _begin_attempt(db, rollout, attempt_id, now=now)
    return save(db, replace(begun, owner=owner, lease_until=until, k8s_job_name=None), now=now)


def _begin_attempt(
    db: sqlite3.Connection, rollout: Rollout, attempt_id: str, *, now: float
) -> Rollout:
    number = rollout.attempt + 1
    db.execute(
        "INSERT INTO attempts (rollout, attempt_id, number, started_at) "
        "SELECT seq, ?, ?, ? FROM rollouts WHERE rollout_id = ?",
        (attempt_id, number, now, rollout.rollout_id),
    )
    started_at = now if rollout.started_at is None else rollout.started_at
    return replace(
        rollout,
        state="running",
        attempt=number,
        attempt_id=attempt_id,
        started_at=started_at,
        reward=None,  # the reward is the current attempt's
    )


def _close_attempt(
    db: sqlite3.Connection, rollout: Rollout, outcome: Outcome | None, *, now: float
) -> None:
    db.execute(
        "UPDATE attempts SET ended_at = ?, outcome = ? WHERE attempt_id = ? "
        "AND rollout = (SELECT seq FROM rollouts WHERE rollout_id = ?)",
        (now, dump_outcome(outcome), rollout.attempt_id, rollout.rollout_id),
    )


def _end(db: sqlite3.Connection, rollout: Rollout, *, now: float) -> Rollout:
    """Writes a rollout whose state has become terminal."""
    _close_attempt(db, rollout, rollout.outcome, now=now)
    db.execute(
        "INSERT INTO terminals (rollout) SELECT seq FROM rollouts WHERE rollout_id = ?",
        (rollout.rollout_id,),
    )
    return save(db, replace(rollout, owner=None, lease_until=None, ended_at=now), now=now)


def _check_holder(rollout: Rollout, change: Transition) -> None:
    if change.attempt_id is not None and change.attempt_id != rollout.attempt_id:
        raise Conflict(
            f"attempt {change.attempt_id!r} is not the current one of rollout "
            f"{rollout.rollout_id!r} (that is {rollout.attempt_id!r})"
        )
    repeated = rollout.terminal and change.to == rollout.state  # its end freed the lease
    if change.owner is not None and change.owner != rollout.owner and not repeated:
        raise Conflict(
            f"rollout {rollout.rollout_id!r} is held by {rollout.owner!r}, not {change.owner!r}"
        )


def _was_retried(db: sqlite3.Connection, rollout: Rollout, change: Transition) -> bool:
    """Whether the current attempt is the one that this very retry began."""
    if rollout.state != "running" or rollout.owner != change.owner:
        return False
    row = db.execute(
        "SELECT attempts.outcome FROM attempts JOIN rollouts ON seq = rollout "
        "WHERE rollout_id = ? AND attempts.attempt_id = ? AND number = ?",
        (rollout.rollout_id, change.attempt_id, rollout.attempt - 1),
    ).fetchone()
    return row is not None and row["outcome"] == dump_outcome(change.outcome)


def _or(new: str | None, old: str | None) -> str | None:
    return old if new is None else new
