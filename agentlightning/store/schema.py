"""The tables of a store file, as an ordered list of migrations.

JSON is text. Token ids are little-endian int32 blobs, log-probabilities little-endian
float32 blobs, so that any tool can read the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from agentlightning.errors import StoreVersionError

Migration = Callable[[sqlite3.Connection], None]

BUSY_SECONDS = 30.0
"""How long a connection waits for another process's write."""
CACHE_KIB = 16 * 1024
"""Pages a connection keeps: an index that does not fit is read again and again."""
CHECKPOINT_PAGES = 4096
"""Pages in the write-ahead log before they move to the file: one changed often moves once."""


def connect(path: Path) -> sqlite3.Connection:
    """A connection in autocommit mode that any one thread at a time may use."""
    db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA synchronous = FULL")
    db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    return db


def migrate(db: sqlite3.Connection, migrations: Sequence[Migration] | None = None) -> None:
    """Brings the file to the newest version; raises StoreVersionError if it is newer still."""
    steps = MIGRATIONS if migrations is None else migrations
    if db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        db.execute("PRAGMA journal_mode = WAL")
    db.execute("BEGIN IMMEDIATE")
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > len(steps):
            raise StoreVersionError(
                f"the store file has version {version}; this package reads up to {len(steps)}. "
                "Install the newer package that wrote it, or use another file."
            )
        for step in steps[version:]:
            step(db)
        db.execute(f"PRAGMA user_version = {len(steps)}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def _first(db: sqlite3.Connection) -> None:
    for statement in _FIRST.split(";"):
        db.execute(statement)


_FIRST = """
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout_id TEXT NOT NULL UNIQUE,
    input TEXT NOT NULL,
    group_id TEXT,
    mode TEXT NOT NULL,
    config TEXT NOT NULL,
    metadata TEXT NOT NULL,
    harness TEXT,
    state TEXT NOT NULL,
    version INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    attempt_id TEXT,
    owner TEXT,
    lease_until REAL,
    claim_request TEXT,
    outcome TEXT,
    error_message TEXT,
    reward REAL,
    k8s_job_name TEXT,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    started_at REAL,
    ended_at REAL
);
CREATE INDEX rollouts_by_state ON rollouts (state, seq);
CREATE INDEX rollouts_by_group ON rollouts (group_id);
CREATE TABLE terminals (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout INTEGER NOT NULL UNIQUE REFERENCES rollouts ON DELETE CASCADE
);
CREATE TABLE attempts (
    rollout INTEGER NOT NULL REFERENCES rollouts ON DELETE CASCADE,
    attempt_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    started_at REAL NOT NULL,
    ended_at REAL,
    outcome TEXT,
    PRIMARY KEY (rollout, attempt_id)
);
CREATE TABLE calls (
    id INTEGER PRIMARY KEY,
    call_id TEXT NOT NULL UNIQUE,
    rollout INTEGER NOT NULL REFERENCES rollouts ON DELETE CASCADE,
    attempt_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    parent INTEGER,
    parent_completion INTEGER,
    new_prompt_ids BLOB NOT NULL,
    dialect TEXT NOT NULL,
    requested_model TEXT NOT NULL,
    model TEXT NOT NULL,
    upstream TEXT NOT NULL,
    sampling TEXT NOT NULL,
    version_start INTEGER,
    version_end INTEGER,
    status TEXT NOT NULL,
    trainable INTEGER NOT NULL,
    reason TEXT,
    error TEXT,
    http_status INTEGER,
    streamed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    started_at REAL NOT NULL,
    first_byte_at REAL,
    ended_at REAL NOT NULL,
    UNIQUE (rollout, attempt_id, sequence)
);
CREATE TABLE completions (
    call INTEGER NOT NULL REFERENCES calls ON DELETE CASCADE,
    number INTEGER NOT NULL,
    token_ids BLOB NOT NULL,
    logprobs BLOB,
    finish_reason TEXT,
    spans TEXT NOT NULL,
    history_length INTEGER NOT NULL,
    history_digest BLOB,
    PRIMARY KEY (call, number)
);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    body TEXT NOT NULL
);
CREATE TABLE rollout_messages (
    rollout INTEGER NOT NULL REFERENCES rollouts ON DELETE CASCADE,
    message INTEGER NOT NULL REFERENCES messages,
    PRIMARY KEY (rollout, message)
) WITHOUT ROWID;
CREATE INDEX rollout_messages_by_message ON rollout_messages (message);
CREATE TABLE bodies (
    call INTEGER PRIMARY KEY REFERENCES calls ON DELETE CASCADE,
    request BLOB,
    skeleton INTEGER,
    list_key TEXT,
    message_ids BLOB,
    response BLOB NOT NULL
);
CREATE TABLE events (
    seq INTEGER PRIMARY KEY,
    event_id TEXT NOT NULL UNIQUE,
    rollout INTEGER NOT NULL REFERENCES rollouts ON DELETE CASCADE,
    attempt_id TEXT NOT NULL,
    event_type TEXT NOT NULL,
    data TEXT NOT NULL,
    created_at REAL NOT NULL,
    idempotency_key TEXT,
    UNIQUE (rollout, idempotency_key)
);
CREATE INDEX events_by_rollout ON events (rollout, seq);
CREATE TABLE model_servers (
    position INTEGER PRIMARY KEY,
    model TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    version INTEGER NOT NULL,
    owner TEXT
);
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)
"""

MIGRATIONS: tuple[Migration, ...] = (_first,)
