"""Calls as rows: each keeps only the prompt tokens that its parent does not have."""

from __future__ import annotations

import json
import sqlite3
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from agentlightning.errors import NotFound
from agentlightning.prefix import PrefixIndex, sequence_digest
from agentlightning.store.bodies import write_body
from agentlightning.store.rows import completion_of, dumps, pack, unpack
from agentlightning.types import Call, Completion, ParentRef, RawCall, Tokens

_PLAIN = (
    *("dialect", "requested_model", "model", "upstream", "version_start", "version_end"),
    *("status", "trainable", "reason", "error", "http_status", "streamed", "prompt_tokens"),
    *("completion_tokens", "started_at", "first_byte_at", "ended_at"),
)
_COLUMNS = [
    *("call_id", "rollout", "attempt_id", "sequence", "parent", "parent_completion"),
    *("new_prompt_ids", "sampling"),
    *_PLAIN,
]
_INSERT = (
    f"INSERT INTO calls ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) "
    "ON CONFLICT (call_id) DO NOTHING"
)
_BOOLEANS = ("trainable", "streamed")


class _Place(NamedTuple):
    """A completion whose history is known."""

    row: int
    call_id: str
    completion: int


@dataclass(slots=True)
class _Attempt:
    """What the writer remembers of an attempt."""

    rollout: int
    next_sequence: int = 0
    index: PrefixIndex[_Place] = field(default_factory=PrefixIndex)
    messages: dict[bytes, int] = field(default_factory=dict)


class CallWriter:
    """Writes calls; remembers up to ``capacity`` attempts and reads others from the file.

    What it remembers is right only while nobody else writes: call :meth:`forget` when
    somebody did, or when a commit was lost.
    """

    def __init__(self, *, capacity: int = 256) -> None:
        self._capacity = capacity
        self._attempts: OrderedDict[tuple[str, str], _Attempt] = OrderedDict()

    def forget(self) -> None:
        self._attempts.clear()

    def add(self, db: sqlite3.Connection, call: Call, raw: RawCall) -> None:
        """Inserts ``call``; one whose id exists stays as it is."""
        try:
            self._insert(db, call, raw)
        except Exception:
            self._attempts.pop((call.rollout_id, call.attempt_id), None)
            raise

    def _insert(self, db: sqlite3.Connection, call: Call, raw: RawCall) -> None:
        attempt = self._attempt(db, call)
        number = _insert_call(db, call, attempt)
        if number is None:
            return
        attempt.next_sequence += 1
        _insert_completions(db, call, number, attempt.index)
        write_body(db, number, raw, rollout=attempt.rollout, known=attempt.messages)

    def _attempt(self, db: sqlite3.Connection, call: Call) -> _Attempt:
        key = (call.rollout_id, call.attempt_id)
        attempt = self._attempts.get(key)
        if attempt is None:
            attempt = self._attempts[key] = _read_attempt(db, *key)
            if len(self._attempts) > self._capacity:
                self._attempts.popitem(last=False)
        else:
            self._attempts.move_to_end(key)
        return attempt


def _insert_call(db: sqlite3.Connection, call: Call, attempt: _Attempt) -> int | None:
    """The number of the new row; None where the call's id is known."""
    found = attempt.index.longest(call.prompt_ids)
    place, shared = found if found else (None, 0)
    values: list[Any] = [call.call_id, attempt.rollout, call.attempt_id, attempt.next_sequence]
    values += [place.row, place.completion] if place else [None, None]
    values += [pack(call.prompt_ids[shared:]), dumps(dict(call.sampling))]
    values += [getattr(call, name) for name in _PLAIN]
    done = db.execute(_INSERT, values)
    return done.lastrowid if done.rowcount else None


def _insert_completions(
    db: sqlite3.Connection, call: Call, number: int, index: PrefixIndex[_Place]
) -> None:
    for position, completion in enumerate(call.completions):
        history = call.prompt_ids + completion.token_ids
        digest = sequence_digest(history) if completion.token_ids else None
        logprobs = completion.logprobs
        db.execute(
            "INSERT INTO completions VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                number,
                position,
                pack(completion.token_ids),
                None if logprobs is None else pack(logprobs),
                completion.finish_reason,
                orjson.dumps([(s.version, s.start, s.end) for s in completion.spans]).decode(),
                len(history),
                digest,
            ),
        )
        if digest is not None:
            index.add_digest(len(history), digest, _Place(number, call.call_id, position))


def _read_attempt(db: sqlite3.Connection, rollout_id: str, attempt_id: str) -> _Attempt:
    row = db.execute("SELECT seq FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if row is None:
        raise NotFound(f"no rollout has the id {rollout_id!r}")
    attempt = _Attempt(row["seq"])
    of_attempt = (attempt.rollout, attempt_id)
    attempt.next_sequence = db.execute(
        "SELECT coalesce(max(sequence) + 1, 0) FROM calls WHERE rollout = ? AND attempt_id = ?",
        of_attempt,
    ).fetchone()[0]
    for known in db.execute(
        "SELECT id, call_id, number, history_length, history_digest FROM calls "
        "JOIN completions ON call = id WHERE rollout = ? AND attempt_id = ? "
        "AND history_digest IS NOT NULL ORDER BY sequence, number",
        of_attempt,
    ):
        place = _Place(known["id"], known["call_id"], known["number"])
        attempt.index.add_digest(known["history_length"], known["history_digest"], place)
    return attempt


def read_calls(
    db: sqlite3.Connection, rollout: int, *, attempt_id: str | None = None
) -> list[Call]:
    """Calls of the rollout with row number ``rollout``, by attempt and sequence."""
    wanted = "calls.rollout = :rollout AND (:attempt IS NULL OR calls.attempt_id = :attempt)"
    names = {"rollout": rollout, "attempt": attempt_id}
    completions: dict[int, list[Completion]] = {}
    for row in db.execute(
        f"SELECT completions.* FROM calls JOIN completions ON call = id WHERE {wanted} "
        "ORDER BY call, number",
        names,
    ):
        completions.setdefault(row["call"], []).append(completion_of(row))
    rows = db.execute(
        "SELECT calls.*, rollout_id FROM calls JOIN rollouts ON rollouts.seq = calls.rollout "
        "LEFT JOIN attempts ON attempts.rollout = calls.rollout "
        f"AND attempts.attempt_id = calls.attempt_id WHERE {wanted} "
        "ORDER BY attempts.number, calls.attempt_id, calls.sequence",
        names,
    )
    known: dict[int, Call] = {}  # a parent comes before its children
    for row in rows:
        known[row["id"]] = _call_of(row, tuple(completions.get(row["id"], ())), known)
    return list(known.values())


def _call_of(row: sqlite3.Row, completions: tuple[Completion, ...], known: dict[int, Call]) -> Call:
    prompt: Tokens = unpack("i", row["new_prompt_ids"])
    parent = None
    if row["parent"] is not None:
        before = known[row["parent"]]
        parent = ParentRef(before.call_id, row["parent_completion"])
        prompt = before.prompt_ids + before.completions[parent.completion].token_ids + prompt
    plain = {name: row[name] for name in _PLAIN}
    plain.update((name, bool(plain[name])) for name in _BOOLEANS)
    return Call(
        row["call_id"],
        row["rollout_id"],
        row["attempt_id"],
        prompt,
        completions,
        sequence=row["sequence"],
        sampling=json.loads(row["sampling"]),
        parent=parent,
        **plain,
    )
