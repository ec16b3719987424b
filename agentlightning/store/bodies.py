"""Request bodies with equal messages kept once.

A harness sends its whole history with each call. So the items of a request's message list
are stored by content, and so is the rest of the body (its tools and settings seldom
change); the call keeps their numbers.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import MutableMapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from agentlightning.errors import NotFound
from agentlightning.store.rows import pack, unpack
from agentlightning.types import Json, RawCall

_LIST_KEYS = ("messages", "input", "prompt")
_ZEROS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else byte for byte in range(256))
_LONG_NUMBER = b"0" * 19  # once each digit is a 0: far faster than a pattern

Known = MutableMapping[bytes, int]
"""Digest → number of the messages that a rollout is known to hold."""


def write_body(
    db: sqlite3.Connection, call: int, raw: RawCall, *, rollout: int, known: Known
) -> None:
    """Stores request and response of the call with row number ``call``."""
    split = _split(raw)
    if split is None:
        values: tuple[Any, ...] = (call, raw.request, None, None, None, raw.response)
    else:
        skeleton, key, items = split
        *numbers, number = _numbers(db, (*items, skeleton), rollout=rollout, known=known)
        values = (call, None, number, key, pack(array("q", numbers)), raw.response)
    db.execute("INSERT INTO bodies VALUES (?, ?, ?, ?, ?, ?)", values)


def read_body(db: sqlite3.Connection, call_id: str) -> RawCall:
    """Request and response; a split request comes back as equal JSON, not as equal bytes."""
    row = db.execute(
        "SELECT bodies.* FROM bodies JOIN calls ON calls.id = bodies.call WHERE call_id = ?",
        (call_id,),
    ).fetchone()
    if row is None:
        raise NotFound(f"no call has the id {call_id!r}")
    if row["list_key"] is None:
        return RawCall(bytes(row["request"]), bytes(row["response"]))
    numbers = unpack("q", row["message_ids"])
    texts = {number: _text(db, number) for number in {*numbers, row["skeleton"]}}
    request = orjson.loads(texts[row["skeleton"]])
    request[row["list_key"]] = [orjson.Fragment(texts[number]) for number in numbers]
    return RawCall(orjson.dumps(request), bytes(row["response"]))


def _split(raw: RawCall) -> tuple[dict[str, Any], str, list[Any]] | None:
    """The body without its list, the list's key, and the list; None if it has none.

    A number of more digits than 64 bits hold would not survive parsing: kept as it is.
    """
    if _LONG_NUMBER in raw.request.translate(_ZEROS):
        return None
    try:
        body = orjson.loads(raw.request) if raw.parsed is None else raw.parsed
    except orjson.JSONDecodeError:
        return None
    if not isinstance(body, dict):
        return None
    for key in _LIST_KEYS:
        items = body.get(key)
        if isinstance(items, list) and items and all(isinstance(item, dict) for item in items):
            return {**body, key: None}, key, items
    return None


def _numbers(
    db: sqlite3.Connection, parts: Sequence[Json], *, rollout: int, known: Known
) -> list[int]:
    """The numbers under which the parts of a body are stored."""
    numbers = []
    for part in parts:
        body = orjson.dumps(part)
        digest = blake2b(body, digest_size=16).digest()
        if digest not in known:
            known[digest] = _stored(db, body, digest=digest, rollout=rollout)
        numbers.append(known[digest])
    return numbers


def _stored(db: sqlite3.Connection, body: bytes, *, digest: bytes, rollout: int) -> int:
    row = db.execute("SELECT id FROM messages WHERE digest = ?", (digest,)).fetchone()
    if row is not None:
        number = int(row[0])
    else:
        cursor = db.execute(
            "INSERT INTO messages (digest, body) VALUES (?, ?)", (digest, body.decode())
        )
        number = int(cursor.lastrowid or 0)
    db.execute("INSERT OR IGNORE INTO rollout_messages VALUES (?, ?)", (rollout, number))
    return number


def _text(db: sqlite3.Connection, number: int) -> str:
    return str(db.execute("SELECT body FROM messages WHERE id = ?", (number,)).fetchone()[0])
